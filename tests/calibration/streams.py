"""Random task streams for the tests of calibration, and both implementations fitted on them."""

from typing import NamedTuple

import numpy as np

from fdc_jax import calibration, heads
from tests.calibration import reference


class StreamTask(NamedTuple):
    """One task: features of both views, head rows of the samples, head weight and bias."""

    adapted: np.ndarray
    pretrained: np.ndarray
    rows: np.ndarray
    weight: np.ndarray
    bias: np.ndarray

    first: int = 0

    @property
    def labels(self):
        return self.rows + self.first

    @property
    def classes(self):
        return self.first + np.arange(len(self.weight))

    @property
    def head(self):
        return head_of(self, "linear")


def stream(
    seed=0,
    tasks=3,
    width=16,
    pretrained_width=12,
    classes=(3, 4, 2),
    samples=(60, 45, 80),
    offset=0.0,
):
    """Returns tasks with uneven class counts, sample counts and spectra.

    `offset` moves all features by that many spreads, in one direction per view.
    """
    rng = np.random.default_rng(seed)
    shifts = [offset * rng.normal(size=size) for size in (width, pretrained_width)]
    made, first = [], 0
    for t in range(tasks):
        count, size = classes[t % len(classes)], samples[t % len(samples)]
        rows = np.concatenate([np.arange(count), rng.integers(0, count, size - count)])
        views = []
        for dims, shift in zip((width, pretrained_width), shifts, strict=True):
            means = rng.normal(size=(count, dims))
            spectrum = np.linspace(1.0, 0.2, dims) ** rng.uniform(0.5, 2.0)
            mix = np.linalg.qr(rng.normal(size=(dims, dims)))[0] * spectrum
            noise = rng.normal(size=(size, dims)) @ mix.T
            views.append((means[rows] + noise + shift + 0.5).astype(np.float32))
        weight = rng.normal(size=(count, width)).astype(np.float32) / np.sqrt(width)
        bias = rng.normal(size=count).astype(np.float32)
        made.append(StreamTask(*views, rows, weight.astype(np.float32), bias, first))
        first += count
    return made


def known(seed=0, tasks=3, **options):
    """Returns a stream whose heads know their tasks: rows are the classes' distinct means."""
    made = []
    for task in stream(seed, tasks, **options):
        centres = 3.0 * np.random.default_rng(seed).normal(size=task.weight.shape)
        adapted = (task.adapted + centres[task.rows]).astype(np.float32)
        means = np.stack([adapted[task.rows == row].mean(axis=0) for row in range(len(centres))])
        bias = -(means**2).sum(axis=1) / 2
        made.append(task._replace(adapted=adapted, weight=means, bias=bias))
    return made


def probe_inputs(tasks, seed=1, size=40):
    """Returns inputs between the tasks: samples of all tasks, perturbed."""
    rng = np.random.default_rng(seed)
    adapted = np.concatenate([task.adapted for task in tasks])
    pretrained = np.concatenate([task.pretrained for task in tasks])
    pick = rng.permutation(len(adapted))[:size]
    return tuple(
        (view[pick] + 0.3 * rng.normal(size=view[pick].shape)).astype(np.float32)
        for view in (adapted, pretrained)
    )


def chosen(task, rows):
    """Returns the task with some of its samples."""
    return task._replace(
        adapted=task.adapted[rows], pretrained=task.pretrained[rows], rows=task.rows[rows]
    )


def mapped(tasks, adapted=lambda h: h, pretrained=lambda h: h, weight=lambda w: w):
    """Returns the tasks with all features and weights transformed."""
    return [
        task._replace(
            adapted=adapted(task.adapted),
            pretrained=pretrained(task.pretrained),
            weight=weight(task.weight),
        )
        for task in tasks
    ]


def head_of(task, kind):
    """Returns the task's head of a kind for the package."""
    return {
        "linear": lambda: heads.LinearHead(task.weight, task.bias),
        "normalised_linear": lambda: heads.NormalisedLinearHead(3.0 * task.weight, task.bias),
        "cosine": lambda: heads.CosineHead(task.weight, 7.0),
        "nearest_mean": lambda: heads.NearestMeanHead(task.weight),
    }[kind]()


def fit(calibrator, tasks, kind="linear", dual=True, previous=None):
    """Fits a calibrator to further tasks and finalizes it; returns it.

    `previous` are, task by task, the adapted features of the encoder before, where it reads them.
    """
    for number, task in enumerate(tasks):
        before = {"previous": previous[number]} if previous else {}
        pretrained = task.pretrained if dual else None
        head = head_of(task, kind)
        calibrator.fit_task(task.adapted, task.labels, head, pretrained, task.classes, **before)
    calibrator.finalize()
    return calibrator


def fitted(tasks, kind="linear", dual=True, previous=None, method="fdc", **settings):
    """Returns a finalized calibrator of the package."""
    return fit(calibration.make(method, **settings), tasks, kind, dual, previous)


def previous_of(tasks, seed=7):
    """Returns features of every task's samples by an encoder unlike the task's own."""
    rng = np.random.default_rng(seed)
    previous = [None]
    for task in tasks[1:]:
        width = task.adapted.shape[1]
        matrix = np.eye(width) + 0.1 * rng.normal(size=(width, width))
        noise = 0.1 * rng.normal(size=task.adapted.shape)
        previous.append((task.adapted @ matrix + 0.4 + noise).astype(np.float32))
    return previous


def fitted_reference(tasks, kind="linear", dual=True, **settings):
    """Returns the reference on the same tasks with the same settings."""
    inputs = []
    for task in tasks:
        head = head_of(task, kind)
        bias, scale = getattr(head, "bias", None), getattr(head, "scale", 1.0)
        head = reference.Head(kind, head[0], bias, scale)
        inputs.append((task.adapted, task.rows, head, task.pretrained if dual else None))
    return reference.Reference(inputs, **settings)


def relative_error(actual, expected):
    """Returns the largest difference divided by the standard deviation of what is expected."""
    expected = np.asarray(expected)
    return float(np.abs(actual - expected).max() / max(expected.std(), 1e-3))


def same_scores(actual, expected, inputs):
    """Asserts that two calibrators score inputs the same, bit for bit."""
    scores, wanted = actual.score(*inputs), expected.score(*inputs)
    np.testing.assert_array_equal(scores.task_scores, wanted.task_scores)
    np.testing.assert_array_equal(scores.label, wanted.label)
