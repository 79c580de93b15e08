"""Zip and tar archives, unpacked once into the cache.

Libraries parse the archives and decompress them. What is written, and where, is decided here:
regular files and folders alone, below a descriptor of the destination, through no link.
"""

import bz2
import contextlib
import functools
import gzip
import hashlib
import lzma
import os
import re
import shutil
import stat
import tarfile
import unicodedata
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec

from fdc_jax.data.dataset import Skipped
from fdc_jax.errors import InputError, Interrupted, escaped
from fdc_jax.machine.files import (
    ALWAYS_ALLOWED,
    LARGEST_RATIO,
    check_zip_entries,
    failed_download,
    file_state,
    open_regular,
    read_object,
    write_folder_atomically,
    write_json,
)

_SUFFIXES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
_COMPRESSIONS: dict[bytes, Callable[..., Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\0": lzma.open,
}
_LARGEST_HEADER = 2**20  # bytes of all records before the content of a tar's member
_LONGEST_PATH, _DEEPEST = 4000, 100  # bytes, as Linux opens no path of 4096; folders
_MOST_SKIPPED = 2**20  # entries that are neither files nor folders
_CHUNK = 2**12  # bytes; zipfile decompresses whole chunks, which may grow by a factor of 10^4


class _Member(NamedTuple):
    """An entry of an archive; `kind` is a file type of `stat`, 0 for a special file."""

    name: str
    kind: int
    size: int
    open: Callable[[], IO[bytes]]


def stem(name: str) -> str:
    """Returns a file name without the suffix of an archive."""
    suffix = next((suffix for suffix in _SUFFIXES if name.lower().endswith(suffix)), "")
    return name[: len(name) - len(suffix)]


def unpack(archive: Path, cache: Path) -> Path:
    """Returns the folder in `cache` with the contents of an archive, unpacked unless it is there.

    The folder's name depends on path and state (`files.file_state`) of the archive. `skipped` names
    the entries that are neither files nor folders.

    Raises:
        InputError: the file is no archive, is damaged, has a name outside of the folder or in an
            unknown encoding, or needs more than the free disk or `LARGEST_RATIO` times its size.
    """
    state = f"{os.path.abspath(archive)} {file_state(archive)}"
    digits = hashlib.sha256(os.fsencode(state)).hexdigest()[:16]
    folder = cache / f"{stem(archive.name)[:50]}-{digits}"
    if folder.is_dir():
        return folder
    left_out = Skipped()
    with write_folder_atomically(folder) as unfinished:
        free = shutil.disk_usage(unfinished).free
        allowed = max(ALWAYS_ALLOWED, LARGEST_RATIO * archive.stat().st_size)
        limit = f"the {free:,} that are free" if free < allowed else f"{allowed:,}"
        top = _open_folder(unfinished)
        total = 0
        try:
            for member in _members(archive):
                total += member.size
                if total > min(free, allowed):
                    raise InputError(f"expected at most {limit} bytes when unpacked")
                _extract(member, top, len(os.fsencode(folder)), left_out)
        except InputError as error:
            raise InputError(f"{archive}: {error}") from error
        except Interrupted:
            raise
        except Exception as error:  # Damaged archives raise a dozen types.
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            if isinstance(error, zipfile.BadZipFile | EOFError):
                reason += "; the file may be incomplete"
            raise InputError(f"{archive}: cannot unpack: {escaped(reason)}") from error
        finally:
            os.close(top)
        if left_out.paths:
            write_json(_record(folder), left_out.paths)
    return folder


def skipped(folder: Path) -> Skipped:
    """Returns what `unpack` left out of a folder that it returned."""
    return Skipped(msgspec.convert(read_object(_record(folder)), dict[str, list[str]]))


def remove(folder: Path) -> None:
    """Removes a folder that `unpack` returned."""
    shutil.rmtree(folder)
    _record(folder).unlink(missing_ok=True)


def _record(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.skipped.json")


def _extract(member: _Member, top: int, length: int, left_out: Skipped) -> None:
    """Writes a file or folder below the descriptor `top`, of a folder with a path of that length.

    Raises:
        InputError: the name is none below the folder, or occurs twice.
        EOFError: the content is not as long as the archive says.
    """
    name = escaped(member.name)[:200]
    parts = [part for part in member.name.split("/") if part not in ("", ".")]
    if parts and re.fullmatch("[A-Za-z]:", parts[0]):
        del parts[0]  # the drive of an absolute name of Windows
    if ".." in parts:
        raise InputError(f"{name} is outside of the archive's folder")
    if member.kind not in (stat.S_IFREG, stat.S_IFDIR):
        reason = "links in the archive" if member.kind == stat.S_IFLNK else "special files"
        left_out.add(reason, [name])
        if len(left_out.paths[reason]) > _MOST_SKIPPED:
            raise InputError(f"expected files and folders, found over {_MOST_SKIPPED:,} {reason}")
        return
    if length + len("/".join(parts).encode()) > _LONGEST_PATH or len(parts) > _DEEPEST:
        raise InputError(f"{name} is too long, or in too many folders")
    if member.kind == stat.S_IFREG and not parts:
        raise InputError("found a file without a name")
    folder = os.dup(top)
    try:
        for part in parts if member.kind == stat.S_IFDIR else parts[:-1]:
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, dir_fd=folder)
            deeper = _open_folder(part, folder)
            os.close(folder)
            folder = deeper
        if member.kind == stat.S_IFREG:
            new = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            with open(os.open(parts[-1], new, 0o666, dir_fd=folder), "wb") as file:
                _copy(member, file)
    except FileExistsError as error:
        raise InputError(f"{name} occurs twice") from error
    except NotADirectoryError as error:
        raise InputError(f"{name} is in a folder that is a file, too") from error
    finally:
        os.close(folder)


def _open_folder(path: str | Path, parent: int | None = None) -> int:
    """Returns a descriptor of a folder, which is no link."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)


def _copy(member: _Member, file: IO[bytes]) -> None:
    """Copies the content of a member, which must be as long as the archive says."""
    left = member.size
    with member.open() as content:
        while chunk := content.read(_CHUNK):
            left -= len(chunk)
            if left < 0:
                break
            file.write(chunk)
    if left:
        raise EOFError(f"{member.name} is not as long as the archive says")


def _members(archive: Path) -> Iterator[_Member]:
    """Yields the entries of an archive."""
    with open_regular(archive) as file:
        start = file.read(1024)
        openers = (method for magic, method in _COMPRESSIONS.items() if start.startswith(magic))
        decompress = next(openers, None)
        is_tar = decompress or start[257:262] == b"ustar"
        if start.startswith(b"PK\x03\x04") or (not is_tar and zipfile.is_zipfile(file)):
            yield from _in_zip(file)
            return
        file.seek(0)
        reader: Any = _TarReader(decompress(file) if decompress else file)
        try:
            packed = tarfile.open(fileobj=reader, mode="r:")
        except tarfile.ReadError as error:
            text = "expected a folder, or a zip or tar archive of one"
            parts = text, failed_download(start)
            raise InputError("; ".join(filter(None, parts))) from error
        yield from _in_tar(packed, reader)


def _in_zip(file: IO[bytes]) -> Iterator[_Member]:
    with zipfile.ZipFile(file) as packed:
        check_zip_entries(file, packed.namelist())
        for member in packed.infolist():
            kind = stat.S_IFMT(member.external_attr >> 16) or stat.S_IFREG
            kind = stat.S_IFDIR if member.is_dir() else kind
            # Windows writes backslashes.
            name = _decoded(member).replace("\\", "/")
            yield _Member(name, kind, member.file_size, functools.partial(packed.open, member))


def _decoded(member: zipfile.ZipInfo) -> str:
    """Returns the name of an entry of a zip; InputError if its encoding cannot be told.

    By the standard a name without the mark of UTF-8 is in code page 437. Many programs write UTF-8
    without the mark, or another encoding; Latin letters alone are likely to be right.
    """
    name = member.filename
    if name.isascii() or member.flag_bits & 0x800:
        return name
    try:
        content = name.encode("cp437")
    except UnicodeEncodeError:  # from the field for names in Unicode
        return name
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        letters = (letter for letter in name if not letter.isascii())
        if all(unicodedata.name(letter, "").startswith("LATIN ") for letter in letters):
            return name
    raise _undecodable(content)


def _undecodable(name: bytes) -> InputError:
    return InputError(
        f"expected names in UTF-8, found {name[:100]!r}; pack it again with such names, or unpack "
        "it and name the folder"
    )


class _TarReader:
    """A tar archive that gives at most `left` further bytes."""

    def __init__(self, file: IO[bytes]):
        self._file = file
        self.seek, self.tell = file.seek, file.tell
        self.left = _LARGEST_HEADER
        self.last = b""  # what was read last

    def read(self, size: int) -> bytes:
        """Returns the next bytes; InputError if they are too many."""
        self.left -= size
        if size < 0 or self.left < 0:
            raise InputError(f"expected names and headers below {_LARGEST_HEADER:,} bytes")
        self.last = self._file.read(size)
        return self.last


def _in_tar(packed: Any, reader: _TarReader) -> Iterator[_Member]:
    for member in iter(packed.next, None):
        packed.members.clear()  # tarfile keeps them all
        if member.size < 0:
            raise InputError(f"{escaped(member.name)[:200]}: expected a size of at least 0")
        try:
            member.name.encode()
        except UnicodeEncodeError:
            raise _undecodable(os.fsencode(member.name)) from None
        kind = 0
        if member.isreg() and not member.issparse():
            kind = stat.S_IFREG
        elif member.isdir():
            kind = stat.S_IFDIR
        elif member.issym() or member.islnk():
            kind = stat.S_IFLNK
        reader.left = member.size
        size = member.size if kind == stat.S_IFREG else 0
        yield _Member(member.name, kind, size, functools.partial(packed.extractfile, member))
        reader.left = _LARGEST_HEADER
    if any(reader.last) or len(reader.last) < tarfile.BLOCKSIZE:
        raise EOFError("a header is damaged, or the archive ends early")
