"""The folder of a run of one seed: its paths, its files, and the run that may write there."""

import json
import logging
import os
import time
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from jaxtyping import Float, Int
from msgspec import structs

from fdc_jax.data.task_stream import LearnedClasses
from fdc_jax.errors import InputError
from fdc_jax.features import feature_files
from fdc_jax.features.feature_files import TaskFeatures
from fdc_jax.machine import processes
from fdc_jax.machine.files import (
    named_path,
    read_npy,
    read_object,
    write_atomically,
    write_json,
    write_npy,
)
from fdc_jax.run import configuration, records
from fdc_jax.run import setup as setups
from fdc_jax.run.configuration import SavedConfig
from fdc_jax.run.loggers import Loggers
from fdc_jax.run.setup import Setup

_log = logging.getLogger(__name__)
# Values that change if a run grows by further tasks.
_GROWING = configuration.TASKS | {"training images sha256", "test images sha256"}


class RunFolder:
    """The folder of a run of one seed.

    Anybody reads it; a run claims it before it writes. Of several processes only the first one
    reads and writes there.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = named_path("run directory", folder)
        self.checkpoints_folder = self.folder / "checkpoints"
        self.features_folder = self.folder / "features"  # in the form that `fdc_jax.posthoc` reads
        self.validation_folder = self.features_folder / "validation"  # in the same form
        self.untrained_folder = self.folder / "untrained"  # the run that answered before training
        self.config_file = self.folder / "config.json"
        self.results_file = self.folder / "results.json"  # the last one that a run writes
        self.predictions_file = self.folder / "predictions.npz"
        # In exports, which have no checkpoints and no encoder elsewhere.
        self.merged_file = self.folder / "merged.safetensors"
        self.weights_file = self.folder / "pretrained" / "model.safetensors"

    def calibrator_file(self, name: str) -> Path:
        """Returns the path of a calibrator fitted on all tasks."""
        return self.folder / "calibrators" / f"{name}.npz"

    def record_file(self, task: int) -> Path:
        """Returns the path of the evaluation after a task."""
        return self.folder / "tasks" / f"task_{task:03d}.json"

    def _previous_file(self, task: int) -> Path:
        return self.features_folder / f"train_previous_{task}.npy"

    # Reading --------------------------------------------------------------------------------------

    def read_config(self) -> SavedConfig:
        """Returns the content of `config.json`; raises InputError with a remedy."""
        with records.remedied(self.config_file, "put it back, or choose another --workdir"):
            return configuration.read(read_object(self.config_file))

    def differing(self, fields: Mapping[str, Any]) -> str:
        """Returns the fields whose values differ in the run of the folder, as text, or "".

        Fields that divide classes into tasks may differ, as a run may grow by further tasks.
        """
        saved = self.read_config().fields if self.config_file.exists() else fields
        fixed = {name: value for name, value in fields.items() if name not in configuration.TASKS}
        return ", ".join(configuration.differences(saved, fixed).values())

    def read_results(self) -> records.Results | None:
        """Returns the content of `results.json`, or None before it is written."""
        remedy = "remove it, and the run writes it again"
        if not self.results_file.exists():
            return None
        results = records.read(self.results_file, records.Results, remedy)
        with records.remedied(self.results_file, remedy):
            configuration.completed({"benchmark": results.benchmark, **results.config})
        return results

    def finished(self, num_tasks: int) -> records.Results | None:
        """Returns on all processes the results of at least so many tasks, or None."""
        saved = processes.on_first(lambda: msgspec.to_builtins(self.read_results()))()
        results = msgspec.convert(saved, records.Results | None)
        return results if results and results.num_tasks >= num_tasks else None

    def recorded_tasks(self) -> list[int]:
        """Returns the tasks after which an evaluation is saved."""
        paths = self.folder.glob("tasks/task_*.json")
        return sorted(int(path.stem.removeprefix("task_")) for path in paths)

    def read_records(self) -> list[records.Record]:
        """Returns the evaluations after each task so far."""
        remedy = "put it back, or choose another --workdir"
        paths = map(self.record_file, self.recorded_tasks())
        return [records.read(path, records.Record, remedy) for path in paths]

    def read_latency(self) -> records.Latency:
        """Returns the content of `latency.json`, empty if there is none."""
        path = self.folder / "latency.json"
        kind = records.Latency
        return records.read(path, kind, "remove it") if path.exists() else kind()

    def previous(self, task: int) -> Float[np.ndarray, "n d"] | None:
        """Returns the features of `write_previous`, or None if it was not called for the task."""
        path = self._previous_file(task)
        arrays = processes.from_first(lambda: {"n": read_npy(path)} if path.exists() else None)
        return arrays["n"] if arrays else None

    # Claiming -------------------------------------------------------------------------------------

    def claim(self, setup: Setup, seed: int) -> None:
        """Makes the folder, with its `config.json`, the place of a run, which may write then.

        Raises:
            InputError: the folder has a run of another configuration; the fields are named.
        """
        self._save_features = setup.config.save_features
        self._write_config(setup, seed)
        self._events = self.folder / "metrics.jsonl"
        self._loggers = Loggers(setup.config.log if processes.is_first() else "", self._events)

    @processes.on_first
    def _write_config(self, setup: Setup, seed: int) -> None:
        config = structs.replace(setup.config, seed=(seed,))
        new = SavedConfig(config, setups.run_content(setup), {})
        if not self.config_file.exists():
            if self.results_file.exists() or self.checkpoints_folder.exists():
                raise InputError(
                    f"{self.folder} has files of a run but no config.json; restore that file or "
                    "choose another --workdir"
                )
            write_json(self.config_file, new.fields)
            return
        saved = self.read_config()
        changes = configuration.differences(saved.fields, new.fields)
        grows = self._grows(saved, new, changes.keys(), len(setup.tasks.tasks))
        if refused := changes.keys() - (_GROWING if grows else set()):
            advice = ""
            if all(name.startswith(("fdc.", "calibrators")) for name in refused):
                folder = self.features_folder
                advice = f" (python -m fdc_jax posthoc {folder} fits calibrators again)"
            elif "classes_per_task" in refused:
                sizes = ",".join(map(str, saved.known.sizes))
                advice = f" (classes_per_task={sizes},N learns N further classes)"
            raise InputError(
                f"{self.folder} holds a run of another configuration: "
                f"{', '.join(changes[name] for name in sorted(refused))}; "
                f"choose another --workdir or the old values{advice}"
            )
        if changes:
            old_count = len(saved.content.planned)
            count = len(new.content.planned)
            task_count = setup.learner.task_count
            if old_count != count and task_count:
                _log.warning(
                    f"{self.folder}: the run was planned for {old_count} tasks and is now planned "
                    f"for {count}; {task_count}: results differ from those of a run that was "
                    f"planned for {count} from the start"
                )
            write_json(self.config_file, new.fields)

    def _grows(
        self, saved: SavedConfig, new: SavedConfig, changes: Set[str], num_tasks: int
    ) -> bool:
        """Returns True if all classes and tasks that the run knows are there and unchanged.

        Raises:
            InputError: only the images have changed, and a class that the run knows is gone or has
                other images.
        """
        known = saved.known
        classes = new.content.known_classes
        changed = [name for name in known.classes if known.classes[name] != classes.get(name)]
        if changed and changes <= _GROWING:
            present = "other images" if changed[0] in classes else "no such class"
            raise InputError(
                f"{self.folder}: expected the class {changed[0]} of {new.config.benchmark} as this "
                f"run knows it, found {present}; a run learns a class once: restore its images, or "
                "learn all classes again with another --workdir"
            )
        same = LearnedClasses(classes, new.content.planned).tasks[: len(known.tasks)] == known.tasks
        return bool(known.classes) and not changed and same and num_tasks >= len(known.tasks)

    @processes.on_first
    def check_resumable(self, done_tasks: int, evaluated: Sequence[bool]) -> None:
        """Raises InputError if the evaluation of a task that is done is missing.

        Neither is a finished run trained again from its first task.
        """
        if done_tasks == 0 and self.results_file.exists():
            raise InputError(
                f"{self.folder} holds a finished run, and no checkpoint to resume from; remove "
                f"{self.results_file} to train again"
            )
        for task in range(done_tasks):
            path = self.record_file(task)
            if evaluated[task] and not path.exists():
                raise InputError(f"{path}: is missing; put it back, or choose another --workdir")

    # Writing --------------------------------------------------------------------------------------

    def event(self, kind: str, **values: Any) -> None:
        """Appends one line to `metrics.jsonl`, and passes it on to the loggers of `config.log`."""
        if not processes.is_first():
            return
        event = {"event": kind, "time": round(time.time(), 3), **values}
        try:
            with open(self._events, "a", encoding="utf-8") as file:
                file.write(json.dumps(event) + "\n")
        except OSError as error:
            raise InputError(f"cannot write {self._events}: {error.strerror}") from error
        self._loggers.add(event)

    @processes.on_first
    def write_previous(self, task: int, features: Float[np.ndarray, "n d"]) -> None:
        """Writes E_{t-1}(D_t) before the task is learned, after which E_{t-1} may be gone."""
        write_npy(self._previous_file(task), features)

    @processes.on_first
    def remove_previous(self, before: int) -> None:
        """Removes the features of `write_previous` of the tasks before one, unless they are kept.

        A task has them until the next one is done, since its fit may be repeated.
        """
        for task in range(0 if self._save_features else before):
            self._previous_file(task).unlink(missing_ok=True)

    @processes.on_first
    def write_features(self, task: int, features: TaskFeatures) -> None:
        """Writes the features of a task if `save_features`."""
        if self._save_features:
            fields = features._asdict()
            del fields["final_head"]
            feature_files.write_task(self.features_folder, task, **fields)

    @processes.on_first
    def write_record(self, record: records.Record) -> None:
        """Writes the evaluation after a task."""
        write_json(self.record_file(record.task), record)
        self.event("evaluation", **msgspec.to_builtins(record))

    @processes.on_first
    def write_test(self, views: tuple[Any, Any], columns: dict[str, Any], heads: list[Any]) -> None:
        """Writes `predictions.npz`, and test features and final heads if `save_features`."""
        with write_atomically(self.predictions_file) as file:
            np.savez_compressed(file, **columns)
        if self._save_features:
            feature_files.write_final_heads(self.features_folder, heads)
            feature_files.write_test(self.features_folder, *views, columns["label"])

    @processes.on_first
    def write_validation(self, views: tuple[Any, Any], labels: Int[np.ndarray, " v"]) -> None:
        """Writes features of the validation images if `save_features`."""
        if self._save_features:
            feature_files.write_test(self.validation_folder, *views, labels)

    @processes.on_first
    def write_results(self, calibrators: Mapping[str, Any], results: records.Results) -> None:
        """Writes the calibrators of all tasks, and the results as the last file of a run."""
        for name, calibrator in calibrators.items():
            calibrator.save(self.calibrator_file(name))
        write_json(self.results_file, results)


def known_classes(
    folders: Sequence[Path], classes_per_task: int | tuple[int, ...]
) -> LearnedClasses:
    """Returns the known classes of the seed whose run knows most classes.

    The sizes of their tasks are empty if `classes_per_task` has changed.
    """

    def read() -> tuple[dict[str, str], tuple[int, ...]]:
        runs = [run.read_config() for run in map(RunFolder, folders) if run.config_file.exists()]
        if not runs:
            return {}, ()
        saved = max(runs, key=lambda saved: len(saved.content.known_classes))
        unchanged = saved.config.classes_per_task == classes_per_task
        return dict(saved.known.classes), saved.known.sizes if unchanged else ()

    classes, sizes = processes.on_first(read)()
    return LearnedClasses(classes, tuple(sizes))
