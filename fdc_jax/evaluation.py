"""What a prediction got right, where it went wrong, and whether a gain is real.

Predictions are integer vectors of one length [n] on the host; anything else raises `InputError`.
Accuracies and shares are in percent, gains in percentage points.

A prediction is read as two decisions (paper, Eq. raw): the task, then the class within the task's
head. `oracle_label` is the class that the same scores give when the true task is known ("Given Task
ID" in the paper).
"""

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy.special
from jaxtyping import Bool, Float, Int
from numpy.typing import ArrayLike

from fdc_jax.calibration import Scores
from fdc_jax.calibration.confidence import of_labels
from fdc_jax.errors import InputError

# Names of accuracies in a line of text, where they are not what they go by.
TITLES = {"fdc": "FDC", "oracle": "task given"}
# Of all intervals, and how many samples a bootstrap draws.
_CONFIDENCE, _RESAMPLES = 0.95, 9999


class Decomposition(NamedTuple):
    """One prediction in percent: three accuracies and four shares that sum to 100."""

    num_samples: int
    accuracy: float
    routing_accuracy: float
    oracle_accuracy: float
    right_task_right_class: float
    right_task_wrong_class: float
    wrong_task_oracle_right: float
    wrong_task_oracle_wrong: float


class Flips(NamedTuple):
    """Numbers of samples by what a second prediction did to the first."""

    wrong_to_right: int
    right_to_wrong: int
    wrong_to_other_wrong: int
    unchanged: int


class Gain(NamedTuple):
    """A mean gain in percentage points with its interval."""

    mean: float
    std: float
    low: float
    high: float
    confidence: float = _CONFIDENCE


def _columns(**arrays: ArrayLike) -> list[Int[np.ndarray, " n"]]:
    """Integer vectors of one length, at least one long."""
    columns = {name: np.asarray(array) for name, array in arrays.items()}
    for name, column in columns.items():
        if column.ndim != 1 or not np.issubdtype(column.dtype, np.integer):
            raise InputError(
                f"{name}: expected a vector of integers, found {column.dtype} "
                f"of shape {column.shape}"
            )
    sizes = {len(column) for column in columns.values()}
    if len(sizes) > 1 or not sizes.pop():
        found = ", ".join(f"{name} {len(column)}" for name, column in columns.items())
        raise InputError(f"expected columns of one length, at least 1; found {found}")
    return list(columns.values())


def accuracy(true_label: ArrayLike, predicted_label: ArrayLike) -> float:
    """Returns the percentage of equal entries of two label vectors [n]."""
    true, predicted = _columns(true_label=true_label, predicted_label=predicted_label)
    return 100.0 * float(np.sum(true == predicted)) / len(true)


def decompose(
    true_task: ArrayLike,
    true_label: ArrayLike,
    predicted_task: ArrayLike,
    predicted_label: ArrayLike,
    oracle_label: ArrayLike,
) -> Decomposition:
    """Splits all samples into four cells by the task decision and the class decision.

    Raises:
        InputError: a row contradicts itself: the right task was chosen and yet the prediction is
            not the oracle's, or the label is right in the wrong task.
    """
    task, label, chosen, predicted, oracle = _columns(
        true_task=true_task,
        true_label=true_label,
        predicted_task=predicted_task,
        predicted_label=predicted_label,
        oracle_label=oracle_label,
    )
    routed = task == chosen
    right = label == predicted
    oracle_right = label == oracle
    for what, bad in {
        "the task is right but the label is not the oracle's": routed & (predicted != oracle),
        "the label is right but the task is not": right & ~routed,
    }.items():
        if bad.any():
            raise InputError(f"row {bad.argmax()} of the predictions: {what} ({bad.sum()} in all)")

    def percent(holds: Bool[np.ndarray, " n"]) -> float:
        return 100.0 * float(np.sum(holds)) / len(label)

    return Decomposition(
        num_samples=len(label),
        accuracy=percent(right),
        routing_accuracy=percent(routed),
        oracle_accuracy=percent(oracle_right),
        right_task_right_class=percent(routed & right),
        right_task_wrong_class=percent(routed & ~right),
        wrong_task_oracle_right=percent(~routed & oracle_right),
        wrong_task_oracle_wrong=percent(~routed & ~oracle_right),
    )


