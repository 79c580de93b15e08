"""The stream of a run: its images, and which belong to which task.

Labels are positions in the class order.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from fdc_jax.data import benchmarks
from fdc_jax.data.dataset import Dataset, data_folder
from fdc_jax.errors import InputError


def open_dataset(
    benchmark_name: str,
    split: str,
    data_dir: str | os.PathLike[str] = "",
    cache_dir: str | os.PathLike[str] | None = None,
) -> Dataset:
    """Opens one split of a benchmark.

    Images come by record identifier for CIFAR-100, else by class and file name.

    Args:
        benchmark_name: as in `benchmarks.find`.
        split: "train" or "test".
        data_dir: as in `dataset.data_folder`; not looked at for the embedded digits.
        cache_dir: keeps what reading a data set found where its own folder is closed to writing.

    Raises:
        InputError: the benchmark is unknown or not prepared there, or its files are damaged.
    """
    folder = data_folder(data_dir)
    benchmark = benchmarks.find(benchmark_name, folder)
    if benchmark.partition == "embedded":
        from fdc_jax.data import digits

        return digits.open_digits(split)
    # Importing TFDS takes seconds, which the digits do not need.
    from fdc_jax.data import tfds_format

    return tfds_format.open_prepared(benchmark, split, folder, cache_dir)


def task_indices(
    labels: Int[np.ndarray, " n"],
    classes: Sequence[int] | Int[np.ndarray, " k"],
    per_class: int = 0,
) -> Int[np.ndarray, " m"]:
    """Returns the indices of the first `per_class` images (0: all) of each class, by class.

    `labels` are in the fixed order of a `Dataset`, that is by record identifier within a class.
    """
    return np.concatenate(
        [np.flatnonzero(labels == label)[: per_class or None] for label in classes]
    )


@dataclasses.dataclass(frozen=True)
class TaskStream:
    """Tasks with disjoint classes."""

    train: Dataset  # all training images
    test: Dataset  # all test images
    order: Int[np.ndarray, " c"]  # class labels of the tasks in the order in which they arrive
    tasks: list[Int[np.ndarray, " k"]]  # class labels of each task
    train_indices: list[Int[np.ndarray, " n"]]  # into `train`, per task
    test_indices: Int[np.ndarray, " m"]  # into `test`, task after task
    test_tasks: Int[np.ndarray, " m"]  # task of each test image
    planned: tuple[int, ...]  # number of classes of each task, and of those that follow later

    @property
    def positions(self) -> Int[np.ndarray, " k"]:
        """Class-order position of each class label, the label that results use; -1: no task's."""
        found = np.full(len(self.train.class_names), -1)
        found[self.order] = np.arange(len(self.order))
        return found

    @property
    def class_names(self) -> list[str]:
        """Names of the classes by class-order position."""
        return [self.train.class_names[label] for label in self.order.tolist()]

    @property
    def classes_per_task(self) -> tuple[int, ...]:
        """Number of classes of each task."""
        return tuple(map(len, self.tasks))

    @property
    def first_position(self) -> Int[np.ndarray, " t"]:
        """Class-order position of the first class of each task."""
        return np.cumsum([0, *self.classes_per_task[:-1]])

    def train_labels(self, task: int) -> Int[np.ndarray, " n"]:
        """Class-order positions of a task's training images."""
        return self.positions[self.train.labels[self.train_indices[task]]]

    @property
    def test_labels(self) -> Int[np.ndarray, " m"]:
        """Class-order positions of the test images."""
        return self.positions[self.test.labels[self.test_indices]]


def build(
    benchmark: benchmarks.Benchmark,
    train: Dataset,
    test: Dataset,
    class_order_seed: int,
    classes_per_task: int | Sequence[int] = 0,
    train_per_class: int = 0,
    test_per_class: int = 0,
    class_order: Sequence[str] = (),
    num_tasks: int = 0,
) -> TaskStream:
    """Checks the data against the benchmark's entry and divides them into tasks.

    Args:
        benchmark: entry of the benchmark.
        train: all training images.
        test: all test images.
        class_order_seed: as in `benchmarks.class_order`; PILOT uses 1993.
        classes_per_task: as in `benchmarks.task_sizes`.
        train_per_class: images of each class, 0 for all.
        test_per_class: likewise.
        class_order: names of all classes in the order in which they arrive; empty for the seed's.
        num_tasks: how many of the tasks there are for now, 0 for all.

    Raises:
        InputError: counts differ from the entry; classes, names or task sizes do not add up; a
            task has no test images.
    """
    names = train.class_names
    benchmarks.verify(benchmark, train.labels, test.labels, names)
    sizes = benchmarks.task_sizes(
        benchmark.name, len(names), classes_per_task or benchmark.classes_per_task
    )
    if class_order:
        order = benchmarks.named_order(names, class_order)
    else:
        order = benchmarks.class_order(len(names), class_order_seed, benchmark.earlier_classes)
    if num_tasks > len(sizes):
        raise InputError(
            f"config.num_tasks: expected at most the {len(sizes)} tasks of {benchmark.name}, found "
            f"{num_tasks}"
        )
    tasks = np.split(order, np.cumsum(sizes)[:-1])[: num_tasks or None]
    test_indices = [task_indices(test.labels, classes, test_per_class) for classes in tasks]
    for task, indices in enumerate(test_indices):
        if not len(indices):
            raise InputError(
                f"{benchmark.name}: expected test images in every task, found none in task "
                f"{task + 1}, of class {', '.join(names[label] for label in tasks[task][:5])}"
            )
    return TaskStream(
        train=train,
        test=test,
        order=np.concatenate(tasks),
        tasks=tasks,
        train_indices=[task_indices(train.labels, classes, train_per_class) for classes in tasks],
        test_indices=np.concatenate(test_indices),
        test_tasks=np.repeat(np.arange(len(tasks)), [len(part) for part in test_indices]),
        planned=sizes,
    )
