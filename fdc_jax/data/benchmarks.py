"""The benchmarks as a table, their class order, and the check that data are what the table says."""

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

    name: str  # key in `BENCHMARKS`; results carry it
    title: str  # in the paper's tables
    num_classes: int
    classes_per_task: int  # of every task but perhaps the last
    partition: str  # "official" (the data set's own), "pilot", "random80", "other" or "embedded"
    obtain: str  # where the raw data are to be found, in words
    num_train: int | None = None  # images; None where any number is accepted
    num_test: int | None = None  # likewise
    task_test_counts: tuple[int, ...] | None = None  # in class order seed 1993, where known
    checksums: dict[str, str] = dataclasses.field(default_factory=dict)  # of the raw archive
    tfds_version: str = "1.0.0"  # folder of the prepared data below that of their name

    @property
    def tfds_name(self) -> str:
        """Folder of the prepared data below the data folder."""
        return f"pilot_{self.name}" if self.partition == "pilot" else self.name


def _pilot(
    name: str, title: str, classes: int, per_task: int, num_train: int, md5: str, *counts: int
) -> Benchmark:
    """A benchmark in PILOT's own division."""
    return Benchmark(
        name=name,
        title=title,
        num_classes=classes,
        classes_per_task=per_task,
        partition="pilot",
        obtain=f"the {title} archive behind the Google Drive link in the README of the PILOT "
        "toolbox (GitHub: LAMDA-CL/LAMDA-PILOT, section Datasets), or its contents: "
        "train/CLASS/IMAGE and test/CLASS/IMAGE",
        num_train=num_train,
        num_test=sum(counts),
        task_test_counts=counts,
        checksums={"md5": md5},
    )


# The MD5 of the archives are those that the authors of RevisitingCIL, who made them, published.
_PILOT = [
    _pilot(
        *("imagenet_a", "ImageNet-A", 200, 20, 5981, "7f4aaf0b1532b7a0bd670822c152d3c5"),
        *(175, 185, 116, 222, 143, 134, 146, 127, 147, 124),
    ),
    _pilot(
        *("imagenet_r", "ImageNet-R", 200, 20, 24000, "730aa3fb9c7d2ec0b6381c6b23040681"),
        *(689, 632, 606, 571, 487, 660, 569, 729, 478, 579),
    ),
    _pilot(
        *("cub200", "CUB-200", 200, 10, 9430, "85e342a2d5f941e740193602057df7a5"),
        *(118, 129, 97, 110, 107, 111, 106, 141, 133, 136),
        *(115, 113, 107, 118, 126, 124, 134, 103, 132, 98),
    ),
    _pilot(
        *("omnibench", "OmniBenchmark", 300, 30, 89697, "f1c30808a707f9197c6c811ea52e5cbb"),
        *(600, 599, 599, 597, 599, 598, 597, 599, 599, 598),
    ),
]


def _divided_anew(
    pilot: Benchmark, partition: str, title: str, obtain: str, total: int | None = None
) -> Benchmark:
    """PILOT's classes and tasks with another division; without a total, any that a user brings."""
    num_train = None if total is None else int(0.8 * total)
    return dataclasses.replace(
        pilot,
        name=f"{pilot.name}_{partition}",
        title=f"{pilot.title} ({title})",
        partition=partition,
        obtain=obtain,
        num_train=num_train,
        num_test=None if total is None or num_train is None else total - num_train,
        task_test_counts=None,
        checksums={},
    )


