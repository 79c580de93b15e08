"""The Vision Transformer, from images to the head input, for every family in `layouts`.

Module names are the keys of the AugReg files, so that such a checkpoint is the parameter tree. An
encoder E_t differs from E_0 in key and value kernels, in an adapter beside the MLPs, or in all
parameters. These are arguments, so that one compiled function serves every view. `operations` has
the forms that differ from the plain formula.
"""

import dataclasses
import math
from functools import cache
from typing import Any, NotRequired, TypeAlias, TypedDict

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jaxtyping import Array, Float, UInt8

from fdc_jax.errors import InputError
from fdc_jax.model import operations
from fdc_jax.model.operations import Arithmetic, Factors


@dataclasses.dataclass(frozen=True)
class Variant:
    """The architecture of an encoder; defaults are those of the AugReg checkpoints."""

    width: int  # of the tokens
    depth: int  # number of blocks
    heads: int  # of every attention
    patch: int = 16  # side, in pixels
    hidden: int = 0  # units of every MLP; 0: four times the width
    tokens: int = 1  # learned tokens before the patches, the class token first
    registers: int = 0  # learned tokens after those, without a position
    pre_norm: bool = False  # whether the tokens are normalised before the first block
    activation: str = "gelu"  # of every MLP, a key of `operations.ACTIVATIONS`
    # The feature is, for `token`: the class token; `prefix`: the mean of all learned tokens with a
    # position; `mean`: the mean of the patches; `mean_then_norm`: the same, but with the final norm
    # after the mean; `attention`: the output of a learned query's attention over the patches.
    pooling: str = "token"
    rotary: float = 0.0  # base of the rotary positions of the patches; 0: learned positions
    epsilon: float = 1e-6  # of every norm
    # Pre-training: side of the images in pixels, mean and standard deviation of pixels in [0, 1]
    # by channel; None: not known.
    image_size: int = 224
    mean: tuple[float, ...] | None = (0.5, 0.5, 0.5)
    std: tuple[float, ...] | None = (0.5, 0.5, 0.5)

    @property
    def mlp_width(self) -> int:
        """Hidden units of every MLP."""
        return self.hidden or 4 * self.width


VARIANTS = {
    "Ti/16": Variant(width=192, depth=12, heads=3),
    "S/32": Variant(width=384, depth=12, heads=6, patch=32),
    "S/16": Variant(width=384, depth=12, heads=6),
    "B/32": Variant(width=768, depth=12, heads=12, patch=32),
    "B/16": Variant(width=768, depth=12, heads=12),
    "B/8": Variant(width=768, depth=12, heads=12, patch=8),
    "L/16": Variant(width=1024, depth=24, heads=16),
    "digits": Variant(
        width=96, depth=4, heads=3, patch=8, image_size=32, mean=(0.0,) * 3, std=(1.0,) * 3
    ),
}

# Offset and divisor of pixels in [0, 1]: PILOT keeps [0, 1], AugReg maps to [-1, 1]. A third range,
# `model`, has mean and deviation of the checkpoint's pre-training.
INPUT_RANGES = {"pilot01": (0.0, 1.0), "augreg": (0.5, 0.5)}

# Parity: float32 with exact products. Fast: bfloat16 activations, float32 parameters and norms.
PRECISIONS = {
    "parity": (jnp.float32, jax.lax.Precision.HIGHEST),
    "fast": (jnp.bfloat16, jax.lax.Precision.DEFAULT),
}

# Precision of float32 products in passes for statistics, by the mode of training. HIGH is three
# bfloat16 products on a TPU, half of the time, and TF32 on a GPU; a processor ignores it.
STATISTICS = {"parity": jax.lax.Precision.HIGHEST, "fast": jax.lax.Precision.HIGH}

# Values of `Arithmetic.attention`; auto: cudnn, which needs half of the memory, if precision is
# fast and the devices have it, else xla.
ATTENTIONS = ("auto", "xla", "cudnn")

