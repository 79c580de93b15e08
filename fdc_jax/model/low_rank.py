"""The product of tokens with a kernel that carries a low-rank update, x (W + A B)."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def product(
    x: Float[Array, "*n d"],
    kernel: Float[Array, "d e"],
    a: Float[Array, "d r"],
    b: Float[Array, "r e"],
    precision: jax.lax.Precision,
) -> Float[Array, "*n e"]:
    """Returns x (W + A B) in the dtype of x, with the sum of the kernels taken in their own.

    The sum is made once, so that the update costs no product over tokens. The gradients of the
    factors take the way over the rank, and none is as large as the kernel's.

    Args:
        x: tokens, on any leading axes.
        kernel: W.
        a: A.
        b: B.
        precision: of the products over tokens.
    """
    return _forward(x, kernel, a, b, precision)[0]


def _forward(x, kernel, a, b, precision):
    update = jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
    merged = (kernel + update).astype(x.dtype)
    # A value without elements, for the dtype of the kernel's gradient.
    return jnp.matmul(x, merged, precision=precision), (x, merged, kernel[:0], a, b)


def _backward(precision, residuals, gradient):
    x, merged, kernel, a, b = residuals
    rows = x.reshape(-1, x.shape[-1])
    gradients = gradient.reshape(-1, gradient.shape[-1])

    def times(left, right, dtype=x.dtype):
        return jnp.matmul(left, right, precision=precision, preferred_element_type=dtype)

    in_rank = times(gradients, b.astype(x.dtype).T)
    return (
        times(gradient, merged.T),
        # Compiled away where nothing asks for it.
        times(rows.T, gradients, kernel.dtype),
        times(rows.T, in_rank, a.dtype),
        times(times(rows, a.astype(x.dtype)).T, gradients, b.dtype),
    )


product.defvjp(_forward, _backward)
