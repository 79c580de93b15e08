"""Floating-point operations of an encoder, by formula, and the peak rate of a device."""

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import measure
from fdc_jax.model import vit


def forward(variant: vit.Variant, image_size: int) -> int:
    """Returns the operations of a forward pass of one image through merged kernels.

    A multiplication and an addition count as two; norms, softmax, GELU and biases count as zero.
    With width d, L blocks, patches of p x p pixels, and N tokens (N - 1 patches, one class token):

        patch embedding             2 (N - 1) 3 p^2 d
        each of L - 1 blocks        query, key, value   6 N d^2
                                    attention           4 N^2 d
                                    projection          2 N d^2
                                    MLP                16 N d^2
        last block                  key, value          4 N d^2
          (class token only)        all else           20 d^2 + 4 N d
    """
    tokens, width = (image_size // variant.patch) ** 2 + 1, variant.width
    embedding = 6 * (tokens - 1) * variant.patch**2 * width
    block = 24 * tokens * width**2 + 4 * tokens**2 * width
    last = 4 * tokens * width**2 + 20 * width**2 + 4 * tokens * width
    return embedding + (variant.depth - 1) * block + last


def training_step(variant: vit.Variant, image_size: int, rank: int, batch_size: int) -> int:
    """Returns the operations of a training step of key and value increments.

    The sum of the forward pass and of the gradients of activations and increments; the encoder's
    weights and the input of block one have no gradient. The head is not counted. In the terms of
    `forward`, with rank r and a batch of n images:

        block one                   projection, MLP     n 18 N d^2
                                    attention           n 6 N^2 d    (no gradient of queries)
        each of L - 2 blocks        as forward          n 24 N d^2
                                    attention           n 8 N^2 d
        last block                  key, value          n 4 N d^2
                                    all else            n (20 d^2 + 8 N d)
        each of L blocks            the sum W + A B     4 d^2 r      (once per batch)
                                    A and B             n 16 N d r
    """
    tokens, width, depth = (image_size // variant.patch) ** 2 + 1, variant.width, variant.depth
    first = 18 * tokens * width**2 + 6 * tokens**2 * width
    block = 24 * tokens * width**2 + 8 * tokens**2 * width
    last = 4 * tokens * width**2 + 20 * width**2 + 8 * tokens * width
    increments = depth * 16 * tokens * width * rank
    per_image = forward(variant, image_size) + first + (depth - 2) * block + last + increments
    return batch_size * per_image + depth * 4 * width**2 * rank


def peak(precision: str) -> float:
    """Returns the operations per second of all devices in a product of large matrices.

    Seconds are processor time on a processor, which other programs share, otherwise the clock's.
    """
    on_processor = jax.default_backend() == "cpu"
    size = 1536 if on_processor else 8192
    dtype, exactness = vit.PRECISIONS[precision]
    left = jnp.ones((size, size), dtype)
    product = jax.jit(lambda left, right: jnp.matmul(left, right, precision=exactness))
    product(left, left).block_until_ready()
    seconds = [measure.timed(lambda: product(left, left))[1] for _ in range(5)]
    return jax.device_count() * 2 * size**3 / float(np.min(seconds, axis=0)[int(on_processor)])
