"""How a calibrator is fitted on a feature file and scored, what is said of it, and warnings."""

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from fdc_jax import calibration, evaluation
from fdc_jax.calibration import Calibrator, Scores, drift, inputs
from fdc_jax.errors import InputError
from fdc_jax.features.feature_files import FeatureSet
from fdc_jax.machine.versions import versions


class Outcome(NamedTuple):
    """One method on one feature file."""

    name: str
    calibrator: Calibrator
    components: dict[str, Scores]
    fit_seconds: float
    score_seconds: float

    @property
    def scores(self) -> Scores:
        """Its scores with everything switched on."""
        return self.components["full"]


def run(name: str, features: FeatureSet, settings: Mapping[str, Any]) -> Outcome:
    """Fits a method task by task and scores all test features with the final heads.

    Args:
        name: one of `calibration.METHODS`.
        features: what to fit and to score.
        settings: values by name; those that the method does not have are passed over.

    Raises:
        InputError: the method does not apply to these features.
    """
    calibrator = calibration.make(name, **settings)
    start = time.perf_counter()
    features.fit(calibrator)
    fitted = time.perf_counter()
    components = calibrator.components(features.test_adapted, features.test_pretrained)
    scored = time.perf_counter()
    unfit = ~np.isfinite(components["full"].task_scores).any(axis=1)
    if unfit.any():
        raise InputError(f"{name}: no finite score for test row {int(np.argmax(unfit))}")
    return Outcome(name, calibrator, components, fitted - start, scored - fitted)


def moved(features: FeatureSet) -> FeatureSet:
    """Returns features of which those of earlier encoders are moved to where the last one has them.

    Every task's map (`calibration.drift`) moves the adapted features of all tasks before it. So any
    method sees statistics that follow the encoder, also those that an affine map cannot move.

    Raises:
        InputError: the file lacks `train_previous_t`.
    """
    adapted = [np.asarray(task.adapted) for task in features.tasks]
    for t, task in enumerate(features.tasks[1:], start=1):
        if task.previous is None:
            raise InputError(
                f"train_previous_{t}: missing; expected, as statistics follow the encoder, "
                "features of the task's samples by the encoder before it"
            )
        previous = inputs.feature_array(task.previous, f"train_previous_{t}")
        by = drift.fit_map(previous, adapted[t])
        adapted[:t] = [by.move(each).astype(np.float32) for each in adapted[:t]]
    pairs = zip(features.tasks, adapted, strict=True)
    return features._replace(tasks=tuple(task._replace(adapted=each) for task, each in pairs))


def summarise(
    features: FeatureSet, settings: Mapping[str, Any], raw: Scores, outcome: Outcome
) -> dict[str, Any]:
    """Returns what is said of a method, as JSON values; accuracies are absent without test labels.

    What is measured stands there twice, under `raw` and under `calibrated`.
    """
    calibrated, truth = outcome.scores, features.test_labels
    known = calibration.METHODS[outcome.name].settings
    found: dict[str, Any] = {
        "method": outcome.name,
        "note": outcome.calibrator.note,
        "num_tasks": len(features.tasks),
        "num_classes": sum(len(task.classes) for task in features.tasks),
        "num_test_samples": len(raw.label),
        "num_changed_labels": int(np.sum(raw.label != calibrated.label)),
        "storage_bytes": outcome.calibrator.storage_bytes,
        "seconds": {"fit": outcome.fit_seconds, "score": outcome.score_seconds},
        "settings": {name: value for name, value in settings.items() if name in known},
        "versions": versions() | {"device": jax.devices()[0].device_kind},
    }
    if truth is None:
        return found
    tasks, both = features.test_tasks, {"raw": raw, "calibrated": calibrated}
    return {
        **found,
        **evaluation.measure(both, truth, tasks),
        "task_confusion": {
            name: evaluation.task_confusion(tasks, each.task, len(features.tasks)).tolist()
            for name, each in both.items()
        },
        "gain": evaluation.sample_gain(truth, raw.label, calibrated.label)._asdict(),
        "component_accuracy": {
            name: evaluation.accuracy(truth, each.label)
            for name, each in outcome.components.items()
        },
    }
