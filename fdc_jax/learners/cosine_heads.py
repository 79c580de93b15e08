"""Cosine heads: how they start, their loss, and the stored ones of a stream."""

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from fdc_jax.heads import CosineHead
from fdc_jax.learners import training

# Of the entries of a new head; only their direction matters.
HEAD_DEVIATION = 0.02


def new_rows(key: Array, classes: int, width: int) -> Float[Array, "c d"]:
    """Returns the rows of a head to train, normal with standard deviation 0.02."""
    return HEAD_DEVIATION * jax.random.normal(key, (classes, width))


def stored_heads(
    setup: training.Setup, rows: Float[Array, "tasks c d"], num_tasks: int
) -> list[CosineHead]:
    """Returns the heads of the first `num_tasks` tasks, unscaled and without padding."""
    return [CosineHead(each) for each in training.unpadded(setup, rows, num_tasks)]


def cosface(
    cosines: Float[Array, "n c"],
    labels: Int[Array, " n"] | Int[np.ndarray, " n"],
    class_mask: Bool[Array, " c"],
    weights: Float[Array, " n"] | Float[np.ndarray, " n"],
    scale: float,
    margin: float,
) -> Float[Array, ""]:
    """Returns the mean CosFace loss over the images of a batch (Wang et al., CVPR 2018, Eq. 4).

    Args:
        cosines: of features and class rows of a padded head, without a scale.
        labels: positions within the task.
        class_mask: which rows of the head are classes.
        weights: 0 for the padding of the last batch.
        scale: s, on all cosines.
        margin: m, taken off the cosine of the own class; 0 leaves plain cross-entropy.
    """
    own = jax.nn.one_hot(labels, cosines.shape[-1], dtype=cosines.dtype)
    return training.cross_entropy(scale * (cosines - margin * own), labels, class_mask, weights)
