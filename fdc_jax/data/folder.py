"""A folder of images as a data set: what lies in it, its division, and one look at every image.

What a look found is kept in the cache by size and time of change, so that only new and changed
images are looked at again.
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

from fdc_jax.data import images
from fdc_jax.data.dataset import Dataset, default_workers, split_name
from fdc_jax.errors import InputError, counted
from fdc_jax.machine.files import read_object, write_json

_log = logging.getLogger(__name__)

# The file names that torchvision's ImageFolder, and so PILOT, takes for images.
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
if images.HEIC:
    IMAGE_SUFFIXES += (".heic", ".heif")


class ImageFile(NamedTuple):
    """An image that lies in a folder."""

    path: Path
    name: str  # "CLASS/IMAGE", below the folder of its split
    class_name: str
    state: tuple[int, int]  # size in bytes, and time of change in nanoseconds


def open_folder(
    root: Path,
    name: str,
    cache: Path,
    *,
    given: str = "given",
    test_share: float = 0.0,
    upright: bool = True,
    workers: int = 0,
    quiet: bool = True,
) -> tuple[Dataset, Dataset]:
    """Opens the training and the test images of a folder.

    Args:
        root: holds `train/CLASS/IMAGE` and `test/CLASS/IMAGE` (or `val`), or `CLASS/IMAGE`, itself
            or up to two levels below it.
        name: of the data set.
        cache: folder where what a look at the images found is kept.
        given: what results call the division of a divided folder.
        test_share: of each class, for testing, where the folder is not divided; 0: refuse that.
        upright: whether to turn images as their EXIF data say.
        workers: decoding threads, 0 for one per core.
        quiet: show no progress.

    Raises:
        InputError: folders, classes or images are not as expected; all unreadable images are named.
    """
    root = Path(os.path.abspath(root))
    splits, partition, notes = _splits(root, given, test_share)
    every = [image for found in splits.values() for image in found]
    class_names = tuple(sorted({image.class_name for image in every}))
    place = hashlib.sha256(os.fsencode(root)).hexdigest()[:16]
    kept = cache / f"{name[:50]}-{place}.json"
    hashes, new = _look(name, every, kept, upright, workers or default_workers(), quiet)
    if new:
        trained_on = {hashes[image.path] for image in splits["train"]}
        both = [image.path for image in splits["test"] if hashes[image.path] in trained_on]
        if both:
            found = f"{counted(len(both), 'test image')} also in train, such as {both[0]}"
            _log.warning("%s: %s", name, found)
        for note in notes:
            _log.warning("%s: %s", name, note)
    label = {each: index for index, each in enumerate(class_names)}

    def opened(split: str, found: list[ImageFile]) -> Dataset:
        return Dataset(
            name=name,
            split=split,
            partition=partition,
            labels=np.array([label[image.class_name] for image in found], np.int32),
            ids=tuple(image.name for image in found),
            class_names=class_names,
            read=lambda index: content(found[index].path),
            upright=upright,
            pixel_hashes=lambda: [hashes[image.path] for image in found],
        )

    return opened("train", splits["train"]), opened("test", splits["test"])


# What lies in folders -----------------------------------------------------------------------------


def _splits(
    root: Path, given: str, share: float
) -> tuple[dict[str, list[ImageFile]], str, list[str]]:
    """Returns the images for training and testing, how they were divided, and what to note."""
    divided = _nearest(root, lambda below: "train" in below and split_name("test", below) in below)
    if divided is not None:
        below = _subfolders(divided)
        names = {"train": "train", "test": split_name("test", below)}
        listed = {split: list_images(below[name]) for split, name in names.items()}
        splits, partition = {split: found for split, (found, _) in listed.items()}, given
        skipped = [other for _, others in listed.values() for other in others]
    else:
        top = _nearest(root, lambda below: sum(map(_holds_images, below.values())) > 1)
        if top is None or not share:
            found = ", ".join(list(_subfolders(root))[:10]) or "no folder"
            raise InputError(
                f"{root}: expected train/CLASS/IMAGE and test/CLASS/IMAGE, or CLASS/IMAGE with "
                f"config.data.test_share above 0; found {found}"
            )
        found, skipped = list_images(top)
        splits, partition = divide(found, share), f"{share:g} of each class"
    for split, found in splits.items():
        if not found:
            raise InputError(f"{root}: expected images for {split}, found none")
    return splits, partition, _skipped(skipped)


def _nearest(root: Path, fits: Callable[[dict[str, Path]], bool]) -> Path | None:
    """Returns the folder whose subfolders fit, at `root` or up to two levels below it.

    Raises:
        InputError: there are several on the first level that has one, and none can be left out.
    """
    level = [root]
    for _ in range(3):
        found = [folder for folder in level if fits(_subfolders(folder))]
        if len(found) > 1:
            names = ", ".join(str(folder.relative_to(root)) for folder in found[:10])
            raise InputError(
                f"{root}: expected one folder of classes, or train and test, found {names}; name "
                "one of them, or these folders train and test"
            )
        if found:
            return found[0]
        level = [child for folder in level for child in _subfolders(folder).values()]
    return None


def _subfolders(folder: Path) -> dict[str, Path]:
    with os.scandir(folder) as entries:
        names = sorted(each.name for each in entries if each.is_dir() and not _hidden(each.name))
    return {name: folder / name for name in names}


def _holds_images(folder: Path) -> bool:
    with os.scandir(folder) as entries:
        return any(_is_image(each.name) and each.is_file() for each in entries)


def _hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"


def _is_image(name: str) -> bool:
    return name.lower().endswith(IMAGE_SUFFIXES) and not _hidden(name)


def _files(folder: Path) -> list[Path]:
    """Returns the files at and below a folder, by name; links are followed."""

    def refuse(error: OSError) -> None:
        raise error

    found: list[Path] = []
    for place, below, names in os.walk(folder, onerror=refuse, followlinks=True):
        below[:] = [name for name in below if not _hidden(name)]
        found += [Path(place, name) for name in names if not _hidden(name)]
    return sorted(found)


def list_images(folder: Path) -> tuple[list[ImageFile], list[str]]:
    """Lists the images of FOLDER/CLASS/..., by class and name as strings.

    Returns:
        The images, and the names of the files that are no images by their suffix.

    Raises:
        InputError: a class folder without an image.
    """
    found: list[ImageFile] = []
    others: list[str] = []
    for class_name, class_folder in _subfolders(folder).items():
        paths, skipped = _sorted_out(class_folder, "class folder")
        for name, path in sorted((path.relative_to(folder).as_posix(), path) for path in paths):
            state = path.stat()
            found.append(ImageFile(path, name, class_name, (state.st_size, state.st_mtime_ns)))
        others += skipped
    return found, others


def content(path: Path) -> bytes:
    """Returns what is in an image file; InputError where it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot read: {error.strerror}") from error


