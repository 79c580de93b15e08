"""Data prepared by TensorFlow Datasets (TFDS); the only module that imports that package.

TFDS imports every module that `features.json` names, so that the names are checked first. Shards
are read one by one, to compare their records with the numbers and checksums that the files state.
TensorFlow is not needed.
"""

import contextlib
import functools
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import google_crc32c
import numpy as np
import tensorflow_datasets as tfds
from array_record.python.array_record_data_source import ArrayRecordDataSource

from fdc_jax.data import images
from fdc_jax.data.dataset import TEST_NAMES, Dataset, Skipped, default_workers, with_notes
from fdc_jax.errors import InputError, escaped, line
from fdc_jax.machine.files import file_state, open_regular, read_npz, read_object, write_npz

_log = logging.getLogger(__name__)
_INFO, _FEATURES = "dataset_info.json", "features.json"
_MODULES = "tensorflow_datasets.core.features."  # of the feature classes that TFDS comes with
_MOST_CLASSES = 2**20
# Types of pixels that an image file holds; others are stored as the bytes of several channels.
_PIXELS = (np.uint8, np.uint16)


def newest_version(name: str, data_dir: Path) -> Path | None:
    """Returns the folder of the newest version, or None.

    Folders whose name is not a version, such as those of an interrupted preparation, are skipped
    with a warning. Raises InputError if there are many configurations.
    """
    folders = [path.parent for path in (data_dir / name).rglob(_INFO)]
    versions = {
        folder: [*map(int, folder.name.split("."))]
        for folder in folders
        if re.fullmatch(r"\d+\.\d+\.\d+", folder.name)
    }
    if skipped := sorted({folder.name for folder in folders} - {path.name for path in versions}):
        names = escaped(", ".join(skipped))[:200]
        _log.warning("%s: skipped folders without a version as name: %s", data_dir / name, names)
    if len({folder.parent for folder in versions}) > 1:
        names = ", ".join(sorted({folder.parent.name for folder in versions}))
        raise InputError(f"{data_dir / name}: expected one configuration, found {names}")
    return max(versions, key=versions.__getitem__, default=None)


def open_prepared(
    folder: Path,  # of a version, see `find`
    name: str,
    cache: Path,  # folder that keeps labels, identifiers and hashes of all records
    partition: str,
    upright: bool,
    grey_bits: int = 0,  # as in `folder.open_folder`
) -> tuple[Dataset, Dataset]:
    """Returns the training and the test images of prepared data, as `folder.open_folder` does.

    Raises:
        InputError: the data are damaged, or are not images with classes; or their files do not have
            as many records as `dataset_info.json` says.
    """
    info = _read_info(folder)
    fields = _fields(folder, info)

    def read(split: str) -> tuple[_Records, dict[str, np.ndarray]]:
        """Returns the records of a split, and the columns of `_index`."""
        names = TEST_NAMES if split == "test" else (split,)
        stored = next(filter(info.splits.__contains__, names), None)
        if stored is None:
            known = escaped(", ".join(info.splits))[:200] or "none"
            raise InputError(f"{folder}: expected the split {split}, found {known}")
        records = _Records(info, info.splits[stored], fields)
        state = json.dumps([images.Facts._fields, fields[:3], records.states])
        index_file = cache / f"{name}-{split}-{hashlib.sha256(state.encode()).hexdigest()[:16]}.npz"
        where = f"{folder}: split {split}"
        try:
            columns = read_npz(index_file)
        except InputError:  # The file is missing or damaged.
            columns = _index(where, records, fields, upright)
            with contextlib.suppress(InputError):  # A full disk is no reason to stop.
                write_npz(index_file, columns)
        labels = columns["labels"]
        count = len(fields.class_names)
        if (labels < 0).any():
            raise InputError(f"{where}: expected the class of every image, found images without")
        if (labels >= count).any():
            raise InputError(f"{where}: expected classes below {count}, found {labels.max()}")
        return records, columns

    splits = {split: read(split) for split in ("train", "test")}
    facts = {split: _facts(columns) for split, (_, columns) in splits.items()}
    scale = images.grey_scale(grey_bits, facts["train"] + facts["test"])
    skipped = Skipped()

    def dataset(split: str) -> Dataset:
        records, columns = splits[split]
        positions = columns["positions"].tolist()
        labels = columns["labels"].astype(np.int32)
        ids = tuple(columns["ids"].tolist())

        def read_image(index: int) -> bytes:
            return records[positions[index]].image

        hashes = [fact.sha256 for fact in facts[split]]
        return Dataset(
            name=name,
            split=split,
            partition=partition,
            labels=labels,
            ids=ids,
            class_names=fields.class_names,
            read=read_image,
            upright=upright,
            grey_bits=scale,
            pixel_hashes=lambda: hashes,
            skipped=skipped,
        )

    return with_notes(dataset("train"), dataset("test"), facts)


