"""Image folders and archives of them: which images there are, and of which class."""

from __future__ import annotations

import collections
import contextlib
import os
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from fdc_jax.data.dataset import SPLITS, RawData, RawImage
from fdc_jax.errors import InputError

# The file names that torchvision's ImageFolder, and so PILOT, takes for images.
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
RANDOM80_SEED = 1993


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


def _suffixes(names: Iterable[str]) -> str:
    """Says which files are no images by their suffix: "; skipped: 12 .gif, 1 .txt" or nothing."""
    counts = collections.Counter(
        os.path.splitext(name)[1].lower() or os.path.basename(name) for name in names
    )
    listed = ", ".join(f"{count} {suffix}" for suffix, count in counts.most_common(5))
    return f"; skipped, as no images by their suffix: {listed}" if listed else ""


def read(root: Path, split: bool) -> tuple[RawData, list[str]]:
    """Finds the images of a folder, and which of them are for training.

    Args:
        root: holds `train` and `test`, or the folders of classes, up to two levels below it.
        split: whether it holds `train` and `test`; else `random80` divides the images.

    Returns:
        The images, and the names of the files that are no images by their suffix.

    Raises:
        InputError: the folders are not there; what `list_images` raises.
    """
    if split:
        root = _split_root(root)
        found = {name: list_images(root / name) for name in SPLITS}
        splits = {name: images for name, (images, _) in found.items()}
        others = [name for _, names in found.values() for name in names]
    else:
        images, others = list_images(_class_root(root))
        splits = dict(zip(SPLITS, random80(images), strict=True))
    return RawData(splits, sorted({each.class_name for s in splits.values() for each in s})), others


def list_images(folder: Path) -> tuple[list[RawImage], list[str]]:
    """Lists the images of FOLDER/CLASS/..., sorted by class and name as strings.

    Returns:
        The images, named "CLASS/IMAGE", and the names of the files that are no images.

    Raises:
        InputError: a class folder without an image; an image that is no file, or whose name is
            not in UTF-8.
    """
    found: list[RawImage] = []
    others: list[str] = []
    for class_folder in _subfolders(folder):
        before, skipped = len(found), []
        for path in _files(class_folder):
            name = path.relative_to(folder).as_posix()
            if not _is_image(path.name):
                skipped.append(name)
                continue
            try:
                name.encode()
                regular = stat.S_ISREG(path.stat().st_mode)
            except UnicodeEncodeError as error:
                raise InputError(
                    f"{folder}: expected file names in UTF-8, found {os.fsencode(name)!r}"
                ) from error
            except OSError as error:
                raise InputError(f"{path}: cannot read: {error.strerror}") from error
            if not regular:
                raise InputError(f"{path}: expected an image file, found a pipe, socket or device")
            fields = {"file_name": name}
            found.append(RawImage(name, class_folder.name, str(path), path.read_bytes, fields))
        if len(found) == before:
            raise InputError(
                f"{class_folder}: expected images in this class folder, found none"
                + _suffixes(skipped)
            )
        others += skipped
    return sorted(found, key=lambda image: (image.class_name, image.name)), sorted(others)


def _descend(root: Path, depth: int) -> Iterator[Path]:
    """Yields `root` and the folders below it, nearest first."""
    level = [root]
    for _ in range(depth + 1):
        yield from level
        level = [child for folder in level for child in _subfolders(folder)]


def _split_root(root: Path) -> Path:
    """Finds the folder that holds `train` and `test`, at `root` or up to two levels below it.

    Raises:
        InputError: there is none.
    """
    for folder in _descend(root, 2):
        if (folder / "train").is_dir() and (folder / "test").is_dir():
            return folder
    raise InputError(
        f"{root}: expected the folders train and test, found "
        f"{', '.join(path.name for path in _subfolders(root)[:10]) or 'no folder'}"
    )


def _class_root(root: Path) -> Path:
    """Finds the folder of class folders, at `root` or up to two levels below it.

    Raises:
        InputError: no folder there has two subfolders with images.
    """
    for folder in _descend(root, 2):
        with_images = 0
        for child in _subfolders(folder):
            with os.scandir(child) as entries:
                with_images += any(_is_image(entry.name) and entry.is_file() for entry in entries)
            if with_images == 2:
                return folder
    others = (path.name for path in _files(root) if not _is_image(path.name))
    raise InputError(
        f"{root}: expected one folder of images per class, found none{_suffixes(others)}"
    )


def random80(images: list[RawImage]) -> tuple[list[RawImage], list[RawImage]]:
    """Divides images 80/20 by a fixed rule, as a substitute for a division that is not public.

    The images, sorted by "CLASS/IMAGE" as strings, are permuted by
    `numpy.random.RandomState(1993)`; the first int(0.8 n) are for training, the rest for testing.

    Returns:
        Training and test images, each sorted by name.
    """
    images = sorted(images, key=lambda image: image.name)
    order = np.random.RandomState(RANDOM80_SEED).permutation(len(images))
    cut = int(0.8 * len(images))
    return [images[i] for i in sorted(order[:cut])], [images[i] for i in sorted(order[cut:])]


def _extract(archive: Path, destination: Path) -> None:
    """Unpacks a zip or tar archive.

    Raises:
        InputError: the file is no such archive, is damaged, or there is no room for it.
    """
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
