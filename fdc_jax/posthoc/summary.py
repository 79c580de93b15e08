"""What is said of one calibrated prediction: its numbers beside the raw one's, and warnings."""

import logging
import math
import platform
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

import fdc_jax
from fdc_jax import evaluation
from fdc_jax.calibration import Scores
from fdc_jax.calibration.comparators.base import in_blocks
from fdc_jax.calibration.components import fuse_all
from fdc_jax.features.feature_files import FeatureSet
from fdc_jax.posthoc.methods import Outcome, Settings

_LOGGER = logging.getLogger("fdc_jax.posthoc")

# Cells of the decomposition that are errors.
ERRORS = ("right_task_wrong_class", "wrong_task_oracle_right", "wrong_task_oracle_wrong")


def summarise(
    method: str, features: FeatureSet, settings: Settings, raw: Scores, outcome: Outcome
) -> dict[str, Any]:
    """Returns plain JSON values; accuracies in percent, absent without test labels."""
    calibrated, terms, truth = outcome.scores, outcome.terms, features.test_labels
    report: dict[str, Any] = {
        "method": method,
        "num_tasks": len(features.tasks),
        "num_classes": sum(len(task.classes) for task in features.tasks),
        "num_test_samples": len(raw.label),
        "num_changed_labels": int(np.sum(raw.label != calibrated.label)),
        "storage_bytes": outcome.calibrator.storage_bytes,
        "seconds": {"fit": outcome.fit_seconds, "score": outcome.score_seconds},
        "settings": settings.of(method),
        "versions": {
            "fdc_jax": fdc_jax.__version__,
            "jax": jax.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
            "device": jax.devices()[0].device_kind,
        },
    }
    if truth is None:
        return report
    report["gain"] = evaluation.bootstrap_gain(truth, raw.label, calibrated.label)._asdict()
    report["mcnemar_p_value"] = evaluation.mcnemar(truth, raw.label, calibrated.label)
    report["flips"] = evaluation.flips(truth, raw.label, calibrated.label)._asdict()
    tasks, count = features.test_tasks, len(features.tasks)
    for name, scores in (("raw", raw), ("calibrated", calibrated)):
        cells = evaluation.decompose(
            tasks, truth, scores.task, scores.label, scores.label_in_task(tasks)
        )
        confusion = evaluation.task_confusion(tasks, scores.task, count)
        by_task = evaluation.task_accuracies(tasks, truth, scores.label, count)
        shares = {cell: getattr(cells, cell) for cell in ("right_task_right_class", *ERRORS)}
        for key, value in {
            "accuracy": cells.accuracy,
            "routing_accuracy": cells.routing_accuracy,
            "oracle_accuracy": cells.oracle_accuracy,
            "decomposition": shares | {"errors_fixed_by_task": _plain(cells.errors_fixed_by_task)},
            "task_accuracy": [_plain(each) for each in by_task],
            "most_confused_tasks": [each._asdict() for each in evaluation.most_confused(confusion)],
            "task_confusion": confusion.tolist(),
        }.items():
            report.setdefault(key, {})[name] = value
    if terms is not None:
        components = terms.beyond().get(terms.settings.entry) or fuse_all(terms)
        report["component_accuracy"] = {
            name: evaluation.accuracy(truth, scores.label) for name, scores in components.items()
        }
    return report


def _plain(number: float) -> float | None:
    return None if math.isnan(number) else float(number)


def warn_of_weak_heads(features: FeatureSet) -> None:
    """Warns where heads know next to nothing: rows or samples then stand in another order.

    That is said of a task of c classes below an accuracy of 3 / c, three times chance; with fewer
    than five classes below (1 + 1 / c) / 2, half way from chance to certainty, which then is less.
    A task of one class tells nothing.
    """
    own, final = [], []
    for task in features.tasks:
        own.append((task.adapted, task.labels, task.head, task.classes))
        if features.test_labels is not None:
            rows = np.isin(features.test_labels, task.classes)
            samples = features.test_adapted[rows], features.test_labels[rows]
            final.append((*samples, task.final_head or task.head, task.classes))
    _warn(
        own,
        "heads are hardly ever right about their own training samples",
        "head_weight_t in another order than the task's labels, ascending or in head_classes_t",
        "train_adapted_t from a loader that shuffles, so that train_labels_t are of other images",
    )
    _warn(
        final,
        "heads are hardly ever right about test samples of their own task (oracle accuracy)",
        "final_head_weight_t or head_weight_t in another order than the task's labels",
        "test_adapted from a loader that shuffles, so that test_labels are of other images",
    )


def _warn(parts: Iterable[tuple], what: str, *causes: str) -> None:
    weak = []
    for task, (samples, labels, head, classes) in enumerate(parts):
        count = len(classes)
        if count == 1 or not len(labels):
            continue
        right = float(np.mean(classes[in_blocks(head.logits, samples).argmax(axis=1)] == labels))
        if right < min(3.0 / count, (1.0 + 1.0 / count) / 2.0):
            weak.append(f"task {task} {100 * right:.1f}% (chance {100 / count:.1f}%)")
    if weak:
        more = f" and {len(weak) - 10} more" if len(weak) > 10 else ""
        _LOGGER.warning(
            "%s: %s%s. The two usual causes: rows of %s; or rows of %s. Numbers below then mean "
            "nothing",
            what,
            ", ".join(weak[:10]),
            more,
            *causes,
        )
