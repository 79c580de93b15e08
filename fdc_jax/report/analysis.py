"""What is computed anew from the saved features of a run."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from fdc_jax import calibration, evaluation, feature_files
from fdc_jax.calibration import FDC, Affinity, Terms, WhitenedTerms
from fdc_jax.calibration.components import WHITENED, fuse_all
from fdc_jax.errors import InputError
from fdc_jax.feature_files import FeatureSet
from fdc_jax.report import diagnostics, sweeps
from fdc_jax.report.runs import RunFolder


def analyse(run: RunFolder, sweep: Sequence[str] = ()) -> None:
    """Fills the analyses of a run, and a line for each reason why some are missing.

    Args:
        run: a finished run.
        sweep: of `fdc_jax.report.SWEEPS`.
    """
    missing: dict[str, list[str]] = {}
    fitted = _Fitted(run)
    for name, compute in (_ANALYSES | {f"sweep_{name}": _sweep(name) for name in sweep}).items():
        try:
            run.analyses[name] = compute(fitted)
        except InputError as error:
            missing.setdefault(str(error), []).append(name)
    run.missing[:] = [f"no {', '.join(names)}: {reason}" for reason, names in missing.items()]


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
        """The paper's FDC, in the same fit with the whitened affinity where the settings allow."""
        try:
            calibrator = calibration.from_settings(self.settings | WHITENED)
        except InputError:
            calibrator = FDC(**self.settings)
        # Compiling what scores would take longer than scoring.
        return self.features.fit(calibrator).to_numpy()

    @cached_property
    def terms(self) -> Terms:
        """Its terms of the test images."""
        return self.calibrator.terms(self.features.test_adapted, self.features.test_pretrained)


def _selection(of: _Fitted) -> dict[str, dict[str, float]]:
    """Returns accuracies in percent of all component combinations on the `first` half and `second`.

    A combination of one view has the name that it has where there are two.
    """
    labels = np.asarray(of.features.test_labels)
    chosen = first_half(labels)
    if chosen.all():
        raise InputError("test_labels: expected a class with two test images, found none")
    scores = fuse_all(of.terms)
    if of.features.test_pretrained is None:
        scores |= {"pac+rlc_adapted_view": scores["pac+rlc"], "adapted_view": scores["full"]}
    return {
        half: {
            name: evaluation.accuracy(labels[mask], each.label[mask])
            for name, each in scores.items()
        }
        for half, mask in (("first", chosen), ("second", ~chosen))
    }


def first_half(labels: Int[np.ndarray, " n"]) -> Bool[np.ndarray, " n"]:
    """Returns which samples are the first, third, ... of their class in the order of the file."""
    order = np.argsort(labels, kind="stable")
    _, starts, counts = np.unique(labels[order], return_index=True, return_counts=True)
    place = np.empty(len(labels), np.int64)
    place[order] = np.arange(len(labels)) - np.repeat(starts, counts)
    return place % 2 == 0


def _beyond(of: _Fitted) -> dict[str, dict[str, float]]:
    """Returns `accuracy`, `oracle` (task given) in percent and `storage_bytes` of each method."""
    calibration.check(of.settings | WHITENED)
    labels, tasks, terms = of.features.test_labels, of.features.test_tasks, of.terms
    assert isinstance(terms, WhitenedTerms)
    by_class = Affinity("whitened", "linear", "pooled", "class")
    own, paper = of.calibrator.storage_bytes, of.calibrator.paper_storage_bytes
    found = {
        "raw": (terms.raw(), 0),
        "fdc": (terms.fuse(), paper),
        "whitened": (terms.scores(), own),
        "whitened_classes": (terms.fuse_affinity(affinity=by_class), own),
    }
    return {
        name: {
            "accuracy": evaluation.accuracy(labels, scores.label),
            "oracle": evaluation.accuracy(labels, scores.label_in_task(tasks)),
            "storage_bytes": storage,
        }
        for name, (scores, storage) in found.items()
    }


def _sweep(parameter: str) -> Callable[[_Fitted], dict[str, Any]]:
    return lambda of: sweeps.sweep(of.features, of.settings, parameter)


def _diagnosed(diagnostic: Callable[[FeatureSet, FDC], dict[str, Any]]):
    return lambda of: diagnostic(of.features, of.calibrator)


_ANALYSES: dict[str, Callable[[_Fitted], dict[str, Any]]] = {
    "similarity": _diagnosed(diagnostics.similarity),
    "residual_contributions": _diagnosed(diagnostics.residual_contributions),
    "residual_distributions": _diagnosed(diagnostics.residual_distributions),
    "prototype_geometry": _diagnosed(diagnostics.prototype_geometry),
    "logit_standardisation": _diagnosed(diagnostics.logit_standardisation),
    "selection": _selection,
    "beyond": _beyond,
}
