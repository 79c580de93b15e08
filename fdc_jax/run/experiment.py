"""Algorithm 1 of the paper: learn task after task, fit calibrators as they go by, evaluate."""

import time
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from fdc_jax import calibration, evaluation
from fdc_jax.calibration import Scores
from fdc_jax.errors import StopRequest
from fdc_jax.features.feature_files import TaskFeatures
from fdc_jax.machine import devices
from fdc_jax.machine.checkpoint import Checkpoints
from fdc_jax.run import configuration, results
from fdc_jax.run import setup as setups
from fdc_jax.run.images import RunImages
from fdc_jax.run.progress import Progress, StepLog
from fdc_jax.run.setup import Setup
from fdc_jax.run.store import Store

Seconds = dict[str, float]


class Work(NamedTuple):
    """Where the work of one seed goes, and who watches it."""

    store: Store
    checkpoints: Checkpoints
    images: RunImages
    log: StepLog
    stop: StopRequest


class Begun(NamedTuple):
    """Where the work in a directory ends: some tasks are done, and perhaps steps of the next."""

    state: Any  # of the learner
    calibrators: dict[str, Any]
    tasks_done: int = 0
    trained_tasks: int = 0  # one more than are done, if only its calibrators were lacking
    step: int = 0  # of the task after
    timing: Seconds | None = None  # of the training of the task begun last
    trained: Any = None  # leaves after these steps
    optimizer: Any = None


