"""Zip and tar archives, unpacked once into the cache."""

from __future__ import annotations

import hashlib
import os
import tarfile
import zipfile
from pathlib import Path

from fdc_jax.errors import InputError
from fdc_jax.machine.files import foreign, open_regular, write_folder_atomically

_SUFFIXES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")


def stem(name: str) -> str:
    """Returns a file name without the suffix of an archive."""
    suffix = next((suffix for suffix in _SUFFIXES if name.lower().endswith(suffix)), "")
    return name[: len(name) - len(suffix)]


def unpack(archive: Path, cache: Path) -> Path:
    """Returns the folder in `cache` with the contents of an archive, unpacked unless it is there.

    The folder's name depends on path, size and modification time of the archive.

    Raises:
        InputError: the file is no archive, is damaged, or would write outside the folder.
    """
    stat = archive.stat()
    state = f"{os.path.abspath(archive)} {stat.st_size} {stat.st_mtime_ns}"
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
            hint = "; the file may be incomplete" if isinstance(error, zipfile.BadZipFile) else ""
            raise InputError(f"{archive}: cannot unpack: {error}{hint}") from error
    return folder


def names(path: Path) -> list[str]:
    """Returns the names of all files of an archive or a folder.

    Raises:
        InputError: the file is no archive, or damaged.
    """
    if path.is_dir():
        return [file.relative_to(path).as_posix() for file in path.rglob("*")]
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as packed:
                return packed.namelist()
        with tarfile.open(path) as packed:
            return packed.getnames()
    except Exception as error:  # Damaged archives raise a dozen types.
        raise InputError(f"{path}: cannot list its files: {error}") from error


def _extract(archive: Path, destination: Path) -> None:
    with open_regular(archive) as file:
        start = file.read(1024)
    starts_as_zip = start.startswith(b"PK\x03\x04")
    if starts_as_zip or zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as packed:
            packed.extractall(destination)
    elif tarfile.is_tarfile(archive):
        with tarfile.open(archive) as packed:
            packed.extractall(destination, filter="data")
    else:
        found = foreign(start)
        raise InputError(
            f"{archive}: expected a folder, or a zip or tar archive of one"
            + f"; {found}" * bool(found)
        )
