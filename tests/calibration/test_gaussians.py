"""Class Gaussians that follow the encoder against plain float64 NumPy on moved features."""

import numpy as np
import pytest

from fdc_jax import calibration
from fdc_jax.calibration import drift, transported
from fdc_jax.calibration.components import TRANSPORTED, WHITENED
from fdc_jax.errors import InputError
from tests.calibration import streams


def previous_of(tasks, seed=7):
    """Features of every task's samples by an encoder that differs from the task's own."""
    rng = np.random.default_rng(seed)
    found = [None]
    for task in tasks[1:]:
        matrix = np.eye(task.adapted.shape[1]) + 0.1 * rng.normal(size=(task.adapted.shape[1],) * 2)
        noise = 0.1 * rng.normal(size=task.adapted.shape)
        found.append((task.adapted @ matrix + 0.4 + noise).astype(np.float32))
    return found


def moved(tasks, previous):
    """The adapted training features of all tasks, moved as the newest encoder would have them."""
    found = []
    for task, before in zip(tasks, previous, strict=True):
        if before is not None:
            by = drift.fit_map(before, task.adapted)
            found = [by.move(each) for each in found]
        found.append(task.adapted.astype(np.float64))
    return found


def distances(tasks, features, added):
    """The covariance that all classes share, and of each class label, mean and deviations.

    `added` is what maps left unexplained, summed over images.
    """
    width, labels = features[0].shape[1], np.concatenate([task.labels for task in tasks])
    rows = np.concatenate(features).astype(np.float64)
    names = np.unique(labels)
    means = np.stack([rows[labels == c].mean(axis=0) for c in names])
    dev = rows - means[np.searchsorted(names, labels)]
    shared = (dev.T @ dev + added) / len(rows)
    ridge = 0.1 + width / (len(rows) - len(names))
    base = 0.9 * shared + ridge * np.trace(shared) / width * np.eye(width)
    scores = []
    for c, mean in zip(names, means, strict=True):
        own = dev[labels == c]
        # The leading directions are those of the covariance that the class had when it was learned.
        scores.append((c, mean, own))
    return base, scores


def expected(tasks, previous, adapted, pretrained):
    """Class scores by both views from moved features; each class's factor is moved, too."""
    total = 0.0
    views = [
        (moved(tasks, previous), [t.adapted for t in tasks], previous, adapted, 1.0),
        ([t.pretrained for t in tasks], [t.pretrained for t in tasks], None, pretrained, 0.5),
    ]
    for features, at_the_time, before, inputs, weight in views:
        unexplained, images = np.zeros((inputs.shape[1],) * 2), 0
        for task, x in zip(tasks, before or [], strict=False):
            if x is not None:
                by = drift.fit_map(x, task.adapted)
                unexplained = by.move_scatter(unexplained) + images * by.residual
            images += len(task.labels)
        base, classes = distances(tasks, features, unexplained)
        columns = []
        for c, mean, _ in classes:
            t = next(i for i, task in enumerate(tasks) if c in task.labels)
            own = at_the_time[t][tasks[t].labels == c].astype(np.float64)
            values, vectors = np.linalg.eigh(np.cov(own.T, bias=True))
            kept = np.argsort(values)[::-1][: min(8, len(own) - 1, len(values))]
            factor = (vectors[:, kept] * np.sqrt(np.maximum(values[kept], 0))).T
            for later in range(t + 1, len(tasks) if before else 0):
                factor = factor @ drift.fit_map(before[later], tasks[later].adapted).matrix
            near = inputs.astype(np.float64) - mean
            inverse = np.linalg.inv(base + 0.1 * factor.T @ factor)
            columns.append(-0.5 * np.einsum("nd,de,ne->n", near, inverse, near))
        total = total + weight * np.stack(columns, axis=1)
    return total


