"""Class Gaussians against plain float64 NumPy by explicit formulas, and what they cost."""

import tracemalloc

import numpy as np
import pytest

from fdc_jax import calibration
from fdc_jax.calibration import confidence, drift, gaussians
from fdc_jax.errors import InputError
from tests.calibration import streams


def unit(features):
    """Features of unit length, which all formulas below are of."""
    features = np.asarray(features, np.float64)
    return features / np.linalg.norm(features, axis=1, keepdims=True)


def fitted(tasks, previous=None, dual=True):
    return streams.fitted(tasks, dual=dual, previous=previous, method="gaussians")


def shared_covariance(scatter, images, classes):
    """What all classes share, with its ridge."""
    shared, width = scatter / images, len(scatter)
    ridge = 0.1 + width / (images - classes)
    return 0.9 * shared + ridge * np.trace(shared) / width * np.eye(width)


def scatter_of(features, labels):
    """Sum of the squares within classes."""
    rows, labels = np.concatenate(features), np.concatenate(labels)
    names, places = np.unique(labels, return_inverse=True)
    means = np.stack([rows[labels == c].mean(axis=0) for c in names])
    return means, (rows - means[places]).T @ (rows - means[places])


def view_scores(features, labels, factors, unexplained, inputs):
    """Class scores of one view: minus half the squared Mahalanobis distances, in float64.

    `features` and `labels` are those of all tasks, `factors` of each class, and `unexplained` is
    what maps left over, summed over images.
    """
    means, scatter = scatter_of(features, labels)
    base = shared_covariance(scatter + unexplained, sum(map(len, labels)), len(means))
    scores = []
    for mean, factor in zip(means, factors, strict=True):
        near = unit(inputs) - mean
        inverse = np.linalg.inv(base + 0.1 * factor.T @ factor)
        scores.append(-0.5 * np.einsum("nd,de,ne->n", near, inverse, near))
    return np.stack(scores, axis=1)


def factors_of(features, labels):
    """The eight leading principal directions of each class, as long as standard deviations."""
    found = []
    for c in np.unique(labels):
        own = features[labels == c]
        values, vectors = np.linalg.eigh(np.cov(own.T, bias=True))
        kept = np.argsort(values)[::-1][: min(8, len(own) - 1, len(values))]
        found.append((vectors[:, kept] * np.sqrt(np.maximum(values[kept], 0))).T)
    return found


def expected_scores(tasks, previous, adapted, pretrained=None):
    """Class scores by view, and the mean of s; features and factors go along with every map."""
    labels, features, factors = [task.labels for task in tasks], [], []
    unexplained, images, stale = 0.0, 0, []
    for t, (task, before) in enumerate(zip(tasks, previous or [None] * len(tasks), strict=True)):
        if before is not None:
            by = drift.fit_map(unit(before), unit(task.adapted), classes=task.rows)
            features = [by.move(each) for each in features]
            factors = [factor @ by.matrix for factor in factors]
            unexplained = by.matrix.T @ unexplained @ by.matrix if np.ndim(unexplained) else 0.0
            unexplained = unexplained + images * by.residual
            means, scatter = scatter_of(features, labels[:t])
            inverse = np.linalg.inv(shared_covariance(scatter + unexplained, images, len(means)))
            added = np.einsum("cd,de,ce->c", by.class_errors, inverse, by.class_errors).mean()
            stale = [each + added for each in stale]
        stale += [0.0] * len(np.unique(task.labels))
        features.append(unit(task.adapted))
        factors += factors_of(features[-1], task.labels)
        images += len(task.labels)
    raised = np.log(1 + np.array(stale) / 4)
    found = {"adapted": view_scores(features, labels, factors, unexplained, adapted) + raised}
    if pretrained is not None:
        own = [unit(task.pretrained) for task in tasks]
        still = [
            f for rows, task in zip(own, tasks, strict=True) for f in factors_of(rows, task.labels)
        ]
        found["pretrained"] = view_scores(own, labels, still, 0.0, pretrained)
    return found, np.mean(stale)


def assert_same_but_for_a_shift(found, expected):
    """Every input may have a constant of its own, which all classes share."""
    difference = found - expected
    spread = difference - difference.mean(axis=1, keepdims=True)
    assert np.abs(spread).max() < 2e-3 * np.std(expected - expected.mean(axis=1, keepdims=True))
    np.testing.assert_array_equal(found.argmax(axis=1), expected.argmax(axis=1))


