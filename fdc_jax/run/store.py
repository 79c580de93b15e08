"""What a run writes into its work directory; of several processes the first alone does."""

import contextlib
import itertools
import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from fdc_jax import calibration
from fdc_jax.errors import InputError
from fdc_jax.features import feature_files
from fdc_jax.machine import processes
from fdc_jax.machine.files import (
    read_npy,
    read_npz,
    write_atomically,
    write_json,
    write_npy,
)
from fdc_jax.run import configuration
from fdc_jax.run.configuration import Config
from fdc_jax.run.places import (
    CLASSES,
    MEASURED_AGAIN,
    PLANNED,
    WRITTEN_AGAIN,
    Places,
    known_of,
    read_object,
)
from fdc_jax.run.setup import Experiment

_log = logging.getLogger(__name__)

# Images that rounding on another device may move over an edge.
_ON_THE_EDGE = 2


class Store(Places):
    """The work directory of one seed of one configuration.

    Args:
        folder: made when missing.
        config: the run's configuration, `seed` being this run's alone.
        e: what its seeds share.

    Raises:
        InputError: the folder belongs to another configuration; the differing fields are named.
    """

    def __init__(self, folder: str | os.PathLike[str], config: Config, e: Experiment):
        super().__init__(folder)
        self._config, self._two_views = config, config.fdc.pretrained_view_weight > 0
        self._num_tasks = e.num_tasks
        self._claim(e)

    @processes.on_first
    def _claim(self, e: Experiment) -> None:
        own = configuration.flatten(self._config) | e.checksums
        own |= {CLASSES: e.tasks.class_checksums, PLANNED: list(e.setup.classes_per_task)}
        if not self.config_file.exists():
            if self.results_file.exists() or self.checkpoints_folder.exists():
                raise InputError(
                    f"{self.folder} holds a run without its config.json, so that nobody knows "
                    "which one; put the file back or choose another --workdir"
                )
            write_json(self.config_file, own)
            return
        saved = read_object(self.config_file, "put it back, or choose another --workdir")
        if self.results_file.exists():
            results = read_object(self.results_file, WRITTEN_AGAIN)
            for name, value in results.get("config", {}).items():
                known = configuration.WITHOUT_EFFECT | configuration.TASKS  # These may have grown.
                if name not in known and saved.get(name, value) != value:
                    raise InputError(
                        f"{self.folder}: config.json says {name} {saved[name]!r}, results.json "
                        f"{value!r}; put back the file that was changed, or choose another "
                        "--workdir"
                    )
        differing = configuration.differences(saved, self._config, e.checksums)
        grown = self._grown(saved, {name for name, *_ in differing}, e)
        differing = [each for each in differing if each[0] not in grown]
        fields = ", ".join(f"{name} was {old!r}, is {new!r}" for name, old, new in differing)
        if not all(name.startswith("fdc.") for name, _, _ in differing):
            raise InputError(
                f"{self.folder} holds a run of another configuration: {fields}; "
                f"choose another --workdir or the old values"
            )
        if differing:
            self._begin_refit(fields)
        if grown:
            tasks = saved.get("num_tasks") or len(saved[PLANNED])
            self._tell_of_growth(tasks, len(saved[PLANNED]), e)
        if differing or grown:
            write_json(self.config_file, own)

    def _grown(self, saved: dict[str, Any], differing: set[str], e: Experiment) -> set[str]:
        """Returns the differing fields that say no more than that the run grows by further tasks.

        Raises:
            InputError: classes that the run knows are gone or have other images, or a task of it
                has other classes, though no field says so.
        """
        known, images = known_of(saved), {"training images sha256", "test images sha256"}
        now = e.tasks.class_checksums
        changed = [name for name in known.classes if known.classes[name] != now.get(name)]
        if changed and not differing - images - configuration.TASKS:
            found = "other images" if changed[0] in now else "no such class"
            raise InputError(
                f"{self.folder}: expected the class {changed[0]} of {e.config.benchmark} as this "
                f"run knows it, found {found}; put it back, or choose another --workdir"
            )
        names = iter(now)
        tasks = [list(itertools.islice(names, size)) for size in e.tasks.planned]
        differ = [old for task, old in enumerate(known.tasks) if tasks[task : task + 1] != [old]]
        if not known.classes or changed or differ or e.num_tasks < len(known.tasks):
            return set()
        return differing & (configuration.TASKS | images)

    def _tell_of_growth(self, tasks: int, planned: int, e: Experiment) -> None:
        if tasks < e.num_tasks:
            _log.warning("%s: goes on from %d tasks to %d", self.folder, tasks, e.num_tasks)
        if planned != e.setup.num_tasks and e.learner.task_count:
            _log.warning(
                "%s: was planned for %d tasks, is for %d; %s: a run that knew them all from the "
                "start would end otherwise",
                *(self.folder, planned, e.setup.num_tasks, e.learner.task_count),
            )

    def _begin_refit(self, fields: str) -> None:
        """Makes FDC be fitted and evaluated again, in other settings, from saved features."""
        fitted = self.fitted_files()
        if fitted:
            if lacking := self._lacking(range(int(fitted[-1].stem.removeprefix("calibrator_")))):
                if lacking.startswith("train_previous"):
                    raise InputError(
                        f"{self.folder} was trained without fdc.transport, which needs features of "
                        "the encoder before each task and so must be on from the first one; choose "
                        "another --workdir or the old values"
                    )
                raise InputError(
                    f"{self.folder} was trained with other settings of FDC ({fields}), and its "
                    f"features, to fit FDC again, were not all saved ({lacking} is missing; see "
                    "config.save_features); choose another --workdir or the old values"
                )
            _log.warning("%s: FDC is fitted again from saved features: %s", self.folder, fields)
        for task in self.recorded_tasks():
            self._mark_stale(task)
        for path in (self.results_file, self.calibrator_file, self.predictions_file, *fitted):
            path.unlink(missing_ok=True)

    # What is there -------------------------------------------------------------------------------

    @processes.on_first
    def finished(self) -> dict[str, Any] | None:
        """Returns the results of a run that is complete; None where something is to be made.

        Raises:
            InputError: something is missing or damaged that only another training would give.
        """
        if not self.results_file.exists():
            return None
        results = read_object(self.results_file, WRITTEN_AGAIN)
        if "num_tasks" not in results:
            raise InputError(
                f"{self.results_file}: expected num_tasks, found none; {WRITTEN_AGAIN}"
            )
        tasks = range(results["num_tasks"])
        if len(tasks) < self._num_tasks:
            return None
        evaluated = [self.predictions_file]
        if self._config.save_features and self.features_folder.exists():
            saved = (path for t in tasks for path in self.features_folder.glob(f"*_{t}.npy"))
            damaged = (path.name for path in saved if not _is_whole(path))
            if name := self._lacking(tasks) or next(damaged, None):
                raise InputError(
                    f"{self.features_folder / name}: missing or damaged, and only training would "
                    "give it again; the results stand without it: remove the folder "
                    f"{self.features_folder} to keep them"
                )
            views = ["adapted", *["pretrained"] * self._two_views]
            evaluated += [self.features_folder / f"test_{name}.npy" for name in (*views, "labels")]
        missing = [str(p.relative_to(self.folder)) for p in evaluated if not _is_whole(p)]
        if missing and tasks[-1] in self.recorded_tasks():
            self._mark_stale(tasks[-1])  # They come from the last evaluation, which is repeated.
        if not _is_whole(self.calibrator_file):
            missing.append(self.calibrator_file.name)
        if missing:
            _log.warning("%s: made again: %s", self.folder, ", ".join(missing))
        return None if missing else results

    def _lacking(self, tasks: Sequence[int]) -> str | None:
        """Returns the name of a file without which tasks cannot be fitted again.

        Of a head those parts are needed that any other task has.
        """
        heads = {path.stem.rpartition("_")[0] for path in self.features_folder.glob("head_*_*.npy")}
        needed = ["train_adapted", "train_labels", "head_weight", *sorted(heads)]
        needed += ["train_pretrained"] * self._two_views
        names = [f"{name}_{task}.npy" for task in tasks for name in needed]
        if self._config.fdc.transport:
            names += [f"train_previous_{task}.npy" for task in tasks if task]
        names.append("head_kind.npy")
        return next((name for name in names if not (self.features_folder / name).exists()), None)

    def calibrator(
        self, tasks_done: int, step: int, due: Sequence[int], heads: Sequence[Any]
    ) -> Any | None:
        """Returns the calibrator to go on with, fitted on as many tasks as possible, if any.

        Tasks that it lacks have saved features, but for the last trained one, whose encoder is at
        hand after `tasks_done` tasks and no step of the next one. Those in `due` are to be scored.
        `heads` are of all tasks done, for a calibrator that lacks them as they are functions.
        """

        def loaded(arrays: Mapping[str, np.ndarray]) -> Any:
            return calibration.load(arrays, lambda num_tasks: heads[:num_tasks])

        def loadable(path: Path) -> dict[str, np.ndarray] | None:
            with contextlib.suppress(InputError):
                loaded(arrays := read_npz(path))
                return arrays
            return None

        def usable() -> dict[str, np.ndarray] | None:
            """Returns the arrays of a calibrator, none for one before its first task."""
            unrecorded = (task for task in due if not self._is_recorded(task))
            newest = min(tasks_done, next(unrecorded, tasks_done) + 1)
            for num_tasks in range(newest, -1, -1):
                found = loadable(self.fitted_file(num_tasks)) if num_tasks else {}
                again = range(num_tasks, tasks_done if step else tasks_done - 1)
                if self._config.fdc.transport and num_tasks < tasks_done > 1:
                    # The encoder before the last trained task is gone.
                    if not _is_whole(self._previous_file(tasks_done - 1)):
                        continue
                if found is not None and not (again and self._lacking(again)):
                    return found
            return None

        arrays = processes.from_first(usable)
        if arrays is None:
            return None
        if not arrays:
            return calibration.from_settings(self._config.fdc.to_dict())
        return loaded(arrays)

    def task_features(self, task: int) -> feature_files.TaskFeatures | None:
        """Returns the saved features of a task; None unless all are there."""

        def read() -> dict[str, np.ndarray] | None:
            if self._lacking([task]):
                return None
            names = [*self.features_folder.glob(f"*_{task}.npy")]
            return {
                path.stem: read_npy(path)
                for path in (*names, self.features_folder / "head_kind.npy")
                if self._two_views or not path.stem.startswith("train_pretrained")
            }

        arrays = processes.from_first(read)
        return None if arrays is None else feature_files.read_task(arrays, task)

    def previous_features(self, task: int) -> Float[np.ndarray, "n d"] | None:
        """Returns saved features of a task's images by the encoder before it, if they are there."""

        def read() -> dict[str, np.ndarray] | None:
            with contextlib.suppress(InputError):  # Missing or damaged: made again.
                return {"n": read_npy(self._previous_file(task))}
            return None

        arrays = processes.from_first(read)
        return None if arrays is None else arrays["n"]

    def _previous_file(self, task: int) -> Path:
        return self.features_folder / f"train_previous_{task}.npy"

    # What a run adds -----------------------------------------------------------------------------

    def event(self, kind: str, **values: Any) -> None:
        """Appends one line to `metrics.jsonl`."""
        if not processes.is_first():
            return
        line = json.dumps({"event": kind, "time": round(time.time(), 3), **values})
        path = self.folder / "metrics.jsonl"
        try:
            with open(path, "a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror}") from error

    @processes.on_first
    def save_calibrator(self, calibrator: Any, keep: int) -> None:
        """Writes the calibrator and removes all but the newest `keep` before it."""
        calibrator.save(self.fitted_file(calibrator.num_tasks))
        for num_tasks in range(1, calibrator.num_tasks - keep):
            self.fitted_file(num_tasks).unlink(missing_ok=True)

    @processes.on_first
    def save_previous_features(self, task: int, features: Float[np.ndarray, "n d"]) -> None:
        """Writes them before the task is learned, after which that encoder may be gone."""
        write_npy(self._previous_file(task), features)

    @processes.on_first
    def save_task_features(self, task: int, features: feature_files.TaskFeatures) -> None:
        """Writes what `fdc_jax.posthoc` reads of a task."""
        if self._continues(task):
            arrays = features._asdict()
            del arrays["final_head"]
            feature_files.write_task(self.features_folder, task, **arrays)

    @processes.on_first
    def save_test_features(
        self,
        adapted: Float[np.ndarray, "n d"],
        pretrained: Float[np.ndarray, "n d"] | None,
        labels: Int[np.ndarray, " n"],
        heads: list[Any],
    ) -> None:
        """Writes the features of test images, and the heads that they meet."""
        if self._continues(len(heads)):
            feature_files.write_final_heads(self.features_folder, heads)
            feature_files.write_test(self.features_folder, adapted, pretrained, labels)

    def _continues(self, tasks: int) -> bool:
        """Tells whether the first tasks' features are there, without which no others are kept."""
        lacking = self._lacking(range(tasks)) if tasks else None
        if lacking:
            _log.warning("%s: without %s no features are kept", self.features_folder, lacking)
        return lacking is None

    @processes.on_first
    def save_predictions(self, columns: dict[str, Any], class_names: Sequence[str]) -> None:
        """Writes `predictions.npz`: columns of a row per test image, and what their labels mean."""
        with write_atomically(self.predictions_file) as file:
            np.savez_compressed(file, **columns, class_names=np.array(class_names))

    @processes.on_first
    def finish(self, calibrator: Any, results: dict[str, Any]) -> None:
        """Writes the calibrator of all tasks, and the results."""
        calibrator.save(self.calibrator_file)
        write_json(self.results_file, results)

    # Accuracies after each task ------------------------------------------------------------------

    @processes.on_first
    def recorded(self, task: int) -> bool:
        """Tells whether test images were scored after a task, with the present settings of FDC."""
        return self._is_recorded(task)

    def _is_recorded(self, task: int) -> bool:
        return task in self.recorded_tasks() and self._record(task).get("stale") is not True

    def _record(self, task: int) -> dict[str, Any]:
        return read_object(self.record_file(task), MEASURED_AGAIN)

    def _mark_stale(self, task: int) -> None:
        write_json(self.record_file(task), self._record(task) | {"stale": True})

    @processes.on_first
    def records(self) -> list[dict[str, Any]]:
        """Returns what was measured after each task, but for tasks that the curve lacks."""
        records = [self._record(task) for task in self.recorded_tasks()]
        return [record for record in records if "stale" not in record]

    @processes.on_first
    def record(self, record: dict[str, Any]) -> None:
        """Keeps what was measured after a task.

        A task that is scored once more, with other settings of FDC, must give the accuracies of its
        time without FDC. Learners that rewrite earlier heads or encoders do not have those of that
        time any more; the curve then lacks this point.
        """
        task = record["task"]
        if task in self.recorded_tasks():
            before = self._record(task)
            known, found = before["accuracy"], record["accuracy"]
            moved = max(abs(known[name] - found[name]) for name in ("raw", "oracle"))
            record["timing"] = before["timing"] | record["timing"]
            record["peak_memory"] = before.get("peak_memory", record["peak_memory"])
            if moved * record["test_images"] > 100 * _ON_THE_EDGE:
                _log.warning(
                    "%s: the learner's final state does not repeat the accuracies after task %d, "
                    "which the curve will lack",
                    self.folder,
                    task + 1,
                )
                record["stale"] = "not repeated"
        write_json(self.record_file(task), record)
        self.event("evaluation", **record)

    @processes.on_first
    def go_on(self, tasks_done: int) -> None:
        """Forgets what was measured after tasks that will be trained again.

        Raises:
            InputError: a finished run would be trained again from its first task.
        """
        if tasks_done == 0 and self.results_file.exists():
            raise InputError(
                f"{self.folder} holds a finished run of which something is missing, and no "
                f"checkpoint to make it from; remove {self.results_file} to train again"
            )
        for task in self.recorded_tasks():
            if task >= tasks_done:
                self.record_file(task).unlink()


def _is_whole(path: Path) -> bool:
    """Tells whether an array file or archive is there and can be read."""
    try:
        read_npz(path) if path.suffix == ".npz" else read_npy(path)
    except InputError:
        return False
    return True
