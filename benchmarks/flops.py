"""Floating-point operations of an encoder, by formula, and what devices can do in a second."""

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import measure
from fdc_jax.model import vit

# Peaks in 10^12 operations a second by part of a device's name: (bfloat16 dense, float32 without
# TF32). From the manufacturers' data sheets; a TPU has no published float32 peak.
PEAKS: tuple[tuple[str, float, float | None], ...] = (
    ("H100 PCIe", 756.0, 51.0),
    ("H100", 989.0, 67.0),
    ("H200", 989.0, 67.0),
    ("A100", 312.0, 19.5),
    ("TPU v4", 275.0, None),
    ("TPU v5 lite", 197.0, None),
    ("TPU v5e", 197.0, None),
    ("TPU v5", 459.0, None),
    ("TPU v6 lite", 918.0, None),
)


def forward(variant: vit.Variant, image_size: int) -> int:
    """Returns the operations of a forward pass of one image through merged kernels.

    A multiplication and an addition count as two; norms, softmax, GELU and biases not at all. With
    width d, L blocks, patches of p pixels a side, N tokens of which N - 1 are patches:

        patch embedding             2 (N - 1) 3 p^2 d
        L - 1 blocks, each          query, key, value   6 N d^2
                                    attention           4 N^2 d
                                    projection          2 N d^2
                                    MLP                16 N d^2
        last block                  key, value          4 N d^2
          (one token leaves it)     all else           20 d^2 + 4 N d
    """
    tokens, width = (image_size // variant.patch) ** 2 + 1, variant.width
    embedding = 6 * (tokens - 1) * variant.patch**2 * width
    block = 24 * tokens * width**2 + 4 * tokens**2 * width
    last = 4 * tokens * width**2 + 20 * width**2 + 4 * tokens * width
    return embedding + (variant.depth - 1) * block + last


def training_step(variant: vit.Variant, image_size: int, rank: int, batch_size: int) -> int:
    """Returns the operations of a training step of key and value increments and a head.

    The forward pass, the gradients of activations and those of the increments; no weight of the
    encoder has one, and neither has the input of block one. The head is left out. In the terms of
    `forward`, with rank r and a batch of n images:

        block one                   projection, MLP     n 18 N d^2
                                    attention           n 6 N^2 d    (no gradient of queries)
        L - 2 blocks, each          as forward          n 24 N d^2
                                    attention           n 8 N^2 d
        last block                  key, value          n 4 N d^2
                                    all else            n (20 d^2 + 8 N d)
        L blocks, each              the sum W + A B     4 d^2 r      (once a batch)
                                    A and B             n 16 N d r
    """
    tokens, width, depth = (image_size // variant.patch) ** 2 + 1, variant.width, variant.depth
    first = 18 * tokens * width**2 + 6 * tokens**2 * width
    block = 24 * tokens * width**2 + 8 * tokens**2 * width
    last = 4 * tokens * width**2 + 20 * width**2 + 8 * tokens * width
    increments = depth * 16 * tokens * width * rank
    per_image = forward(variant, image_size) + first + (depth - 2) * block + last + increments
    return batch_size * per_image + depth * 4 * width**2 * rank


def peak(precision: str, tflops: float = 0.0) -> float | None:
    """Returns the peak operations per second of all devices, None where it is not known.

    That of a processor is measured: a product of large matrices in the same precision, per second
    of processor time.

    Args:
        precision: `parity` or `fast`.
        tflops: the peak where the user knows it, else 0.
    """
    if tflops:
        return 1e12 * tflops
    if jax.default_backend() == "cpu":
        return float(product_rate(precision)[1])
    kind = jax.devices()[0].device_kind
    for name, low, single in PEAKS:
        if name in kind:
            teraflops = single if precision == "parity" else low
            return None if teraflops is None else 1e12 * teraflops * jax.device_count()
    return None


def product_rate(precision: str, size: int = 1536) -> np.ndarray:
    """Returns the operations of a product of large matrices per second of clock and processor."""
    dtype, exactness = vit.PRECISIONS[precision]
    left = jnp.ones((size, size), dtype)
    product = jax.jit(lambda left, right: jnp.matmul(left, right, precision=exactness))
    product(left, left).block_until_ready()
    seconds = [measure.timed(lambda: product(left, left))[1] for _ in range(5)]
    return 2 * size**3 / np.min(seconds, axis=0)
