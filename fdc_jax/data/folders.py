"""Image folders and archives of them: which images there are, and of which class."""

from __future__ import annotations

import collections
import contextlib
import os
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from fdc_jax.data.dataset import SPLITS, RawData, RawImage
from fdc_jax.errors import InputError

# The file names that torchvision's ImageFolder, and so PILOT, takes for images.
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


def _hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"


def _leads_back(path: Path, folder: Path) -> bool:
    """Says whether a folder is `folder` or above it, as only links are that lie in `folder`."""
    return Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(path))


def _subfolders(folder: Path) -> list[Path]:
    return sorted(
        path
        for path in folder.iterdir()
        if path.is_dir() and not _hidden(path.name) and not _leads_back(path, folder)
    )


def _is_image(name: str) -> bool:
    return name.lower().endswith(IMAGE_SUFFIXES) and not _hidden(name)


def _files(folder: Path, above: tuple[Path, ...] = ()) -> Iterator[Path]:
    """Yields the files at and below a folder; links are followed, but not back to where it is."""
    above = (*above, folder)
    for path in sorted(folder.iterdir()):
        if _hidden(path.name):
            continue
        if not path.is_dir():
            yield path
        elif not any(_leads_back(path, each) for each in above):
            yield from _files(path, above)


def _skipped(names: Iterable[str]) -> list[str]:
    """Counts files by what is no suffix of images, in one line; no line where there are none."""
    counts = collections.Counter(
        os.path.splitext(name)[1].lower() or os.path.basename(name) for name in names
    )
    listed = ", ".join(f"{count} {suffix}" for suffix, count in counts.most_common(5))
    return [f"skipped, as no images by their suffix: {listed}"] if listed else []


def read(root: Path, split: bool) -> tuple[RawData, list[str]]:
    """Finds the images of a folder, and which of them are for training.

    Args:
        root: holds `train` and `test`, or the folders of classes, up to two levels below it.
        split: whether it holds `train` and `test`; else `random80` divides the images.

    Returns:
        The images, and a note on other files if there are any.

    Raises:
        InputError: the folders are not there; what `list_images` raises.
    """
    if split:
        top = _nearest(root, lambda folder: all((folder / name).is_dir() for name in SPLITS))
        if top is None:
            found = ", ".join(path.name for path in _subfolders(root)[:10]) or "no folder"
            raise InputError(f"{root}: expected the folders train and test, found {found}")
        listed = [list_images(top / name) for name in SPLITS]
        splits = [images for images, _ in listed]
        others = [name for _, names in listed for name in names]
    else:
        top = _nearest(root, lambda folder: sum(map(_holds_images, _subfolders(folder))) > 1)
        if top is None:
            names = (path.name for path in _files(root) if not _is_image(path.name))
            expected = f"{root}: expected one folder of images per class, found none"
            raise InputError("; ".join([expected, *_skipped(names)]))
        images, others = list_images(top)
        splits = random80(images)
    class_names = sorted({image.class_name for images in splits for image in images})
    return RawData(dict(zip(SPLITS, splits, strict=True)), class_names), _skipped(others)


def list_images(folder: Path) -> tuple[list[RawImage], list[str]]:
    """Lists the images of FOLDER/CLASS/..., named "CLASS/IMAGE", by class and name as strings.

    Returns:
        The images, and the names of the files that are no images by their suffix.

    Raises:
        InputError: a class folder without an image; an image that is no file, or whose name is
            not in UTF-8.
    """
    found: list[RawImage] = []
    others: list[str] = []
    for class_folder in _subfolders(folder):
        files = [(path, path.relative_to(folder).as_posix()) for path in _files(class_folder)]
        images = [(path, name) for path, name in files if _is_image(path.name)]
        skipped = [name for path, name in files if not _is_image(path.name)]
        if not images:
            expected = f"{class_folder}: expected images in this class folder, found none"
            raise InputError("; ".join([expected, *_skipped(skipped)]))
        for path, name in images:
            _check_file(path, name, folder)
            fields = {"file_name": name}
            found.append(RawImage(name, class_folder.name, str(path), path.read_bytes, fields))
        others += skipped
    return sorted(found, key=lambda image: (image.class_name, image.name)), others


def _check_file(path: Path, name: str, folder: Path) -> None:
    try:
        name.encode()
        if not stat.S_ISREG(path.stat().st_mode):
            raise InputError(f"{path}: expected an image file, found a pipe, socket or device")
    except UnicodeEncodeError as error:
        raise InputError(
            f"{folder}: expected file names in UTF-8, found {os.fsencode(name)!r}"
        ) from error
    except OSError as error:
        raise InputError(f"{path}: cannot read: {error.strerror}") from error


def _holds_images(folder: Path) -> bool:
    return any(_is_image(path.name) and path.is_file() for path in folder.iterdir())


def _nearest(root: Path, fits: Callable[[Path], bool]) -> Path | None:
    """Returns the first folder that fits, at `root` or up to two levels below it."""
    level = [root]
    for _ in range(3):
        for folder in level:
            if fits(folder):
                return folder
        level = [child for folder in level for child in _subfolders(folder)]
    return None


def random80(images: list[RawImage]) -> tuple[list[RawImage], list[RawImage]]:
    """Divides images 80/20 by a fixed rule, as a substitute for a division that is not public.

    The images, sorted by "CLASS/IMAGE" as strings, are permuted by
    `numpy.random.RandomState(1993)`; the first int(0.8 n) are for training, the rest for testing.
    """
    images = sorted(images, key=lambda image: image.name)
    order = np.random.RandomState(1993).permutation(len(images))
    cut = int(0.8 * len(images))
    return [images[i] for i in sorted(order[:cut])], [images[i] for i in sorted(order[cut:])]


def _extract(archive: Path, destination: Path) -> None:
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as packed:
                packed.extractall(destination)
        elif tarfile.is_tarfile(archive):
            with tarfile.open(archive) as packed:
                packed.extractall(destination, filter="data")
        else:
            raise InputError(f"{archive}: expected a folder, a zip or a tar archive")
    except (
        *(OSError, EOFError, RuntimeError, NotImplementedError),
        *(zlib.error, zipfile.BadZipFile, tarfile.TarError),
    ) as error:
        raise InputError(f"{archive}: cannot unpack: {error}") from error


@contextlib.contextmanager
def unpacked(source: Path, scratch: Path) -> Iterator[Path]:
    """Yields `source` if it is a folder, else a folder below `scratch` with its contents.

    Errors that name a file of that folder name it as a file of the archive.
    """
    if source.is_dir():
        yield source
        return
    destination = scratch / "unpacked"
    destination.mkdir(parents=True)
    try:
        _extract(source, destination)
        yield destination
    except InputError as error:
        raise InputError(str(error).replace(str(destination), str(source))) from error
