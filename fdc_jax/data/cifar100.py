"""CIFAR-100's official binary archive: getting and reading it, without pickle."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fdc_jax.data import images
from fdc_jax.data.archive import unpacked
from fdc_jax.data.dataset import Dataset
from fdc_jax.errors import InputError
from fdc_jax.machine.files import sha256

ARCHIVE_NAME = "cifar-100-binary.tar.gz"
URL = f"https://www.cs.toronto.edu/~kriz/{ARCHIVE_NAME}"
SHA256 = "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec"
# A record is the superclass, the class, and 32 x 32 pixels of red, then of green, then of blue.
_RECORD_BYTES = 2 + 3 * 32 * 32


def download(cache: Path, quiet: bool) -> Path:
    """Returns the archive in `cache`, which is downloaded unless it is there already.

    Raises:
        InputError: the download fails or its checksum is wrong.
    """
    import pooch  # warns in a notebook without widgets

    downloader: Any = pooch.HTTPDownloader(progressbar=not quiet, timeout=60)
    if quiet:
        pooch.get_logger().setLevel("WARNING")
    try:
        path = pooch.retrieve(URL, f"sha256:{SHA256}", ARCHIVE_NAME, cache, downloader=downloader)
    except Exception as error:
        # The causes are those of the network, of the disk and of the checksum, each with its type.
        raise InputError(
            f"cannot download {URL} ({type(error).__name__}); get the file elsewhere and name its "
            "place as config.data.source"
        ) from error
    return Path(path)


def open_cifar100(
    cache: Path, archive: Path | None = None, quiet: bool = True
) -> tuple[Dataset, Dataset]:
    """Returns the training and the test images of the archive, unpacked once into `cache`.

    Args:
        cache: folder of downloads and of what was unpacked.
        archive: where it lies; None to download it.
        quiet: show no download.

    Raises:
        InputError: there is none, or another one than the published.
    """
    if archive is not None and (found := sha256(archive)) != SHA256:
        raise InputError(f"{archive}: expected SHA-256 {SHA256}, found {found}")
    folder = unpacked(archive or download(cache, quiet), cache) / "cifar-100-binary"
    fine = tuple((folder / "fine_label_names.txt").read_text().split())

    def split(name: str) -> Dataset:
        raw = np.memmap(folder / f"{name}.bin", np.uint8, "r").reshape(-1, _RECORD_BYTES)
        pixels = raw[:, 2:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        return Dataset(
            name="cifar100",
            split=name,
            partition="official",
            labels=raw[:, 1].astype(np.int32),
            ids=tuple(f"{name}_{index:05d}" for index in range(len(raw))),
            class_names=fine,
            read=lambda index: Image.fromarray(np.ascontiguousarray(pixels[index])),
            pixel_hashes=functools.cache(lambda: [images.pixels_sha256(each) for each in pixels]),
        )

    return split("train"), split("test")
