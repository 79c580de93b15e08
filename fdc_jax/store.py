"""Everything that lies in a work directory: written by a run, opened again by anybody.

Of several processes the first alone reads and writes it.
"""

import contextlib
import fcntl
import functools
import importlib.metadata
import json
import logging
import os
import platform
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_collections
import numpy as np
from jaxtyping import Float, Int, UInt8

import fdc_jax
from fdc_jax import (
    calibration,
    configuration,
    devices,
    evaluation,
    feature_files,
    learners,
    processes,
)
from fdc_jax.checkpoint import Checkpoints
from fdc_jax.configuration import Config
from fdc_jax.data.batches import Batch, evaluation_images
from fdc_jax.data.benchmarks import BENCHMARKS
from fdc_jax.errors import InputError
from fdc_jax.evaluation import BEYOND
from fdc_jax.experiment import Experiment
from fdc_jax.files import read_json, read_npy, read_npz, write_atomically, write_json
from fdc_jax.model import vit

_log = logging.getLogger(__name__)

# Images that rounding on another device may move over an edge.
_ON_THE_EDGE = 2
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "tensorflow-datasets", "numpy")


class _Places:
    """Names of the files in the work directory of one seed."""

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = Path(folder)
        self.checkpoints_folder = self.folder / "checkpoints"
        self.features_folder = self.folder / "features"  # in the form that `fdc_jax.posthoc` reads
        self.config_file = self.folder / "config.json"
        self.results_file = self.folder / "results.json"  # the last one that a run writes
        self.predictions_file = self.folder / "predictions.npz"
        self.calibrator_file = self.folder / "calibrator.npz"

    def record_file(self, task: int) -> Path:
        """File of what was measured after a task, counted from 0."""
        return self.folder / "tasks" / f"task_{task:03d}.json"

    def fitted_file(self, num_tasks: int) -> Path:
        """File of the calibrator fitted on the first `num_tasks` tasks, ready for more."""
        return self.folder / "calibrators" / f"calibrator_{num_tasks:03d}.npz"


