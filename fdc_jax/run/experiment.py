"""Algorithm 1 of the paper: learns task after task, fits calibrators after each, and evaluates."""

import time
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int
from msgspec import structs

from fdc_jax import evaluation
from fdc_jax.calibration import METHODS, Scores, familiarity
from fdc_jax.errors import StopRequest
from fdc_jax.features.feature_files import TaskFeatures
from fdc_jax.machine import devices
from fdc_jax.machine.checkpoint import Checkpoints
from fdc_jax.run import records, resume
from fdc_jax.run import setup as setups
from fdc_jax.run.folder import RunFolder
from fdc_jax.run.images import RunImages
from fdc_jax.run.progress import Progress, StepLog
from fdc_jax.run.resume import Cursor, Phase, ResumePoint
from fdc_jax.run.setup import Setup

Seconds = dict[str, float]


class Work(NamedTuple):
    """The work on one seed: set-up, files, images and observers."""

    setup: Setup
    seed: int
    folder: RunFolder
    checkpoints: Checkpoints
    images: RunImages
    log: StepLog
    progress: Progress
    stop: StopRequest

    def cursor(self, task: int, phase: Phase, step: int = 0) -> Cursor:
        """Returns the cursor of a checkpoint that is written now."""
        sizes, seconds = self.setup.learner.setup.classes_per_task, self.log.seconds
        return Cursor(task=task, phase=phase, step=step, seconds=seconds, classes_per_task=sizes)

    def save(self, point: ResumePoint) -> None:
        """Writes a checkpoint; raises InputError if that fails."""
        resume.save(self.setup, self.checkpoints, point)


def run(work: Work, point: ResumePoint) -> dict[str, Any]:
    """Finishes one seed from a resume point, and returns its calibrators (Algorithm 1).

    Raises:
        TrainingError: a loss is not finite.
        Interrupted: a stop was requested; the same call in a new process resumes.
    """
    setup, learner, folder = work.setup, work.setup.learner, work.folder
    state, calibrators, num_tasks = point.state, point.calibrators, len(setup.tasks.tasks)
    for task in range(point.cursor.done_tasks, num_tasks):
        cpu_start = time.process_time()
        previous, timing = previous_features(work, task, state, calibrators)
        if task >= point.cursor.trained_tasks:
            state = train(work, task, state, point)  # line 3
        encoder = learner.encoder(setup.backbone, state, task + 1)
        heads = setups.heads(learner, state, task + 1)
        peak = devices.peak_memory()
        features, extracted = extract(work, task, encoder, heads[task], previous)  # line 4
        memory: dict[str, Any] = {"extraction": devices.peak_rise(peak)}
        folder.write_features(task, features)
        if task > 0 and not learner.trains:  # E_{t-1} is E_t.
            features = features._replace(previous=features.adapted)
        fitted, memory["fit"] = fit(calibrators, features)  # lines 5 to 13
        timing |= extracted | fitted
        folder.event("statistics", task=task, **timing)
        if setup.evaluated[task]:
            record = evaluate(work, task, encoder, heads, calibrators)  # lines 14 to 20
            timing |= work.log.seconds | {"processor_seconds": time.process_time() - cpu_start}
            record.timing = structs.replace(record.timing, **timing)
            record.peak_memory = records.Memory(training=work.log.peak_memory, **memory)
            folder.write_record(record)
            work.progress.line(evaluation.accuracy_line(record, task, num_tasks))
        work.save(ResumePoint(work.cursor(task, "done"), calibrators, state))
        folder.remove_previous(task)
    work.checkpoints.wait()
    folder.remove_previous(num_tasks)
    for calibrator in calibrators.values():
        calibrator.replace_heads(setups.heads(learner, state, num_tasks))
        calibrator.finalize(release=True)
        if calibrator.note:
            work.progress.line(calibrator.note)
    return calibrators


def previous_features(
    work: Work, task: int, state: Any, calibrators: dict[str, Any]
) -> tuple[Float[np.ndarray, "n d"] | None, dict[str, Any]]:
    """Returns E_{t-1}(D_t), from which drift is estimated, and the seconds that it took.

    The features are saved before the task is learned, after which E_{t-1} may be gone. They are
    None if no calibrator reads them.
    """
    learner, folder, seconds = work.setup.learner, work.folder, 0.0
    reads = learner.trains and any(c.reads_previous for c in calibrators.values())
    features = folder.previous(task) if task and reads else None
    if task and reads and features is None:
        encoder = learner.encoder(work.setup.backbone, state, task)
        extraction = work.images.previous_features(task, encoder)
        folder.write_previous(task, extraction.features)
        features, seconds = folder.previous(task), extraction.seconds
    return features, {"previous_extraction_seconds": seconds}


