"""Affinity in the within-class metric: beyond the paper, and off by default (docs/beyond.md).

Cosines between features mix what tells classes apart with what varies within each of them. With
the within-class covariance S of all classes so far and the mean m of their means, the cosine is
taken between W (h - m) and W (mu_c - m), where W' W is the inverse of S + lambda (tr S / d) I. Any
such W gives the same cosines; the inverse of the Cholesky factor is the cheapest.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from fdc_jax.calibration import measures, moments
from fdc_jax.heads import unit

# Least standard deviation of a task's own cosines, as of a task of one image: the evidence, which
# is linear in the standardised cosine, would have no bound otherwise. Usual ones are near 0.1.
DEVIATION_FLOOR = 0.01


class Sums(NamedTuple):
    """Running sums of a task in one view, over features minus `origin`."""

    origin: Float[Array, " d"]
    scatter: Float[Array, "d d"]
    class_sums: Float[Array, "c d"]


class WithinClass(NamedTuple):
    """What all tasks so far share in one view.

    Attributes:
        scatter: sum over images of the outer product of feature minus class mean.
        images: how many.
    """

    scatter: Float[Array, "d d"]
    images: int


class TaskAffinity(NamedTuple):
    """What is kept of a task in one view.

    Attributes:
        class_means: mean feature of each class; zero rows for classes without an image.
        mean: of the task's own largest cosines, in the metric of the time when it was learned.
        std: their population standard deviation, at least `DEVIATION_FLOOR`.
    """

    class_means: Float[np.ndarray, "c d"]
    mean: float
    std: float


class Metric(NamedTuple):
    """An origin, and the map whose inner products are those of the metric."""

    origin: Float[Array, " d"]
    whitener: Float[Array, "d d"]


class Prototypes(NamedTuple):
    """Whitened unit prototypes of all tasks, padded to one class count, and their metric."""

    metric: Metric
    directions: Float[Array, "tasks c d"]
    present: Bool[Array, "tasks c"]


def _sums(origin, features, class_index, num_classes: int) -> Sums:
    present = (class_index >= 0).astype(features.dtype)[:, None]
    shifted = (features - origin) * present
    members = jax.nn.one_hot(class_index, num_classes, dtype=features.dtype)
    highest = jax.lax.Precision.HIGHEST
    return Sums(
        origin,
        jnp.matmul(shifted.T, shifted, precision=highest),
        jnp.matmul(members.T, shifted, precision=highest),
    )


@partial(jax.jit, static_argnames="num_classes")
def first_sums(
    features: Float[Array, "n d"], class_index: Int[Array, " n"], num_classes: int
) -> Sums:
    """Starts the sums with a task's first block, whose mean becomes the origin.

    Args:
        features: the block, zero beyond its last sample.
        class_index: row of each sample's class; -1 for padding.
        num_classes: rows of the class sums.
    """
    present = (class_index >= 0).astype(features.dtype)[:, None]
    return _sums(moments.block_mean(features, present), features, class_index, num_classes)


@partial(jax.jit, donate_argnums=0)
def add_sums(sums: Sums, features: Float[Array, "n d"], class_index: Int[Array, " n"]) -> Sums:
    """Adds one more block; see `first_sums`."""
    more = _sums(sums.origin, features, class_index, sums.class_sums.shape[0])
    return Sums(sums.origin, sums.scatter + more.scatter, sums.class_sums + more.class_sums)


@jax.jit
def within_class(
    sums: Sums, counts: Float[Array, " c"]
) -> tuple[Float[Array, "d d"], Float[Array, "c d"]]:
    """Returns a task's scatter about its class means, and these means."""
    offsets = sums.class_sums / jnp.maximum(counts, 1.0)[:, None]
    between = jnp.matmul(offsets.T * counts, offsets, precision=jax.lax.Precision.HIGHEST)
    means = jnp.where(counts[:, None] > 0, sums.origin + offsets, 0.0)
    # Exactly symmetric, so that half of it is all there is to keep.
    upper = jnp.triu(sums.scatter - between)
    return upper + jnp.triu(upper, 1).T, means


