"""CIFAR-100's official binary archive: getting and reading it, without pickle."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pooch
from jaxtyping import UInt8
from PIL import Image

from fdc_jax.data import images
from fdc_jax.data.benchmarks import Benchmark
from fdc_jax.data.dataset import SPLITS, RawData, RawImage
from fdc_jax.errors import InputError
from fdc_jax.machine.files import sha256

ARCHIVE_NAME = "cifar-100-binary.tar.gz"
# A record is the superclass, the class, and 32 x 32 pixels of red, then of green, then of blue.
_RECORD_BYTES = 2 + 3 * 32 * 32


def download(benchmark: Benchmark, folder: Path, quiet: bool) -> Path:
    """Downloads the archive into `folder` unless it is there already.

    Raises:
        InputError: the download fails or its checksum is wrong.
    """
    downloader: Any = pooch.HTTPDownloader(progressbar=not quiet, timeout=60)
    if quiet:
        pooch.get_logger().setLevel("WARNING")
    try:
        known_hash = f"sha256:{benchmark.checksums['sha256']}"
        path = pooch.retrieve(
            benchmark.obtain, known_hash, ARCHIVE_NAME, folder, downloader=downloader
        )
    except Exception as error:
        # The causes are those of the network, of the disk and of the checksum, each with its type.
        raise InputError(
            f"cannot download {benchmark.obtain} ({type(error).__name__}); get the file elsewhere "
            f"and put it at {folder / ARCHIVE_NAME}, or give its place with --source"
        ) from error
    return Path(path)


def find(benchmark: Benchmark, source: Path) -> Path:
    """Returns the archive, `source` itself or a file in it, if it is the published one.

    Raises:
        InputError: it is not there or has another checksum.
    """
    archive = source / ARCHIVE_NAME if source.is_dir() else source
    if not archive.is_file():
        raise InputError(f"{archive}: expected the archive {ARCHIVE_NAME}")
    expected, found = benchmark.checksums["sha256"], sha256(archive)
    if found != expected:
        raise InputError(f"{archive}: expected SHA-256 {expected}, found {found}")
    return archive


def read(archive: Path) -> RawData:
    """Reads the archive into memory (180 MB); its checksum says that it is whole."""
    with tarfile.open(archive) as packed:

        def member(name: str) -> bytes:
            file: Any = packed.extractfile(f"cifar-100-binary/{name}")
            return file.read()

        fine, coarse = (
            member(f"{kind}_label_names.txt").decode().split() for kind in ("fine", "coarse")
        )
        records = {
            split: np.frombuffer(member(f"{split}.bin"), np.uint8).reshape(-1, _RECORD_BYTES)
            for split in SPLITS
        }

    def image(name: str, record: UInt8[np.ndarray, " 3074"]) -> RawImage:
        def encoded() -> bytes:
            pixels = record[2:].reshape(3, 32, 32).transpose(1, 2, 0)
            return images.png(Image.fromarray(np.ascontiguousarray(pixels)))

        fields = {"id": name, "coarse_label": int(record[0])}
        return RawImage(name, fine[record[1]], name, encoded, fields, _RECORD_BYTES)

    splits = {
        split: [image(f"{split}_{index:05d}", record) for index, record in enumerate(each)]
        for split, each in records.items()
    }
    return RawData(splits, fine, coarse)
