"""Numbers of one calibrated prediction beside the raw one, as plain JSON values."""

import math
import platform
from typing import Any

import jax
import numpy as np

import fdc_jax
from fdc_jax import evaluation
from fdc_jax.calibration import Scores, Terms
from fdc_jax.calibration.components import fuse_all
from fdc_jax.feature_files import FeatureSet


def summarise(features: FeatureSet, raw: Scores, calibrated: Scores) -> dict[str, Any]:
    """Compares two predictions; accuracies in percent, absent without test labels."""
    changed = int(np.sum(raw.label != calibrated.label))
    summary: dict[str, Any] = {
        "num_tasks": len(features.tasks),
        "num_classes": sum(len(task.classes) for task in features.tasks),
        "num_test_samples": len(raw.label),
        "num_changed_labels": changed,
    }
    if features.test_labels is None:
        return summary
    truth, tasks = features.test_labels, features.test_tasks
    pair = {"raw": raw, "calibrated": calibrated}
    cells = {name: decompose(features, scores) for name, scores in pair.items()}
    confusion = {
        name: evaluation.task_confusion(tasks, scores.task, len(features.tasks))
        for name, scores in pair.items()
    }
    return summary | {
        "accuracy": {name: cell.accuracy for name, cell in cells.items()},
        "routing_accuracy": {name: cell.routing_accuracy for name, cell in cells.items()},
        "oracle_accuracy": {name: cell.oracle_accuracy for name, cell in cells.items()},
        "decomposition": {
            name: {
                "right_task_right_class": cell.right_task_right_class,
                "right_task_wrong_class": cell.right_task_wrong_class,
                "wrong_task_oracle_right": cell.wrong_task_oracle_right,
                "wrong_task_oracle_wrong": cell.wrong_task_oracle_wrong,
                "errors_fixed_by_task": _number(cell.errors_fixed_by_task),
            }
            for name, cell in cells.items()
        },
        "gain": evaluation.bootstrap_gain(truth, raw.label, calibrated.label)._asdict(),
        "mcnemar_p_value": evaluation.mcnemar(truth, raw.label, calibrated.label),
        "flips": evaluation.flips(truth, raw.label, calibrated.label)._asdict(),
        "task_accuracy": {
            name: [
                _number(value)
                for value in evaluation.task_accuracies(
                    tasks, truth, scores.label, len(features.tasks)
                )
            ]
            for name, scores in pair.items()
        },
        "most_confused_tasks": {
            name: [each._asdict() for each in evaluation.most_confused(matrix)]
            for name, matrix in confusion.items()
        },
        "task_confusion": {name: matrix.tolist() for name, matrix in confusion.items()},
    }


def decompose(features: FeatureSet, scores: Scores) -> evaluation.Decomposition:
    """Task and class decisions of a prediction on labelled test features."""
    tasks = features.test_tasks
    assert features.test_labels is not None
    return evaluation.decompose(
        tasks, features.test_labels, scores.task, scores.label, scores.label_in_task(tasks)
    )


def component_accuracies(features: FeatureSet, terms: Terms) -> dict[str, float]:
    """Accuracy of every component combination of FDC, or of the variant that it was set to.

    The view rows need two views.
    """
    assert features.test_labels is not None
    return {
        name: evaluation.accuracy(features.test_labels, scores.label)
        for name, scores in fuse_all(terms, terms.affinity).items()
    }


def versions() -> dict[str, str]:
    """Versions and device that produced a result."""
    return {
        "fdc_jax": fdc_jax.__version__,
        "jax": jax.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "device": jax.devices()[0].device_kind,
    }


def _number(value: float) -> float | None:
    """JSON has no NaN."""
    return None if math.isnan(value) else float(value)
