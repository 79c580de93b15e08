"""RSIAT's losses on features: steering in the first task, alignment and repulsion afterwards."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from fdc_jax import heads as head_types

# Keeps a mean over no pair at zero.
PAIR_FLOOR = 1e-6


def steering_loss(
    features: Float[Array, "n d"],
    labels: Int[Array, " n"] | Int[np.ndarray, " n"],
    weights: Float[Array, " n"] | Float[np.ndarray, " n"],
    separation_weight: float,
    threshold: float,
) -> Float[Array, ""]:
    """Returns how far same classes are from cosine 1, and how far others exceed a threshold.

    Both are means over ordered pairs of different images.

    Args:
        features: of a batch.
        labels: positions within the task.
        weights: 0 for padding.
        separation_weight: on the pairs of different classes.
        threshold: the cosine up to which they cost nothing.
    """
    units = head_types.unit(features)
    cosines = jnp.matmul(units, units.T, precision=jax.lax.Precision.HIGHEST)
    real = jnp.asarray(weights) > 0
    pairs = real[:, None] & real & ~jnp.eye(len(cosines), dtype=bool)
    same = jnp.asarray(labels)[:, None] == jnp.asarray(labels)

    def mean(costs, counted):
        return jnp.sum(jnp.where(counted, costs, 0.0)) / (jnp.sum(counted) + PAIR_FLOOR)

    compact = mean(jax.nn.relu(1.0 - cosines), pairs & same)
    separate = mean(jax.nn.relu(cosines - threshold), pairs & ~same)
    return compact + separation_weight * separate


def projection_losses(
    project: Callable[[Float[Array, "n d"]], Float[Array, "n d"]],
    features: Float[Array, "n d"],
    earlier: Float[Array, "n d"],
    weights: Float[Array, " n"] | Float[np.ndarray, " n"],
    means: Float[Array, "m d"],
    mean_mask: Bool[Array, " m"],
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Returns the alignment and the repulsion loss.

    The first is the mean over images and coordinates of the squared difference between features and
    projected earlier features; the second is the mean cosine of projected means and projected
    earlier features, which has a gradient for the projector alone.

    Args:
        project: the projector.
        features: of the encoder in training.
        earlier: of the same images by the encoder before the task.
        weights: 0 for padding.
        means: of earlier classes.
        mean_mask: which of them count.
    """
    images = jnp.sum(weights)
    projected = project(earlier)
    alignment = jnp.sum(weights * jnp.mean((features - projected) ** 2, axis=1)) / images
    # A norm has no derivative at zero, where slots without a class are.
    projected_means = head_types.unit(project(jnp.where(mean_mask[:, None], means, 1.0)))
    mean_of_means = jnp.sum(projected_means * mean_mask[:, None], axis=0)
    mean_of_means = mean_of_means / jnp.maximum(jnp.sum(mean_mask), 1)
    directions = head_types.unit(projected)
    mean_of_images = jnp.sum(jnp.asarray(weights)[:, None] * directions, axis=0) / images
    return alignment, jnp.sum(mean_of_means * mean_of_images)
