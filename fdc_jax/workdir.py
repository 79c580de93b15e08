"""The files of one run: configuration, events, task records, predictions, results.

Of several processes the first alone reads and writes them.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from fdc_jax import configuration, processes
from fdc_jax.calibration import FDC
from fdc_jax.configuration import Config
from fdc_jax.errors import InputError
from fdc_jax.files import read_json, write_atomically, write_json


class Workdir:
    """One folder for one seed of one configuration.

    Args:
        folder: made when missing.
        config: the run's configuration, `seed` being this run's alone.
        checksums: of the weights and images, by name.

    Raises:
        InputError: the folder belongs to another configuration; the differing fields are named.
    """

    def __init__(self, folder: str | os.PathLike[str], config: Config, checksums: dict[str, str]):
        self.folder = Path(folder)
        processes.on_first(lambda: self._claim(config, checksums))

    def _claim(self, config: Config, checksums: dict[str, str]) -> None:
        path = self.folder / "config.json"
        if path.exists():
            differing = configuration.differences(read_json(path), config, checksums)
            if differing:
                fields = ", ".join(
                    f"{name} was {old!r}, is {new!r}" for name, old, new in differing
                )
                raise InputError(
                    f"{self.folder} holds a run of another configuration: {fields}; "
                    f"choose another --workdir or the old values"
                )
        else:
            write_json(path, configuration.flatten(config) | checksums)

    @property
    def checkpoints(self) -> Path:
        """Folder of the learner's checkpoints."""
        return self.folder / "checkpoints"

    @property
    def features(self) -> Path:
        """Folder of saved features, in the form that `fdc_jax.posthoc` reads."""
        return self.folder / "features"

    @property
    def results(self) -> Path:
        """The last file that a run writes."""
        return self.folder / "results.json"

    def finished(self) -> dict[str, Any] | None:
        """Returns the results of a run that is complete, or None."""
        return processes.on_first(
            lambda: read_json(self.results) if self.results.exists() else None
        )

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

    def recorded(self) -> list[int]:
        """Returns the tasks after which something was measured, counted from 0."""
        files = (self.folder / "tasks").glob("task_*.json")
        return sorted(int(path.stem.removeprefix("task_")) for path in files)

    def task_record(self, task: int) -> Path:
        """File of what was measured after a task, counted from 0."""
        return self.folder / "tasks" / f"task_{task:03d}.json"

    def calibrator(self, num_tasks: int) -> Path:
        """File of the calibrator fitted on the first `num_tasks` tasks."""
        return self.folder / "calibrators" / f"calibrator_{num_tasks:03d}.npz"

    def save_calibrator(self, calibrator: FDC, keep: int) -> None:
        """Writes the calibrator and removes all but the newest `keep` before it."""
        calibrator.save(self.calibrator(calibrator.num_tasks))
        for num_tasks in range(1, calibrator.num_tasks - keep):
            self.calibrator(num_tasks).unlink(missing_ok=True)

    def load_calibrator(self, num_tasks: int) -> FDC | None:
        """Returns the calibrator fitted on exactly `num_tasks` tasks, or None if unusable."""
        path = self.calibrator(num_tasks)
        if not path.exists():
            return None
        try:
            calibrator = FDC.load(path)
        except InputError:
            return None
        return calibrator if calibrator.num_tasks == num_tasks else None

    def forget_after(self, num_tasks: int) -> None:
        """Removes task records from task `num_tasks` on, which will be measured again."""
        for task in self.recorded():
            if task >= num_tasks:
                self.task_record(task).unlink()

    def save_predictions(self, columns: dict[str, Any]) -> None:
        """Writes `predictions.npz`, one row per test image in each column."""
        with write_atomically(self.folder / "predictions.npz") as file:
            np.savez_compressed(file, **columns)
