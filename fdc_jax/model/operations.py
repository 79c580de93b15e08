"""The operations of the encoder in the forms that were measured to be fast; `vit` says what it is.

Every function gives what its plain formula gives, but for rounding; docs/performance.md has the
measurements. They differ from the formula in what is kept for the gradient, in which dtype sums
are taken, and in what devices take together.
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
    """How an encoder computes."""

    dtype: Any  # of the activations
    precision: jax.lax.Precision  # of the products
    # `xla`: as XLA compiles products and softmax; `cudnn`: a kernel of NVIDIA's, for 16-bit floats.
    attention: str


class Factors(TypedDict):
    """Factors of a low-rank kernel update A B, the transpose of the paper's B_k A_k.

    With a scale, one number a column of A, the update is A diag(scale) B.
    """

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


# What follows the first layer of an MLP; swiglu takes twice the hidden units, gates first.
ACTIVATIONS = {
    "gelu": _gelu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "swiglu": _swiglu,
}


def activate(name: str, x: Float[Array, "*n h"]) -> Float[Array, "*n u"]:
    """Returns an activation of hidden units, by its name in `ACTIVATIONS`."""
    # In float32 nothing is rounded, and the slope is computed where it is used.
    if x.dtype != jnp.bfloat16 or name == "swiglu":
        return ACTIVATIONS[name](x)
    return with_kept_slope(ACTIVATIONS[name], x)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def with_kept_slope(
    function: Callable[[Array], Array], x: Float[Array, "..."]
) -> Float[Array, "..."]:
    """Returns a function of every entry, whose slope is kept for the gradient instead of x.

    Both are computed in float32, together, and kept in the dtype of x: memory is the same, and the
    backward pass has one product an entry instead of erf and exp.
    """
    return function(x.astype(jnp.float32)).astype(x.dtype)


def _slope_forward(function, x):
    wide = x.astype(jnp.float32)
    value, slope = jax.jvp(function, (wide,), (jnp.ones_like(wide),))
    return value.astype(x.dtype), slope.astype(x.dtype)


def _slope_backward(function, slope, gradient):
    # Joined to the products on both its sides, as a TPU's compiler would, it takes longer.
    return (jax.lax.optimization_barrier(slope * gradient),)


with_kept_slope.defvjp(_slope_forward, _slope_backward)


# Products -----------------------------------------------------------------------------------------


def _over_tokens(left, right, dtype, precision):
    """Returns left' right, summed over all tokens in a dtype.

    Images and tokens as one axis would be copied first on a TPU, as their number fills no tiles.
    """
    axes = tuple(range(left.ndim - 1))
    return jnp.tensordot(
        left, right, (axes, axes), precision=precision, preferred_element_type=dtype
    )


def _as_row(vector, x):
    """Returns a vector as a row of x, in its dtype."""
    return vector.reshape((1,) * (x.ndim - 1) + (-1,)).astype(x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def dense(
    x: Float[Array, "*n d"],
    weight: Float[Array, "d e"],
    bias: Float[Array, " e"],
    precision: jax.lax.Precision,
) -> Float[Array, "*n e"]:
    """Returns x W + b in the dtype of x; gradients of W and b are summed in their own dtype."""
    return jnp.matmul(x, weight.astype(x.dtype), precision=precision) + _as_row(bias, x)


def _dense_forward(x, weight, bias, precision):
    return dense(x, weight, bias, precision), (x, weight, bias[:0])


def _dense_backward(precision, residuals, gradient):
    x, weight, bias = residuals
    of_weight = _over_tokens(x, gradient, weight.dtype, precision)
    of_x = jnp.matmul(gradient, weight.astype(x.dtype).T, precision=precision)
    return of_x, of_weight, gradient.sum(axis=tuple(range(x.ndim - 1)), dtype=bias.dtype)


dense.defvjp(_dense_forward, _dense_backward)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def product_with_updates(
    x: Float[Array, "*n d"],
    kernel: Float[Array, "d e"],
    updates: tuple[Factors, ...],
    precision: jax.lax.Precision,
) -> Float[Array, "*n e"]:
    """Returns x (W + sum of A B) in the dtype of x, with the sum of the kernels taken in their own.

    The sum is made once, so that an update costs no product over tokens. The gradients of factors
    and scales take the way over the rank, and none is as large as the kernel's, so that devices
    have little to add up.

    Args:
        x: tokens, on any leading axes.
        kernel: W.
        updates: factors of one block.
        precision: of the products over tokens.
    """
    return _product_forward(x, kernel, updates, precision)[0]


def _product_forward(x, kernel, updates, precision):
    for each in updates:
        scaled = each["A"] * each["scale"][None] if "scale" in each else each["A"]
        kernel = kernel + jnp.matmul(scaled, each["B"], precision=jax.lax.Precision.HIGHEST)
    merged = kernel.astype(x.dtype)
    # A value without elements, for the dtype of the kernel's gradient.
    return jnp.matmul(x, merged, precision=precision), (x, merged, kernel[:0], updates)


def _product_backward(precision, residuals, gradient):
    x, merged, kernel, updates = residuals

    def times(left, right):
        return jnp.matmul(left, right, precision=precision)

    def of_factors(factors):
        a, b = factors["A"], factors["B"]
        before, behind = times(x, a.astype(x.dtype)), times(gradient, b.astype(x.dtype).T)
        found = {
            "A": _over_tokens(x, behind, a.dtype, precision),
            "B": _over_tokens(before, gradient, b.dtype, precision),
        }
        if "scale" in factors:
            scale, tokens = factors["scale"], tuple(range(x.ndim - 1))
            found = {"A": found["A"] * scale[None], "B": found["B"] * scale[:, None]}
            found["scale"] = jnp.sum(before.astype(scale.dtype) * behind, axis=tokens)
        return found

    # What nothing asks for is compiled away.
    of_kernel = _over_tokens(x, gradient, kernel.dtype, precision)
    return times(gradient, merged.T), of_kernel, tuple(map(of_factors, updates))


product_with_updates.defvjp(_product_forward, _product_backward)


# Attention ----------------------------------------------------------------------------------------


def attend(
    q: Float[Array, "n q h e"],
    k: Float[Array, "n k h e"],
    v: Float[Array, "n k h e"],
    arithmetic: Arithmetic,
) -> Float[Array, "n q h e"]:
    """Returns softmax(q k / sqrt(e)) v of every head; scores and softmax are float32."""
    # Few queries, as in the last block or the pooling, leave a fused kernel nothing to gain.
    if arithmetic.attention == "cudnn" and q.shape == k.shape:
        return _attend_fused(q, k, v)
    precision = arithmetic.precision
    scores = jnp.einsum(
        "bqhd,bkhd->bhqk",
        q * jnp.asarray(q.shape[-1] ** -0.5, q.dtype),
        k,
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v, precision=precision)


def _attend_fused(q, k, v):
    """Returns the same by cuDNN's kernel; JAX has its gradient for even numbers of tokens only."""
    tokens = q.shape[1]
    if tokens % 2 == 0:
        return jax.nn.dot_product_attention(q, k, v, implementation="cudnn")
    q, k, v = (jnp.pad(array, ((0, 0), (0, 1), (0, 0), (0, 0))) for array in (q, k, v))
    lengths = jnp.full(len(q), tokens)
    return jax.nn.dot_product_attention(
        *(q, k, v),
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
        implementation="cudnn",
    )[:, :tokens]


