"""Zip and tar archives, unpacked once into the cache."""

import hashlib
import itertools
import os
import shutil
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from fdc_jax.errors import InputError
from fdc_jax.machine.files import (
    check_directory,
    file_state,
    foreign,
    open_regular,
    write_folder_atomically,
)

_SUFFIXES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
# Image files are hardly compressible: an archive that grows more is an attack on the disk.
_LARGEST_RATIO, _ALWAYS_ALLOWED = 100, 2**28  # bytes unpacked per byte of the archive; bytes


def stem(name: str) -> str:
    """Returns a file name without the suffix of an archive."""
    suffix = next((suffix for suffix in _SUFFIXES if name.lower().endswith(suffix)), "")
    return name[: len(name) - len(suffix)]


def unpack(archive: Path, cache: Path) -> Path:
    """Returns the folder in `cache` with the contents of an archive, unpacked unless it is there.

    The folder's name depends on path and state (`files.file_state`) of the archive.

    Raises:
        InputError: the file is no archive, is damaged, would write outside the folder, or would
            need more than the free disk space or `_LARGEST_RATIO` times its size.
    """
    state = f"{os.path.abspath(archive)} {file_state(archive)}"
    digits = hashlib.sha256(os.fsencode(state)).hexdigest()[:16]
    folder = cache / f"{stem(archive.name)[:50]}-{digits}"
    if folder.is_dir():
        return folder
    with write_folder_atomically(folder) as unfinished:
        free = shutil.disk_usage(unfinished).free
        allowed = max(_ALWAYS_ALLOWED, _LARGEST_RATIO * archive.stat().st_size)
        try:
            for total in itertools.accumulate(_extracted(archive, unfinished)):
                if total > min(free, allowed):
                    limit = f"the {free:,} that are free" if free < allowed else f"{allowed:,}"
                    raise InputError(f"{archive}: expected at most {limit} bytes when unpacked")
        except InputError:
            raise
        except Exception as error:  # Damaged archives raise a dozen types.
            reason = str(error).replace(f"{unfinished}/", "")
            if isinstance(error, zipfile.BadZipFile):
                reason += "; the file may be incomplete"
            if isinstance(error, tarfile.FilterError):
                reason = f"{error.tarinfo.name} is no file, or outside of the archive's folder"
            raise InputError(f"{archive}: cannot unpack: {reason}") from error
    return folder


def _extracted(archive: Path, destination: Path) -> Iterator[int]:
    """Yields the size in bytes of every file in an archive, before the file is unpacked."""
    with open_regular(archive) as file:
        start = file.read(1024)
    if start.startswith(b"PK\x03\x04") or zipfile.is_zipfile(archive):
        with open_regular(archive) as file, zipfile.ZipFile(file) as packed:
            check_directory(file, packed.namelist())
            for member in packed.infolist():
                member.filename = member.filename.replace("\\", "/")  # Windows writes backslashes
                yield member.file_size
                packed.extract(member, destination)
    elif tarfile.is_tarfile(archive):
        with tarfile.open(archive) as packed:
            for member in packed:
                yield member.size
                packed.extract(member, destination, filter="data")
    else:
        text = f"{archive}: expected a folder, or a zip or tar archive of one"
        raise InputError("; ".join(filter(None, (text, foreign(start)))))
