"""The stream of a run: its images, and which belong to which task.

Labels are positions in the class order.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from fdc_jax.data import benchmarks, sources
from fdc_jax.data.dataset import Dataset, class_checksums, listed
from fdc_jax.errors import InputError


class Known(NamedTuple):
    """What a run knows from before: classes that are new in the data come after these."""

    classes: Mapping[str, str]  # name to `dataset.class_checksums`, as they arrive
    sizes: tuple[int, ...]  # number of classes of each task that it took in

    @property
    def tasks(self) -> list[list[str]]:
        """Names of the classes of each task that the run took in."""
        names = iter(self.classes)
        return [list(itertools.islice(names, size)) for size in self.sizes]


NOTHING = Known({}, ())


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
    classes: tuple[str, ...]  # of all these tasks, as they arrive

    @functools.cached_property
    def class_checksums(self) -> dict[str, str]:
        """What the images of each class are, as in `dataset.class_checksums`, as classes arrive."""
        found = class_checksums(self.train, self.test)
        return {name: found[name] for name in self.classes}

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


def open_stream(config: Any, cache: Path, known: Known = NOTHING, quiet: bool = True) -> TaskStream:
    """Opens the images of a configuration and divides them into tasks.

    Args:
        config: the configuration, whose benchmark has a name.
        cache: as of `sources.open_splits`.
        known: what the run knows from before.
        quiet: show no progress.

    Raises:
        InputError: as of `sources.open_splits` and of `build`.
    """
    data = config.data
    train, test = sources.open_splits(
        config.benchmark,
        cache,
        source=data.source,
        data_dir=data.dir,
        test_share=data.test_share,
        workers=data.workers,
        quiet=quiet,
    )
    return build(config, train, test, known)


def build(config: Any, train: Dataset, test: Dataset, known: Known = NOTHING) -> TaskStream:
    """Checks the data, those of a benchmark against its entry, and divides them into tasks.

    Classes that are new to the run have the order of the seed among themselves.

    Raises:
        InputError: counts differ from the entry; classes, names or task sizes do not add up; an
            image of a list is not there; a task has no test images.
    """
    name, names = train.name, train.class_names
    benchmarks.verify(name, train.labels, test.labels, names)
    if config.data.images:
        train, test = (listed(split, config.data.images) for split in (train, test))
    before = [each for each in known.classes if each in set(names)]
    # Where classes are gone, the run says so when it compares what it knows.
    taken = known.sizes if len(before) == len(known.classes) else ()
    sizes = benchmarks.task_sizes(name, len(names), config.classes_per_task, taken)
    if config.class_order:
        order = benchmarks.named_order(names, config.class_order)
    else:
        drawn = benchmarks.class_order(len(names), config.class_order_seed).tolist()
        order = np.array(list(dict.fromkeys([*map(names.index, before), *drawn])))
    if config.num_tasks > len(sizes):
        raise InputError(
            f"config.num_tasks: expected at most the {len(sizes)} tasks of {name}, found "
            f"{config.num_tasks}"
        )
    tasks = np.split(order, np.cumsum(sizes)[:-1])[: config.num_tasks or None]

    def of_tasks(split: Dataset, per_class: int) -> list[Int[np.ndarray, " n"]]:
        return [task_indices(split.labels, classes, per_class) for classes in tasks]

    test_indices = of_tasks(test, config.data.test_per_class)
    for task, indices in enumerate(test_indices):
        if not len(indices):
            raise InputError(
                f"{name}: expected test images in every task, found none in task {task + 1}, of "
                f"class {', '.join(names[label] for label in tasks[task][:5])}"
            )
    return TaskStream(
        train=train,
        test=test,
        order=np.concatenate(tasks),
        tasks=tasks,
        train_indices=of_tasks(train, config.data.train_per_class),
        test_indices=np.concatenate(test_indices),
        test_tasks=np.repeat(np.arange(len(tasks)), [len(part) for part in test_indices]),
        planned=sizes,
        classes=tuple(names[label] for label in order),
    )
