"""Algorithm 1 of the paper: learn task after task, fit FDC as they go by, evaluate.

Everything finished is on disk before the next thing starts, and what is on disk is not done again.
Of several processes all train and extract features, each its rows of every batch, and all keep the
same state; the first alone fits FDC, evaluates and writes (`fdc_jax.processes`).
"""

import math
import time
from collections.abc import Generator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from fdc_jax import calibration, devices, feature_files, learners, lockstep, processes, results
from fdc_jax.checkpoint import Checkpoints
from fdc_jax.errors import InputError, TrainingError
from fdc_jax.extraction import Extraction
from fdc_jax.files import read_json, write_json
from fdc_jax.interruption import StopRequest
from fdc_jax.learners import training
from fdc_jax.preparation import Experiment
from fdc_jax.progress import Progress
from fdc_jax.training_images import TrainingImages
from fdc_jax.views import Views
from fdc_jax.workdir import Workdir

# What is measured while a task trains; the first step of a process, which compiles, stands apart.
_TRAINING_TIME = ("images", "seconds", "compile_seconds", "input_wait_seconds")


def run_together(runs: "list[Run]") -> list[dict[str, Any]]:
    """Runs seeds of one experiment, training steps side by side, and returns their results.

    Raises:
        InputError: a step of all seeds does not fit into a device.
        TrainingError: a loss is not finite.
        Interrupted: a stop was requested; the same call in a new process goes on from there.
    """
    e = runs[0].experiment
    return lockstep.run([run.work() for run in runs], e.update, e.backbone)


