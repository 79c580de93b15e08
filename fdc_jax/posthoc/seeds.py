"""Feature files as seeds of one run, and the report about them."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from tabulate import tabulate

from fdc_jax import evaluation
from fdc_jax.calibration import FDC
from fdc_jax.errors import InputError
from fdc_jax.features import feature_files
from fdc_jax.features.feature_files import FeatureSet
from fdc_jax.machine.files import read_json, read_npz, write_json, write_npz
from fdc_jax.machine.versions import versions
from fdc_jax.posthoc.methods import Outcome
from fdc_jax.report import console, runs, tables

# The name that stands for the learner, which no file names.
LEARNER = "saved_features"


def write_run(
    folder: Path,
    name: str,
    seed: int,
    source: Path,
    features: FeatureSet,
    outcomes: Mapping[str, Outcome],
) -> None:
    """Writes the results of calibrators on a feature file as the work directory of a finished run.

    Args:
        folder: receives `config.json`, `results.json`, `predictions.npz` and the features.
        name: stands for the benchmark.
        seed: number of the file, from 1.
        source: the file, linked if it is a folder.
        features: its content.
        outcomes: by name, `raw` among them.
    """
    stored = folder / "features"
    if folder.exists():
        config = folder / "config.json"
        if not config.exists() or read_json(config).get("learner.name") != LEARNER:
            raise InputError(f"--output: {folder} is there, and not of an earlier fdc posthoc")
        if stored.is_symlink():
            stored.unlink()
        elif stored.exists():
            shutil.rmtree(stored)
    folder.mkdir(parents=True, exist_ok=True)
    labels: Any = features.test_labels
    tasks = features.test_tasks
    scores = {name: outcome.scores for name, outcome in outcomes.items()}
    measured = evaluation.measure(scores, labels, tasks)
    components, config = {}, {}
    if FDC.name in outcomes:
        fdc: Any = outcomes[FDC.name]
        parts, settings = fdc.components.items(), vars(fdc.calibrator.settings).items()
        components = {name: evaluation.accuracy(labels, of.label) for name, of in parts}
        config = {f"fdc.{name}": value for name, value in settings}
    sizes = [len(task.classes) for task in features.tasks]
    fields = {"benchmark": name, "learner.name": LEARNER, **config}
    beside = {"weights sha256": "0" * 64, "classes of planned tasks": sizes}
    storage = {name: outcome.calibrator.storage_bytes for name, outcome in outcomes.items()}
    results = {
        **{"benchmark": name, "learner": LEARNER, "seed": seed},
        **{"num_tasks": len(sizes), "num_classes": sum(sizes), "num_test_images": len(labels)},
        **measured,
        "components": components,
        "curve": [{"task": len(sizes) - 1, "components": components, **measured}],
        "fdc_storage_bytes": storage.get(FDC.name),
        "storage_bytes": storage,
        "notes": {name: it.calibrator.note for name, it in outcomes.items() if it.calibrator.note},
        "timing": {"fit_seconds": {name: it.fit_seconds for name, it in outcomes.items()}},
        "config": fields,
        "device": jax.devices()[0].device_kind,
        "versions": versions(),
    }
    write_json(folder / "config.json", fields | beside)
    if source.is_dir():
        stored.symlink_to(source.resolve())
    else:
        feature_files.write(stored, read_npz(source))
    write_npz(folder / "predictions.npz", evaluation.predictions(scores, labels, tasks))
    write_json(folder / "results.json", results)


def show(folders: Sequence[Path], sweep: Mapping[str, list[Any]], names: Sequence[str]) -> None:
    """Prints the table of calibrators of some runs, and tables of the report by their names."""
    ((group,), _) = runs.load(folders)
    runs.analyse(group, sweep)
    console.show(group)
    for table in tables.build([group]):
        if table.name in names:
            frame = table.frame.fillna("")
            rows = frame.set_axis(frame.index.get_level_values(1))
            print(f"\n{table.title}\n{tabulate(rows, disable_numparse=True)}")
