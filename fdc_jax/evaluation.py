"""Accuracies of predictions, routing errors by task, and intervals of accuracies and gains.

Predictions are integer vectors [n] on the host. Accuracies and shares are in percent, gains in
percentage points. A prediction is two decisions (paper, Eq. raw): the task, and the class within
the task's head. `oracle` is the class within the true task's head ("Given Task ID" in the paper).
"""

import base64
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import scipy.special
from jaxtyping import Bool, Float, Int
from msgspec import Meta
from numpy.typing import ArrayLike

from fdc_jax.calibration import FDC, METHODS, Scores
from fdc_jax.errors import CONTROL, InputError

TITLES = {FDC.name: METHODS[FDC.name].title, "oracle": "task given"}  # in lines of text
_CONFIDENCE = 0.95  # of all intervals
_QUANTILE = float(scipy.special.ndtri(0.5 + _CONFIDENCE / 2))

Count = Annotated[int, Meta(ge=0, le=2**53)]
Percent = Annotated[float, Meta(ge=0, le=100.001)]  # means of 100 may exceed it by rounding
# Text that a terminal, a table or a page may show.
Name = Annotated[str, Meta(pattern=f"^[^{CONTROL}]*$", max_length=1000)]
Accuracies = dict[Name, Percent]  # by calibrator


class Decomposition(msgspec.Struct, frozen=True, kw_only=True):
    """The decisions of a calibrator on test images, in percent, by task and class."""

    num_samples: Count
    accuracy: Percent
    routing_accuracy: Percent
    oracle_accuracy: Percent  # with the task given
    right_task_right_class: Percent
    right_task_wrong_class: Percent
    wrong_task_oracle_right: Percent
    wrong_task_oracle_wrong: Percent


class Measures(msgspec.Struct, kw_only=True):
    """Accuracies and calibration errors in percent, by calibrator."""

    accuracy: Accuracies  # also of `oracle`: raw logits with the task given
    routing_accuracy: Accuracies = {}
    decomposition: dict[Name, Decomposition] = {}
    task_accuracy: dict[Name, list[Percent | None]] = {}  # None for a task without images
    calibration_error: Accuracies = {}
    chance_calibration_error: Accuracies = {}


class Gain(NamedTuple):
    """A mean in percent or points, its deviation or standard error, and its 95 % interval."""

    mean: float
    std: float
    low: float
    high: float


def pack(numbers: ArrayLike) -> str:
    """Encodes whole numbers below 2^16 as text: base64 of zlib of little-endian uint16."""
    array = np.asarray(numbers)
    if array.size and not 0 <= array.min() <= array.max() < 2**16:
        raise InputError(f"expected numbers from 0 to {2**16 - 1}, found {array.min()}")
    return base64.b64encode(zlib.compress(array.astype("<u2").tobytes(), 9)).decode()


def accuracy(true_label: ArrayLike, predicted_label: ArrayLike) -> float:
    """Returns the percentage of equal entries of two label vectors [n]."""
    return _percent(np.asarray(true_label) == np.asarray(predicted_label))


def _percent(right: Bool[np.ndarray, " n"]) -> float:
    return 100.0 * float(np.sum(right)) / len(right)


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
    """Returns the accuracy on each true task, None for a task without samples."""
    totals = np.bincount(true_task).tolist()
    hits = np.bincount(true_task, weights=right).tolist()
    return [100.0 * hit / total if total else None for hit, total in zip(hits, totals, strict=True)]


def calibration_error(probability: Float[np.ndarray, " n"], right: Bool[np.ndarray, " n"]) -> float:
    """Returns the expected calibration error in points, with 15 bins of equal width.

    Guo et al., "On Calibration of Modern Neural Networks" (2017).
    """
    bins = np.minimum((15 * probability).astype(int), 14)
    return 100.0 * float(np.abs(np.bincount(bins, probability - right)).sum()) / len(right)


def chance_calibration_error(probability: Float[np.ndarray, " n"]) -> float:
    """Returns the mean error of as many samples whose probabilities are true, in 100 draws."""
    draws = np.random.default_rng(0).random((100, len(probability))) < probability
    return float(np.mean([calibration_error(probability, right) for right in draws]))


# Intervals ---------------------------------------------------------------------------------------