class Store(_Places):
    """The work directory of one seed of one configuration, while a run fills it.

    Args:
        folder: made when missing.
        config: the run's configuration, `seed` being this run's alone.
        checksums: of the weights and images, by name.

    Raises:
        InputError: the folder belongs to another configuration; the differing fields are named.
    """

    def __init__(self, folder: str | os.PathLike[str], config: Config, checksums: dict[str, str]):
        super().__init__(folder)
        self._config, self._two_views = config, config.fdc.pretrained_view_weight > 0
        self._claim(configuration.flatten(config) | checksums, checksums)

    @processes.on_first
    def _claim(self, own: dict[str, Any], checksums: dict[str, str]) -> None:
        if not self.config_file.exists():
            if self.results_file.exists() or self.checkpoints_folder.exists():
                raise InputError(
                    f"{self.folder} holds a run without its config.json, so that nobody knows "
                    "which one; put the file back or choose another --workdir"
                )
            write_json(self.config_file, own)
            return
        saved = _read(self.config_file, "put it back, or choose another --workdir")
        if self.results_file.exists():
            self._compare_with_results(saved)
        differing = configuration.differences(saved, self._config, checksums)
        fields = ", ".join(f"{name} was {old!r}, is {new!r}" for name, old, new in differing)
        if not all(name.startswith("fdc.") for name, _, _ in differing):
            raise InputError(
                f"{self.folder} holds a run of another configuration: {fields}; "
                f"choose another --workdir or the old values"
            )
        if differing:
            self._begin_refit(fields)
            write_json(self.config_file, own)

    def _compare_with_results(self, saved: dict[str, Any]) -> None:
        results = _read(self.results_file, "remove it, and the run writes it again")
        for name, value in results.get("config", {}).items():
            if name not in configuration.WITHOUT_EFFECT and saved.get(name, value) != value:
                raise InputError(
                    f"{self.folder}: config.json says {name} {saved[name]!r}, results.json "
                    f"{value!r}; put back the file that was changed, or choose another --workdir"
                )

    def _begin_refit(self, fields: str) -> None:
        """Makes FDC be fitted and evaluated again, in other settings, from saved features."""
        fitted = sorted(self.folder.glob("calibrators/calibrator_*.npz"))
        if fitted:
            for task in range(int(fitted[-1].stem.removeprefix("calibrator_"))):
                if lacking := self._lacking(task):
                    raise InputError(
                        f"{self.folder} was trained with other settings of FDC ({fields}), and "
                        f"its features, to fit FDC again, were not all saved ({lacking} is "
                        "missing; see config.save_features); choose another --workdir or the old "
                        "values"
                    )
            _log.warning("%s: FDC is fitted again from saved features: %s", self.folder, fields)
        for path in self.folder.glob("tasks/task_*.json"):
            write_json(path, _read(path, _MEASURED_AGAIN) | {"stale": True})
        for path in (self.results_file, self.calibrator_file, self.predictions_file, *fitted):
            path.unlink(missing_ok=True)

    def _lacking(self, task: int) -> str | None:
        """Returns the name of a file without which a task cannot be fitted again.

        Of a head those parts are needed that any other task has.
        """
        heads = {path.stem.rpartition("_")[0] for path in self.features_folder.glob("head_*_*.npy")}
        needed = ["train_adapted", "train_labels", "head_weight", *sorted(heads)]
        needed += ["train_pretrained"] * self._two_views
        names = (*(f"{name}_{task}.npy" for name in needed), "head_kind.npy")
        return next((name for name in names if not (self.features_folder / name).exists()), None)

    @processes.on_first
    def finished(self) -> dict[str, Any] | None:
        """Returns the results of a run that is complete; None where something is to be made.

        Raises:
            InputError: something is missing or damaged that only another training would give.
        """
        if not self.results_file.exists():
            return None
        remedy = "remove it, and the run writes it again"
        results = _read(self.results_file, remedy)
        if "num_tasks" not in results:
            raise InputError(f"{self.results_file}: expected num_tasks, found none; {remedy}")
        last = results["num_tasks"] - 1
        evaluated = [self.predictions_file]
        if self._config.save_features and self.features_folder.exists():
            for task in range(last + 1):
                files = self.features_folder.glob(f"*_{task}.npy")
                damaged = (path.name for path in files if not _is_whole(path))
                if name := self._lacking(task) or next(damaged, None):
                    raise InputError(
                        f"{self.features_folder / name}: missing or damaged, and only training "
                        "would give it again; the results stand without it: remove the folder "
                        f"{self.features_folder} to keep them"
                    )
            views = ["adapted", *["pretrained"] * self._two_views]
            evaluated += [self.features_folder / f"test_{name}.npy" for name in (*views, "labels")]
        missing = [str(p.relative_to(self.folder)) for p in evaluated if not _is_whole(p)]
        if missing and (record := self._record(last)) is not None:
            # They come from the last evaluation, which is repeated.
            write_json(self.record_file(last), record | {"stale": True})
        if _calibrator(_bytes(self.calibrator_file)) is None:
            missing.append(self.calibrator_file.name)
        if missing:
            _log.warning("%s: made again: %s", self.folder, ", ".join(missing))
        return None if missing else results

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
    def recorded(self, task: int) -> bool:
        """Tells whether test images were scored after a task, with the present settings of FDC."""
        return self._is_recorded(task)

    def _is_recorded(self, task: int) -> bool:
        record = self._record(task)
        return record is not None and record.get("stale") is not True

    def _record(self, task: int) -> dict[str, Any] | None:
        path = self.record_file(task)
        return _read(path, _MEASURED_AGAIN) if path.exists() else None

    @processes.on_first
    def record(self, record: dict[str, Any]) -> None:
        """Keeps what was measured after a task.

        A task that is scored once more, with other settings of FDC, must give the accuracies of its
        time without FDC. Learners that rewrite earlier heads or encoders do not have those of that
        time any more; the curve then lacks this point.
        """
        path, before = self.record_file(record["task"]), self._record(record["task"])
        if before is not None:
            known, found = before["accuracy"], record["accuracy"]
            moved = max(abs(known[name] - found[name]) for name in ("raw", "oracle"))
            record["timing"] = before["timing"] | record["timing"]
            record["peak_memory"] = before.get("peak_memory", record["peak_memory"])
            if moved * record["test_images"] > 100 * _ON_THE_EDGE:
                _log.warning(
                    "%s: the learner's final state does not repeat the accuracies after task %d, "
                    "which the curve will lack",
                    self.folder,
                    record["task"] + 1,
                )
                record["stale"] = "not repeated"
        write_json(path, record)
        self.event("evaluation", **record)

    @processes.on_first
    def forget_after(self, num_tasks: int) -> None:
        """Removes the records of tasks from `num_tasks` on, which will be measured again."""
        self._forget_after(num_tasks)

    def _forget_after(self, num_tasks: int) -> None:
        for path in self.folder.glob("tasks/task_*.json"):
            if int(path.stem.removeprefix("task_")) >= num_tasks:
                path.unlink()

    @processes.on_first
    def restart(self) -> None:
        """Makes ready for training from the first task; refuses to train a finished run again."""
        if self.results_file.exists():
            raise InputError(
                f"{self.folder} holds a finished run of which something is missing, and no "
                f"checkpoint to make it from; remove {self.results_file} to train again"
            )
        self._forget_after(0)

    def calibrator(self, e: Experiment, tasks_done: int, step: int) -> Any | None:
        """Returns the calibrator to go on with, fitted on as many tasks as possible, if any.

        Tasks that it lacks have saved features, but for the last trained one, whose encoder is at
        hand after `tasks_done` tasks and no step of the next one.
        """
        content = processes.from_first(lambda: self._usable(e, tasks_done, step))
        if content is None:
            return None
        return _calibrator(content["file"]) if content["file"].size else e.new_calibrator()

    def _usable(self, e: Experiment, tasks_done: int, step: int) -> dict[str, np.ndarray] | None:
        """Returns the bytes of a calibrator, none for one before its first task."""
        unrecorded = (
            task
            for task in range(tasks_done)
            if e.evaluates_after(task) and not self._is_recorded(task)
        )
        newest = min(tasks_done, next(unrecorded, tasks_done) + 1)
        for num_tasks in range(newest, -1, -1):
            content, path = np.zeros(0, np.uint8), self.fitted_file(num_tasks)
            if num_tasks:
                content = _bytes(path)
                found = _calibrator(content)
                if found is None or found.num_tasks != num_tasks:
                    continue
            again = range(num_tasks, tasks_done if step else tasks_done - 1)
            if not any(self._lacking(task) for task in again):
                return {"file": content}
        return None

    @processes.on_first
    def save_calibrator(self, calibrator: Any, keep: int) -> None:
        """Writes the calibrator and removes all but the newest `keep` before it."""
        calibrator.save(self.fitted_file(calibrator.num_tasks))
        for num_tasks in range(1, calibrator.num_tasks - keep):
            self.fitted_file(num_tasks).unlink(missing_ok=True)

    def task_features(self, task: int) -> feature_files.TaskFeatures | None:
        """Returns the saved features of a task; None unless all are there."""

        def read() -> dict[str, np.ndarray] | None:
            if self._lacking(task):
                return None
            paths = [
                *self.features_folder.glob(f"*_{task}.npy"),
                self.features_folder / "head_kind.npy",
            ]
            return {
                path.stem: read_npy(path)
                for path in paths
                if self._two_views or not path.stem.startswith("train_pretrained")
            }

        arrays = processes.from_first(read)
        return arrays and feature_files.read_task(arrays, task)

    @processes.on_first
    def save_task_features(self, task: int, features: feature_files.TaskFeatures) -> None:
        """Writes what `fdc_jax.posthoc` reads of a task."""
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
        feature_files.write_final_heads(self.features_folder, heads)
        feature_files.write_test(self.features_folder, adapted, pretrained, labels)

    @processes.on_first
    def save_predictions(self, columns: dict[str, Any]) -> None:
        """Writes `predictions.npz`, one row per test image in each column."""
        with write_atomically(self.predictions_file) as file:
            np.savez_compressed(file, **columns)

    @processes.on_first
    def finish(self, e: Experiment, seed: int, calibrator: Any) -> dict[str, Any]:
        """Writes the calibrator without its foreign samples, and the results, which it returns."""
        records = [self._record(task) for task in range(e.setup.num_tasks)]
        records = [record for record in records if record and "stale" not in record]
        calibrator.finalize(release=True)
        calibrator.save(self.calibrator_file)
        results = _collect(e, seed, calibrator, records)
        write_json(self.results_file, results)
        return results


