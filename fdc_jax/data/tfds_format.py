"""Data prepared by TensorFlow Datasets; the only module that imports that package.

TensorFlow is neither needed nor imported: array_record files are read by random access, TFRecord
files by the offsets of their records.
"""

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
from fdc_jax.data.dataset import TEST_NAMES, Dataset, default_workers
from fdc_jax.errors import InputError, line
from fdc_jax.machine.files import read_npz, write_npz


def find(name: str, data_dir: Path) -> Path | None:
    """Returns the newest version's folder, or None; InputError if there are many configurations."""
    folders = [path.parent for path in (data_dir / name).rglob("dataset_info.json")]
    if len({folder.parent for folder in folders}) > 1:
        names = ", ".join(sorted({folder.parent.name for folder in folders}))
        raise InputError(f"{data_dir / name}: expected one configuration, found {names}")
    return max(
        folders, key=lambda folder: [*map(int, re.findall(r"\d+", folder.name))], default=None
    )


def open_prepared(
    folder: Path,  # of a version, see `find`
    name: str,
    cache: Path,  # folder that keeps labels, identifiers and hashes of all records
    partition: str,
    upright: bool,
) -> tuple[Dataset, Dataset]:
    """Returns the training and the test images of prepared data, as `folder.open_folder` does.

    Raises:
        InputError: the data are damaged, or are not images with classes.
    """

    def dataset(split: str) -> Dataset:
        where = f"{folder}: split {split}"
        try:
            builder: Any = tfds.builder_from_directory(str(folder))
            names = TEST_NAMES if split == "test" else ()
            stored = builder.info.splits[next(filter(builder.info.splits.get, names), split)]
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
            raise InputError(f"{where}: cannot open: {line(error)}") from error
        state = json.dumps([(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats])
        index_file = cache / f"{name}-{split}-{hashlib.sha256(state.encode()).hexdigest()[:16]}.npz"
        try:
            columns = read_npz(index_file)
        except InputError:  # The file is missing or damaged.
            columns = _index(where, records, keys, upright)
            with contextlib.suppress(InputError):  # A full disk is no reason to stop.
                write_npz(index_file, columns)

        def read(index: int) -> bytes:
            try:
                return records[int(columns["positions"][index])][image_key]
            except Exception as error:
                raise InputError(f"{where}: cannot read a record: {line(error)}") from error

        return Dataset(
            name=name,
            split=split,
            partition=partition,
            labels=columns["labels"],
            ids=tuple(columns["ids"].tolist()),
            class_names=class_names,
            read=read,
            upright=upright,
            pixel_hashes=lambda: [row.tobytes() for row in columns["sha256"]],
        )

    return dataset("train"), dataset("test")


def _keys(info: Any) -> tuple[str, str, str]:
    """Returns the names of the fields of image, class and file name ("" if it is missing)."""
    features = dict(info.features.items())
    supervised = info.supervised_keys or ("image", "label")
    image, label = (key if isinstance(key, str) else "" for key in supervised[:2])
    has_images = isinstance(features.get(image), tfds.features.Image)
    if not (has_images and isinstance(features.get(label), tfds.features.ClassLabel)):
        fields = ", ".join(sorted(features))
        raise InputError(f"expected images and their classes, found the fields {fields}")
    name_keys = (k for k in ("file_name", "id") if isinstance(features.get(k), tfds.features.Text))
    return image, label, next(name_keys, "")


class _TFRecords:
    """Records of TFRecord files by index.

    The format is a sequence: 8 bytes of length, 4 of a checksum, the record, 4 of a checksum.
    """

    def __init__(self, info: Any, paths: Sequence[Any], decoders: dict[str, Any]):
        self._decode = functools.partial(info.features.deserialize_example_np, decoders=decoders)
        self._spans: list[tuple[np.memmap, int, int]] = []
        for file in (np.memmap(path, np.uint8, "r") for path in paths if os.path.getsize(path)):
            offset = 0
            while offset < len(file):
                start = offset + 12
                stop = start + int.from_bytes(file[offset : offset + 8].tobytes(), "little")
                offset = stop + 4
                self._spans.append((file, start, stop))
            if offset > len(file):
                raise InputError(f"{file.filename}: expected whole records, found a part of one")

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index: int) -> Any:
        file, start, stop = self._spans[index]
        return self._decode(file[start:stop].tobytes())


def _index(
    where: str, records: Any, keys: tuple[str, str, str], upright: bool
) -> dict[str, np.ndarray]:
    """Returns labels, ids, positions and SHA-256 of all images, in an order independent of storage.

    Records without a name are named by their position.
    """
    image_key, label_key, name_key = keys

    def facts(position: int) -> tuple[int, str, bytes]:
        record = records[position]
        image = images.decode(record[image_key], f"record {position}", upright)
        name = record[name_key].decode() if name_key else ""
        return int(record[label_key]), name, images.pixels_sha256(np.asarray(image))

    try:
        with ThreadPoolExecutor(default_workers()) as pool:
            labels, ids, hashes = zip(*pool.map(facts, range(len(records))), strict=True)
    except Exception as error:
        raise InputError(f"{where}: cannot read: {line(error)}") from error
    if len(set(ids)) != len(ids):
        ids = [f"{position:09d}{name and '_'}{name}" for position, name in enumerate(ids)]
    names, label = np.array(ids, np.str_), np.array(labels, np.int32)
    if (label < 0).any():
        raise InputError(f"{where}: expected the class of every image, found images without")
    positions = np.argsort(names) if name_key == "id" else np.lexsort((names, label))
    sha256 = np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, 32)
    columns = {"labels": label, "ids": names, "sha256": sha256}
    return {"positions": positions} | {key: array[positions] for key, array in columns.items()}