@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_scores_are_those_of_gaussians_on_moved_features(device, offset):
    tasks = streams.stream(3, 3, offset=offset)
    previous = previous_of(tasks)
    calibrator = streams.fitted(tasks, device=device, previous=previous, **TRANSPORTED)
    inputs = streams.probe_inputs(tasks)
    found = calibrator.score(*inputs)
    scores = expected(tasks, previous, *inputs)
    ends = np.cumsum([len(each) for each in calibrator.classes])[:-1]
    by_task = np.stack([part.max(axis=1) for part in np.split(scores, ends, axis=1)], axis=1)
    # Up to what all tasks share.
    difference = found.task_scores - by_task
    spread = difference - difference.mean(axis=1, keepdims=True)
    assert np.abs(spread).max() < 2e-3 * np.abs(by_task).std()
    np.testing.assert_array_equal(found.label, scores.argmax(axis=1))


def test_without_drift_nothing_moves_and_without_transport_it_would_be_worse():
    tasks = streams.stream(5, 3)
    still = streams.fitted(tasks, previous=[None, *(t.adapted for t in tasks[1:])], **TRANSPORTED)
    own = np.concatenate(
        [[t.adapted[t.labels == c].mean(axis=0) for c in np.unique(t.labels)] for t in tasks]
    )
    np.testing.assert_allclose(still.gaussians[0].means, own, atol=1e-5)
    # Every task turns all features a little further. Task t's images by E_s are turned s - t times
    # more than at their own time.
    angle = 0.35
    turn = np.eye(16, dtype=np.float32)
    for i in range(0, 16, 2):
        turn[i : i + 2, i : i + 2] = [
            [np.cos(angle), -np.sin(angle)],
            [np.sin(angle), np.cos(angle)],
        ]
    back = np.linalg.inv(turn)
    previous = [None, *((t.adapted @ back).astype(np.float32) for t in tasks[1:])]
    test = np.concatenate(
        [t.adapted @ np.linalg.matrix_power(turn, 2 - i) for i, t in enumerate(tasks)]
    ).astype(np.float32)
    labels = np.concatenate([t.labels for t in tasks])

    def right(before):
        fitted = streams.fitted(tasks, dual=False, previous=before, **TRANSPORTED)
        return (fitted.score(test).label == labels).mean()

    stale = right([None, *(t.adapted for t in tasks[1:])])
    assert right(previous) > 0.99 > 0.97 > stale


def test_the_papers_scores_and_the_whitened_ones_stand_beside():
    tasks = streams.stream(4, 3)
    inputs = streams.probe_inputs(tasks)
    both = streams.fitted(tasks, previous=previous_of(tasks), **TRANSPORTED, **WHITENED).terms(
        *inputs
    )
    paper = streams.fitted(tasks).terms(*inputs)
    whitened = streams.fitted(tasks, **WHITENED).terms(*inputs)
    np.testing.assert_array_equal(both.fuse().task_scores, paper.fuse().task_scores)
    assert sorted(both.beyond()) == ["transported", "whitened"]
    np.testing.assert_array_equal(
        both.beyond()["whitened"]["full"].task_scores, whitened.scores().task_scores
    )
    views = both.beyond()["transported"]
    np.testing.assert_array_equal(views["full"].task_scores, both.scores().task_scores)
    assert sorted(views) == ["adapted_view", "full", "pretrained_view", "raw"]
    assert (both.scores(False, False).task_scores == 0).all()


def test_statistics_do_not_depend_on_how_a_source_is_cut():
    tasks = streams.stream(6, 2)
    previous = previous_of(tasks)
    whole = streams.fitted(tasks, previous=previous, **TRANSPORTED)
    pieces = streams.new(**TRANSPORTED)
    for task, before in zip(tasks, previous, strict=True):

        def chunks(task=task):
            for start in range(0, len(task.labels), 7):
                rows = slice(start, start + 7)
                yield task.adapted[rows], task.pretrained[rows], task.labels[rows]

        pieces.fit_task(chunks, None, streams.head_of(task, "linear"), previous=before)
    pieces.finalize()
    for found, known in zip(pieces.gaussians, whole.gaussians, strict=True):
        for part, other in zip(found, known, strict=True):
            np.testing.assert_allclose(part, other, atol=1e-4)


