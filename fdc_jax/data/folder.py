"""Folders of images as data sets: search, division into train and test, hashes of pixels.

Hashes stay in the cache with the state of their file (`files.file_state`), so that only new and
changed images are decoded again.
"""

import collections
import contextlib
import hashlib
import itertools
import logging
import os
import unicodedata
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from tqdm import tqdm

from fdc_jax.data import benchmarks, images
from fdc_jax.data.dataset import TEST_NAMES, Dataset, Skipped, default_workers, draw, with_notes
from fdc_jax.errors import InputError, counted
from fdc_jax.machine.files import FileState, file_state, open_regular, read_json, write_json

_log = logging.getLogger(__name__)

# The suffixes that torchvision's ImageFolder, and so PILOT, reads.
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
if images.HEIC:
    IMAGE_SUFFIXES += (".heic", ".heif")
# Folders of operating systems, skipped like all names with a leading dot.
_SYSTEM_FOLDERS = ("__MACOSX", "@eaDir", "$RECYCLE.BIN", "System Volume Information", "lost+found")
_LARGEST = 2**30  # bytes of an image file
_LAYOUTS = (
    "train/CLASS/IMAGE and test/CLASS/IMAGE, or CLASS/IMAGE with config.data.test_share above 0"
)
# Reasons to skip a path that are errors in a data set.
_DEAD, _EMPTY, _SINGLE = "dead links", "class folders without images", "classes of one image alone"

_Parts = tuple[str, ...]  # names of a path below the searched folder, in Unicode's form NFC
_Checksum = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class _Remembered(NamedTuple):
    """Facts of an image in the cache, and the state of its file."""

    state: FileState
    sha256: _Checksum
    grey_bits: int
    frames: int


class ImageFile(NamedTuple):
    """An image file of a folder."""

    path: Path
    class_name: str
    name: str  # "CLASS/IMAGE", below the folder of its split


def open_folder(
    root: Path,
    name: str,  # of the data set
    cache: Path,  # folder that keeps the hashes
    *,
    partition: str = "given",  # name of the division of a divided folder, for results
    test_share: float = 0.0,  # of each class, if the folder has no train and test; 0: an error then
    allow_overlap: bool = False,  # whether images of train may be in test, too
    upright: bool = True,  # see `images.decode`
    grey_bits: int = 0,  # of grey of 16 bits; 0: those of the largest value of all images
    workers: int = 0,  # number of decoding threads; 0: one per core
    quiet: bool = True,  # whether to hide progress
    skipped: Skipped | None = None,  # of an archive that was unpacked here
) -> tuple[Dataset, Dataset]:
    """Returns the training and the test images of a folder.

    The folder, or one up to two levels below it, holds `train/CLASS/IMAGE` and `test/CLASS/IMAGE`
    (or `val`), or `CLASS/IMAGE`.

    Raises:
        InputError: folders, classes or images are not as expected; names all faults of one kind.
    """
    root = Path(os.path.abspath(root))
    skipped = Skipped() if skipped is None else skipped
    try:
        splits = _arrange(*_search(root, skipped), skipped)
        if pooled := splits.get(""):
            if not test_share:
                raise InputError(f"expected {_LAYOUTS}; found classes without train and test")
            splits, partition = divide(pooled, test_share, skipped), f"{test_share:g} of each class"
    except InputError as error:
        raise InputError("; ".join(filter(None, (f"{root}: {error}", skipped.text())))) from error
    reasons = skipped.paths.keys() & {_DEAD, _EMPTY, _SINGLE}
    if wrong := {reason: skipped.paths[reason] for reason in sorted(reasons)}:
        raise InputError(f"{root}: expected images in every class, found {Skipped(wrong).text(99)}")
    files = splits["train"] + splits["test"]
    class_names = tuple(sorted({file.class_name for file in files}))
    labels = {
        split: np.searchsorted(class_names, [file.class_name for file in files]).astype(np.int32)
        for split, files in splits.items()
    }
    benchmarks.verify(name, labels["train"], labels["test"], class_names)  # before decoding
    for label in np.setdiff1d(labels["train"], labels["test"]):
        skipped.add("classes without test images", (class_names[label],))
    digits = hashlib.sha256(os.fsencode(root)).hexdigest()[:16]
    hash_file = cache / f"{name[:50]}-{digits}.json"
    by_path, states = _examine(name, files, hash_file, upright, workers or default_workers(), quiet)
    scale = images.grey_scale(grey_bits, by_path.values())
    facts = {split: [by_path[file.path] for file in files] for split, files in splits.items()}
    train_paths = {by_path[file.path].sha256: file.path for file in splits["train"]}
    shared = [file for file in splits["test"] if by_path[file.path].sha256 in train_paths]
    if shared and not allow_overlap:
        raise InputError(
            f"{root}: expected no image of train in test, found {len(shared):,}, such as "
            f"{shared[0].path}, which is {train_paths[by_path[shared[0].path].sha256]}, too; "
            "config.data.allow_overlap=True accepts them"
        )

    def dataset(split: str) -> Dataset:
        files = splits[split]

        def read(index: int) -> bytes:
            path = files[index].path
            encoded = file_bytes(path)
            if file_state(path) != states[path]:
                now = images.examine(encoded, str(path), upright)
                if now.sha256 != by_path[path].sha256:
                    raise InputError(f"{path}: expected the image of the start, found another")
            return encoded

        ids = tuple(file.name for file in files)
        hashes = [fact.sha256 for fact in facts[split]]
        return Dataset(
            name=name,
            split=split,
            partition=partition,
            labels=labels[split],
            ids=ids,
            class_names=class_names,
            read=read,
            upright=upright,
            grey_bits=scale,
            pixel_hashes=lambda: hashes,
            skipped=skipped,
        )

    return with_notes(dataset("train"), dataset("test"), facts)


