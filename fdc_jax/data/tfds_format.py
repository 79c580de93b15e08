"""Data that TensorFlow Datasets has prepared; the only module that knows that package.

TensorFlow is neither needed nor imported: array_record files are read by random access, TFRecord
files by the places of their records.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow_datasets as tfds

from fdc_jax.data import images
from fdc_jax.data.dataset import Dataset, default_workers, name_of
from fdc_jax.errors import InputError
from fdc_jax.machine.files import read_npz, write_npz

_CHUNK = 256
_TEXT = tfds.features.Text


def find(name: str, data_dir: Path) -> Path | None:
    """Returns the folder of the newest version of a prepared data set; None if there is none.

    Raises:
        InputError: there are several configurations of it.
    """
    # A folder may hold several configurations, and each of them versions.
    below = data_dir / name
    patterns = ("*/dataset_info.json", "*/*/dataset_info.json")
    found = [path.parent for pattern in patterns for path in below.glob(pattern)]
    if len({folder.parent for folder in found}) > 1:
        places = ", ".join(sorted({folder.parent.name for folder in found}))
        raise InputError(f"{below}: expected one configuration, found {places}")

    def version(folder: Path) -> list[int]:
        return [int(number) for number in re.findall(r"\d+", folder.name)]

    return max(found, key=version, default=None)


def open_prepared(
    split: str, folder: Path, name: str, cache: Path, partition: str, upright: bool
) -> Dataset:
    """Opens one split of prepared data; images come by record identifier, or by class and name.

    Args:
        split: "train" or "test".
        folder: as `find` gives it.
        name: of the data set.
        cache: folder where what reading whole files found is kept.
        partition: how the data were divided, for results.
        upright: whether to turn images as their EXIF data say.

    Raises:
        InputError: it is damaged, or does not hold images and their classes.
    """
    try:
        builder: Any = tfds.builder_from_directory(str(folder))
        stored = builder.info.splits[name_of(split, builder.info.splits)]
        keys = _Keys.of(builder.info)
        decoders = {keys.image: tfds.decode.SkipDecoding()}
        if builder.info.file_format is tfds.core.FileFormat.TFRECORD:
            records = _TFRecords(builder.info, stored.name, decoders)
        else:
            records = builder.as_data_source(split=stored.name, decoders=decoders)
        class_names = tuple(builder.info.features[keys.label].names)
        shards = [Path(path) for path in stored.filepaths]
    except Exception as error:
        # TFDS raises many types here, all of them about the files of this folder.
        raise InputError(f"{folder}: cannot open split {split}: {_one_line(error)}") from error
    missing = ", ".join(shard.name for shard in shards if not shard.is_file())
    if missing:
        raise InputError(f"{folder}: expected the files {missing}, found none")
    kept = functools.partial(_remembered, shards, cache, f"{name}-{split}")
    index = kept("index", lambda: _index(f"{folder}: split {split}", records, keys))
    positions = index["positions"]

    def read(index: int) -> bytes:
        try:
            return records[int(positions[index])][keys.image]
        except Exception as error:
            described = f"{opened.describe(index)}: cannot read the record in {folder}"
            raise InputError(f"{described}: {_one_line(error)}") from error

    def look() -> dict[str, np.ndarray]:
        def pixels(index: int) -> bytes:
            return images.pixels_sha256(np.asarray(opened.image(index)))

        with ThreadPoolExecutor(default_workers()) as pool:
            hashes = b"".join(pool.map(pixels, range(len(opened))))
        return {"sha256": np.frombuffer(hashes, np.uint8).reshape(-1, 32)}

    opened = Dataset(
        name=name,
        split=split,
        partition=partition,
        labels=index["labels"],
        ids=tuple(index["ids"].tolist()),
        class_names=class_names,
        read=read,
        upright=upright,
        pixel_hashes=lambda: [each.tobytes() for each in kept("images", look)["sha256"]],
    )
    return opened


class _Keys(NamedTuple):
    """What the fields of a record are called."""

    image: str
    label: str
    name: str  # of the image; empty where records have no names

    @staticmethod
    def of(info: Any) -> _Keys:
        """Returns the fields of a data set, if it is one of classified images."""
        features = dict(info.features.items())
        supervised = info.supervised_keys or ("image", "label")
        image, label = (key if isinstance(key, str) else "" for key in supervised[:2])
        kinds = (tfds.features.Image, tfds.features.ClassLabel)
        for key, kind in zip((image, label), kinds, strict=True):
            if not isinstance(features.get(key), kind):
                fields = ", ".join(sorted(features))
                raise InputError(f"expected images and their classes, found the fields {fields}")
        names = [key for key in ("file_name", "id") if isinstance(features.get(key), _TEXT)]
        return _Keys(image, label, next(iter(names), ""))


class _TFRecords:
    """TFDS's usual format, a mere sequence: its records by their places in the files."""

    def __init__(self, info: Any, split: str, decoders: dict[str, Any]):
        paths = [path for path in info.splits[split].filepaths if os.path.getsize(path)]
        files = [np.memmap(path, np.uint8, "r") for path in paths]
        self._places = [(file, *place) for file in files for place in _places(file)]
        self._decode = functools.partial(info.features.deserialize_example_np, decoders=decoders)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> Any:
        file, first, after = self._places[index]
        return self._decode(file[first:after].tobytes())

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return [self[index] for index in indices]


