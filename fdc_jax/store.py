"""The files of a work directory: what a run keeps there, and what anybody finds there later.

While a run fills it (`Store`), of several processes the first alone does. `Run` opens it again and
changes nothing.
"""

import contextlib
import functools
import itertools
import json
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from flax import traverse_util
from jaxtyping import Float, Int, UInt8

from fdc_jax import calibration, configuration, feature_files
from fdc_jax.configuration import CAME_LATER, Config
from fdc_jax.data.batches import Batch, evaluation_images
from fdc_jax.data.benchmarks import task_sizes
from fdc_jax.errors import InputError
from fdc_jax.ingredients import Experiment
from fdc_jax.machine import devices, processes
from fdc_jax.machine.checkpoint import Checkpoints
from fdc_jax.machine.files import (
    read_json,
    read_npy,
    read_npz,
    read_safetensors,
    write_atomically,
    write_json,
    write_npy,
)
from fdc_jax.model import vit

_log = logging.getLogger(__name__)

# Images that rounding on another device may move over an edge.
_ON_THE_EDGE = 2
_WRITTEN_AGAIN = "remove it, and the run writes it again"
_MEASURED_AGAIN = "remove it, and its accuracies are measured again"
# In config.json: names of the classes of each task, and numbers of those of all tasks to come, too.
_TASKS, _PLANNED = "classes of tasks", "classes of planned tasks"


class Places:
    """Names of the files in the work directory of one seed."""

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = Path(folder)
        self.checkpoints_folder = self.folder / "checkpoints"
        self.features_folder = self.folder / "features"  # in the form that `fdc_jax.posthoc` reads
        self.config_file = self.folder / "config.json"
        self.results_file = self.folder / "results.json"  # the last one that a run writes
        self.predictions_file = self.folder / "predictions.npz"
        self.calibrator_file = self.folder / "calibrator.npz"
        # In the place of checkpoints and of a file elsewhere, where the folder was exported.
        self.state_file = self.folder / "state.safetensors"
        self.merged_file = self.folder / "merged.safetensors"  # or else
        self.weights_file = self.folder / "pretrained" / "model.safetensors"

    def fitted_file(self, num_tasks: int) -> Path:
        """File of the calibrator fitted on the first `num_tasks` tasks, ready for more."""
        return self.folder / "calibrators" / f"calibrator_{num_tasks:03d}.npz"

    def fitted_files(self) -> list[Path]:
        """Files of calibrators that are there, by number of tasks."""
        return sorted(self.folder.glob("calibrators/calibrator_*.npz"))


