"""Algorithm 1 of the paper: learn task after task, fit calibrators as they go by, evaluate."""

import time
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from fdc_jax import calibration, evaluation
from fdc_jax.calibration import Scores, confidence
from fdc_jax.data.task_stream import TaskStream
from fdc_jax.errors import StopRequest
from fdc_jax.features.feature_files import TaskFeatures
from fdc_jax.machine import devices
from fdc_jax.machine.checkpoint import Checkpoints
from fdc_jax.run import configuration
from fdc_jax.run import setup as setups
from fdc_jax.run.configuration import Config
from fdc_jax.run.images import RunImages
from fdc_jax.run.progress import StepLog
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


def run(setup: Setup, seed: int, begun: Begun, work: Work) -> dict[str, Any]:
    """Does what is left of one seed and returns its calibrators (Algorithm 1).

    Raises:
        TrainingError: a loss is not finite.
        Interrupted: a stop was requested; the same call in a new process goes on from there.
    """
    learner, tasks, store, log = setup.learner, setup.tasks, work.store, work.log
    state, calibrators = begun.state, begun.calibrators
    for task in range(begun.tasks_done, len(tasks.tasks)):
        took, processor = {"previous_extraction_seconds": 0.0}, time.process_time()
        if task >= begun.trained_tasks:
            if task and any(each.reads_previous for each in calibrators.values()):
                took = keep_previous(task, learner.encoder(setup.backbone, state, task), work)
            state = train(setup, seed, task, state, begun, work)  # line 3
        encoder = learner.encoder(setup.backbone, state, task + 1)
        heads = setups.heads(learner, state, task + 1)
        features, extracted = extract(tasks, task, encoder, heads[task], work)  # line 4
        took |= extracted | fit(calibrators, features)  # lines 5 to 13
        store.keep(task, calibrators, features)
        store.event("statistics", task=task, **took)
        if setup.evaluated[task]:
            record = evaluate(tasks, task, encoder, heads, calibrators, work)  # lines 14 to 20
            took["processor_seconds"] = time.process_time() - processor
            record["timing"] |= log.timing | took
            record["peak_memory"] = {"training": log.peak_memory, "task": devices.peak_memory()}
            store.record(record)
            log.line(evaluation.describe(record, len(tasks.tasks)))
    for calibrator in calibrators.values():
        calibrator.replace_heads(setups.heads(learner, state, len(tasks.tasks)))
        calibrator.finalize(release=True)
        if calibrator.note:
            log.line(calibrator.note)
    return calibrators


def resume(setup: Setup, seed: int, store: Store, checkpoints: Checkpoints) -> Begun:
    """Returns the newest state that all else in the work directory goes with, or the first one.

    Raises:
        InputError: the work directory lacks what it would need to go on.
    """
    for number, cursor, tree in setups.checkpoints(setup, checkpoints, seed):
        trained, step = cursor["tasks_done"], cursor["step"]
        # The encoder of a task that ends here is at hand, whatever else of the task is lacking.
        complete = store.has_fitted(trained) and (
            trained == 0 or store.recorded(trained - 1) or not setup.evaluated[trained - 1]
        )
        done = trained if step or complete else trained - 1
        if done and not store.has_fitted(done):
            checkpoints.set_aside(number, "calibrators of its tasks are missing")
            continue
        store.go_on(done)
        store.event("resume", tasks_done=done, step=step)
        calibrators = store.calibrators(done) if done else _new_calibrators(setup.config)
        timing = cursor["training_time"]
        return Begun(tree.pop("state"), calibrators, done, trained, step, timing, **tree)
    store.go_on(0)
    return Begun(setups.first_state(setup.learner), _new_calibrators(setup.config))


def _new_calibrators(config: Config) -> dict[str, Any]:
    names, settings = configuration.calibrators(config), config.fdc.to_dict()
    return {name: calibration.make(name, **settings) for name in names}


def keep_previous(task: int, encoder: Any, work: Work) -> Seconds:
    """Keeps E_{t-1}(D_t) for calibrators that follow the encoder; returns the time it took."""
    if work.store.previous(task) is not None:
        return {"previous_extraction_seconds": 0.0}
    found = work.images.previous_features(task, encoder)
    work.store.keep_previous(task, found.features)
    return {"previous_extraction_seconds": found.seconds}


