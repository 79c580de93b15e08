"""Calibrators fitted and scored on a feature file, and their results."""

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import msgspec
import numpy as np

from fdc_jax import calibration, evaluation
from fdc_jax.calibration import FDC, Calibrator, Scores
from fdc_jax.calibration.inputs import NotApplicable
from fdc_jax.errors import counted
from fdc_jax.features.feature_files import FeatureSet
from fdc_jax.machine import devices
from fdc_jax.machine.versions import versions

# Share of test samples in one other task, counted from their own, that betrays shifted labels.
SHIFTED = 0.5


class FittedMethod(NamedTuple):
    """A calibrator fitted on a feature file, and its scores of the test features."""

    name: str
    calibrator: Calibrator
    components: dict[str, Scores]
    fit: devices.Elapsed
    score_seconds: float

    @property
    def scores(self) -> Scores:
        """Returns the scores with all components."""
        return self.components["full"]


def run(name: str, features: FeatureSet, settings: Mapping[str, Any]) -> FittedMethod:
    """Returns a method fitted task by task, with scores of all test features by the final heads.

    Settings of other methods are ignored. Raises NotApplicable if the method cannot use features of
    this kind, and InputError if they are damaged.
    """
    calibrator = calibration.make(name, **settings)
    watch = devices.Stopwatch()
    features.fit(calibrator)
    fit = watch.read()
    start = time.perf_counter()
    components = calibrator.components(features.test_adapted, features.test_pretrained)
    score_seconds = time.perf_counter() - start
    unscored = ~np.isfinite(components["full"].task_scores).any(axis=1)
    if unscored.any():
        row = int(np.argmax(unscored))
        raise NotApplicable(f"test_adapted: row {row} has no finite score by {name}")
    return FittedMethod(name, calibrator, components, fit, score_seconds)


def task_confusions(
    features: FeatureSet, outcomes: Mapping[str, FittedMethod]
) -> dict[str, list[list[int]]]:
    """Returns the test samples by true task (row) and chosen task (column), by method."""
    true, count = features.test_tasks, len(features.tasks)
    return {
        name: evaluation.task_confusion(true, outcome.scores.task, count).tolist()
        for name, outcome in outcomes.items()
    }


def shift_warning(confusions: Mapping[str, Any]) -> str:
    """Returns a warning if labels of training and test are shifted by some tasks, or "".

    Args:
        confusions: test samples by true task (row) and chosen task (column), by method.
    """
    shares = []
    for confusion in confusions.values():
        counts = np.asarray(confusion)
        # Shares of samples that are assigned to the k-th task after their own, cyclically.
        by_shift = [np.trace(np.roll(counts, -k, axis=1)) for k in range(len(counts))]
        shares.append(np.array(by_shift) / counts.sum())
    clearest = max(shares, key=np.max)
    shift = int(clearest.argmax())
    if not shift or clearest[shift] < max(SHIFTED, 5 * clearest[0]):
        return ""
    return (
        f"test_labels: {clearest[shift]:.0%} of the test samples are assigned to the task "
        f"{shift} after that of their label, {clearest[0]:.0%} to their own; the labels of "
        f"training and test are probably shifted by {counted(shift, 'task')}"
    )


def results(features: FeatureSet, outcomes: Mapping[str, FittedMethod]) -> dict[str, Any]:
    """Returns JSON values by quantity and method, named as in `results.json` of a run.

    Without test labels there are no accuracies, in percent, and without `raw` no gains.
    """
    scores = {name: outcome.scores for name, outcome in outcomes.items()}
    labels, compared = features.test_labels, scores if "raw" in scores else {}
    raw: Any = scores["raw"].label if compared else None
    sizes: dict[str, Any] = {
        "num_tasks": len(features.tasks),
        "num_classes": sum(len(task.classes) for task in features.tasks),
        "num_test_images": len(features.test_adapted),
        "num_changed_labels": {n: int(np.sum(raw != new.label)) for n, new in compared.items()},
        "storage_bytes": {name: fit.calibrator.storage_bytes for name, fit in outcomes.items()},
        "notes": {n: fit.calibrator.note for n, fit in outcomes.items() if fit.calibrator.note},
        "timing": {
            "fit_seconds": {name: outcome.fit.seconds for name, outcome in outcomes.items()},
            "fit_compile_seconds": {n: fit.fit.compile_seconds for n, fit in outcomes.items()},
            "score_seconds": {name: outcome.score_seconds for name, outcome in outcomes.items()},
        },
        "device": jax.devices()[0].device_kind,
        "versions": versions(),
    }
    if labels is None:
        return sizes
    tasks = features.test_tasks
    parts = outcomes[FDC.name].components if FDC.name in outcomes else {}
    gains = {}
    for name, answers in compared.items():
        gains[name] = evaluation.sample_gain(labels, raw, answers.label)._asdict()
    measures = evaluation.measures(scores, labels, tasks)
    return {
        **sizes,
        **msgspec.to_builtins(measures),
        "task_confusion": task_confusions(features, outcomes),
        "gain": gains,
        "components": {n: evaluation.accuracy(labels, part.label) for n, part in parts.items()},
    }
