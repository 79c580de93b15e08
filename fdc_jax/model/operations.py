"""The operations of the encoder (`vit`) in fast forms, measured in docs/studies/training_step.md.

Every function returns the value of its plain formula up to rounding. The forms differ in the
residuals of the gradient, in the dtype of sums, and in the number of images encoded together.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NotRequired, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fdc_jax.machine.devices import Mesh


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """Dtype and precision of an encoder's computations, and its kernel of attention."""

    dtype: Any  # of the activations
    precision: jax.lax.Precision  # of the products
    attention: str  # `xla`: compiled by XLA; `cudnn`: NVIDIA's fused kernel, for 16-bit floats

    @property
    def of_layers(self) -> dict[str, Any]:
        """The arguments of Flax's layers."""
        return {"dtype": self.dtype, "precision": self.precision}


class Factors(TypedDict):
    """Factors of a kernel update A B or A diag(scale) B, the transpose of the paper's B_k A_k."""

    A: Float[Array, "l d r"]
    B: Float[Array, "l r d"]
    scale: NotRequired[Float[Array, "l r"]]


# Activations --------------------------------------------------------------------------------------


def _gelu(x):
    # The exact GELU; jax.nn.gelu goes through erfc, which is several times slower on a CPU.
    return 0.5 * x * (1.0 + jax.lax.erf(x * jnp.asarray(0.5**0.5, x.dtype)))


def _swiglu(x):
    gate, value = jnp.split(x, 2, axis=-1)
    return jax.nn.silu(gate) * value


# Activations of the hidden units of an MLP; swiglu takes twice the hidden units, gates first.
ACTIVATIONS = {
    "gelu": _gelu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "swiglu": _swiglu,
}


def activate(name: str, x: Float[Array, "*n h"]) -> Float[Array, "*n u"]:
    """Returns hidden units after an activation, a key of `ACTIVATIONS`."""
    # In float32 the slope is computed in the backward pass.
    if x.dtype != jnp.bfloat16 or name == "swiglu":
        return ACTIVATIONS[name](x)
    return with_kept_slope(ACTIVATIONS[name], x)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def with_kept_slope(
    function: Callable[[Array], Array], x: Float[Array, "*n"]
) -> Float[Array, "*n"]:
    """Returns a function of every entry; the slope, not x, is the residual of the gradient.

    Value and slope are computed together in float32 and kept in the dtype of x: memory is the same,
    and the backward pass has one product per entry instead of erf and exp.
    """
    return function(x.astype(jnp.float32)).astype(x.dtype)


def _slope_forward(function, x):
    wide = x.astype(jnp.float32)
    value, slope = jax.jvp(function, (wide,), (jnp.ones_like(wide),))
    return value.astype(x.dtype), slope.astype(x.dtype)


def _slope_backward(function, slope, gradient):
    # The barrier keeps a TPU's compiler from fusing this with later products, which is slower.
    return (jax.lax.optimization_barrier(slope * gradient),)


with_kept_slope.defvjp(_slope_forward, _slope_backward)


# Products -----------------------------------------------------------------------------------------


def _over_tokens(left, right, dtype, precision):
    """Returns left' right, summed over images and tokens in a dtype.

    The two axes stay apart: a TPU would copy the arrays to merge them.
    """
    axes = tuple(range(left.ndim - 1))
    return jnp.tensordot(
        left, right, (axes, axes), precision=precision, preferred_element_type=dtype
    )


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def dense(
    x: Float[Array, "*n d"],
    weight: Float[Array, "d e"],
    bias: Float[Array, " e"],
    precision: jax.lax.Precision,
) -> Float[Array, "*n e"]:
    """Returns x W + b in the dtype of x; gradients of W and b are summed in their own dtype."""
    row = jnp.expand_dims(bias, range(x.ndim - 1)).astype(x.dtype)
    return jnp.matmul(x, weight.astype(x.dtype), precision=precision) + row


def _dense_forward(x, weight, bias, precision):
    return dense(x, weight, bias, precision), (x, weight, bias[:0])


def _dense_backward(precision, residuals, gradient):
    x, weight, bias = residuals
    w_gradient = _over_tokens(x, gradient, weight.dtype, precision)
    x_gradient = jnp.matmul(gradient, weight.astype(x.dtype).T, precision=precision)
    return x_gradient, w_gradient, gradient.sum(axis=tuple(range(x.ndim - 1)), dtype=bias.dtype)


dense.defvjp(_dense_forward, _dense_backward)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def product_with_updates(
    x: Float[Array, "*n d"],
    kernel: Float[Array, "d e"],
    updates: tuple[Factors, ...],
    precision: jax.lax.Precision,
) -> Float[Array, "*n e"]:
    """Returns x (W + sum of A B) in the dtype of x; the kernels are summed in their own dtype.

    An update, the factors of one block, adds no product over tokens. The gradients of factors and
    scales go through the rank and are smaller than the kernel's, so that devices exchange little.
    """
    return _product_forward(x, kernel, updates, precision)[0]


