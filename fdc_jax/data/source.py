"""What a data set offers to the rest of the library: labels, names, and encoded images by index."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable

import numpy as np
from jaxtyping import Int

from fdc_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class Source:
    """One split of one data set, in an order that does not depend on how the data are stored.

    Attributes:
        name: benchmark name, as in `fdc_jax.data.benchmarks.BENCHMARKS`.
        split: "train" or "test".
        partition: which division into train and test this is: "official" (the data set's own),
            "pilot", "random80", "embedded" or "other". Results carry it.
        labels: class index per image, rank of the class name in string order.
        ids: record identifier per image (file name or record id), for messages and manifests.
        class_names: name per class index.
        read_encoded: image index to the encoded image (JPEG, PNG, ...); safe from any thread.
        compute_checksum: SHA-256 of the stored files of this split.
    """

    name: str
    split: str
    partition: str
    labels: Int[np.ndarray, " n"]
    ids: tuple[str, ...]
    class_names: tuple[str, ...]
    read_encoded: Callable[[int], bytes]
    compute_checksum: Callable[[], str]

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def num_classes(self) -> int:
        """Number of classes of the data set, including any without an image in this split."""
        return len(self.class_names)

    def read(self, index: int) -> bytes:
        """Returns the encoded bytes of image `index`.

        Raises:
            InputError: the index is out of range or the record cannot be read.
        """
        if not 0 <= index < len(self):
            raise InputError(
                f"{self.name}, split {self.split}: image index must be between 0 and "
                f"{len(self) - 1}, found {index}"
            )
        return self.read_encoded(int(index))

    def describe(self, index: int) -> str:
        """Names image `index` for an error message."""
        return f"{self.name}, split {self.split}, image {index} ({self.ids[index]})"

    @property
    def checksum(self) -> str:
        """SHA-256, 64 hexadecimal digits, of the stored files of this split."""
        return self.compute_checksum()

    def cached(self, max_bytes: int) -> Source:
        """Returns a source that keeps encoded images in memory, up to `max_bytes` in all.

        An image is kept when it still fits and never dropped: images are read in a new order
        every epoch, where dropping the oldest would keep nothing useful.
        """
        cache = ByteCache(max_bytes)

        def read(index: int) -> bytes:
            found = cache.get(index)
            if found is None:
                found = self.read_encoded(index)
                cache.put(index, found, len(found))
            return found

        return dataclasses.replace(self, read_encoded=read)


class ByteCache:
    """A dictionary that stops admitting values at a limit in bytes; safe from any thread.

    Caches made with `beside` share one limit.
    """

    def __init__(self, max_bytes: int):
        if max_bytes < 0:
            raise InputError(f"a cache needs a limit of at least 0 bytes, found {max_bytes}")
        self.max_bytes = max_bytes
        self.bytes = 0
        self._values: dict = {}
        self._together: list[ByteCache] = [self]
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._values)

    def beside(self) -> ByteCache:
        """Returns an empty cache that may use what this one leaves of the limit."""
        other = ByteCache(self.max_bytes)
        other._together, other._lock = self._together, self._lock
        with self._lock:
            self._together.append(other)
        return other

    def get(self, key):
        """Returns the value kept under `key`, or None."""
        return self._values.get(key)

    def has_room(self, size: int) -> bool:
        """Says whether a value of `size` bytes would fit."""
        return sum(cache.bytes for cache in self._together) + size <= self.max_bytes

    def put(self, key, value, size: int) -> None:
        """Keeps `value` of `size` bytes if it fits and `key` is new."""
        with self._lock:
            if key not in self._values and self.has_room(size):
                self._values[key] = value
                self.bytes += size

    def clear(self) -> None:
        """Forgets all values, which makes room for others."""
        with self._lock:
            self._values.clear()
            self.bytes = 0
