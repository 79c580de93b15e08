"""The embedded benchmark: handwritten digits of 8 x 8 pixels, enlarged, for quick trials.

Within each class, in the order of the file, images 2, 5, 8, ... (counted from 0) are test images,
so that about one third of every class is held out.
"""

import functools
import hashlib

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from fdc_jax.data.dataset import Dataset

IMAGE_SIZE = 32
_load = functools.cache(load_digits)


@functools.cache
def _enlarged(index: int) -> Image.Image:
    """Returns a scan as an image; short runs enlarge only the few that they read."""
    scan = _load(return_X_y=True)[0][index].reshape(8, 8)
    grey = Image.fromarray(np.round(scan * (255 / 16)).astype(np.uint8))
    size = (IMAGE_SIZE, IMAGE_SIZE)
    return grey.resize(size, Image.Resampling.BICUBIC).convert("RGB")


def open_digits() -> tuple[Dataset, Dataset]:
    """Returns the training and the test images."""
    scans, labels = map(np.asarray, _load(return_X_y=True))
    order = np.argsort(labels, kind="stable")
    rank = np.arange(len(order)) - np.searchsorted(labels[order], labels[order])
    class_names = tuple(map(str, range(10)))

    def split(name: str) -> Dataset:
        chosen = order[(rank % 3 == 2) == (name == "test")]
        ids = tuple(f"digit_{index:04d}" for index in chosen)

        def pixel_hashes() -> list[bytes]:
            # Of the scans: enlarging all of them takes longer than a short run should.
            return [hashlib.sha256(scan.tobytes()).digest() for scan in scans[chosen]]

        return Dataset(
            name="digits",
            split=name,
            partition="embedded",
            labels=labels[chosen].astype(np.int32),
            ids=ids,
            class_names=class_names,
            read=lambda row: _enlarged(int(chosen[row])),
            pixel_hashes=pixel_hashes,
        )

    return split("train"), split("test")
