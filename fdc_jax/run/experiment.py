"""Algorithm 1 of the paper: learns task after task, fits calibrators after each, and evaluates."""

import time
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from msgspec import structs

from fdc_jax import calibration, evaluation
from fdc_jax.calibration import METHODS, Scores, familiarity
from fdc_jax.errors import StopRequest
from fdc_jax.features.feature_files import TaskFeatures
from fdc_jax.machine import devices
from fdc_jax.machine.checkpoint import Checkpoints
from fdc_jax.run import records
from fdc_jax.run import setup as setups
from fdc_jax.run.images import RunImages
from fdc_jax.run.progress import Progress, StepLog
from fdc_jax.run.setup import Setup
from fdc_jax.run.store import Store

Seconds = dict[str, float]


class Work(NamedTuple):
    """The work on one seed: set-up, files, images and observers."""

    setup: Setup
    seed: int
    store: Store
    checkpoints: Checkpoints
    images: RunImages
    log: StepLog
    progress: Progress
    stop: StopRequest


class ResumePoint(NamedTuple):
    """The point that an earlier process reached."""

    state: Any  # the learner's
    calibrators: dict[str, Any]  # by name
    tasks_done: int = 0  # number of tasks that are trained and fitted
    trained_tasks: int = 0  # number of trained tasks; one more if the last one is not fitted
    step: int = 0  # number of steps of the next task
    timing: Seconds | None = None  # of the training of the last task, by kind
    trained: Any = None  # the trained leaves after these steps
    optimizer: Any = None  # the optimiser's state after these steps


def run(work: Work, point: ResumePoint) -> dict[str, Any]:
    """Finishes one seed from a resume point, and returns its calibrators (Algorithm 1).

    Raises:
        TrainingError: a loss is not finite.
        Interrupted: a stop was requested; the same call in a new process resumes.
    """
    setup, learner, store = work.setup, work.setup.learner, work.store
    state, calibrators, num_tasks = point.state, point.calibrators, len(work.setup.tasks.tasks)
    for task in range(point.tasks_done, num_tasks):
        timing, cpu_start = {"previous_extraction_seconds": 0.0}, time.process_time()
        if task >= point.trained_tasks:
            if task and learner.trains and any(c.reads_previous for c in calibrators.values()):
                timing = keep_previous(work, task, learner.encoder(setup.backbone, state, task))
            state = train(work, task, state, point)  # line 3
        encoder = learner.encoder(setup.backbone, state, task + 1)
        heads = setups.heads(learner, state, task + 1)
        peak = devices.peak_memory()
        features, extracted = extract(work, task, encoder, heads[task])  # line 4
        memory: dict[str, Any] = {"extraction": devices.peak_rise(peak)}
        same_encoder = task > 0 and not learner.trains  # E_{t-1} is E_t.
        complete = features._replace(previous=features.adapted) if same_encoder else features
        fitted, memory["fit"] = fit(calibrators, complete)  # lines 5 to 13
        timing |= extracted | fitted
        store.keep(task, calibrators, features)
        store.event("statistics", task=task, **timing)
        if setup.evaluated[task]:
            record = evaluate(work, task, encoder, heads, calibrators)  # lines 14 to 20
            timing |= work.log.timing | {"processor_seconds": time.process_time() - cpu_start}
            record.timing = structs.replace(record.timing, **timing)
            record.peak_memory = records.Memory(training=work.log.peak_memory, **memory)
            store.record(record)
            work.progress.line(evaluation.describe(record, task, num_tasks))
    for calibrator in calibrators.values():
        calibrator.replace_heads(setups.heads(learner, state, num_tasks))
        calibrator.finalize(release=True)
        if calibrator.note:
            work.progress.line(calibrator.note)
    return calibrators