def train(work: Work, task: int, state: Any, point: ResumePoint) -> Any:
    """Learns a task, from its first step or the resume point (line 3); returns the new state."""
    setup, log, calibrators = work.setup, work.log, point.calibrators
    learner, update, backbone = setup.learner, setup.update, setup.backbone
    mesh, interval = learner.setup.mesh, setup.config.checkpoint.every_steps
    first_step = point.cursor.step if task == point.cursor.task else 0
    images = work.images.task_images(task)
    if first_step == 0:
        new = learner.before_task(backbone, state, task, images)
        state = setups.checked_state(learner, state, new, "before_task")
    frozen, trained, optimizer = setups.start_task(
        learner, update, backbone, state, task, work.seed
    )
    if first_step > 0:
        trained = point.training["trained"]
        optimizer = point.training["optimizer"]
    batches = work.images.batches(task, setup.epochs, start_step=first_step)
    log.begin(batches, len(setup.tasks.tasks))
    for step, batch in enumerate(batches, start=first_step):
        rate = setup.schedule(step // batches.steps_per_epoch, setup.epochs)
        sharded = devices.split(mesh, batch)
        trained, optimizer, loss = update.step(backbone, frozen, trained, optimizer, sharded, rate)
        log.step(step, loss, batch)
        due = work.stop.requested() or (step + 1) % interval == 0
        if due and step + 1 < batches.num_steps:
            log.pause()
            leaves = {"trained": trained, "optimizer": optimizer}
            cursor = work.cursor(task, "training", step + 1)
            work.save(ResumePoint(cursor, calibrators, state, leaves))
            work.stop.poll()
    log.look()
    new = learner.after_task(backbone, state, task, frozen, trained, images)
    state = setups.checked_state(learner, state, new, "after_task")
    log.end()
    work.save(ResumePoint(work.cursor(task, "trained"), calibrators, state))
    return state


def extract(
    work: Work, task: int, encoder: Any, head: Any, previous: Float[np.ndarray, "n d"] | None
) -> tuple[TaskFeatures, Seconds]:
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
        previous=previous,
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
        peak = devices.peak_memory()
        watch = devices.Stopwatch()
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
    labels = tasks.test_labels[seen]
    true_tasks = tasks.test_tasks[seen]
    adapted, pretrained = work.images.test_features(len(labels), encoder)
    views = adapted.features, pretrained and pretrained.features
    scores, components, seconds = score(calibrators, heads, *views)
    validation: dict[str, float] = {}
    confidences = unlike = None
    for name in calibrators:
        if METHODS[name].gives_confidence:
            confidences, typicality = calibrators[name].assess(*views)
            unlike = 100.0 * float(np.mean(typicality < familiarity.UNTYPICAL))
    if task + 1 == len(tasks.tasks):
        columns = evaluation.predictions(scores, labels, true_tasks)
        columns["class_names"] = np.array(tasks.class_names)
        work.folder.write_test(views, columns, heads)
        if len(tasks.validation_indices):
            validation = validate(work, encoder, heads, calibrators)
    # Percentages of images that are routed to an earlier or later task.
    earlier, later = {}, {}
    for name, of in scores.items():
        earlier[name] = 100 * float(np.mean(of.task < true_tasks))
        later[name] = 100 * float(np.mean(of.task > true_tasks))
    work.folder.event("confusion", task=task, earlier=earlier, later=later)
    measures = evaluation.measures(scores, labels, true_tasks, confidences)
    timing = records.TaskTiming(
        test_extraction_images=len(labels),
        test_extraction_seconds=adapted.seconds,
        score_seconds=seconds,
    )
    packed = {name: evaluation.pack(of.label) for name, of in scores.items()}
    return records.Record(
        task=task,
        test_images=len(labels),
        labels=packed,
        **structs.asdict(measures),
        unlike_learned=unlike,
        components=accuracies(labels, components),
        validation=validation,
        timing=timing,
    )


def validate(
    work: Work, encoder: Any, heads: list[Any], calibrators: dict[str, Any]
) -> dict[str, float]:
    """Returns accuracies on the validation images by calibrator and component; saves features."""
    adapted, pretrained = work.images.validation_features(encoder)
    views = adapted.features, pretrained and pretrained.features
    labels = work.setup.tasks.validation_labels
    work.folder.write_validation(views, labels)
    scores, components, _ = score(calibrators, heads, *views)
    return accuracies(labels, components | scores)


def accuracies(labels: Int[np.ndarray, " n"], scores: dict[str, Scores]) -> dict[str, float]:
    """Returns the accuracy in percent of each of several scores."""
    return {name: evaluation.accuracy(labels, of.label) for name, of in scores.items()}


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