def train(setup: Setup, seed: int, task: int, state: Any, begun: Begun, work: Work) -> Any:
    """Learns a task, or what is left of it (line 3), and returns the learner's state."""
    learner, update, backbone, log = setup.learner, setup.update, setup.backbone, work.log
    mesh, every = learner.setup.mesh, setup.config.checkpoint.every_steps
    first, epochs = begun.step if task == begun.trained_tasks else 0, setup.epochs[task]
    planned = {"classes_per_task": learner.setup.classes_per_task}  # the slots of a checkpoint

    def save(tasks_done: int, step: int, **tree: Any) -> None:
        number = setup.first_steps[tasks_done] + step + tasks_done
        work.checkpoints.save(number, tree, log.cursor(tasks_done, step) | planned)

    around = work.images.of_task(task)
    if first == 0:
        new = learner.before_task(backbone, state, task, around)
        state = setups.accept(learner, state, new, "before_task")
    frozen, trained, optimizer = setups.start_task(learner, update, backbone, state, task, seed)
    if first > 0:
        trained, optimizer = begun.trained, begun.optimizer
    batches = work.images.batches(task, epochs, start_step=first)
    log.begin(task, len(setup.tasks.tasks), epochs, first, batches)
    for step, batch in enumerate(batches, start=first):
        rate = setup.schedule(step // batches.steps_per_epoch, epochs)
        placed = devices.split(mesh, batch)
        trained, optimizer, loss = update.step(backbone, frozen, trained, optimizer, placed, rate)
        log.step(step, loss, batch)
        due = work.stop.requested() or (step + 1) % every == 0
        if due and step + 1 < batches.num_steps:
            log.pause()
            save(task, step + 1, state=state, trained=trained, optimizer=optimizer)
            work.stop.poll()
    log.look()
    new = learner.after_task(backbone, state, task, frozen, trained, around)
    state = setups.accept(learner, state, new, "after_task")
    log.end()
    save(task + 1, 0, state=state)
    return state


def extract(
    tasks: TaskStream, task: int, encoder: Any, head: Any, work: Work
) -> tuple[TaskFeatures, Seconds]:
    """Returns what calibrators are fitted on, and the time that it took (line 4)."""
    views = work.images.train_features(task, encoder)
    adapted, pretrained = views.arrays
    features = TaskFeatures(
        adapted=adapted,
        pretrained=pretrained,
        labels=tasks.train_labels(task),
        head=head,
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
    tasks: TaskStream,
    task: int,
    encoder: Any,
    heads: list[Any],
    calibrators: dict[str, Any],
    work: Work,
) -> dict[str, Any]:
    """Returns the accuracies after a task (lines 14 to 20); the last one's predictions are kept."""
    seen = tasks.test_tasks <= task
    labels, true_tasks = tasks.test_labels[seen], tasks.test_tasks[seen]
    views = work.images.test_features(len(labels), encoder)
    scores, components, took = score(calibrators, heads, *views.arrays)
    gaussians = calibrators.get("gaussians")
    sure = unlike = None
    if gaussians is not None:
        sure, typicality = gaussians.assess(*views.arrays)
        unlike = 100.0 * float(np.mean(typicality < confidence.UNTYPICAL))
    if task + 1 == len(tasks.tasks):
        columns = evaluation.predictions(scores, labels, true_tasks)
        work.store.keep_predictions(columns, tasks.class_names)
        work.store.keep_test(*views.arrays, columns["label"], heads)
    work.store.event(
        "confusion",  # percentages of images taken for those of other tasks
        task=task,
        earlier={n: 100 * float(np.mean(s.task < true_tasks)) for n, s in scores.items()},
        later={n: 100 * float(np.mean(s.task > true_tasks)) for n, s in scores.items()},
    )
    extraction = {"images": len(labels), "seconds": views.adapted.seconds}
    return {
        "task": task,
        "test_images": len(labels),
        "labels": {name: evaluation.pack(each.label) for name, each in scores.items()},
        **evaluation.measure(scores, labels, true_tasks, sure),
        "unlike_learned": unlike,
        "components": {
            name: evaluation.accuracy(labels, each.label) for name, each in components.items()
        },
        "timing": {f"test_extraction_{name}": each for name, each in extraction.items()} | took,
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
