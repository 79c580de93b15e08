"""Random features and ridge regression on them, shared by RanPAC and AnaCP.

Random features and their Gram matrices are float32 at the highest matmul precision under
`jax.jit`, where nearly all the work is. Sums over tasks and the solves are float64 on the host: a
Gram matrix of thousands of correlated features has a condition number far beyond float32.
"""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jaxtyping import Array, Float

# Rows expanded to random features at a time.
ROWS = 1024
RIDGES = 10.0 ** np.arange(-8, 9)


def gaussian_matrix(
    random: np.random.Generator, width: int, projections: int
) -> Float[Array, "d m"]:
    """Returns standard normal numbers."""
    return jnp.asarray(random.standard_normal((width, projections), np.float32))


@partial(jax.jit, static_argnames="activation")
def expand(
    features: Float[Array, "n d"], matrix: Float[Array, "d m"], activation: str
) -> Float[Array, "n m"]:
    """Returns activation(g R), "relu" or the exact "gelu"."""
    products = jnp.matmul(features, matrix, precision=jax.lax.Precision.HIGHEST)
    return (
        jax.nn.relu(products) if activation == "relu" else jax.nn.gelu(products, approximate=False)
    )


def expanded_parts(
    features: Float[np.ndarray, "n d"],
    onehot: Float[np.ndarray, "n c"],
    matrix: Float[Array, "d m"],
    activation: str,
) -> Iterator[tuple[Float[Array, "rows m"], Float[np.ndarray, "rows c"]]]:
    """Yields random features and labels some rows at a time."""
    for start in range(0, len(features), ROWS):
        rows = slice(start, start + ROWS)
        yield expand(jnp.asarray(features[rows]), matrix, activation), onehot[rows]


@jax.jit
def moments(
    expanded: Float[Array, "n m"], onehot: Float[Array, "n c"]
) -> tuple[Float[Array, "m m"], Float[Array, "m c"]]:
    """Returns h'h and h'Y."""
    highest = jax.lax.Precision.HIGHEST
    return (
        jnp.matmul(expanded.T, expanded, precision=highest),
        jnp.matmul(expanded.T, onehot, precision=highest),
    )


def solve_ridge(
    gram: Float[np.ndarray, "m m"], ridge: float, targets: Float[np.ndarray, "m c"]
) -> Float[np.ndarray, "m c"]:
    """Returns (G + lambda I)^-1 Q in float64."""
    shifted = gram.copy()
    shifted[np.diag_indices_from(shifted)] += ridge
    try:
        factor = scipy.linalg.cho_factor(shifted, overwrite_a=True)
        return scipy.linalg.cho_solve(factor, targets)
    except np.linalg.LinAlgError:
        # A tiny lambda cannot outweigh the float32 rounding of a singular G.
        values, vectors = np.linalg.eigh(gram)
        inverse = 1.0 / (np.maximum(values, 0.0) + ridge)
        return (vectors * inverse) @ (vectors.T @ targets)


def best_ridge(
    expanded: Float[np.ndarray, "n m"], onehot: Float[np.ndarray, "n c"], split: int
) -> float:
    """Returns the member of `RIDGES` with the least squared error on the rows from `split` on.

    All candidates share one eigendecomposition, of the smaller of the two Gram matrices of the
    first `split` rows: (H'H + l I)^-1 H'Y = H'(HH' + l I)^-1 Y. Ties go to the smallest.
    """
    wide = expanded.astype(np.float64)
    fit, held = wide[:split], wide[split:]
    labels, truth = onehot[:split].astype(np.float64), onehot[split:]
    if split <= wide.shape[1]:
        values, vectors = np.linalg.eigh(fit @ fit.T)
        left, right = (held @ fit.T) @ vectors, vectors.T @ labels
    else:
        values, vectors = np.linalg.eigh(fit.T @ fit)
        left, right = held @ vectors, vectors.T @ (fit.T @ labels)
    values = np.maximum(values, 0.0)[:, None]
    losses = [np.mean((left @ (right / (values + ridge)) - truth) ** 2) for ridge in RIDGES]
    return float(RIDGES[int(np.argmin(losses))])
