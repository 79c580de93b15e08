"""Accuracy as one setting of FDC varies (paper, "Hyperparameter Analysis of TSF and PAC")."""

from collections.abc import Mapping, Sequence
from typing import Any

from fdc_jax import calibration, evaluation
from fdc_jax.feature_files import FeatureSet

# What the paper varies, each with everything else at its default.
VALUES = {
    "attenuation": (0.0, 0.25, 0.375, 0.5, 0.625, 0.75, 1.0),
    "retained_energy": (0.5, 0.65, 0.70, 0.75, 0.80, 0.85, 0.95),
}


def sweep(
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
        feasible = min(len(set(task.labels.tolist())) for task in features.tasks)
        values = VALUES.get(parameter) or range(1, feasible + 1)

    def accuracies(**others: Any) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {"accuracy": [], "routing_accuracy": []}
        for value in values:
            varied = dict(settings) | others | {parameter: value}
            scores = features.fit(calibration.FDC(**varied)).score(
                features.test_adapted, features.test_pretrained
            )
            found["accuracy"].append(evaluation.accuracy(labels, scores.label))
            found["routing_accuracy"].append(evaluation.accuracy(tasks, scores.task))
        return found

    default = getattr(calibration.FDC(**settings).settings, parameter)
    result: dict[str, Any] = {"values": list(values), "default": default}
    if parameter != "neighbours":
        return result | accuracies()
    return result | {name: accuracies(affinity_reference=name) for name in ("own", "nearest")}
