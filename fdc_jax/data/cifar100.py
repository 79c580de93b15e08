"""CIFAR-100's official binary archive: download and reader, without pickle."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fdc_jax.data import archive, images
from fdc_jax.data.dataset import Dataset, with_notes
from fdc_jax.errors import InputError
from fdc_jax.machine.files import sha256

ARCHIVE_NAME = "cifar-100-binary.tar.gz"
URL = f"https://www.cs.toronto.edu/~kriz/{ARCHIVE_NAME}"
SHA256 = "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec"
# A record is the superclass, the class, and 32 x 32 pixels of red, then of green, then of blue.
_RECORD_BYTES = 2 + 3 * 32 * 32


def download(cache: Path, quiet: bool) -> Path:
    """Returns the path of the archive in `cache`, downloaded unless it is there.

    Raises:
        InputError: the download fails or its checksum is wrong.
    """
    import pooch  # warns in a notebook without widgets

    downloader: Any = pooch.HTTPDownloader(progressbar=not quiet, timeout=60)
    if quiet:
        pooch.get_logger().setLevel("WARNING")
    try:
        path = pooch.retrieve(URL, f"sha256:{SHA256}", ARCHIVE_NAME, cache, downloader=downloader)
    except Exception as error:  # Network, disk and checksum raise many types.
        raise InputError(
            f"cannot download {URL} ({type(error).__name__}); get the file elsewhere and name it "
            "by --config.data.source=FILE, or put it into the folder --data of fdc paper"
        ) from error
    return Path(path)


def open_cifar100(
    cache: Path, path: Path | None = None, quiet: bool = True
) -> tuple[Dataset, Dataset]:
    """Returns the training and the test images of the archive at a path; None downloads it.

    Raises:
        InputError: the download fails, or the archive is not the published one.
    """
    if path is not None and (checksum := sha256(path)) != SHA256:
        raise InputError(
            f"{path}: expected {ARCHIVE_NAME}, the version for C programs, of SHA-256 {SHA256}, "
            f"found another file, of {checksum}"
        )
    folder = archive.unpack(path or download(cache, quiet), cache) / "cifar-100-binary"
    class_names = tuple((folder / "fine_label_names.txt").read_text().split())

    def split(name: str) -> Dataset:
        raw = np.memmap(folder / f"{name}.bin", np.uint8, "r").reshape(-1, _RECORD_BYTES)
        pixels = raw[:, 2:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        labels = raw[:, 1].astype(np.int32)
        ids = tuple(f"{name}_{index:05d}" for index in range(len(raw)))

        @functools.cache
        def pixel_hashes() -> list[bytes]:
            return [images.pixels_sha256(image) for image in pixels]

        return Dataset(
            name="cifar100",
            split=name,
            partition="official",
            labels=labels,
            ids=ids,
            class_names=class_names,
            read=lambda index: Image.fromarray(np.ascontiguousarray(pixels[index])),
            pixel_hashes=pixel_hashes,
        )

    return with_notes(split("train"), split("test"), {})
