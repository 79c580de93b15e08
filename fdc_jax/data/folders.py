"""Image folders, archives of them and lists of files: the images there are, and their classes."""

from __future__ import annotations

import collections
import contextlib
import csv
import hashlib
import os
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from fdc_jax.data.dataset import SPLIT_NAMES, SPLITS, RawData, RawImage, name_of
from fdc_jax.errors import InputError, counted

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


# Divides images into those for training and those for testing.
Division = Callable[[list[RawImage]], tuple[list[RawImage], list[RawImage]]]


def read(
    source: Path, divide: Division | None = None, one_class: bool = False
) -> tuple[RawData, list[str]]:
    """Finds images, and which of them are for training.

    Args:
        source: a folder that holds `train` and `test`, or the folders of classes, up to two levels
            below it; or a list of files with the columns `file`, `label` and `split`.
        divide: divides the images where the source does not.
        one_class: the folder of a single class is enough for it, where there are no more.

    Returns:
        The images, and notes on what was left out. Classes are in the order of their names as
        strings, in a list in that of their first lines.

    Raises:
        InputError: folders or columns are not there, or there are those that `divide` stands for;
            what `list_images` raises.
    """
    if source.is_file():
        (found, class_names), others = _read_list(source, divided=divide is not None), []
    else:
        found, others = _read_folder(source, divide is not None, one_class)
        class_names = sorted({each.class_name for images in found.values() for each in images})
    notes = _skipped(others)
    if divide is not None:
        splits: dict[str, list[RawImage]] = dict(zip(SPLITS, divide(found[""]), strict=True))
    else:
        splits = {split: found.pop(name_of(split, found), []) for split in SPLITS}
        notes += [f"left out: {counted(len(found[name]), 'image')} of {name}" for name in found]
    for split, images in splits.items():
        if not images:
            raise InputError(f"{source}: expected images for {split}, found none")
    kept = {each.class_name for images in splits.values() for each in images}
    for name in kept:
        if name != name.strip() or len(name.splitlines()) > 1:
            raise InputError(f"{source}: expected class names of one line, found {name!r}")
    return RawData(splits, [name for name in class_names if name in kept]), notes


def _read_folder(
    source: Path, divided: bool, one_class: bool
) -> tuple[dict[str, list[RawImage]], list[str]]:
    """Lists the images by the name of their split, "" where they are to be divided."""

    def splits(folder: Path) -> list[str]:
        return [name for name in SPLIT_NAMES if (folder / name).is_dir()]

    # In their order: train, and at least one after it.
    top = _nearest(source, lambda folder: "train" in splits(folder)[:-1])
    if top is not None and divided:
        raise InputError(f"{top}: expected folders of classes to divide, found train and test")
    if top is not None:
        listed = {name: list_images(top / name) for name in splits(top)}
    elif not divided:
        found = ", ".join(path.name for path in _subfolders(source)[:10]) or "no folder"
        raise InputError(f"{source}: expected the folders train and test, found {found}")
    else:
        for least in (2, 1) if one_class else (2,):
            top = top or _nearest(
                source,
                lambda folder, n=least: sum(map(_holds_images, _subfolders(folder))) >= n,
            )
        if top is None:
            names = (path.name for path in _files(source) if not _is_image(path.name))
            expected = f"{source}: expected one folder of images per class, found none"
            raise InputError("; ".join([expected, *_skipped(names)]))
        listed = {"": list_images(top)}
    others = [name for _, names in listed.values() for name in names]
    return {name: images for name, (images, _) in listed.items()}, others


def _read_list(path: Path, divided: bool) -> tuple[dict[str, list[RawImage]], list[str]]:
    """Reads a CSV file of images, whose places are relative to its folder.

    Returns:
        The images as of `_read_folder`, and the classes in the order of their first lines.
    """
    wanted = ["file", "label", *["split"] * (not divided)]
    found: dict[str, list[RawImage]] = {}
    lines: dict[str, int] = {}
    labels: dict[str, None] = {}
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            table = csv.DictReader(file, skipinitialspace=True, strict=True)
            columns = list(table.fieldnames or [])
            if not set(wanted) <= set(columns) or divided == ("split" in columns):
                raise InputError(
                    f"{path}: expected the columns {', '.join(wanted)}"
                    + " and no split, which is to be drawn" * divided
                    + f"; found {', '.join(columns) or 'none'}"
                )
            for row in table:
                place = f"{path}, line {table.line_num}"
                name, label, split = (
                    (row.get(column) or "").strip() for column in ("file", "label", "split")
                )
                if not name or not label:
                    raise InputError(f"{place}: expected a file and its label, found {name or row}")
                if not divided and split not in SPLIT_NAMES:
                    raise InputError(
                        f"{place}: expected a split of {', '.join(SPLIT_NAMES)}; found {split!r}"
                    )
                if name in lines:
                    raise InputError(f"{place}: {name} is in line {lines[name]}, too")
                lines[name], labels[label] = table.line_num, None
                found.setdefault(split, []).append(_image(path.parent / name, name, label))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: cannot read this list: {error}") from error
    return found or {"": []}, list(labels)


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
        found += [_image(path, name, class_folder.name) for path, name in images]
        others += skipped
    return sorted(found, key=lambda image: (image.class_name, image.name)), others


