"""Data sets as the rest of the package sees them: labels, names, and encoded images by index."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Container, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

SPLITS = ("train", "test")
# What they may be called where images come from: of these the first that is there is for testing.
SPLIT_NAMES = ("train", "test", "val", "validation")


def name_of(split: str, there: Container[str]) -> str:
    """Returns what a split is called among the names that are there."""
    names = SPLIT_NAMES[:1] if split == "train" else SPLIT_NAMES[1:]
    return next((name for name in names if name in there), split)


@dataclasses.dataclass(frozen=True)
class Dataset:
    """One split of a benchmark, in an order that does not depend on how it is stored."""

    name: str  # of the benchmark
    split: str  # "train" or "test"
    partition: str  # which division into train and test: see `benchmarks.Benchmark`
    labels: Int[np.ndarray, " n"]  # class index per image
    ids: tuple[str, ...]  # file name or record id per image
    class_names: tuple[str, ...]  # per class index, which is the order given
    read: Callable[[int], bytes]  # image index to the encoded image; safe from any thread
    compute_checksum: Callable[[], str]
    # What the checksum was before images of further classes were appended, each time.
    earlier_checksums: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def checksum(self) -> str:
        """SHA-256 of what the images are, however they are stored; 64 hexadecimal digits."""
        return self.compute_checksum()

    def describe(self, index: int) -> str:
        """Names image `index` for an error message."""
        return f"{self.name}, split {self.split}, image {index} ({self.ids[index]})"


class RawImage(NamedTuple):
    """An image to be prepared."""

    name: str  # identifier within its split
    class_name: str
    place: str  # where it lies, for messages
    read: Callable[[], bytes]  # returns the encoded image; safe from any thread
    fields: dict[str, Any]  # of its record, beside image and label
    size: int  # bytes, or somewhat more


class RawData(NamedTuple):
    """A data set to be prepared."""

    splits: dict[str, list[RawImage]]  # "train" and "test"
    class_names: list[str]  # in the order of their labels, the order given
    superclass_names: list[str] | None = None  # of CIFAR-100

    def labels(self, split: str) -> Int[np.ndarray, " n"]:
        """Class index per image of a split."""
        label = {name: index for index, name in enumerate(self.class_names)}
        return np.array([label[image.class_name] for image in self.splits[split]], np.int64)


def data_folder(path: str | os.PathLike[str] = "") -> Path:
    """Returns `path`, or TFDS's own folder: `$TFDS_DATA_DIR`, or `~/tensorflow_datasets`."""
    default = os.environ.get("TFDS_DATA_DIR") or os.path.join("~", "tensorflow_datasets")
    return Path(path or default).expanduser()


def default_workers() -> int:
    """Number of processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def images_sha256(class_names: Iterable[str], records: Iterable[tuple[str, int, bytes]]) -> str:
    """Returns the checksum of images: names, labels and pixels, however they are stored.

    Args:
        class_names: by class index.
        records: identifier, class index and `images.pixels_sha256` of each image, in any order.
    """
    digest = hashlib.sha256(json.dumps(list(class_names)).encode())
    for name, label, pixels in sorted(records):
        digest.update(f"\n{name}\t{label}\t{pixels.hex()}".encode())
    return digest.hexdigest()