def centre(
    class_means: Sequence[Float[np.ndarray, "c d"]], counts: Sequence[Int[np.ndarray, " c"]]
) -> Float[np.ndarray, " d"]:
    """Returns the mean of the class means of all tasks; zero for a single class.

    With one class alone the mean would be that class, and leave it without a direction.

    Args:
        class_means: of each task.
        counts: images of each class; those without any do not count.
    """
    means = np.concatenate([m[c > 0] for m, c in zip(class_means, counts, strict=True)])
    if len(means) < 2:
        return np.zeros(means.shape[1], np.float32)
    return means.mean(axis=0, dtype=np.float64).astype(np.float32)


@jax.jit
def metric(
    scatter: Float[Array, "d d"],
    images: Float[Array, ""] | np.float32,
    origin: Float[Array, " d"],
    shrinkage: Float[Array, ""] | np.float32,
) -> Metric:
    """Returns the metric of a within-class scatter.

    Args:
        scatter: of all tasks so far.
        images: how many images it sums over.
        origin: m.
        shrinkage: lambda, above 0; all there is where no class varies.
    """
    covariance = scatter / images
    variance = jnp.trace(covariance) / len(covariance)
    # Cosines do not depend on the scale, so that float32 gets numbers near one.
    scaled = covariance / jnp.where(variance > 0, variance, 1.0)
    identity = jnp.eye(len(covariance), dtype=covariance.dtype)
    factor = jnp.linalg.cholesky(scaled + shrinkage * identity)
    return Metric(origin, jax.scipy.linalg.solve_triangular(factor, identity, lower=True))


@jax.jit
def is_finite(metric: Metric) -> Bool[Array, ""]:
    """Returns whether float32 could factorise the covariance."""
    return jnp.isfinite(metric.whitener).all()


def directions(metric: Metric, vectors: Float[Array, "... d"]) -> Float[Array, "... d"]:
    """Returns W (h - m) over its length; zero where the vector is the origin."""
    shifted = vectors - metric.origin
    return unit(jnp.matmul(shifted, metric.whitener.T, precision=jax.lax.Precision.HIGHEST))


def cosines(prototypes: Prototypes, features: Float[Array, "n d"]) -> Float[Array, "n tasks c"]:
    """Returns the cosine of every feature to every class; minus infinity where there is none."""
    tasks, classes, width = prototypes.directions.shape
    flat = prototypes.directions.reshape(tasks * classes, width)
    found = measures.products(directions(prototypes.metric, features), flat)
    return jnp.where(prototypes.present, found.reshape(-1, tasks, classes), -jnp.inf)


@jax.jit
def largest_cosine(prototypes: Prototypes, features: Float[Array, "n d"]) -> Float[Array, " n"]:
    """Returns the largest cosine of every feature to any class of one task."""
    return jnp.max(cosines(prototypes, features)[:, 0], axis=-1)


def extended(shared: WithinClass | None, scatter: Float[Array, "d d"], images: int) -> WithinClass:
    """Returns what tasks share once one more has been added to them."""
    if shared is None:
        return WithinClass(scatter, images)
    return WithinClass(shared.scatter + scatter, shared.images + images)


def metric_of(
    shared: WithinClass,
    class_means: Sequence[Float[np.ndarray, "c d"]],
    counts: Sequence[Int[np.ndarray, " c"]],
    shrinkage: float,
) -> Metric:
    """Returns the metric of all tasks so far.

    Args:
        shared: their scatter.
        class_means: of each task.
        counts: images of each class.
        shrinkage: lambda.
    """
    origin = jnp.asarray(centre(class_means, counts))
    return metric(shared.scatter, np.float32(shared.images), origin, np.float32(shrinkage))
