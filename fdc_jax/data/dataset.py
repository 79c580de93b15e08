"""The common form of a data set: labels, names, and images by index."""

import collections
import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import numpy as np
from jaxtyping import Int
from PIL import Image

from fdc_jax.data import images
from fdc_jax.errors import counted, escaped

# Accepted names of a split for testing, by preference.
TEST_NAMES = ("test", "val", "validation")


@dataclasses.dataclass
class Skipped:
    """Files and frames that are skipped, and images to report, by reason."""

    paths: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    OTHER: ClassVar[str] = "files without the suffix of an image"

    def add(self, reason: str, path: Sequence[str]) -> None:
        """Adds a path, given as the names below the searched folder."""
        self.paths.setdefault(reason, []).append(escaped("/".join(path)))

    def counts(self, limit: int = 3) -> dict[str, str]:
        """Returns for each reason the number of paths, with the first ones."""
        texts = {}
        for reason, paths in self.paths.items():
            more = ["..."] if len(paths) > limit else []
            examples = ", ".join(paths[:limit] + more)
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
    grey_bits: int = 0  # of grey of 16 bits, see `images.decode`; 0: no such image
    pixel_hashes: Callable[[], Sequence[bytes]] = tuple  # `images.pixels_sha256` per image
    skipped: Skipped = dataclasses.field(default_factory=lambda: Skipped())  # in both splits

    def __len__(self) -> int:
        return len(self.labels)

    def image(self, index: int) -> Image.Image:
        """Returns a decoded image; raises InputError if it cannot be read."""
        return images.decode(self.read(index), self.describe(index), self.upright, self.grey_bits)

    def describe(self, index: int) -> str:
        """Returns the name of an image in error messages."""
        return f"{self.name}, split {self.split}, image {index} ({self.ids[index]})"

    @functools.cached_property
    def checksum(self) -> str:
        """SHA-256 of names, labels and pixels, whatever their order, in 64 hexadecimal digits."""
        digest = hashlib.sha256(json.dumps(list(self.class_names)).encode())
        if self.grey_bits:
            digest.update(f"\ngrey of {self.grey_bits} bits".encode())
        for name, label, pixels in self._records():
            digest.update(os.fsencode(f"\n{name}\t{label}\t{pixels.hex()}"))
        return digest.hexdigest()

    def _records(self) -> list[tuple[str, int, bytes]]:
        return sorted(zip(self.ids, self.labels.tolist(), self.pixel_hashes(), strict=True))


def with_notes(
    train: Dataset, test: Dataset, facts: Mapping[str, Sequence[images.Facts]]
) -> tuple[Dataset, Dataset]:
    """Returns both splits; adds notes on their files and pictures to `skipped` of `train`.

    `facts` are those of every image, by split.
    """
    skipped = train.skipped
    for split in (train, test):
        _note_files(split, facts.get(split.split, ()), skipped)
        _note_two_classes(split, skipped)
    in_train = {*train.pixel_hashes()}
    for name, pixels in zip(test.ids, test.pixel_hashes(), strict=True):
        if pixels in in_train:
            skipped.add("test images that are in train, too", ("test", name))
    return train, test


def _note_files(split: Dataset, facts: Sequence[images.Facts], skipped: Skipped) -> None:
    """Adds files with further frames, and grey of 16 bits, to `skipped`."""
    further = counted(sum(fact.frames - 1 for fact in facts), "frame")
    for name, fact in zip(split.ids, facts, strict=False):
        if fact.frames > 1:
            reason = f"files with {further} after the first in {split.split}"
            skipped.add(reason, (f"{name} has {fact.frames}",))
        if fact.grey_bits:
            reason = f"grey images whose {split.grey_bits} bits are scaled to 8"
            skipped.add(reason, (split.split, name))
        if fact.grey_bits > split.grey_bits:
            reason = f"grey images with values of more than {split.grey_bits} bits, which are cut"
            skipped.add(reason, (split.split, name))


def _note_two_classes(split: Dataset, skipped: Skipped) -> None:
    """Adds pictures in two classes to `skipped`, each with the first image of the same pixels."""
    first_index: dict[bytes, int] = {}
    pairs: list[str] = []
    classes: collections.Counter[tuple[int, int]] = collections.Counter()
    for index, pixels in enumerate(split.pixel_hashes()):
        first = first_index.setdefault(pixels, index)
        labels = int(split.labels[first]), int(split.labels[index])
        if labels[0] != labels[1]:
            pairs.append(f"{split.ids[first]} = {split.ids[index]}")
            classes[min(labels), max(labels)] += 1
    if pairs:
        most, _ = classes.most_common(1)[0]
        names = " and ".join(split.class_names[label] for label in most)
        text = f"{counted(len(classes), 'pair')} of classes, such as {names}"
        reason = f"the same picture in two classes of {split.split} ({text})"
        for pair in pairs:
            skipped.add(reason, (pair,))


def draw(names: Sequence[str], share: float) -> list[int]:
    """Returns the indices of the images of a class that are held out.

    Of n images, in the order of the SHA-256 of their names, they are the first round(share n), at
    least 1 and at most n - 1. Other classes have no influence.
    """
    digests = [hashlib.sha256(os.fsencode(name)).digest() for name in names]
    count = min(max(round(share * len(names)), 1), len(names) - 1)
    return sorted(range(len(names)), key=digests.__getitem__)[:count]


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
