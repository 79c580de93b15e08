"""The stream of a run: which images belong to which task, with labels in class-order positions."""

import dataclasses

import numpy as np
from jaxtyping import Int

from fdc_jax.data import benchmarks, stream
from fdc_jax.data.source import Source
from fdc_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class TaskStream:
    """Tasks with disjoint classes.

    Attributes:
        train: source of all training images.
        test: source of all test images.
        positions: class-order position of each class label; the label that results use.
        tasks: class labels of each task.
        train_indices: per task, its training images as indices into `train`.
        test_indices: test images of all tasks as indices into `test`, task after task.
        test_tasks: task of each of them.
    """

    train: Source
    test: Source
    positions: Int[np.ndarray, " c"]
    tasks: list[Int[np.ndarray, " k"]]
    train_indices: list[Int[np.ndarray, " n"]]
    test_indices: Int[np.ndarray, " m"]
    test_tasks: Int[np.ndarray, " m"]

    @property
    def classes_per_task(self) -> tuple[int, ...]:
        """Number of classes of each task."""
        return tuple(len(task) for task in self.tasks)

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
    train: Source,
    test: Source,
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
        InputError: counts differ from the table, more tasks than classes, a task without images.
    """
    benchmarks.verify(benchmark, train.labels, test.labels, class_order_seed)
    num_classes = train.num_classes
    if classes_per_task > num_classes:
        raise InputError(
            f"config.classes_per_task: expected at most the {num_classes} classes of "
            f"{benchmark.name}, found {classes_per_task}"
        )
    order = stream.class_order(num_classes, class_order_seed)
    tasks = stream.task_classes(order, classes_per_task or benchmark.classes_per_task)
    kept_train = stream.select_per_class(train.labels, train_per_class)
    kept_test = stream.select_per_class(test.labels, test_per_class)

    def of_tasks(source: Source, kept: np.ndarray) -> list[np.ndarray]:
        return [kept[stream.task_indices(source.labels[kept], classes)] for classes in tasks]

    train_indices, test_indices = of_tasks(train, kept_train), of_tasks(test, kept_test)
    return TaskStream(
        train=train,
        test=test,
        positions=stream.class_positions(order),
        tasks=tasks,
        train_indices=train_indices,
        test_indices=np.concatenate(test_indices),
        test_tasks=np.repeat(np.arange(len(tasks)), [len(part) for part in test_indices]),
    )