@pytest.mark.parametrize("follows", [True, False])
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_scores_are_those_of_gaussians_by_hand(offset, follows):
    tasks = streams.stream(3, 3, offset=offset)
    previous = streams.previous_of(tasks) if follows else None
    found, inputs = fitted(tasks, previous), streams.probe_inputs(tasks)
    expected, stale = expected_scores(tasks, previous, *inputs)
    # Where the adapted statistics stayed behind, the pretrained view counts fully.
    share = (1 + stale / 20) / 4 if follows else 1.0
    total = expected["adapted"] + share * expected["pretrained"]
    scores = found.class_scores(*inputs)
    assert_same_but_for_a_shift(scores, total)
    for name, alone in expected.items():
        label = found.components(*inputs)[f"{name}_view"].label
        np.testing.assert_array_equal(label, alone.argmax(axis=1))
    tasks_scores = found.score(*inputs)
    np.testing.assert_array_equal(tasks_scores.label, total.argmax(axis=1))
    parts = np.split(scores, np.cumsum([len(each) for each in found.classes])[:-1], axis=1)
    best = np.stack([part.max(axis=1) for part in parts], axis=1)
    np.testing.assert_array_equal(tasks_scores.task_scores, best)


@pytest.mark.parametrize("width", [5, 200])
def test_few_and_many_images_per_class_in_one_view(width):
    tasks = streams.stream(4, 3, width=width)
    inputs = streams.probe_inputs(tasks)[0]
    found = fitted(tasks, dual=False)
    assert_same_but_for_a_shift(
        found.class_scores(inputs), expected_scores(tasks, None, inputs)[0]["adapted"]
    )
    assert found.components(inputs).keys() == {"full"}


def test_the_pretrained_view_alone_is_that_of_a_frozen_encoder():
    tasks = streams.stream(3, 3)
    adapted, pretrained = streams.probe_inputs(tasks)
    found, frozen = gaussians.Gaussians("pretrained"), gaussians.Gaussians()
    for task in tasks:  # The views may have different widths.
        found.fit_task(task.adapted[:, 1:], task.labels, pretrained=task.pretrained)
        before = task.pretrained if frozen.num_tasks else None
        frozen.fit_task(task.pretrained, task.labels, previous=before)
    scores = found.class_scores(adapted[:, 1:], pretrained)
    np.testing.assert_array_equal(scores, frozen.class_scores(pretrained))
    assert found.storage_bytes == frozen.storage_bytes and found.note == ""
    with pytest.raises(InputError, match="missing, which gaussians reads"):
        gaussians.Gaussians("pretrained").fit_task(tasks[0].adapted, tasks[0].labels)


def test_without_drift_nothing_moves_and_with_it_standing_still_is_worse():
    tasks = streams.stream(5, 3)
    still = fitted(tasks, [None, *(t.adapted for t in tasks[1:])])
    own = np.concatenate(
        [[unit(t.adapted[t.labels == c]).mean(axis=0) for c in np.unique(t.labels)] for t in tasks]
    )
    np.testing.assert_allclose(still.views[0].means, own, atol=1e-5)
    # Every task turns all features a little further. Task t's images by E_s are turned s - t times
    # more than at their own time.
    angle = 0.45
    turn = np.eye(16, dtype=np.float32)
    corner = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
    for i in range(0, 16, 2):
        turn[i : i + 2, i : i + 2] = corner
    back = np.linalg.inv(turn)
    previous = [None, *((t.adapted @ back).astype(np.float32) for t in tasks[1:])]
    turned = [t.adapted @ np.linalg.matrix_power(turn, 2 - i) for i, t in enumerate(tasks)]
    test, labels = np.concatenate(turned), np.concatenate([t.labels for t in tasks])

    def right(before):
        return (fitted(tasks, before, dual=False).score(test).label == labels).mean()

    assert right(previous) > 0.99 > 0.97 > right(None)


def test_classes_without_images_and_single_images():
    first, second = tasks = streams.stream(8, 2, classes=(3, 2), samples=(40, 30))
    keep = first.rows != 2
    keep[np.flatnonzero(first.rows == 1)[1:]] = False  # One image of class 1, none of class 2.
    found = calibration.Gaussians()
    views = first.adapted[keep], first.labels[keep], None, first.pretrained[keep]
    found.fit_task(*views, classes=[0, 1, 2])
    found.fit_task(second.adapted, second.labels, None, second.pretrained, None, second.adapted)
    inputs = streams.probe_inputs(tasks)
    scores = found.class_scores(*inputs)
    assert np.isneginf(scores[:, 2]).all() and np.isfinite(np.delete(scores, 2, axis=1)).all()
    assert 2 not in found.score(*inputs).label
    np.testing.assert_array_equal(found.views[0].factors[1:3], 0)
    # Nothing varies: distances are Euclidean.
    constant = calibration.Gaussians()
    constant.fit_task(first.adapted[:2], [4, 7])
    np.testing.assert_array_equal(constant.score(first.adapted[:2]).label, [4, 7])


