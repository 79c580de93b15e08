"""Second moments of attention inputs against a forward pass written out in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdc_jax.data.stream import Batch
from fdc_jax.learners.second_moments import attention_input_moments
from fdc_jax.model import vit


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


def test_first_block_by_hand(model, backbone):
    """Block one sees the embedded patches, normalised: no attention is needed to know them."""
    size, width = model.variant.patch, model.variant.width
    rows = []
    for batch in make_batches():
        for image, weight in zip(batch.images, batch.weights, strict=True):
            if not weight:
                continue
            pixels = image.astype(np.float64) / 255
            kernel = np.asarray(backbone["embedding"]["kernel"], np.float64)
            tokens = [np.asarray(backbone["cls"], np.float64)[0, 0]]
            for top in range(0, 32, size):
                for left in range(0, 32, size):
                    patch = pixels[top : top + size, left : left + size]
                    bias = np.asarray(backbone["embedding"]["bias"], np.float64)
                    tokens.append(np.einsum("ijc,ijcd->d", patch, kernel) + bias)
            x = np.stack(tokens)
            x += np.asarray(backbone["Transformer"]["posembed_input"]["pos_embedding"])[0]
            x = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-6)
            norm = backbone["Transformer"]["encoderblock_0"]["LayerNorm_0"]
            rows.append(x * np.asarray(norm["scale"]) + np.asarray(norm["bias"]))
    rows = np.concatenate(rows)
    found, count = attention_input_moments(
        model, backbone, vit.pretrained_kernels(backbone), make_batches()
    )
    assert found.shape == (model.variant.depth, width, width)
    assert count == len(rows) == 7 * (1 + (32 // size) ** 2)
    np.testing.assert_allclose(found[0], rows.T @ rows / len(rows), atol=2e-5)


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