_MEASURED_AGAIN = "remove it, and its accuracies are measured again"


def _read(path: Path, remedy: str) -> dict[str, Any]:
    """Reads a JSON object of the work directory; an error says what to do."""
    try:
        found = read_json(path)
    except InputError as error:
        raise InputError(f"{error}; {remedy}") from error
    if not isinstance(found, dict):
        raise InputError(f"{path}: expected a JSON object, found {type(found).__name__}; {remedy}")
    return found


def _bytes(path: Path) -> np.ndarray:
    """Returns what a file holds, nothing of none."""
    return np.fromfile(path, np.uint8) if path.exists() else np.zeros(0, np.uint8)


def _calibrator(content: np.ndarray) -> Any | None:
    """Returns a calibrator from the bytes of its file, None if they are damaged."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "calibrator.npz"
        content.tofile(path)
        try:
            return calibration.load(path)
        except InputError:
            return None


def _is_whole(path: Path) -> bool:
    """Tells whether an array file or archive is there and can be read."""
    try:
        read_npz(path) if path.suffix == ".npz" else read_npy(path)
    except InputError:
        return False
    return True


@contextlib.contextmanager
def locked(*folders: Path) -> Iterator[None]:
    """Keeps other runs out of work directories, by locks that end with the process.

    Raises:
        InputError: a run of another process is there; names it.
    """
    with contextlib.ExitStack() as held:

        @processes.on_first
        def take() -> None:
            for folder in folders:
                _lock(folder, held)

        take()
        yield


def _lock(folder: Path, held: contextlib.ExitStack) -> None:
    path = folder / ".lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = held.enter_context(open(path, "a+", encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        raise InputError(
            f"{folder} is in use by {file.read().strip() or 'another process'}; wait for it, stop "
            "it or choose another --workdir"
        ) from error
    except OSError:
        _log.warning("%s: the file system has no locks; start one run alone there", folder)
    # What a process that was killed has left is its name, not its lock.
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    held.callback(file.truncate, 0)


class Run(_Places):
    """A finished or stopped work directory of one seed; nothing is trained or changed.

    Args:
        folder: the work directory.
        data_dir: where the images lie, if no longer where they did.
        weights: file of the pretrained encoder, if no longer where it was.

    Attributes:
        config: the run's configuration.
        results: what `results.json` holds, None before the run is finished.

    Raises:
        InputError: no run lies there. What else it needs, data or weights or a checkpoint, is
            looked for when it is asked for.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        data_dir: str | None = None,
        weights: str | None = None,
    ):
        super().__init__(folder)
        if not self.config_file.exists():
            raise InputError(
                f"{self.folder}: expected the work directory of a run, found no config.json"
            )
        saved = _read(self.config_file, "it says what the run is, and cannot be opened without")
        self.config = _configuration(saved)
        self._weights_sha256 = saved.get("weights sha256")
        if data_dir is not None:
            self.config.data.dir = data_dir
        if weights is not None:
            self.config.encoder.weights = weights
        self.results: dict[str, Any] | None = None
        if self.results_file.exists():
            self.results = _read(self.results_file, "remove it, and the run writes it again")

    @functools.cached_property
    def experiment(self) -> Experiment:
        """Learner, encoder, devices and, when asked for, data."""
        known = None
        try:
            if self.results is not None:
                known = _classes_per_task(self.config, self.results["num_classes"])
            e = Experiment(self.config, quiet=True, classes_per_task=known)
        except (AttributeError, KeyError) as error:
            raise InputError(
                f"{self.config_file}: lacks a field of this version: {error}"
            ) from error
        if self._weights_sha256 not in (None, e.pretrained.sha256):
            raise InputError(
                f"{e.pretrained.path}: expected the weights that {self.folder} was run with, "
                f"sha256 {self._weights_sha256}, found {e.pretrained.sha256}"
            )
        return e

    @property
    def num_tasks(self) -> int:
        """Number of tasks of the stream."""
        return self.results["num_tasks"] if self.results else self.experiment.setup.num_tasks

    @property
    def class_names(self) -> list[str]:
        """Names of the classes by class-order position; needs the data."""
        return self.experiment.tasks.class_names

    @functools.cached_property
    def _saved(self) -> tuple[Any, int]:
        """State of the learner from the newest readable checkpoint, and its number of tasks."""
        e, seed = self.experiment, next(iter(self.config.seed))
        checkpoints = Checkpoints(self.checkpoints_folder, read_only=True)
        try:
            for number, cursor in checkpoints.cursors():
                target = e.checkpoint(cursor["tasks_done"], cursor["step"], seed)
                tree = checkpoints.restore(number, target)
                if tree is not None:
                    return tree["state"], cursor["tasks_done"]
        finally:
            checkpoints.close()
        raise InputError(f"{self.checkpoints_folder}: expected a checkpoint of the run, found none")

    def encoder(self, t: int) -> vit.KeyValueKernels:
        """Returns the kernels of E_t: after t tasks, 0 being the pretrained encoder.

        Raises:
            InputError: so many tasks were not trained, or there is no checkpoint.
        """
        e = self.experiment
        if t == 0:
            return vit.pretrained_kernels(e.backbone)
        state, tasks_done = self._saved
        if not 0 < t <= tasks_done:
            raise InputError(f"{self.folder}: expected E_0 to E_{tasks_done}, found E_{t}")
        return e.learner.encoder(e.setup, e.backbone, state, t)

    def heads(self, num_tasks: int | None = None) -> list[Any]:
        """Returns the heads of the first tasks, by default of all that were trained."""
        e, (state, tasks_done) = self.experiment, self._saved
        num_tasks = tasks_done if num_tasks is None else num_tasks
        if not 0 <= num_tasks <= tasks_done:
            raise InputError(f"{self.folder}: expected up to {tasks_done} heads, found {num_tasks}")
        return devices.to_host(e.learner.heads(e.setup, state, num_tasks)) if num_tasks else []

    def calibrator(self) -> Any:
        """Returns FDC as it was fitted, on all tasks or on those of a run that stopped."""
        found = sorted(self.folder.glob("calibrators/calibrator_*.npz"))
        found += [self.calibrator_file] * self.calibrator_file.exists()
        if not found:
            raise InputError(f"{self.folder}: expected a calibrator, found none")
        return calibration.load(found[-1])

    @functools.cached_property
    def predictions(self) -> dict[str, np.ndarray]:
        """Columns of `predictions.npz`, one row per test image."""
        return read_npz(self.predictions_file)

    def features(
        self, images: UInt8[np.ndarray, "n s s 3"] | Int[np.ndarray, " n"], t: int
    ) -> Float[np.ndarray, "n d"]:
        """Returns features by E_t of images, or of the test images of some rows of predictions."""
        images = np.asarray(images)
        if images.ndim == 1:
            images = self.test_images(images)
        size = min(self.config.evaluation.batch_size, max(1, len(images)))
        e, kernels = self.experiment, self.encoder(t)
        return e.extract(e.backbone, [kernels], _batches(images, size))[0].features

    def test_images(self, rows: Int[np.ndarray, " n"]) -> UInt8[np.ndarray, "n s s 3"]:
        """Returns test images, by rows of `predictions.npz`, as an encoder sees them unscaled.

        Raises:
            InputError: the data cannot be read, or are not those of the run.
        """
        tasks = self.experiment.tasks
        if not np.array_equal(tasks.test_labels, self.predictions["label"]):
            raise InputError(
                f"{self.folder}: its predictions are not of the test images of "
                f"{self.config.benchmark} that were found"
            )
        indices = tasks.test_indices[np.asarray(rows)]
        return evaluation_images(tasks.test, indices, self.config.encoder.image_size)


