"""The CosFace loss against its formula in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdc_jax.learners import training
from fdc_jax.learners.training import cosface

MASK = np.array([True, True, True, False, False])
WEIGHTS = np.array([1, 1, 1, 1, 0, 0], np.float32)
LABELS = np.array([0, 2, 1, 2, 0, 0])


def random_cosines(seed=0):
    return jnp.asarray(np.random.default_rng(seed).uniform(-1, 1, (6, 5)), jnp.float32)


def reference(cosines, scale, margin):
    losses = []
    for row, label in zip(np.asarray(cosines, np.float64)[:4], LABELS[:4], strict=True):
        own = np.exp(scale * (row[label] - margin))
        others = sum(np.exp(scale * row[k]) for k in range(3) if k != label)
        losses.append(-np.log(own / (own + others)))
    return np.mean(losses)


@pytest.mark.parametrize(("scale", "margin"), [(30.0, 0.3), (20.0, 0.0), (1.0, 0.1)])
def test_against_its_formula(scale, margin):
    """Rows that are no classes and images of weight zero count for nothing."""
    cosines = random_cosines()
    found = cosface(cosines, LABELS, MASK, WEIGHTS, scale, margin)
    np.testing.assert_allclose(found, reference(cosines, scale, margin), rtol=1e-5)


def test_without_margin_it_is_the_cross_entropy_and_a_margin_raises_it():
    cosines = random_cosines()
    plain = training.cross_entropy(20.0 * cosines, LABELS, MASK, WEIGHTS)
    np.testing.assert_array_equal(cosface(cosines, LABELS, MASK, WEIGHTS, 20.0, 0.0), plain)
    losses = [float(cosface(cosines, LABELS, MASK, WEIGHTS, 20.0, m)) for m in (0.0, 0.1, 0.3)]
    assert losses[0] < losses[1] < losses[2]


def test_gradients_are_finite_and_miss_padding():
    found = jax.grad(lambda c: cosface(c, LABELS, MASK, WEIGHTS, 30.0, 0.3))(random_cosines())
    assert np.isfinite(found).all()
    np.testing.assert_array_equal(found[4:], 0)
    np.testing.assert_array_equal(found[:, 3:], 0)
    assert np.abs(np.asarray(found)[:4, :3]).min() > 0