# The substitute for those without PILOT's archive: the public images, divided by our rule.
_RELEASES = {
    "imagenet_r": (30000, "imagenet-r.tar (GitHub: hendrycks/imagenet-r)", "imagenet-r/WNID"),
    "imagenet_a": (
        *(7500, "imagenet-a.tar (GitHub: hendrycks/natural-adv-examples)", "imagenet-a/WNID"),
    ),
    "cub200": (11788, "CUB_200_2011.tgz (Caltech)", "CUB_200_2011/images/CLASS"),
}
_CIFAR100 = Benchmark(
    name="cifar100",
    title="CIFAR-100",
    num_classes=100,
    classes_per_task=5,
    partition="official",
    obtain="https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
    num_train=50000,
    num_test=10000,
    task_test_counts=(500,) * 20,
    checksums={"sha256": "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec"},
    tfds_version="3.0.2",
)
_DIGITS = Benchmark(
    name="digits",
    title="Digits",
    num_classes=10,
    classes_per_task=2,
    partition="embedded",
    obtain="embedded: the 1797 scans of 8 x 8 pixels that come with scikit-learn",
    num_train=1201,
    num_test=596,
    task_test_counts=(119, 119, 120, 118, 120),
)


def _all() -> list[Benchmark]:
    named = {pilot.name: pilot for pilot in _PILOT}
    random80 = [
        _divided_anew(
            *(named[name], "random80", "random 80/20"),
            f"the official release {release}, which holds {place}/IMAGE",
            total,
        )
        for name, (total, release, place) in _RELEASES.items()
    ]
    own = "a folder or archive of your own with train/CLASS/IMAGE and test/CLASS/IMAGE"
    other = [_divided_anew(pilot, "other", "other split", own) for pilot in _PILOT]
    return [_CIFAR100, *_PILOT, *random80, *other, _DIGITS]


BENCHMARKS: dict[str, Benchmark] = {benchmark.name: benchmark for benchmark in _all()}


def find(name: str) -> Benchmark:
    """Returns the benchmark of that name, or raises an InputError that lists those there are."""
    if name not in BENCHMARKS:
        known = ", ".join(sorted(BENCHMARKS))
        raise InputError(f"benchmark must be one of {known}; found {name!r}")
    return BENCHMARKS[name]


def class_order(num_classes: int, seed: int) -> Int[np.ndarray, " c"]:
    """Returns the class labels in the order in which they arrive (PILOT: seed 1993).

    Equal to `numpy.random.seed(seed)` followed by `numpy.random.permutation(num_classes)`.
    """
    return np.random.RandomState(seed).permutation(num_classes)


def task_classes(order: Int[np.ndarray, " c"], classes_per_task: int) -> list[np.ndarray]:
    """Cuts the class order into consecutive tasks; a remainder becomes a shorter last task."""
    return [order[i : i + classes_per_task] for i in range(0, len(order), classes_per_task)]


def verify(
    benchmark: Benchmark,
    train_labels: Int[np.ndarray, " n"],
    test_labels: Int[np.ndarray, " m"],
    class_names: Sequence[str],
) -> None:
    """Checks whole splits, as class indices, against the table.

    Raises:
        InputError: a number differs; the message says what was expected and what was found.
    """

    def expect(what: str, expected: int | None, found: int) -> None:
        if expected not in (None, found):
            raise InputError(f"{benchmark.name}: expected {expected} {what}, found {found}")

    any_split = benchmark.partition == "other"
    expect("classes", None if any_split else benchmark.num_classes, len(class_names))
    for split, labels in (("training", train_labels), ("test", test_labels)):
        absent = np.setdiff1d(np.arange(len(class_names)), labels)[:10]
        if len(absent) and (split == "training" or benchmark.partition == "pilot"):
            raise InputError(
                f"{benchmark.name}: expected {split} images of every class, found none of "
                + ", ".join(class_names[int(label)] for label in absent)
            )
    expect("training images", benchmark.num_train, len(train_labels))
    expect("test images", benchmark.num_test, len(test_labels))
    if benchmark.task_test_counts is not None:
        order = class_order(len(class_names), REFERENCE_CLASS_ORDER_SEED)
        tasks = task_classes(order, benchmark.classes_per_task)
        counts = tuple(int(np.isin(test_labels, task).sum()) for task in tasks)
        if counts != benchmark.task_test_counts:
            raise InputError(
                f"{benchmark.name}: expected {' '.join(map(str, benchmark.task_test_counts))} test "
                f"images in the tasks of class order {REFERENCE_CLASS_ORDER_SEED}, found "
                f"{' '.join(map(str, counts))}; this is another division into train and test"
            )