def _configuration(saved: dict[str, Any]) -> Config:
    """Returns the configuration that a run has stored; names with a space are checksums."""
    nested: dict[str, Any] = {}
    for field, value in saved.items():
        if " " not in field:
            *parents, name = field.split(".")
            place = nested
            for parent in parents:
                place = place.setdefault(parent, {})
            place[name] = tuple(value) if isinstance(value, list) else value
    return ml_collections.ConfigDict(nested)


def _classes_per_task(config: Config, num_classes: int) -> tuple[int, ...]:
    size = config.classes_per_task or BENCHMARKS[config.benchmark].classes_per_task
    return tuple(min(size, num_classes - first) for first in range(0, num_classes, size))


def _batches(images: np.ndarray, size: int) -> Iterator[Batch]:
    for start in range(0, len(images), size):
        part = images[start : start + size]
        rows = np.zeros((size, *images.shape[1:]), np.uint8)
        rows[: len(part)] = part
        weights = (np.arange(size) < len(part)).astype(np.float32)
        yield Batch(rows, np.zeros(size, np.int32), weights)


# Results ----------------------------------------------------------------------------------------


def _collect(
    e: Experiment, seed: int, calibrator: Any, records: list[dict[str, Any]]
) -> dict[str, Any]:
    """Returns the content of `results.json` from the records of all tasks."""
    config, last = e.config, records[-1]
    points = ("task", "accuracy", "routing_accuracy", "components", "task_accuracy", *BEYOND)
    curve = [{name: record[name] for name in points if name in record} for record in records]
    complete = len(records) == e.setup.num_tasks

    def average(accuracies: list[float]) -> float | None:
        # Without the accuracy after every task there is no average over them.
        return evaluation.average_incremental_accuracy(accuracies) if complete else None

    return {
        "benchmark": config.benchmark,
        "split": e.tasks.test.partition,
        "learner": config.learner.name,
        "seed": seed,
        "class_order_seed": config.class_order_seed,
        "num_tasks": e.setup.num_tasks,
        "num_classes": sum(e.setup.classes_per_task),
        "num_train_images": sum(len(indices) for indices in e.tasks.train_indices),
        "num_test_images": len(e.tasks.test_indices),
        "accuracy": last["accuracy"],
        "routing_accuracy": last["routing_accuracy"],
        "average_incremental_accuracy": {
            name: average([point["accuracy"][name] for point in curve]) for name in ("raw", "fdc")
        },
        "components": last["components"],
        "selected": _selected(config.learner.name, last["components"]),
        "decomposition": last["decomposition"],
        **{
            entry: {
                **last[entry],
                "average_incremental_accuracy": average([p[entry]["accuracy"] for p in curve]),
                "storage_bytes": calibrator.storage_bytes,
            }
            for entry in BEYOND
            if entry in last
        },
        "curve": curve,
        "fdc_storage_bytes": calibrator.paper_storage_bytes,
        "peak_memory_bytes": _peak_memory([record.get("peak_memory") for record in records]),
        "timing": _timing([record["timing"] for record in records], complete),
        "encoder": {
            "variant": config.encoder.variant,
            "weights": e.pretrained.path.name,
            "sha256": e.pretrained.sha256,
            "input_range": config.data.input_range,
            "skipped": list(e.pretrained.skipped),
            "resized_positions": e.pretrained.resized_positions,
        },
        "data": {"train_sha256": e.tasks.train.checksum, "test_sha256": e.tasks.test.checksum},
        "device": devices.describe(),
        "config": configuration.flatten(config) | {"seed": [seed]},
        "versions": versions(),
    }


