"""What is computed anew from the saved features of a run."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from fdc_jax import calibration, evaluation
from fdc_jax.calibration import FDC, Terms
from fdc_jax.errors import InputError
from fdc_jax.features import feature_files
from fdc_jax.features.feature_files import FeatureSet
from fdc_jax.posthoc import methods
from fdc_jax.report import diagnostics
from fdc_jax.report.runs import RunFolder

# What the paper varies, each with everything else at its default ("Hyperparameter Analysis of TSF
# and PAC").
VALUES = {
    "attenuation": (0.0, 0.25, 0.375, 0.5, 0.625, 0.75, 1.0),
    "retained_energy": (0.5, 0.65, 0.70, 0.75, 0.80, 0.85, 0.95),
}


def analyse(run: RunFolder, sweep: Sequence[str] = (), first: bool = True) -> None:
    """Fills the analyses of a run, and a line for each reason why some are missing.

    Args:
        run: a finished run.
        sweep: of `fdc_jax.report.SWEEPS`.
        first: whether it is the first of its group, for which alone some figures are drawn.
    """
    missing: dict[str, list[str]] = {}
    fitted = _Fitted(run)
    compute: dict[str, Callable[[_Fitted], Any]] = {
        name: lambda of, name=name: getattr(diagnostics, name)(of.features, of.calibrator)
        for name in (*_DIAGNOSED, *_OF_THE_FIRST * first)
    }
    compute["beyond"] = _beyond
    for name in sweep:
        compute[f"sweep_{name}"] = lambda of, name=name: vary(of.features, of.settings, name)
    for name, function in compute.items():
        try:
            run.analyses[name] = function(fitted)
        except InputError as error:
            missing.setdefault(str(error), []).append(name)
    run.missing[:] = [f"no {', '.join(names)}: {reason}" for reason, names in missing.items()]


_DIAGNOSED = ("similarity", "residual_contributions", "logit_standardisation")
_OF_THE_FIRST = ("residual_distributions", "prototype_geometry")


class _Fitted:
    """A run's features and FDC fitted on them, made when first needed."""

    def __init__(self, run: RunFolder):
        self.run = run

    @cached_property
    def features(self) -> FeatureSet:
        path = self.run.features_path
        if path is None:
            raise InputError("no saved features; the run had save_features off or is unfinished")
        features = feature_files.load(path)
        if features.test_labels is None:
            raise InputError(f"{path}: test_labels: absent")
        return features

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Arguments of the paper's FDC; fields that an older run does not know are defaults."""
        config = self.run.results["config"]
        names = [field.name for field in dataclasses.fields(calibration.Settings)]
        found = {name: config[f"fdc.{name}"] for name in names if f"fdc.{name}" in config}
        if found.get("affinity_reference") == "pooled":  # Of the whitened affinity alone.
            del found["affinity_reference"]
        return found

    @cached_property
    def calibrator(self) -> FDC:
        """The paper's FDC."""
        # Compiling what fits and scores would take longer than that itself.
        return self.features.fit(FDC(**self.settings).to_numpy())

    @cached_property
    def terms(self) -> Terms:
        """Its terms of the test images."""
        return self.calibrator.terms(self.features.test_adapted, self.features.test_pretrained)


# What a run is compared with: closed-form heads on features that nobody trained, and calibrators.
COMPARED = (
    *("ncm-pretrained", "mahalanobis-pretrained", "ridge-pretrained", "ranpac-pretrained"),
    *("ncm", "mahalanobis", "ranpac", "whitened", "whitened-classes", "transported"),
)
# Random features of RanPAC, with the seed; more of them take longer than the rest of a report.
_COMPARATORS = (1000, 0)


def _beyond(of: _Fitted) -> dict[str, dict[str, float]]:
    """Returns numbers of Raw, FDC and each method of `COMPARED` that applies to the run.

    `accuracy` and `oracle` (task given) in percent, `storage_bytes`, and `low` and `high`, the
    bootstrap interval over images of the gain over FDC.
    """
    labels, tasks = of.features.test_labels, of.features.test_tasks
    assert labels is not None  # `_Fitted` has refused features without.
    raw, fdc = of.terms.raw(), of.terms.fuse()
    found = {"raw": (raw, 0), "fdc": (fdc, of.calibrator.paper_storage_bytes)}
    settings = methods.Settings(of.settings, *_COMPARATORS)
    for name in COMPARED:
        with contextlib.suppress(InputError):  # Not for such features or settings.
            one = methods.run(name, of.features, settings, plain=True)
            found[name] = one.scores, one.calibrator.storage_bytes
    entries = {}
    for name, (scores, storage) in found.items():
        gain = evaluation.bootstrap_gain(labels, fdc.label, scores.label)
        entries[name] = {
            "accuracy": evaluation.accuracy(labels, scores.label),
            "oracle": evaluation.accuracy(labels, scores.label_in_task(tasks)),
            "storage_bytes": storage,
            "low": gain.low,
            "high": gain.high,
        }
    return entries


def vary(
    features: FeatureSet,
    settings: Mapping[str, Any],
    parameter: str,
    values: Sequence[float] | None = None,
) -> dict[str, Any]:
    """Fits FDC anew at every value of a setting.

    Args:
        features: of a whole stream, with test labels.
        settings: arguments of `calibration.FDC` that are not varied.
        parameter: `attenuation`, `retained_energy` or `neighbours`.
        values: those of the paper when None; for `neighbours`, all that are feasible.

    Returns:
        `values` and `default`, the setting of the run; then, one number in percent for each value,
        `accuracy` and `routing_accuracy`. For `neighbours` these two stand under `own`, where
        affinities are standardised by the tasks' own training affinities for each K, and under
        `nearest`, by the affinities of the candidate tasks to the same input.
    """
    labels, tasks = features.test_labels, features.test_tasks
    assert labels is not None  # Else there are no tasks of them, either.
    if values is None:
        # Classes without images have no prototype.
        feasible = min(len(np.unique(task.labels)) for task in features.tasks)
        values = VALUES.get(parameter) or range(1, feasible + 1)

    def accuracies(**others: Any) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {"accuracy": [], "routing_accuracy": []}
        for value in values:
            calibrator = features.fit(calibration.FDC(**{**settings, **others, parameter: value}))
            scores = calibrator.score(features.test_adapted, features.test_pretrained)
            found["accuracy"].append(evaluation.accuracy(labels, scores.label))
            found["routing_accuracy"].append(evaluation.accuracy(tasks, scores.task))
        return found

    default = getattr(calibration.FDC(**settings).settings, parameter)
    result: dict[str, Any] = {"values": list(values), "default": default}
    if parameter != "neighbours":
        return result | accuracies()
    return result | {name: accuracies(affinity_reference=name) for name in ("own", "nearest")}
