"""Feature files as seeds of one run, and the report about them."""

import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from jaxtyping import Int

from fdc_jax import evaluation
from fdc_jax.calibration import FDC
from fdc_jax.errors import InputError
from fdc_jax.features import feature_files
from fdc_jax.features.feature_files import FeatureSet
from fdc_jax.machine.files import ArrayFolder, read_json, read_npz, write_json, write_npz
from fdc_jax.posthoc import methods
from fdc_jax.report import console, runs, tables
from fdc_jax.run.configuration import PLANNED

# The field of `config.json` with the feature file; runs of other programs lack it.
SOURCE = "feature file"
# Quantities at a point of the curve; the curve has one point, after the last task.
POINT = ("accuracy", "routing_accuracy", "components", "task_accuracy")


def write_run(
    folder: Path,
    learner: str,
    benchmark: str,
    seed: int,
    source: Path,
    features: FeatureSet,
    outcomes: Mapping[str, methods.Outcome],
) -> None:
    """Writes the results of calibrators on a feature file as the work directory of a finished run.

    Args:
        folder: work directory; an earlier one of this command is replaced.
        learner: name of the learner in the report.
        benchmark: name of the benchmark in the report; the same for all seeds.
        seed: number of the file, from 1.
        source: the file; arrays of a folder are linked.
        features: its content.
        outcomes: by method.

    Raises:
        InputError: there are no test labels, or the folder is of another program.
    """
    if features.test_labels is None:
        raise InputError(f"{source}: no test_labels, which a report needs")
    stored = folder / "features"
    if folder.exists():
        config = folder / "config.json"
        if not config.exists() or SOURCE not in read_json(config):
            raise InputError(f"--output: {folder} exists, and is not of an earlier fdc posthoc")
        if stored.exists():
            shutil.rmtree(stored)
    folder.mkdir(parents=True, exist_ok=True)
    results = methods.results(features, outcomes)
    # Runs count classes from 0 in the order of tasks.
    order = np.concatenate([task.classes for task in features.tasks])
    sizes = [len(task.classes) for task in features.tasks]
    classes = np.split(np.arange(len(order)), np.cumsum(sizes)[:-1])
    scores = {
        name: dataclasses.replace(outcome.scores, classes=classes)
        for name, outcome in outcomes.items()
    }
    fdc: Any = outcomes[FDC.name].calibrator if FDC.name in outcomes else None
    values = msgspec.structs.asdict(fdc.settings) if fdc else {}
    settings = {f"fdc.{name}": value for name, value in values.items()}
    fields = {"benchmark": benchmark, "learner.name": learner, **settings}
    metadata = {"weights sha256": "0" * 64, PLANNED: sizes, SOURCE: source.name}
    results |= {
        **{"benchmark": benchmark, "learner": learner, "seed": seed, "config": fields},
        "class_names": [str(label) for label in order],
        "curve": [{"task": len(sizes) - 1} | {name: results[name] for name in POINT}],
        "fdc_storage_bytes": results["storage_bytes"].get(FDC.name),
    }
    write_json(folder / "config.json", fields | metadata)
    arrays: Any = ArrayFolder(source) if source.is_dir() else read_npz(source)
    renumbered = {
        name: _positions(order, arrays[name])
        for name in arrays
        if name.startswith(("train_labels", "head_classes", "test_labels"))
    }
    if source.is_dir():  # A folder keeps its features where they are.
        stored.mkdir()
        for name in arrays.keys() - renumbered.keys():
            (stored / f"{name}.npy").symlink_to((source / f"{name}.npy").resolve())
        arrays = {}
    feature_files.write(stored, arrays | renumbered)
    positions = _positions(order, features.test_labels)
    columns = evaluation.predictions(scores, positions, features.test_tasks)
    write_npz(folder / "predictions.npz", columns)
    write_json(folder / "results.json", results)


def _positions(order: Int[np.ndarray, " c"], labels: Any) -> Int[np.ndarray, " n"]:
    """Returns the index of each label in the order of classes."""
    sorter = np.argsort(order)
    return sorter[np.searchsorted(order, np.asarray(labels), sorter=sorter)].astype(np.int32)


def show(folders: Sequence[Path], sweep: Mapping[str, list[Any]], names: Sequence[str]) -> None:
    """Prints the table of calibrators of runs, and tables of the report by their names."""
    groups, skipped = runs.load(folders)
    if len(groups) != 1:
        raise InputError("; ".join(map(str, skipped.values())) or "files of different settings")
    (group,) = groups
    group = runs.analyse(group, sweep)
    console.show(group)
    print(*group.missing, sep="\n", end="\n" * bool(group.missing))
    for table in tables.build([group]):
        if table.name in names:
            print(f"\n{table.to_text()}", end="")