def resume(setup: Setup, seed: int, store: Store, checkpoints: Checkpoints) -> ResumePoint:
    """Returns the newest checkpoint with its calibrators, or the state before the first task."""
    settings = structs.asdict(setup.config.fdc)
    names = setup.config.calibrator_names
    new = {name: calibration.make(name, **settings) for name in names}
    for calibrator in new.values():
        calibrator.doubts = ""  # In a run, head rows and labels cannot be misaligned.
    for number, cursor, tree in setups.checkpoints(setup, checkpoints, seed):
        trained, step = cursor["tasks_done"], cursor["step"]
        # A checkpoint at the end of a task has its encoder: fit and evaluation can be repeated.
        complete = store.has_fitted(trained) and (
            trained == 0 or store.recorded(trained - 1) or not setup.evaluated[trained - 1]
        )
        done = trained if step or complete else trained - 1
        if done and not store.has_fitted(done):
            checkpoints.set_aside(number, "calibrators of its tasks are missing")
            continue
        store.forget_after(done)
        store.event("resume", tasks_done=done, step=step)
        calibrators, timing = store.calibrators(done) if done else new, cursor["training_time"]
        return ResumePoint(tree.pop("state"), calibrators, done, trained, step, timing, **tree)
    store.forget_after(0)
    return ResumePoint(setups.first_state(setup.learner), new)


def keep_previous(work: Work, task: int, encoder: Any) -> Seconds:
    """Saves E_{t-1}(D_t), from which drift is estimated; returns the seconds that it took."""
    if work.store.previous(task) is not None:
        return {"previous_extraction_seconds": 0.0}
    extraction = work.images.previous_features(task, encoder)
    work.store.keep_previous(task, extraction.features)
    return {"previous_extraction_seconds": extraction.seconds}


