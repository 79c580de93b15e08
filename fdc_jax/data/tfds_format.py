"""Prepared data on disk: opening and writing; the only module that knows TensorFlow Datasets.

TensorFlow is neither needed nor imported: data are stored as array_record files.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow_datasets as tfds
from tensorflow_datasets.core import dataset_info

from fdc_jax.data import benchmarks, dataset, images
from fdc_jax.errors import InputError, Program
from fdc_jax.machine.files import read_npz, write_npz

_CHUNK = 256
_IMAGES_PER_FILE = 5000


def open_prepared(
    benchmark: benchmarks.Benchmark,
    split: str,
    data_dir: Path,
    cache_dir: str | os.PathLike[str] | None = None,
) -> dataset.Dataset:
    """Opens one split of a prepared benchmark; see `task_stream.open_dataset`."""
    folder = benchmark.folder(data_dir)
    if not benchmark.is_prepared(data_dir):
        raise InputError(
            f"{benchmark.name} is not prepared: expected it in {folder}; prepare it with: "
            f"{Program.typed('data.prepare')} {benchmark.name} --data_dir={data_dir} "
            f"--source=PATH, where PATH is {benchmark.obtain}"
        )
    try:
        builder: Any = tfds.builder_from_directory(str(folder))
        stored = builder.info.splits[dataset.name_of(split, builder.info.splits)]
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
    kept = benchmarks.metadata(folder)
    found = kept.get("partition", benchmark.partition)
    if found != benchmark.partition:
        raise InputError(
            f"{folder / 'metadata.json'}: expected partition {benchmark.partition} for "
            f"{benchmark.name}, found {found}"
        )
    index = _remembered(
        *(shards, f"{split}-index", cache_dir),
        lambda: _index(f"{folder}: split {split}", records, keys, benchmark.partition == "tfds"),
    )
    labels, positions, ids = index["labels"], index["positions"], tuple(index["ids"].tolist())

    def read(index: int) -> bytes:
        try:
            return records[int(positions[index])][keys.image]
        except Exception as error:
            described = f"{opened.describe(index)}: cannot read the record in {folder}"
            raise InputError(f"{described}: {_one_line(error)}") from error

    def checksum() -> str:
        with contextlib.suppress(KeyError, TypeError):
            return kept["images_sha256"][split]
        # Not prepared by this version: every image is decoded, once.
        found = _remembered(
            *(shards, f"{split}-images", cache_dir),
            lambda: {"sha256": np.array(_decoded_sha256(opened))},
        )
        return str(found["sha256"])

    opened = dataset.Dataset(
        name=benchmark.name,
        split=split,
        partition=benchmark.partition,
        labels=labels,
        ids=ids,
        class_names=class_names,
        read=read,
        compute_checksum=checksum,
        earlier_checksums=tuple(each["images_sha256"][split] for each in kept.get("earlier", [])),
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


_TEXT = tfds.features.Text


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


def _decoded_sha256(opened: dataset.Dataset) -> str:
    """Returns the checksum of a data set by decoding every image of it."""

    def pixels(index: int) -> bytes:
        return images.pixels_sha256(images.decode(opened.read(index), opened.describe(index)))

    with ThreadPoolExecutor(dataset.default_workers()) as pool:
        found = pool.map(pixels, range(len(opened)))
        records = zip(opened.ids, opened.labels.tolist(), found, strict=True)
        return dataset.images_sha256(opened.class_names, records)


def _remembered(
    shards: list[Path],
    name: str,
    cache_dir: str | os.PathLike[str] | None,
    compute: Callable[[], dict[str, np.ndarray]],
) -> dict[str, np.ndarray]:
    """Returns what reading whole files found out, and keeps it until they change.

    It is kept beside the data; in `cache_dir` where their folder is closed to writing, even for a
    user who could write all the same; nowhere if that is not given.
    """
    folder = shards[0].parent
    path = folder / f".fdc_jax-{name}.npz"
    if not (folder.stat().st_mode & 0o222 and os.access(folder, os.W_OK)):
        if cache_dir is None:
            return compute()
        place = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]
        path = Path(cache_dir) / "data" / f"{place}-{name}.npz"
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


def _index(place: str, records: Any, keys: _Keys, any_names: bool) -> dict[str, np.ndarray]:
    """Reads labels, identifiers and stored positions of all records, in the canonical order.

    Records without a name of their own are called by their position, if `any_names` will do.
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
        if not any_names:
            raise InputError(f"{place}: expected distinct record names, found repeats")
        ids = [f"{position:09d}{name and '_'}{name}" for position, name in enumerate(ids)]
    names, label = np.array(ids, np.str_), np.array(labels, np.int32)
    if (label < 0).any():
        raise InputError(f"{place}: expected the class of every image, found images without")
    positions = np.argsort(names) if keys.name == "id" else np.lexsort((names, label))
    return {"labels": label[positions], "ids": names[positions], "positions": positions}


def features(
    class_names: list[str], superclass_names: list[str] | None = None
) -> tfds.features.FeaturesDict:
    """Returns what a record holds: of an image folder, or of CIFAR-100, as TFDS prepares it."""
    record = {
        "image": tfds.features.Image(shape=(None, None, 3)),
        "label": tfds.features.ClassLabel(names=class_names),
        "file_name": tfds.features.Text(),
    }
    if superclass_names is not None:
        record["id"] = record.pop("file_name")
        record["image"] = tfds.features.Image(shape=(32, 32, 3))
        record["coarse_label"] = tfds.features.ClassLabel(names=superclass_names)
    return tfds.features.FeaturesDict(record)


def write(
    folder: Path,
    benchmark: benchmarks.Benchmark,
    class_names: list[str],
    superclass_names: list[str] | None,
    records: Mapping[str, Iterator[dict[str, Any]]],
) -> None:
    """Writes a data set into an empty folder as array_record files, in the order given.

    `records` are, per split, one dictionary per image with the keys of `features`, the image
    encoded.

    Raises:
        InputError: the disk is full or closed.
    """
    info = tfds.core.DatasetInfo(
        builder=dataset_info.DatasetIdentity(
            name=benchmark.tfds_name,
            version=tfds.core.Version(benchmark.tfds_version),
            data_dir=str(folder),
            module_name=__name__,
        ),
        description=f"{benchmark.name}, {benchmark.partition} split.",
        features=features(class_names, superclass_names),
        supervised_keys=("image", "label"),
        disable_shuffling=True,
    )
    try:
        writer = tfds.core.SequentialWriter(info, _IMAGES_PER_FILE, file_format="array_record")
        writer.initialize_splits(list(records))
        for split, each in records.items():
            while chunk := list(itertools.islice(each, _CHUNK)):
                writer.add_examples({split: chunk})
        writer.close_all()
    except (OSError, RuntimeError) as error:
        # array_record raises the latter on a full disk.
        raise InputError(f"cannot write {folder}: {_one_line(error)}") from error