def task_confusion(
    true_task: ArrayLike, predicted_task: ArrayLike, num_tasks: int
) -> Int[np.ndarray, "t t"]:
    """Counts samples by true task (row) and chosen task (column).

    Raises:
        InputError: a task index is outside 0 .. num_tasks - 1.
    """
    task, chosen = _columns(true_task=true_task, predicted_task=predicted_task)
    for name, column in (("true_task", task), ("predicted_task", chosen)):
        if column.min() < 0 or column.max() >= num_tasks:
            raise InputError(
                f"{name}: expected 0 .. {num_tasks - 1}, found {column.min()} .. {column.max()}"
            )
    matrix = np.zeros((num_tasks, num_tasks), np.int64)
    np.add.at(matrix, (task, chosen), 1)
    return matrix


def task_accuracies(
    true_task: ArrayLike, true_label: ArrayLike, predicted_label: ArrayLike, num_tasks: int
) -> Float[np.ndarray, " t"]:
    """Accuracy over the samples of each true task; NaN for a task without samples.

    The mean of these numbers weights tasks equally and differs from `accuracy` when task sizes do.
    """
    task, label, predicted = _columns(
        true_task=true_task, true_label=true_label, predicted_label=predicted_label
    )
    totals = np.bincount(task, minlength=num_tasks)
    right = np.bincount(task, weights=label == predicted, minlength=num_tasks)
    return np.where(totals > 0, 100.0 * right / np.maximum(totals, 1), np.nan)


def flips(true_label: ArrayLike, before: ArrayLike, after: ArrayLike) -> Flips:
    """Counts what `after` repaired, broke and merely changed, against `before`."""
    label, first, second = _columns(true_label=true_label, before=before, after=after)
    was, now = label == first, label == second
    return Flips(
        wrong_to_right=int(np.sum(~was & now)),
        right_to_wrong=int(np.sum(was & ~now)),
        wrong_to_other_wrong=int(np.sum(~was & ~now & (first != second))),
        unchanged=int(np.sum(first == second)),
    )


def average_incremental_accuracy(accuracies: Sequence[float]) -> float:
    """Mean over tasks k of the accuracy on all classes seen after task k (paper, AIA)."""
    return float(np.mean(np.asarray(accuracies, np.float64)))


