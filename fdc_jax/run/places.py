"""Names of the files in the work directory of one seed, and the reading of its JSON objects."""

import os
from pathlib import Path
from typing import Any

from fdc_jax.errors import InputError
from fdc_jax.machine.files import read_json

# What to do about a file that is damaged.
WRITTEN_AGAIN = "remove it, and the run writes it again"
MEASURED_AGAIN = "remove it, and its accuracies are measured again"
# In config.json: names of the classes of each task, and numbers of those of all tasks to come, too.
TASKS, PLANNED = "classes of tasks", "classes of planned tasks"


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

    def record_file(self, task: int) -> Path:
        """File of what was measured after a task."""
        return self.folder / "tasks" / f"task_{task:03d}.json"

    def recorded_tasks(self) -> list[int]:
        """Tasks after which something was measured."""
        paths = self.folder.glob("tasks/task_*.json")
        return sorted(int(path.stem.removeprefix("task_")) for path in paths)


def read_object(path: Path, remedy: str) -> dict[str, Any]:
    """Reads a JSON object of the work directory; an InputError says what to do."""
    try:
        found = read_json(path)
    except InputError as error:
        raise InputError(f"{error}; {remedy}") from error
    if not isinstance(found, dict):
        raise InputError(f"{path}: expected a JSON object, found {type(found).__name__}; {remedy}")
    return found