def test_classes_without_images_and_single_images():
    tasks = streams.stream(8, 2, classes=(3, 2), samples=(40, 30))
    first = tasks[0]
    keep = first.rows != 2
    keep[np.flatnonzero(first.rows == 1)[1:]] = False  # One image of class 1, none of class 2.
    calibrator = streams.new(**TRANSPORTED)
    head = streams.head_of(first, "linear")
    calibrator.fit_task(
        first.adapted[keep], first.labels[keep], head, first.pretrained[keep], [0, 1, 2]
    )
    second = tasks[1]
    head = streams.head_of(second, "linear")
    calibrator.fit_task(
        second.adapted, second.labels, head, second.pretrained, previous=second.adapted
    )
    calibrator.finalize()
    found = calibrator.score(*streams.probe_inputs(tasks))
    assert np.isfinite(found.task_scores).all()
    assert 2 not in found.label
    np.testing.assert_array_equal(calibrator.gaussians[0].factors[1:3], 0)


def test_a_saved_calibrator_scores_the_same_and_takes_further_tasks(tmp_path):
    tasks = streams.stream(9, 4)
    previous, inputs = previous_of(tasks), streams.probe_inputs(tasks)
    part = streams.fitted(tasks[:2], previous=previous[:2], **TRANSPORTED)
    part.save(tmp_path / "part.npz")
    again = calibration.load(tmp_path / "part.npz").to_numpy()
    streams.same_scores(again, part, inputs)
    streams.fit(again, tasks[2:], previous=previous[2:])
    whole = streams.fitted(tasks, previous=previous, **TRANSPORTED)
    streams.same_scores(again, whole, inputs)
    arrays = dict(np.load(tmp_path / "part.npz"))
    arrays["adapted_moved_means"][0, 0] = np.nan
    np.savez(tmp_path / "part.npz", **arrays)
    with pytest.raises(InputError, match="adapted_moved_means: holds values that are not finite"):
        calibration.load(tmp_path / "part.npz")


def test_storage_counts_the_gaussians_of_views_in_use():
    tasks = streams.stream(2, 3)
    counted = streams.fitted(tasks, previous=previous_of(tasks), **TRANSPORTED)
    classes = 9
    numbers = [classes * d * (1 + transported.RANK) + d * (d + 1) // 2 for d in (16, 12)]
    assert counted.storage_bytes == 4 * (sum(numbers) + classes)
    one = streams.fitted(
        tasks, previous=previous_of(tasks), pretrained_view_weight=0, **TRANSPORTED
    )
    assert one.storage_bytes == 4 * (numbers[0] + classes)
    inputs = streams.probe_inputs(tasks)
    np.testing.assert_array_equal(
        one.score(inputs[0]).label, counted.terms(*inputs).scores(pretrained_view=False).label
    )


@pytest.mark.parametrize(
    ("before", "message"),
    [
        (None, "previous features of task 1: expected, since .* train_previous_1"),
        (np.zeros((5, 16), np.float32), "expected 45 rows like the adapted features, found 5"),
        (np.zeros((45, 3), np.float32), "expected width 16, found 3"),
        (np.full((45, 16), np.nan, np.float32), "row 0 is not finite"),
    ],
)
def test_previous_features_that_do_not_fit_change_nothing(before, message):
    tasks = streams.stream(1, 2)
    calibrator = streams.fitted(tasks[:1], previous=[None], **TRANSPORTED)
    known = calibrator.gaussians
    with pytest.raises(InputError, match=message):
        streams.fit(calibrator, tasks[1:], previous=[before])
    assert calibrator.num_tasks == 1
    assert calibrator.gaussians is known
