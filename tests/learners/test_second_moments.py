"""Second moments of attention inputs against a forward pass written out in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdc_jax.data.batches import Batch
from fdc_jax.learners.second_moments import attention_input_moments
from fdc_jax.model import vit
from tests.model.reference import features


@pytest.fixture(scope="module")
def model():
    return vit.build("digits", 32)


@pytest.fixture(scope="module")
def backbone(model):
    params = vit.initialise(model, 32, jax.random.key(0))
    # Norms that do something.
    return jax.tree.map(
        lambda leaf: leaf + 0.1 * jax.random.normal(jax.random.key(leaf.size), leaf.shape), params
    )


def make_batches(seed=0):
    rng = np.random.default_rng(seed)
    for weights in ([1, 1, 1, 1], [1, 1, 1, 0]):
        yield Batch(
            rng.integers(0, 256, (4, 32, 32, 3)).astype(np.uint8),
            np.zeros(4, np.int32),
            np.array(weights, np.float32),
        )


def test_every_block_by_hand(model, backbone):
    """Against the tokens of a float64 forward pass through kernels that no block was born with."""
    variant = model.variant
    pretrained = vit.pretrained_kernels(backbone)
    keys = jax.random.split(jax.random.key(1))
    updates = {
        part: 0.3 * jax.random.normal(key, pretrained[part].shape)
        for part, key in zip(("key", "value"), keys, strict=True)
    }
    kernels = jax.tree.map(jnp.add, pretrained, updates)
    rows = [[] for _ in range(variant.depth)]
    for batch in make_batches():
        images = batch.images[batch.weights > 0]
        float64 = {part: np.asarray(update, np.float64) for part, update in updates.items()}
        features(backbone, images, variant, updates=float64, attention_inputs=rows)
    found, count = attention_input_moments(model, backbone, kernels, make_batches())
    assert found.shape == (variant.depth, variant.width, variant.width)
    assert count == 7 * (1 + (32 // variant.patch) ** 2)
    for block, moment in enumerate(found):
        tokens = np.concatenate(rows[block])
        expected = tokens.T @ tokens / count
        np.testing.assert_allclose(moment, expected, atol=2e-5 * np.abs(expected).max())
        lengths = np.mean(np.sum(tokens**2, axis=1))
        np.testing.assert_allclose(np.trace(moment), lengths, rtol=1e-5)


def test_the_fast_mode_and_its_attention_change_nothing(model, backbone, monkeypatch):
    """The fused attention would refuse float32."""
    monkeypatch.setattr(jax.nn, "dot_product_attention", None)
    kernels = vit.pretrained_kernels(backbone)
    exact, _ = attention_input_moments(model, backbone, kernels, make_batches())
    fast = model.clone(precision="fast", attention="cudnn")
    found, _ = attention_input_moments(fast, backbone, kernels, make_batches())
    np.testing.assert_array_equal(found, exact)


def test_later_blocks_see_the_kernels_and_the_first_does_not(model, backbone):
    kernels = vit.pretrained_kernels(backbone)
    other = jax.tree.map(lambda kernel: 2.0 * kernel, kernels)
    first, _ = attention_input_moments(model, backbone, kernels, make_batches())
    second, _ = attention_input_moments(model, backbone, other, make_batches())
    np.testing.assert_array_equal(first[0], second[0])
    assert np.abs(first[1:] - second[1:]).max() > 1e-3
    for moments in (first, second):
        np.testing.assert_allclose(moments, jnp.swapaxes(moments, 1, 2), atol=1e-6)
        assert np.linalg.eigvalsh(np.asarray(moments, np.float64)).min() > -1e-5


def test_streams_merge_by_their_token_counts(model, backbone):
    kernels = vit.pretrained_kernels(backbone)
    batches = list(make_batches())
    whole, count = attention_input_moments(model, backbone, kernels, batches)
    parts = [attention_input_moments(model, backbone, kernels, [batch]) for batch in batches]
    assert count == sum(n for _, n in parts)
    merged = sum(n * moments for moments, n in parts) / count
    np.testing.assert_allclose(whole, merged, atol=1e-5)