def run(
    setup: Setup,
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
    begun = resume(setup, seed, store, checkpoints)
    state, calibrators = begun.state, begun.calibrators
    log = StepLog(setup.config, store.event, progress, begun.timing)
    work = Work(store, checkpoints, RunImages(setup, seed, stop.poll), log, stop)
    num_tasks = len(setup.tasks.tasks)
    progress.start(setup.first_steps[-1], setup.first_steps[begun.trained_tasks] + begun.step)
    for task in range(begun.tasks_done, num_tasks):
        name, took = f"task {task + 1}/{num_tasks}", {"previous_extraction_seconds": 0.0}
        if task >= begun.trained_tasks:
            progress.stage(f"{name} training")
            state, took = train(setup, seed, task, state, begun, work)  # line 3
        progress.stage(f"{name} statistics")
        features, extracted = extract(setup, task, state, work)  # line 4
        took |= extracted | fit(calibrators, features)  # lines 5 to 13
        store.keep(task, calibrators, features)
        store.event("statistics", task=task, **took)
        if setup.evaluated[task]:
            progress.stage(f"{name} evaluation")
            record = evaluate(setup, task, state, calibrators, work)  # lines 14 to 20
            record["timing"] = log.timing | took | record["timing"]
            store.record(record)
            progress.line(evaluation.describe(record, num_tasks))
    for calibrator in calibrators.values():
        calibrator.replace_heads(setups.heads(setup.learner, state, num_tasks))
        calibrator.finalize(release=True)
        if calibrator.note:
            progress.line(calibrator.note)
    found = results.collect(setup, seed, calibrators, store.records())
    store.finish(calibrators, found)
    return found


def resume(setup: Setup, seed: int, store: Store, checkpoints: Checkpoints) -> Begun:
    """Returns the newest state that all else in the work directory goes with, or the first one."""
    for number, cursor, tree in setups.checkpoints(setup, checkpoints, seed):
        trained, step = cursor["tasks_done"], cursor["step"]
        done = trained
        if not step and trained and not _is_done(setup, trained - 1, store):
            done -= 1  # Its encoder is at hand.
        if done and not store.has_fitted(done):
            checkpoints.set_aside(number, "calibrators of its tasks are missing")
            continue
        store.go_on(done)
        store.event("resume", tasks_done=done, step=step)
        calibrators = store.calibrators(done) if done else _new_calibrators(setup)
        timing = cursor["training_time"]
        return Begun(tree.pop("state"), calibrators, done, trained, step, timing, **tree)
    store.go_on(0)
    return Begun(setups.first_state(setup.learner), _new_calibrators(setup))


def _is_done(setup: Setup, task: int, store: Store) -> bool:
    """Tells whether nothing but the training of later tasks is left to do."""
    return store.has_fitted(task + 1) and (store.recorded(task) or not setup.evaluated[task])


def _new_calibrators(setup: Setup) -> dict[str, Any]:
    names, settings = configuration.calibrators(setup.config), setup.config.fdc.to_dict()
    return {name: calibration.make(name, **settings) for name in names}


def train(
    setup: Setup, seed: int, task: int, state: Any, begun: Begun, work: Work
) -> tuple[Any, Seconds]:
    """Learns a task, or what is left of it (line 3).

    Returns:
        The learner's state, and the time of extracting E_{t-1}(D_t) for calibrators that follow the
        encoder.
    """
    learner, update, backbone = setup.learner, setup.update, setup.backbone
    mesh, every = learner.setup.mesh, setup.config.checkpoint.every_steps
    checkpoints, images, log, stop = work.checkpoints, work.images, work.log, work.stop
    first = begun.step if task == begun.trained_tasks else 0
    epochs = setup.epochs[task]
    planned = {"classes_per_task": learner.setup.classes_per_task}  # the slots of a checkpoint

    def save(tasks_done: int, step: int, **tree: Any) -> None:
        number = setup.first_steps[tasks_done] + step + tasks_done
        checkpoints.save(number, tree, log.cursor(tasks_done, step) | planned)

    follows = any(each.reads_previous for each in begun.calibrators.values())
    extracted = 0.0
    if task and follows and work.store.previous(task) is None:
        previous = images.previous_features(task, learner.encoder(backbone, state, task))
        work.store.keep_previous(task, previous.features)
        extracted = previous.seconds
    around = images.of_task(task)
    if first == 0:
        new = learner.before_task(backbone, state, task, around)
        state = setups.accept(learner, state, new, "before_task")
    frozen, trained, optimizer = setups.start_task(learner, update, backbone, state, task, seed)
    if first > 0:
        trained, optimizer = begun.trained, begun.optimizer
    batches = images.batches(task, epochs, start_step=first)
    log.begin(task, len(setup.tasks.tasks), epochs, first, batches)
    for step, batch in enumerate(batches, start=first):
        rate = setup.schedule(step // batches.steps_per_epoch, epochs)
        placed = devices.split(mesh, batch)
        trained, optimizer, loss = update.step(backbone, frozen, trained, optimizer, placed, rate)
        log.step(step, loss, batch)
        due = stop.requested() or (step + 1) % every == 0
        if due and step + 1 < batches.num_steps:
            log.pause()
            save(task, step + 1, state=state, trained=trained, optimizer=optimizer)
            stop.poll()
    log.look()
    new = learner.after_task(backbone, state, task, frozen, trained, around)
    state = setups.accept(learner, state, new, "after_task")
    log.end()
    save(task + 1, 0, state=state)
    return state, {"previous_extraction_seconds": extracted}


def extract(setup: Setup, task: int, state: Any, work: Work) -> tuple[TaskFeatures, Seconds]:
    """Returns what calibrators are fitted on, and the time that it took (line 4)."""
    learner, tasks = setup.learner, setup.tasks
    encoder = learner.encoder(setup.backbone, state, task + 1)
    views = work.images.train_features(task, encoder)
    adapted, pretrained = views.arrays
    features = TaskFeatures(
        adapted=adapted,
        pretrained=pretrained,
        labels=tasks.train_labels(task),
        head=setups.heads(learner, state, task + 1)[task],
        classes=tasks.positions[tasks.tasks[task]],
        previous=work.store.previous(task),
    )
    of_e0 = views.pretrained
    return features, {
        "adapted_extraction_seconds": views.adapted.seconds,
        "pretrained_extraction_seconds": 0.0 if of_e0 is None else of_e0.seconds,
        "pretrained_from_cache": float(of_e0 is not None and of_e0.from_cache),
    }


def fit(calibrators: dict[str, Any], features: TaskFeatures) -> Seconds:
    """Fits every calibrator on the next task (lines 5 to 13), and returns the time that FDC took.

    Without FDC it is the time of all.
    """
    took = {}
    for name, calibrator in calibrators.items():
        clock = time.perf_counter()
        features.fit(calibrator)
        calibrator.finalize()
        took[name] = time.perf_counter() - clock
    return {"fit_seconds": took.get("fdc", sum(took.values()))}


def evaluate(
    setup: Setup, task: int, state: Any, calibrators: dict[str, Any], work: Work
) -> dict[str, Any]:
    """Returns the accuracies after a task (lines 14 to 20); the last one's predictions are kept."""
    learner, tasks, store = setup.learner, setup.tasks, work.store
    seen = tasks.test_tasks <= task
    labels, true_tasks = tasks.test_labels[seen], tasks.test_tasks[seen]
    encoder = learner.encoder(setup.backbone, state, task + 1)
    heads = setups.heads(learner, state, task + 1)
    views = work.images.test_features(int(seen.sum()), encoder)
    scores, components, took = score(calibrators, heads, *views.arrays)
    if task + 1 == len(tasks.tasks):
        columns = evaluation.predictions(scores, labels, true_tasks)
        store.keep_predictions(columns, tasks.class_names)
        store.keep_test(*views.arrays, columns["label"], heads)
    return {
        "task": task,
        "test_images": len(labels),
        **evaluation.measure(scores, labels, true_tasks),
        "components": {
            name: evaluation.accuracy(labels, each.label) for name, each in components.items()
        },
        "timing": {
            "test_extraction_images": len(labels),
            "test_extraction_seconds": views.adapted.seconds,
            **took,
        },
        "peak_memory": {"training": work.log.peak_memory, "task": devices.peak_memory()},
    }


def score(
    calibrators: dict[str, Any],
    heads: list[Any],
    adapted: Float[np.ndarray, "n d"],
    pretrained: Float[np.ndarray, "n e"] | None,
) -> tuple[dict[str, Scores], dict[str, Scores], Seconds]:
    """Returns the scores of every calibrator, of FDC's components, and the time as of `fit`."""
    scores, components, took = {}, {}, {}
    for name, calibrator in calibrators.items():
        calibrator.replace_heads(heads)
        clock = time.perf_counter()
        if name == "fdc":
            components = calibrator.components(adapted, pretrained)
            scores |= {"raw": components["raw"], "fdc": components["full"]}
        else:
            scores[name] = calibrator.score(adapted, pretrained)
        took[name] = time.perf_counter() - clock
    return scores, components, {"score_seconds": took.get("fdc", sum(took.values()))}
