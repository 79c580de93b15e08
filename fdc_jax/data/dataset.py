"""The common form of a data set: labels, names, and images by index."""

import collections
import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
from jaxtyping import Int
from PIL import Image

from fdc_jax.data import images
from fdc_jax.errors import escaped

# Accepted names of a split for testing, by preference.
TEST_NAMES = ("test", "val", "validation")


@dataclasses.dataclass
class Skipped:
    """Paths that a search for images skips or reports, by reason."""

    paths: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    OTHER: ClassVar[str] = "files without the suffix of an image"

    def add(self, reason: str, path: Sequence[str]) -> None:
        """Adds a path, given as the names below the searched folder."""
        self.paths.setdefault(reason, []).append(escaped("/".join(path)))

    def counts(self, limit: int = 3) -> dict[str, str]:
        """Returns for each reason the number of paths, with the first ones."""
        texts = {}
        for reason, paths in self.paths.items():
            examples = ", ".join(paths[:limit]) + ", ..." * (len(paths) > limit)
            if reason == self.OTHER:
                kinds = collections.Counter(os.path.splitext(path)[1].lower() for path in paths)
                common = kinds.most_common(5)
                examples = ", ".join(f"{count} {kind or 'without any'}" for kind, count in common)
                if {".heic", ".heif"} & kinds.keys():
                    examples += "; pip install pillow-heif"
            texts[reason] = f"{len(paths):,} ({examples})"
        return texts

    def text(self, limit: int = 3) -> str:
        """Returns the counts in one line."""
        return "; ".join(f"{reason}: {text}" for reason, text in self.counts(limit).items())


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
    upright: bool = False  # whether to apply the orientation in EXIF data
    pixel_hashes: Callable[[], Sequence[bytes]] = tuple  # `images.pixels_sha256` per image
    skipped: Skipped = dataclasses.field(default_factory=lambda: Skipped())  # in both splits

    def __len__(self) -> int:
        return len(self.labels)

    def image(self, index: int) -> Image.Image:
        """Returns a decoded image; raises InputError if it cannot be read."""
        return images.decode(self.read(index), self.describe(index), self.upright)

    def describe(self, index: int) -> str:
        """Returns the name of an image in error messages."""
        return f"{self.name}, split {self.split}, image {index} ({self.ids[index]})"

    @functools.cached_property
    def checksum(self) -> str:
        """SHA-256 of names, labels and pixels, whatever their order, in 64 hexadecimal digits."""
        digest = hashlib.sha256(json.dumps(list(self.class_names)).encode())
        for name, label, pixels in self._records():
            digest.update(os.fsencode(f"\n{name}\t{label}\t{pixels.hex()}"))
        return digest.hexdigest()

    def _records(self) -> list[tuple[str, int, bytes]]:
        return sorted(zip(self.ids, self.labels.tolist(), self.pixel_hashes(), strict=True))


def class_checksums(*splits: Dataset) -> dict[str, str]:
    """Returns a checksum of each class, 16 hexadecimal digits of names and pixels of its images."""
    digests = {name: hashlib.sha256() for name in splits[0].class_names}
    for split in splits:
        for name, label, pixels in split._records():
            line = f"{split.split}\t{name}\t{pixels.hex()}\n"
            digests[split.class_names[label]].update(os.fsencode(line))
    return {name: digest.hexdigest()[:16] for name, digest in digests.items()}


def default_workers() -> int:
    """Returns the number of processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
