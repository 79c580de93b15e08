"""The encoder against PyTorch/timm outputs and against a float64 reading of the ViT paper."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdc_jax.errors import InputError
from fdc_jax.model import increments, vit, weights

TINY = vit.Variant(width=24, depth=3, heads=3, patch=4)
SIDE = 12
_erf = np.vectorize(math.erf)


def random_params(seed, variant=TINY, side=SIDE):
    """A parameter tree in which no leaf is constant, so that each one matters."""
    model = vit.VisionTransformer(variant)
    shapes = vit.parameter_shapes(model, side)
    leaves, structure = jax.tree.flatten(shapes)
    rng = np.random.default_rng(seed)
    return jax.tree.unflatten(
        structure,
        [jnp.asarray(rng.normal(0, 0.3, leaf.shape), jnp.float32) for leaf in leaves],
    )


def encode(params, images, kernels=None, increment=None, variant=TINY, **settings):
    """The encoder, compiled as a whole, which is faster than operation by operation."""
    model = vit.VisionTransformer(variant, **settings)
    return jax.jit(model.apply)({"params": params}, images, kernels, increment)


def random_images(seed, count=3, side=SIDE):
    return np.random.default_rng(seed).integers(0, 256, (count, side, side, 3), np.uint8)


def random_increment(seed, variant=TINY, rank=2, scale=0.3):
    shapes = increments.initialise(jax.random.key(0), variant, rank)
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(0, scale, leaf.shape), jnp.float32), shapes
    )


def layer_norm(x, p):
    centred = x - x.mean(-1, keepdims=True)
    variance = (centred**2).mean(-1, keepdims=True)
    return centred / np.sqrt(variance + 1e-6) * p["scale"] + p["bias"]


def reference(
    params,
    images,
    variant,
    offset=0.0,
    divisor=1.0,
    kernel_updates=None,
    adapter=None,
    attention_inputs=None,
):
    """Dosovitskiy et al. (2021), Eqs. 1-4, token by token where that is the plainest reading.

    Every token passes through every block. `kernel_updates[part][block]` [d, d] is added to the
    key or value kernel. `adapter[leaf][block]` acts on what the attention leaves, beside the MLP.
    `attention_inputs[block]`, a list, gets the tokens that enter a block's attention, by image.
    """
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    width, heads, size = variant.width, variant.heads, variant.patch
    features = []
    for image in (images / 255.0 - offset) / divisor:
        tokens = [p["cls"].reshape(width)]
        for top in range(0, image.shape[0], size):
            for left in range(0, image.shape[1], size):
                patch = image[top : top + size, left : left + size]
                product = np.einsum("ijc,ijcd->d", patch, p["embedding"]["kernel"])
                tokens.append(product + p["embedding"]["bias"])
        trunk = p["Transformer"]
        z = np.stack(tokens) + trunk["posembed_input"]["pos_embedding"][0]
        for number in range(variant.depth):
            block = trunk[f"encoderblock_{number}"]
            attention = block["MultiHeadDotProductAttention_1"]
            x = layer_norm(z, block["LayerNorm_0"])
            if attention_inputs is not None:
                attention_inputs[number].append(x)
            projected = {}
            for part in ("query", "key", "value"):
                kernel = attention[part]["kernel"].reshape(width, width)
                if kernel_updates is not None and part in kernel_updates:
                    kernel = kernel + kernel_updates[part][number]
                projected[part] = x @ kernel + attention[part]["bias"].reshape(width)
            mixed = []
            for head in range(heads):
                columns = slice(head * width // heads, (head + 1) * width // heads)
                q, k, v = (projected[part][:, columns] for part in ("query", "key", "value"))
                weight = np.exp(q @ k.T / math.sqrt(width // heads))
                mixed.append(weight / weight.sum(1, keepdims=True) @ v)
            out = attention["out"]["kernel"].reshape(width, width)
            z = z + np.concatenate(mixed, 1) @ out + attention["out"]["bias"]
            mlp = block["MlpBlock_3"]
            hidden = layer_norm(z, block["LayerNorm_2"]) @ mlp["Dense_0"]["kernel"]
            hidden = hidden + mlp["Dense_0"]["bias"]
            hidden = hidden * (1 + _erf(hidden / math.sqrt(2))) / 2
            beside = 0.0
            if adapter is not None:
                a = {name: np.asarray(leaf[number], np.float64) for name, leaf in adapter.items()}
                beside = np.maximum(z @ a["down"] + a["down_bias"], 0.0) @ a["up"] + a["up_bias"]
            z = z + hidden @ mlp["Dense_1"]["kernel"] + mlp["Dense_1"]["bias"] + 0.1 * beside
        features.append(layer_norm(z, trunk["encoder_norm"])[0])
    return np.stack(features)


def products(increment):
    """A B per block in float64."""
    return {
        part: np.asarray(increment[part]["A"], np.float64)
        @ np.asarray(increment[part]["B"], np.float64)
        for part in ("key", "value")
    }


@pytest.mark.parametrize(
    ("input_range", "constants"), [("pilot01", (0, 1)), ("augreg", (0.5, 0.5))]
)
def test_matches_the_float64_reference(input_range, constants):
    params, images = random_params(0), random_images(1)
    features = encode(params, images, input_range=input_range)
    assert features.dtype == jnp.float32
    np.testing.assert_allclose(features, reference(params, images, TINY, *constants), atol=3e-5)


def test_other_kernels_replace_the_pretrained_ones():
    params, images = random_params(0), random_images(1)
    increment = random_increment(2)
    added = products(increment)
    kernels = vit.pretrained_kernels(params)
    kernels = vit.KeyValueKernels(
        key=kernels["key"] + jnp.asarray(added["key"], jnp.float32),
        value=kernels["value"] + jnp.asarray(added["value"], jnp.float32),
    )
    expected = reference(params, images, TINY, kernel_updates=added)
    assert np.abs(expected - reference(params, images, TINY)).max() > 0.05
    features = encode(params, images, kernels)
    np.testing.assert_allclose(features, expected, atol=3e-5)


def test_the_increment_is_added_on_top_of_the_kernels_given():
    params, images = random_params(0), random_images(1)
    first, second = random_increment(2), random_increment(3)
    kernels = increments.merge(vit.pretrained_kernels(params), first)
    added = jax.tree.map(np.add, products(first), products(second))
    features = encode(params, images, kernels, second)
    expected = reference(params, images, TINY, kernel_updates=added)
    np.testing.assert_allclose(features, expected, atol=3e-5)


@pytest.mark.parametrize("part", ["key", "value"])
def test_keys_and_values_are_not_mixed_up(part):
    params, images = random_params(0), random_images(1)
    increment = random_increment(2)
    other = "value" if part == "key" else "key"
    increment[other] = jax.tree.map(jnp.zeros_like, increment[other])
    features = encode(params, images, None, increment)
    expected = reference(params, images, TINY, kernel_updates={part: products(increment)[part]})
    np.testing.assert_allclose(features, expected, atol=3e-5)


def test_pretrained_kernels_given_explicitly_change_nothing():
    params, images = random_params(0), random_images(1)
    plain = encode(params, images)
    explicit = encode(params, images, vit.pretrained_kernels(params))
    np.testing.assert_array_equal(plain, explicit)


def random_adapter(seed, variant=TINY, hidden=5, scale=0.5):
    """An adapter in which no leaf is zero."""
    depth, width = variant.depth, variant.width
    rng = np.random.default_rng(seed)

    def noise(*shape):
        return jnp.asarray(rng.normal(0, scale, shape), jnp.float32)

    return vit.Adapter(
        down=noise(depth, width, hidden),
        down_bias=noise(depth, hidden),
        up=noise(depth, hidden, width),
        up_bias=noise(depth, width),
    )


def with_adapter(params, adapter):
    kernels = vit.pretrained_kernels(params)
    return vit.KeyValueKernels(key=kernels["key"], value=kernels["value"], adapter=adapter)


def test_the_adapter_acts_beside_the_mlp_of_every_block():
    params, images, adapter = random_params(0), random_images(1), random_adapter(4)
    features = encode(params, images, with_adapter(params, adapter))
    expected = reference(params, images, TINY, adapter=adapter)
    np.testing.assert_allclose(features, expected, atol=3e-5)
    for leaf in adapter:
        for block in range(TINY.depth):
            less = dict(adapter)
            less[leaf] = adapter[leaf].at[block].set(0.0)
            moved = np.abs(reference(params, images, TINY, adapter=less) - expected).max()
            assert moved > 1e-3, (leaf, block)


def test_an_adapter_whose_second_layer_is_zero_changes_nothing():
    params, images, adapter = random_params(0), random_images(1), random_adapter(4)
    for leaf in ("up", "up_bias"):
        adapter[leaf] = jnp.zeros_like(adapter[leaf])
    # Not compiled as a whole, for which sums may be rounded in another order.
    model = vit.VisionTransformer(TINY)
    adapted = model.apply({"params": params}, images, with_adapter(params, adapter))
    np.testing.assert_array_equal(adapted, model.apply({"params": params}, images))


def test_dropout_scales_the_hidden_units_that_stay(monkeypatch):
    """Units dropped alike for all tokens are rows of the second layer that are missing."""
    params, images, adapter = random_params(0), random_images(1), random_adapter(4)
    kept = np.array([True, False, True, True, False])
    drawn = []

    def bernoulli(key, share, shape):
        drawn.append((np.asarray(jax.random.key_data(key)).tolist(), share, shape))
        return jnp.broadcast_to(kept, shape)

    monkeypatch.setattr(jax.random, "bernoulli", bernoulli)
    model = vit.VisionTransformer(TINY)
    features = model.apply(
        {"params": params},
        images,
        with_adapter(params, adapter),
        dropout_key=jax.random.key(0),
        dropout_rate=0.2,
    )
    less = dict(adapter, up=adapter["up"] * kept[:, None] / 0.8)
    np.testing.assert_allclose(features, reference(params, images, TINY, adapter=less), atol=3e-5)
    keys, shares, shapes = zip(*drawn, strict=True)
    assert len(set(map(tuple, keys))) == TINY.depth
    assert shares == (0.8,) * 3
    # Every token of every image draws for itself; only the class token leaves the last block.
    assert shapes == ((3, 10, 5), (3, 10, 5), (3, 1, 5))


def test_dropout_follows_from_its_key():
    params, images, adapter = random_params(0), random_images(1), random_adapter(4)
    model = vit.VisionTransformer(TINY)

    @jax.jit
    def dropped(key):
        kernels = with_adapter(params, adapter)
        return model.apply({"params": params}, images, kernels, None, key, 0.5)

    first = dropped(jax.random.key(0))
    np.testing.assert_array_equal(first, dropped(jax.random.key(0)))
    assert np.abs(first - dropped(jax.random.key(1))).max() > 1e-2


def test_fast_precision_stays_near_parity_and_returns_float32():
    params, images = random_params(0), random_images(1, count=8)
    parity = encode(params, images)
    fast = encode(params, images, precision="fast")
    assert fast.dtype == jnp.float32
    error = np.linalg.norm(fast - parity, axis=1) / np.linalg.norm(parity, axis=1)
    # Bfloat16 keeps 8 bits: visibly different, and close.
    assert 1e-4 < error.max() < 0.05


@pytest.mark.parametrize(
    ("input_range", "expected"), [("pilot01", "cls_unit"), ("augreg", "cls_pm1")]
)
def test_golden_features_of_timm(shared_asset, input_range, expected):
    golden = np.load(shared_asset("golden_vit_ti16_16images.npz"))
    path = shared_asset("Ti_16-augreg-i21k-ft-i1k.npz")
    params = weights.load(path, "Ti/16", 224).params
    for precision in ("parity", "fast"):
        model = vit.build("Ti/16", 224, input_range, precision)
        features = jax.jit(model.apply)({"params": params}, golden["images_uint8_nhwc"])
        if precision == "parity":
            np.testing.assert_allclose(features, golden[expected], rtol=0, atol=2e-4)
        else:
            error = np.linalg.norm(features - golden[expected], axis=1)
            assert (error / np.linalg.norm(golden[expected], axis=1)).max() < 0.05


def test_one_compilation_serves_every_task():
    params = random_params(0)
    model = vit.VisionTransformer(TINY)
    traces = []

    @jax.jit
    def counted(params, images, kernels, increment):
        traces.append(None)
        return model.apply({"params": params}, images, kernels, increment)

    kernels = vit.pretrained_kernels(params)
    seen = []
    for task in range(4):
        increment = random_increment(task)
        seen.append(counted(params, random_images(9), kernels, increment))
        kernels = increments.merge(kernels, increment)
    assert len(traces) == 1
    assert all(np.abs(a - b).max() > 1e-3 for a, b in itertools.pairwise(seen))


@pytest.mark.parametrize(
    ("arguments", "field", "found"),
    [
        (("X/16", 224), "encoder.variant", "'X/16'"),
        (("Ti/16", 224, "imagenet"), "data.input_range", "'imagenet'"),
        (("Ti/16", 224, "pilot01", "double"), "precision", "'double'"),
        (("Ti/16", 230), "encoder.image_size", "230"),
        (("Ti/16", 0), "encoder.image_size", "0"),
        (("Ti/16", 224, "pilot01", "fast", "flash"), "encoder.attention", "'flash'"),
    ],
)
def test_unknown_names_and_sizes_are_refused(arguments, field, found):
    with pytest.raises(InputError, match=rf"{field}: expected .*found {found}"):
        vit.build(*arguments)


def test_fused_attention_is_refused_where_there_is_none(monkeypatch):
    with pytest.raises(InputError, match=r"encoder.attention: cudnn needs .* found .*fast and cpu"):
        vit.build("Ti/16", 224, "pilot01", "fast", "cudnn")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(InputError, match="found precision=parity and gpu"):
        vit.build("Ti/16", 224, "pilot01", "parity", "cudnn")
    assert vit.build("Ti/16", 224, "pilot01", "fast", "cudnn").attention == "cudnn"


@pytest.mark.parametrize("side", [SIDE, SIDE + TINY.patch])
def test_fused_attention_is_given_the_same_arrays(monkeypatch, side):
    # cuDNN's kernel is not here; XLA's rendering of the same function is.
    asked, function = [], jax.nn.dot_product_attention

    def attention(query, *arrays, implementation, **lengths):
        asked.append(implementation)
        # An odd number would have no gradient.
        assert query.shape[1] % 2 == 0
        return function(query, *arrays, implementation="xla", **lengths)

    monkeypatch.setattr(jax.nn, "dot_product_attention", attention)
    params = vit.initialise(vit.VisionTransformer(TINY), side, jax.random.key(0))
    images = np.random.default_rng(0).integers(0, 256, (3, side, side, 3), np.uint8)
    plain = vit.VisionTransformer(TINY).apply({"params": params}, images)
    fused = vit.VisionTransformer(TINY, attention="cudnn").apply({"params": params}, images)
    np.testing.assert_allclose(fused, plain, atol=1e-5)
    # The last block has one query an image.
    assert asked == ["cudnn"] * (TINY.depth - 1)


def test_lengths_of_fused_attention_are_mapped_with_the_queries(monkeypatch):
    """Under `vmap`, as when seeds train as one, JAX cannot map over one without the other."""
    mapped, function = [], jax.nn.dot_product_attention

    def attention(query, *arrays, implementation, **lengths):
        mapped.append([isinstance(each, jax.core.Tracer) for each in lengths.values()])
        return function(query, *arrays, implementation="xla", **lengths)

    monkeypatch.setattr(jax.nn, "dot_product_attention", attention)
    q, k, v = np.random.default_rng(0).normal(size=(3, 2, 4, 5, 3, 8)).astype(np.float32)
    found = jax.vmap(vit._attend_fused)(q, k, v)
    assert mapped == [[True, True]]
    expected = [vit._attend(*arrays, None) for arrays in zip(q, k, v, strict=True)]
    np.testing.assert_allclose(found, np.stack(expected), atol=1e-5)


def test_parameter_shapes_agree_with_initialise():
    model = vit.VisionTransformer(TINY)
    params = jax.jit(lambda key: vit.initialise(model, SIDE, key))(jax.random.key(0))
    shapes = vit.parameter_shapes(model, SIDE)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), shapes
    )
