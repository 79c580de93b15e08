"""RSIAT's calibration: cosine heads re-trained on features drawn from one Gaussian per class."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float

from fdc_jax import heads as head_types
from fdc_jax.errors import TrainingError
from fdc_jax.learners import gaussian_alignment, training
from fdc_jax.learners.gaussian_alignment import ClassGaussians

MOMENTUM = 0.9


def calibrate(
    settings,
    heads: Float[Array, "t c d"],
    gaussians: ClassGaussians,
    seen: Bool[np.ndarray, "t c"],
    rate: float,
    decay: float,
    key: Array,
) -> Float[Array, "t c d"]:
    """Returns the heads trained on features drawn from the Gaussians, along a cosine.

    Args:
        settings: fields of `learner.rsiat`.
        heads: rows of all heads.
        gaussians: of all classes.
        seen: which of them to draw, those of the first tasks.
        rate: learning rate of the first epoch.
        decay: of the rows.
        key: random key.

    Raises:
        TrainingError: a head is not finite afterwards.
    """
    tasks_done = int(seen.any(axis=1).sum())
    calibration = _calibration(
        settings.calibration_optimizer,
        settings.scale,
        decay,
        settings.samples_per_class,
        settings.calibration_batch_size,
    )
    calibrated = calibration(
        heads,
        gaussians,
        seen,
        gaussian_alignment.mean_scales(settings.mean_scale, len(seen), tasks_done),
        training.learning_rates("cosine", settings.calibration_epochs, rate),
        key,
    )
    if not np.isfinite(np.asarray(calibrated)).all():
        raise TrainingError(
            f"classifier calibration after task {tasks_done} diverged; smaller learning rates may "
            f"help, see learner.rsiat.calibration_learning_rate"
        )
    return calibrated


@functools.cache
def _calibration(optimizer: str, scale: float, decay: float, samples: int, batch_size: int):
    """Returns one compiled calibration for all tasks of a run."""

    def calibration_loss(heads, features, labels, weights, seen):
        # A norm has no derivative at zero, where heads to come are.
        heads = jnp.where(seen[..., None], heads, 1.0)
        cosines = jax.vmap(lambda head: head_types.CosineHead(head).logits(features), out_axes=1)(
            heads
        )
        return gaussian_alignment.cross_entropy_over_all(scale * cosines, labels, weights, seen)

    kind = optax.trace(MOMENTUM) if optimizer == "sgd" else optax.scale_by_adam()
    directions = optax.chain(optax.add_decayed_weights(decay), kind)
    return gaussian_alignment.retraining(calibration_loss, directions, samples, batch_size)
