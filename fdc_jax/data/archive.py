"""Archives, zip or tar: unpacked once into the cache."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from fdc_jax.errors import InputError
from fdc_jax.machine.files import write_folder_atomically

_log = logging.getLogger(__name__)

_SUFFIXES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")


def stem(name: str) -> str:
    """Returns the name of a file without what says that it is an archive."""
    return next((name[: -len(each)] for each in _SUFFIXES if name.lower().endswith(each)), name)


def unpacked(archive: Path, cache: Path) -> Path:
    """Returns the folder in `cache` that holds the contents of an archive as it is now.

    Raises:
        InputError: it is no archive or damaged, would write elsewhere, or the disk is full.
    """
    found = archive.stat()
    state = f"{os.path.abspath(archive)} {found.st_size} {found.st_mtime_ns}"
    digits = hashlib.sha256(os.fsencode(state)).hexdigest()[:16]
    folder = cache / f"{stem(archive.name)[:50]}-{digits}"
    if folder.is_dir():
        return folder
    with write_folder_atomically(folder) as unfinished:
        try:
            _extract(archive, unfinished)
        except InputError:
            raise
        except Exception as error:  # Damaged archives raise a dozen types.
            cut = "; is it there to its end?" if isinstance(error, zipfile.BadZipFile) else ""
            raise InputError(f"{archive}: cannot unpack: {error}{cut}") from error
    return folder


def _extract(archive: Path, destination: Path) -> None:
    with open(archive, "rb") as file:
        begins_as_zip = file.read(4) == b"PK\x03\x04"
    if begins_as_zip or zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as packed:
            packed.extractall(destination)
    elif tarfile.is_tarfile(archive):
        with tarfile.open(archive) as packed:
            packed.extractall(destination, filter="data")
    else:
        raise InputError(f"{archive}: expected a folder, or a zip or tar archive of one")


@contextlib.contextmanager
def alone(cache: Path, name: str) -> Iterator[None]:
    """Keeps other processes from working on a data set in the cache; they wait."""
    path = cache / f".{name[:50]}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as lock:
        with contextlib.suppress(OSError):  # Some file systems have no locks.
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                _log.warning("waiting for another process that holds %s", path)
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield
