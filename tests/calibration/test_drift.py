"""The affine map between two encoders against plain float64 linear algebra."""

import numpy as np
import pytest

from fdc_jax.calibration import drift


def pair(seed=0, count=40, width=6, noise=0.3, shift=1.0):
    """Features by two encoders that differ by an affine map and noise."""
    rng = np.random.default_rng(seed)
    before = rng.normal(size=(count, width)) @ np.diag(np.linspace(2, 0.3, width)) + 3
    matrix = np.eye(width) + 0.4 * rng.normal(size=(width, width))
    after = before @ matrix + shift * rng.normal(size=width) + noise * rng.normal(size=before.shape)
    return before.astype(np.float32), after.astype(np.float32)


def map_without(before, after, ridge, out):
    """Returns matrix and offset by the formula without the images `out`, and the errors on these.

    The level of the ridge is that of all images, as in the closed form.
    """
    before, after = before.astype(np.float64), after.astype(np.float64)
    width = before.shape[1]
    level = ridge * ((before - before.mean(axis=0)) ** 2).sum() / width
    mean, mean_after = before[~out].mean(axis=0), after[~out].mean(axis=0)
    centred = before[~out] - mean
    matrix = np.eye(width)
    if np.isfinite(ridge):
        gram = centred.T @ centred + level * np.eye(width)
        matrix += np.linalg.solve(gram, centred.T @ (after[~out] - mean_after - centred))
    offset = mean_after - mean @ matrix
    return matrix, offset, after[out] - before[out] @ matrix - offset


def assert_map_of_all(actual, before, after, atol=2e-6, offset_atol=2e-6):
    matrix, offset, _ = map_without(before, after, actual.ridge, np.zeros(len(before), bool))
    np.testing.assert_allclose(actual.matrix, matrix, atol=atol)
    np.testing.assert_allclose(actual.offset, offset, atol=offset_atol)


def leave_one_out_errors(before, after):
    """Returns the squared errors, summed over images, by ridge."""
    errors = []
    for ridge in drift.RIDGES:
        rows = np.eye(len(before), dtype=bool)
        errors.append([map_without(before, after, ridge, row)[2] for row in rows])
    return np.square(errors).sum(axis=(1, 2, 3))


@pytest.mark.parametrize(("count", "width"), [(40, 6), (5, 8), (100, 3)])
def test_the_ridge_has_the_least_leave_one_out_error(count, width):
    before, after = pair(1, count, width, noise=1.0)
    actual = drift.fit_map(before, after)
    errors = leave_one_out_errors(before, after)
    assert actual.ridge == drift.RIDGES[int(np.argmin(errors))]
    np.testing.assert_allclose(np.trace(actual.residual), min(errors) / count, rtol=1e-5)
    assert_map_of_all(actual, before, after)


def test_equal_images_give_a_shift():
    before = np.full((2, 4), 2.0, np.float32)
    actual = drift.fit_map(before, before + np.arange(4, dtype=np.float32))
    np.testing.assert_array_equal(actual.matrix, np.eye(4))
    np.testing.assert_array_equal(actual.offset, np.arange(4))


@pytest.mark.parametrize(
    ("count", "width", "number"),
    [(60, 6, 3), (12, 20, 3), (600, 4, 3), (120, 6, 40)],
)
def test_class_errors_are_of_maps_without_these_classes(count, width, number, monkeypatch):
    monkeypatch.setattr(drift, "MAX_IMAGES", 200)
    monkeypatch.setattr(drift, "MAX_IMAGES_PER_CLASS", count)
    before, after = pair(6, count, width, noise=1.0)
    classes = np.arange(count) * number // count
    after += (classes / number)[:, None] * np.linspace(0.0, 1.5, width, dtype=np.float32)
    actual = drift.fit_map(before, after, classes=classes)
    expected = []
    for of in np.linspace(0, number - 1, min(number, 16)).astype(int):
        errors = map_without(before, after, actual.ridge, classes == of)[2]
        expected.append(errors.mean(axis=0))
    np.testing.assert_allclose(actual.class_errors, expected, atol=2e-4)
    # Forty classes lie further apart, so that their offset is rounded more.
    assert_map_of_all(actual, before, after, offset_atol=4e-6 if number == 40 else 2e-6)
    for alone in (None, np.zeros(count, int)):
        assert drift.fit_map(before, after, classes=alone).class_errors.shape == (0, width)


@pytest.mark.parametrize("count", [40, 100])
def test_ridges_are_compared_in_few_directions(count):
    before, after = pair(5, count, width=80, noise=0.3)
    actual = drift.fit_map(before, after)
    errors = leave_one_out_errors(before, after)
    assert min(errors) < 0.9 * errors[-1]
    assert np.trace(actual.residual) < 1.01 * min(errors) / count
    assert_map_of_all(actual, before, after, atol=2e-5, offset_atol=2e-4)