def _places(file: np.memmap) -> Iterator[tuple[int, int]]:
    """Yields where each record of a TFRecord file begins and ends.

    Before a record are its length, in 8 bytes, and 4 bytes of a checksum; 4 more come after it.
    """
    start = 0
    while start < len(file):
        length = int.from_bytes(file[start : start + 8].tobytes(), "little")
        first, start = start + 12, start + 16 + length
        if start > len(file):
            raise InputError(f"{file.filename}: expected whole records, found a part of one")
        yield first, first + length


def _one_line(error: BaseException) -> str:
    return re.sub(r"\s+", " ", str(error)).strip()[:300] or type(error).__name__


def _remembered(
    shards: list[Path], cache: Path, name: str, what: str, compute: Callable[[], dict]
) -> dict[str, np.ndarray]:
    """Returns what reading whole files found out, and keeps it until they change."""
    place = hashlib.sha256(os.fsencode(shards[0].parent.resolve())).hexdigest()[:16]
    path = cache / f"{name}-{place}-{what}.npz"
    stats = [(shard.name, shard.stat()) for shard in shards]
    fingerprint = json.dumps([[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats])
    # Absent or damaged, it is made anew; without room for it, it is not kept.
    with contextlib.suppress(InputError):
        kept = read_npz(path)
        if str(kept.pop("fingerprint", "")) == fingerprint:
            return kept
    found = compute()
    with contextlib.suppress(InputError):
        write_npz(path, {"fingerprint": np.array(fingerprint), **found})
    return found


def _index(place: str, records: Any, keys: _Keys) -> dict[str, np.ndarray]:
    """Reads labels, identifiers and stored positions of all records, in the canonical order.

    Records without a name of their own are called by their position.
    """
    labels, ids = [], []
    try:
        for start in range(0, len(records), _CHUNK):
            chunk = range(start, min(start + _CHUNK, len(records)))
            for record in records.__getitems__(list(chunk)):
                labels.append(record[keys.label])
                ids.append(record[keys.name].decode() if keys.name else "")
    except Exception as error:
        raise InputError(f"{place}: cannot read: {_one_line(error)}") from error
    if len(set(ids)) != len(ids):
        ids = [f"{position:09d}{name and '_'}{name}" for position, name in enumerate(ids)]
    names, label = np.array(ids, np.str_), np.array(labels, np.int32)
    if (label < 0).any():
        raise InputError(f"{place}: expected the class of every image, found images without")
    positions = np.argsort(names) if keys.name == "id" else np.lexsort((names, label))
    return {"labels": label[positions], "ids": names[positions], "positions": positions}
