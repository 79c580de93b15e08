"""The work directory of a run in progress: results on the way, and files to resume from.

Every result is on disk before the next step starts. Of several processes only the first reads and
writes there.
"""

import json
import logging
import os
import pickle
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from fdc_jax import calibration
from fdc_jax.data.task_stream import Known, TaskStream
from fdc_jax.errors import InputError
from fdc_jax.features import feature_files
from fdc_jax.features.feature_files import TaskFeatures
from fdc_jax.machine import processes
from fdc_jax.machine.files import read_npy, write_atomically, write_json, write_npy
from fdc_jax.run import configuration
from fdc_jax.run.configuration import Config
from fdc_jax.run.loggers import Loggers
from fdc_jax.run.paths import RunPaths, known_of
from fdc_jax.run.schema import CLASSES, PLANNED

_log = logging.getLogger(__name__)


# Checksums that change where a run grows.
_IMAGES = {"training images sha256", "test images sha256"}


class Store(RunPaths):
    """The work directory of one seed of one configuration.

    Args:
        folder: made when missing.
        config: the run's configuration, `seed` being this run's alone.
        tasks: its images.
        checksums: of weights and images, by name.
        task_count: the part of the method that depends on the number of tasks, in words.

    Raises:
        InputError: the folder belongs to another configuration; the differing fields are named.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        config: Config,
        tasks: TaskStream,
        checksums: dict[str, str],
        task_count: str,
    ):
        super().__init__(folder)
        self._config, self._num_tasks = config, len(tasks.tasks)
        self._names = configuration.calibrators(config)
        self._claim(tasks, checksums, task_count)
        names = config.log if processes.is_first() else ""
        self._loggers = Loggers(names, self.folder / "metrics.jsonl")

    @processes.on_first
    def _claim(self, tasks: TaskStream, checksums: dict[str, str], task_count: str) -> None:
        settings, planned = configuration.flatten(self._config) | checksums, len(tasks.planned)
        own = settings | {CLASSES: tasks.class_checksums, PLANNED: list(tasks.planned)}
        if not self.config_file.exists():
            if self.results_file.exists() or self.checkpoints_folder.exists():
                raise InputError(
                    f"{self.folder} holds a run without its config.json, so that nobody knows "
                    "which one; put the file back or choose another --workdir"
                )
            write_json(self.config_file, own)
            return
        saved = self.read_config()
        differing = configuration.differences(saved, settings)
        grown = self._grown(saved, own, {name for name, *_ in differing})
        differing = [difference for difference in differing if difference[0] not in grown]
        if differing:
            fields = ", ".join(f"{name} was {old!r}, is {new!r}" for name, old, new in differing)
            names, advice = {name for name, *_ in differing}, ""
            if all(name.startswith(("fdc.", "calibrators")) for name in names):
                folder = self.features_folder
                advice = f" (python -m fdc_jax.posthoc {folder} fits calibrators again)"
            elif "classes_per_task" in names:
                sizes = ",".join(map(str, known_of(saved).sizes))
                advice = f" (classes_per_task={sizes},N learns N further classes)"
            raise InputError(
                f"{self.folder} holds a run of another configuration: {fields}; choose another "
                f"--workdir or the old values{advice}"
            )
        if not grown:
            return
        before = len(saved[PLANNED])
        if before != planned and task_count:
            _log.warning(
                "%s: was planned for %d tasks, is for %d; %s: a run that knew them all from the "
                "start would end otherwise",
                *(self.folder, before, planned, task_count),
            )
        write_json(self.config_file, own)

    def _grown(self, saved: dict[str, Any], own: dict[str, Any], differing: set[str]) -> set[str]:
        """Returns the differing fields, if they only mean that the run grows by further tasks.

        Raises:
            InputError: classes that the run knows are gone or have other images, or a task of it
                has other classes, though no field says so.
        """
        known, now, may_differ = known_of(saved), own[CLASSES], configuration.TASKS | _IMAGES
        changed = [name for name in known.classes if known.classes[name] != now.get(name)]
        if changed and differing <= may_differ:
            present = "other images" if changed[0] in now else "no such class"
            raise InputError(
                f"{self.folder}: expected the class {changed[0]} of {self._config.benchmark} as "
                f"this run knows it, found {present}; put it back, or choose another --workdir"
            )
        same = Known(now, own[PLANNED]).tasks[: len(known.tasks)] == known.tasks
        fewer = self._num_tasks < len(known.tasks)
        if not known.classes or changed or not same or fewer:
            return set()
        return differing & may_differ

    # Reading --------------------------------------------------------------------------------------

    @processes.on_first
    def finished(self) -> dict[str, Any] | None:
        """Returns the results of a run that has learned all of its tasks, or else None."""
        results = self.read_results()
        return results if results and results["num_tasks"] >= self._num_tasks else None

    @processes.on_first
    def has_fitted(self, num_tasks: int) -> bool:
        """Returns True if the calibrators of the first `num_tasks` tasks are saved."""
        return all(self.fitted_file(name, num_tasks).exists() for name in self._names)

    @processes.on_first
    def recorded(self, task: int) -> bool:
        """Returns True if the evaluation after a task is saved."""
        return self.record_file(task).exists()

    def calibrators(self, num_tasks: int) -> dict[str, Any]:
        """Returns the calibrators as they were after so many tasks, by name.

        Raises:
            InputError: a file is damaged.
        """

        def read() -> dict[str, np.ndarray]:
            return {
                name: np.frombuffer(
                    pickle.dumps(calibration.load(self.fitted_file(name, num_tasks))), np.uint8
                )
                for name in self._names
            }

        contents = processes.from_first(read) or {}
        return {name: pickle.loads(content.tobytes()) for name, content in contents.items()}

    @processes.on_first
    def forget_after(self, num_tasks: int) -> None:
        """Removes the records of tasks after the first `num_tasks`, which are learned again.

        Raises:
            InputError: a finished run would be trained again from its first task.
        """
        if num_tasks == 0 and self.results_file.exists():
            raise InputError(
                f"{self.folder} holds a finished run, and no checkpoint to go on from; remove "
                f"{self.results_file} to train again"
            )
        for task in self.recorded_tasks():
            if task >= num_tasks:
                self.record_file(task).unlink()

    # Writing --------------------------------------------------------------------------------------

    def event(self, kind: str, **values: Any) -> None:
        """Appends one line to `metrics.jsonl`, and passes it on to the loggers of `config.log`."""
        if not processes.is_first():
            return
        event = {"event": kind, "time": round(time.time(), 3), **values}
        line = json.dumps(event)
        path = self.folder / "metrics.jsonl"
        try:
            with open(path, "a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror}") from error
        self._loggers.add(event)

    @processes.on_first
    def keep_previous(self, task: int, features: Float[np.ndarray, "n d"]) -> None:
        """Writes E_{t-1}(D_t) before the task is learned, after which E_{t-1} may be gone."""
        write_npy(self.features_folder / f"train_previous_{task}.npy", features)

    def previous(self, task: int) -> Float[np.ndarray, "n d"] | None:
        """Returns the features of `keep_previous`, or None if it was not called for the task."""
        path = self.features_folder / f"train_previous_{task}.npy"
        read = processes.from_first(lambda: {"n": read_npy(path)} if path.exists() else None)
        return None if read is None else read["n"]

    @processes.on_first
    def keep(self, task: int, calibrators: Mapping[str, Any], features: TaskFeatures) -> None:
        """Writes the calibrators after a task, and the features of its images, if wanted."""
        if self._config.save_features:
            given = features._asdict()
            del given["final_head"]
            feature_files.write_task(self.features_folder, task, **given)
        for name, calibrator in calibrators.items():
            calibrator.save(self.fitted_file(name, task + 1))
            for earlier in range(1, task + 1 - self._config.checkpoint.keep):
                self.fitted_file(name, earlier).unlink(missing_ok=True)
        if not self._config.save_features:
            (self.features_folder / f"train_previous_{task}.npy").unlink(missing_ok=True)

    @processes.on_first
    def record(self, record: dict[str, Any]) -> None:
        """Writes the evaluation after a task."""
        write_json(self.record_file(record["task"]), record)
        self.event("evaluation", **record)

    @processes.on_first
    def records(self) -> list[dict[str, Any]]:
        """Returns the evaluations after each task."""
        return self.read_records()

    @processes.on_first
    def keep_test(
        self,
        adapted: Float[np.ndarray, "n d"],
        pretrained: Float[np.ndarray, "n d"] | None,
        labels: Int[np.ndarray, " n"],
        heads: list[Any],
    ) -> None:
        """Writes the features of test images and the final heads, if wanted."""
        if self._config.save_features:
            feature_files.write_final_heads(self.features_folder, heads)
            feature_files.write_test(self.features_folder, adapted, pretrained, labels)

    @processes.on_first
    def keep_predictions(self, columns: dict[str, Any], class_names: Sequence[str]) -> None:
        """Writes `predictions.npz`: columns with a row per test image, and the names of classes."""
        with write_atomically(self.predictions_file) as file:
            np.savez_compressed(file, **columns, class_names=np.array(class_names))

    @processes.on_first
    def finish(self, calibrators: Mapping[str, Any], results: dict[str, Any]) -> None:
        """Writes the calibrators of all tasks, and the results as the last file of a run."""
        for name, calibrator in calibrators.items():
            calibrator.save(self.calibrator_file(name))
        write_json(self.results_file, results)