def mean_and_std(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Mean and sample standard deviation over seeds; the latter is NaN for one seed."""
    array = np.asarray(values, np.float64)
    std = float(np.std(array, ddof=1)) if array.size > 1 else float("nan")
    return float(np.mean(array)), std


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


def paired_gain(before: Sequence[float], after: Sequence[float] | np.ndarray) -> Gain:
    """Gain within each seed, its mean, sample std and Student t interval; NaN for one seed.

    Args:
        before: one accuracy per seed.
        after: accuracies of the same seeds in the same order.
    """
    gains = np.asarray(after, np.float64) - np.asarray(before, np.float64)
    mean, std = mean_and_std(gains)
    if gains.size < 2:  # SciPy warns of no degrees of freedom
        return Gain(mean, std, float("nan"), float("nan"))
    reach = (
        float(scipy.special.stdtrit(gains.size - 1, 0.5 + _CONFIDENCE / 2)) * std / gains.size**0.5
    )
    return Gain(mean, std, mean - reach, mean + reach)


def bootstrap_gain(
    true_label: ArrayLike,
    before: ArrayLike,
    after: ArrayLike,
) -> Gain:
    """Percentile bootstrap interval of the accuracy gain over test samples, paired by sample.

    A sample contributes -1, 0 or +1, so the counts of the three in a resample of the n samples
    are exactly multinomial; drawing those replaces drawing n indices per resample. The gain's `std`
    is the bootstrap's standard error.
    """
    change = flips(true_label, before, after)
    size = len(np.asarray(true_label))
    fixed, broken = change.wrong_to_right, change.right_to_wrong
    gain = 100.0 * (fixed - broken) / size
    probabilities = np.array([fixed, broken, size - fixed - broken]) / size
    draws = np.random.default_rng(0).multinomial(size, probabilities, size=_RESAMPLES)
    gains = 100.0 * (draws[:, 0] - draws[:, 1]) / size
    low, high = np.quantile(gains, [0.5 - _CONFIDENCE / 2, 0.5 + _CONFIDENCE / 2])
    return Gain(gain, float(np.std(gains, ddof=1)), float(low), float(high))


# Several calibrators ------------------------------------------------------------------------------


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
    count = int(tasks.max()) + 1
    found = {
        name: decompose(tasks, labels, each.task, each.label, each.label_in_task(tasks))
        for name, each in scores.items()
    }
    predicted = {name: each.label for name, each in scores.items()}
    predicted["oracle"] = scores["raw"].label_in_task(tasks)
    sure, chance = {}, {}
    if probabilities is not None:
        for name, each in scores.items():
            said = of_labels(probabilities, each.classes, each.label)
            sure[name] = calibration_error(said, each.label == labels)
            chance[name] = chance_calibration_error(said)
    return {
        "accuracy": {name: accuracy(labels, each) for name, each in predicted.items()},
        "routing_accuracy": {name: each.routing_accuracy for name, each in found.items()},
        "decomposition": {name: each._asdict() for name, each in found.items()},
        "task_accuracy": {
            name: [
                None if np.isnan(value) else float(value)
                for value in task_accuracies(tasks, labels, each, count)
            ]
            for name, each in predicted.items()
        },
        **({"calibration_error": sure, "chance_calibration_error": chance} if sure else {}),
    }


def predictions(
    scores: Mapping[str, Scores], labels: Int[np.ndarray, " n"], tasks: Int[np.ndarray, " n"]
) -> dict[str, Int[np.ndarray, " n"]]:
    """Returns the columns of `predictions.npz`; arguments as of `measure`."""
    columns = {"label": labels, "task": tasks, "oracle_label": scores["raw"].label_in_task(tasks)}
    for name, each in scores.items():
        columns |= {f"{name}_label": each.label, f"{name}_task": each.task}
    if "fdc" in scores:
        columns["fdc_oracle_label"] = scores["fdc"].label_in_task(tasks)
    return {name: column.astype(np.int32) for name, column in columns.items()}


def describe(record: dict[str, Any], num_tasks: int) -> str:
    """Returns one line about the accuracies after a task."""
    accuracies = (
        f"{TITLES.get(name, name)} {value:.2f}" for name, value in record["accuracy"].items()
    )
    routing = record["routing_accuracy"]
    to = f" -> {routing['fdc']:.2f}" if "fdc" in routing else ""
    return (
        f"after task {record['task'] + 1}/{num_tasks}: {'  '.join(accuracies)}  "
        f"routing {routing['raw']:.2f}{to} %"
    )


def summarise(per_seed: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns mean and sample standard deviation over seeds, and gains paired within each seed.

    Args:
        per_seed: `results.json` of every seed of one configuration.
    """
    first = per_seed[0]

    def column(*names: str) -> list[Any]:
        return [functools.reduce(operator.getitem, names, run) for run in per_seed]

    def over_seeds(values: list[float]) -> dict[str, float]:
        return dict(zip(("mean", "std"), mean_and_std(values), strict=True))

    def of(section: str) -> dict[str, Any]:
        found = {name: column(section, name) for name in first[section]}
        return {name: over_seeds(values) for name, values in found.items() if None not in values}

    raw = column("accuracy", "raw")
    sections = ("accuracy", "routing_accuracy", "average_incremental_accuracy", "components")
    gains = {
        name: paired_gain(raw, column("accuracy", name))._asdict()
        for name in first["accuracy"]
        if name not in ("raw", "oracle")
    }
    return {
        **{name: first[name] for name in ("benchmark", "split", "learner", "class_order_seed")},
        "seeds": column("seed"),
        **{section: of(section) for section in sections},
        "selected": {"components": first["selected"]["components"]},
        "gain": gains.get("fdc"),
        "gains": gains,
        "component_gains": {
            name: over_seeds(list(np.subtract(column("components", name), raw)))
            for name in first["components"]
            if name != "raw"
        },
        "device": first["device"],
        "config": first["config"] | {"seed": column("seed")},
        "versions": first["versions"],
    }