# Factor on the output of an adapter (AdaptFormer; RSIAT keeps it).
ADAPTER_SCALE = 0.1


class Adapter(TypedDict):
    """Two dense layers with a ReLU between them beside the MLP of every block, in float32."""

    down: Float[Array, "l d h"]
    down_bias: Float[Array, "l h"]
    up: Float[Array, "l h d"]
    up_bias: Float[Array, "l d"]


class KeyValueKernels(TypedDict):
    """Key and value kernels of every block in float32, and perhaps an adapter beside the MLPs."""

    key: Float[Array, "l d d"]
    value: Float[Array, "l d d"]
    adapter: NotRequired[Adapter]


class AllParameters(TypedDict):
    """A whole parameter tree that replaces the pretrained one, in float32."""

    parameters: Any


# The parameters of an encoder E_t that replace those of E_0.
Replaced: TypeAlias = KeyValueKernels | AllParameters


class Increment(TypedDict):
    """The low-rank update of one task to the key and value kernels of every block."""

    key: Factors
    value: Factors


class _Projection(nn.Module):
    """A query, key or value projection: x W + b, or x (W + A B) + b with updates."""

    heads: int
    arithmetic: Arithmetic

    @nn.compact
    def __call__(self, x, kernel=None, updates=()):
        width = x.shape[-1]
        shape = (width, self.heads, width // self.heads)
        xavier = nn.initializers.xavier_uniform(in_axis=0, out_axis=(1, 2))
        parameter = self.param("kernel", xavier, shape)
        bias = self.param("bias", nn.initializers.zeros, shape[1:])
        kernel = parameter.reshape(width, width) if kernel is None else kernel
        dtype, precision = self.arithmetic.dtype, self.arithmetic.precision
        y: Any
        if updates:
            y = operations.product_with_updates(x, kernel, updates, precision)
        else:
            y = jnp.matmul(x, kernel.astype(dtype), precision=precision)
        y = y + bias.reshape(1, 1, width).astype(dtype)
        return y.reshape(*y.shape[:-1], *shape[1:])


def _rotary_angles(variant: Variant, grid: int) -> Float[np.ndarray, "t h"]:
    """Returns the rotation angles of every token, as in DINOv3; 0 for learned tokens."""
    quarter = variant.width // variant.heads // 4
    centres = 2.0 * (np.arange(grid) + 0.5) / grid - 1.0
    positions = np.stack(np.meshgrid(centres, centres, indexing="ij"), axis=-1).reshape(-1, 2, 1)
    angles = 2.0 * math.pi * positions * variant.rotary ** -(np.arange(quarter) / quarter)
    return np.pad(angles.reshape(grid**2, -1), ((variant.tokens + variant.registers, 0), (0, 0)))


class _Attention(nn.Module):
    """Multi-head attention of queries over tokens."""

    heads: int
    arithmetic: Arithmetic

    @nn.compact
    def __call__(self, queries, tokens, kernels=None, increments=(), angles=None):
        def project(name, inputs, kernels=None, increments=()):
            projection = _Projection(self.heads, self.arithmetic, name=name)
            kernel = None if kernels is None else kernels[name]
            return projection(inputs, kernel, tuple(factors[name] for factors in increments))

        q = project("query", queries)
        k = project("key", tokens, kernels, increments)
        v = project("value", tokens, kernels, increments)
        if angles is not None:
            q, k = operations.rotate(q, angles), operations.rotate(k, angles)
        mixed = operations.attend(q, k, v, self.arithmetic)
        width, kind = queries.shape[-1], self.arithmetic.of_layers
        return nn.DenseGeneral(width, axis=(-2, -1), name="out", **kind)(mixed)


class _Mlp(nn.Module):
    """Two dense layers with an activation between them."""

    variant: Variant
    arithmetic: Arithmetic

    @nn.compact
    def __call__(self, x):
        units, activation = self.variant.mlp_width, self.variant.activation
        units = 2 * units if activation == "swiglu" else units
        kind = self.arithmetic.of_layers
        hidden = operations.activate(activation, nn.Dense(units, **kind)(x))
        return nn.Dense(self.variant.width, **kind)(hidden)


def _adapter_output(x, adapter: Adapter, dropout_key, dropout_rate: float, precision):
    """Returns an adapter's output for tokens x, the sums after attention, without a norm."""
    hidden = jax.nn.relu(operations.dense(x, adapter["down"], adapter["down_bias"], precision))
    if dropout_key is not None:
        kept = jax.random.bernoulli(dropout_key, 1.0 - dropout_rate, hidden.shape)
        hidden = jnp.where(kept, hidden / (1.0 - dropout_rate), 0.0).astype(x.dtype)
    out: Any = operations.dense(hidden, adapter["up"], adapter["up_bias"], precision)
    return jnp.asarray(ADAPTER_SCALE, x.dtype) * out


class _Block(nn.Module):
    """Transformer block with the norms first.

    It returns the first `kept` tokens (None: all), and the inputs of attention and MLP.
    """

    variant: Variant
    arithmetic: Arithmetic
    kept: int | None

    @nn.compact
    def __call__(self, x, angles, dropout_rate, kernels, increments, dropout_key):
        variant, arithmetic = self.variant, self.arithmetic
        norm: Any = {"epsilon": variant.epsilon, "dtype": arithmetic.dtype}
        tokens = nn.LayerNorm(name="LayerNorm_0", **norm)(x)
        queries = tokens
        if self.kept is not None:
            queries, x = tokens[:, : self.kept], x[:, : self.kept]
        attention = _Attention(variant.heads, arithmetic, name="MultiHeadDotProductAttention_1")
        x = x + attention(queries, tokens, kernels, increments, angles)
        y = nn.LayerNorm(name="LayerNorm_2", **norm)(x)
        out = x + _Mlp(variant, arithmetic, name="MlpBlock_3")(y)
        if kernels is not None and "adapter" in kernels:
            adapter, precision = kernels["adapter"], arithmetic.precision
            out += _adapter_output(x, adapter, dropout_key, dropout_rate, precision)
        return out, {"attention_inputs": tokens, "mlp_inputs": y}


class _PositionEmbedding(nn.Module):
    """The sum of tokens and one learned vector per position."""

    @nn.compact
    def __call__(self, x):
        shape = (1, *x.shape[1:])
        embedding = self.param("pos_embedding", nn.initializers.normal(0.02), shape)
        return x + embedding.astype(x.dtype)


class _AttentionPooling(nn.Module):
    """Attention of a learned query over tokens, and an MLP (SigLIP)."""

    variant: Variant
    arithmetic: Arithmetic

    @nn.compact
    def __call__(self, tokens):
        variant, dtype = self.variant, self.arithmetic.dtype
        probe = self.param("probe", nn.initializers.zeros, (1, 1, variant.width))
        x = jnp.broadcast_to(probe.astype(dtype), (len(tokens), 1, variant.width))
        name = "MultiHeadDotProductAttention_0"
        x = _Attention(variant.heads, self.arithmetic, name=name)(x, tokens.astype(dtype))
        y = nn.LayerNorm(epsilon=variant.epsilon, dtype=dtype, name="LayerNorm_0")(x)
        y = _Mlp(variant, self.arithmetic, name="MlpBlock_0")(y)
        return (x + y)[:, 0].astype(jnp.float32)


class _Transformer(nn.Module):
    """Positions, registers, blocks, final norm and pooling of the learned tokens and patches."""

    variant: Variant
    arithmetic: Arithmetic
    looped: bool

    @nn.compact
    def __call__(self, x, kernels, increments, dropout_key, dropout_rate):
        variant, angles = self.variant, None
        keys = None if dropout_key is None else jax.random.split(dropout_key, variant.depth)
        if variant.rotary:
            angles = _rotary_angles(variant, math.isqrt(x.shape[1] - variant.tokens))
        else:
            x = _PositionEmbedding(name="posembed_input")(x)
        if variant.registers:
            shape = (1, variant.registers, variant.width)
            registers = self.param("registers", nn.initializers.zeros, shape).astype(x.dtype)
            registers = jnp.broadcast_to(registers, (len(x), *shape[1:]))
            parts = [x[:, : variant.tokens], registers, x[:, variant.tokens :]]
            x = jnp.concatenate(parts, axis=1)
        if variant.pre_norm:
            norm: Any = {"epsilon": variant.epsilon, "dtype": self.arithmetic.dtype}
            x = nn.LayerNorm(name="pre_norm", **norm)(x)
        # Number of the last block's tokens that the pooling reads; None: all.
        read = {"token": 1, "prefix": variant.tokens}.get(variant.pooling)
        trees = kernels, increments, keys  # None trees have no leaves
        if self.looped:
            blocks = [self.variables["params"][f"encoderblock_{b}"] for b in range(variant.depth)]
            stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)

            def step(x, of_block):
                parameters, *trees = of_block
                block = _Block(variant, self.arithmetic, None, parent=None)
                return block.apply({"params": parameters}, x, angles, dropout_rate, *trees)

            x, inputs = jax.lax.scan(step, x, (stacked, *trees))
            for name, tokens in inputs.items():
                self.sow("intermediates", name, tokens)
            return self._pool(x)
        for number in range(variant.depth):
            kept = read if number == variant.depth - 1 else None
            of_block = jax.tree.map(lambda leaf, b=number: leaf[b], trees)
            block = _Block(variant, self.arithmetic, kept, name=f"encoderblock_{number}")
            x, _ = block(x, angles, dropout_rate, *of_block)
        return self._pool(x)

    def _pool(self, x):
        variant = self.variant
        before = variant.pooling == "mean_then_norm"
        name = "fc_norm" if before else "encoder_norm"
        norm = nn.LayerNorm(epsilon=variant.epsilon, dtype=jnp.float32, name=name)
        if variant.pooling == "token":
            return norm(x[:, 0])
        if variant.pooling == "prefix":
            return norm(x).mean(axis=1)
        x = x[:, variant.tokens + variant.registers :]
        if before:
            return norm(x.astype(jnp.float32).mean(axis=1))
        if variant.pooling == "mean":
            return norm(x).mean(axis=1)
        return _AttentionPooling(variant, self.arithmetic, name="MAPHead_0")(norm(x))


