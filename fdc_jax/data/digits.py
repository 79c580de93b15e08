"""The embedded benchmark: handwritten digits of 8 x 8 pixels, enlarged; for trying things out.

Split: within each class, in the order of the file, images 2, 5, 8, ... (counted from 0) are test
images and the others are training images, so about one third of every class is held out.
"""

from __future__ import annotations

import functools
import hashlib

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from fdc_jax.data import images
from fdc_jax.data.dataset import Dataset

IMAGE_SIZE = 32
_load = functools.cache(load_digits)


@functools.cache
def _encode(index: int) -> bytes:
    """Returns a scan as a file; most runs of seconds read few of them."""
    scan = _load(return_X_y=True)[0][index].reshape(8, 8)
    grey = Image.fromarray(np.round(scan * (255 / 16)).astype(np.uint8))
    enlarged = grey.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BICUBIC)
    return images.png(enlarged.convert("RGB"))


def open_digits(split: str) -> Dataset:
    """Returns the split "train" or "test"."""
    pixels, labels = _load(return_X_y=True)
    scans, labels = np.asarray(pixels).reshape(-1, 8, 8), np.asarray(labels, np.int32)
    order = np.argsort(labels, kind="stable")
    rank = np.arange(len(order)) - np.searchsorted(labels[order], labels[order])
    chosen = order[(rank % 3 == 2) == (split == "test")]
    return Dataset(
        name="digits",
        split=split,
        partition="embedded",
        labels=labels[chosen],
        ids=tuple(f"digit_{index:04d}" for index in chosen),
        class_names=tuple(map(str, range(10))),
        read=lambda row: _encode(int(chosen[row])),
        compute_checksum=lambda: hashlib.sha256(scans[chosen].tobytes()).hexdigest(),
    )
