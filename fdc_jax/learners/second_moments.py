"""Second moments of attention inputs, which several learners build their subspaces from."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fdc_jax.data.batches import Batch
from fdc_jax.errors import InputError, TrainingError
from fdc_jax.model.vit import Replaced, VisionTransformer, in_float32


def attention_input_moments(
    model: VisionTransformer,
    backbone: Any,
    kernels: Replaced,
    batches: Iterable[Batch],
) -> tuple[Float[Array, "l d d"], float]:
    """Returns, for every block, the mean of x x^T over all tokens of all images, not centred.

    x is the output of the block's first norm, which enters the key and value projections; the class
    token counts like any other. Encoder and products run in float32 at highest precision, also
    where training does not; sums stay on the device.

    Rows of weight 0 do not count. Also returns the number of tokens that these are means over.

    Raises:
        InputError: the encoder replaces more than key and value kernels.
        TrainingError: the inputs of a block are not finite.
    """
    if "parameters" in kernels:
        raise InputError("attention inputs: expected key and value kernels, found all parameters")
    model = in_float32(model)
    depth, width = kernels["key"].shape[0], kernels["key"].shape[-1]
    total = jnp.zeros((depth, width, width))
    images = jnp.zeros(())
    tokens = 0
    for batch in batches:
        total, images, tokens = _accumulate(model, backbone, kernels, batch, total, images)
    count = jnp.maximum(images * tokens, 1.0)
    finite = np.isfinite(np.asarray(total.sum(axis=(1, 2))))
    if not finite.all():
        raise TrainingError(
            f"the attention inputs of block {int(np.argmin(finite))} are not finite; the encoder "
            f"diverged in training, smaller learning rates may help"
        )
    return total / count, float(images) * int(tokens)


@partial(jax.jit, static_argnums=0, donate_argnums=4)
def _accumulate(model, backbone, kernels, batch, total, images):
    _, captured = model.apply(
        {"params": backbone}, batch.images, kernels, mutable=["intermediates"]
    )
    blocks = captured["intermediates"]["Transformer"]
    inputs = jnp.stack(
        [blocks[f"encoderblock_{block}"]["attention_input"][0] for block in range(len(total))]
    ).astype(jnp.float32)
    products = jnp.einsum(
        "lntd,lnte,n->lde", inputs, inputs, batch.weights, precision=jax.lax.Precision.HIGHEST
    )
    return total + products, images + batch.weights.sum(), inputs.shape[2]
