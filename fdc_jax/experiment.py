"""Algorithm 1 of the paper: learn task after task, fit FDC as they go by, evaluate.

Everything finished is on disk before the next thing starts, and what is on disk is not done again.
"""

import functools
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from fdc_jax import calibration, configuration, devices, evaluation, learners, processes
from fdc_jax.checkpoint import Checkpoints
from fdc_jax.configuration import Config
from fdc_jax.data import batches, benchmarks, dataset, task_stream
from fdc_jax.errors import InputError
from fdc_jax.extraction import Extractor, FeatureCache, RunImages
from fdc_jax.feature_files import TaskFeatures
from fdc_jax.files import check_writable_folder
from fdc_jax.heads import FunctionHead
from fdc_jax.interruption import StopRequest
from fdc_jax.learners import training
from fdc_jax.model import vit, weights
from fdc_jax.progress import Progress, StepLog

if TYPE_CHECKING:
    from fdc_jax.store import Store


def run(
    e: "Experiment",
    seed: int,
    store: "Store",
    checkpoints: Checkpoints,
    stop: StopRequest,
    progress: Progress,
) -> dict[str, Any]:
    """Does what is left of one seed and returns its results (Algorithm 1).

    Args:
        e: what it shares with other seeds.
        seed: training seed.
        store: its work directory.
        checkpoints: those there.
        stop: polled in every loop.
        progress: the screen.

    Raises:
        InputError: the work directory lacks what it would need to go on.
        TrainingError: a loss is not finite.
        Interrupted: a stop was requested; the same call in a new process goes on from there.
    """
    learner, setup, backbone, num_tasks = e.learner, e.setup, e.backbone, e.setup.num_tasks
    images = RunImages(e, seed, stop.poll)
    saved = _resume(e, seed, store, checkpoints)
    state, fdc, log = saved.state, saved.fdc, StepLog(e.config, store, progress, saved.timing)
    progress.start(e.steps_before(num_tasks), e.steps_before(saved.tasks_done) + saved.step)

    for task in range(num_tasks):
        # Line 3: learn the increment and the head of the task.
        if task >= saved.tasks_done:
            first = saved.step if task == saved.tasks_done else 0
            around = images.of_task(task)
            if first == 0:
                new = learner.before_task(setup, backbone, state, task, around)
                state = e.accept(state, new, "before_task")
            frozen, trained, optimizer = e.start(state, task, seed)
            if first > 0:
                trained, optimizer = saved.trained, saved.optimizer
            epochs = e.epochs(task)
            stream = images.batches(task, epochs, start_step=first)
            log.begin(task, num_tasks, epochs, first, stream)
            for step, batch in enumerate(stream, start=first):
                rate = e.rate(step // stream.steps_per_epoch, epochs)
                trained, optimizer, loss = e.update.step(
                    backbone, frozen, trained, optimizer, devices.split(e.mesh, batch), rate
                )
                log.step(step, loss, batch)
                due = stop.requested() or (step + 1) % e.config.checkpoint.every_steps == 0
                if due and step + 1 < stream.num_steps:
                    log.pause()
                    tree = {"state": state, "trained": trained, "optimizer": optimizer}
                    checkpoints.save(e.place(task, step + 1), tree, log.cursor(task, step + 1))
                    stop.poll()
            log.look()
            new = learner.after_task(setup, backbone, state, task, frozen, trained, around)
            state = e.accept(state, new, "after_task")
            log.end()
            checkpoints.save(e.place(task + 1, 0), {"state": state}, log.cursor(task + 1, 0))
        # The training of earlier tasks was timed by an earlier process.
        first_timed = saved.tasks_done - (saved.step == 0)
        timing = log.timing if task >= first_timed else {}

        # Lines 4 to 13: fit FDC on the features of the task's images in both views.
        if task >= fdc.num_tasks:
            progress.stage(f"task {task + 1}/{num_tasks} statistics")
            kept, took = store.task_features(task) if task < saved.tasks_done else None, {}
            if kept is None:
                kept, took = _extract(e, task, state, images)
                if e.config.save_features:
                    store.save_task_features(task, kept)
            clock = time.perf_counter()
            fdc.fit_task(kept.adapted, kept.labels, kept.head, kept.pretrained, kept.classes)
            fdc.finalize()
            took["fit_seconds"] = time.perf_counter() - clock
            store.save_calibrator(fdc, e.config.checkpoint.keep)
            store.event("statistics", task=task, **took)
            timing |= took

        # Lines 14 to 20: score the test images of all tasks so far.
        if e.evaluates_after(task) and not store.recorded(task):
            progress.stage(f"task {task + 1}/{num_tasks} evaluation")
            record = _evaluate(e, task, state, fdc, images, store)
            record["timing"] = timing | record["timing"]
            record["peak_memory"] = {"training": log.peak_memory, "task": devices.peak_memory()}
            store.record(record)
            progress.line(evaluation.describe(record, num_tasks))

    fdc.replace_heads(e.heads(state, num_tasks))
    return store.finish(e, seed, fdc)


class _Saved(NamedTuple):
    """Where the work in a directory ends."""

    state: Any  # of the learner after `tasks_done` tasks
    fdc: Any  # the calibrator to go on with; tasks that it lacks are fitted again
    tasks_done: int = 0
    step: int = 0  # steps of the next task
    timing: dict[str, float] | None = None  # of that task's training, or of the last one's
    trained: Any = None  # leaves after these steps, None for none
    optimizer: Any = None


def _resume(e: "Experiment", seed: int, store: "Store", checkpoints: Checkpoints) -> _Saved:
    """Returns the newest state that all else in the work directory goes with, or the first one."""
    for number, cursor in checkpoints.cursors():
        tasks_done, step = cursor["tasks_done"], cursor["step"]
        tree = checkpoints.restore(number, e.checkpoint(tasks_done, step, seed))
        if tree is None:
            continue
        fdc = store.calibrator(e, tasks_done, step)
        if fdc is None:
            checkpoints.set_aside(number, "its calibrator is missing or damaged")
            continue
        store.forget_after(tasks_done)
        store.event("resume", tasks_done=tasks_done, step=step)
        return _Saved(tree.pop("state"), fdc, tasks_done, step, cursor["training_time"], **tree)
    store.restart()
    return _Saved(e.checkpoint(0, 0, seed)["state"], e.new_calibrator())


def _extract(
    e: "Experiment", task: int, state: Any, images: RunImages
) -> tuple[TaskFeatures, dict[str, float]]:
    """Returns what FDC is fitted on, and the time that it took (Algorithm 1, line 4)."""
    kernels = e.learner.encoder(e.setup, e.backbone, state, task + 1)
    adapted, pretrained = images.train_features(task, kernels)
    features = TaskFeatures(
        adapted=adapted.features,
        pretrained=None if pretrained is None else pretrained.features,
        labels=e.tasks.train_labels(task),
        head=e.heads(state, task + 1)[task],
        classes=e.tasks.positions[e.tasks.tasks[task]],
    )
    return features, {
        "adapted_extraction_seconds": adapted.seconds,
        "pretrained_extraction_seconds": 0.0 if pretrained is None else pretrained.seconds,
        "pretrained_from_cache": float(pretrained is not None and pretrained.from_cache),
    }


def _evaluate(
    e: "Experiment", task: int, state: Any, fdc: Any, images: RunImages, store: "Store"
) -> dict[str, Any]:
    """Returns the accuracies after a task; after the last one, keeps features and predictions."""
    seen = e.tasks.test_tasks <= task
    kernels = e.learner.encoder(e.setup, e.backbone, state, task + 1)
    heads = e.heads(state, task + 1)
    adapted, pretrained = images.test_features(int(seen.sum()), kernels)
    fdc.replace_heads(heads)
    clock = time.perf_counter()
    terms = fdc.terms(adapted.features, pretrained)
    seconds = time.perf_counter() - clock
    accuracies, predictions = evaluation.measure(
        terms, e.tasks.test_labels[seen], e.tasks.test_tasks[seen]
    )
    if task + 1 == e.setup.num_tasks:
        store.save_predictions(predictions)
        if e.config.save_features:
            store.save_test_features(adapted.features, pretrained, predictions["label"], heads)
    return {
        "task": task,
        "test_images": len(adapted.features),
        **accuracies,
        "timing": {
            "test_extraction_images": len(adapted.features),
            "test_extraction_seconds": adapted.seconds,
            "score_seconds": seconds,
        },
    }


class Experiment:
    """What the seeds of one configuration share; checked before any work.

    Args:
        config: the configuration.
        quiet: show no download.
        classes_per_task: number of classes of each task, where data need not be at hand.

    Raises:
        InputError: configuration, data or weights are not as expected.
    """

    def __init__(
        self, config: Config, quiet: bool = False, classes_per_task: tuple[int, ...] | None = None
    ):
        configuration.validate(config)
        self.config, encoder = config, config.encoder
        self._benchmark = benchmarks.find(config.benchmark)
        self.learner = learners.find(config.learner.name)
        size, data = encoder.image_size, config.data
        model = vit.build(
            encoder.variant, size, data.input_range, config.precision, encoder.attention
        )
        _check_memory(config)
        cache = Path(config.cache_dir).expanduser() if config.cache_dir else weights.cache_folder()
        if config.cache_dir:
            check_writable_folder("config.cache_dir", cache)
        self._cache = cache
        devices.use_compilation_cache(cache / "compiled")
        known = classes_per_task is not None
        classes_per_task = classes_per_task or self.tasks.classes_per_task
        wanted = encoder.weights, encoder.variant, cache, not quiet
        # A download is the first process's alone where all share a cache.
        processes.on_first(lambda: str(weights.locate(*wanted)))()
        path = weights.locate(*wanted)
        self.pretrained = weights.load(path, encoder.variant, size)
        self.setup = training.Setup(model, classes_per_task, config)
        self.update = self.learner.update(self.setup)
        self.mesh = devices.data_mesh()
        self.backbone = devices.replicate(self.mesh, self.pretrained.params)
        self.extract = Extractor(model, self.mesh)
        self.test_images = batches.ByteCache(int(data.cache_gib * 2**30))
        if not known:
            self._check_calibrator()

    def _check_calibrator(self) -> None:
        """Refuses what FDC would refuse after a training."""
        present = [len(set(self.tasks.train.labels[rows])) for rows in self.tasks.train_indices]
        head = self.heads(self.learner.initial_state(self.setup), 1)[0]
        is_function = isinstance(head, FunctionHead)
        try:
            calibration.check(self.config.fdc.to_dict(), present, is_function)
        except InputError as error:
            raise InputError(f"config.fdc.{error}") from error
        if is_function and self.config.save_features:
            raise InputError(
                f"config.save_features: expected False, as the heads of {self.config.learner.name} "
                "are functions, which no file can hold"
            )

    @functools.cached_property
    def tasks(self) -> task_stream.TaskStream:
        """The images, divided into tasks."""
        config, folder = self.config, dataset.data_folder(self.config.data.dir)
        splits = [
            dataset.open_dataset(config.benchmark, split, folder, self._cache)
            for split in ("train", "test")
        ]
        return task_stream.build(
            self._benchmark,
            *splits,
            config.class_order_seed,
            config.classes_per_task,
            config.data.train_per_class,
            config.data.test_per_class,
        )

    @functools.cached_property
    def pretrained_features(self) -> FeatureCache:
        """Features of E_0, which depend on nothing else than these."""
        config = self.config
        depend_on = {
            "weights": self.pretrained.sha256,
            "train": self.tasks.train.checksum,
            "test": self.tasks.test.checksum,
            "variant": config.encoder.variant,
            "image_size": config.encoder.image_size,
            "input_range": config.data.input_range,
            "precision": config.precision,
            "attention": config.encoder.attention,
            "batch_size": config.evaluation.batch_size,
            "devices": devices.describe(),
            "jax": jax.__version__,
        }
        return FeatureCache(self._cache / "features", depend_on)

    @property
    def checksums(self) -> dict[str, str]:
        """What a run depends on besides its configuration, by name."""
        return {
            "weights sha256": self.pretrained.sha256,
            "training images sha256": self.tasks.train.checksum,
            "test images sha256": self.tasks.test.checksum,
        }

    @property
    def uses_pretrained(self) -> bool:
        """Whether FDC has a pretrained view."""
        return self.config.fdc.pretrained_view_weight > 0

    @property
    def trained_parameters(self) -> int:
        """Number of parameters that a task trains."""

        def start(backbone):
            state = self.learner.initial_state(self.setup)
            return self.learner.start(self.setup, backbone, state, 0, jax.random.key(0))

        _, trained = jax.eval_shape(start, self.backbone)
        return sum(leaf.size for leaf in jax.tree.leaves(trained))

    def new_calibrator(self) -> Any:
        """Returns FDC before its first task."""
        return calibration.from_settings(self.config.fdc.to_dict())

    def evaluates_after(self, task: int) -> bool:
        """Tells whether test images are scored after a task."""
        return self.config.evaluation.every_task or task + 1 == self.setup.num_tasks

    def epochs(self, task: int) -> int:
        """Passes over the images of one task."""
        train = self.config.train
        return train.first_epochs if task == 0 and train.first_epochs else train.epochs

    def steps_before(self, task: int) -> int:
        """Training steps of all tasks before one."""
        size = self.config.train.batch_size
        counts = [len(indices) for indices in self.tasks.train_indices[:task]]
        return sum(self.epochs(t) * -(-count // size) for t, count in enumerate(counts))

    def place(self, tasks_done: int, step: int) -> int:
        """Returns the number of a checkpoint after whole tasks and steps of the next one."""
        return self.steps_before(tasks_done) + step + tasks_done

    def rate(self, epoch: int, epochs: int) -> Any:
        """Returns the factor on the learning rates in an epoch, counted from 0."""
        if self.update.schedule is not None:
            return self.update.schedule(epoch, epochs)
        return training.learning_rate_factor(self.config.train.schedule, epoch, epochs)

    def start(self, state: Any, task: int, seed: int) -> tuple[Any, Any, Any]:
        """Returns what stays frozen in a task, what is trained, and the optimiser's state."""
        key = jax.random.fold_in(jax.random.key(seed), task)
        started = self.learner.start(self.setup, self.backbone, state, task, key)
        # Every step reads these, so that none of them may stay on the host.
        frozen, trained = devices.replicate(self.mesh, jax.tree.map(jnp.asarray, started))
        return frozen, trained, devices.replicate(self.mesh, self.update.initialise(trained))

    def accept(self, state: Any, new: Any, question: str) -> Any:
        """Returns a learner's new state on the devices, if it is of the form of the old one."""
        learners.check_state(self.config.learner.name, question, state, new)
        return devices.replicate(self.mesh, new)

    def heads(self, state: Any, num_tasks: int) -> list[Any]:
        """Returns the heads of the first tasks as arrays of the host."""
        return devices.to_host(self.learner.heads(self.setup, state, num_tasks))

    def checkpoint(self, tasks_done: int, step: int, seed: int) -> dict[str, Any]:
        """Returns a tree of the form of a checkpoint; its state is that before the first task."""
        state = self.learner.initial_state(self.setup)
        tree = {"state": devices.replicate(self.mesh, state)}
        if step:
            _, tree["trained"], tree["optimizer"] = self.start(state, tasks_done, seed)
        return tree

    def evaluation_batches(
        self, source, indices, labels=None, **caches: batches.ByteCache
    ) -> batches.EvaluationBatches:
        """Images in evaluation preprocessing, with the labels of the source unless others come."""
        return batches.EvaluationBatches(
            source,
            indices,
            labels,
            self.config.evaluation.batch_size,
            image_size=self.config.encoder.image_size,
            workers=self.config.data.workers or None,
            own_rows=devices.own_rows(self.mesh, self.config.evaluation.batch_size),
            **caches,
        )


def prepare(config: Config, quiet: bool = False) -> Experiment:
    """Checks configuration, data and weights, on all processes, and builds what all seeds share.

    Raises:
        InputError: something is not as expected; no work has been done then.
    """
    return processes.together(lambda: Experiment(config, quiet))


def _check_memory(config: Config) -> None:
    """Refuses batches of images that this machine cannot hold."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    image = 3 * config.encoder.image_size**2
    for section in ("train", "evaluation"):
        size = config[section].batch_size
        if size * image > memory:
            raise InputError(
                f"config.{section}.batch_size: expected batches that fit into memory, found "
                f"{size:,} images of {size * image / 2**30:.0f} GiB with {memory / 2**30:.0f} GiB "
                "here"
            )
