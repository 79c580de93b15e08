"""Prepared data sets on disk; the only module that knows TensorFlow Datasets.

TensorFlow is neither needed nor imported: data are stored as array_record files.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from array_record.python.array_record_module import ArrayRecordWriter
from tensorflow_datasets.core import dataset_info, splits

from fdc_jax.data import benchmarks
from fdc_jax.data.dataset import Dataset
from fdc_jax.errors import InputError
from fdc_jax.files import write_atomically

_SCAN_CHUNK = 256
_SHARD_BYTES = 256 << 20


def dataset_folder(benchmark: benchmarks.Benchmark, data_dir: str | os.PathLike[str]) -> Path:
    """Returns the folder that holds the prepared benchmark below the data folder."""
    return Path(data_dir) / benchmark.tfds_name / benchmark.tfds_version


def open_prepared(
    benchmark: benchmarks.Benchmark,
    split: str,
    data_dir: Path,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Dataset:
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
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing:
        raise InputError(f"{folder}: expected the files {', '.join(missing)}, found none")
    labels, ids, positions = _index(folder, split, records, shards)

    def read(index: int) -> bytes:
        try:
            return records[int(positions[index])]["image"]
        except Exception as error:
            raise InputError(
                f"{benchmark.name}, split {split}, image {index} ({ids[index]}): cannot read the "
                f"record in {folder}: {_one_line(error)}"
            ) from error

    return Dataset(
        name=benchmark.name,
        split=split,
        partition=_partition(folder, benchmark),
        labels=labels,
        ids=ids,
        class_names=class_names,
        read_encoded=read,
        compute_checksum=lambda: _checksum(folder, split, shards),
    )


def _one_line(error: BaseException) -> str:
    return re.sub(r"\s+", " ", str(error)).strip()[:300] or type(error).__name__


def _partition(folder: Path, benchmark: benchmarks.Benchmark) -> str:
    """Reads which division into train and test was prepared, and refuses another than asked."""
    path = folder / "metadata.json"
    if not path.is_file():
        return benchmark.partition
    try:
        found = json.loads(path.read_text()).get("partition", benchmark.partition)
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(f"{path}: cannot read: {_one_line(error)}") from error
    if found != benchmark.partition:
        raise InputError(
            f"{path}: expected partition {benchmark.partition} for {benchmark.name}, found {found}"
        )
    return found


def _index(folder: Path, split: str, records, shards: list[Path]):
    """Returns labels, identifiers and stored positions of all records, in the canonical order.

    Reading them means reading every record once, so they are kept beside the data when possible.
    """
    fingerprint = _fingerprint(shards)
    path = folder / f".fdc_jax-{split}-index.npz"
    try:
        with np.load(path, allow_pickle=False) as kept:
            if str(kept["fingerprint"]) == fingerprint and len(kept["labels"]) == len(records):
                return kept["labels"], tuple(kept["ids"].tolist()), kept["positions"]
    except Exception:
        # Absent or damaged: it is made anew.
        pass
    labels = np.empty(len(records), np.int32)
    ids: list[str] = []
    field = None
    try:
        for start in range(0, len(records), _SCAN_CHUNK):
            chunk = list(range(start, min(start + _SCAN_CHUNK, len(records))))
            for position, record in zip(chunk, records.__getitems__(chunk), strict=True):
                if field is None:
                    field = next(k for k in ("file_name", "id") if k in record)
                labels[position] = record["label"]
                ids.append(record[field].decode())
    except Exception as error:
        raise InputError(f"{folder}: cannot read split {split}: {_one_line(error)}") from error
    if len(set(ids)) != len(ids):
        raise InputError(f"{folder}: split {split}: expected distinct record names, found repeats")
    names = np.array(ids, dtype=np.str_)
    if field == "id":
        positions = np.argsort(names, kind="stable")
    else:
        positions = np.lexsort((names, labels))
    labels, names = labels[positions], names[positions]
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer,
        fingerprint=np.array(fingerprint),
        labels=labels,
        ids=names,
        positions=positions,
    )
    _keep(path, buffer.getvalue())
    return labels, tuple(names.tolist()), positions


def _fingerprint(shards: list[Path]) -> str:
    stats = [(shard.name, shard.stat()) for shard in shards]
    return json.dumps([[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats])


def _checksum(folder: Path, split: str, shards: list[Path]) -> str:
    """Returns the SHA-256 of the shards, one after the other, kept beside them when possible."""
    fingerprint = _fingerprint(shards)
    path = folder / f".fdc_jax-{split}-sha256.json"
    try:
        kept = json.loads(path.read_text())
        if kept["fingerprint"] == fingerprint:
            return kept["sha256"]
    except Exception:
        # Absent or damaged: it is computed anew.
        pass
    digest = hashlib.sha256()
    for shard in shards:
        with open(shard, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    _keep(path, json.dumps({"fingerprint": fingerprint, "sha256": digest.hexdigest()}).encode())
    return digest.hexdigest()


def _keep(path: Path, content: bytes) -> None:
    """Writes beside the data, or not at all where the folder is closed to writing."""
    # A folder marked read-only is respected even when the user could write all the same.
    if not path.parent.stat().st_mode & 0o222:
        return
    try:
        with write_atomically(path) as file:
            file.write(content)
    except InputError:
        pass


def folder_features(class_names: list[str]) -> tfds.features.FeaturesDict:
    """Features of an image folder: encoded image, class, and "CLASS/IMAGE"."""
    return tfds.features.FeaturesDict(
        {
            "image": tfds.features.Image(shape=(None, None, 3)),
            "label": tfds.features.ClassLabel(names=class_names),
            "file_name": tfds.features.Text(),
        }
    )


def cifar100_features(
    class_names: list[str], superclass_names: list[str]
) -> tfds.features.FeaturesDict:
    """Features of `cifar100` as TensorFlow Datasets itself prepares it."""
    return tfds.features.FeaturesDict(
        {
            "id": tfds.features.Text(),
            "image": tfds.features.Image(shape=(32, 32, 3)),
            "label": tfds.features.ClassLabel(names=class_names),
            "coarse_label": tfds.features.ClassLabel(names=superclass_names),
        }
    )


@contextlib.contextmanager
def _writing(path: os.PathLike[str]) -> Iterator[None]:
    """Turns what array_record raises on a full disk into bad input."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise InputError(f"cannot write {path}: {_one_line(error)}") from error


