"""What is computed anew from the saved features and predictions of a run."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from fdc_jax import calibration, evaluation, feature_files
from fdc_jax.calibration import Terms
from fdc_jax.calibration.components import WHITENED, WHITENED_CLASSES, fuse_all
from fdc_jax.errors import InputError
from fdc_jax.feature_files import FeatureSet
from fdc_jax.report import diagnostics, measurements, sweeps
from fdc_jax.report.runs import Group, RunFolder

# By path of the run, then by name of the analysis.
Analyses = Mapping[str, Mapping[str, Any]]


def analyse(
    run: RunFolder,
    sweep: Sequence[str] = (),
    progress: Callable[[str], object] = lambda name: None,
) -> tuple[dict[str, Any], list[str]]:
    """Returns the analyses of a run by name, and a line for each reason why some are absent.

    Args:
        run: a finished run.
        sweep: of `fdc_jax.report.SWEEPS`.
        progress: told the name of each analysis.
    """
    found: dict[str, Any] = {}
    missing: dict[str, list[str]] = {}
    fitted = _Fitted(run)
    computed = _OF_FEATURES | {f"sweep_{name}": _sweep(name) for name in sweep}
    for name, compute in computed.items():
        progress(name)
        try:
            found[name] = compute(fitted)
        except InputError as error:
            missing.setdefault(str(error), []).append(name)
    return found, [f"no {', '.join(names)}: {reason}" for reason, names in missing.items()]


class _Fitted:
    """A run's features and what several analyses fit on them, made when first needed."""

    def __init__(self, run: RunFolder):
        self.run = run

    @cached_property
    def features(self) -> FeatureSet:
        path: Path | None = self.run.features_path
        if path is None:
            raise InputError("no saved features; the run had save_features off or is unfinished")
        features = feature_files.load(path)
        if features.test_labels is None:
            raise InputError(f"{path}: test_labels: absent")
        return features

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Arguments of the paper's FDC; fields that an older run does not know are defaults."""
        config = self.run.results["config"].items()
        found = {name.removeprefix("fdc."): value for name, value in config if name[:4] == "fdc."}
        found = {name: value for name, value in found.items() if name not in _BEYOND}
        if found.get("affinity_reference") == "pooled":
            del found["affinity_reference"]
        unknown = sorted(set(found) - set(_KNOWN))
        if unknown:
            raise InputError(f"results.json: config: unknown field fdc.{unknown[0]}")
        return found

    def terms(self, **settings: Any) -> tuple[calibration.FDC, Terms]:
        """Fits FDC with further settings and returns it with its terms of the test images."""
        calibrator = self.features.fit(calibration.from_settings(self.settings | settings))
        test = self.features.test_adapted, self.features.test_pretrained
        return calibrator, calibrator.terms(*test)

    @cached_property
    def paper(self) -> tuple[calibration.FDC, Terms]:
        return self.terms()

    @cached_property
    def fit(self) -> measurements.Fit:
        return measurements.fit(self.features, [calibration.check(self.settings)])


_BEYOND = ("affinity_metric", "affinity_evidence", "affinity_scope", "affinity_shrinkage")
_KNOWN = [field.name for field in dataclasses.fields(calibration.Settings)]


def _selection(of: _Fitted) -> dict[str, dict[str, float]]:
    """Returns the accuracy in percent of every component combination on either half.

    Returns:
        `first` and `second`, each from combinations to accuracies. A combination of one view has
        the name that it has where there are two.

    Raises:
        InputError: no class with two test images.
    """
    labels = of.features.test_labels
    assert labels is not None
    chosen = first_half(labels)
    if chosen.all():
        raise InputError("test_labels: expected a class with two test images, found none")
    scores = fuse_all(of.paper[1])
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
    """Returns accuracies in percent and storage of FDC and of the whitened affinity.

    Returns:
        Of `raw`, `fdc`, `whitened` and `whitened_classes`: `accuracy`, `oracle` (given the task)
        and `storage_bytes`.

    Raises:
        InputError: settings that the whitened metric does not allow.
    """
    calibrator, terms = of.paper
    found = {"raw": (terms.raw(), 0), "fdc": (terms.fuse(), calibrator.storage_bytes)}
    for name, affinity in (("whitened", WHITENED), ("whitened_classes", WHITENED_CLASSES)):
        calibrator, terms = of.terms(**affinity)
        found[name] = terms.scores(), calibrator.storage_bytes
    labels, tasks = of.features.test_labels, of.features.test_tasks
    assert labels is not None
    return {
        name: {
            "accuracy": evaluation.accuracy(labels, scores.label),
            "oracle": evaluation.accuracy(labels, scores.label_in_task(tasks)),
            "storage_bytes": storage,
        }
        for name, (scores, storage) in found.items()
    }


def _sweep(parameter: str) -> Callable[[_Fitted], dict[str, Any]]:
    def compute(of: _Fitted) -> dict[str, Any]:
        settings = calibration.check(of.settings)
        return sweeps.sweep(of.features, settings, parameter)

    return compute


_OF_FEATURES: dict[str, Callable[[_Fitted], dict[str, Any]]] = {
    "similarity": lambda of: diagnostics.similarity(of.features, _settings(of), of.fit),
    "residual_contributions": lambda of: diagnostics.residual_contributions(
        of.features, _settings(of), of.fit
    ),
    "residual_distributions": lambda of: diagnostics.residual_distributions(
        of.features, _settings(of), of.fit
    ),
    "prototype_geometry": lambda of: diagnostics.prototype_geometry(of.features),
    "logit_standardisation": lambda of: diagnostics.logit_standardisation(of.features),
    "selection": _selection,
    "beyond": _beyond,
}


def _settings(of: _Fitted):
    return calibration.check(of.settings)


# Over the seeds of a group ------------------------------------------------------------------------


def of_group(group: Group, analyses: Analyses, name: str) -> list[dict[str, Any]]:
    """Returns an analysis of every run of the group that has it, by ascending seed."""
    found = (analyses.get(str(run.path), {}).get(name) for run in group.runs)
    return [each for each in found if each]


def having(
    groups: Sequence[Group], analyses: Analyses, name: str
) -> list[tuple[Group, list[dict[str, Any]]]]:
    """Returns the groups of which at least one run has an analysis, with its results."""
    found = [(group, of_group(group, analyses, name)) for group in groups]
    return [(group, results) for group, results in found if results]


def mean_over_seeds(rows: Sequence[Sequence[float | None]]) -> Float[np.ndarray, " n"]:
    """Mean of equally long lists, NaN where a seed has no number; only the first of other lengths.

    Runs of one group see the same tasks, so lengths differ in damaged results alone.
    """
    alike = [row for row in rows if len(row) == len(rows[0])]
    return np.array(alike, dtype=np.float64).mean(axis=0)
