"""Accuracy as one setting of FDC varies (paper, "Hyperparameter Analysis of TSF and PAC")."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Float

from fdc_jax import evaluation
from fdc_jax.calibration.fdc import Settings, TaskLogits, Terms, ViewEvidence
from fdc_jax.calibration.foreign import log_likelihood_ratio
from fdc_jax.calibration.measures import SCALE_FLOOR
from fdc_jax.calibration.scores import Scores
from fdc_jax.errors import InputError
from fdc_jax.feature_files import FeatureSet
from fdc_jax.report import measurements
from fdc_jax.report.measurements import Fit, Measures
from fdc_jax.report.spectra import TaskSpectrum, feasible_neighbours, spectra

# What the paper varies, each with everything else at its default.
VALUES = {
    "attenuation": (0.0, 0.25, 0.375, 0.5, 0.625, 0.75, 1.0),
    "retained_energy": (0.5, 0.65, 0.70, 0.75, 0.80, 0.85, 0.95),
}


def scores(
    features: FeatureSet, settings: Sequence[Settings], tasks: Sequence[TaskSpectrum] | None = None
) -> list[Scores]:
    """Returns what FDC, fitted anew at each of several settings, scores the test images.

    Args:
        features: of a whole stream.
        settings: at least one.
        tasks: `spectra.spectra(features)`, where the caller has them.

    Raises:
        InputError: a setting is outside its range, or has more neighbours than a task has classes.
    """
    tasks = spectra(features) if tasks is None else tasks
    feasible = feasible_neighbours(tasks)
    wanted = max(each.neighbours for each in settings)
    if wanted > feasible:
        raise InputError(
            f"neighbours: expected at most {feasible}, the classes with images of the smallest "
            f"task, found {wanted}"
        )
    fit = measurements.fit(features, settings, tasks)
    views = [fit.measure(0, features.test_adapted, with_heads=True)]
    if features.test_pretrained is not None:
        views.append(fit.measure(1, features.test_pretrained))
    classes = [task.classes for task in features.tasks]
    return [_terms(fit, views, each, classes).fuse() for each in settings]


def _terms(fit: Fit, views: Sequence[Measures], settings: Settings, classes: Sequence) -> Terms:
    share = fit.shares.index(settings.retained_energy)
    place = fit.plan.filters.index((share, settings.attenuation))
    raw, filtered = views[0].raw, views[0].filtered
    assert raw is not None and filtered is not None
    evidence = [_evidence(fit, view, each, share, settings) for view, each in enumerate(views)]
    return Terms(
        TaskLogits(np.asarray(raw.logit).T, np.asarray(raw.row).T),
        TaskLogits(
            np.asarray(filtered.logit)[:, :, place].T, np.asarray(filtered.row)[:, :, place].T
        ),
        evidence[0],
        evidence[1] if len(evidence) == 2 else None,
        fit.raw_scale,
        fit.filtered_scale[:, place],
        settings,
        classes,
    )


def _evidence(
    fit: Fit, view: int, measures: Measures, share: int, settings: Settings
) -> ViewEvidence:
    fitted = fit.views[view]
    residual = fitted.residuals(np.asarray(measures.ratio), share).T
    reference, rlc = fitted.references[share], np.zeros_like(residual)
    if reference is not None:
        mean, variance, scale = reference
        rlc = np.tanh(log_likelihood_ratio(residual, mean, variance) / scale)
    assert measures.distance is not None
    distance = np.asarray(measures.distance)
    if settings.affinity_reference == "nearest":
        affinity = standardised_over_tasks(-distance[:, :, settings.neighbours - 1].T)
    else:
        affinity = fitted.affinities(distance, settings.neighbours).T
    return ViewEvidence(rlc, affinity)


def standardised_over_tasks(affinity: Float[np.ndarray, "n tasks"]) -> Float[np.ndarray, "n tasks"]:
    """Returns q of the reference "Nearest": moments over the candidate tasks of each input."""
    affinity = affinity.astype(np.float64)
    std = affinity.std(axis=1, keepdims=True)
    return (affinity - affinity.mean(axis=1, keepdims=True)) / np.maximum(std, SCALE_FLOOR)


def sweep(
    features: FeatureSet,
    settings: Settings,
    parameter: str,
    values: Sequence[float] | None = None,
    tasks: Sequence[TaskSpectrum] | None = None,
) -> dict[str, Any]:
    """Returns accuracies of full FDC with one setting varied and everything refitted.

    Args:
        features: of a whole stream, with test labels.
        settings: of everything that is not varied.
        parameter: `attenuation`, `retained_energy` or `neighbours`.
        values: those of the paper when None; for `neighbours`, all that are feasible.
        tasks: `spectra.spectra(features)`, where the caller has them.

    Returns:
        `parameter`, `values` and `default`, the setting that the run has; then, one number in
        percent for each value, `accuracy` and `routing_accuracy`. For `neighbours` these two stand
        under `own`, where affinities are standardised by the tasks' own training affinities for
        each K, and under `nearest`, by the affinities of the candidate tasks to the same input.

    Raises:
        InputError: an unknown parameter, a value outside its range, or no test labels.
    """
    if parameter not in (*VALUES, "neighbours"):
        raise InputError(
            f"parameter: expected one of {', '.join(VALUES)}, neighbours; found {parameter!r}"
        )
    true_tasks = features.test_tasks
    tasks = spectra(features) if tasks is None else tasks
    if values is None:
        values = VALUES.get(parameter) or range(1, feasible_neighbours(tasks) + 1)
    varied = [replace(settings, **{parameter: value}) for value in values]
    result: dict[str, Any] = {
        "parameter": parameter,
        "values": list(values),
        "default": getattr(settings, parameter),
    }

    def accuracies(found: Sequence[Scores]) -> dict[str, list[float]]:
        labels = features.test_labels
        assert labels is not None
        return {
            "accuracy": [evaluation.accuracy(labels, each.label) for each in found],
            "routing_accuracy": [evaluation.accuracy(true_tasks, each.task) for each in found],
        }

    if parameter != "neighbours":
        return result | accuracies(scores(features, varied, tasks))
    both = [
        replace(each, affinity_reference=name) for name in Settings.REFERENCES for each in varied
    ]
    found = scores(features, both, tasks)
    for place, name in enumerate(Settings.REFERENCES):
        result[name] = accuracies(found[place * len(varied) : (place + 1) * len(varied)])
    return result
