"""What a prediction got right, where it went wrong, and whether a gain is real.

Predictions are integer vectors of one length [n] on the host.
Accuracies and shares are in percent, gains in percentage points.

A prediction is read as two decisions (paper, Eq. raw): the task, then the class within the task's
head. `oracle_label` is the class that the same scores give when the true task is known ("Given Task
ID" in the paper).
"""

import base64
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy.special
from jaxtyping import Bool, Float, Int
from numpy.typing import ArrayLike

from fdc_jax.calibration import FDC, METHODS, Scores
from fdc_jax.calibration.confidence import of_labels
from fdc_jax.errors import InputError

# Names of accuracies in a line of text; of others, their keys.
_TITLES = {FDC.name: METHODS[FDC.name].title, "oracle": "task given"}
_CONFIDENCE = 0.95  # of all intervals
_QUANTILE = float(scipy.special.ndtri(0.5 + _CONFIDENCE / 2))


class Gain(NamedTuple):
    """A mean gain in percentage points with its interval."""

    mean: float
    std: float
    low: float
    high: float


def pack(numbers: ArrayLike) -> str:
    """Returns whole numbers below 2^16 as text: base64 of zlib of little-endian uint16."""
    array = np.asarray(numbers)
    if array.size and not 0 <= array.min() <= array.max() < 2**16:
        raise InputError(f"expected numbers from 0 to {2**16 - 1}, found {array.min()}")
    return base64.b64encode(zlib.compress(array.astype("<u2").tobytes(), 9)).decode()


def accuracy(true_label: ArrayLike, predicted_label: ArrayLike) -> float:
    """Returns the percentage of equal entries of two label vectors [n]."""
    return _percent(np.asarray(true_label) == np.asarray(predicted_label))


def _percent(right: Bool[np.ndarray, " n"]) -> float:
    return 100.0 * float(np.sum(right)) / len(right)


def decompose(
    scores: Scores, labels: Int[np.ndarray, " n"], tasks: Int[np.ndarray, " n"]
) -> dict[str, float]:
    """Returns three accuracies in percent, and four shares that sum to 100.

    The shares are of the samples by the task decision and the class decision; arguments as of
    `measure`.
    """
    routed, right = scores.task == tasks, scores.label == labels
    oracle_right = scores.label_in_task(tasks) == labels
    return {
        "num_samples": len(labels),
        "accuracy": _percent(right),
        "routing_accuracy": _percent(routed),
        "oracle_accuracy": _percent(oracle_right),
        "right_task_right_class": _percent(routed & right),
        "right_task_wrong_class": _percent(routed & ~right),
        "wrong_task_oracle_right": _percent(~routed & oracle_right),
        "wrong_task_oracle_wrong": _percent(~routed & ~oracle_right),
    }


def task_confusion(
    true_task: ArrayLike, predicted_task: ArrayLike, num_tasks: int
) -> Int[np.ndarray, "t t"]:
    """Counts samples by true task (row) and chosen task (column)."""
    pairs = np.asarray(true_task) * num_tasks + np.asarray(predicted_task)
    counts = np.bincount(pairs, minlength=num_tasks**2)
    return counts.reshape(num_tasks, num_tasks)


def task_accuracies(
    true_task: Int[np.ndarray, " n"], right: Bool[np.ndarray, " n"]
) -> list[float | None]:
    """Returns the share of right samples of each true task; None for a task without samples.

    The mean of these numbers weights tasks equally and differs from `accuracy` when task sizes do.
    """
    totals, hits = np.bincount(true_task), np.bincount(true_task, weights=right)
    return [100.0 * hit / total if total else None for hit, total in zip(hits, totals, strict=True)]


def calibration_error(probability: Float[np.ndarray, " n"], right: Bool[np.ndarray, " n"]) -> float:
    """Returns the expected calibration error in points: what probability and accuracy differ by.

    That is the mean over samples of the difference of the two means in the sample's bin, of 15 of
    equal width (Guo et al., "On Calibration of Modern Neural Networks", 2017).
    """
    bins = np.minimum((15 * probability).astype(int), 14)
    return 100.0 * float(np.abs(np.bincount(bins, probability - right)).sum()) / len(right)


def chance_calibration_error(probability: Float[np.ndarray, " n"]) -> float:
    """Returns the mean `calibration_error` of as many samples that are right as often as said."""
    draws = np.random.default_rng(0).random((100, len(probability))) < probability
    return float(np.mean([calibration_error(probability, right) for right in draws]))


# Intervals ---------------------------------------------------------------------------------------