class DatasetWriter:
    """Writes a data set as array_record files, in the order given.

    Readers accept the folder only after `finish`.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        benchmark: benchmarks.Benchmark,
        features: tfds.features.FeaturesDict,
    ):
        """Writes into `folder`, an empty folder that will be renamed by the caller."""
        self._folder = Path(folder)
        self._features = features
        self._splits: list[tfds.core.SplitInfo] = []
        self._info = tfds.core.DatasetInfo(
            builder=dataset_info.DatasetIdentity(
                name=benchmark.tfds_name,
                version=tfds.core.Version(benchmark.tfds_version),
                data_dir=str(folder),
                module_name=__name__,
            ),
            description=f"{benchmark.title}, {benchmark.partition} split.",
            features=features,
            supervised_keys=("image", "label"),
            disable_shuffling=True,
        )
        self._name = benchmark.tfds_name

    def write_split(
        self, split: str, examples: Iterable[dict[str, Any]], num_examples: int, num_bytes: int
    ) -> None:
        """Writes one split.

        Args:
            split: its name.
            examples: one dictionary per image with the keys of the features, `image` encoded.
            num_examples: how many `examples` yields.
            num_bytes: about how large they are together; decides the number of files.

        Raises:
            InputError: the disk is full or closed.
        """
        num_shards = max(1, min(num_examples, -(-num_bytes // _SHARD_BYTES)))
        bounds = [num_examples * shard // num_shards for shard in range(num_shards + 1)]
        template = tfds.core.ShardedFileTemplate(
            data_dir=tfds.core.Path(self._folder),
            dataset_name=self._name,
            split=split,
            filetype_suffix="array_record",
        )
        iterator = iter(examples)
        lengths, written = [], 0
        for shard in range(num_shards):
            path = template.sharded_filepath(shard_index=shard, num_shards=num_shards)
            with _writing(path):
                writer = ArrayRecordWriter(str(path), "group_size:1")
            length = 0
            for _ in range(bounds[shard], bounds[shard + 1]):
                example = next(iterator, None)
                if example is None:
                    break
                record = self._features.serialize_example(example)
                with _writing(path):
                    writer.write(record)
                length += 1
                written += len(record)
            with _writing(path):
                writer.close()
            lengths.append(length)
        # Lets the producer run its code after the last example.
        next(iterator, None)
        self._splits.append(
            tfds.core.SplitInfo(
                name=split,
                shard_lengths=lengths,
                num_bytes=written,
                filename_template=template,
            )
        )

    def finish(self, metadata: dict[str, Any]) -> None:
        """Writes the description of the data, without which no reader accepts the folder."""
        self._info.set_file_format(tfds.core.FileFormat.ARRAY_RECORD)
        self._info.set_splits(splits.SplitDict(self._splits))
        with write_atomically(self._folder / "metadata.json") as file:
            file.write(json.dumps(metadata, indent=2).encode())
        self._info.write_to_directory(self._folder)