class Run:
    """One seed of an experiment in one work directory.

    Args:
        experiment: what it shares with other seeds.
        seed: training seed.
        workdir: where it keeps its files.
        stop: polled in every loop.
        quiet: show nothing.
        label: starts every line on the screen.
        bar: show the progress of every step; seeds that run together need but one.
    """

    def __init__(
        self,
        experiment: Experiment,
        seed: int,
        workdir: Workdir,
        stop: StopRequest,
        quiet: bool = False,
        label: str = "",
        bar: bool = True,
    ):
        self._bar = bar
        self.experiment, self.seed, self.workdir, self.stop = experiment, seed, workdir, stop
        self._quiet, self._label = quiet, label
        self._checkpoints = Checkpoints(workdir.checkpoints, experiment.config.checkpoint.keep)
        # Training images of the current task, in the memory that test images leave.
        self._decoded = experiment.test_images.beside()
        self._images = TrainingImages(experiment, seed, self._decoded, stop.poll)
        self._views = Views(experiment, self._decoded, stop.poll)
        self._restore()

    def _restore(self) -> None:
        """Sets learner, calibrator and cursor to the newest usable checkpoint, or to the start."""
        e = self.experiment
        initial = devices.replicate(e.mesh, e.learner.initial_state(e.setup))
        self.state, self.trained, self.optimizer = initial, None, None
        self.tasks_done, self.steps_done = 0, 0
        self.training_time, self.statistics_time = dict.fromkeys(_TRAINING_TIME, 0.0), {}
        self._compiled, self._peak_in_training = False, None
        self.calibrator = self._new_calibrator()
        self.tasks_fitted = 0
        for number, cursor in self._checkpoints.cursors():
            target = {"state": initial}
            if cursor["step"]:
                _, trained = self._start(initial, cursor["tasks_done"])
                target |= {"trained": trained, "optimizer": e.update.initialise(trained)}
            tree = self._checkpoints.restore(number, devices.replicate(e.mesh, target), cursor)
            if tree is None:
                continue
            fitted = processes.on_first(partial(self._load_calibrator, cursor))
            if fitted is None:
                self._checkpoints.set_aside(number, "its calibrator is missing or damaged")
                continue
            self.state, self.tasks_fitted = tree["state"], fitted
            self.trained, self.optimizer = tree.get("trained"), tree.get("optimizer")
            self.tasks_done, self.steps_done = cursor["tasks_done"], cursor["step"]
            self.training_time = cursor["training_time"]
            self.workdir.event("resume", tasks_done=self.tasks_done, step=self.steps_done)
            break
        self.recorded = processes.on_first(self._recorded)

    def _recorded(self) -> list[int]:
        """Returns the tasks that need no evaluation, and forgets what will be measured again."""
        self.workdir.forget_after(self.tasks_fitted)
        return self.workdir.recorded()

    def _new_calibrator(self) -> calibration.FDC:
        return calibration.FDC(**self.experiment.config.fdc.to_dict())

    def _load_calibrator(self, cursor: dict[str, Any]) -> int | None:
        """Takes the calibrator that belongs to a checkpoint and returns its number of tasks."""
        calibrator = self._calibrator_of(cursor)
        if calibrator is None:
            return None
        self.calibrator = calibrator
        return calibrator.num_tasks

    def _calibrator_of(self, cursor: dict[str, Any]) -> calibration.FDC | None:
        """Returns the calibrator that belongs to a checkpoint; the last task may lack its fit."""
        tasks_done = cursor["tasks_done"]
        fitted = self.workdir.load_calibrator(tasks_done) if tasks_done else self._new_calibrator()
        if fitted is None and not cursor["step"]:
            if tasks_done == 1:
                return self._new_calibrator()
            return self.workdir.load_calibrator(tasks_done - 1)
        return fitted

    def _start(self, state: Any, task: int) -> tuple[Any, Any]:
        key = jax.random.fold_in(jax.random.key(self.seed), task)
        e = self.experiment
        started = e.learner.start(e.setup, e.backbone, state, task, key)
        # Every step reads these, so that none of them may stay on the host.
        return devices.replicate(e.mesh, jax.tree.map(jnp.asarray, started))

    def __call__(self) -> dict[str, Any]:
        """Runs whatever is not done yet and returns the results (Algorithm 1).

        Raises:
            TrainingError: a loss is not finite.
            Interrupted: a stop was requested; the same call in a new process goes on from there.
        """
        return run_together([self])[0]

    def work(self) -> Generator[lockstep.Step, lockstep.Outcome, dict[str, Any]]:
        """Does the same, but for the training steps, which it yields."""
        e = self.experiment
        total = sum(e.steps(task) for task in range(e.setup.num_tasks))
        done = sum(e.steps(task) for task in range(self.tasks_done)) + self.steps_done
        self.progress = Progress(total, done, self._quiet, self._label, self._bar)
        try:
            for task in range(e.setup.num_tasks):
                if task >= self.tasks_done:
                    yield from self._train(task)
                if task >= self.tasks_fitted:
                    self._fit(task)
                if task not in self.recorded:
                    self._evaluate(task)
        finally:
            self.progress.close()
            self._checkpoints.close()
        return processes.on_first(self._finish)

    def _train(self, task: int) -> Generator[lockstep.Step, lockstep.Outcome, None]:
        """Trains one task (line 3), from its first step or from where it was saved."""
        e, config = self.experiment, self.experiment.config
        train, images = config.train, self._images.of_task(task)
        if self.trained is None:
            state = e.learner.before_task(e.setup, e.backbone, self.state, task, images)
            self._take(state, "before_task")
        frozen, fresh = self._start(self.state, task)
        if self.trained is None:
            self.trained = fresh
            self.optimizer = devices.replicate(e.mesh, e.update.initialise(fresh))
            self.training_time = dict.fromkeys(_TRAINING_TIME, 0.0)
        self.workdir.event("training", task=task, step=self.steps_done)
        schedule = e.update.schedule or partial(training.learning_rate_factor, train.schedule)
        epochs = e.epochs(task)
        data = self._images.batches(task, epochs=epochs, start_step=self.steps_done)
        clock, waited = time.perf_counter(), 0.0
        step, first, pending = self.steps_done, self.steps_done, None
        for batch in data:
            epoch = step // data.steps_per_epoch
            rate = schedule(epoch, epochs)
            self.trained, self.optimizer, loss = yield lockstep.Step(
                (task, step),
                frozen,
                self.trained,
                self.optimizer,
                self._images.place(batch),
                rate,
            )
            if not self._compiled:
                loss.block_until_ready()
                self.training_time["compile_seconds"] += time.perf_counter() - clock
                clock, waited = time.perf_counter(), data.input_wait_seconds
                first, self._compiled = step + 1, True
            else:
                self.training_time["images"] += int(batch.weights.sum())
            # The loss of the step before is fetched while this one runs.
            if pending is not None:
                self._report(task, pending, first, clock)
            pending = (step, epoch, loss)
            step += 1
            last, stopping = step == data.num_steps, self.stop.requested()
            if not last and (stopping or step % config.checkpoint.every_steps == 0):
                self._report(task, pending, first, clock)
                self._count_time(clock, data.input_wait_seconds - waited)
                clock, waited, first = time.perf_counter(), data.input_wait_seconds, step
                pending = None
                self._save(task, step)
                self.stop.poll()
        if pending is not None:
            self._report(task, pending, first, clock)
        trained = lockstep.whole(self.trained)
        state = e.learner.after_task(e.setup, e.backbone, self.state, task, frozen, trained, images)
        self._take(state, "after_task")
        self._count_time(clock, data.input_wait_seconds - waited)
        self.trained, self.optimizer = None, None
        self._peak_in_training = devices.peak_memory()
        self._save(task + 1, 0)

    def _take(self, state: Any, question: str) -> None:
        e = self.experiment
        learners.check_state(e.config.learner.name, question, self.state, state)
        self.state = devices.replicate(e.mesh, state)

    def _check_loss(self, task: int, step: int, epoch: int, loss: Any) -> float:
        value = float(loss)
        if not math.isfinite(value):
            train = self.experiment.config.train
            raise TrainingError(
                f"the loss is {value} in task {task + 1}, epoch {epoch + 1}, step {step + 1}; "
                f"learning rates were {train.increment_learning_rate:g} (increment) and "
                f"{train.head_learning_rate:g} (head); checkpoints of before are kept"
            )
        return value

    def _report(self, task: int, pending, first: int, clock: float) -> None:
        step, epoch, loss = pending
        value = self._check_loss(task, step, epoch, loss)
        e = self.experiment
        speed = (step + 1 - first) * e.config.train.batch_size / (time.perf_counter() - clock)
        epochs = e.epochs(task)
        if (step + 1) * epochs % e.steps(task) == 0:
            self.workdir.event(
                "epoch", task=task, epoch=epoch, loss=value, images_per_second=round(speed, 1)
            )
        self.progress.step(
            f"task {task + 1}/{e.setup.num_tasks} epoch {epoch + 1}/{epochs}",
            loss=f"{value:.3f}",
            images_per_second=f"{speed:.0f}",
        )

    def _count_time(self, clock: float, waited: float) -> None:
        self.training_time["seconds"] += time.perf_counter() - clock
        self.training_time["input_wait_seconds"] += waited

    def _save(self, tasks_done: int, step: int) -> None:
        e = self.experiment
        tree = {"state": self.state}
        if step:
            tree |= {
                "trained": lockstep.whole(self.trained),
                "optimizer": lockstep.whole(self.optimizer),
            }
        number = sum(e.steps(task) for task in range(tasks_done)) + step + tasks_done
        cursor = {
            "tasks_done": tasks_done,
            "step": step,
            "training_time": self.training_time,
        }
        self._checkpoints.save(number, tree, cursor)
        self.tasks_done, self.steps_done = tasks_done, step

    def _fit(self, task: int) -> None:
        """Fits FDC on a task's training features in both views as they come (lines 4 to 12)."""
        e = self.experiment
        self.progress.stage(f"task {task + 1}/{e.setup.num_tasks} statistics")
        kernels = e.learner.encoder(e.setup, e.backbone, self.state, task + 1)
        features = self._views.training(task, kernels)
        head = self._heads(task + 1)[task]
        seconds, malformed = 0.0, None
        if processes.is_first():
            clock = time.perf_counter()
            classes = e.tasks.positions[e.tasks.tasks[task]]
            try:
                self.calibrator.fit_task(features, None, head, classes=classes)
            except InputError as error:
                malformed = error
            seconds = time.perf_counter() - clock - features.stream.seconds
        # Every process takes part in every batch, whatever becomes of the fit.
        adapted, pretrained = features.whole()
        self._views.keep(task, pretrained)

        def finish() -> None:
            if malformed is not None:
                raise malformed
            self._finish_fit(task, head, adapted, pretrained, seconds)

        processes.on_first(finish)
        self.tasks_fitted = task + 1
        self._decoded.clear()

    def _heads(self, num_tasks: int) -> list[Any]:
        """Returns the heads so far as arrays of the host, for the process that fits and scores."""
        e = self.experiment
        return devices.to_host(e.learner.heads(e.setup, self.state, num_tasks))

    def _finish_fit(
        self,
        task: int,
        head: Any,
        adapted: Extraction,
        pretrained: Extraction | None,
        seconds: float,
    ) -> None:
        e = self.experiment
        clock = time.perf_counter()
        self.calibrator.finalize()
        seconds += time.perf_counter() - clock
        if e.config.save_features:
            feature_files.write_task(
                self.workdir.features,
                task,
                adapted=adapted.features,
                labels=e.tasks.train_labels(task),
                head=head,
                pretrained=None if pretrained is None else pretrained.features,
                classes=e.tasks.positions[e.tasks.tasks[task]],
            )
        self.workdir.save_calibrator(self.calibrator, e.config.checkpoint.keep)
        self.statistics_time = {
            "adapted_extraction_seconds": adapted.seconds,
            "pretrained_extraction_seconds": 0.0 if pretrained is None else pretrained.seconds,
            "pretrained_from_cache": float(pretrained is not None and pretrained.from_cache),
            "fit_seconds": seconds,
        }
        self.workdir.event("statistics", task=task, **self.statistics_time)

    def _evaluate(self, task: int) -> None:
        """Scores the test images of all tasks so far (lines 14 to 20) and records accuracies."""
        e = self.experiment
        num_tasks = task + 1
        last = num_tasks == e.setup.num_tasks
        if not last and not e.config.evaluation.every_task:
            return
        self.progress.stage(f"task {num_tasks}/{e.setup.num_tasks} evaluation")
        seen = e.tasks.test_tasks < num_tasks
        indices = e.tasks.test_indices[seen]
        kernels = e.learner.encoder(e.setup, e.backbone, self.state, num_tasks)
        adapted, pretrained = self._views.test(indices, kernels)
        heads = self._heads(num_tasks)
        processes.on_first(lambda: self._measure(task, seen, heads, adapted, pretrained))
        self.recorded.append(task)

    def _measure(
        self,
        task: int,
        seen: Bool[np.ndarray, " n"],
        heads: list[Any],
        adapted: Extraction,
        pretrained: Float[np.ndarray, "m d"] | None,
    ) -> None:
        e = self.experiment
        num_tasks, num_images = task + 1, int(seen.sum())
        last = num_tasks == e.setup.num_tasks
        if self.calibrator.num_tasks == num_tasks:
            self.calibrator.replace_heads(heads)
        clock = time.perf_counter()
        terms = self.calibrator.terms(adapted.features, pretrained)
        score_seconds = time.perf_counter() - clock
        accuracies, predictions = results.measure(
            terms, e.tasks.test_labels[seen], e.tasks.test_tasks[seen]
        )
        if last:
            self.workdir.save_predictions(predictions)
            if e.config.save_features:
                feature_files.write_final_heads(self.workdir.features, heads)
                feature_files.write_test(
                    self.workdir.features, adapted.features, pretrained, predictions["label"]
                )
        record = {
            "task": task,
            "test_images": num_images,
            **accuracies,
            "timing": {
                "training_images": self.training_time["images"],
                "training_seconds": self.training_time["seconds"],
                "compile_seconds": self.training_time["compile_seconds"],
                "input_wait_seconds": self.training_time["input_wait_seconds"],
                **self.statistics_time,
                "test_extraction_images": num_images,
                "test_extraction_seconds": adapted.seconds,
                "score_seconds": score_seconds,
            },
            "peak_memory": {"training": self._peak_in_training, "task": devices.peak_memory()},
        }
        write_json(self.workdir.task_record(task), record)
        self.workdir.event("evaluation", **record)
        self.progress.line(results.describe(record, e.setup.num_tasks))

    def _finish(self) -> dict[str, Any]:
        """Writes the calibrator without its foreign samples, and the results."""
        e = self.experiment
        records = [
            read_json(self.workdir.task_record(task))
            for task in range(e.setup.num_tasks)
            if self.workdir.task_record(task).exists()
        ]
        self.calibrator.finalize(release=True)
        self.calibrator.save(self.workdir.folder / "calibrator.npz")
        collected = results.collect(e, self.seed, self.calibrator, records)
        write_json(self.workdir.results, collected)
        return collected
