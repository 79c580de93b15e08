"""A small class-incremental problem with drifting features, and how to fit a comparator to it."""

from typing import NamedTuple

import numpy as np

from fdc_jax import heads


class Task(NamedTuple):
    adapted: np.ndarray
    pretrained: np.ndarray
    labels: np.ndarray
    head: heads.LinearHead
    classes: np.ndarray


class Problem(NamedTuple):
    tasks: list[Task]
    adapted: np.ndarray
    pretrained: np.ndarray
    labels: np.ndarray


def problem(sizes=((40, 30, 20), (25, 35), (30, 30, 30, 30)), width=12, seed=0):
    """Tasks with the given numbers of samples per class; labels are 10 t + c, shuffled."""
    rng = np.random.default_rng(seed)
    mixing = rng.normal(size=(width, width)) / np.sqrt(width) + np.eye(width)
    offset = 2.0 * rng.normal(size=width)
    tasks, tests, test_labels = [], [], []
    for t, counts in enumerate(sizes):
        centres = 1.5 * rng.normal(size=(len(counts), width)) + rng.normal(size=width)

        def draw(rows, centres=centres):
            noisy = centres[rows] + rng.normal(size=(len(rows), width))
            return (noisy @ mixing + offset).astype(np.float32)

        rows = rng.permutation(np.repeat(np.arange(len(counts)), counts))
        drift = 0.1 * t * rng.normal(size=width).astype(np.float32)
        pretrained = draw(rows)
        weight = (centres @ mixing).astype(np.float32) * (1.0 + 0.3 * t)
        head = heads.LinearHead(weight, rng.normal(size=len(counts)).astype(np.float32))
        classes = 10 * t + np.arange(len(counts))
        tasks.append(Task(pretrained + drift, pretrained, classes[rows], head, classes))
        test_rows = rng.integers(0, len(counts), 20)
        tests.append(draw(test_rows))
        test_labels.append(classes[test_rows])
    pretrained = np.concatenate(tests)
    adapted = pretrained + 0.1 * rng.normal(size=width).astype(np.float32)
    return Problem(tasks, adapted, pretrained, np.concatenate(test_labels))


def fitted(comparator, tasks):
    """Fits and finalises."""
    for task in tasks:
        comparator.fit_task(task.adapted, task.labels, task.head, task.pretrained)
    comparator.finalize()
    return comparator


def by_task(class_scores, tasks):
    """Best score and row of each task from [n, classes], in float64."""
    bounds = np.cumsum([len(task.classes) for task in tasks])[:-1]
    parts = np.split(np.asarray(class_scores), bounds, axis=1)
    return (
        np.stack([part.max(axis=1) for part in parts], axis=1),
        np.stack([part.argmax(axis=1) for part in parts], axis=1),
    )
