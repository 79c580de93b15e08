"""What is computed anew from the saved features of runs: the paper's diagnostics and sweeps."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from fdc_jax import evaluation
from fdc_jax.calibration import FDC, Settings, Terms
from fdc_jax.calibration.equations import SCALE_FLOOR
from fdc_jax.errors import InputError
from fdc_jax.features import feature_files
from fdc_jax.features.feature_files import FeatureSet
from fdc_jax.report import diagnostics
from fdc_jax.report.runs import Group

# What the paper varies, each with everything else at its default ("Hyperparameter Analysis of TSF
# and PAC").
VALUES = {
    "attenuation": (0.0, 0.25, 0.375, 0.5, 0.625, 0.75, 1.0),
    "retained_energy": (0.5, 0.65, 0.70, 0.75, 0.80, 0.85, 0.95),
}

_OF_EVERY_SEED = ("similarity", "residual_contributions")
_OF_THE_FIRST = ("residual_distributions", "prototype_geometry")


def analyse(group: Group, sweep: Sequence[str] = ()) -> None:
    """Fills the analyses of a group, and a line for each reason why some are missing.

    Args:
        group: of `runs.load`.
        sweep: of `fdc_jax.report.SWEEPS`.
    """
    missing: dict[str, list[str]] = {}
    for run in group.runs:
        names = [*_OF_EVERY_SEED, *_OF_THE_FIRST * (run is group.runs[0])]
        compute: dict[str, Callable[[FeatureSet, Any], Any]]
        compute = {name: getattr(diagnostics, name) for name in names}
        for name in sweep:
            compute[f"sweep_{name}"] = partial(vary, parameter=name)
        given: list[Any] = []  # Features and FDC; without them, all say why.
        for name, function in compute.items():
            try:
                given = given or _fitted(run)
                group.analyses.setdefault(name, []).append(function(*given))
            except InputError as error:
                missing.setdefault(str(error), []).append(name)
    for reason, names in missing.items():
        group.missing.append(f"no {', '.join(dict.fromkeys(names))}: {reason}")


def _fitted(run: Any) -> list[Any]:
    """Returns the saved features of a run, and the paper's FDC fitted on them."""
    folder = run.folder / "features"
    if not (folder / "test_adapted.npy").exists():
        raise InputError("no saved features; the run had save_features off")
    features = feature_files.load(folder)
    if features.test_labels is None:
        raise InputError("test_labels: absent from the saved features")
    names = [field.name for field in dataclasses.fields(Settings)]
    fields = {name: run.results["config"].get(f"fdc.{name}") for name in names}
    # A field that the run does not have is the default.
    settings = {name: value for name, value in fields.items() if value is not None}
    return [features, features.fit(FDC(**settings))]


def vary(
    features: FeatureSet, fdc: FDC, parameter: str, values: Sequence[float] | None = None
) -> pd.DataFrame:
    """Fits FDC anew at every value of a setting.

    Args:
        features: of a whole stream, with test labels.
        fdc: whose other settings stay.
        parameter: `attenuation`, `retained_energy` or `neighbours`.
        values: those of the paper when None; for `neighbours`, all that are feasible.

    Returns:
        A row per value: `accuracy` in percent; for `neighbours` also `nearest`, the accuracy where
        affinities are standardised over the candidate tasks of each input ("PAC Neighborhood
        Size").
    """
    if values is None:
        # Classes without images have no prototype.
        feasible = min(len(np.unique(task.labels)) for task in features.tasks)
        values = VALUES.get(parameter) or range(1, feasible + 1)
    columns = ["accuracy", *["nearest"] * (parameter == "neighbours")]
    test_labels, found = features.test_labels, []
    assert test_labels is not None  # `_fitted` has refused features without.
    for value in values:
        changed = FDC(**{**dataclasses.asdict(fdc.settings), parameter: value})
        terms = features.fit(changed).terms(features.test_adapted, features.test_pretrained)
        standardised = (terms, nearest(terms, changed))[: len(columns)]
        found.append([evaluation.accuracy(test_labels, each.fuse().label) for each in standardised])
    return pd.DataFrame(found, index=pd.Index(values, name=parameter), columns=columns)


def nearest(terms: Terms, fdc: FDC) -> Terms:
    """Returns terms whose affinities are standardised over the candidate tasks of each input."""
    views = []
    for index, (weight, evidence, q) in enumerate(terms.views):
        mean, std = np.array([task.views[index].affinity for task in fdc.tasks]).T
        affinity = q * std + mean
        spread = np.maximum(affinity.std(axis=1, keepdims=True), SCALE_FLOOR)
        views.append((weight, evidence, (affinity - affinity.mean(axis=1, keepdims=True)) / spread))
    return dataclasses.replace(terms, views=views)
