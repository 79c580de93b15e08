"""RSIAT's projector against its formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdc_jax.learners import rsiat
from tests.learners import rsiat_reference
from tests.learners.small_stream import float64, random_like


@pytest.fixture(scope="module")
def new():
    return rsiat.new_projector(jax.random.key(0), 100, 36)


@pytest.mark.parametrize("bounded", [True, False])
def test_against_its_formula(bounded):
    shapes = jax.eval_shape(lambda: rsiat.new_projector(jax.random.key(0), 12, 7))
    layers = random_like(shapes, 0)
    x = np.random.default_rng(1).normal(size=(5, 12))
    found = rsiat.project(layers, jnp.asarray(x, jnp.float32), bounded)
    expected = rsiat_reference.project(float64(layers), x, bounded)
    assert np.abs(expected - x).max() > 0.3
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_sizes_and_spread_of_a_new_one(new):
    assert [layer.weight.shape for layer in new] == [(100, 64), (64, 36), (36, 64), (64, 100)]
    for layer in new:
        inputs, outputs = layer.weight.shape
        assert layer.bias.shape == (outputs,)
        assert np.abs(layer.weight[0] - layer.bias).min() > 0
        for leaf in layer:
            largest = float(jnp.abs(leaf).max())
            assert 0.85 * inputs**-0.5 < largest <= inputs**-0.5
            assert float(leaf.min()) < 0
    drawn = [float(layer.bias[0]) * layer.weight.shape[0] ** 0.5 for layer in new]
    assert len(set(np.round(drawn, 5))) == 4


def test_a_new_one_adds_about_a_half(new):
    x = jnp.asarray(np.random.default_rng(1).normal(size=(20, 100)), jnp.float32)
    added = rsiat.project(new, x) - x
    assert 0.45 < float(added.mean()) < 0.55
    assert float(added.min()) > 0 and float(added.max()) < 1


def test_the_identity_is_one_at_its_start_and_can_learn():
    layers = rsiat.new_projector(jax.random.key(0), 12, 7, True)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(5, 12)), jnp.float32)
    np.testing.assert_array_equal(rsiat.project(layers, x, False), x)
    gradients = jax.grad(lambda p: jnp.sum(rsiat.project(p, x, False) ** 2))(layers)
    assert float(jnp.abs(gradients.out.weight).max()) > 0
    assert float(jnp.abs(layers.into.weight).max()) > 0