def _read_object(path: Path, remedy: str) -> dict[str, Any]:
    """Reads a JSON object of the work directory; an InputError says what to do."""
    try:
        found = read_json(path)
    except InputError as error:
        raise InputError(f"{error}; {remedy}") from error
    if not isinstance(found, dict):
        raise InputError(f"{path}: expected a JSON object, found {type(found).__name__}; {remedy}")
    return found


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
        names = iter(e.tasks.class_names)
        tasks = [list(itertools.islice(names, size)) for size in e.tasks.classes_per_task]
        own = configuration.flatten(self._config) | e.checksums
        own |= {_TASKS: tasks, _PLANNED: list(e.setup.classes_per_task)}
        if not self.config_file.exists():
            if self.results_file.exists() or self.checkpoints_folder.exists():
                raise InputError(
                    f"{self.folder} holds a run without its config.json, so that nobody knows "
                    "which one; put the file back or choose another --workdir"
                )
            write_json(self.config_file, own)
            return
        saved = _read_object(self.config_file, "put it back, or choose another --workdir")
        if self.results_file.exists():
            results = _read_object(self.results_file, _WRITTEN_AGAIN)
            for name, value in results.get("config", {}).items():
                known = configuration.WITHOUT_EFFECT | configuration.TASKS  # These may have grown.
                if name not in known and saved.get(name, value) != value:
                    raise InputError(
                        f"{self.folder}: config.json says {name} {saved[name]!r}, results.json "
                        f"{value!r}; put back the file that was changed, or choose another "
                        "--workdir"
                    )
        differing = configuration.differences(saved, self._config, e.checksums)
        grown = self._grown(saved, tasks, {name for name, *_ in differing}, e)
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
            self._tell_of_growth(len(saved[_TASKS]), len(saved[_PLANNED]), e)
        if differing or grown:
            write_json(self.config_file, own)

    def _grown(
        self, saved: dict[str, Any], tasks: list[list[str]], differing: set[str], e: Experiment
    ) -> set[str]:
        """Returns the differing fields that say no more than that the run grows by further tasks.

        Raises:
            InputError: an earlier task has other classes, though no field says so.
        """
        before: list[list[str]] | None = saved.get(_TASKS)
        if before is None:  # Of an earlier version.
            return set()
        changed = [task for task, old in enumerate(before) if tasks[task : task + 1] != [old]]
        images = {"training images sha256", "test images sha256"}
        if changed and not differing - images:
            old, new = before[changed[0]], tasks[changed[0]]
            raise InputError(
                f"{self.folder}: expected in task {changed[0] + 1} the classes {', '.join(old)}, "
                f"as before; found {', '.join(new)}; give the size of every task as "
                "config.classes_per_task, or choose another --workdir"
            )
        if changed:
            return set()
        known = ({name: saved.get(name) for name in each} == each for each in e.earlier_checksums)
        return differing & (configuration.TASKS | images if any(known) else configuration.TASKS)

    def _tell_of_growth(self, tasks: int, planned: int, e: Experiment) -> None:
        if tasks < e.num_tasks:
            _log.warning("%s: goes on from %d tasks to %d", self.folder, tasks, e.num_tasks)
        if planned != e.setup.num_tasks and e.learner.TASK_COUNT:
            _log.warning(
                "%s: was planned for %d tasks, is for %d; %s: a run that knew them all from the "
                "start would end otherwise",
                *(self.folder, planned, e.setup.num_tasks, e.learner.TASK_COUNT),
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
        for task in self._recorded_tasks():
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
        results = _read_object(self.results_file, _WRITTEN_AGAIN)
        if "num_tasks" not in results:
            raise InputError(
                f"{self.results_file}: expected num_tasks, found none; {_WRITTEN_AGAIN}"
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
        if missing and tasks[-1] in self._recorded_tasks():
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
        return task in self._recorded_tasks() and self._record(task).get("stale") is not True

    def _recorded_tasks(self) -> list[int]:
        paths = self.folder.glob("tasks/task_*.json")
        return sorted(int(path.stem.removeprefix("task_")) for path in paths)

    def _record_file(self, task: int) -> Path:
        return self.folder / "tasks" / f"task_{task:03d}.json"

    def _record(self, task: int) -> dict[str, Any]:
        return _read_object(self._record_file(task), _MEASURED_AGAIN)

    def _mark_stale(self, task: int) -> None:
        write_json(self._record_file(task), self._record(task) | {"stale": True})

    @processes.on_first
    def records(self) -> list[dict[str, Any]]:
        """Returns what was measured after each task, but for tasks that the curve lacks."""
        records = [self._record(task) for task in self._recorded_tasks()]
        return [record for record in records if "stale" not in record]

    @processes.on_first
    def record(self, record: dict[str, Any]) -> None:
        """Keeps what was measured after a task.

        A task that is scored once more, with other settings of FDC, must give the accuracies of its
        time without FDC. Learners that rewrite earlier heads or encoders do not have those of that
        time any more; the curve then lacks this point.
        """
        task = record["task"]
        if task in self._recorded_tasks():
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
        write_json(self._record_file(task), record)
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
        for task in self._recorded_tasks():
            if task >= tasks_done:
                self._record_file(task).unlink()


def _is_whole(path: Path) -> bool:
    """Tells whether an array file or archive is there and can be read."""
    try:
        read_npz(path) if path.suffix == ".npz" else read_npy(path)
    except InputError:
        return False
    return True


class Run(Places):
    """A finished or stopped work directory of one seed; nothing is trained or changed.

    Args:
        folder: the work directory, or what `fdc_jax.export` made of it.
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
            seeds = sorted(self.folder.glob("seed_*"))
            hint = f"; of several seeds, open one: {seeds[0]}" if seeds else ""
            raise InputError(
                f"{self.folder}: expected the work directory of a run, found no config.json{hint}"
            )
        saved = _read_object(self.config_file, "it says what the run is")
        self.config = _configuration(saved)
        if lacking := {"benchmark", "encoder", "data"} - set(self.config.keys()):
            raise InputError(
                f"{self.config_file}: expected the settings of a run, found no {min(lacking)}"
            )
        learned = self.merged_file if self.merged_file.exists() else self.state_file
        if exported := learned.exists() or self.weights_file.exists():
            for path in (learned, self.weights_file, self.results_file, self.calibrator_file):
                if not path.exists():
                    raise InputError(f"{path}: expected this file of an export, found none")
        self._weights_sha256, self._planned = saved.get("weights sha256"), saved.get(_PLANNED)
        if self.weights_file.exists():
            self.config.encoder.weights = str(self.weights_file)
        if data_dir is not None:
            self.config.data.dir = data_dir
        if weights is not None:
            self.config.encoder.weights = weights
        self.results: dict[str, Any] | None = None
        if self.results_file.exists():
            remedy = "export the run again" if exported else _WRITTEN_AGAIN
            self.results = _read_object(self.results_file, remedy)
            if exported and not {"num_tasks", "class_names"} <= self.results.keys():
                raise InputError(f"{self.results_file}: lacks num_tasks or class_names; {remedy}")

    @functools.cached_property
    def experiment(self) -> Experiment:
        """Learner, encoder, devices and, when asked for, data."""
        known = None if self._planned is None else tuple(self._planned)
        try:
            if known is None and self.results is not None:
                config, classes = self.config, self.results["num_classes"]
                known = task_sizes(config.benchmark, classes, config.classes_per_task)
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
        return self.results["num_tasks"] if self.results else self.experiment.num_tasks

    @property
    def class_names(self) -> list[str]:
        """Names of the classes by class-order position; unless the run is finished, needs data."""
        kept = (self.results or {}).get("class_names")
        return self.experiment.tasks.class_names if kept is None else kept

    @functools.cached_property
    def _saved(self) -> tuple[Any, int]:
        """State of the learner from the newest readable checkpoint, and its number of tasks."""
        if self.merged_file.exists():
            raise InputError(
                f"{self.folder} was exported with --merge and keeps E_0 and E_{self.num_tasks} "
                "alone, not what other encoders follow from"
            )
        e, seed = self.experiment, next(iter(self.config.seed))
        if self.state_file.exists():
            return _read_state(self.state_file, e.first_state()), self.num_tasks
        checkpoints = Checkpoints(self.checkpoints_folder, read_only=True)
        try:
            for _, cursor, tree in e.checkpoints(checkpoints, seed):
                return tree["state"], cursor["tasks_done"]
        finally:
            checkpoints.close()
        raise InputError(f"{self.checkpoints_folder}: expected a checkpoint of the run, found none")

    def encoder(self, t: int) -> vit.KeyValueKernels:
        """Returns the kernels of E_t: after t tasks, 0 being the pretrained encoder.

        Raises:
            InputError: so many tasks were not trained, the learner does not keep that encoder, or
                there is no checkpoint.
        """
        e = self.experiment
        if t == 0:
            return vit.pretrained_kernels(e.backbone)
        if t == self.num_tasks and self.merged_file.exists():
            arrays = traverse_util.unflatten_dict(read_safetensors(self.merged_file), sep="/")
            return devices.replicate(e.mesh, jax.tree.map(jnp.asarray, arrays))
        state, tasks_done = self._saved
        if not 0 < t <= tasks_done:
            raise InputError(f"{self.folder}: expected E_0 to E_{tasks_done}, found E_{t}")
        return e.learner.encoder(e.setup, e.backbone, state, t)

    def heads(self, num_tasks: int | None = None) -> list[Any]:
        """Returns the heads of the first tasks, by default of all that were trained."""
        merged = self.merged_file.exists()
        state, tasks_done = (None, self.num_tasks) if merged else self._saved
        num_tasks = tasks_done if num_tasks is None else num_tasks
        if not 0 <= num_tasks <= tasks_done:
            raise InputError(f"{self.folder}: expected up to {tasks_done} heads, found {num_tasks}")
        if merged:
            return calibration.load(self.calibrator_file).heads[:num_tasks]
        return self.experiment.heads(state, num_tasks)

    @property
    def state(self) -> Any:
        """What the learner has kept after the last trained task."""
        return self._saved[0]

    def calibrator(self) -> Any:
        """Returns FDC as it was fitted, on all tasks or on those of a run that stopped."""
        found = self.fitted_files() + [self.calibrator_file] * self.calibrator_file.exists()
        if not found:
            raise InputError(
                f"{self.folder}: expected a calibrator, found none; the command of the run "
                "makes it again"
            )
        return calibration.load(found[-1], self.heads)

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
        parts = np.split(images, range(0, len(images), self.config.evaluation.batch_size)[1:])
        batches = [
            Batch(part, np.zeros(len(part), np.int32), np.ones(len(part), np.float32))
            for part in parts
        ]
        e, kernels = self.experiment, self.encoder(t)
        return e.extract(e.backbone, [kernels], batches)[0].features

    def stream(
        self, batches: Iterable[Batch], *encoders: int
    ) -> Iterator[list[Float[np.ndarray, "n d"]]]:
        """Yields the features of batch after batch by encoders E_t, given by t."""
        e, views = self.experiment, [self.encoder(t) for t in encoders]
        return e.extract.stream(e.backbone, views, batches)

    def predict(self, images: Any, top: int = 5, method: str = "fdc") -> Any:
        """Says the classes of images, and why; see `fdc_jax.predict.predict`."""
        from fdc_jax import predict

        return predict.predict(self, images, top, method)

    def test_images(self, rows: Int[np.ndarray, " n"]) -> UInt8[np.ndarray, "n s s 3"]:
        """Returns test images, by rows of `predictions.npz`, as an encoder sees them unscaled.

        Raises:
            InputError: the data cannot be read, or are not those of the run.
        """
        tasks, labels = self.experiment.tasks, self.predictions["label"]
        if not np.array_equal(tasks.test_labels[: len(labels)], labels):  # More tasks may follow.
            raise InputError(
                f"{self.folder}: its predictions are not of the test images of "
                f"{self.config.benchmark} that were found"
            )
        indices = tasks.test_indices[np.asarray(rows)]
        return evaluation_images(tasks.test, indices, self.config.encoder.image_size)


def _read_state(path: Path, first: Any) -> Any:
    """Returns an exported state in the form of a learner's first one.

    What was left out, as nothing but training reads it, stays as it is in the first one.
    """
    arrays = read_safetensors(path)

    def stored(place: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(place, simple=True, separator="/")
        found = arrays.get(name)
        if found is not None and found.size == 0 < leaf.size:
            return leaf
        if found is None or (found.shape, found.dtype) != (leaf.shape, leaf.dtype):
            raise InputError(f"{path}: {name}: missing, or not as the learner has it")
        return devices.put(found, leaf.sharding) if isinstance(leaf, jax.Array) else found

    return jax.tree_util.tree_map_with_path(stored, first)


def _configuration(saved: dict[str, Any]) -> Config:
    """Returns the configuration that a run has stored; names with a space are checksums."""
    nested: dict[str, Any] = {}
    for field, value in (CAME_LATER | saved).items():
        if " " not in field:
            *parents, name = field.split(".")
            place = nested
            for parent in parents:
                place = place.setdefault(parent, {})
            place[name] = tuple(value) if isinstance(value, list) else value
    return ml_collections.ConfigDict(nested)