def find_images(folder: Path) -> list[Path]:
    """Returns the images at and below a folder, in the order of their names.

    Raises:
        InputError: there are none, or a folder cannot be read.
    """
    try:
        files = list(_files(folder))
    except OSError as error:
        raise InputError(f"{error.filename}: cannot read: {error.strerror}") from error
    found = [path for path in files if _is_image(path.name)]
    if not found:
        expected = f"{folder}: expected images in this folder, found none"
        raise InputError("; ".join([expected, *_skipped(path.name for path in files)]))
    return found


def _image(path: Path, name: str, class_name: str) -> RawImage:
    """Returns an image that is a file; not read yet."""
    try:
        for text in (name, class_name):
            text.encode()
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise InputError(f"{path}: expected an image file, found a pipe, socket or device")
    except UnicodeEncodeError as error:
        raise InputError(
            f"{path.parent}: expected file names in UTF-8, found {os.fsencode(name)!r}"
        ) from error
    except OSError as error:
        raise InputError(f"{path}: cannot read: {error.strerror}") from error
    fields = {"file_name": name}
    return RawImage(name, class_name, str(path), path.read_bytes, fields, found.st_size)


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


def stratified(
    images: list[RawImage], share: float, seed: int
) -> tuple[list[RawImage], list[RawImage]]:
    """Divides the images of each class by chance, in a way that other classes have no part in.

    The n images of a class, sorted by name, are permuted by `numpy.random.RandomState` of the
    eight 32-bit words of the SHA-256 of "SEED CLASS"; the first round(share n), but one at least
    and n - 1 at most, are for testing.

    Raises:
        InputError: a class has but one image.
    """
    of_class: dict[str, list[RawImage]] = {}
    for image in sorted(images, key=lambda image: (image.class_name, image.name)):
        of_class.setdefault(image.class_name, []).append(image)
    splits: tuple[list[RawImage], list[RawImage]] = ([], [])
    for name, members in of_class.items():
        if len(members) < 2:
            raise InputError(
                f"class {name}: expected two images or more to divide, found {members[0].place}"
            )
        words = np.frombuffer(hashlib.sha256(f"{seed} {name}".encode()).digest(), "<u4")
        order = np.random.RandomState(words).permutation(len(members))
        for_test = set(order[: min(max(round(share * len(members)), 1), len(members) - 1)].tolist())
        for rank, image in enumerate(members):
            splits[rank in for_test].append(image)
    return splits


def check_space(folder: Path, needed: int) -> None:
    """Refuses work for which the disk of a folder has no room, in bytes."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise InputError(
            f"{folder}: expected {needed / 2**30:.2f} GiB of free space, found {free / 2**30:.2f}"
        )


def _extract(archive: Path, destination: Path) -> None:
    # Beside what is unpacked there must be room for the prepared images.
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as packed:
                check_space(destination, 2 * sum(each.file_size for each in packed.infolist()))
                packed.extractall(destination)
        elif tarfile.is_tarfile(archive):
            with tarfile.open(archive) as packed:
                check_space(destination, 2 * sum(each.size for each in packed))
                packed.extractall(destination, filter="data")
        else:
            raise InputError(f"{archive}: expected a folder, a zip or tar archive, or a list.csv")
    except (
        *(OSError, EOFError, RuntimeError, NotImplementedError),
        *(zlib.error, zipfile.BadZipFile, tarfile.TarError),
    ) as error:
        raise InputError(f"{archive}: cannot unpack: {error}") from error


@contextlib.contextmanager
def unpacked(source: Path, scratch: Path) -> Iterator[Path]:
    """Yields `source` if it is a folder or a list, else a folder of its contents below `scratch`.

    Errors that name a file of that folder name it as a file of the archive.
    """
    if source.is_dir() or source.suffix.lower() == ".csv":
        yield source
        return
    destination = scratch / "unpacked"
    destination.mkdir(parents=True)
    try:
        _extract(source, destination)
        yield destination
    except InputError as error:
        raise InputError(str(error).replace(str(destination), str(source))) from error
