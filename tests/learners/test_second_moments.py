"""Second moments of attention inputs against a forward pass written out in NumPy."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdc_jax.errors import TrainingError
from fdc_jax.learners import second_moments
from fdc_jax.learners.second_moments import attention_input_moments
from fdc_jax.machine import devices
from fdc_jax.model import operations, vit
from tests.learners import toy
from tests.model.reference import features, float64

SETUP = toy.make_learner("inflora").setup
BATCHES = devices.split(
    SETUP.mesh, [toy.make_batch(1, size=4), toy.make_batch(2, size=4, padding=1)]
)


@pytest.fixture(scope="module")
def kernels(backbone):
    return toy.placed(toy.random_like(vit.pretrained_kernels(backbone), 2))


@pytest.fixture(scope="module")
def moments_and_count(backbone, kernels):
    before = second_moments.add_batch._cache_size()
    moments = attention_input_moments(SETUP, backbone, kernels, BATCHES)
    assert second_moments.add_batch._cache_size() == before + 1  # One compilation for all batches.
    return moments


def test_moments_of_every_block_in_float64(backbone, kernels, moments_and_count):
    """Against the tokens of a float64 forward pass through kernels that no block was born with."""
    moments, count = moments_and_count
    pretrained = vit.pretrained_kernels(backbone)
    updates = {part: float64(kernels[part]) - float64(pretrained[part]) for part in toy.PARTS}
    inputs = collections.defaultdict(list)
    features(backbone, toy.shown(BATCHES)[0], updates=updates, inputs=inputs)
    assert count == 7 * 10
    for block, moment in enumerate(moments):
        tokens = np.concatenate(inputs["qkv", block])
        expected = tokens.T @ tokens / count
        np.testing.assert_allclose(moment, expected, atol=2e-5 * np.abs(expected).max())


def test_moments_ignore_precision_and_attention(backbone, kernels, moments_and_count, monkeypatch):
    """The fused attention would refuse float32."""
    monkeypatch.setattr(jax.nn, "dot_product_attention", None)
    model = SETUP.model.clone(precision="fast", attention="cudnn")
    fast = dataclasses.replace(SETUP, model=model)
    again, _ = attention_input_moments(fast, backbone, kernels, BATCHES)
    np.testing.assert_array_equal(again, moments_and_count[0])


def test_an_encoder_that_diverged_is_named(backbone, kernels):
    message = "block 1: expected finite attention inputs"
    with jax.debug_nans(False), pytest.raises(TrainingError, match=message):
        lost = kernels | {"value": kernels["value"].at[0].set(jnp.nan)}
        attention_input_moments(SETUP, backbone, lost, BATCHES)


def test_portions_of_a_batch_give_the_same_moments(
    backbone, kernels, moments_and_count, monkeypatch
):
    monkeypatch.setitem(operations.PORTION_TOKENS, "cpu", toy.TWO_IMAGES)
    given = second_moments.add_batch
    sizes = []
    monkeypatch.setattr(second_moments, "add_batch", lambda *a: sizes.append(a[1]) or given(*a))
    moments, count = attention_input_moments(SETUP, backbone, kernels, BATCHES)
    assert sizes == [2, 2] and count == moments_and_count[1]
    np.testing.assert_allclose(moments, moments_and_count[0], rtol=1e-5, atol=1e-6)
