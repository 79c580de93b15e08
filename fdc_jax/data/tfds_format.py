"""Data prepared by TensorFlow Datasets (TFDS); the only module that imports that package.

TFDS imports every module that `features.json` names. Therefore this module reads the JSON files of
prepared data itself, and TFDS decodes the records by features that are named here. TensorFlow is
not needed.
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
from typing import Annotated, Any, NamedTuple, Protocol

import google_crc32c
import msgspec
import numpy as np
import tensorflow_datasets as tfds
from array_record.python.array_record_data_source import ArrayRecordDataSource

from fdc_jax.data import images
from fdc_jax.data.dataset import TEST_NAMES, Dataset, Skipped, default_workers, noted
from fdc_jax.errors import InputError, escaped, line
from fdc_jax.machine.files import file_state, open_regular, read_npz, read_object, write_npz

_log = logging.getLogger(__name__)
_INFO, _FEATURES = "dataset_info.json", "features.json"
_MODULES = "tensorflow_datasets.core.features."  # of the feature classes that TFDS comes with
_TEMPLATE = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
_MOST_CLASSES = 2**20
_IMAGE, _LABEL = "image_feature.Image", "class_label_feature.ClassLabel"
_TEXT = "text_feature.Text"
# Types of pixels that an image file holds; others are stored as the bytes of several channels.
_PIXELS = ("uint8", "uint16")


class _Split(msgspec.Struct, rename="camel"):
    name: str
    shard_lengths: list[Annotated[int, msgspec.Meta(ge=0)]] = []
    filepath_template: str = ""


class _Info(msgspec.Struct, rename="camel"):
    """The fields of `dataset_info.json` that are read."""

    name: str
    splits: list[_Split]
    file_format: str = "tfrecord"
    supervised_keys: dict[str, Any] = {}


class _Fields(NamedTuple):
    """The names of the fields of a record that are read, and the names of the classes."""

    image: str
    label: str
    name: str  # of the image; "" if records have no name
    class_names: tuple[str, ...]


def find(name: str, data_dir: Path) -> Path | None:
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
    fields = _read_fields(folder, info.supervised_keys)
    stored = {split.name: split for split in info.splits}

    def read(split: str) -> tuple[_Records, dict[str, np.ndarray]]:
        """Returns the records of a split, and the columns of `_index`."""
        names = TEST_NAMES if split == "test" else (split,)
        chosen = next(filter(None, map(stored.get, names)), None)
        if chosen is None:
            found = escaped(", ".join(stored))[:200] or "none"
            raise InputError(f"{folder}: expected the split {split}, found {found}")
        records = _Records(folder, info, chosen, fields)
        state = json.dumps([images.Facts._fields, fields[:3], records.states])
        index_file = cache / f"{name}-{split}-{hashlib.sha256(state.encode()).hexdigest()[:16]}.npz"
        where = f"{folder}: split {split}"
        try:
            columns = read_npz(index_file)
        except InputError:  # The file is missing or damaged.
            columns = _index(where, records, fields, upright)
            with contextlib.suppress(InputError):  # A full disk is no reason to stop.
                write_npz(index_file, columns)
        labels, count = columns["labels"], len(fields.class_names)
        if (labels < 0).any():
            raise InputError(f"{where}: expected the class of every image, found images without")
        if (labels >= count).any():
            raise InputError(f"{where}: expected classes below {count}, found {labels.max()}")
        return records, columns

    splits = {split: read(split) for split in ("train", "test")}
    facts = {split: _facts(columns) for split, (_, columns) in splits.items()}
    scale, skipped = images.grey_scale(grey_bits, facts["train"] + facts["test"]), Skipped()

    def dataset(split: str) -> Dataset:
        records, columns = splits[split]
        positions = columns["positions"].tolist()
        return Dataset(
            name=name,
            split=split,
            partition=partition,
            labels=columns["labels"].astype(np.int32),
            ids=tuple(columns["ids"].tolist()),
            class_names=fields.class_names,
            read=lambda index: records[positions[index]].image,
            upright=upright,
            grey_bits=scale,
            pixel_hashes=lambda: [fact.sha256 for fact in facts[split]],
            skipped=skipped,
        )

    return noted(dataset("train"), dataset("test"), facts)


def _facts(columns: dict[str, np.ndarray]) -> list[images.Facts]:
    """Returns the facts of all images from the columns of `_index`."""
    rows = zip(columns["sha256"], columns["grey_bits"], columns["frames"], strict=True)
    return [images.Facts(sha256.tobytes(), int(bits), int(frames)) for sha256, bits, frames in rows]


# The description ---------------------------------------------------------------------------------


def _read_info(folder: Path) -> _Info:
    """Returns the content of `dataset_info.json`; raises InputError."""
    path = folder / _INFO
    try:
        # Protobuf writes its large integers as strings.
        return msgspec.convert(read_object(path), _Info, strict=False)
    except msgspec.ValidationError as error:
        raise InputError(f"{path}: {line(error)}") from error


def _read_fields(folder: Path, supervised: dict[str, Any]) -> _Fields:
    """Returns the fields that `features.json` describes.

    Raises:
        InputError: the file is damaged, describes no images with classes, or names a feature class
            that is not of TFDS.
    """
    path = folder / _FEATURES
    try:
        described = read_object(path)
        foreign = [name for name in _class_names(described) if not name.startswith(_MODULES)]
        if foreign:
            raise ValueError(f"feature classes of TFDS, found {foreign[0]}")
        content = _content(described)
        features = content.get("features", content)
        kinds = {
            field: next(_class_names(feature)).removeprefix(_MODULES)
            for field, feature in features.items()
        }
        items = supervised.get("tuple", {}).get("items", [])
        image, label = [item["featureKey"] for item in items[:2]] or ("image", "label")
        if (kinds.get(image), kinds.get(label)) != (_IMAGE, _LABEL):
            raise ValueError(
                f"images and their classes, found the fields {', '.join(sorted(kinds))}"
            )
        if (pixels := _content(features[image]).get("dtype", "uint8")) not in _PIXELS:
            raise ValueError(f"pixels of type uint8 or uint16, found {pixels}")
        texts = [field for field in ("file_name", "id") if kinds.get(field) == _TEXT]
        names = _read_class_names(folder, label, _content(features[label]))
    except (
        AttributeError,
        KeyError,
        RecursionError,
        StopIteration,
        TypeError,
        ValueError,
    ) as error:
        raise InputError(f"{path}: expected {escaped(line(error))[:200]}") from error
    return _Fields(image, label, texts[0] if texts else "", names)


def _class_names(value: Any) -> Iterator[str]:
    """Yields the names of Python classes in a part of `features.json`, the outermost first."""
    if isinstance(value, dict):
        for key in ("pythonClassName", "type"):  # "type" in files of TFDS before 4.5
            if isinstance(value.get(key), str):
                yield value[key]
        for child in value.values():
            yield from _class_names(child)


def _content(feature: dict[str, Any]) -> dict[str, Any]:
    """Returns the object that describes a feature; the other members are text."""
    return next((value for value in feature.values() if isinstance(value, dict)), {})


def _read_class_names(folder: Path, label: str, content: dict[str, Any]) -> tuple[str, ...]:
    """Returns the names of the classes, or their numbers if no file names them."""
    count = int(content.get("numClasses") or content["num_classes"])
    path = folder / f"{label.replace('/', '.')}.labels.txt"
    if not path.exists():
        return tuple(map(str, range(min(count, _MOST_CLASSES))))
    with open_regular(path) as file:
        names = tuple(filter(None, map(str.strip, file.read().decode().split("\n"))))
    if len(names) != count or len({*names}) != count:
        raise ValueError(f"{count:,} different classes in {path.name}, found {len(names):,}")
    return names


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

    def __init__(self, folder: Path, info: _Info, split: _Split, fields: _Fields):
        self._fields, self._paths = fields, _shard_paths(folder, info, split)
        label = tfds.features.ClassLabel(num_classes=len(fields.class_names))
        features = {fields.image: tfds.features.Image(), fields.label: label}
        if fields.name:
            features[fields.name] = tfds.features.Text()
        self._decode = functools.partial(
            tfds.features.FeaturesDict(features).deserialize_example_np,
            decoders={fields.image: tfds.decode.SkipDecoding()},
        )
        self._shards = [
            _open_shard(path, info.file_format, length)
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
            image, label = values[self._fields.image], values[self._fields.label]
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


def _shard_paths(folder: Path, info: _Info, split: _Split) -> list[Path]:
    """Returns the files of a split; raises InputError for files outside of the folder."""
    count, paths = len(split.shard_lengths), []
    digits = max(5, len(str(count)))
    for shard in range(count):
        numbers = f"{shard:0{digits}}", f"{count:0{digits}}"
        values = {
            "DATASET": info.name,
            "SPLIT": split.name,
            "FILEFORMAT": info.file_format,
            "SHARD_INDEX": numbers[0],
            "NUM_SHARDS": numbers[1],
            "SHARD_X_OF_Y": "-of-".join(numbers),
        }
        name = split.filepath_template or _TEMPLATE
        for field, value in values.items():  # The widths of `str.format` could fill the memory.
            name = name.replace(f"{{{field}}}", value)
        if Path(name).is_absolute() or ".." in Path(name).parts:
            text = escaped(name)[:80]
            raise InputError(f"{folder / _INFO}: expected files in its folder, found {text}")
        paths.append(folder / name)
    return paths


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
    columns = {
        "labels": np.array(labels, np.int64),
        "ids": np.array(ids, np.str_),
        "sha256": np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, 32),
        "grey_bits": np.array(grey_bits),
        "frames": np.array(frames),
    }
    names = columns["ids"]
    by_id = fields.name == "id"
    positions = np.argsort(names) if by_id else np.lexsort((names, columns["labels"]))
    return {"positions": positions} | {key: array[positions] for key, array in columns.items()}