def _facts(columns: dict[str, np.ndarray]) -> list[images.Facts]:
    """Returns the facts of all images from the columns of `_index`."""
    rows = zip(columns["sha256"], columns["grey_bits"], columns["frames"], strict=True)
    return [images.Facts(sha256.tobytes(), int(bits), int(frames)) for sha256, bits, frames in rows]


# The description ---------------------------------------------------------------------------------


class _Fields(NamedTuple):
    """The names of the fields of a record that are read, and the names of the classes."""

    image: str
    label: str
    name: str  # of the image; "" if records have no name
    class_names: tuple[str, ...]


def _read_info(folder: Path) -> Any:
    """Returns the description of prepared data, as TFDS reads it.

    Raises:
        InputError: the files are damaged, name a class that is not of TFDS, or name shards outside
            of the folder.
    """
    foreign = [
        n for n in _feature_classes(read_object(folder / _FEATURES)) if not n.startswith(_MODULES)
    ]
    if foreign:
        text = escaped(foreign[0])[:200]
        raise InputError(f"{folder / _FEATURES}: expected feature classes of TFDS, found {text}")
    try:
        description = read_object(folder / _INFO)
        parts = [split.get("filepathTemplate", "") for split in description.get("splits", ())]
        for part in (description.get("name", ""), *parts):  # of the names of files
            if not re.fullmatch(r"[\w{}.-]*", part):  # Nor a width, such as {SPLIT:999999999}.
                raise ValueError(f"expected files in its folder, found {escaped(part)[:80]}")
        return tfds.builder_from_directory(str(folder)).info
    except Exception as error:  # TFDS raises many types on damaged files.
        raise InputError(f"{folder / _INFO}: cannot read: {escaped(line(error))}") from error


def _feature_classes(value: Any) -> Iterator[str]:
    """Yields the names of Python classes and files in a part of `features.json`."""
    if isinstance(value, dict):
        for key in ("pythonClassName", "type"):  # "type" in files of TFDS before 4.5
            if isinstance(value.get(key), str):
                yield value[key]
        if "names_file" in value:  # any file of this machine
            yield f"names_file={value['names_file']}"
        value = list(value.values())
    if isinstance(value, list):
        for child in value:
            yield from _feature_classes(child)


def _fields(folder: Path, info: Any) -> _Fields:
    """Returns the fields that are read; raises InputError if they are not images with classes."""
    features = dict(info.features.items())
    supervised = info.supervised_keys or ("image", "label")
    image, label = (key if isinstance(key, str) else "" for key in supervised[:2])
    images_of = features.get(image)
    classes = features.get(label)
    path = folder / _FEATURES
    if not (
        isinstance(images_of, tfds.features.Image) and isinstance(classes, tfds.features.ClassLabel)
    ):
        names = escaped(", ".join(sorted(features)))[:200]
        raise InputError(f"{path}: expected images and their classes, found the fields {names}")
    if images_of.np_dtype not in _PIXELS:
        raise InputError(f"{path}: expected pixels of type uint8 or uint16")
    if not 0 < (classes.num_classes or 0) <= _MOST_CLASSES:
        raise InputError(f"{path}: expected classes, found {classes.num_classes}")
    names = [
        key for key in ("file_name", "id") if isinstance(features.get(key), tfds.features.Text)
    ]
    return _Fields(image, label, names[0] if names else "", tuple(classes.names))


# Records -----------------------------------------------------------------------------------------


