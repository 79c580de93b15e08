"""Paths of the files in the work directory of one seed, and the reading of its JSON."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fdc_jax.data.task_stream import Known
from fdc_jax.machine import processes
from fdc_jax.machine.conversion import convert
from fdc_jax.machine.files import named_path, read_json
from fdc_jax.run import configuration, records
from fdc_jax.run.records import CLASSES, PLANNED


class RunPaths:
    """Paths of the files in the work directory of one seed, and their JSON."""

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = named_path("run directory", folder)
        self.checkpoints_folder = self.folder / "checkpoints"
        self.features_folder = self.folder / "features"  # in the form that `fdc_jax.posthoc` reads
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

    def recorded_tasks(self) -> list[int]:
        """Returns the tasks after which an evaluation is saved."""
        paths = self.folder.glob("tasks/task_*.json")
        return sorted(int(path.stem.removeprefix("task_")) for path in paths)

    def read_config(self) -> dict[str, Any]:
        """Returns the content of `config.json`; raises InputError with a remedy if it is damaged.

        Keys are fields of the configuration, see `configuration.completed`, and names with a space,
        which have checksums and the known classes.
        """
        with records.remedied(self.config_file, "put it back, or choose another --workdir"):
            saved = read_json(self.config_file)
            convert(saved, records.SavedConfig)
            extra = {name: value for name, value in saved.items() if " " in name}
            return configuration.completed(saved) | extra

    def differing(self, fields: Mapping[str, Any]) -> str:
        """Returns the fields whose values differ in the run of the folder, as text, or "".

        Fields that divide classes into tasks may differ, as a run may grow by further tasks.
        """
        saved = self.read_config() if self.config_file.exists() else fields
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


def known_of(saved: dict[str, Any]) -> Known:
    """Returns the known classes and sizes of tasks from the `config.json` of a run."""
    planned = saved[PLANNED]
    return Known(saved.get(CLASSES, {}), tuple(planned[: saved.get("num_tasks") or None]))


def known_classes(folders: Sequence[Path], classes_per_task: int | list[int]) -> Known:
    """Returns the known classes of the seed whose run knows most classes.

    The sizes of their tasks are empty if `classes_per_task` has changed.
    """

    def read() -> dict[str, Any]:
        runs = [run.read_config() for run in map(RunPaths, folders) if run.config_file.exists()]
        return max(runs, key=lambda saved: len(saved.get(CLASSES, {})), default={PLANNED: []})

    saved = processes.on_first(read)()
    known = known_of(saved)
    unchanged = saved.get("classes_per_task") == classes_per_task
    return known if unchanged else known._replace(sizes=())
