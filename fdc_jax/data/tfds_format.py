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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from fdc_jax.data import images
from fdc_jax.data.dataset import Dataset, default_workers, split_name
from fdc_jax.errors import InputError, line
from fdc_jax.machine.files import read_npz, write_npz


def find(name: str, data_dir: Path) -> Path | None:
    """Returns the folder of the newest version of a prepared data set; None if there is none.

    Raises:
        InputError: there are several configurations of it.
    """
    found = [path.parent for path in (data_dir / name).rglob("dataset_info.json")]
    if len({folder.parent for folder in found}) > 1:
        places = ", ".join(sorted({folder.parent.name for folder in found}))
        raise InputError(f"{data_dir / name}: expected one configuration, found {places}")
    numbers = {folder: [int(each) for each in re.findall(r"\d+", folder.name)] for folder in found}
    return max(found, key=numbers.__getitem__, default=None)


def open_prepared(
    folder: Path, name: str, cache: Path, partition: str, upright: bool
) -> tuple[Dataset, Dataset]:
    """Opens the training and the test images of prepared data.

    Args:
        folder: as `find` gives it.
        name: of the data set.
        cache: folder where what a look at all records found is kept.
        partition: how the data were divided, for results.
        upright: whether to turn images as their EXIF data say.

    Raises:
        InputError: they are damaged, or are not images and their classes.
    """

    def opened(split: str) -> Dataset:
        place = f"{folder}: split {split}"
        try:
            builder: Any = tfds.builder_from_directory(str(folder))
            stored = builder.info.splits[split_name(split, builder.info.splits)]
            keys = image_key, label_key, _ = _keys(builder.info)
            decoders = {image_key: tfds.decode.SkipDecoding()}
            if builder.info.file_format is tfds.core.FileFormat.TFRECORD:
                records = _TFRecords(builder.info, stored.filepaths, decoders)
            else:
                records = builder.as_data_source(split=stored.name, decoders=decoders)
            class_names = tuple(builder.info.features[label_key].names)
            stats = [(os.path.realpath(path), os.stat(path)) for path in stored.filepaths]
        except Exception as error:
            # TFDS raises many types here, all of them about the files of this folder.
            raise InputError(f"{place}: cannot open: {line(error)}") from error
        state = json.dumps([(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats])
        kept = cache / f"{name}-{split}-{hashlib.sha256(state.encode()).hexdigest()[:16]}.npz"
        try:
            found = read_npz(kept)
        except InputError:  # Absent or damaged.
            found = _look(place, records, keys, upright)
            with contextlib.suppress(InputError):  # Without room for it, it is not kept.
                write_npz(kept, found)

        def read(index: int) -> bytes:
            try:
                return records[int(found["positions"][index])][image_key]
            except Exception as error:
                raise InputError(f"{place}: cannot read a record: {line(error)}") from error

        return Dataset(
            name=name,
            split=split,
            partition=partition,
            labels=found["labels"],
            ids=tuple(found["ids"].tolist()),
            class_names=class_names,
            read=read,
            upright=upright,
            pixel_hashes=lambda: [each.tobytes() for each in found["sha256"]],
        )

    return opened("train"), opened("test")


def _keys(info: Any) -> tuple[str, str, str]:
    """Returns the fields of an image, of its class and of its name, empty where it has none."""
    features = dict(info.features.items())
    supervised = info.supervised_keys or ("image", "label")
    image, label = (key if isinstance(key, str) else "" for key in supervised[:2])
    known = isinstance(features.get(image), tfds.features.Image)
    if not (known and isinstance(features.get(label), tfds.features.ClassLabel)):
        fields = ", ".join(sorted(features))
        raise InputError(f"expected images and their classes, found the fields {fields}")
    texts = (k for k in ("file_name", "id") if isinstance(features.get(k), tfds.features.Text))
    return image, label, next(texts, "")


class _TFRecords:
    """TFDS's usual format, a mere sequence: its records by their places in the files.

    Before a record are its length, in 8 bytes, and 4 bytes of a checksum; 4 more come after it.
    """

    def __init__(self, info: Any, paths: Sequence[Any], decoders: dict[str, Any]):
        self._decode = functools.partial(info.features.deserialize_example_np, decoders=decoders)
        self._places: list[tuple[np.memmap, int, int]] = []
        for file in (np.memmap(path, np.uint8, "r") for path in paths if os.path.getsize(path)):
            after = 0
            while after < len(file):
                first = after + 12
                length = int.from_bytes(file[after : after + 8].tobytes(), "little")
                after = first + length + 4
                self._places.append((file, first, first + length))
            if after > len(file):
                raise InputError(f"{file.filename}: expected whole records, found a part of one")

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> Any:
        file, first, after = self._places[index]
        return self._decode(file[first:after].tobytes())


def _look(
    place: str, records: Any, keys: tuple[str, str, str], upright: bool
) -> dict[str, np.ndarray]:
    """Returns labels, identifiers, positions and hashes of all images, in the canonical order.

    Records without a name of their own are called by their position.
    """
    image_key, label_key, name_key = keys

    def look(position: int) -> tuple[int, str, bytes]:
        record = records[position]
        image = images.decode(record[image_key], f"record {position}", upright)
        name = record[name_key].decode() if name_key else ""
        return int(record[label_key]), name, images.pixels_sha256(np.asarray(image))

    try:
        with ThreadPoolExecutor(default_workers()) as pool:
            labels, ids, hashes = zip(*pool.map(look, range(len(records))), strict=True)
    except Exception as error:
        raise InputError(f"{place}: cannot read: {line(error)}") from error
    if len(set(ids)) != len(ids):
        ids = [f"{position:09d}{name and '_'}{name}" for position, name in enumerate(ids)]
    names, label = np.array(ids, np.str_), np.array(labels, np.int32)
    if (label < 0).any():
        raise InputError(f"{place}: expected the class of every image, found images without")
    positions = np.argsort(names) if name_key == "id" else np.lexsort((names, label))
    sha256 = np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, 32)
    found = {"labels": label, "ids": names, "sha256": sha256}
    return {"positions": positions} | {key: array[positions] for key, array in found.items()}
