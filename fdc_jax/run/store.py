"""The work directory of a run in progress: intermediate results, and files to resume from.

Every result is on disk before the next step starts. Only process 0 reads and writes there.
"""

import json
import logging
import os
import time
from collections.abc import Mapping, Sequence, Set
from typing import Any

import msgspec
import numpy as np
from jaxtyping import Float

from fdc_jax.data.task_stream import Known
from fdc_jax.errors import InputError
from fdc_jax.features import feature_files
from fdc_jax.features.feature_files import TaskFeatures
from fdc_jax.machine import processes
from fdc_jax.machine.files import read_npy, write_atomically, write_json, write_npy
from fdc_jax.run import configuration
from fdc_jax.run import setup as setups
from fdc_jax.run.loggers import Loggers
from fdc_jax.run.paths import RunPaths, known_of
from fdc_jax.run.records import CLASSES, PLANNED, Record, Results
from fdc_jax.run.setup import Setup

_log = logging.getLogger(__name__)
# Values that change if a run grows by further tasks.
_GROWING = configuration.TASKS | {"training images sha256", "test images sha256"}


class Store(RunPaths):
    """The work directory of one seed, which is made if it is missing.

    Raises:
        InputError: the folder belongs to another configuration; the differing fields are named.
    """

    def __init__(self, folder: str | os.PathLike[str], setup: Setup, seed: int):
        super().__init__(folder)
        self._config, self._tasks = setup.config, setup.tasks
        self._names = setup.config.calibrator_names
        self._claim(setup, seed)
        self._events = self.folder / "metrics.jsonl"
        self._loggers = Loggers(setup.config.log if processes.is_first() else "", self._events)

    @processes.on_first
    def _claim(self, setup: Setup, seed: int) -> None:
        """Writes `config.json`; raises InputError if the folder has a run of other settings."""
        settings = configuration.flatten(self._config) | {"seed": [seed]}
        settings |= setups.checksums(setup, self._tasks)
        planned, task_count = list(self._tasks.planned), setup.learner.task_count
        content = settings | {CLASSES: self._tasks.class_checksums, PLANNED: planned}
        if not self.config_file.exists():
            if self.results_file.exists() or self.checkpoints_folder.exists():
                raise InputError(
                    f"{self.folder} has files of a run but no config.json; restore that file or "
                    "choose another --workdir"
                )
            write_json(self.config_file, content)
            return
        saved = self.read_config()
        changes = configuration.differences(saved, settings)
        grows = self._grows(saved, content, changes.keys())
        if refused := changes.keys() - (_GROWING if grows else set()):
            advice = ""
            if all(name.startswith(("fdc.", "calibrators")) for name in refused):
                folder = self.features_folder
                advice = f" (python -m fdc_jax posthoc {folder} fits calibrators again)"
            elif "classes_per_task" in refused:
                sizes = ",".join(map(str, known_of(saved).sizes))
                advice = f" (classes_per_task={sizes},N learns N further classes)"
            raise InputError(
                f"{self.folder} holds a run of another configuration: "
                f"{', '.join(changes[name] for name in sorted(refused))}; "
                f"choose another --workdir or the old values{advice}"
            )
        if changes:
            old_count = len(saved[PLANNED])
            if old_count != len(planned) and task_count:
                _log.warning(
                    "%s: the run was planned for %d tasks and is now planned for %d; %s: results "
                    "differ from those of a run that was planned for %d from the start",
                    *(self.folder, old_count, len(planned), task_count, len(planned)),
                )
            write_json(self.config_file, content)

    def _grows(self, saved: dict[str, Any], new: dict[str, Any], changes: Set[str]) -> bool:
        """Returns True if all classes and tasks that the run knows are there and unchanged.

        Raises:
            InputError: only the images have changed, and a class that the run knows is gone or has
                other images.
        """
        known, classes = known_of(saved), new[CLASSES]
        changed = [name for name in known.classes if known.classes[name] != classes.get(name)]
        if changed and changes <= _GROWING:
            present = "other images" if changed[0] in classes else "no such class"
            raise InputError(
                f"{self.folder}: expected the class {changed[0]} of {self._config.benchmark} as "
                f"this run knows it, found {present}; a run learns a class once: restore its "
                "images, or learn all classes again with another --workdir"
            )
        same = Known(classes, new[PLANNED]).tasks[: len(known.tasks)] == known.tasks
        enough = len(self._tasks.tasks) >= len(known.tasks)
        return bool(known.classes) and not changed and same and enough

    # Reading --------------------------------------------------------------------------------------

    def finished(self) -> Results | None:
        """Returns the results of a run that has learned all of its tasks, or else None."""
        saved = processes.on_first(lambda: msgspec.to_builtins(self.read_results()))()
        results = msgspec.convert(saved, Results | None)
        return results if results and results.num_tasks >= len(self._tasks.tasks) else None

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
    def keep_previous(self, task: int, features: Float[np.ndarray, "n d"]) -> None:
        """Writes E_{t-1}(D_t) before the task is learned, after which E_{t-1} may be gone."""
        write_npy(self.features_folder / f"train_previous_{task}.npy", features)

    def previous(self, task: int) -> Float[np.ndarray, "n d"] | None:
        """Returns the features of `keep_previous`, or None if it was not called for the task."""
        path = self.features_folder / f"train_previous_{task}.npy"
        arrays = processes.from_first(lambda: {"n": read_npy(path)} if path.exists() else None)
        return arrays["n"] if arrays else None

    @processes.on_first
    def remove_previous(self, before: int) -> None:
        """Removes the features of `keep_previous` of the tasks before one, unless `save_features`.

        A task keeps them until the next one is done: its fit may be repeated.
        """
        for task in range(0 if self._config.save_features else before):
            (self.features_folder / f"train_previous_{task}.npy").unlink(missing_ok=True)

    @processes.on_first
    def keep(self, task: int, features: TaskFeatures) -> None:
        """Writes the features of a task if `save_features`."""
        if self._config.save_features:
            fields = features._asdict()
            del fields["final_head"]
            feature_files.write_task(self.features_folder, task, **fields)

    @processes.on_first
    def record(self, record: Record) -> None:
        """Writes the evaluation after a task."""
        write_json(self.record_file(record.task), record)
        self.event("evaluation", **msgspec.to_builtins(record))

    @processes.on_first
    def keep_test(self, views: tuple[Any, Any], columns: dict[str, Any], heads: list[Any]) -> None:
        """Writes `predictions.npz`, and test features and final heads if `save_features`."""
        with write_atomically(self.predictions_file) as file:
            np.savez_compressed(file, **columns)
        if self._config.save_features:
            feature_files.write_final_heads(self.features_folder, heads)
            feature_files.write_test(self.features_folder, *views, columns["label"])

    @processes.on_first
    def finish(self, calibrators: Mapping[str, Any], results: Results) -> None:
        """Writes the calibrators of all tasks, and the results as the last file of a run."""
        for name, calibrator in calibrators.items():
            calibrator.save(self.calibrator_file(name))
        write_json(self.results_file, results)