def mean_and_std(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Returns mean and sample standard deviation over seeds, NaN for one seed."""
    array = np.asarray(values, np.float64)
    std = float(np.std(array, ddof=1)) if array.size > 1 else math.nan
    return float(np.mean(array)), std


def student(values: ArrayLike, low: float = -math.inf, high: float = math.inf) -> Gain:
    """Returns the mean over seeds with Student's t interval, cut to the range of the quantity.

    The interval is NaN for one seed, and if all seeds have the same value.
    """
    array = np.asarray(values, np.float64)
    mean, std = mean_and_std(array)
    if not std > 0:
        return Gain(mean, std, math.nan, math.nan)
    quantile = float(scipy.special.stdtrit(array.size - 1, 0.5 + _CONFIDENCE / 2))
    reach = quantile * std / array.size**0.5
    return Gain(mean, std, max(mean - reach, low), min(mean + reach, high))


def share_of(right: Bool[np.ndarray, " n"]) -> Gain:
    """Returns the share of right samples with its standard error and Wilson's interval.

    Wilson, "Probable inference, the law of succession, and statistical inference" (1927).
    """
    share = float(np.mean(right))
    extra = _QUANTILE**2 / len(right)
    variance = share * (1 - share)
    middle = (share + extra / 2) / (1 + extra)
    reach = float(np.sqrt(extra * (variance + extra / 4))) / (1 + extra)
    std = float(np.sqrt(variance / len(right)))
    return Gain(100 * share, 100 * std, 100 * (middle - reach), 100 * (middle + reach))


def sample_gain(true_label: ArrayLike, before: ArrayLike, after: ArrayLike) -> Gain:
    """Returns the gain in accuracy, paired by sample, with its standard error and interval.

    The interval counts half a sample more as repaired and half a sample more as spoiled (Agresti
    and Min, "Simple improved confidence intervals for comparing matched proportions", 2005).
    """
    label, first, second = map(np.asarray, (true_label, before, after))
    change = (second == label).astype(float) - (first == label)
    total = float(change.sum())
    moved = float(np.sum(change**2)) + 1
    size = len(change) + 2
    std = float(np.sqrt(moved - total**2 / size)) / size
    middle = total / size
    reach = _QUANTILE * std
    gain = float(change.mean())
    return Gain(100 * gain, 100 * std, 100 * (middle - reach), 100 * (middle + reach))


# Several calibrators -----------------------------------------------------------------------------


def measures(
    scores: Mapping[str, Scores],
    labels: Int[np.ndarray, " n"],
    tasks: Int[np.ndarray, " n"],
    probabilities: Float[np.ndarray, "n classes"] | None = None,
) -> Measures:
    """Measures accuracies and errors of calibrators.

    Args:
        scores: of calibrators by name.
        labels: true labels.
        tasks: true tasks, counted from 0.
        probabilities: of all classes, tasks in order, for the calibration errors.
    """
    measures = Measures(accuracy={})
    for name, of in scores.items():
        right = of.label == labels
        routed = of.task == tasks
        given = of.label_in_task(tasks) == labels
        part = Decomposition(
            num_samples=len(labels),
            accuracy=_percent(right),
            routing_accuracy=_percent(routed),
            oracle_accuracy=_percent(given),
            right_task_right_class=_percent(routed & right),
            right_task_wrong_class=_percent(routed & ~right),
            wrong_task_oracle_right=_percent(~routed & given),
            wrong_task_oracle_wrong=_percent(~routed & ~given),
        )
        measures.decomposition[name] = part
        measures.accuracy[name] = part.accuracy
        measures.routing_accuracy[name] = part.routing_accuracy
        measures.task_accuracy[name] = task_accuracies(tasks, right)
        if probabilities is not None:
            # Of the class that this calibrator predicts.
            stated = probabilities[np.concatenate(of.classes) == of.label[:, None]]
            measures.calibration_error[name] = calibration_error(stated, right)
            measures.chance_calibration_error[name] = chance_calibration_error(stated)
    if "raw" in scores:
        given = scores["raw"].label_in_task(tasks) == labels
        measures.accuracy["oracle"] = _percent(given)
        measures.task_accuracy["oracle"] = task_accuracies(tasks, given)
    return measures


def predictions(
    scores: Mapping[str, Scores], labels: Int[np.ndarray, " n"], tasks: Int[np.ndarray, " n"]
) -> dict[str, Int[np.ndarray, " n"]]:
    """Returns the columns of `predictions.npz`; the arguments are those of `measure`."""
    columns = {"label": labels, "task": tasks}
    if "raw" in scores:
        columns["oracle_label"] = scores["raw"].label_in_task(tasks)
    for name, of in scores.items():
        columns |= {f"{name}_label": of.label, f"{name}_task": of.task}
        if METHODS[name].has_components:  # TSF changes the logits within a task, too.
            columns[f"{name}_oracle_label"] = of.label_in_task(tasks)
    return {name: column.astype(np.int32) for name, column in columns.items()}


def accuracy_line(measures: Measures, task: int, num_tasks: int) -> str:
    """Returns one line about the accuracies after a task."""
    routing = measures.routing_accuracy
    accuracies = "  ".join(
        f"{TITLES.get(name, name)} {value:.2f}" for name, value in measures.accuracy.items()
    )
    calibrated = f" -> {routing[FDC.name]:.2f}" if FDC.name in routing else ""
    done = f"after task {task + 1}/{num_tasks}"
    return f"{done}: {accuracies}  routing {routing['raw']:.2f}{calibrated} %"
