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
from fdc_jax.model import operations
from fdc_jax.model.vit import Replaced, VisionTransformer, in_float32


def attention_input_moments(
    setup: LearnerSetup, backbone: Any, kernels: Replaced, batches: Iterable[Batch]
) -> tuple[Float[Array, "l d d"], float]:
    """Returns the mean of x x^T, not centred, of every block, and the number of tokens.

    x is the output of the block's first norm, the input of the key and value projections. The mean
    is over all tokens, the class token included, of all images with a weight. Encoder and products
    run in float32 at highest precision in every mode; sums stay on the device.

    Raises:
        TrainingError: the inputs of a block are not finite.
    """
    model, variant = in_float32(setup.model), setup.variant
    total = jnp.zeros((variant.depth, variant.width, variant.width))
    images, tokens = jnp.zeros(()), 0
    for batch in batches:
        count, side = batch.images.shape[:2]
        size = operations.images_together(setup.mesh, count, side, variant.patch)
        total, images = add_batch(model, size, backbone, kernels, batch, total, images)
        tokens = (side // variant.patch) ** 2 + 1
    number = jnp.maximum(images * tokens, 1.0)
    finite = np.isfinite(np.asarray(total.sum(axis=(1, 2))))
    if not finite.all():
        raise TrainingError(
            f"block {int(np.argmin(finite))}: expected finite attention inputs, but the encoder "
            "diverged in training; smaller learning rates may help"
        )
    return total / number, float(images) * tokens


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=(5, 6))
def add_batch(model: VisionTransformer, size: int, backbone, kernels, batch, total, images):
    """Returns the sums of products and of images with those of a batch, in portions of `size`."""

    def add_portion(total, portion):
        _, captured = model.apply(
            {"params": backbone}, portion.images, kernels, mutable=["intermediates"]
        )
        blocks = captured["intermediates"]["Transformer"]
        names = [f"encoderblock_{block}" for block in range(len(total))]
        of_blocks: Any = [blocks[name]["attention_input"][0] for name in names]
        inputs = jnp.stack(of_blocks).astype(jnp.float32)
        weighted = inputs * portion.weights[None, :, None, None]
        products = jnp.einsum("lntd,lnte->lde", weighted, inputs, precision="highest")
        return total + products, None

    if size == len(batch.images):
        total, _ = add_portion(total, batch)
    else:
        portions = jax.tree.map(lambda leaf: leaf.reshape(-1, size, *leaf.shape[1:]), batch)
        total, _ = jax.lax.scan(add_portion, total, portions)
    return total, images + batch.weights.sum()
