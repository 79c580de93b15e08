"""The encoder against a float64 reading of the ViT paper, and what its settings allow."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from fdc_jax.model import increments, operations, vit
from tests.errors import input_error
from tests.model import reference
from tests.model.reference import SIDE, TINY, products, random_images, random_like, random_params

MODEL = vit.VisionTransformer(TINY)
PARAMS = random_params(0)
IMAGES = random_images(1)


@partial(jax.jit, static_argnums=0)
def encode(model, images, *arguments):
    return model.apply({"params": PARAMS}, images, *arguments)


def random_increment(seed):
    return random_like(increments.initialise(jax.random.key(0), TINY, 2), seed)


def random_adapter():
    """An adapter of five units in which no leaf is zero."""
    down = np.zeros((TINY.depth, TINY.width, 5))
    up = down.swapaxes(1, 2)
    return random_like(dict(down=down, down_bias=down[:, 0], up=up, up_bias=up[:, 0]), 4, 0.5)


def test_kernels_increments_and_adapters_in_float64():
    """An increment comes on top of the kernels given; an adapter acts beside every MLP."""
    first, second, adapter = random_increment(2), random_increment(3), random_adapter()
    kernels = increments.merge(vit.pretrained_kernels(PARAMS), first)
    both = jax.tree.map(np.add, products(first), products(second))
    for given, expected in (
        ((None, second), (products(second),)),
        ((kernels | {"adapter": adapter}, second), (both, adapter)),
    ):
        expected = reference.features(PARAMS, IMAGES, *expected)
        assert_allclose(encode(MODEL, IMAGES, *given), expected, atol=3e-5)


def test_dropout_scales_the_hidden_units_that_stay(monkeypatch):
    """Units dropped alike for all tokens are rows of the second layer that are missing."""
    adapter, shapes, bernoulli, key = random_adapter(), [], jax.random.bernoulli, jax.random.key(0)

    def alike(key, share, shape):
        shapes.append(shape)
        return jnp.broadcast_to(bernoulli(key, share, shape[-1:]), shape)

    monkeypatch.setattr(jax.random, "bernoulli", alike)
    kernels = vit.pretrained_kernels(PARAMS) | {"adapter": adapter}
    actual = encode(MODEL, IMAGES, kernels, None, key, 0.4)
    mask = np.stack([bernoulli(of_block, 0.6, (5,)) for of_block in jax.random.split(key, 2)])
    kept = adapter | {"up": adapter["up"] * mask[:, :, None] / 0.6}
    assert_allclose(actual, reference.features(PARAMS, IMAGES, adapter=kept), atol=3e-5)
    # Every token of every image draws for itself; only the class token leaves the last block.
    assert shapes == [(3, 10, 5), (3, 1, 5)]
    assert np.any(mask[0] != mask[1])


def test_fast_precision_stays_near_parity_and_returns_float32():
    parity = reference.features(PARAMS, IMAGES)
    fast = encode(MODEL.clone(precision="fast"), IMAGES)
    assert fast.dtype == jnp.float32
    error = np.linalg.norm(fast - parity, axis=1) / np.linalg.norm(parity, axis=1)
    # Bfloat16 keeps 8 bits: visibly different, and close.
    assert 1e-4 < error.max() < 0.05


@pytest.mark.parametrize("side", [SIDE, SIDE + TINY.patch])
def test_fused_attention_is_given_the_same_arrays(monkeypatch, side):
    # cuDNN's kernel is not here; XLA's rendering of the same function is.
    implementations, function = [], jax.nn.dot_product_attention

    def attention(query, key, value, implementation, **lengths):
        implementations.append(implementation)
        # An odd number has no gradient.
        assert query.shape == key.shape and query.shape[1] % 2 == 0
        return function(query, key, value, implementation="xla", **lengths)

    images, params = random_images(2, side=side), random_params(0, TINY, side)
    expected = reference.features(params, images)
    monkeypatch.setattr(jax.nn, "dot_product_attention", attention)
    fused = jax.jit(MODEL.clone(attention="cudnn").apply)({"params": params}, images)
    assert_allclose(fused, expected, atol=3e-5)
    # The last block has few queries an image.
    assert implementations == ["cudnn"] * (TINY.depth - 1)
    assert vit.build(TINY, side, "pilot01", "fast", cudnn=True).attention == "cudnn"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("Ti/16", 224, "imagenet"), "data.input_range: expected .*found 'imagenet'"),
        (("Ti/16", 230), "encoder.image_size: expected .*found 230"),
        (("Ti/16", 224, "pilot01", "fast", "cudnn"), "cudnn expects .* found .*fast and no"),
    ],
)
def test_unknown_names_and_sizes_are_refused(arguments, message):
    with input_error(message):
        vit.build(*arguments)


@pytest.mark.parametrize("dtype, tolerance", [(jnp.float32, 1e-6), (jnp.bfloat16, 2**-8)])
@pytest.mark.parametrize("name", sorted({*operations.ACTIVATIONS} - {"swiglu"}))
def test_activations_with_kept_slopes(name, dtype, tolerance):
    """Values and gradients of the plain form: in float32 its own, in bfloat16 but for rounding."""
    function, x = operations.ACTIVATIONS[name], jnp.linspace(-6.0, 6.0, 1201).astype(dtype)
    kept = partial(operations.with_kept_slope, function)

    @jax.jit
    def both(x):
        value, pull = jax.vjp(kept, x)
        wide = jax.jvp(function, (x.astype(jnp.float32),), (jnp.ones(1201),))
        return (value, *pull(jnp.ones_like(x))), wide

    for result, wide in zip(*both(x), strict=True):
        assert result.dtype == dtype
        assert_allclose(result, wide, rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize(
    "platform, count, images, side, expected",
    [
        ("cpu", 1, 64, 128, 16),  # 65 tokens an image.
        ("cpu", 1, 64, 224, 4),  # 197 tokens: five fit, four divide.
        ("cpu", 1, 67, 128, 67),  # A prime number.
        ("tpu", 1, 64, 224, 16),
        ("gpu", 1, 64, 224, 64),
        ("cpu", 2, 64, 224, 64),  # Several devices have a batch divided.
    ],
)
def test_a_portion_divides_the_batch_and_fits(platform, count, images, side, expected):
    device = SimpleNamespace(platform=platform)
    mesh = SimpleNamespace(devices=np.array([device] * count), size=count)
    assert operations.images_together(mesh, images, side, 16) == expected
