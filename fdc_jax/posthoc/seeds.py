"""Feature files as seeds of one experiment, for the tables and the report of runs."""

import dataclasses
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from jaxtyping import Int

from fdc_jax import evaluation
from fdc_jax.calibration import FDC
from fdc_jax.errors import InputError
from fdc_jax.features.feature_files import FeatureSet
from fdc_jax.machine.conversion import convert
from fdc_jax.machine.files import read_json
from fdc_jax.posthoc import methods
from fdc_jax.run.records import Latency, Results

# Quantities at a point of the curve; the curve has one point, after the last task.
_POINT = ("accuracy", "routing_accuracy", "components", "task_accuracy")


@dataclasses.dataclass(frozen=True, eq=False)  # a key of caches
class FeatureRun:
    """A feature file with results of calibrators, in place of a run of `fdc_jax.open_run`."""

    features_folder: Path  # the feature file
    results: Results
    predictions: Mapping[str, Int[np.ndarray, " n"]]

    @property
    def predictions_file(self) -> Path:
        """A file that exists if there are predictions."""
        return self.features_folder

    @property
    def class_names(self) -> list[str]:
        """Labels of the classes in the file, in the order of tasks."""
        return self.results.class_names or []

    def read_latency(self) -> Latency:
        """Returns an empty record, as there is no encoder."""
        return Latency()


def feature_run(
    names: Mapping[str, Any],
    source: Path,
    features: FeatureSet,
    labels: Int[np.ndarray, " c"],
    outcomes: Mapping[str, methods.FittedMethod],
) -> FeatureRun:
    """Returns the results of calibrators on a feature file.

    Args:
        names: `benchmark` and `learner` in the report, and `seed`, the number of the file from 1.
        source: the file.
        features: its content, with classes renumbered.
        labels: labels of the classes in the file, in the order of tasks.
        outcomes: by method.

    Raises:
        InputError: there are no test labels.
    """
    if features.test_labels is None:
        raise InputError(f"{source}: no test_labels, which a report needs")
    results = methods.results(features, outcomes)
    fdc: Any = outcomes[FDC.name].calibrator if FDC.name in outcomes else None
    settings = msgspec.structs.asdict(fdc.settings) if fdc else {}
    results |= names
    results["config"] = {f"fdc.{name}": value for name, value in settings.items()}
    results["class_names"] = [str(label) for label in labels]
    results["curve"] = [
        {name: results[name] for name in _POINT} | {"task": len(features.tasks) - 1}
    ]
    results["fdc_storage_bytes"] = results["storage_bytes"].get(FDC.name)
    scores = {name: outcome.scores for name, outcome in outcomes.items()}
    columns = evaluation.predictions(scores, features.test_labels, features.test_tasks)
    return FeatureRun(source, convert(results, Results), columns)


def removed(folder: Path) -> Iterator[Path]:
    """Removes and yields the work directories that earlier versions made of feature files."""
    for config in sorted(folder.glob("seed_*/config.json")):
        if "feature file" in read_json(config):
            shutil.rmtree(config.parent)
            yield config.parent
