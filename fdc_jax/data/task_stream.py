"""The stream of a run: its images, divided into tasks of disjoint classes."""

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from fdc_jax.data import benchmarks
from fdc_jax.data.dataset import Dataset, class_checksums, draw
from fdc_jax.errors import InputError


class LearnedClasses(NamedTuple):
    """The classes and tasks of an earlier process of the run; new classes come after them."""

    classes: Mapping[str, str]  # name to checksum (`dataset.class_checksums`), in order of arrival
    sizes: tuple[int, ...]  # number of classes of each earlier task

    @property
    def tasks(self) -> list[list[str]]:
        """Names of the classes of each earlier task."""
        names = iter(self.classes)
        return [list(itertools.islice(names, size)) for size in self.sizes]


NONE_LEARNED = LearnedClasses({}, ())


@dataclasses.dataclass(frozen=True)
class TaskStream:
    """Tasks with disjoint classes; results label a class by its position in the class order."""

    train: Dataset  # all training images
    test: Dataset  # all test images
    order: Int[np.ndarray, " c"]  # class labels of the tasks, in order of arrival
    tasks: list[Int[np.ndarray, " k"]]  # class labels of each task
    train_indices: list[Int[np.ndarray, " n"]]  # into `train`, per task
    validation_indices: Int[np.ndarray, " v"]  # into `train`, in no task's `train_indices`
    test_indices: Int[np.ndarray, " m"]  # into `test`, task after task
    test_tasks: Int[np.ndarray, " m"]  # task of each test image
    planned: tuple[int, ...]  # number of classes of each task, also beyond `num_tasks`
    classes: tuple[str, ...]  # names of the classes of all planned tasks, in order of arrival

    @functools.cached_property
    def class_checksums(self) -> dict[str, str]:
        """Checksum of each class by name (`dataset.class_checksums`), in order of arrival."""
        checksums = class_checksums(self.train, self.test)
        return {name: checksums[name] for name in self.classes}

    @property
    def positions(self) -> Int[np.ndarray, " k"]:
        """Class-order position of each class label; -1 for classes of no task."""
        positions = np.full(len(self.train.class_names), -1)
        positions[self.order] = np.arange(len(self.order))
        return positions

    @property
    def class_names(self) -> list[str]:
        """Names of the classes by class-order position."""
        return list(self.classes[: len(self.order)])

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
    def validation_labels(self) -> Int[np.ndarray, " v"]:
        """Class-order positions of the validation images."""
        return self.positions[self.train.labels[self.validation_indices]]

    @property
    def test_labels(self) -> Int[np.ndarray, " m"]:
        """Class-order positions of the test images."""
        return self.positions[self.test.labels[self.test_indices]]


def build(
    train: Dataset,
    test: Dataset,
    known: LearnedClasses = NONE_LEARNED,
    *,
    classes_per_task: int | Sequence[int] = 0,
    class_order: Sequence[str] = (),
    class_order_seed: int,
    num_tasks: int = 0,
    train_per_class: int = 0,
    test_per_class: int = 0,
    validation_share: float = 0.0,
) -> TaskStream:
    """Returns the stream of tasks of two splits, which `benchmarks.verify` checks first.

    Classes that are new to the run follow the earlier ones, in the order of the seed. `known` has
    classes and tasks of an earlier process; other arguments are fields of the configuration.

    Raises:
        InputError: counts differ from the benchmark's; classes, names or task sizes do not add up;
            a task has no test images; a class has too few training images to hold one out.
    """
    name, names = train.name, train.class_names
    benchmarks.verify(name, train.labels, test.labels, names)
    known_names = [class_name for class_name in known.classes if class_name in set(names)]
    # If known classes are missing, the run reports them when it compares its settings.
    earlier = known.sizes if len(known_names) == len(known.classes) else ()
    sizes = benchmarks.task_sizes(name, len(names), classes_per_task, earlier)
    if class_order:
        order = benchmarks.named_order(names, class_order)
    else:
        shuffled = benchmarks.class_order(len(names), class_order_seed).tolist()
        order = np.array(list(dict.fromkeys([*map(names.index, known_names), *shuffled])))
    if num_tasks > len(sizes):
        raise InputError(
            f"config.num_tasks: expected at most the {len(sizes)} tasks of {name}, found "
            f"{num_tasks}"
        )
    tasks = np.split(order, np.cumsum(sizes)[:-1])[: num_tasks or None]

    def indices_by_task(split: Dataset, per_class: int) -> list[Int[np.ndarray, " n"]]:
        """Returns the indices of the first images (0: all) of each class, class by class."""
        by_class = {c: np.flatnonzero(split.labels == c)[: per_class or None] for c in order}
        return [np.concatenate([by_class[c] for c in classes]) for classes in tasks]

    train_indices = indices_by_task(train, train_per_class)
    held_out = np.array([], int)
    if validation_share:
        held_out = _held_out(train, train_indices, validation_share)
        train_indices = [rows[~np.isin(rows, held_out)] for rows in train_indices]
    test_indices = indices_by_task(test, test_per_class)
    for task, indices in enumerate(test_indices):
        if not len(indices):
            raise InputError(
                f"{name}: expected test images in every task, found none in task {task + 1}, of "
                f"class {', '.join(names[label] for label in tasks[task][:5])}"
            )
    classes = tuple(names[label] for label in order)
    test_sizes = [len(part) for part in test_indices]
    test_tasks = np.repeat(np.arange(len(tasks)), test_sizes)
    return TaskStream(
        train=train,
        test=test,
        order=np.concatenate(tasks),
        tasks=tasks,
        train_indices=train_indices,
        validation_indices=held_out,
        test_indices=np.concatenate(test_indices),
        test_tasks=test_tasks,
        planned=sizes,
        classes=classes,
    )


def _held_out(
    train: Dataset, by_task: Sequence[Int[np.ndarray, " n"]], share: float
) -> Int[np.ndarray, " v"]:
    """Returns the indices of a share of the training images of each class (`dataset.draw`)."""
    rows = np.concatenate(by_task)
    parts = []
    for label in dict.fromkeys(train.labels[rows].tolist()):
        members = rows[train.labels[rows] == label]
        if len(members) < 2:
            raise InputError(
                "config.data.validation_share: expected at least two training images of every "
                f"class, found one of {train.class_names[label]}"
            )
        parts.append(members[np.sort(draw([train.ids[row] for row in members], share))])
    return np.concatenate(parts)