def _product_forward(x, kernel, updates, precision):
    for factors in updates:
        A = factors["A"] * factors["scale"][None] if "scale" in factors else factors["A"]
        kernel = kernel + jnp.matmul(A, factors["B"], precision=jax.lax.Precision.HIGHEST)
    merged = kernel.astype(x.dtype)
    # `kernel[:0]` has no elements; it carries the dtype of the kernel's gradient.
    return jnp.matmul(x, merged, precision=precision), (x, merged, kernel[:0], updates)


def _product_backward(precision, residuals, gradient):
    x, merged, kernel, updates = residuals

    def times(left, right):
        return jnp.matmul(left, right, precision=precision)

    def factor_gradients(factors):
        A, B = factors["A"], factors["B"]
        x_A, gradient_B = times(x, A.astype(x.dtype)), times(gradient, B.astype(x.dtype).T)
        gradients = {
            "A": _over_tokens(x, gradient_B, A.dtype, precision),
            "B": _over_tokens(x_A, gradient, B.dtype, precision),
        }
        if "scale" in factors:
            scale, tokens = factors["scale"], tuple(range(x.ndim - 1))
            gradients = {"A": gradients["A"] * scale[None], "B": gradients["B"] * scale[:, None]}
            gradients["scale"] = jnp.sum(x_A.astype(scale.dtype) * gradient_B, axis=tokens)
        return gradients

    # XLA removes the gradients that nothing reads.
    kernel_gradient = _over_tokens(x, gradient, kernel.dtype, precision)
    return times(gradient, merged.T), kernel_gradient, tuple(map(factor_gradients, updates))


product_with_updates.defvjp(_product_forward, _product_backward)


# Attention ----------------------------------------------------------------------------------------


def attend(
    q: Float[Array, "n q h e"],
    k: Float[Array, "n k h e"],
    v: Float[Array, "n k h e"],
    arithmetic: Arithmetic,
) -> Float[Array, "n q h e"]:
    """Returns softmax(q k / sqrt(e)) v of every head; scores and softmax are float32."""
    # A fused kernel gains nothing for the few queries of the last block and of the pooling.
    if arithmetic.attention == "cudnn" and q.shape == k.shape:
        return _attend_fused(q, k, v)
    precision = arithmetic.precision
    q = q * jnp.asarray(q.shape[-1] ** -0.5, q.dtype)
    kind: Any = {"precision": precision, "preferred_element_type": jnp.float32}
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, **kind)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v, precision=precision)


def _attend_fused(q, k, v):
    """Returns `attend` by cuDNN's kernel, whose gradient needs an even number of tokens."""
    tokens = q.shape[1]
    if tokens % 2 == 0:
        return jax.nn.dot_product_attention(q, k, v, implementation="cudnn")
    q, k, v = (jnp.pad(array, ((0, 0), (0, 1), (0, 0), (0, 0))) for array in (q, k, v))
    length = jnp.full(len(q), tokens)
    lengths: Any = {"query_seq_lengths": length, "key_value_seq_lengths": length}
    return jax.nn.dot_product_attention(q, k, v, implementation="cudnn", **lengths)[:, :tokens]


def rotate(x: Float[Array, "n t k d"], angles: Float[np.ndarray, "t h"]) -> Any:
    """Returns queries or keys rotated by the angles of their tokens, in float32.

    A rotation acts on pairs of entries half a head apart; `angles` may have more tokens than x.
    """
    angles = angles[None, : x.shape[1], None]
    cos, sin = (jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin))
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = [left * cos - right * sin, right * cos + left * sin]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


# Portions of a batch ------------------------------------------------------------------------------

# Tokens of a portion of a batch by platform; other platforms take whole batches. Training is slower
# with half as many tokens, twice as many, or 64 images at once: for ViT-Ti/16 on a CPU by 2 %, 8 %
# and 27 % (measured), for ViT-B/16 on a TPU v5e by 4 %, 27 % and 38 % (estimated).
PORTION_TOKENS = {"cpu": 1100, "tpu": 3200}


def images_together(mesh: Mesh, images: int, side: int, patch: int) -> int:
    """Returns the number of images that a device takes through the encoder together.

    A core's caches, or a TPU's on-chip memory, hold the activations of a few images: portions are
    faster than a whole batch. The number divides the batch. It follows from shapes and platform, so
    that results do not depend on the number of cores. Several devices take whole batches.
    `images` is the size of the batch, `side` and `patch` are sides in pixels.
    """
    tokens = PORTION_TOKENS.get(mesh.devices.flat[0].platform)
    if tokens is None or mesh.size > 1:
        return images
    limit = max(1, tokens // ((side // patch) ** 2 + 1))
    if images <= limit:
        return images
    best = max(size for size in range(1, limit + 1) if images % size == 0)
    # Portions much smaller than the memory are slower than the batch.
    return best if 2 * best >= limit else images
