"""First pass over a task: mean, principal components and class prototypes of one view.

A task of one block with fewer samples than dimensions is decomposed through the inner products of
its samples, an n x n matrix with the same eigenvalues; any other through its d x d covariance, for
which running sums suffice.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fdc_jax.heads import NORM_FLOOR, unit

# Energies nearer than this share of the whole are equal in float32, so a component count whose
# energy equals the threshold but for rounding reaches it.
ENERGY_TOLERANCE = 1e-6

# Samples of a small task are padded to a multiple of this: few shapes, few compilations.
SAMPLE_STEP = 128


class Moments(NamedTuple):
    """Running sums of one view, over features minus `origin`."""

    origin: Float[Array, " d"]
    total: Float[Array, " d"]
    scatter: Float[Array, "d d"]
    class_totals: Float[Array, "c d"]


class Components(NamedTuple):
    """Principal components of one view; energies descend, divided by the sample count.

    Directions are rows. Those of `sample_components` are neither of unit length nor exactly
    orthogonal: `retained_basis` makes a basis of the leading ones.
    """

    mean: Float[Array, " d"]
    energies: Float[Array, " k"]
    directions: Float[Array, "k d"]
    class_totals: Float[Array, "c d"]


def _sums(
    origin: Float[Array, " d"],
    features: Float[Array, "n d"],
    class_index: Int[Array, " n"],
    num_classes: int,
) -> Moments:
    present = (class_index >= 0).astype(features.dtype)[:, None]
    shifted = (features - origin) * present
    return Moments(
        origin,
        jnp.sum(shifted, axis=0),
        jnp.matmul(shifted.T, shifted, precision=jax.lax.Precision.HIGHEST),
        _class_totals(features, class_index, num_classes),
    )


def _class_totals(
    features: Float[Array, "n d"], class_index: Int[Array, " n"], num_classes: int
) -> Float[Array, "c d"]:
    members = jax.nn.one_hot(class_index, num_classes, dtype=features.dtype)
    return jnp.matmul(members.T, unit(features), precision=jax.lax.Precision.HIGHEST)


def block_mean(features: Float[Array, "n d"], present: Float[Array, "n 1"]) -> Float[Array, " d"]:
    """Returns the mean of the samples, taken relative to the first of them.

    Args:
        features: the block.
        present: one for samples, of which the first row is one; zero for padding.
    """
    shifted = (features - features[0]) * present
    return features[0] + jnp.sum(shifted, axis=0) / jnp.sum(present)


@partial(jax.jit, static_argnames="num_classes")
def first_moments(
    features: Float[Array, "n d"], class_index: Int[Array, " n"], num_classes: int
) -> Moments:
    """Starts the sums with a task's first block, whose mean becomes the origin.

    Sums of shifted features lose no digits to a mean far from zero. The block mean is itself taken
    relative to the first row, so that features that are all equal have exactly no variance.

    Args:
        features: the block, zero beyond its last sample.
        class_index: row of each sample's class; -1 for padding.
        num_classes: rows of the class totals.
    """
    present = (class_index >= 0).astype(features.dtype)[:, None]
    return _sums(block_mean(features, present), features, class_index, num_classes)


@partial(jax.jit, donate_argnums=0)
def add_moments(
    moments: Moments, features: Float[Array, "n d"], class_index: Int[Array, " n"]
) -> Moments:
    """Adds one more block; see `first_moments`."""
    more = _sums(moments.origin, features, class_index, moments.class_totals.shape[0])
    return Moments(
        moments.origin,
        moments.total + more.total,
        moments.scatter + more.scatter,
        moments.class_totals + more.class_totals,
    )


@jax.jit
def principal_components(
    moments: Moments, count: Float[Array, ""]
) -> tuple[Float[Array, " d"], Float[Array, " d"], Float[Array, "d d"]]:
    """Returns the mean, the eigenvalues of the centred covariance, and its eigenvectors as rows.

    Eigenvalues descend. The divisor is the sample count: the choice of components does not depend
    on it. Works on one view or, under `jax.vmap`, on several of one width.
    """
    shift = moments.total / count
    covariance = moments.scatter / count - jnp.outer(shift, shift)
    values, vectors = jnp.linalg.eigh(covariance)
    return moments.origin + shift, values[::-1], vectors.T[::-1]


def sample_rows(count: int, width: int) -> int | None:
    """Returns the padded number of samples for `sample_components`, or None where it costs more.

    Both ways are dominated by an eigendecomposition, cubic in its size.
    """
    rows = -(-count // SAMPLE_STEP) * SAMPLE_STEP
    return rows if rows < width else None


@partial(jax.jit, static_argnames="num_classes")
def sample_components(
    features: Float[Array, "n d"], class_index: Int[Array, " n"], num_classes: int
) -> Components:
    """Decomposes all samples of a task at once, through their inner products.

    With X the centred samples and X X^T v = s v, the eigenvector of the scatter X^T X is X^T v, of
    squared length s.

    Args:
        features: all samples, zero beyond the last.
        class_index: row of each sample's class; -1 for padding.
        num_classes: rows of the class totals.
    """
    present = (class_index >= 0).astype(features.dtype)[:, None]
    count = jnp.sum(present)
    origin = block_mean(features, present)
    shifted = (features - origin) * present
    shift = jnp.sum(shifted, axis=0) / count
    centred = (shifted - shift) * present
    highest = jax.lax.Precision.HIGHEST
    energies, vectors = jnp.linalg.eigh(jnp.matmul(centred, centred.T, precision=highest) / count)
    directions = jnp.matmul(vectors.T, centred, precision=highest)
    totals = _class_totals(features, class_index, num_classes)
    return Components(origin + shift, energies[::-1], directions[::-1], totals)


def retained_basis(directions: Float[np.ndarray, "r d"]) -> Float[np.ndarray, "r d"]:
    """Returns an orthonormal basis of independent directions, the leading ones first.

    A direction of little energy holds rounding of the ones before it, at most; taking those out of
    it one after the other, in float64, leaves what is its own.
    """
    basis = np.linalg.qr(np.asarray(directions, np.float64).T)[0]
    return np.ascontiguousarray(basis.T, np.float32)


def retained_rank(values: Float[np.ndarray, " d"], share: float, count: int) -> int:
    """Returns the fewest leading components with at least `share` of the variance (Eq. task-pca).

    A share that is reached exactly counts as reached. Features without any variance (one sample, or
    all equal) have rank 0: their subspace is the task mean alone. `count` samples span at most
    `count` - 1 directions, so rounding noise beyond those is never retained.

    Args:
        values: eigenvalues, descending; small negative ones are rounding and count as zero.
        share: retained energy, in (0, 1].
        count: number of samples.
    """
    energies = np.clip(np.asarray(values, np.float64), 0.0, None)
    total = energies.sum()
    if total <= 0.0 or count < 2:
        return 0
    short = np.cumsum(energies) / total < share - ENERGY_TOLERANCE
    return min(int(short.sum()) + 1, count - 1, len(energies))


def prototypes(
    class_totals: Float[np.ndarray, "c d"], counts: Int[np.ndarray, " c"]
) -> Float[np.ndarray, "c d"]:
    """Returns the renormalised class means of unit features (Eq. proto); zero for empty classes."""
    means = class_totals.astype(np.float64) / np.maximum(counts, 1)[:, None]
    norms = np.linalg.norm(means, axis=1, keepdims=True)
    return (means / np.maximum(norms, NORM_FLOOR)).astype(np.float32)
