"""The common form of a data set: labels, names, and images by index."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Callable, Container, Sequence

import numpy as np
from jaxtyping import Int
from PIL import Image

from fdc_jax.data import images
from fdc_jax.errors import InputError, escaped

# Accepted names of a split for testing, by preference.
TEST_NAMES = ("test", "val", "validation")


@dataclasses.dataclass(frozen=True)
class Dataset:
    """One split of a data set, in an order that does not depend on its storage."""

    name: str  # of the data set
    split: str  # "train" or "test"
    partition: str  # name of the division, for results: "pilot", "given", "0.2 of each class", ...
    labels: Int[np.ndarray, " n"]  # class index per image
    ids: tuple[str, ...]  # file name or record id per image
    class_names: tuple[str, ...]  # per class index, in the order given
    # Maps an image index to the file's content, or to decoded pixels; thread-safe.
    read: Callable[[int], bytes | Image.Image]
    upright: bool = False  # whether to turn images as their EXIF data say
    pixel_hashes: Callable[[], Sequence[bytes]] = tuple  # `images.pixels_sha256` per image

    def __post_init__(self) -> None:
        for name in self.class_names:
            if escaped(name) != name:
                raise InputError(
                    f"{self.name}: expected class names without control characters, found "
                    f"'{escaped(name)}'"
                )

    def __len__(self) -> int:
        return len(self.labels)

    def image(self, index: int) -> Image.Image:
        """Returns a decoded image.

        Raises:
            InputError: the image cannot be read.
        """
        return images.decode(self.read(index), self.describe(index), self.upright)

    @functools.cached_property
    def checksum(self) -> str:
        """SHA-256 of names, labels and pixels, 64 hexadecimal digits, whatever their order."""
        digest = hashlib.sha256(json.dumps(list(self.class_names)).encode())
        records = zip(self.ids, self.labels.tolist(), self.pixel_hashes(), strict=True)
        for name, label, pixels in sorted(records):
            digest.update(f"\n{name}\t{label}\t{pixels.hex()}".encode())
        return digest.hexdigest()

    def describe(self, index: int) -> str:
        """Returns the name of an image for an error message."""
        return f"{self.name}, split {self.split}, image {index} ({self.ids[index]})"


def class_checksums(*splits: Dataset) -> dict[str, str]:
    """Returns a checksum of each class, 16 hexadecimal digits of names and pixels of its images."""
    digests = {name: hashlib.sha256() for name in splits[0].class_names}
    for split in splits:
        for name, label, pixels in sorted(
            zip(split.ids, split.labels.tolist(), split.pixel_hashes(), strict=True)
        ):
            line = f"{split.split}\t{name}\t{pixels.hex()}\n"
            digests[split.class_names[label]].update(line.encode())
    return {name: digest.hexdigest()[:16] for name, digest in digests.items()}


def split_name(split: str, names: Container[str]) -> str:
    """Returns the name of the split "train" or "test" among the names of a source's splits."""
    return next((name for name in TEST_NAMES if split == "test" and name in names), split)


def default_workers() -> int:
    """Returns the number of processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
