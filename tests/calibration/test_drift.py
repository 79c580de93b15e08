"""The affine map between two encoders against plain float64 linear algebra."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fdc_jax.calibration import drift
from fdc_jax.calibration.gaussians import ViewClasses


def pair(seed=0, count=40, width=6, noise=0.3, shift=1.0):
    """Features by two encoders that differ by an affine map and noise."""
    rng = np.random.default_rng(seed)
    before = rng.normal(size=(count, width)) @ np.diag(np.linspace(2, 0.3, width)) + 3
    matrix = np.eye(width) + 0.4 * rng.normal(size=(width, width))
    after = before @ matrix + shift * rng.normal(size=width) + noise * rng.normal(size=before.shape)
    return before.astype(np.float32), after.astype(np.float32)


def by_hand(before, after, ridge):
    """The formula of the module's docstring, solved as it stands: matrix and offset."""
    before, after = before.astype(np.float64), after.astype(np.float64)
    centred = before - before.mean(axis=0)
    change = after - after.mean(axis=0) - centred
    width = before.shape[1]
    delta = np.zeros((width, width))
    if np.isfinite(ridge):
        gram = centred.T @ centred
        delta = np.linalg.solve(
            gram + ridge * np.trace(gram) / width * np.eye(width), centred.T @ change
        )
    matrix = np.eye(width) + delta
    return matrix, after.mean(axis=0) - before.mean(axis=0) @ matrix


def leave_one_out_error(before, after, ridge):
    """Leave-one-out error by solving for the map once for every image.

    The level of the ridge is that of all images, as in the closed form; the intercept is fitted
    together with the map on the images that are left.
    """
    before, after = before.astype(np.float64), after.astype(np.float64)
    count, width = before.shape
    centred = before - before.mean(axis=0)
    level = ridge * (centred**2).sum() / width
    error = 0.0
    for row in range(count):
        rest = np.arange(count) != row
        x = before[rest] - before[rest].mean(axis=0)
        r = after[rest] - before[rest]
        mean = r.mean(axis=0)
        delta = np.zeros((width, width))
        if np.isfinite(ridge):
            delta = np.linalg.solve(x.T @ x + level * np.eye(width), x.T @ (r - mean))
        guess = mean + (before[row] - before[rest].mean(axis=0)) @ delta
        error += ((after[row] - before[row] - guess) ** 2).sum()
    return error


@pytest.mark.parametrize(("count", "width"), [(40, 6), (5, 8), (200, 3)])
def test_the_ridge_has_the_least_leave_one_out_error(count, width):
    before, after = pair(1, count, width, noise=1.0)
    actual = drift.fit_map(before, after)
    errors = [leave_one_out_error(before, after, ridge) for ridge in drift.RIDGES]
    assert actual.ridge == drift.RIDGES[int(np.argmin(errors))]
    np.testing.assert_allclose(np.trace(actual.residual), min(errors) / count, rtol=1e-5)
    matrix, offset = by_hand(before, after, actual.ridge)
    np.testing.assert_allclose(actual.matrix, matrix, atol=2e-6)
    np.testing.assert_allclose(actual.offset, offset, atol=2e-6)


def test_a_change_without_noise_takes_the_least_ridge():
    before, after = pair(2, count=400, noise=0.0)
    assert drift.fit_map(before, after).ridge == min(drift.RIDGES)
    same = drift.fit_map(before, before)
    np.testing.assert_array_equal(same.matrix, np.eye(before.shape[1]))


@pytest.mark.parametrize("count", [1, 2])
def test_equal_images_give_a_shift(count):
    before = np.full((count, 4), 2.0, np.float32)
    actual = drift.fit_map(before, before + np.arange(4, dtype=np.float32))
    np.testing.assert_array_equal(actual.matrix, np.eye(4))
    np.testing.assert_array_equal(actual.offset, np.arange(4))


def left_out_class_error(before, after, ridge, out):
    """The mean error on images that had no part in the map, level of the ridge as above."""
    before, after = before.astype(np.float64), after.astype(np.float64)
    level = ridge * ((before - before.mean(axis=0)) ** 2).sum() / before.shape[1]
    mean, shift = before[~out].mean(axis=0), (after - before)[~out].mean(axis=0)
    x, r = before[~out] - mean, (after - before)[~out] - shift
    delta = np.linalg.solve(x.T @ x + level * np.eye(x.shape[1]), x.T @ r)
    return ((after - before)[out] - shift - (before[out] - mean) @ delta).mean(axis=0)


@pytest.mark.parametrize(("count", "width"), [(60, 6), (12, 20), (3 * drift.MAX_IMAGES, 4)])
def test_class_errors_are_of_maps_without_these_classes(count, width, monkeypatch):
    monkeypatch.setattr(drift, "MAX_IMAGES_PER_CLASS", count)
    before, after = pair(6, count, width, noise=1.0)
    classes = np.arange(count) * 3 // count
    after += classes[:, None] * np.linspace(0.0, 0.5, width, dtype=np.float32)
    actual = drift.fit_map(before, after, classes=classes)
    expected = [left_out_class_error(before, after, actual.ridge, classes == c) for c in range(3)]
    np.testing.assert_allclose(actual.class_errors, expected, atol=2e-4)
    matrix, _ = by_hand(before, after, actual.ridge)
    np.testing.assert_allclose(actual.matrix, matrix, atol=2e-6)
    for alone in (None, np.zeros(count, int)):
        assert drift.fit_map(before, after, classes=alone).class_errors.shape == (0, width)


def test_of_many_classes_sixteen_have_errors():
    before, after = pair(7, count=120)
    classes = np.arange(120) % 40
    actual = drift.fit_map(before, after, classes=classes)
    assert actual.class_errors.shape == (16, 6)
    first, last = (left_out_class_error(before, after, actual.ridge, classes == c) for c in (0, 39))
    np.testing.assert_allclose(actual.class_errors[[0, -1]], [first, last], atol=1e-4)


@pytest.mark.parametrize("count", [40, 150])
def test_ridges_are_compared_in_few_directions(count):
    before, after = pair(5, count, width=80, noise=0.3)
    actual = drift.fit_map(before, after)
    errors = [leave_one_out_error(before, after, ridge) for ridge in drift.RIDGES]
    assert min(errors) < 0.9 * errors[-1]
    assert np.trace(actual.residual) < 1.01 * min(errors) / count
    matrix, _ = by_hand(before, after, actual.ridge)
    np.testing.assert_allclose(actual.matrix, matrix, atol=2e-5)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), count=st.integers(2, 30), width=st.integers(1, 7))
def test_moved_statistics_are_those_of_moved_features(seed, count, width):
    by = drift.fit_map(*pair(seed, count, width))
    features = np.random.default_rng(seed + 1).normal(size=(11, width))

    def classes(rows):
        mean = rows.mean(axis=0)
        factor = rows - mean
        parts = mean[None], factor[None], factor.T @ factor
        return ViewClasses(*(part.astype(np.float32) for part in parts))

    expected = classes(by.move(features))
    expected = expected._replace(scatter=expected.scatter + 11 * by.residual)
    scale = 1.0 + np.abs(by.matrix).max() ** 2 + np.abs(by.residual).max()
    for part, wanted in zip(classes(features).move(by, 11), expected, strict=True):
        np.testing.assert_allclose(part, wanted, atol=1e-4 * scale)
