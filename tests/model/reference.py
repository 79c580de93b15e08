"""The Vision Transformer in float64 NumPy, token by token where that is the plainest reading."""

import collections
import math

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import erf, softmax

from fdc_jax.model import vit

TINY = vit.Variant(width=24, depth=2, heads=3, patch=4)
SIDE = 12
PARTS = ("key", "value")
NO_UPDATE = np.zeros(TINY.depth)


def random_like(tree, seed, scale=0.3):
    """Returns a tree of the same shapes, filled with noise."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: jnp.asarray(rng.normal(0, scale, x.shape).astype(np.float32)), tree
    )


def random_params(seed, variant=TINY, side=SIDE):
    """Returns a parameter tree in which no leaf is constant, so that each one matters."""
    return random_like(vit.parameter_shapes(vit.VisionTransformer(variant), side), seed)


def random_images(seed, count=3, side=SIDE):
    """Returns images of noise."""
    return np.random.default_rng(seed).integers(0, 256, (count, side, side, 3), np.uint8)


def float64(tree):
    """Returns every leaf as a float64 array of NumPy."""
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)


def products(increment):
    """Returns A B of every block, by part, in float64."""
    factors = float64(increment)
    return {part: factors[part]["A"] @ factors[part]["B"] for part in PARTS}


def _layer_norm(x, p):
    centred = x - x.mean(-1, keepdims=True)
    variance = (centred**2).mean(-1, keepdims=True)
    return centred / np.sqrt(variance + 1e-6) * p["scale"] + p["bias"]


def features(params, images, updates=None, adapter=None, inputs=None):
    """Returns the class token after the final norm: Dosovitskiy et al. (2021), Eqs. 1-4.

    Every token passes through every block. `updates[layer][block]` is added to the kernel of the
    query, key or value, or to the first one of the MLP, `fc1`. `adapter[leaf][block]` acts on what
    the attention leaves, beside the MLP. `inputs["qkv", block]` and `inputs["fc1", block]`, lists,
    get the tokens that enter a block's attention and MLP, by image.
    """
    p = float64(params)
    updates, inputs = updates or {}, collections.defaultdict(list) if inputs is None else inputs
    width, heads, size = TINY.width, TINY.heads, TINY.patch
    outputs = []
    trunk, embedding = p["Transformer"], p["embedding"]["kernel"].reshape(-1, width)
    count = images.shape[1] // size
    for image in images / 255.0:
        rows = image.reshape(count, size, count, size, 3).swapaxes(1, 2)
        patches = rows.reshape(-1, len(embedding)) @ embedding + p["embedding"]["bias"]
        z = np.concatenate([p["cls"][0], patches]) + trunk["posembed_input"]["pos_embedding"][0]
        for number in range(TINY.depth):
            block = trunk[f"encoderblock_{number}"]
            attention = block["MultiHeadDotProductAttention_1"]
            x = _layer_norm(z, block["LayerNorm_0"])
            inputs["qkv", number].append(x)
            projected = {}
            for part in ("query", "key", "value"):
                kernel = attention[part]["kernel"].reshape(width, width)
                kernel = kernel + updates.get(part, NO_UPDATE)[number]
                projected[part] = x @ kernel + attention[part]["bias"].reshape(width)
            mixed = []
            for head in range(heads):
                columns = slice(head * width // heads, (head + 1) * width // heads)
                q, k, v = (projected[part][:, columns] for part in ("query", "key", "value"))
                mixed.append(softmax(q @ k.T / math.sqrt(width // heads), axis=1) @ v)
            out = attention["out"]["kernel"].reshape(width, width)
            z = z + np.concatenate(mixed, 1) @ out + attention["out"]["bias"]
            mlp = block["MlpBlock_3"]
            x = _layer_norm(z, block["LayerNorm_2"])
            inputs["fc1", number].append(x)
            kernel = mlp["Dense_0"]["kernel"] + updates.get("fc1", NO_UPDATE)[number]
            hidden = x @ kernel + mlp["Dense_0"]["bias"]
            hidden = hidden * (1 + erf(hidden / math.sqrt(2))) / 2
            beside = 0.0
            if adapter is not None:
                a = {name: leaf[number] for name, leaf in float64(adapter).items()}
                beside = np.maximum(z @ a["down"] + a["down_bias"], 0.0) @ a["up"] + a["up_bias"]
            z = z + hidden @ mlp["Dense_1"]["kernel"] + mlp["Dense_1"]["bias"] + 0.1 * beside
        outputs.append(_layer_norm(z, trunk["encoder_norm"])[0])
    return np.stack(outputs)