@pytest.mark.parametrize("seed", range(20))
def test_classes_of_two_images_leave_one_of_each_to_measure_with(seed):
    features = np.random.default_rng(seed).normal(size=(8, 16)).astype(np.float32)
    fitted = gaussians.Gaussians()
    fitted.fit_task(features, np.repeat(np.arange(4), 2))
    fitted.finalize()
    np.testing.assert_array_equal(fitted.score(features).label, np.repeat(np.arange(4), 2))


def test_storage_counts_means_factors_and_half_of_a_symmetric_scatter():
    tasks, classes = streams.stream(2, 3), 9
    numbers = [classes * d * (1 + gaussians.RANK) + d * (d + 1) // 2 for d in (16, 12)]
    stale = len(tasks)
    # Losses, wrong and all answers, familiarity and class of all images, gains of the newest task.
    sure = len(confidence.TEMPERATURES) + 2 + 2 * sum(len(task.rows) for task in tasks)
    sure += len(tasks[-1].rows)
    assert fitted(tasks).storage_bytes == 4 * (sum(numbers) + classes + stale + sure)
    assert fitted(tasks, dual=False).storage_bytes == 4 * (numbers[0] + classes + stale + sure)


def test_a_tasks_features_are_not_held_while_fitting(tmp_path):
    rng, labels = np.random.default_rng(0), np.repeat(np.arange(40), 2500)
    for name in ("adapted", "previous"):
        np.save(tmp_path / f"{name}.npy", rng.normal(size=(len(labels), 64)).astype(np.float32))
    features, previous = (
        np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in ("adapted", "previous")
    )
    found = calibration.Gaussians()
    found.fit_task(features, labels + 100)
    tracemalloc.start()
    try:
        found.fit_task(features, labels, previous=previous)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Left-out images of the map, one class and some blocks in float64, but not all images.
    assert peak < features.nbytes / 2


def test_previous_features_that_do_not_fit_change_nothing():
    tasks = streams.stream(1, 2)
    found = fitted(tasks[:1])
    known = found.views
    with pytest.raises(
        InputError, match=r"^previous features of task 1 \(from 0\): expected 45 rows like"
    ):
        streams.fit(found, tasks[1:], previous=[np.zeros((5, 16), np.float32)])
    assert found.num_tasks == 1 and found.views is known and found.compensated is None


@pytest.mark.parametrize("first", [True, False])
def test_previous_features_come_for_all_tasks_or_for_none(first):
    tasks = streams.stream(1, 3)
    previous = streams.previous_of(tasks)
    found = fitted(tasks[:2], previous[:2] if first else None)
    with pytest.raises(InputError, match=r"^previous features of task 2 \(from 0\): .* or of none"):
        streams.fit(found, tasks[2:], previous=None if first else previous[2:])
    assert found.num_tasks == 2


@pytest.mark.parametrize("view", ["adapted", "both", None])
def test_unknown_views(view):
    with pytest.raises(InputError, match="gaussians: view: expected '' or 'pretrained', found"):
        gaussians.Gaussians(view)


def test_images_without_variation_move_the_classes():
    tasks = streams.stream(6, 3)
    found = fitted(tasks[:2], streams.previous_of(tasks[:2]))
    flat = np.zeros_like(tasks[2].adapted) + tasks[2].adapted[0]
    streams.fit(found, [tasks[2]._replace(adapted=flat)], previous=[tasks[2].adapted])
    assert np.isfinite(found.class_scores(*streams.probe_inputs(tasks))).all()


@pytest.mark.parametrize("width", [5, 36, 200])
def test_held_out_images_have_no_part_in_the_statistics_without_them(monkeypatch, width):
    monkeypatch.setattr(gaussians.inputs, "BLOCK_ROWS", 64)
    (task,) = streams.stream(2, 1, width=width, classes=(3,), samples=(120,))
    held = confidence.held_out(task.rows)
    kept, every = gaussians.fit_classes(task.adapted, task.rows, 3, held)
    for found, chosen in ((kept, ~held), (every, held | True)):
        features, labels = unit(task.adapted[chosen]), task.rows[chosen]
        means, scatter = scatter_of([features], [labels])
        np.testing.assert_allclose(found.means, means, atol=1e-6)
        np.testing.assert_allclose(found.scatter, scatter, atol=1e-5)
        for factor, expected in zip(found.factors, factors_of(features, labels), strict=True):
            np.testing.assert_allclose(factor.T @ factor, expected.T @ expected, atol=1e-5)
