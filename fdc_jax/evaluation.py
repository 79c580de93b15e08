"""What a prediction got right, where it went wrong, whether a gain is real; and `results.json`.

Predictions are integer vectors of one length [n] on the host; anything else raises `InputError`.
Accuracies and shares are in percent, gains in percentage points.

A prediction is read as two decisions (paper, Eq. raw): the task, then the class within the task's
head. `oracle_label` is the class that the same scores give when the true task is known ("Given Task
ID" in the paper).
"""

from __future__ import annotations

import functools
import importlib.metadata
import operator
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy.typing import ArrayLike

import fdc_jax
from fdc_jax.calibration import Terms
from fdc_jax.calibration.components import fuse_all
from fdc_jax.calibration.whitened import WhitenedSettings
from fdc_jax.errors import InputError
from fdc_jax.machine import devices

if TYPE_CHECKING:  # Reports need no encoder.
    from fdc_jax.run.setup import Experiment

# Entries of results that stand beside the paper's numbers: the affinity in the whitened metric, or
# the paper's without tanh.
BEYOND = ("whitened", "linear", "transported")
# Of all intervals, and how many samples a bootstrap draws.
_CONFIDENCE, _RESAMPLES = 0.95, 9999
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "tensorflow-datasets", "numpy")


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

    @property
    def errors_fixed_by_task(self) -> float:
        """Share of the errors that knowing the task would repair; NaN without errors."""
        errors = 100.0 - self.right_task_right_class
        return 100.0 * self.wrong_task_oracle_right / errors if errors > 0 else float("nan")


class ConfusedPair(NamedTuple):
    """Samples of `true_task` that went to the head of `predicted_task`."""

    true_task: int
    predicted_task: int
    count: int
    share: float  # percent of the samples of `true_task`


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


def most_confused(confusion: Int[np.ndarray, "t t"], limit: int = 5) -> list[ConfusedPair]:
    """The largest off-diagonal counts of a task confusion matrix, ties by task index."""
    totals = confusion.sum(axis=1)
    wrong = confusion.copy()
    np.fill_diagonal(wrong, 0)
    order = np.argsort(-wrong, axis=None, kind="stable")[:limit]
    pairs = (divmod(int(place), len(wrong)) for place in order if wrong.flat[place])
    return [
        ConfusedPair(*pair, int(wrong[pair]), 100.0 * int(wrong[pair]) / int(totals[pair[0]]))
        for pair in pairs
    ]


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


def paired_gain(before: Sequence[float], after: Sequence[float] | np.ndarray) -> Gain:
    """Gain within each seed, its mean, sample std and Student t interval; NaN for one seed.

    Args:
        before: one accuracy per seed.
        after: accuracies of the same seeds in the same order.
    """
    from scipy import stats  # takes a second

    gains = np.asarray(after, np.float64) - np.asarray(before, np.float64)
    mean, std = mean_and_std(gains)
    if gains.size < 2:  # SciPy warns of no degrees of freedom
        return Gain(mean, std, float("nan"), float("nan"))
    reach = float(stats.t.ppf(0.5 + _CONFIDENCE / 2, gains.size - 1)) * std / gains.size**0.5
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


def mcnemar(true_label: ArrayLike, before: ArrayLike, after: ArrayLike) -> float:
    """Exact two-sided McNemar p-value of two predictions on the same samples.

    Samples on which only one of the two is right favour either equally under the null hypothesis.
    """
    from scipy import stats  # takes a second

    change = flips(true_label, before, after)
    discordant = change.wrong_to_right + change.right_to_wrong
    if not discordant:
        return 1.0
    return float(stats.binomtest(change.wrong_to_right, discordant, 0.5).pvalue)


# A run --------------------------------------------------------------------------------------------