class _Shard(Protocol):
    """The records of one file."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> bytes: ...


class _TFRecordFile:
    """The records of a TFRecord file.

    The format is a sequence: 8 bytes of length, 4 of their checksum, the record, 4 of its checksum.
    """

    def __init__(self, path: Path):
        self._path, self._spans = path, list[tuple[int, int]]()
        offset, size = 0, os.path.getsize(path)
        with open_regular(path) as file:
            while offset < size:
                file.seek(offset)
                length = int.from_bytes(_checked(file.read(12)), "little")
                self._spans.append((offset + 12, length + 4))
                offset += length + 16
        if offset > size:
            raise ValueError("expected whole records, found a part of one")

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index: int, /) -> bytes:
        start, length = self._spans[index]
        with open_regular(self._path) as file:
            file.seek(start)
            return _checked(file.read(length))


def _checked(content: bytes) -> bytes:
    """Returns bytes without the masked CRC-32C at their end; raises ValueError if it is wrong."""
    crc = google_crc32c.value(content[:-4])
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32
    if masked.to_bytes(4, "little") != content[-4:]:
        raise ValueError("expected bytes that fit their checksum, found damaged ones")
    return content[:-4]


def _open_shard(path: Path, file_format: str, length: int) -> _Shard:
    """Returns the records of a file; raises InputError if it has not `length` of them."""
    try:
        if not path.is_file():
            raise ValueError("expected a file, found none")
        if file_format == "array_record":  # which compares hashes of records itself
            shard: _Shard = ArrayRecordDataSource([str(path)])
        elif file_format == "tfrecord":
            shard = _TFRecordFile(path)
        else:
            raise ValueError(f"expected array_record or tfrecord, found {file_format}")
        if len(shard) != length:
            raise ValueError(f"expected {length:,} records, found {len(shard):,}")
        return shard
    except Exception as error:  # array_record raises several types.
        raise InputError(f"{path}: cannot read: {escaped(line(error))}") from error


class _Record(NamedTuple):
    """A decoded record."""

    image: bytes  # content of its file
    label: int
    name: str  # "" if records have no name


class _Records:
    """The decoded records of a split by index, as many as `dataset_info.json` says.

    Attributes:
        states: path and state (`file_state`) of every file.
    """

    def __init__(self, info: Any, split: Any, fields: _Fields):
        self._fields = fields
        self._paths = [Path(path) for path in split.filepaths]
        read = {name: info.features[name] for name in fields[:3] if name}
        self._decode = functools.partial(
            tfds.features.FeaturesDict(read).deserialize_example_np,
            decoders={fields.image: tfds.decode.SkipDecoding()},
        )
        self._shards = [
            _open_shard(path, info.file_format.value, length)
            for path, length in zip(self._paths, split.shard_lengths, strict=True)
        ]
        self._starts = np.cumsum([0, *split.shard_lengths])
        self.states = [(os.path.realpath(path), file_state(path)) for path in self._paths]

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> _Record:
        shard, position = self._locate(index)
        try:
            values: Any = self._decode(self._shards[shard][position])
            image = values[self._fields.image]
            label = values[self._fields.label]
            name = values[self._fields.name].decode() if self._fields.name else ""
            if not isinstance(image, bytes) or not isinstance(label, int):
                raise ValueError("expected the content of an image file, and its class")
            return _Record(image, label, name)
        except Exception as error:  # Parsers raise many types on damaged records.
            raise InputError(f"{self.describe(index)}: cannot read: {line(error)}") from error

    def describe(self, index: int) -> str:
        """Returns the name of a record in error messages."""
        shard, position = self._locate(index)
        return f"{self._paths[shard]}, record {position}"

    def _locate(self, index: int) -> tuple[int, int]:
        """Returns the number of a record's shard, and its position in the shard."""
        shard = int(np.searchsorted(self._starts, index, side="right")) - 1
        return shard, index - int(self._starts[shard])


def _index(where: str, records: _Records, fields: _Fields, upright: bool) -> dict[str, np.ndarray]:
    """Returns positions, labels, ids and facts of all images, in an order independent of storage.

    Records without a name are named by their position.
    """

    def look(position: int) -> tuple[int, str, images.Facts]:
        record = records[position]
        facts = images.examine(record.image, records.describe(position), upright)
        return record.label, record.name, facts

    if not len(records):
        raise InputError(f"{where}: expected records, found none")
    with ThreadPoolExecutor(default_workers()) as pool:
        labels, ids, facts = zip(*pool.map(look, range(len(records))), strict=True)
    if len(set(ids)) != len(ids):
        ids = [f"{position:09d}{name and '_'}{name}" for position, name in enumerate(ids)]
    hashes, grey_bits, frames = zip(*facts, strict=True)
    checksums = np.frombuffer(b"".join(hashes), np.uint8)
    columns = {
        "labels": np.array(labels, np.int64),
        "ids": np.array(ids, np.str_),
        "sha256": checksums.reshape(-1, 32),
        "grey_bits": np.array(grey_bits),
        "frames": np.array(frames),
    }
    names = columns["ids"]
    by_id = fields.name == "id"
    positions = np.argsort(names) if by_id else np.lexsort((names, columns["labels"]))
    return {"positions": positions} | {key: array[positions] for key, array in columns.items()}