def find_images(folder: Path) -> list[Path]:
    """Returns the images at and below a folder, by name; a log line counts the other files.

    Raises:
        InputError: there are none.
    """
    found, skipped = _sorted_out(folder, "folder")
    for note in _skipped(skipped):
        _log.warning("%s: %s", folder, note)
    return found


def _sorted_out(folder: Path, kind: str) -> tuple[list[Path], list[str]]:
    """Returns the images below a folder, and the names of its other files."""
    found: dict[bool, list[Path]] = {True: [], False: []}
    for path in _files(folder):
        found[_is_image(path.name)].append(path)
    skipped = [path.name for path in found[False]]
    if not found[True]:
        expected = f"{folder}: expected images in this {kind}, found none"
        raise InputError("; ".join([expected, *_skipped(skipped)]))
    return found[True], skipped


def _skipped(names: Iterable[str]) -> list[str]:
    """Counts files by what is no suffix of images, in one line; no line where there are none."""
    counts = collections.Counter(os.path.splitext(name)[1].lower() or name for name in names)
    listed = ", ".join(f"{count} {suffix}" for suffix, count in counts.most_common(5))
    if not listed:
        return []
    remedy = " (pip install pillow-heif)" if {".heic", ".heif"} & counts.keys() else ""
    return [f"skipped, as no images by their suffix: {listed}{remedy}"]


def divide(found: list[ImageFile], share: float) -> dict[str, list[ImageFile]]:
    """Divides the images of each class, in a way that other classes have no part in.

    Of the n images of a class, in the order of the SHA-256 of their "CLASS/IMAGE", the first
    round(share n) are for testing, but one at least and n - 1 at most.

    Raises:
        InputError: a class has but one image.
    """
    of_class: dict[str, list[ImageFile]] = {}
    for image in found:
        of_class.setdefault(image.class_name, []).append(image)
    for_test: set[Path] = set()
    for name, members in of_class.items():
        if len(members) < 2:
            raise InputError(
                f"class {name}: expected two images or more to divide, found {members[0].path}"
            )
        drawn = sorted(members, key=lambda image: hashlib.sha256(image.name.encode()).digest())
        count = min(max(round(share * len(members)), 1), len(members) - 1)
        for_test.update(image.path for image in drawn[:count])
    return {
        split: [image for image in found if (image.path in for_test) == (split == "test")]
        for split in ("train", "test")
    }


# A look at every image ----------------------------------------------------------------------------


def _look(
    name: str, every: list[ImageFile], kept: Path, upright: bool, workers: int, quiet: bool
) -> tuple[dict[Path, bytes], int]:
    """Returns the hash of the pixels of every image, and how many had to be looked at for it."""
    remembered: dict[str, list] = {}
    with contextlib.suppress(InputError):  # Damaged, it is made anew.
        remembered = read_object(kept)
    hashes: dict[Path, bytes] = {}
    for image in every:
        *state, pixels = remembered.get(str(image.path), [""])
        if tuple(state) == image.state:
            hashes[image.path] = bytes.fromhex(pixels)
    new = [image for image in every if image.path not in hashes]
    if not new:
        return hashes, 0
    unreadable: list[str] = []

    def look(image: ImageFile) -> None:
        try:
            decoded = images.decode(content(image.path), str(image.path), upright)
            hashes[image.path] = images.pixels_sha256(np.asarray(decoded))
        except InputError as error:
            unreadable.append(str(error))

    pool = ThreadPoolExecutor(workers, thread_name_prefix="look")
    try:
        bar = {"unit": "image", "disable": quiet or None}  # none where it would be no terminal
        looks = tqdm(pool.map(look, new), name, len(new), **bar)
        collections.deque(looks, maxlen=0)
    finally:
        pool.shutdown(cancel_futures=True)
        # Even if stopped: the next look goes on from here.
        known = {image.path: image for image in every if image.path in hashes}
        facts = {str(path): (*known[path].state, hashes[path].hex()) for path in known}
        write_json(kept, facts)
    if unreadable:
        raise InputError(
            f"{name}: {len(unreadable)} of {counted(len(every), 'image')} cannot be read: "
            + "; ".join(sorted(unreadable))
        )
    return hashes, len(new)