def file_bytes(path: Path) -> bytes:
    """Returns the bytes of an image file; raises InputError if they cannot be read."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size <= _LARGEST:
                return file.read()
    except OSError as error:
        raise InputError(f"{path}: cannot read: {error.strerror}") from error
    raise InputError(f"{path}: expected an image of at most 1 GiB, found {size:,} bytes")


def _search(root: Path, skipped: Skipped) -> tuple[dict[Path, _Parts], set[_Parts]]:
    """Returns the images and the folders at and below a folder.

    Every folder is searched once, by its own path rather than by a link. A folder that cannot be
    read raises its OSError.
    """
    files: dict[Path, _Parts] = {}
    visited: dict[tuple[int, int], _Parts] = {}  # folders by device and inode
    folders = collections.deque([(root, _Parts())])
    links: collections.deque[tuple[Path, _Parts]] = collections.deque()
    while folders or links:
        folder, parts = (folders or links).popleft()
        status = folder.stat()
        if (status.st_dev, status.st_ino) in visited:
            skipped.add("links to folders that are met elsewhere", parts)
            continue
        visited[status.st_dev, status.st_ino] = parts
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries)
        for name in names:
            path, child = folder / name, (*parts, unicodedata.normalize("NFC", name))
            if name.startswith(".") or name in _SYSTEM_FOLDERS:
                skipped.add("hidden files and folders of systems", child)
            elif path.is_dir():
                (links if path.is_symlink() else folders).append((path, child))
            elif not path.is_file():
                skipped.add(_DEAD if path.is_symlink() else "no regular files", child)
            elif not name.lower().endswith(IMAGE_SUFFIXES):
                skipped.add(Skipped.OTHER, child)
            else:
                files[path] = child
    return files, set(visited.values())


def find_images(folder: Path) -> list[Path]:
    """Returns the images at and below a folder, by name; InputError if there is none.

    Warns of skipped files.
    """
    skipped = Skipped()
    files, _ = _search(folder, skipped)
    if not files:
        text = f"{folder}: expected images in this folder, found none"
        raise InputError("; ".join(filter(None, (text, skipped.text()))))
    if skipped.paths:
        _log.warning("%s: skipped %s", folder, skipped.text())
    return sorted(files)


def _arrange(
    files: Mapping[Path, _Parts], folders: set[_Parts], skipped: Skipped
) -> dict[str, list[ImageFile]]:
    """Returns the images by split; an undivided folder has one split, named "".

    Raises:
        InputError: the folders are not as expected, or a split has no image.
    """
    tops = _tops(files, folders)
    splits: dict[str, list[ImageFile]] = {split: [] for split in tops}
    outside: set[_Parts] = set()
    for path, parts in files.items():
        split = next((name for name, top in tops.items() if parts[: len(top)] == top), None)
        if split is None:
            skipped.add("images outside of train and test", parts)
            outside.add(parts[:-1])
            continue
        below = parts[len(tops[split]) :]
        if len(below) == 1:
            skipped.add("images outside of class folders", parts)
        else:
            splits[split].append(ImageFile(path, below[0], "/".join(below)))
        if len(below) > 2:
            skipped.add("images of a class in folders below it", parts)
    if "" in tops and outside:
        names = ", ".join(map("/".join, sorted(outside)))
        top = "/".join(tops[""]) or "the folder itself"
        raise InputError(f"expected all classes beside each other in {top}, found also {names}")
    classes = set()
    for split, members in splits.items():
        classes |= {(*tops[split], file.class_name) for file in members}
    for folder in sorted(folders - classes):
        if folder and folder[:-1] in tops.values():
            skipped.add(_EMPTY, folder)
    for split, members in splits.items():
        if not members:
            raise InputError(f"expected images in {split}/CLASS, found none")
        members.sort(key=lambda file: (file.class_name, file.name))
    return splits


def _tops(files: Mapping[Path, _Parts], folders: set[_Parts]) -> dict[str, _Parts]:
    """Returns the folder above the class folders by split; undivided folders have the split ""."""
    test_names = {
        folder: next((name for name in TEST_NAMES if (*folder, name) in folders), None)
        for folder in folders
        if (*folder, "train") in folders
    }
    image_folders = {parts[:-1] for parts in files.values() if len(parts) > 1}
    counts = collections.Counter(folder[:-1] for folder in image_folders)
    divided = [folder for folder, test in test_names.items() if test]
    for candidates in (divided, [folder for folder, count in counts.items() if count > 1]):
        depth = min(map(len, candidates), default=3)
        nearest = sorted(folder for folder in candidates if len(folder) == depth <= 2)
        if len(nearest) > 1:
            names = ", ".join(map("/".join, nearest[:10]))
            raise InputError(
                f"expected one folder of classes, or train and test, found {names}; name one of "
                "them, or these folders train and test"
            )
        for top in nearest:
            test = test_names.get(top)
            return {"train": (*top, "train"), "test": (*top, test)} if test else {"": top}
    names = sorted({folder[0] for folder in folders if folder})[:10]
    if len(image_folders) == 1:
        (only,) = image_folders
        raise InputError(f"expected images of at least two classes, found {'/'.join(only)} alone")
    loose = sum(len(parts) == 1 for parts in files.values())
    outside = f"{counted(loose, 'image')} outside of folders; " if loose else ""
    raise InputError(f"expected {_LAYOUTS}; {outside}found {', '.join(names) or 'no folder'}")


def divide(files: list[ImageFile], share: float, skipped: Skipped) -> dict[str, list[ImageFile]]:
    """Returns the images of train and test, divided within each class by `dataset.draw`."""
    test: set[Path] = set()
    # Files are sorted by class.
    for _, group in itertools.groupby(files, key=lambda file: file.class_name):
        members = [*group]
        if len(members) < 2:
            skipped.add(_SINGLE, (members[0].name,))
        drawn = draw([file.name for file in members], share)
        test.update(members[index].path for index in drawn)
    learned = [file for file in files if file.path not in test]
    return {"train": learned, "test": [file for file in files if file.path in test]}


def _examine(
    name: str, files: list[ImageFile], store: Path, upright: bool, workers: int, quiet: bool
) -> tuple[dict[Path, images.Facts], dict[Path, FileState]]:
    """Returns the facts of every image, and the state of its file when they were true.

    `store` is the file that remembers facts; it is written even if the pass is interrupted.
    """
    remembered: dict[str, _Remembered] = {}
    with contextlib.suppress(InputError, msgspec.ValidationError):  # A damaged file is replaced.
        remembered = msgspec.convert(read_json(store), dict[str, _Remembered])
    states, facts = {}, {}
    for path in (file.path for file in files):
        states[path] = file_state(path)
        known = remembered.get(str(path))
        if known is not None and known.state == states[path]:
            facts[path] = images.Facts(bytes.fromhex(known.sha256), known.grey_bits, known.frames)
    new = [path for path in states if path not in facts]
    if not new:
        return facts, states
    unreadable: list[str] = []

    def look(path: Path) -> None:
        try:
            facts[path] = images.examine(file_bytes(path), str(path), upright)
        except InputError as error:
            unreadable.append(str(error))

    pool = ThreadPoolExecutor(workers, thread_name_prefix="hash")
    try:
        bar = {"unit": "image", "disable": quiet or None}  # None: no bar outside of a terminal.
        collections.deque(tqdm(pool.map(look, new), name, len(new), **bar), maxlen=0)
    finally:
        pool.shutdown(cancel_futures=True)
        rows = {
            str(path): _Remembered(states[path], fact.sha256.hex(), fact.grey_bits, fact.frames)
            for path, fact in [*facts.items()]
        }
        write_json(store, msgspec.to_builtins(rows))
    if unreadable:
        raise InputError(
            f"{name}: {len(unreadable)} of {counted(len(files), 'image')} cannot be read: "
            + "; ".join(sorted(unreadable))
        )
    return facts, states
