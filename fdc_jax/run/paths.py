"""Paths of the files in the work directory of one seed, and the reading of its JSON."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fdc_jax.data.task_stream import Known
from fdc_jax.errors import InputError
from fdc_jax.machine import processes
from fdc_jax.machine.files import named_path, read_json
from fdc_jax.run import configuration, schema
from fdc_jax.run.schema import CLASSES, PLANNED


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

    def fitted_file(self, name: str, num_tasks: int) -> Path:
        """Returns the path of a calibrator of the first `num_tasks` tasks, to be fitted on more."""
        return self.folder / "calibrators" / f"{name}_{num_tasks:03d}.npz"

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

        def complete(saved: dict[str, Any]) -> dict[str, Any]:
            if saved.get(CLASSES) and len(saved[CLASSES]) != sum(saved[PLANNED]):
                raise InputError(f"{PLANNED}: expected {len(saved[CLASSES])} classes in all")
            extra = {name: value for name, value in saved.items() if " " in name}
            return configuration.completed(saved) | extra

        remedy = "put it back, or choose another --workdir"
        return _read(self.config_file, schema.Config, remedy, complete)

    def differing(self, fields: Mapping[str, Any]) -> str:
        """Returns the fields whose values differ in the run of the folder, as text, or "".

        Fields that divide classes into tasks may differ, as a run may grow by further tasks.
        """
        saved = self.read_config() if self.config_file.exists() else fields
        fixed = {name: value for name, value in fields.items() if name not in configuration.TASKS}
        return ", ".join(configuration.differences(saved, fixed).values())

    def read_results(self) -> dict[str, Any] | None:
        """Returns the content of `results.json`, or None before it is written."""

        def check(results: dict[str, Any]) -> dict[str, Any]:
            schema.check_results(results)
            configuration.completed({"benchmark": results["benchmark"], **results["config"]})
            return results

        remedy = "remove it, and the run writes it again"
        path = self.results_file
        return _read(path, schema.Results, remedy, check) if path.exists() else None

    def read_records(self) -> list[dict[str, Any]]:
        """Returns the evaluations after each task so far."""
        remedy = "remove it, and its accuracies are measured again"
        paths = map(self.record_file, self.recorded_tasks())
        return [_read(path, schema.Record, remedy) for path in paths]

    def read_latency(self) -> dict[str, Any]:
        """Returns the content of `latency.json`, empty if there is none."""
        path = self.folder / "latency.json"
        return _read(path, schema.Latency, "remove it") if path.exists() else {}


def _read(
    path: Path, kind: Any, remedy: str, complete: Callable[[Any], Any] = lambda value: value
) -> Any:
    """Returns the content of a JSON file of a kind, completed."""
    try:
        return complete(schema.check(read_json(path), kind))
    except InputError as error:
        text = str(error) if str(path) in str(error) else f"{path}: {error}"
        raise InputError(f"{text}; {remedy}") from error


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
