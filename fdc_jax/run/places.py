"""Names of the files in the work directory of one seed, and the reading of its JSON objects."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fdc_jax.data.task_stream import Known
from fdc_jax.errors import InputError
from fdc_jax.machine import processes
from fdc_jax.machine.files import read_json

# What to do about a file that is damaged.
PUT_BACK = "put it back, or choose another --workdir"
WRITTEN_AGAIN = "remove it, and the run writes it again"
MEASURED_AGAIN = "remove it, and its accuracies are measured again"
# In config.json: checksums by name of the classes that the run knows, and the numbers of classes of
# its tasks, both with those that are to come.
CLASSES, PLANNED = "known classes", "classes of planned tasks"


class Places:
    """Names of the files in the work directory of one seed."""

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = Path(folder)
        self.checkpoints_folder = self.folder / "checkpoints"
        self.features_folder = self.folder / "features"  # in the form that `fdc_jax.posthoc` reads
        self.config_file = self.folder / "config.json"
        self.results_file = self.folder / "results.json"  # the last one that a run writes
        self.predictions_file = self.folder / "predictions.npz"
        # In the place of checkpoints and of a file elsewhere, where the folder was exported.
        self.manifest_file = self.folder / "manifest.json"
        self.merged_file = self.folder / "merged.safetensors"
        self.weights_file = self.folder / "pretrained" / "model.safetensors"

    def calibrator_file(self, name: str) -> Path:
        """File of a calibrator of all tasks."""
        return self.folder / "calibrators" / f"{name}.npz"

    def fitted_file(self, name: str, num_tasks: int) -> Path:
        """File of a calibrator of the first `num_tasks` tasks, ready for more."""
        return self.folder / "calibrators" / f"{name}_{num_tasks:03d}.npz"

    def fitted_files(self, name: str) -> list[Path]:
        """Files of a calibrator that are there, by number of tasks."""
        return sorted(self.folder.glob(f"calibrators/{name}_*.npz"))

    def record_file(self, task: int) -> Path:
        """File of what was measured after a task."""
        return self.folder / "tasks" / f"task_{task:03d}.json"

    def recorded_tasks(self) -> list[int]:
        """Tasks after which something was measured."""
        paths = self.folder.glob("tasks/task_*.json")
        return sorted(int(path.stem.removeprefix("task_")) for path in paths)


def known_of(saved: dict[str, Any]) -> Known:
    """Returns what the `config.json` of a run says of its classes."""
    planned = saved.get(PLANNED, [])
    return Known(saved.get(CLASSES, {}), tuple(planned[: saved.get("num_tasks") or None]))


def known_classes(folders: Sequence[Path], classes_per_task: int | list[int]) -> Known:
    """Returns the most that the runs in some work directories, those of several seeds, know.

    Tasks that they took in keep their sizes, unless others are wanted than before.
    """

    def read() -> list[dict[str, Any]]:
        found = (Places(folder).config_file for folder in folders)
        return [read_object(path, PUT_BACK) for path in found if path.exists()]

    best = max(processes.on_first(read)(), key=lambda it: len(it.get(CLASSES, {})), default={})
    same = best.get("classes_per_task") == classes_per_task
    return known_of(best) if same else known_of(best)._replace(sizes=())


def read_object(path: Path, remedy: str) -> dict[str, Any]:
    """Reads a JSON object of the work directory; an InputError says what to do."""
    try:
        found = read_json(path)
    except InputError as error:
        raise InputError(f"{error}; {remedy}") from error
    if not isinstance(found, dict):
        raise InputError(f"{path}: expected a JSON object, found {type(found).__name__}; {remedy}")
    return found
