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
from fdc_jax.model.vit import Replaced, VisionTransformer, in_float32


def attention_input_moments(
    model: VisionTransformer, backbone: Any, kernels: Replaced, batches: Iterable[Batch]
) -> tuple[Float[Array, "l d d"], float]:
    """Returns the mean of x x^T, not centred, of every block, and the number of tokens.

    x is the output of the block's first norm, the input of the key and value projections. The mean
    is over all tokens, the class token included, of all images with a weight. Encoder and products
    run in float32 at highest precision in every mode; sums stay on the device.

    Raises:
        TrainingError: the inputs of a block are not finite.
    """
    model, depth, width = in_float32(model), model.variant.depth, model.variant.width
    total, images, tokens = jnp.zeros((depth, width, width)), jnp.zeros(()), 0
    for batch in batches:
        total, images, tokens = _accumulate(model, backbone, kernels, batch, total, images)
    count = jnp.maximum(images * tokens, 1.0)
    finite = np.isfinite(np.asarray(total.sum(axis=(1, 2))))
    if not finite.all():
        raise TrainingError(
            f"block {int(np.argmin(finite))}: expected finite attention inputs, but the encoder "
            "diverged in training; smaller learning rates may help"
        )
    return total / count, float(images) * int(tokens)


@partial(jax.jit, static_argnums=0, donate_argnums=4)
def _accumulate(model, backbone, kernels, batch, total, images):
    _, captured = model.apply(
        {"params": backbone}, batch.images, kernels, mutable=["intermediates"]
    )
    blocks = captured["intermediates"]["Transformer"]
    inputs = [blocks[f"encoderblock_{block}"]["attention_input"][0] for block in range(len(total))]
    inputs = jnp.stack(inputs).astype(jnp.float32)
    products = jnp.einsum("lntd,lnte,n->lde", inputs, inputs, batch.weights, precision="highest")
    return total + products, images + batch.weights.sum(), inputs.shape[2]