def _selected(learner: str, components: dict[str, float]) -> dict[str, Any]:
    """Returns what the paper enables for the learner, and its accuracy."""
    name = learners.selected(learner)
    # Without the pretrained view, the adapted one is all there is.
    name = name if name in components else name.removesuffix("_adapted_view")
    return {"components": name, "accuracy": components.get(name)}


def _peak_memory(per_task: list[dict[str, int | None] | None]) -> dict[str, int | None]:
    """Returns the device memory that training took, and what FDC and evaluation took beyond it.

    A peak never falls: the first task's, before anything was fitted, is that of training. None on
    a CPU, and where that task was trained by a process that did not live to record it.
    """
    first, last = per_task[0] or {}, per_task[-1] or {}
    training, total = first.get("training"), last.get("task")
    beyond = None if training is None or total is None else total - training
    return {"training": training, "fdc_and_evaluation": beyond}


def _timing(per_task: list[dict[str, float]], complete: bool) -> dict[str, Any] | None:
    """Returns sums over tasks, and images per second; None where tasks were not recorded."""
    if not complete:
        return None
    names = sorted(set().union(*per_task))
    total: dict[str, Any] = {name: sum(each.get(name, 0.0) for each in per_task) for name in names}
    seconds = total.get("training_seconds")
    total["training_images_per_second"] = total["training_images"] / seconds if seconds else None
    total["input_wait_fraction"] = total["input_wait_seconds"] / seconds if seconds else None
    return total


def versions() -> dict[str, str | None]:
    """Returns the versions of Python, of this package and of what it computes with."""
    own = {"python": platform.python_version(), "fdc_jax": fdc_jax.__version__, "commit": _commit()}
    return own | {name: importlib.metadata.version(name) for name in _PACKAGES}


def _commit() -> str | None:
    """Returns the commit that the package is checked out at, or None outside a checkout."""
    folder = Path(fdc_jax.__file__).parents[1]
    if not (folder / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
