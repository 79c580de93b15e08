"""Algorithm 1 of the paper: learn task after task, fit FDC as they go by, evaluate.

Everything finished is on disk before the next thing starts, and what is on disk is not done again.
"""

import time
from typing import Any, NamedTuple

from fdc_jax import calibration, evaluation
from fdc_jax.errors import StopRequest
from fdc_jax.features.feature_files import TaskFeatures
from fdc_jax.machine import devices
from fdc_jax.machine.checkpoint import Checkpoints
from fdc_jax.run.progress import Progress, StepLog
from fdc_jax.run.setup import Experiment, RunImages
from fdc_jax.run.store import Store


def run(
    e: Experiment,
    seed: int,
    store: Store,
    checkpoints: Checkpoints,
    stop: StopRequest,
    progress: Progress,
) -> dict[str, Any]:
    """Does what is left of one seed and returns its results (Algorithm 1).

    Raises:
        InputError: the work directory lacks what it would need to go on.
        TrainingError: a loss is not finite.
        Interrupted: a stop was requested; the same call in a new process goes on from there.
    """
    learner, backbone, num_tasks = e.learner, e.backbone, e.num_tasks
    images = RunImages(e, seed, stop.poll)
    saved = _resume(e, seed, store, checkpoints)
    state, fdc, log = saved.state, saved.fdc, StepLog(e.config, store.event, progress, saved.timing)
    # The slots of a checkpoint.
    planned = {"classes_per_task": e.setup.classes_per_task}
    progress.start(e.steps_before(num_tasks), e.steps_before(saved.tasks_done) + saved.step)

    for task in range(num_tasks):
        took: dict[str, float] = {}
        # Line 3: learn the increment and the head of the task.
        if task >= saved.tasks_done:
            first = saved.step if task == saved.tasks_done else 0
            if task and e.config.fdc.transport and store.previous_features(task) is None:
                progress.stage(f"task {task + 1}/{num_tasks} previous encoder")
                kernels = learner.encoder(backbone, state, task)
                before = images.previous_features(task, kernels)
                store.save_previous_features(task, before.features)
                took["previous_extraction_seconds"] = before.seconds
            around = images.of_task(task)
            if first == 0:
                new = learner.before_task(backbone, state, task, around)
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
                    cursor = log.cursor(task, step + 1) | planned
                    checkpoints.save(e.place(task, step + 1), tree, cursor)
                    stop.poll()
            log.look()
            new = learner.after_task(backbone, state, task, frozen, trained, around)
            state = e.accept(state, new, "after_task")
            log.end()
            cursor = log.cursor(task + 1, 0) | planned
            checkpoints.save(e.place(task + 1, 0), {"state": state}, cursor)
        # The training of earlier tasks was timed by an earlier process.
        first_timed = saved.tasks_done - (saved.step == 0)
        timing = log.timing if task >= first_timed else {}

        # Lines 4 to 13: fit FDC on the features of the task's images in both views.
        if task >= fdc.num_tasks:
            progress.stage(f"task {task + 1}/{num_tasks} statistics")
            kept = store.task_features(task) if task < saved.tasks_done else None
            if kept is None:
                kept, seconds = _extract(e, task, state, images)
                took |= seconds
                if task and e.config.fdc.transport:
                    kept = kept._replace(previous=store.previous_features(task))
                if e.config.save_features:
                    store.save_task_features(task, kept)
            clock = time.perf_counter()
            kept.fit(fdc)
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
    fdc.finalize(release=True)
    outcome = evaluation.collect(e, seed, fdc, store.records())
    store.finish(fdc, outcome)
    return outcome


class _Saved(NamedTuple):
    """Where the work in a directory ends."""

    state: Any  # of the learner after `tasks_done` tasks
    fdc: Any  # the calibrator to go on with; tasks that it lacks are fitted again
    tasks_done: int = 0
    step: int = 0  # steps of the next task
    timing: dict[str, float] | None = None  # of that task's training, or of the last one's
    trained: Any = None  # leaves after these steps, None for none
    optimizer: Any = None


def _resume(e: Experiment, seed: int, store: Store, checkpoints: Checkpoints) -> _Saved:
    """Returns the newest state that all else in the work directory goes with, or the first one."""
    for number, cursor, tree in e.checkpoints(checkpoints, seed):
        tasks_done, step = cursor["tasks_done"], cursor["step"]
        due = [task for task in range(tasks_done) if e.evaluates_after(task)]
        heads = e.heads(tree["state"], tasks_done)
        fdc = store.calibrator(tasks_done, step, due, heads)
        if fdc is None:
            checkpoints.set_aside(number, "its calibrator is missing or damaged")
            continue
        store.go_on(tasks_done)
        store.event("resume", tasks_done=tasks_done, step=step)
        return _Saved(tree.pop("state"), fdc, tasks_done, step, cursor["training_time"], **tree)
    store.go_on(0)
    return _Saved(e.first_state(), calibration.from_settings(e.config.fdc.to_dict()))


def _extract(
    e: Experiment, task: int, state: Any, images: RunImages
) -> tuple[TaskFeatures, dict[str, float]]:
    """Returns what FDC is fitted on, and the time that it took (Algorithm 1, line 4)."""
    kernels = e.learner.encoder(e.backbone, state, task + 1)
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
    e: Experiment, task: int, state: Any, fdc: Any, images: RunImages, store: Store
) -> dict[str, Any]:
    """Returns the accuracies after a task; after the last one, keeps features and predictions."""
    seen = e.tasks.test_tasks <= task
    kernels = e.learner.encoder(e.backbone, state, task + 1)
    heads = e.heads(state, task + 1)
    adapted, pretrained = images.test_features(int(seen.sum()), kernels)
    fdc.replace_heads(heads)
    clock = time.perf_counter()
    terms = fdc.terms(adapted.features, pretrained)
    seconds = time.perf_counter() - clock
    accuracies, predictions = evaluation.measure(
        terms, e.tasks.test_labels[seen], e.tasks.test_tasks[seen]
    )
    if task + 1 == e.num_tasks:
        store.save_predictions(predictions, e.tasks.class_names)
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