def mean_and_std(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Mean and sample standard deviation over seeds; the latter is NaN for one seed."""
    array = np.asarray(values, np.float64)
    std = float(np.std(array, ddof=1)) if array.size > 1 else math.nan
    return float(np.mean(array)), std


def student(values: ArrayLike, low: float = -math.inf, high: float = math.inf) -> Gain:
    """Mean over seeds, sample std and Student t interval, cut to a range.

    The interval is NaN for one seed, and if no seed differs: the seeds say nothing of chance then.
    """
    array = np.asarray(values, np.float64)
    mean, std = mean_and_std(array)
    if not std > 0:
        return Gain(mean, std, math.nan, math.nan)
    quantile = float(scipy.special.stdtrit(array.size - 1, 0.5 + _CONFIDENCE / 2))
    reach = quantile * std / array.size**0.5
    return Gain(mean, std, max(mean - reach, low), min(mean + reach, high))


def welch(values: Sequence[float], mean: float, std: float, count: float) -> Gain:
    """Mean over seeds minus another mean, with Welch's t interval.

    NaN where a side has one seed or no deviation is known.

    Args:
        values: one number per seed.
        mean: of the other side.
        std: its sample standard deviation over `count` seeds.
        count: its number of seeds.
    """
    own, own_std = mean_and_std(values)
    counts = np.array([len(values), count])
    variances = np.array([own_std, std]) ** 2 / counts
    if not (counts > 1).all() or not variances.sum() > 0:
        return Gain(own - mean, math.nan, math.nan, math.nan)
    freedom = variances.sum() ** 2 / (variances**2 / (counts - 1)).sum()
    error = float(np.sqrt(variances.sum()))
    reach = float(scipy.special.stdtrit(freedom, 0.5 + _CONFIDENCE / 2)) * error
    return Gain(own - mean, error, own - mean - reach, own - mean + reach)


def share_of(right: Bool[np.ndarray, " n"]) -> Gain:
    """Share of right samples with its standard error and interval, which no share makes a point.

    Wilson, "Probable inference, the law of succession, and statistical inference" (1927).
    """
    share, extra = float(np.mean(right)), _QUANTILE**2 / len(right)
    middle = (share + extra / 2) / (1 + extra)
    reach = float(np.sqrt(extra * (share * (1 - share) + extra / 4))) / (1 + extra)
    std = float(np.sqrt(share * (1 - share) / len(right)))
    return Gain(100 * share, 100 * std, 100 * (middle - reach), 100 * (middle + reach))


def sample_gain(true_label: ArrayLike, before: ArrayLike, after: ArrayLike) -> Gain:
    """Accuracy gain over test samples, paired by sample, with its standard error and interval.

    Half a sample more is put right and half a one is spoiled, so that the interval is no point
    where none is: Agresti and Min, "Simple improved confidence intervals for comparing matched
    proportions" (2005).
    """
    label, first, second = map(np.asarray, (true_label, before, after))
    change = (second == label).astype(float) - (first == label)
    moved, size = float(np.sum(change**2)) + 1, len(change) + 2
    std = float(np.sqrt(moved - change.sum() ** 2 / size)) / size
    middle, reach = float(change.sum()) / size, _QUANTILE * std
    gain = float(change.mean())
    return Gain(100 * gain, 100 * std, 100 * (middle - reach), 100 * (middle + reach))


# Several calibrators -----------------------------------------------------------------------------


def measure(
    scores: Mapping[str, Scores],
    labels: Int[np.ndarray, " n"],
    tasks: Int[np.ndarray, " n"],
    probabilities: Float[np.ndarray, "n classes"] | None = None,
) -> dict[str, Any]:
    """Returns what calibrators got right, in percent, by quantity and by their names.

    `accuracy` and `task_accuracy` have an entry `oracle`, too, of the heads given the true task.

    Args:
        scores: by name, `raw` among them.
        labels: true labels.
        tasks: true tasks, counted from 0.
        probabilities: of all classes, tasks in order; with them `calibration_error` says how far
            those of the predicted labels are from the share of right ones, and
            `chance_calibration_error` how far that would be by chance alone.
    """
    parts = {name: decompose(of, labels, tasks) for name, of in scores.items()}
    predicted = {name: of.label for name, of in scores.items()}
    predicted["oracle"] = scores["raw"].label_in_task(tasks)
    right = {name: label == labels for name, label in predicted.items()}
    measures: dict[str, Any] = {
        "accuracy": {name: _percent(of) for name, of in right.items()},
        "routing_accuracy": {name: part["routing_accuracy"] for name, part in parts.items()},
        "decomposition": parts,
        "task_accuracy": {name: task_accuracies(tasks, of) for name, of in right.items()},
    }
    if probabilities is not None:
        sure = {name: of_labels(probabilities, of.classes, of.label) for name, of in scores.items()}
        measures["calibration_error"] = {
            name: calibration_error(of, right[name]) for name, of in sure.items()
        }
        measures["chance_calibration_error"] = {
            name: chance_calibration_error(of) for name, of in sure.items()
        }
    return measures


def predictions(
    scores: Mapping[str, Scores], labels: Int[np.ndarray, " n"], tasks: Int[np.ndarray, " n"]
) -> dict[str, Int[np.ndarray, " n"]]:
    """Returns the columns of `predictions.npz`; arguments as of `measure`."""
    columns = {"label": labels, "task": tasks, "oracle_label": scores["raw"].label_in_task(tasks)}
    for name, of in scores.items():
        columns |= {f"{name}_label": of.label, f"{name}_task": of.task}
        if METHODS[name].has_components:  # TSF changes the logits within a task, too.
            columns[f"{name}_oracle_label"] = of.label_in_task(tasks)
    return {name: column.astype(np.int32) for name, column in columns.items()}


def describe(record: dict[str, Any], num_tasks: int) -> str:
    """Returns one line about the accuracies after a task."""
    accuracies = (
        f"{_TITLES.get(name, name)} {value:.2f}" for name, value in record["accuracy"].items()
    )
    routing = record["routing_accuracy"]
    to = f" -> {routing[FDC.name]:.2f}" if FDC.name in routing else ""
    return (
        f"after task {record['task'] + 1}/{num_tasks}: {'  '.join(accuracies)}  "
        f"routing {routing['raw']:.2f}{to} %"
    )
