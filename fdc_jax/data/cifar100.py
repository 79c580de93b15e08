"""CIFAR-100's official binary archive: downloading and reading, without pickle."""

from __future__ import annotations

import dataclasses
import hashlib
import tarfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pooch
from jaxtyping import UInt8

from fdc_jax.data.benchmarks import Benchmark
from fdc_jax.errors import InputError

ARCHIVE_NAME = "cifar-100-binary.tar.gz"
_FOLDER = "cifar-100-binary"
# A record is the superclass, the class, and 32 x 32 pixels of red, then of green, then of blue.
_RECORD_BYTES = 2 + 3 * 32 * 32


@dataclasses.dataclass(frozen=True)
class Cifar100:
    """Contents of the archive, in its own order.

    Attributes:
        class_names: 100 names, by class index.
        superclass_names: 20 names, by superclass index.
        splits: "train" and "test" to records [n, 3074].
    """

    class_names: list[str]
    superclass_names: list[str]
    splits: dict[str, UInt8[np.ndarray, "n 3074"]]


def image(record: UInt8[np.ndarray, " 3074"]) -> UInt8[np.ndarray, "32 32 3"]:
    """Returns the image of a record."""
    return np.ascontiguousarray(record[2:].reshape(3, 32, 32).transpose(1, 2, 0))


def download(benchmark: Benchmark, folder: Path, quiet: bool) -> Path:
    """Downloads the archive into `folder` unless it is there already.

    Raises:
        InputError: the download fails or its checksum is wrong.
    """
    url = benchmark.obtain
    downloader: Any = pooch.HTTPDownloader(progressbar=not quiet, timeout=60)
    if quiet:
        pooch.get_logger().setLevel("WARNING")
    try:
        path = pooch.retrieve(
            url,
            known_hash=f"sha256:{benchmark.checksums['sha256']}",
            fname=ARCHIVE_NAME,
            path=folder,
            downloader=downloader,
        )
    except Exception as error:
        # The causes are those of the network, of the disk and of the checksum, each with its type.
        raise InputError(
            f"cannot download {url} ({type(error).__name__}); get the file elsewhere and put it "
            f"at {folder / ARCHIVE_NAME}, or give its place with --source"
        ) from error
    return Path(path)


def check(benchmark: Benchmark, archive: Path) -> None:
    """Compares the checksum of an archive with the published one.

    Raises:
        InputError: they differ.
    """
    with open(archive, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    expected = benchmark.checksums["sha256"]
    if found != expected:
        raise InputError(f"{archive}: expected SHA-256 {expected}, found {found}")


def read(benchmark: Benchmark, archive: Path) -> Cifar100:
    """Reads the archive into memory (180 MB).

    Raises:
        InputError: it is no such archive, or its contents are not of the right form.
    """
    contents: dict[str, bytes] = {}
    names = ("train.bin", "test.bin", "fine_label_names.txt", "coarse_label_names.txt")
    try:
        with tarfile.open(archive) as packed:
            for name in names:
                file = packed.extractfile(f"{_FOLDER}/{name}")
                if file is None:
                    raise InputError(f"{archive}: {_FOLDER}/{name} is not a file")
                contents[name] = file.read()
    except (KeyError, OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise InputError(f"{archive}: cannot read {_FOLDER}/{name}: {error}") from error
    fine, coarse = (contents[name].decode().split() for name in names[2:])
    for name, found, expected in [(names[2], fine, benchmark.num_classes), (names[3], coarse, 20)]:
        if len(found) != expected or sorted(found) != found:
            raise InputError(
                f"{archive}: {name}: expected {expected} names in alphabetical order, found "
                f"{len(found)}"
            )
    splits = {}
    for split in ("train", "test"):
        data = contents[f"{split}.bin"]
        if not data or len(data) % _RECORD_BYTES:
            raise InputError(
                f"{archive}: {split}.bin: expected a multiple of {_RECORD_BYTES} bytes, found "
                f"{len(data)}"
            )
        records = np.frombuffer(data, np.uint8).reshape(-1, _RECORD_BYTES)
        top = records[:, :2].max(axis=0)
        if top[0] >= len(coarse) or top[1] >= len(fine):
            raise InputError(
                f"{archive}: {split}.bin: expected labels below {len(coarse)} and {len(fine)}, "
                f"found {top[0]} and {top[1]}"
            )
        splits[split] = records
    return Cifar100(fine, coarse, splits)
