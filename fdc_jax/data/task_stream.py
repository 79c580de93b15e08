"""The stream of a run: which images belong to which task, with labels in class-order positions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from fdc_jax.data import benchmarks
from fdc_jax.data.dataset import Dataset
from fdc_jax.errors import InputError


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
    order: Int[np.ndarray, " c"]  # class labels in the order in which they arrive
    tasks: list[Int[np.ndarray, " k"]]  # class labels of each task
    train_indices: list[Int[np.ndarray, " n"]]  # into `train`, per task
    test_indices: Int[np.ndarray, " m"]  # into `test`, task after task
    test_tasks: Int[np.ndarray, " m"]  # task of each test image

    @property
    def positions(self) -> Int[np.ndarray, " c"]:
        """Class-order position of each class label; the label that results use."""
        return np.argsort(self.order)

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
    classes_per_task: int = 0,
    train_per_class: int = 0,
    test_per_class: int = 0,
) -> TaskStream:
    """Checks the data against the benchmark's table and divides them into tasks.

    Args:
        benchmark: row of the table.
        train: all training images.
        test: all test images.
        class_order_seed: PILOT uses 1993.
        classes_per_task: 0 for the benchmark's own number.
        train_per_class: images of each class, 0 for all.
        test_per_class: likewise.

    Raises:
        InputError: counts differ from the table, or a task has more classes than there are.
    """
    benchmarks.verify(benchmark, train.labels, test.labels, train.class_names)
    num_classes = len(train.class_names)
    if classes_per_task > num_classes:
        raise InputError(
            f"config.classes_per_task: expected at most the {num_classes} classes of "
            f"{benchmark.name}, found {classes_per_task}"
        )
    order = benchmarks.class_order(num_classes, class_order_seed)
    tasks = benchmarks.task_classes(order, classes_per_task or benchmark.classes_per_task)
    test_indices = [task_indices(test.labels, classes, test_per_class) for classes in tasks]
    return TaskStream(
        train=train,
        test=test,
        order=order,
        tasks=tasks,
        train_indices=[task_indices(train.labels, classes, train_per_class) for classes in tasks],
        test_indices=np.concatenate(test_indices),
        test_tasks=np.repeat(np.arange(len(tasks)), [len(part) for part in test_indices]),
    )