def rotated(x: Float[Array, "n t k d"], angles: Float[np.ndarray, "t h"]) -> Any:
    """Turns the first tokens' queries or keys, pairs of entries half a head apart, in float32."""
    angles = angles[None, : x.shape[1], None]
    cos, sin = (jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin))
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [left * cos - right * sin, right * cos + left * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


# Portions of a batch ------------------------------------------------------------------------------

# Tokens of a portion of a batch by kind of device; others have batches whole. On a processor,
# measured in training ViT-Ti/16: half of it costs 2 %, twice as much 8 %, a batch of 64 images at
# once 27 %. On a TPU, estimated for ViT-B/16 on v5e: 4 %, 27 % and 38 %.
PORTION_TOKENS = {"cpu": 1100, "tpu": 3200}


def images_together(mesh: Mesh, images: int, side: int, patch: int) -> int:
    """Returns how many images of a batch a device takes through the encoder together.

    A core's caches, or a TPU's on-chip memory, hold the activations of some images, not those of a
    batch: a batch in portions is faster than at once. The size divides the batch. It depends on
    shapes and the kind of device, never on the number of cores, so that results are the same on
    any of them. Several devices have each batch divided already.

    Args:
        mesh: the devices; what a program depends on is asked of them, so that it can be compiled
            for others.
        images: of the batch.
        side: of an image, in pixels.
        patch: side of a patch.
    """
    tokens = PORTION_TOKENS.get(mesh.devices.flat[0].platform)
    if tokens is None or mesh.size > 1:
        return images
    most = max(1, tokens // ((side // patch) ** 2 + 1))
    if images <= most:
        return images
    best = max(size for size in range(1, most + 1) if images % size == 0)
    # Portions far below what fits are slower than the batch.
    return best if 2 * best >= most else images
