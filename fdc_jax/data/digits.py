"""The embedded benchmark: handwritten digits of 8 x 8 pixels, enlarged; for trying things out.

Split: within each class, in the order of the file, images 2, 5, 8, ... (counted from 0) are test
images and the others are training images, so about one third of every class is held out.
"""

from __future__ import annotations

import functools
import hashlib
import io

import numpy as np
from PIL import Image

from fdc_jax.data.dataset import Dataset
from fdc_jax.errors import InputError

IMAGE_SIZE = 32


@functools.cache
def _scans() -> tuple[np.ndarray, np.ndarray]:
    """Returns the scans [1797, 8, 8], values 0 to 16, and their labels."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise InputError(f"benchmark digits needs scikit-learn: {error}") from error
    pixels, labels = load_digits(return_X_y=True)
    return np.asarray(pixels).reshape(-1, 8, 8), np.asarray(labels, np.int32)


def _encode(scan: np.ndarray) -> bytes:
    grey = Image.fromarray(np.round(scan * (255 / 16)).astype(np.uint8))
    enlarged = grey.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BICUBIC).convert("RGB")
    file = io.BytesIO()
    enlarged.save(file, "PNG")
    return file.getvalue()


def open_digits(split: str) -> Dataset:
    """Returns the training or the test split.

    Args:
        split: "train" or "test".
    """
    scans, labels = _scans()
    order = np.argsort(labels, kind="stable")
    rank = np.arange(len(order)) - np.searchsorted(labels[order], labels[order])
    held_out = rank % 3 == 2
    chosen = order[held_out if split == "test" else ~held_out]
    encoded = [_encode(scan) for scan in scans[chosen]]
    return Dataset(
        name="digits",
        split=split,
        partition="embedded",
        labels=labels[chosen],
        ids=tuple(f"digit_{index:04d}" for index in chosen),
        class_names=tuple(map(str, range(10))),
        read_encoded=encoded.__getitem__,
        compute_checksum=lambda: hashlib.sha256(scans[chosen].tobytes()).hexdigest(),
    )
