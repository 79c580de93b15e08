"""Resume points of a run: a checkpoint is one of them, and nothing else says how far a run is.

A task is in training, then trained, then done: its calibrators are fitted and evaluated.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta, structs

from fdc_jax import calibration
from fdc_jax.calibration import Calibrator
from fdc_jax.errors import InputError
from fdc_jax.evaluation import Count, Name
from fdc_jax.learners import training
from fdc_jax.machine import devices, processes
from fdc_jax.machine.checkpoint import Checkpoints
from fdc_jax.machine.conversion import convert
from fdc_jax.machine.files import read_npz
from fdc_jax.run import setup as setups
from fdc_jax.run.records import Measured, Positive
from fdc_jax.run.setup import Encoders, Setup

Phase = Literal["training", "trained", "done"]


class Cursor(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a run: a task, its phase, and its steps."""

    task: Count  # from 0
    phase: Phase
    step: Count = 0  # number of steps of a task in training
    seconds: dict[Name, Measured] = {}  # of the task's training, by their names in a record
    # Of all planned tasks, which the state has slots for.
    classes_per_task: Annotated[tuple[Positive, ...], Meta(min_length=1)]

    @property
    def trained_tasks(self) -> int:
        """Number of tasks that are trained."""
        return self.task + (self.phase != "training")

    @property
    def done_tasks(self) -> int:
        """Number of tasks that are done."""
        return self.task + (self.phase == "done")

    def number(self, first_steps: Sequence[int]) -> int:
        """Returns the number of its checkpoint, from the number of steps before each task."""
        steps = {"training": first_steps[self.task] + self.step}
        steps["trained"] = first_steps[self.task + 1]
        steps["done"] = steps["trained"] + 1
        return 2 * self.task + steps[self.phase]


class ResumePoint(NamedTuple):
    """The point that a run has reached."""

    cursor: Cursor
    calibrators: dict[str, Calibrator]  # by name, fitted on the tasks that are done
    state: Any  # the learner's, of the tasks that are trained
    # Of a task in training: the `trained` leaves, and the `optimizer`'s state.
    training: Mapping[str, Any] = MappingProxyType({})


def resume(setup: Setup, seed: int, checkpoints: Checkpoints) -> ResumePoint:
    """Returns the newest resume point of a run, or its start; raises InputError."""
    point = newest(setup, seed, checkpoints)
    if point is None:
        return first_point(setup)
    if not point.calibrators:
        raise InputError(
            f"{checkpoints.folder}: are of fdc_jax 0.2.0; resume the run with that version, or "
            "choose another --workdir"
        )
    return point


def first_point(setup: Setup) -> ResumePoint:
    """Returns the point before the first task."""
    settings = structs.asdict(setup.config.fdc)
    calibrators = {}
    for name in setup.config.calibrator_names:
        calibrators[name] = calibration.make(name, **settings)
        calibrators[name].doubts = ""  # In a run, head rows and labels cannot be misaligned.
    planned = setup.learner.setup.classes_per_task
    cursor = Cursor(task=0, phase="training", classes_per_task=planned)
    return ResumePoint(cursor, calibrators, setups.first_state(setup.learner))


def newest(encoders: Encoders, seed: int, checkpoints: Checkpoints) -> ResumePoint | None:
    """Returns the resume point of the newest usable checkpoint, None without any.

    If the run was planned for fewer tasks, its state gets slots for the further ones. Checkpoints
    of version 0.2.0 have no calibrators.

    Raises:
        InputError: the checkpoint cannot be read.
    """
    checkpoint = checkpoints.newest()
    if checkpoint is None:
        return None
    number, saved = checkpoint
    folder = checkpoints.folder / str(number)
    cursor = _cursor(folder, saved)
    planned = encoders.learner.setup.classes_per_task
    tree = checkpoints.read(number, _template(encoders, seed, cursor, cursor.classes_per_task))
    if planned != cursor.classes_per_task:
        grown = training.grown_to(tree, _template(encoders, seed, cursor, planned))
        tree = devices.replicate(encoders.learner.setup.mesh, grown)
    calibrators = {}
    if "phase" in saved:
        for name in encoders.config.calibrator_names:
            path = folder / "calibrators" / f"{name}.npz"
            arrays = processes.from_first(lambda path=path: read_npz(path))
            calibrators[name] = calibration.load(path, arrays)
    return ResumePoint(cursor, calibrators, tree.pop("state"), tree)


def _cursor(folder: Path, saved: dict[str, Any]) -> Cursor:
    """Returns the cursor of a checkpoint; version 0.2.0 counted the tasks that were trained."""
    saved = convert(saved, dict, f"{folder}: cursor.")
    if "tasks_done" in saved:
        count = convert(saved["tasks_done"], int, f"{folder}: cursor.tasks_done")
        if saved.get("step"):
            saved = saved | {"task": count, "phase": "training"}
        else:
            saved = saved | {"task": count - 1, "phase": "done"}
    cursor = convert(saved, Cursor, f"{folder}: cursor.")
    if cursor.task >= len(cursor.classes_per_task):
        raise InputError(f"{folder}: cursor.task: expected one of the planned tasks")
    return cursor


def _template(
    encoders: Encoders, seed: int, cursor: Cursor, planned: tuple[int, ...]
) -> dict[str, Any]:
    """Returns a tree with the structure of a checkpoint of a run with such planned tasks."""
    setup = dataclasses.replace(encoders.learner.setup, classes_per_task=planned)
    learner = dataclasses.replace(encoders.learner, setup=setup)
    tree = {"state": setups.first_state(learner)}
    if cursor.phase == "training":
        update, backbone = learner.update(), encoders.backbone
        started = setups.start_task(learner, update, backbone, tree["state"], cursor.task, seed)
        _, tree["trained"], tree["optimizer"] = started
    return tree


def save(setup: Setup, checkpoints: Checkpoints, point: ResumePoint) -> None:
    """Writes a resume point as a checkpoint; raises InputError if that fails."""
    number = point.cursor.number(setup.first_steps)
    tree = {"state": point.state, **point.training}
    files = {f"{name}.npz": calibrator.save for name, calibrator in point.calibrators.items()}
    checkpoints.save(number, msgspec.to_builtins(point.cursor), tree, files)