def train(work: Work, task: int, state: Any, point: ResumePoint) -> Any:
    """Learns a task, from its first step or the resume point (line 3); returns the new state."""
    setup, log = work.setup, work.log
    learner, update, backbone = setup.learner, setup.update, setup.backbone
    mesh, interval = learner.setup.mesh, setup.config.checkpoint.every_steps
    first_step, epochs = point.step if task == point.trained_tasks else 0, setup.epochs
    planned = {"classes_per_task": learner.setup.classes_per_task}  # the slots of a checkpoint

    def save(tasks_done: int, step: int, **tree: Any) -> None:
        number = setup.first_steps[tasks_done] + step + tasks_done
        work.checkpoints.save(number, tree, log.cursor(tasks_done, step) | planned)

    images = work.images.task_images(task)
    if first_step == 0:
        new = learner.before_task(backbone, state, task, images)
        state = setups.accept(learner, state, new, "before_task")
    started = setups.start_task(learner, update, backbone, state, task, work.seed)
    frozen, trained, optimizer = started
    if first_step > 0:
        trained, optimizer = point.trained, point.optimizer
    batches = work.images.batches(task, epochs, start_step=first_step)
    log.begin(batches, len(setup.tasks.tasks))
    for step, batch in enumerate(batches, start=first_step):
        rate = setup.schedule(step // batches.steps_per_epoch, epochs)
        sharded = devices.split(mesh, batch)
        trained, optimizer, loss = update.step(backbone, frozen, trained, optimizer, sharded, rate)
        log.step(step, loss, batch)
        due = work.stop.requested() or (step + 1) % interval == 0
        if due and step + 1 < batches.num_steps:
            log.pause()
            save(task, step + 1, state=state, trained=trained, optimizer=optimizer)
            work.stop.poll()
    log.look()
    new = learner.after_task(backbone, state, task, frozen, trained, images)
    state = setups.accept(learner, state, new, "after_task")
    log.end()
    save(task + 1, 0, state=state)
    return state


def extract(work: Work, task: int, encoder: Any, head: Any) -> tuple[TaskFeatures, Seconds]:
    """Returns the features that calibrators are fitted on, and the seconds taken (line 4)."""
    tasks, watch = work.setup.tasks, devices.Stopwatch()
    adapted, pretrained = work.images.train_features(task, encoder)
    compiled = watch.read().compile_seconds
    features = TaskFeatures(
        adapted=adapted.features,
        pretrained=pretrained and pretrained.features,
        labels=tasks.train_labels(task),
        head=head,
        classes=tasks.positions[tasks.tasks[task]],
        previous=work.store.previous(task),
    )
    return features, {
        "extraction_compile_seconds": compiled,
        "adapted_extraction_seconds": adapted.seconds,
        "pretrained_extraction_seconds": pretrained.seconds if pretrained else 0.0,
        "pretrained_from_cache": float(bool(pretrained and pretrained.from_cache)),
    }


def fit(
    calibrators: dict[str, Any], features: TaskFeatures
) -> tuple[dict[str, Seconds], dict[str, int | None]]:
    """Fits calibrators on a task.

    Returns by name the seconds without and of compilation, and the rises of the memory peak.
    """
    seconds, compiled, rises = {}, {}, {}
    for name, calibrator in calibrators.items():
        peak, watch = devices.peak_memory(), devices.Stopwatch()
        features.fit(calibrator)
        calibrator.finalize()
        seconds[name], compiled[name] = watch.read()
        rises[name] = devices.peak_rise(peak)
    return {"fit_seconds": seconds, "fit_compile_seconds": compiled}, rises


def evaluate(
    work: Work, task: int, encoder: Any, heads: list[Any], calibrators: dict[str, Any]
) -> records.Record:
    """Returns the accuracies after a task (lines 14 to 20); saves predictions after the last."""
    tasks = work.setup.tasks
    seen = tasks.test_tasks <= task
    labels, true_tasks = tasks.test_labels[seen], tasks.test_tasks[seen]
    adapted, pretrained = work.images.test_features(len(labels), encoder)
    views = adapted.features, pretrained and pretrained.features
    scores, components, seconds = score(calibrators, heads, *views)
    confidences = unlike = None
    for name in calibrators:
        if METHODS[name].gives_confidence:
            confidences, typicality = calibrators[name].assess(*views)
            unlike = 100.0 * float(np.mean(typicality < familiarity.UNTYPICAL))
    if task + 1 == len(tasks.tasks):
        columns = evaluation.predictions(scores, labels, true_tasks)
        columns["class_names"] = np.array(tasks.class_names)
        work.store.keep_test(views, columns, heads)
    work.store.event(
        "confusion",  # percentages of images that are routed to an earlier or later task
        task=task,
        earlier={n: 100 * float(np.mean(s.task < true_tasks)) for n, s in scores.items()},
        later={n: 100 * float(np.mean(s.task > true_tasks)) for n, s in scores.items()},
    )
    measures = evaluation.measure(scores, labels, true_tasks, confidences)
    return records.Record(
        task=task,
        test_images=len(labels),
        labels={name: evaluation.pack(s.label) for name, s in scores.items()},
        **structs.asdict(measures),
        unlike_learned=unlike,
        components={n: evaluation.accuracy(labels, s.label) for n, s in components.items()},
        timing=records.TaskTiming(
            test_extraction_images=len(labels),
            test_extraction_seconds=adapted.seconds,
            score_seconds=seconds,
        ),
    )


def score(
    calibrators: dict[str, Any],
    heads: list[Any],
    adapted: Float[np.ndarray, "n d"],
    pretrained: Float[np.ndarray, "n e"] | None,
) -> tuple[dict[str, Scores], dict[str, Scores], Seconds]:
    """Returns the scores of every calibrator, scores of components, and seconds by calibrator."""
    scores, components, seconds = {}, {}, {}
    for name, calibrator in calibrators.items():
        calibrator.replace_heads(heads)
        clock = time.perf_counter()
        if METHODS[name].has_components:
            components = calibrator.components(adapted, pretrained)
            scores |= {"raw": components["raw"], name: components["full"]}
        else:
            scores[name] = calibrator.score(adapted, pretrained)
        seconds[name] = time.perf_counter() - clock
    return scores, components, seconds
