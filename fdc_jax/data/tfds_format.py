"""Prepared data on disk: opening and writing; the only module that knows TensorFlow Datasets.

TensorFlow is neither needed nor imported: data are stored as array_record files.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from tensorflow_datasets.core import dataset_info

from fdc_jax.data import benchmarks, dataset, images
from fdc_jax.errors import InputError
from fdc_jax.files import read_json, read_npz, write_npz

_CHUNK = 256
_IMAGES_PER_FILE = 5000


def dataset_folder(benchmark: benchmarks.Benchmark, data_dir: str | os.PathLike[str]) -> Path:
    """Returns the folder that holds the prepared benchmark below the data folder."""
    return Path(data_dir) / benchmark.tfds_name / benchmark.tfds_version


def open_prepared(
    benchmark: benchmarks.Benchmark,
    split: str,
    data_dir: Path,
    cache_dir: str | os.PathLike[str] | None = None,
) -> dataset.Dataset:
    """Opens one split of a prepared benchmark; see `dataset.open_dataset`."""
    folder = dataset_folder(benchmark, data_dir)
    if not (folder / "dataset_info.json").is_file():
        raise InputError(
            f"{benchmark.name} is not prepared: expected it in {folder}; prepare it with: "
            f"python -m fdc_jax.data.prepare {benchmark.name} --data_dir={data_dir} --source=PATH, "
            f"where PATH is {benchmark.obtain}"
        )
    try:
        builder: Any = tfds.builder_from_directory(str(folder))
        stored = builder.info.splits[split]
        records = builder.as_data_source(
            split=split, decoders={"image": tfds.decode.SkipDecoding()}
        )
        class_names = tuple(builder.info.features["label"].names)
        shards = [Path(path) for path in stored.filepaths]
    except Exception as error:
        # TFDS raises many types here, all of them about the files of this folder.
        raise InputError(f"{folder}: cannot open split {split}: {_one_line(error)}") from error
    missing = ", ".join(shard.name for shard in shards if not shard.is_file())
    if missing:
        raise InputError(f"{folder}: expected the files {missing}, found none")
    kept = _metadata(benchmark, folder / "metadata.json")
    index = _remembered(
        *(shards, f"{split}-index", cache_dir), lambda: _index(folder, split, records)
    )
    labels, positions, ids = index["labels"], index["positions"], tuple(index["ids"].tolist())

    def read(index: int) -> bytes:
        try:
            return records[int(positions[index])]["image"]
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
    )
    return opened


def _one_line(error: BaseException) -> str:
    return re.sub(r"\s+", " ", str(error)).strip()[:300] or type(error).__name__


def _metadata(benchmark: benchmarks.Benchmark, path: Path) -> dict[str, Any]:
    """Returns what was noted of data when they were prepared; nothing where TFDS did it.

    Raises:
        InputError: it cannot be read, or is of another division into train and test.
    """
    noted = read_json(path) if path.is_file() else {}
    found = noted.get("partition", benchmark.partition) if isinstance(noted, dict) else noted
    if found != benchmark.partition:
        raise InputError(
            f"{path}: expected partition {benchmark.partition} for {benchmark.name}, found {found}"
        )
    return noted


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


def _index(folder: Path, split: str, records: Any) -> dict[str, np.ndarray]:
    """Reads labels, identifiers and stored positions of all records, in the canonical order."""
    labels, ids, key = [], [], "file_name"
    try:
        for start in range(0, len(records), _CHUNK):
            chunk = range(start, min(start + _CHUNK, len(records)))
            for record in records.__getitems__(list(chunk)):
                key = "file_name" if "file_name" in record else "id"
                labels.append(record["label"])
                ids.append(record[key].decode())
    except Exception as error:
        raise InputError(f"{folder}: cannot read split {split}: {_one_line(error)}") from error
    if len(set(ids)) != len(ids):
        raise InputError(f"{folder}: split {split}: expected distinct record names, found repeats")
    names, label = np.array(ids, np.str_), np.array(labels, np.int32)
    positions = np.argsort(names) if key == "id" else np.lexsort((names, label))
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
        description=f"{benchmark.title}, {benchmark.partition} split.",
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
