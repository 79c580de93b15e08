"""Folders of images as data sets: files, division into train and test, hashes of pixels.

Hashes stay in the cache with size and modification time of their file, so that only new and
changed images are decoded again.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import logging
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from fdc_jax.data import benchmarks, images
from fdc_jax.data.dataset import Dataset, default_workers, split_name
from fdc_jax.errors import InputError, counted
from fdc_jax.machine.files import open_regular, read_object, write_json

_log = logging.getLogger(__name__)

# The suffixes that torchvision's ImageFolder, and so PILOT, reads.
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
if images.HEIC:
    IMAGE_SUFFIXES += (".heic", ".heif")


class ImageFile(NamedTuple):
    """An image file of a folder."""

    path: Path
    name: str  # "CLASS/IMAGE", below the folder of its split
    class_name: str
    state: tuple[int, int]  # size in bytes, modification time in nanoseconds


def open_folder(
    root: Path,
    name: str,
    cache: Path,
    *,
    partition: str = "given",
    test_share: float = 0.0,
    upright: bool = True,
    workers: int = 0,
    quiet: bool = True,
) -> tuple[Dataset, Dataset]:
    """Returns the training and the test images of a folder.

    Args:
        root: holds `train/CLASS/IMAGE` and `test/CLASS/IMAGE` (or `val`), or `CLASS/IMAGE`, itself
            or up to two levels below it.
        name: of the data set.
        cache: folder that keeps the hashes.
        partition: name of the division of a divided folder, for results.
        test_share: share of each class for testing, if the folder is not divided; 0 allows no
            such folder.
        upright: whether to turn images as their EXIF data say.
        workers: number of decoding threads; 0: one per core.
        quiet: whether to hide progress.

    Raises:
        InputError: folders, classes or images are not as expected; names all unreadable images.
    """
    root = Path(os.path.abspath(root))
    splits, partition, notes = _splits(root, partition, test_share)
    files = [file for split in splits.values() for file in split]
    class_names = tuple(sorted({file.class_name for file in files}))
    label = {class_name: index for index, class_name in enumerate(class_names)}
    labels = {
        split: np.array([label[file.class_name] for file in files], np.int32)
        for split, files in splits.items()
    }
    benchmarks.verify(name, labels["train"], labels["test"], class_names)  # before all is decoded
    digits = hashlib.sha256(os.fsencode(root)).hexdigest()[:16]
    kept = cache / f"{name[:50]}-{digits}.json"
    hashes, num_new = _pixel_hashes(name, files, kept, upright, workers or default_workers(), quiet)
    if num_new:
        trained_on = {hashes[file.path] for file in splits["train"]}
        both = [file.path for file in splits["test"] if hashes[file.path] in trained_on]
        if both:
            notes.insert(0, f"{counted(len(both), 'test image')} also in train, such as {both[0]}")
        for note in notes:
            _log.warning("%s: %s", name, note)

    def dataset(split: str) -> Dataset:
        files = splits[split]
        return Dataset(
            name=name,
            split=split,
            partition=partition,
            labels=labels[split],
            ids=tuple(file.name for file in files),
            class_names=class_names,
            read=lambda index: content(files[index].path),
            upright=upright,
            pixel_hashes=lambda: [hashes[file.path] for file in files],
        )

    return dataset("train"), dataset("test")


# Files of folders ---------------------------------------------------------------------------------


def _splits(
    root: Path, partition: str, share: float
) -> tuple[dict[str, list[ImageFile]], str, list[str]]:
    """Returns the images of train and test, the name of the division, and warnings."""
    divided = _nearest(root, lambda below: "train" in below and split_name("test", below) in below)
    if divided is not None:
        below = _subfolders(divided)
        train, skipped = list_images(below["train"])
        test, more = list_images(below[split_name("test", below)])
        splits, skipped = {"train": train, "test": test}, skipped + more
    else:
        top = _nearest(root, lambda below: sum(map(_holds_images, below.values())) > 1)
        if top is None or not share:
            found = ", ".join(list(_subfolders(root))[:10]) or "no folder"
            raise InputError(
                f"{root}: expected train/CLASS/IMAGE and test/CLASS/IMAGE, or CLASS/IMAGE with "
                f"config.data.test_share above 0; found {found}"
            )
        files, skipped = list_images(top)
        splits, partition = divide(files, share), f"{share:g} of each class"
    for split, files in splits.items():
        if not files:
            raise InputError(f"{root}: expected images for {split}, found none")
    return splits, partition, _skipped(skipped)


def _nearest(root: Path, fits: Callable[[dict[str, Path]], bool]) -> Path | None:
    """Returns the folder whose subfolders fit, at `root` or up to two levels below it.

    Raises:
        InputError: several folders of the same level fit.
    """
    level = [root]
    for _ in range(3):
        fitting = [folder for folder in level if fits(_subfolders(folder))]
        if len(fitting) > 1:
            names = ", ".join(str(folder.relative_to(root)) for folder in fitting[:10])
            raise InputError(
                f"{root}: expected one folder of classes, or train and test, found {names}; name "
                "one of them, or these folders train and test"
            )
        if fitting:
            return fitting[0]
        level = [child for folder in level for child in _subfolders(folder).values()]
    return None


def _subfolders(folder: Path) -> dict[str, Path]:
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir() and _visible(entry.name))
    return {name: folder / name for name in names}


def _holds_images(folder: Path) -> bool:
    with os.scandir(folder) as entries:
        return any(_is_image(entry.name) and entry.is_file() for entry in entries)


def _visible(name: str) -> bool:
    return not name.startswith(".") and name != "__MACOSX"


def _is_image(name: str) -> bool:
    return name.lower().endswith(IMAGE_SUFFIXES) and _visible(name)


def verify_names(name: str, files: Iterable[str]) -> None:
    """Checks the numbers of images of a benchmark by the names of all files of its archive.

    Raises:
        InputError: see `benchmarks.verify`.
    """
    of_split: dict[str, list[str]] = {"train": [], "test": []}
    for *folders, file in (name.split("/") for name in files):
        for split in of_split.keys() & folders[:-1] if _is_image(file) else ():
            if all(map(_visible, folders)):
                of_split[split].append(folders[folders.index(split) + 1])
    class_names = sorted({each for members in of_split.values() for each in members})
    train, test = (np.searchsorted(class_names, members) for members in of_split.values())
    benchmarks.verify(name, train, test, class_names)


def list_images(folder: Path) -> tuple[list[ImageFile], list[str]]:
    """Returns the images of FOLDER/CLASS/..., by class and name as strings, and other file names.

    Raises:
        InputError: a class folder has no image.
    """
    files: list[ImageFile] = []
    others: list[str] = []
    for class_name, class_folder in _subfolders(folder).items():
        paths, skipped = _images_below(class_folder, "class folder")
        for name, path in sorted((path.relative_to(folder).as_posix(), path) for path in paths):
            state = path.stat()
            files.append(ImageFile(path, name, class_name, (state.st_size, state.st_mtime_ns)))
        others += skipped
    return files, others


def content(path: Path) -> bytes:
    """Returns the bytes of an image file.

    Raises:
        InputError: the file cannot be read.
    """
    try:
        with open_regular(path) as file:
            return file.read()
    except OSError as error:
        raise InputError(f"{path}: cannot read: {error.strerror}") from error


def find_images(folder: Path) -> list[Path]:
    """Returns the images at and below a folder, by name; a warning counts the other files.

    Raises:
        InputError: the folder has no image.
    """
    paths, skipped = _images_below(folder, "folder")
    for note in _skipped(skipped):
        _log.warning("%s: %s", folder, note)
    return paths


def _images_below(folder: Path, kind: str) -> tuple[list[Path], list[str]]:
    """Returns the images at and below a folder, and the names of its other files.

    Links are followed; a folder that cannot be read raises its OSError.
    """

    def fail(error: OSError) -> None:
        raise error

    paths: list[Path] = []
    for parent, below, names in os.walk(folder, onerror=fail, followlinks=True):
        below[:] = filter(_visible, below)
        paths += [Path(parent, name) for name in names if _visible(name)]
    paths.sort()
    skipped = [path.name for path in paths if not _is_image(path.name)]
    if len(skipped) == len(paths):
        expected = f"{folder}: expected images in this {kind}, found none"
        raise InputError("; ".join([expected, *_skipped(skipped)]))
    return [path for path in paths if _is_image(path.name)], skipped


def _skipped(names: Iterable[str]) -> list[str]:
    """Returns a line that counts skipped files by suffix; no line for no files."""
    counts = collections.Counter(os.path.splitext(name)[1].lower() or name for name in names)
    listed = ", ".join(f"{count} {suffix}" for suffix, count in counts.most_common(5))
    if not listed:
        return []
    remedy = " (pip install pillow-heif)" if {".heic", ".heif"} & counts.keys() else ""
    return [f"skipped, as no images by their suffix: {listed}{remedy}"]


def divide(files: list[ImageFile], share: float) -> dict[str, list[ImageFile]]:
    """Returns the images of train and test, divided within each class.

    Of the n images of a class, in the order of the SHA-256 of their "CLASS/IMAGE", the first
    round(share n) are test images, at least 1 and at most n - 1. Other classes have no influence.

    Raises:
        InputError: a class has a single image.
    """
    of_class: dict[str, list[ImageFile]] = {}
    for file in files:
        of_class.setdefault(file.class_name, []).append(file)
    test: set[Path] = set()
    for name, members in of_class.items():
        if len(members) < 2:
            raise InputError(
                f"class {name}: expected two images or more to divide, found {members[0].path}"
            )
        drawn = sorted(members, key=lambda file: hashlib.sha256(file.name.encode()).digest())
        count = min(max(round(share * len(members)), 1), len(members) - 1)
        test.update(file.path for file in drawn[:count])
    return {
        split: [file for file in files if (file.path in test) == (split == "test")]
        for split in ("train", "test")
    }


# Hashes of pixels ---------------------------------------------------------------------------------


def _pixel_hashes(
    name: str, files: list[ImageFile], kept: Path, upright: bool, workers: int, quiet: bool
) -> tuple[dict[Path, bytes], int]:
    """Returns the hash of every image's pixels, and the number of images decoded for it.

    `kept` is the file that remembers hashes; it is written even if the pass is interrupted.
    """
    remembered: dict[str, list] = {}
    with contextlib.suppress(InputError):  # A damaged file is replaced.
        remembered = read_object(kept)
    hashes: dict[Path, bytes] = {}
    for file in files:
        *state, pixels = remembered.get(str(file.path), [""])
        if tuple(state) == file.state:
            hashes[file.path] = bytes.fromhex(pixels)
    new = [file for file in files if file.path not in hashes]
    if not new:
        return hashes, 0
    unreadable: list[str] = []

    def decode(file: ImageFile) -> None:
        try:
            image = images.decode(content(file.path), str(file.path), upright)
            hashes[file.path] = images.pixels_sha256(np.asarray(image))
        except InputError as error:
            unreadable.append(str(error))

    pool = ThreadPoolExecutor(workers, thread_name_prefix="hash")
    try:
        bar = {"unit": "image", "disable": quiet or None}  # None: no bar outside of a terminal.
        collections.deque(tqdm(pool.map(decode, new), name, len(new), **bar), maxlen=0)
    finally:
        pool.shutdown(cancel_futures=True)
        known = [file for file in files if file.path in hashes]
        write_json(kept, {str(f.path): (*f.state, hashes[f.path].hex()) for f in known})
    if unreadable:
        raise InputError(
            f"{name}: {len(unreadable)} of {counted(len(files), 'image')} cannot be read: "
            + "; ".join(sorted(unreadable))
        )
    return hashes, len(new)
