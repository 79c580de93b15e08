"""Means that move with the features near them."""

import numpy as np
import pytest

from fdc_jax.learners import rsiat
from tests.learners import rsiat_reference


def problem(seed=0, classes=4, images=9, width=6):
    rng = np.random.default_rng(seed)
    means, before = rng.normal(size=(classes, width)), rng.normal(size=(images, width))
    return means, before, before + 0.5 * rng.normal(size=before.shape)


@pytest.mark.parametrize("width", [0.3, 1.0, 4.0])
def test_against_its_formula(width):
    means, before, after = problem()
    expected = rsiat_reference.moved_means(means, before, after, width)
    assert np.abs(expected - means).max() > 0.1
    found = rsiat.moved_means(means, before, after, width)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_a_drift_common_to_all_images_is_that_of_every_mean():
    means, before, _ = problem()
    common = np.linspace(-1, 1, means.shape[1])
    found = rsiat.moved_means(means, before, before + common, 0.5)
    np.testing.assert_allclose(found - means, np.tile(common, (len(means), 1)), rtol=1e-9)


def test_an_encoder_that_stayed_moves_nothing():
    means, before, _ = problem()
    np.testing.assert_array_equal(rsiat.moved_means(means, before, before, 1.0), means)


def test_only_the_pairing_counts_not_the_order():
    means, before, after = problem()
    order = np.random.default_rng(1).permutation(len(before))
    found = rsiat.moved_means(means, before, after, 1.0)
    together = rsiat.moved_means(means, before[order], after[order], 1.0)
    np.testing.assert_allclose(together, found, rtol=1e-9)
    broken = rsiat.moved_means(means, before, after[order], 1.0)
    assert np.abs(broken - found).max() > 0.01


def test_far_means_move_as_the_images_on_average():
    """The floor decides, however large the features are, and nothing under- or overflows."""
    means, before, after = problem()
    far = means + 1e3
    with np.errstate(all="raise", under="ignore"):
        found = rsiat.moved_means(far.astype(np.float32), before, after, 4.0)
    shift = np.mean(after - before, axis=0)
    np.testing.assert_allclose(found - far.astype(np.float32), np.tile(shift, (4, 1)), rtol=1e-6)


def test_a_mean_follows_its_own_image():
    means, before, after = problem(classes=1, images=2)
    before[0] = means[0]
    before[1] = means[0] + 50.0
    found = rsiat.moved_means(means, before, after, 1.0)
    np.testing.assert_allclose(found[0] - means[0], after[0] - before[0], rtol=1e-2)
