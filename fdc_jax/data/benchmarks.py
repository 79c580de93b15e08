"""The table of benchmarks, class orders, task sizes, and the check of data against the table."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from fdc_jax.errors import InputError, escaped

# The class order under which per-task counts are listed, and PILOT's default.
REFERENCE_CLASS_ORDER_SEED = 1993


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """A data set with its train-test split and its tasks."""

    name: str  # in results
    title: str  # in tables
    partition: str  # train-test split: "official", "pilot", or "embedded" (scikit-learn)
    classes_per_task: int
    num_train: int  # training images
    task_test_counts: tuple[int, ...]  # test images of each task under class order seed 1993

    @property
    def num_classes(self) -> int:
        """Number of classes of all tasks."""
        return self.classes_per_task * len(self.task_test_counts)


# Test images of each task under class order seed 1993.
_TEST_COUNTS = {
    "cifar100": " ".join(["500"] * 20),
    "imagenet_a": "175 185 116 222 143 134 146 127 147 124",
    "imagenet_r": "689 632 606 571 487 660 569 729 478 579",
    "cub200": "118 129 97 110 107 111 106 141 133 136 115 113 107 118 126 124 134 103 132 98",
    "omnibench": "600 599 599 597 599 598 597 599 599 598",
    "digits": "119 119 120 118 120",
}


def _benchmark(
    name: str, title: str, partition: str, classes_per_task: int, num_train: int
) -> Benchmark:
    counts = tuple(map(int, _TEST_COUNTS[name].split()))
    return Benchmark(name, title, partition, classes_per_task, num_train, counts)


_TABLE = [
    _benchmark("cifar100", "CIFAR-100", "official", 5, 50000),
    _benchmark("imagenet_a", "ImageNet-A", "pilot", 20, 5981),
    _benchmark("imagenet_r", "ImageNet-R", "pilot", 20, 24000),
    _benchmark("cub200", "CUB-200", "pilot", 10, 9430),
    _benchmark("omnibench", "OmniBenchmark", "pilot", 30, 89697),
    _benchmark("digits", "Digits", "embedded", 2, 1201),
]
BENCHMARKS: dict[str, Benchmark] = {benchmark.name: benchmark for benchmark in _TABLE}
_DRIVE = "https://drive.google.com/file/d/{}/view"
# Name and page of every archive with PILOT's split. The README of the PILOT toolbox (GitHub:
# LAMDA-CL/LAMDA-PILOT, section Datasets) links them and gives no sizes.
ARCHIVES = {
    "imagenet_a": ("imagenet-a", _DRIVE.format("19l52ua_vvTtttgVRziCZJjal0TPE9f2p")),
    "imagenet_r": ("imagenet-r", _DRIVE.format("1SG4TbiL8_DooekztyCVK8mPmfhMo8fkR")),
    "cub200": ("cub", _DRIVE.format("1XbUpnWpJPnItt5zQ6sHJnsjPncnNLvWb")),
    "omnibench": ("omnibenchmark", _DRIVE.format("1AbCP3zBMtv_TDXJypOCnOgX8hJmvJm3u")),
}


def class_order(num_classes: int, seed: int) -> Int[np.ndarray, " c"]:
    """Returns the class labels in order of arrival (PILOT: seed 1993).

    Equal to `numpy.random.seed(seed)` and then `numpy.random.permutation(num_classes)`; a seed of
    -1 keeps the order of the labels.
    """
    if seed == -1:
        return np.arange(num_classes)
    return np.random.RandomState(seed).permutation(num_classes)


def named_order(class_names: Sequence[str], names: Sequence[str]) -> Int[np.ndarray, " c"]:
    """Returns the class labels in the order of `names`; InputError unless each occurs once."""
    repeated = [name for name in names if list(names).count(name) > 1]
    if odd := sorted({*names} ^ {*class_names}) or repeated:
        raise InputError(
            f"config.class_order: expected each of the {len(class_names)} classes once, found "
            f"otherwise {', '.join(escaped(str(name))[:80] for name in odd[:5])}"
        )
    return np.array([class_names.index(name) for name in names])


def task_sizes(
    name: str, num_classes: int, wanted: int | Sequence[int] = 0, earlier: Sequence[int] = ()
) -> tuple[int, ...]:
    """Returns the number of classes of each task; InputError if the sizes do not add up.

    `wanted` lists the sizes, or is one size for all tasks (the last task may be smaller); 0 is the
    benchmark's size or, for other data, a fifth of the classes, at least 2. If `wanted` is one
    number, the tasks of an earlier process keep their sizes.
    """
    field = "config.classes_per_task: expected"
    if not isinstance(wanted, int):
        if sum(wanted) != num_classes:
            sizes = (*earlier, num_classes - sum(earlier))
            advice = ""
            if earlier and sizes[-1] > 0:
                advice = f"; to add a task: {','.join(map(str, sizes))}"
            raise InputError(
                f"{field} numbers that add up to the {num_classes} classes of {name}, found "
                f"{' + '.join(map(str, wanted))} = {sum(wanted)}{advice}"
            )
        return tuple(wanted)
    if wanted > num_classes:
        raise InputError(f"{field} at most the {num_classes} classes of {name}, found {wanted}")
    default = max(2, -(-num_classes // 5))
    if name in BENCHMARKS:
        default = BENCHMARKS[name].classes_per_task
    # Classes that are added later do not change the size of tasks.
    size = wanted or (earlier[0] if earlier else default)
    starts = range(sum(earlier), num_classes, size)
    return (*earlier, *(min(size, num_classes - start) for start in starts))


def verify(
    name: str,
    train_labels: Int[np.ndarray, " n"],
    test_labels: Int[np.ndarray, " m"],
    class_names: Sequence[str],
) -> None:
    """Checks the classes of whole splits, and the counts of a benchmark against the table.

    Raises:
        InputError: a class has no training images or an unprintable name, or a count differs from
            the table's.
    """
    if odd := [escaped(text) for text in class_names if escaped(text) != text][:10]:
        raise InputError(
            f"{name}: expected class names without control characters, found {', '.join(odd)}"
        )
    missing = np.setdiff1d(np.arange(len(class_names)), train_labels)[:10]
    if len(missing):
        raise InputError(
            f"{name}: expected training images of every class, found none of "
            + ", ".join(class_names[int(label)] for label in missing)
        )
    benchmark = BENCHMARKS.get(name)
    if benchmark is None:
        return
    order = class_order(len(class_names), REFERENCE_CLASS_ORDER_SEED)
    ends = range(benchmark.classes_per_task, len(order), benchmark.classes_per_task)
    counts = [int(np.isin(test_labels, task).sum()) for task in np.split(order, ends)]
    for noun, expected, count in (
        ("classes", benchmark.num_classes, len(class_names)),
        ("training images", benchmark.num_train, len(train_labels)),
        ("test images", sum(benchmark.task_test_counts), len(test_labels)),
        (
            f"test images in the tasks of class order {REFERENCE_CLASS_ORDER_SEED}",
            " ".join(map(str, benchmark.task_test_counts)),
            " ".join(map(str, counts)),
        ),
    ):
        if count != expected:
            raise InputError(
                f"{name}: expected {expected} {noun}, found {count}; config.benchmark gives "
                "another division a name of its own"
            )
