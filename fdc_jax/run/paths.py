"""Names of the files in the work directory of one seed, and the reading of its JSON."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fdc_jax.data.task_stream import Known
from fdc_jax.errors import InputError
from fdc_jax.machine import processes
from fdc_jax.machine.files import read_json
from fdc_jax.run import base, configuration

# In config.json: checksums by name of the classes that the run knows, and the numbers of classes of
# its tasks, both with those that are to come.
CLASSES, PLANNED = "known classes", "classes of planned tasks"


class RunPaths:
    """Names of the files in the work directory of one seed, and what its JSON says."""

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = Path(folder)
        self.checkpoints_folder = self.folder / "checkpoints"
        self.features_folder = self.folder / "features"  # in the form that `fdc_jax.posthoc` reads
        self.config_file = self.folder / "config.json"
        self.results_file = self.folder / "results.json"  # the last one that a run writes
        self.predictions_file = self.folder / "predictions.npz"
        # In the place of checkpoints and of a file elsewhere, where the folder was exported.
        self.merged_file = self.folder / "merged.safetensors"
        self.weights_file = self.folder / "pretrained" / "model.safetensors"

    def calibrator_file(self, name: str) -> Path:
        """File of a calibrator of all tasks."""
        return self.folder / "calibrators" / f"{name}.npz"

    def fitted_file(self, name: str, num_tasks: int) -> Path:
        """File of a calibrator of the first `num_tasks` tasks, ready for more."""
        return self.folder / "calibrators" / f"{name}_{num_tasks:03d}.npz"

    def record_file(self, task: int) -> Path:
        """File of what was measured after a task."""
        return self.folder / "tasks" / f"task_{task:03d}.json"

    def recorded_tasks(self) -> list[int]:
        """Tasks after which something was measured."""
        paths = self.folder.glob("tasks/task_*.json")
        return sorted(int(path.stem.removeprefix("task_")) for path in paths)

    def read_config(self) -> dict[str, Any]:
        """Returns what `config.json` holds; this and the next two raise InputError, with a remedy.

        The fields of the configuration by name, those that came later with their defaults; beside
        them, under names with a space, checksums and what the run knows of its classes.
        """
        remedy = "put it back, or choose another --workdir"
        names = {"benchmark", "learner.name", "weights sha256", PLANNED}
        read = _read(self.config_file, names, remedy)
        found = {name: value for name, value in read.items() if value is not None}
        fields = configuration.flatten(base.get_config(found["benchmark"]))
        return fields | found

    def read_results(self) -> dict[str, Any] | None:
        """Returns what `results.json` holds, None before it is written."""
        if not self.results_file.exists():
            return None
        return _read(
            self.results_file,
            {"benchmark", "learner", "seed", "accuracy", "curve", "num_tasks", "config"},
            "remove it, and the run writes it again",
        )

    def read_records(self) -> list[dict[str, Any]]:
        """Returns what was measured after each task so far."""
        files, names = map(self.record_file, self.recorded_tasks()), {"task", "accuracy"}
        remedy = "remove it, and its accuracies are measured again"
        return [_read(path, names, remedy) for path in files]


def _read(path: Path, names: set[str], remedy: str) -> dict[str, Any]:
    """Returns a JSON object that has these names."""
    try:
        found = read_json(path)
    except InputError as error:
        raise InputError(f"{error}; {remedy}") from error
    if not isinstance(found, dict) or not names <= found.keys():
        raise InputError(f"{path}: expected an object with {', '.join(sorted(names))}; {remedy}")
    return found


def known_of(saved: dict[str, Any]) -> Known:
    """Returns what the `config.json` of a run says of its classes."""
    planned = saved[PLANNED]
    return Known(saved.get(CLASSES, {}), tuple(planned[: saved.get("num_tasks") or None]))


def known_classes(folders: Sequence[Path], classes_per_task: int | list[int]) -> Known:
    """Returns the most that the runs in some work directories, those of several seeds, know.

    Tasks that they took in keep their sizes, unless others are wanted than before.
    """

    def read() -> list[dict[str, Any]]:
        found = map(RunPaths, folders)
        return [each.read_config() for each in found if each.config_file.exists()]

    empty = {PLANNED: []}
    best = max(processes.on_first(read)(), key=lambda it: len(it.get(CLASSES, {})), default=empty)
    same = best.get("classes_per_task") == classes_per_task
    return known_of(best) if same else known_of(best)._replace(sizes=())
