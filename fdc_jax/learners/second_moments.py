"""Second moments of attention inputs, the source of several learners' subspaces."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fdc_jax.data.batches import Batch
from fdc_jax.errors import TrainingError
from fdc_jax.learners.training import LearnerSetup
from fdc_jax.machine import devices
from fdc_jax.model import operations, vit


def attention_input_moments(
    setup: LearnerSetup, backbone: Any, kernels: vit.Replaced, batches: Iterable[Batch]
) -> tuple[Float[Array, "l d d"], float]:
    """Returns the mean of x x^T, not centred, of every block, and the number of tokens.

    x is the output of the block's first norm, the input of the key and value projections. The mean
    is over all tokens, the class token included, of all images with a weight. Encoder (see
    `vit.in_float32`) and products run in float32 in every mode; sums stay on the device.

    Raises:
        TrainingError: the inputs of a block are not finite.
    """
    model, variant = vit.in_float32(setup.model), setup.variant
    zeros = jnp.zeros((variant.depth, variant.width, variant.width)), jnp.zeros(())
    # Placed as the sums that follow, for which the program would be compiled again.
    sums = devices.replicate(setup.mesh, zeros)
    for batch in batches:
        count, side = batch.images.shape[:2]
        size = operations.images_together(setup.mesh, count, side, variant.patch)
        sums = add_batch(model, size, backbone, kernels, batch, sums)
    total, tokens = sums
    finite = np.isfinite(np.asarray(total.sum(axis=(1, 2))))
    if not finite.all():
        raise TrainingError(
            f"block {int(np.argmin(finite))}: expected finite attention inputs, but the encoder "
            "diverged in training; smaller learning rates may help"
        )
    return total / jnp.maximum(tokens, 1.0), float(tokens)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=5)
def add_batch(model, size: int, backbone, kernels, batch, sums):
    """Returns sums of products and of tokens with those of a batch, in portions of `size`."""

    def add_portion(sums, portion):
        total, tokens = sums
        parameters = {"params": backbone}
        _, sown = model.apply(parameters, portion.images, kernels, mutable=["intermediates"])
        (inputs,) = sown["intermediates"]["Transformer"]["attention_inputs"]
        weighted = inputs * portion.weights[None, :, None, None]
        products = jnp.einsum("lntd,lnte->lde", weighted, inputs, precision="highest")
        return (total + products, tokens + inputs.shape[2] * portion.weights.sum()), None

    portions = jax.tree.map(lambda leaf: leaf.reshape(-1, size, *leaf.shape[1:]), batch)
    return jax.lax.scan(add_portion, sums, portions)[0]
