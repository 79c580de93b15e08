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


def left_out_error(before, after, ridge):
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
def test_the_map_is_the_ridge_of_least_left_out_error(count, width):
    before, after = pair(1, count, width, noise=1.0)
    found = drift.fit_map(before, after)
    errors = [left_out_error(before, after, ridge) for ridge in drift.RIDGES]
    assert found.ridge == drift.RIDGES[int(np.argmin(errors))]
    np.testing.assert_allclose(np.trace(found.residual), min(errors) / count, rtol=1e-5)
    matrix, offset = by_hand(before, after, found.ridge)
    np.testing.assert_allclose(found.matrix, matrix, atol=2e-6)
    np.testing.assert_allclose(found.offset, offset, atol=2e-6)


def test_an_affine_change_is_found_and_a_shift_is_left_a_shift():
    before, after = pair(2, count=400, noise=0.0)
    found = drift.fit_map(before, after)
    assert found.ridge == min(drift.RIDGES)
    before, _ = pair(3)
    shifted = drift.fit_map(before, before + np.float32(0.5))
    np.testing.assert_allclose(shifted.matrix, np.eye(before.shape[1]), atol=1e-5)
    np.testing.assert_allclose(shifted.offset, 0.5, atol=1e-4)
    same = drift.fit_map(before, before)
    np.testing.assert_array_equal(same.matrix, np.eye(before.shape[1]))


@pytest.mark.parametrize("count", [1, 2])
def test_few_or_equal_images_give_a_shift(count):
    before = np.full((count, 4), 2.0, np.float32)
    found = drift.fit_map(before, before + np.arange(4, dtype=np.float32))
    np.testing.assert_array_equal(found.matrix, np.eye(4))
    np.testing.assert_array_equal(found.offset, np.arange(4))


def test_many_images_count_for_the_map_and_some_for_its_ridge():
    before, after = pair(4, count=3 * drift.LEFT_OUT, width=3)
    found = drift.fit_map(before, after)
    np.testing.assert_allclose(found.matrix, by_hand(before, after, found.ridge)[0], atol=2e-6)


def left_out_class_error(before, after, ridge, out):
    """The mean error on images that had no part in the map, level of the ridge as above."""
    before, after = before.astype(np.float64), after.astype(np.float64)
    level = ridge * ((before - before.mean(axis=0)) ** 2).sum() / before.shape[1]
    mean, shift = before[~out].mean(axis=0), (after - before)[~out].mean(axis=0)
    x, r = before[~out] - mean, (after - before)[~out] - shift
    delta = np.linalg.solve(x.T @ x + level * np.eye(x.shape[1]), x.T @ r)
    return ((after - before)[out] - shift - (before[out] - mean) @ delta).mean(axis=0)


@pytest.mark.parametrize(("count", "width"), [(60, 6), (12, 20), (3 * drift.LEFT_OUT, 4)])
def test_errors_of_classes_left_out_are_those_of_a_map_without_them(count, width, monkeypatch):
    monkeypatch.setattr(drift, "OF_CLASS", count)
    before, after = pair(6, count, width, noise=1.0)
    classes = np.arange(count) * 3 // count
    after += classes[:, None] * np.linspace(0.0, 0.5, width, dtype=np.float32)
    found = drift.fit_map(before, after, classes=classes)
    expected = [left_out_class_error(before, after, found.ridge, classes == c) for c in range(3)]
    np.testing.assert_allclose(found.class_errors, expected, atol=2e-4)
    for alone in (None, np.zeros(count, int)):
        assert drift.fit_map(before, after, classes=alone).class_errors.shape == (0, width)


def test_of_many_classes_some_are_left_out():
    before, after = pair(7, count=120)
    classes = np.arange(120) % 40
    found = drift.fit_map(before, after, classes=classes)
    assert found.class_errors.shape == (16, 6)
    first, last = (left_out_class_error(before, after, found.ridge, classes == c) for c in (0, 39))
    np.testing.assert_allclose(found.class_errors[[0, -1]], [first, last], atol=1e-4)


@pytest.mark.parametrize("count", [40, 150])
def test_ridges_compared_in_few_directions_are_as_good(count):
    before, after = pair(5, count, width=80, noise=0.3)
    found = drift.fit_map(before, after)
    errors = [left_out_error(before, after, ridge) for ridge in drift.RIDGES]
    assert min(errors) < 0.9 * errors[-1]
    assert np.trace(found.residual) < 1.01 * min(errors) / count
    matrix, _ = by_hand(before, after, found.ridge)
    np.testing.assert_allclose(found.matrix, matrix, atol=2e-5)


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

    found, expected = classes(features).move(by, 11), classes(by.move(features))
    expected = expected._replace(scatter=expected.scatter + 11 * by.residual)
    scale = 1.0 + np.abs(by.matrix).max() ** 2 + np.abs(by.residual).max()
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4 * scale)
