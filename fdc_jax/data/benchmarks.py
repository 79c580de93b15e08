"""The benchmarks as a table, the order of classes, and the check of data against the table."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from fdc_jax.errors import InputError

# The class order under which per-task counts are listed, and PILOT's default.
REFERENCE_CLASS_ORDER_SEED = 1993


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """One data set with its division into train and test and its task sequence."""

    name: str  # results carry it
    title: str  # in tables
    partition: str  # "official" (its makers'), "pilot", or "embedded" in scikit-learn
    classes_per_task: int
    num_train: int  # images
    task_test_counts: tuple[int, ...]  # in class order seed 1993

    @property
    def num_classes(self) -> int:
        """Number of classes of all tasks."""
        return self.classes_per_task * len(self.task_test_counts)


_TABLE = [
    Benchmark("cifar100", "CIFAR-100", "official", 5, 50000, (500,) * 20),
    Benchmark(
        *("imagenet_a", "ImageNet-A", "pilot", 20, 5981),
        (175, 185, 116, 222, 143, 134, 146, 127, 147, 124),
    ),
    Benchmark(
        *("imagenet_r", "ImageNet-R", "pilot", 20, 24000),
        (689, 632, 606, 571, 487, 660, 569, 729, 478, 579),
    ),
    Benchmark(
        *("cub200", "CUB-200", "pilot", 10, 9430),
        (
            *(118, 129, 97, 110, 107, 111, 106, 141, 133, 136),
            *(115, 113, 107, 118, 126, 124, 134, 103, 132, 98),
        ),
    ),
    Benchmark(
        *("omnibench", "OmniBenchmark", "pilot", 30, 89697),
        (600, 599, 599, 597, 599, 598, 597, 599, 599, 598),
    ),
    Benchmark("digits", "Digits", "embedded", 2, 1201, (119, 119, 120, 118, 120)),
]
BENCHMARKS: dict[str, Benchmark] = {benchmark.name: benchmark for benchmark in _TABLE}
# Where the data of those in PILOT's division are to be had.
PILOT = (
    "an archive behind the Google Drive links in the README of the PILOT toolbox (GitHub: "
    "LAMDA-CL/LAMDA-PILOT, section Datasets), or the folder of its contents"
)


# Classes and tasks --------------------------------------------------------------------------------


def class_order(num_classes: int, seed: int) -> Int[np.ndarray, " c"]:
    """Returns the class labels in the order in which they arrive (PILOT: seed 1993).

    Equal to `numpy.random.seed(seed)` followed by `numpy.random.permutation(num_classes)`; for a
    seed of -1 the order given, which is that of the labels.
    """
    return (
        np.arange(num_classes)
        if seed == -1
        else np.random.RandomState(seed).permutation(num_classes)
    )


def named_order(class_names: Sequence[str], names: Sequence[str]) -> Int[np.ndarray, " c"]:
    """Returns the class labels in an order of names.

    Raises:
        InputError: classes are missing, doubled or unknown; names some.
    """
    odd = sorted({*names} ^ {*class_names}) or [n for n in names if list(names).count(n) > 1]
    if odd:
        raise InputError(
            f"config.class_order: expected each of the {len(class_names)} classes once, found "
            f"otherwise {', '.join(map(str, odd[:5]))}"
        )
    label = {name: index for index, name in enumerate(class_names)}
    return np.array([label[name] for name in names])


def task_sizes(
    name: str, num_classes: int, wanted: int | Sequence[int] = 0, taken: Sequence[int] = ()
) -> tuple[int, ...]:
    """Returns the number of classes of each task of a data set.

    Args:
        name: of the data set.
        num_classes: of all tasks.
        wanted: of each task; one number for all of them but perhaps a shorter last one; 0 for the
            benchmark's own number, for other data a fifth of the classes, but two at least.
        taken: of the tasks that a run took in before; beside one number, they stay.

    Raises:
        InputError: they do not add up.
    """
    field = "config.classes_per_task: expected"
    if not isinstance(wanted, int):
        if sum(wanted) != num_classes:
            more = (*taken, num_classes - sum(taken))
            advice = (
                f"; to add a task: {','.join(map(str, more))}" if taken and more[-1] > 0 else ""
            )
            raise InputError(
                f"{field} numbers that add up to the {num_classes} classes of {name}, found "
                f"{' + '.join(map(str, wanted))} = {sum(wanted)}{advice}"
            )
        return tuple(wanted)
    if wanted > num_classes:
        raise InputError(f"{field} at most the {num_classes} classes of {name}, found {wanted}")
    own = BENCHMARKS[name].classes_per_task if name in BENCHMARKS else max(2, -(-num_classes // 5))
    # Chosen once: classes that come later do not change it.
    size = wanted or (taken[0] if taken and name not in BENCHMARKS else own)
    rest = range(sum(taken), num_classes, size)
    return (*taken, *(min(size, num_classes - first) for first in rest))


def verify(
    name: str,
    train_labels: Int[np.ndarray, " n"],
    test_labels: Int[np.ndarray, " m"],
    class_names: Sequence[str],
) -> None:
    """Checks whole splits, as class indices; those of a benchmark against the table.

    Raises:
        InputError: a class has no training images, or a number differs; the message says what was
            expected and what was found.
    """
    absent = np.setdiff1d(np.arange(len(class_names)), train_labels)[:10]
    if len(absent):
        raise InputError(
            f"{name}: expected training images of every class, found none of "
            + ", ".join(class_names[int(label)] for label in absent)
        )
    benchmark = BENCHMARKS.get(name)
    if benchmark is None:
        return
    order = class_order(len(class_names), REFERENCE_CLASS_ORDER_SEED)
    starts = range(benchmark.classes_per_task, len(order), benchmark.classes_per_task)
    counts = [int(np.isin(test_labels, task).sum()) for task in np.split(order, starts)]
    for what, expected, found in (
        ("classes", benchmark.num_classes, len(class_names)),
        ("training images", benchmark.num_train, len(train_labels)),
        ("test images", sum(benchmark.task_test_counts), len(test_labels)),
        (
            f"test images in the tasks of class order {REFERENCE_CLASS_ORDER_SEED}",
            " ".join(map(str, benchmark.task_test_counts)),
            " ".join(map(str, counts)),
        ),
    ):
        if found != expected:
            raise InputError(
                f"{name}: expected {expected} {what}, found {found}; config.benchmark gives "
                "another division a name of its own"
            )
