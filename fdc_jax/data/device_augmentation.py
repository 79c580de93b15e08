"""The training transform on the device, for images that are all small squares of one size.

Batches carry the images as they are stored, with the crop box of each, and become what
`images.train_transform` gives, pixel for pixel, in one compiled call. Pillow resizes rows, rounds
to whole levels, then resizes columns, each with weights that are whole multiples of 2^-22; such a
pass is a product with a small matrix per image. The weights are split into their upper and lower 11
bits, so that float32 sums of weights times levels stay whole numbers below 2^24, and nothing is
rounded but where Pillow rounds. Images are only enlarged: where it shrinks them, the order of
Pillow's passes depends on its version.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, Int32, UInt8

from fdc_jax.data import images, stream
from fdc_jax.errors import InputError

# Sides in pixels beyond this are decoded and resized faster where they are.
MAX_SIDE = 64
# Pillow's weights of 8-bit images, and how they are split here.
_WEIGHT_BITS = 22
_LOWER_BITS = 11


class SmallBatch(NamedTuple):
    """A training batch before its transform; rows of weight 0 are padding.

    Attributes:
        images: as stored.
        labels: as in `stream.Batch`.
        weights: likewise.
        boxes: left, top, width and height of the crop, and 1 where the result is mirrored.
    """

    images: UInt8[np.ndarray, "b h h 3"]
    labels: Int32[np.ndarray, " b"]
    weights: Float32[np.ndarray, " b"]
    boxes: Int32[np.ndarray, "b 5"]


class SmallTrainBatches(stream.TrainBatches):
    """The training batches of one task, each a `SmallBatch`; takes what `TrainBatches` takes.

    Raises:
        InputError: an image that is no square like the first, or larger than the transform's result
            or than `MAX_SIDE` pixels a side.
    """

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.largest = min(self.image_size, MAX_SIDE)
        self.image_size = min(self._image(int(self.indices[0])).width, self.largest)

    def _pixels(self, index: int) -> UInt8[np.ndarray, "h h 3"]:
        image, side = self._image(index), self.image_size
        if image.size != (side, side):
            raise InputError(
                f"{self.source.describe(index)}: images augmented on the device must be squares of "
                f"one size, at most {self.largest} pixels a side: expected {side} x {side}, found "
                f"{image.width} x {image.height}; set config.data.augment_on_device=False"
            )
        return np.asarray(image)

    def _transform(self, uniforms: Float[np.ndarray, "n k"]) -> _Stored:
        return _Stored(lambda row: self._pixels(int(self.indices[row])), uniforms)

    def _start(
        self,
        pool: ThreadPoolExecutor,
        rows: Int[np.ndarray, " m"],
        transform: Callable[[int], UInt8[np.ndarray, "h h 3"]],
    ) -> tuple[SmallBatch, list[Future[None]]]:
        batch, jobs = super()._start(pool, rows, transform)
        boxes = np.zeros((self.batch_size, 5), np.int32)
        for slot, row in enumerate(rows):
            boxes[slot] = self._box(transform.uniforms[row])
        return SmallBatch(*batch, boxes), jobs

    def _box(self, uniforms: Float[np.ndarray, " k"]) -> tuple[int, int, int, int, int]:
        left, top, right, bottom = images.random_crop_box(
            self.image_size, self.image_size, uniforms, self.crop_scale
        )
        return left, top, right - left, bottom - top, int(self.flip and uniforms[-1] < 0.5)


class _Stored(NamedTuple):
    pixels: Callable[[int], UInt8[np.ndarray, "h h 3"]]
    uniforms: Float[np.ndarray, "n k"]

    def __call__(self, row: int) -> UInt8[np.ndarray, "h h 3"]:
        return self.pixels(row)


def bilinear_weights(length: int, size: int) -> Int32[np.ndarray, "s n"]:
    """Returns Pillow's weights for resizing `length` pixels to `size`, in units of 2^-22.

    A triangle around the centre of each new pixel, wider where pixels are merged, in float64.
    """
    scale = length / size
    reach = max(scale, 1.0)
    weights = np.zeros((size, length), np.int32)
    for new in range(size):
        centre = (new + 0.5) * scale
        first = max(int(centre - reach + 0.5), 0)
        last = min(int(centre + reach + 0.5), length)
        distance = np.abs((np.arange(first, last) - centre + 0.5) / reach)
        triangle = np.maximum(1.0 - distance, 0.0)
        share = triangle / triangle.sum()
        weights[new, first:last] = np.floor(0.5 + share * (1 << _WEIGHT_BITS))
    return weights


def weight_table(side: int, size: int) -> Float32[np.ndarray, "lengths 2s h"]:
    """Returns the weights of every crop length from 0 to `side`, upper bits above lower bits."""
    table = np.zeros((side + 1, 2 * size, side), np.float32)
    for length in range(1, side + 1):
        weights = bilinear_weights(length, size)
        table[length, :size, :length] = weights >> _LOWER_BITS
        table[length, size:, :length] = weights & ((1 << _LOWER_BITS) - 1)
    return table


@functools.cache
def augmentation(side: int, size: int) -> Callable[[Any], stream.Batch]:
    """Returns the transform of a `SmallBatch` to a `Batch`, compiled at the first call.

    Args:
        side: of the images as stored.
        size: of the result.
    """
    table = weight_table(side, size)

    def one(image: UInt8[Array, "h h 3"], box: Int[Array, " 5"]) -> UInt8[Array, "s s 3"]:
        left, top, width, height, mirrored = box
        # Weights beyond the crop are zero: whatever pixels come to stand there.
        steps = jnp.arange(side)
        rows, columns = (jnp.minimum(steps + first, side - 1) for first in (top, left))
        pixels = _resized(jnp.asarray(table)[width], image[rows][:, columns], "kx,yxc->ykc")
        pixels = _resized(jnp.asarray(table)[height], pixels, "ky,yxc->kxc")
        return jnp.where(mirrored == 1, pixels[:, ::-1], pixels).astype(jnp.uint8)

    @jax.jit
    def augment(batch: Any) -> stream.Batch:
        pixels: Any = jax.vmap(one)(batch.images, batch.boxes)
        return stream.Batch(pixels, batch.labels, batch.weights)

    return augment


def _resized(
    weights: Float[Array, "2s n"], pixels: Int[Array, ...], product: str
) -> Int[Array, ...]:
    sums = jnp.einsum(
        product,
        weights,
        pixels.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    ).astype(jnp.int32)
    upper, lower = jnp.split(sums, 2, axis=product.split("->")[1].index("k"))
    half = 1 << (_WEIGHT_BITS - 1)
    return ((upper << _LOWER_BITS) + lower + half) >> _WEIGHT_BITS