class _PatchEmbedding(nn.Module):
    """A convolution whose stride is its size, as a product over flattened patches."""

    variant: Variant
    arithmetic: Arithmetic

    @nn.compact
    def __call__(self, images):
        dtype, precision = self.arithmetic.dtype, self.arithmetic.precision
        batch, height, width, channels = images.shape
        size, out = self.variant.patch, self.variant.width
        if height % size:  # A convolution without padding drops these pixels, too.
            height, width = height - height % size, width - width % size
            images = images[:, :height, :width]
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (size, size, channels, out))
        bias = self.param("bias", nn.initializers.zeros, (out,))
        patches = images.reshape(batch, height // size, size, width // size, size, channels)
        patches = patches.transpose(0, 1, 3, 2, 4, 5).reshape(batch, -1, size * size * channels)
        kernel = kernel.reshape(-1, out).astype(dtype)
        return jnp.matmul(patches, kernel, precision=precision) + bias[None, None].astype(dtype)


class VisionTransformer(nn.Module):
    """An encoder from images to features, the input of heads."""

    variant: Variant
    input_range: str = "pilot01"  # a key of `INPUT_RANGES`, or `model`
    precision: str = "parity"  # a key of `PRECISIONS`
    attention: str = "xla"  # see `Arithmetic`
    # True: in float32, with the blocks in a loop, which compiles one of them; for statistics.
    looped: bool = False

    @nn.compact
    def __call__(
        self,
        images: UInt8[Array, "n s s 3"],
        kernels: KeyValueKernels | None = None,
        increment: Increment | tuple[Increment, ...] | None = None,
        dropout_key: Array | None = None,
        dropout_rate: float = 0.0,
    ) -> Float[Array, "n d"]:
        """Returns the pooled tokens after the final norm, in float32.

        Args:
            images: square RGB images, in [0, 255].
            kernels: of keys and values, and perhaps an adapter; None: the pretrained ones.
            increment: one increment of the kernels, or several.
            dropout_key: for dropping hidden units of the adapter in training; None: keeps them all.
            dropout_rate: share of hidden units to drop, less than 1.
        """
        variant = self.variant
        dtype, precision = PRECISIONS[self.precision]
        if self.looped:
            dtype, precision = jnp.float32, STATISTICS[self.precision]
        arithmetic = Arithmetic(dtype, precision, self.attention)
        moments: Any = (variant.mean, variant.std)
        if self.input_range == "model":
            offset, divisor = (jnp.reshape(jnp.asarray(m), (1, 1, 1, 3)) for m in moments)
        else:
            offset, divisor = INPUT_RANGES[self.input_range]
        pixels = (images.astype(jnp.float32) / 255.0 - offset) / divisor
        increments = increment if isinstance(increment, tuple) else (increment,)
        increments = tuple(factors for factors in increments if factors is not None)
        x = _PatchEmbedding(variant, arithmetic, name="embedding")(pixels.astype(dtype))
        if variant.tokens:
            shape = (1, variant.tokens, variant.width)
            tokens = self.param("cls", nn.initializers.zeros, shape).astype(dtype)
            tokens = jnp.broadcast_to(tokens, (x.shape[0], *shape[1:]))
            x = jnp.concatenate([tokens, x], axis=1)
        transformer = _Transformer(variant, arithmetic, self.looped, name="Transformer")
        return transformer(x, kernels, increments, dropout_key, dropout_rate)


def encode(
    model: VisionTransformer,
    backbone: Any,
    images: UInt8[Any, "n s s 3"],
    replaced: Replaced | None = None,
    *more: Any,
) -> Float[Array, "n d"]:
    """Returns features by E_t, whose `replaced` parameters stand in for those of E_0.

    `more` are increment, dropout key and dropout rate of `VisionTransformer`. Raises InputError if
    `replaced` is of neither form.
    """
    kernels: Any = replaced
    if replaced is not None and not {"key", "parameters"} & replaced.keys():
        raise InputError(
            "encoder: expected kernels by name, with key and value, or "
            f"vit.AllParameters(parameters=...), found {', '.join(replaced)}"
        )
    if replaced is not None and "parameters" in replaced:
        backbone, kernels = replaced["parameters"], None
    with jax.numpy_dtype_promotion("standard"):  # Flax's norms mix bfloat16 and float32.
        features: Any = model.apply({"params": backbone}, images, kernels, *more)
    return features


def build(
    variant: str | Variant,
    image_size: int,
    input_range: str = "pilot01",
    precision: str = "parity",
    attention: str = "auto",
    cudnn: bool = False,
) -> VisionTransformer:
    """Returns the encoder of a variant or of its name, for images of `image_size` pixels a side.

    `attention` is one of `ATTENTIONS`; `cudnn` is True if the devices have cuDNN's attention.

    Raises:
        InputError: a name is unknown, or the settings do not go together.
    """
    for field, value, known in (
        ("config.encoder.variant", variant, VARIANTS),
        ("config.data.input_range", input_range, (*INPUT_RANGES, "model")),
        ("config.precision", precision, PRECISIONS),
        ("config.encoder.attention", attention, ATTENTIONS),
    ):
        if isinstance(value, str) and value not in known:
            raise InputError(f"{field}: expected one of {', '.join(known)}, found {value!r}")
    variant = VARIANTS[variant] if isinstance(variant, str) else variant
    patch = variant.patch
    if image_size != variant.image_size and (image_size < patch or image_size % patch):
        raise InputError(
            f"config.encoder.image_size: expected a positive multiple of the patch size {patch}, "
            f"found {image_size}"
        )
    if input_range == "model" and variant.mean is None:
        raise InputError(
            "config.data.input_range: model expects a file with mean and deviation of the "
            "pre-training beside config.encoder.weights, found none; put timm's config.json or "
            "Hugging Face's preprocessor_config.json there, or set augreg ([-1, 1]) or pilot01 "
            "([0, 1])"
        )
    possible = precision == "fast" and cudnn
    if attention == "auto":
        attention = "cudnn" if possible else "xla"
    if attention == "cudnn" and not possible:
        raise InputError(
            "config.encoder.attention: cudnn expects config.precision=fast and NVIDIA GPUs from "
            f"Ampere on, found config.precision={precision} and {'such' if cudnn else 'no such'} "
            "GPUs"
        )
    return VisionTransformer(variant, input_range, precision, attention)


def in_float32(model: VisionTransformer) -> VisionTransformer:
    """Returns the encoder for passes over statistics, without cuDNN's 16-bit attention.

    It sows the inputs of every block's attention and MLP, [l, n, t, d].
    """
    return model.clone(looped=True, attention="xla")


def initialise(model: VisionTransformer, image_size: int, key: Array) -> Any:
    """Returns a random parameter tree, for pre-training and for tests."""
    images = jnp.zeros((1, image_size, image_size, 3), jnp.uint8)
    return model.init(key, images)["params"]


@cache  # Tracing takes as long as all other steps of opening a small encoder.
def parameter_shapes(model: VisionTransformer, image_size: int) -> Any:
    """Returns the parameter tree as shapes and dtypes; the tree is cached and must not change."""
    return jax.eval_shape(lambda: initialise(model, image_size, jax.random.key(0)))


# Layers of a block whose kernels learners update, by name; `qkv` is three layers side by side.
_ATTENTION = "MultiHeadDotProductAttention_1"
UPDATED_LAYERS = {
    "key": ((_ATTENTION, "key"),),
    "value": ((_ATTENTION, "value"),),
    "qkv": ((_ATTENTION, "query"), (_ATTENTION, "key"), (_ATTENTION, "value")),
    "fc1": (("MlpBlock_3", "Dense_0"),),
}


def pretrained_kernels(params: Any, names: tuple[str, ...] = ("key", "value")) -> Any:
    """Returns kernels [l, d, e] of a parameter tree, stacked over blocks, by name."""
    trunk = params["Transformer"]
    blocks = [trunk[f"encoderblock_{i}"] for i in range(sum("encoderblock" in n for n in trunk))]

    def stack(part, layer):
        kernels = [block[part][layer]["kernel"] for block in blocks]
        return jnp.stack([kernel.reshape(len(kernel), -1) for kernel in kernels])

    stacked = {}
    for name in names:
        parts = [stack(*path) for path in UPDATED_LAYERS[name]]
        stacked[name] = jnp.concatenate(parts, axis=-1)
    return stacked


def with_kernels(params: Any, kernels: Any) -> AllParameters:
    """Returns a parameter tree with kernels [l, d, e] in place of its own, by name."""
    flat: Any = traverse_util.flatten_dict(params)
    for name, stacked in kernels.items():
        paths = UPDATED_LAYERS[name]
        for path, kernel in zip(paths, jnp.split(stacked, len(paths), axis=-1), strict=True):
            for number, of_block in enumerate(kernel):
                leaf = ("Transformer", f"encoderblock_{number}", *path, "kernel")
                flat[leaf] = of_block.reshape(flat[leaf].shape)
    return AllParameters(parameters=traverse_util.unflatten_dict(flat))