def measure(
    terms: Terms, labels: Int[np.ndarray, " n"], tasks: Int[np.ndarray, " n"]
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns accuracies in percent by their names in `results.json`, and `predictions.npz`.

    All are by the paper's affinity; another one of the calibrator has an entry of `BEYOND`.

    Args:
        terms: per-sample evidence, as the calibrator returns it.
        labels: true class-order positions.
        tasks: true tasks.
    """
    scores = fuse_all(terms)
    raw, fdc = scores["raw"], scores["full"]
    oracle = raw.label_in_task(tasks)
    decompositions = {
        name: decompose(tasks, labels, each.task, each.label, each.label_in_task(tasks))
        for name, each in (("raw", raw), ("fdc", fdc))
    }
    accuracies = {
        "accuracy": {
            "raw": decompositions["raw"].accuracy,
            "fdc": decompositions["fdc"].accuracy,
            "oracle": accuracy(labels, oracle),
        },
        "routing_accuracy": {name: d.routing_accuracy for name, d in decompositions.items()},
        "components": {name: accuracy(labels, each.label) for name, each in scores.items()},
        "decomposition": {name: d._asdict() for name, d in decompositions.items()},
        "task_accuracy": {
            name: _by_task(tasks, labels, predicted)
            for name, predicted in (("raw", raw.label), ("fdc", fdc.label), ("oracle", oracle))
        },
    }
    predictions = dict(
        label=labels,
        raw_label=raw.label,
        fdc_label=fdc.label,
        oracle_label=oracle,
        fdc_oracle_label=fdc.label_in_task(tasks),
        task=tasks,
        raw_task=raw.task,
        fdc_task=fdc.task,
    )
    for entry, beyond in terms.beyond().items():
        found = beyond["full"]
        accuracies[entry] = {
            "accuracy": accuracy(labels, found.label),
            "oracle": accuracy(labels, found.label_in_task(tasks)),
            "routing_accuracy": accuracy(tasks, found.task),
            "components": {name: accuracy(labels, each.label) for name, each in beyond.items()},
        }
        if isinstance(terms.settings, WhitenedSettings) and entry == terms.settings.affinity_entry:
            accuracies[entry]["affinity"] = terms.settings.affinity._asdict()
        predictions |= {f"{entry}_label": found.label, f"{entry}_task": found.task}
    return accuracies, {name: column.astype(np.int32) for name, column in predictions.items()}


def _by_task(
    tasks: Int[np.ndarray, " n"], labels: Int[np.ndarray, " n"], predicted: Int[np.ndarray, " n"]
) -> list[float | None]:
    """Returns the accuracy on each task so far, None for one without test images."""
    found = task_accuracies(tasks, labels, predicted, int(tasks.max()) + 1)
    return [None if np.isnan(value) else float(value) for value in found]


def describe(record: dict[str, Any], num_tasks: int) -> str:
    """Returns one line about the accuracies after a task."""
    accuracy, routing = record["accuracy"], record["routing_accuracy"]
    return (
        f"after task {record['task'] + 1}/{num_tasks}: raw {accuracy['raw']:.2f}  "
        f"FDC {accuracy['fdc']:.2f}  oracle {accuracy['oracle']:.2f}  "
        f"routing {routing['raw']:.2f} -> {routing['fdc']:.2f} %"
    )


def summarise(per_seed: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns mean and sample standard deviation over seeds, and gains paired within each seed."""
    first = per_seed[0]

    def column(*names: str) -> list[Any]:
        return [functools.reduce(operator.getitem, names, run) for run in per_seed]

    def over_seeds(values: list[float]) -> dict[str, float]:
        return dict(zip(("mean", "std"), mean_and_std(values), strict=True))

    def of(section: str) -> dict[str, Any]:
        found = {name: column(section, name) for name in first[section]}
        return {name: over_seeds(values) for name, values in found.items() if None not in values}

    raw, fdc = column("accuracy", "raw"), column("accuracy", "fdc")
    sections = ("accuracy", "routing_accuracy", "average_incremental_accuracy", "components")
    return {
        **{name: first[name] for name in ("benchmark", "split", "learner", "class_order_seed")},
        "seeds": column("seed"),
        **{section: of(section) for section in sections},
        "selected": {"components": first["selected"]["components"]},
        **{
            entry: {
                **{name: first[entry][name] for name in ("affinity",) if name in first[entry]},
                "accuracy": over_seeds(column(entry, "accuracy")),
                "gain_over_fdc": paired_gain(fdc, column(entry, "accuracy"))._asdict(),
            }
            for entry in BEYOND
            if entry in first
        },
        "gain": paired_gain(raw, fdc)._asdict(),
        "component_gains": {
            name: over_seeds(list(np.subtract(column("components", name), raw)))
            for name in first["components"]
            if name != "raw"
        },
        "device": first["device"],
        "config": first["config"] | {"seed": column("seed")},
        "versions": first["versions"],
    }


# results.json ------------------------------------------------------------------------------------


def collect(
    e: Experiment, seed: int, calibrator: Any, records: list[dict[str, Any]]
) -> dict[str, Any]:
    """Returns the content of `results.json` from the records of all tasks."""
    config, last = e.config, records[-1]
    points = ("task", "accuracy", "routing_accuracy", "components", "task_accuracy", *BEYOND)
    curve = [{name: record[name] for name in points if name in record} for record in records]
    complete = len(records) == e.num_tasks
    selected = e.selected
    if selected not in last["components"]:  # Without the pretrained view, the other is all.
        selected = selected.removesuffix("_adapted_view")

    def average(accuracies: list[float]) -> float | None:
        # Without the accuracy after every task there is no average over them.
        return average_incremental_accuracy(accuracies) if complete else None

    return {
        "benchmark": config.benchmark,
        "split": e.tasks.test.partition,
        "learner": config.learner.name,
        "seed": seed,
        "class_order_seed": config.class_order_seed,
        "num_tasks": e.num_tasks,
        "num_classes": len(e.tasks.order),
        "class_names": e.tasks.class_names,
        "num_train_images": sum(len(indices) for indices in e.tasks.train_indices),
        "num_test_images": len(e.tasks.test_indices),
        "accuracy": last["accuracy"],
        "routing_accuracy": last["routing_accuracy"],
        "average_incremental_accuracy": {
            name: average([point["accuracy"][name] for point in curve]) for name in ("raw", "fdc")
        },
        "components": last["components"],
        "selected": {"components": selected, "accuracy": last["components"].get(selected)},
        "decomposition": last["decomposition"],
        **{
            entry: {
                **last[entry],
                "average_incremental_accuracy": average([p[entry]["accuracy"] for p in curve]),
                "storage_bytes": calibrator.beyond_storage_bytes[entry],
            }
            for entry in BEYOND
            if entry in last
        },
        "curve": curve,
        "fdc_storage_bytes": calibrator.paper_storage_bytes,
        "peak_memory_bytes": _peak_memory([record.get("peak_memory") for record in records]),
        "timing": _timing([record["timing"] for record in records], complete),
        "encoder": {
            "variant": config.encoder.variant,
            "weights": e.pretrained.path.name,
            "sha256": e.pretrained.sha256,
            "input_range": config.data.input_range,
            "skipped": list(e.pretrained.skipped),
            "resized_positions": e.pretrained.resized_positions,
            "architecture": e.architecture,
        },
        "data": {"train_sha256": e.tasks.train.checksum, "test_sha256": e.tasks.test.checksum},
        "device": devices.describe(),
        "config": e.fields | {"seed": [seed]},
        "versions": versions(),
    }


def _peak_memory(per_task: list[dict[str, int | None] | None]) -> dict[str, int | None]:
    """Returns the device memory that training took, and what FDC and evaluation took beyond it.

    A peak never falls: the first task's, before anything was fitted, is that of training. None on
    a CPU, and where that task was trained by a process that did not live to record it.
    """
    first, last = per_task[0] or {}, per_task[-1] or {}
    training, total = first.get("training"), last.get("task")
    beyond = None if training is None or total is None else total - training
    return {"training": training, "fdc_and_evaluation": beyond}


def _timing(per_task: list[dict[str, float]], complete: bool) -> dict[str, Any] | None:
    """Returns sums over tasks, and images per second; None where tasks were not recorded."""
    if not complete:
        return None
    names = sorted(set().union(*per_task))
    total: dict[str, Any] = {name: sum(each.get(name, 0.0) for each in per_task) for name in names}
    seconds = total.get("training_seconds")
    total["training_images_per_second"] = total["training_images"] / seconds if seconds else None
    total["input_wait_fraction"] = total["input_wait_seconds"] / seconds if seconds else None
    return total


def versions() -> dict[str, str | None]:
    """Returns the versions of Python, of this package and of what it computes with."""
    own = {"python": platform.python_version(), "fdc_jax": fdc_jax.__version__, "commit": _commit()}
    return own | {name: importlib.metadata.version(name) for name in _PACKAGES}


def _commit() -> str | None:
    """Returns the commit that the package is checked out at, or None outside a checkout."""
    folder = Path(fdc_jax.__file__).parents[1]
    if not (folder / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
