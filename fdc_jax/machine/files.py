"""Files written whole or not at all, checked readers, manifests, locks, and users' paths."""

import contextlib
import errno
import functools
import glob
import hashlib
import io
import json
import logging
import os
import re
import secrets
import shutil
import socket
import stat
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, TypeAlias

import filelock
import ml_dtypes
import msgspec
import numpy as np
import platformdirs
import safetensors.numpy
from numpy.typing import ArrayLike

from fdc_jax.errors import InputError, escaped, line

_log = logging.getLogger(__name__)
# Images and features hardly compress: an archive beyond both limits attacks memory or disk.
LARGEST_RATIO = 100  # unpacked bytes per byte of the archive
ALWAYS_ALLOWED = 2**28  # unpacked bytes that any archive may have
_LARGEST_JSON = 2**30  # bytes
# Do not wait for the writer of a FIFO; do not translate the line ends of Windows.
_OPEN_FLAGS = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def open_regular(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Opens a regular file for reading; InputError for a folder, FIFO or device (endless bytes)."""
    descriptor = os.open(path, os.O_RDONLY | _OPEN_FLAGS)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InputError(f"{path}: expected a regular file")
    return open(descriptor, "rb")


def sha256(path: str | os.PathLike[str]) -> str:
    """Returns the SHA-256 of a regular file as 64 hexadecimal digits."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Size, inode, and times of modification and of change in nanoseconds.
FileState: TypeAlias = tuple[int, int, int, int]


def file_state(path: str | os.PathLike[str]) -> FileState:
    """Returns the state of a file; two states of a path are equal only if the bytes are.

    Size and time of modification can be those of another file (`cp -p`, `rsync -t`, two folders
    that change their names). The inode is the file's own, and no program sets the time of change.
    """
    status = os.stat(path)
    return status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns


def _temporary(path: Path) -> Path:
    """Returns a new hidden path beside `path`; removes leftovers of killed processes."""
    host = f"{zlib.crc32(socket.gethostname().encode()):08x}"
    prefix = f".{path.name}.{host}-"
    # On Windows, signal 0 would interrupt the process.
    leftovers = path.parent.glob(glob.escape(prefix) + "*") if os.name == "posix" else ()
    for leftover in leftovers:
        try:
            os.kill(int(leftover.name.removeprefix(prefix).partition("-")[0]), 0)
        except ProcessLookupError:
            _remove(leftover)
        except (ValueError, OverflowError, PermissionError):  # not ours, or of another user
            pass
    return path.with_name(f"{prefix}{os.getpid()}-{secrets.token_hex(4)}")


def _remove(path: Path) -> None:
    """Removes a file, link or folder, as far as the file system allows it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


@contextlib.contextmanager
def _renamed(path: Path) -> Iterator[Path]:
    """Yields a temporary path; renames the block's file or folder there to `path` at success."""
    temporary = _temporary(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        os.replace(temporary, path)
    except InputError as error:  # about a file in the temporary folder
        raise InputError(str(error).replace(str(temporary), str(path))) from error
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        _remove(temporary)


@contextlib.contextmanager
def write_atomically(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Opens a temporary binary file and renames it to `path` if the block succeeds.

    The folder is made if it is missing. After any error an existing `path` has its old content. A
    temporary file of a process that was killed is removed by the next call.

    Raises:
        InputError: the file system refuses the write (full disk, no permission).
    """
    with _renamed(Path(path)) as temporary, open(temporary, "xb") as file:
        try:
            yield file
        except OSError as error:
            if error.errno is None:  # NumPy drops the reason; another write repeats it.
                file.write(bytes(2**16))
                file.flush()
            raise
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def write_folder_atomically(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a new folder that is renamed to `folder` if the block succeeds; raises InputError."""
    with _renamed(Path(folder)) as unfinished:
        unfinished.mkdir()
        yield unfinished


def user_cache() -> Path:
    """Returns `$FDC_JAX_CACHE`, or `fdc_jax` in the user's cache folder; makes it with mode 0700.

    Returns a temporary folder, removed when the process ends, if the cache cannot be written.
    """
    folder = Path("~/.cache/fdc_jax")
    with contextlib.suppress(RuntimeError):  # of a user without a home, as in a container
        path = os.environ.get("FDC_JAX_CACHE") or platformdirs.user_cache_dir("fdc_jax", False)
        folder = private_folder(Path(path).expanduser())
    return folder if os.access(folder, os.W_OK) else Path(_temporary_cache(folder).name)


@functools.cache
def _temporary_cache(instead_of: Path) -> tempfile.TemporaryDirectory[str]:
    _log.warning(
        "cannot write %s: downloads, compiled programs and features of E_0 are lost at the end of "
        "this process; name another folder: --config.cache_dir=FOLDER or $FDC_JAX_CACHE",
        instead_of,
    )
    return tempfile.TemporaryDirectory(prefix="fdc_jax_")


def private_folder(folder: Path) -> Path:
    """Returns the folder; makes it with mode 0700 if it is missing.

    Other users must not write there, because compiled programs in it are executed.
    """
    with contextlib.suppress(OSError):  # The first write into the folder reports the error.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


# Locks --------------------------------------------------------------------------------------------


class InUse(InputError):
    """An error: another process holds a lock; `holder` names the process."""

    def __init__(self, lock: Path):
        self.holder = "another process"
        with contextlib.suppress(OSError, InputError), open_regular(_name_file(lock)) as file:
            self.holder = escaped(file.read(200).decode("ascii", "replace"))
        super().__init__(
            f"{lock.parent} is in use by {self.holder}; wait for it, stop it or choose another "
            "folder"
        )


@contextlib.contextmanager
def locked(path: Path, wait: bool = False) -> Iterator[None]:
    """Holds a lock on a file for the block; a second file names the holder.

    The lock ends with the process, even if the process is killed. On a file system without locks
    the block runs unlocked, after a warning.

    Args:
        path: the lock file, made if it is missing. Existing content stays; no link is followed.
        wait: wait for the process that holds the lock.

    Raises:
        InUse: another process holds the lock.
        InputError: the path is a link or a folder, or cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(path)
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout as error:
        if not wait:
            raise InUse(path) from error
        _log.warning("waiting for another process that holds %s", path)
        lock.acquire()
    except OSError as error:
        if error.errno != errno.ENOLCK:
            reason = "a link" if error.errno == errno.ELOOP else error.strerror
            raise InputError(f"{path}: expected a lock, found {reason}") from error
        _log.warning("%s: the file system has no locks; run one process at a time there", path)
        yield
        return
    name = _name_file(path)
    try:
        write_text(name, f"process {os.getpid()} on {socket.gethostname()}")
        yield
    finally:
        name.unlink(missing_ok=True)
        lock.release()


def _name_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.holder")


def holder(path: Path) -> str:
    """Returns the process that holds a lock, such as `process 7 on host`; "" if none does."""
    try:
        if _name_file(path).exists():  # A killed holder leaves it, but not the lock.
            with locked(path):
                pass
    except InUse as error:
        return error.holder
    return ""


# Text ---------------------------------------------------------------------------------------------


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Writes a value of JSON types and structures as a file, whole or not at all."""
    write_text(path, json.dumps(value, indent=2, default=msgspec.to_builtins) + "\n")


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes a text in UTF-8, whole or not at all; characters that UTF-8 lacks are escaped."""
    with write_atomically(path) as file:
        file.write(text.encode("utf-8", "backslashreplace"))


def csv_text(frame: Any, **options: Any) -> str:
    """Returns a pandas frame as CSV that a spreadsheet shows and does not execute.

    Text that a spreadsheet takes for a formula gets an apostrophe before it; control characters are
    escaped. Options are those of `to_csv`.
    """

    def cell(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        formula = value[:1] in tuple("=+-@\t\r") and not re.fullmatch(r"[-+\d.,%±() ]+", value)
        return f"'{escaped(value)}" if formula else escaped(value)

    safe = frame.rename(index=cell, columns=cell)
    texts = safe.select_dtypes(exclude=["number", "bool"]).columns
    return safe.assign(**{name: safe[name].map(cell) for name in texts}).to_csv(**options)


def read_json(path: Path) -> Any:
    """Reads a JSON file; raises InputError if it is unreadable or an object repeats a name."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = dict(pairs)
        if len(names) < len(pairs):
            raise ValueError(f"a name occurs twice among {', '.join(names)}"[:200])
        return names

    try:
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_size > _LARGEST_JSON:
                raise ValueError("it is larger than 1 GiB")
            return json.loads(file.read().decode("utf-8"), object_pairs_hook=once)
    except InputError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: unreadable JSON ({error})") from error


def read_object(path: Path) -> dict[str, Any]:
    """Reads a JSON object, empty if the file is missing; InputError for other JSON values."""
    value = read_json(path) if path.exists() else {}
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected a JSON object, found a {type(value).__name__}")
    return value


# A folder's manifest ------------------------------------------------------------------------------

MANIFEST = "manifest.json"


def write_manifest(folder: Path) -> None:
    """Writes the SHA-256 of every other file of a folder, by its path within the folder."""
    files = sorted(f for f in folder.rglob("*") if f.is_file() and f != folder / MANIFEST)
    digests = {path.relative_to(folder).as_posix(): sha256(path) for path in files}
    write_json(folder / MANIFEST, {"sha256": digests})


class Damaged(InputError):
    """An error: the files of a folder differ from its manifest."""


def check_manifest(folder: Path, remedy: str) -> None:
    """Compares a folder with its manifest, byte for byte.

    Raises:
        Damaged: a file is missing, has changed, or is unlisted and not hidden; the message ends
            with the remedy.
        InputError: a file cannot be read, which says nothing about its bytes.
    """
    try:
        difference = _difference(folder)
    except OSError as error:
        raise InputError(f"cannot read {line(error)}") from error
    if difference:
        raise Damaged(f"{difference}; {remedy}")


def _difference(folder: Path) -> str:
    """Returns how a folder differs from its manifest, or ""."""
    try:
        manifest = read_json(folder / MANIFEST)
    except InputError as error:
        # A missing or malformed manifest is damage; one that cannot be read says nothing.
        reason = error.__cause__
        if isinstance(reason, OSError) and not isinstance(reason, FileNotFoundError):
            raise
        return str(error)
    digests = manifest.get("sha256") if isinstance(manifest, dict) else None
    if not isinstance(digests, dict):
        return f"{folder / MANIFEST}: expected checksums"
    present = {path.relative_to(folder).as_posix(): path for path in _files(folder)}
    for name in sorted(present.keys() - {*digests, MANIFEST}):
        if not present[name].name.startswith("."):
            return f"{present[name]}: is not in {MANIFEST}"
    for name, digest in digests.items():
        path = present.get(name)
        if path is None or path.is_symlink() or sha256(path) != digest:
            return f"{folder / escaped(name)[:80]}: is not what was written"
    return ""


def _files(folder: Path) -> Iterator[Path]:
    """Yields the files and links below a folder; raises OSError if a folder cannot be listed."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            yield from _files(path)
        else:
            yield path


# Paths of the command line ------------------------------------------------------------------------


def named_path(name: str, path: str | os.PathLike[str]) -> Path:
    """Returns a path that the user gave, with `~` expanded; InputError if it cannot be one."""
    text: Any = path
    with contextlib.suppress(TypeError):
        text = os.fspath(path)
    if not isinstance(text, str):
        raise InputError(f"{name}: expected a path, found {type(text).__name__}")
    if not text:
        raise InputError(f"{name}: expected a path, found none")
    try:
        expanded = Path(text).expanduser()
        os.lstat(expanded)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        pass  # The caller may create the path, or reports the error itself.
    except OSError as error:  # such as a name that is too long
        raise InputError(f"{name}: {escaped(text)[:80]}: {error.strerror}") from error
    except (ValueError, RuntimeError) as error:  # a NUL; ~NAME without such a user
        raise InputError(f"{name}: {escaped(text)[:80]}: {error}") from error
    return expanded


def check_encodable(name: str, text: str) -> None:
    """Raises InputError if a text cannot be encoded in UTF-8, such as a path in Latin-1."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{name}: expected text in UTF-8, found {escaped(text)[:100]}") from error


def check_writable_folder(flag: str, folder: str | os.PathLike[str]) -> None:
    """Raises InputError, before any work, if the folder of a flag cannot be made or written in."""
    path = named_path(flag, folder).absolute()
    existing = next(parent for parent in (path, *path.parents) if os.path.exists(parent))
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise InputError(f"{flag}={folder}: expected a folder to write in, found {existing}")


def check_writable_file(flag: str, path: str | os.PathLike[str], *suffixes: str) -> Path:
    """Returns the path of a flag's file; InputError, before any work, if it cannot be written."""
    path = named_path(flag, path)
    if path.suffix not in suffixes or path.is_dir():
        ends = " or ".join(suffixes)
        raise InputError(f"{flag}: expected a file that ends in {ends}, found {path}")
    check_writable_folder(flag, path.absolute().parent)
    return path


# Arrays ------------------------------------------------------------------------------------------


class ArrayFolder(Mapping[str, np.ndarray]):
    """The `.npy` files of a folder by name without suffix; every access makes a memory map.

    A map holds a file descriptor until it is deleted; a process may have only 256 or 1024.
    Raises InputError if the folder has no `.npy` file.
    """

    def __init__(self, path: str | os.PathLike[str]):
        # Names with a leading dot are files still being written.
        files = [file for file in sorted(Path(path).glob("*.npy")) if not file.name.startswith(".")]
        if not files:
            raise InputError(f"{path}: expected .npy files, found none")
        self._files = {file.stem: file for file in files}

    def __getitem__(self, name: str) -> np.ndarray:
        return read_npy(self._files[name])

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


@contextlib.contextmanager
def _reading(path: str | os.PathLike[str], suffix: str) -> Iterator[list[str]]:
    """Turns any error of the block, such as a parser's on a damaged file, into an InputError.

    Yields a list; the block appends the name of the array that it reads next, for the message.
    """
    names: list[str] = []
    try:
        open_regular(path).close()
        yield names
    except FileNotFoundError:
        raise InputError(f"{path}: no such file or folder") from None
    except InputError as error:
        raise InputError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from error
    # Parsers raise a dozen types (BadZipFile, zlib.error, NotImplementedError, UnicodeError,
    # struct.error, MemoryError, ...).
    except Exception as error:
        where = f"{path}: {escaped(names[-1])[:80]}" if names else f"{path}"
        reason, fault = _reason(error, path), f"not a readable {suffix} file"
        # Parsers seek before the start of a damaged file.
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            reason, fault = error.strerror or reason, "cannot be read"
        raise InputError(f"{where}: {fault}: {reason}") from error


def read_npy(path: str | os.PathLike[str]) -> np.ndarray:
    """Memory-maps one `.npy` file.

    Raises:
        InputError: the file is missing, damaged, not as long as its header says, or holds objects.
    """
    with _reading(path, ".npy"):
        array = np.lib.format.open_memmap(path, mode="r")
        if array.offset + array.nbytes != os.path.getsize(path):
            raise ValueError("it is longer than its header says")
        return _typed(array)


def read_npz(
    path: str | os.PathLike[str],
    check: Callable[[Mapping[str, np.ndarray]], object] | None = None,
) -> dict[str, np.ndarray]:
    """Reads every array of an `.npz` archive into memory.

    Args:
        path: the archive.
        check: called before all arrays are read, with a mapping that reads an array on access;
            raises InputError if the archive is not the expected one.

    Raises:
        InputError: the file is missing or damaged, an array holds objects, the arrays would take
            far more memory than the file, or `check` raises it.
    """
    arrays: dict[str, np.ndarray] = {}
    with _reading(path, ".npz") as names, open_regular(path) as file:
        with np.load(file, allow_pickle=False) as archive:
            check_zip_entries(file, archive.files)
            size = sum(member.file_size for member in archive.zip.infolist())
            if size > max(ALWAYS_ALLOWED, LARGEST_RATIO * os.fstat(file.fileno()).st_size):
                raise ValueError(f"its arrays take {size:,} bytes, far more than the file")
            if check is not None:
                check(archive)
            for name in archive.files:  # zipfile checks the CRC-32 of each array.
                names.append(name)
                arrays[name] = _typed(np.asarray(archive[name]))
    return arrays


def _typed(array: np.ndarray) -> np.ndarray:
    """Returns the array, as bfloat16 if it has the untyped two bytes that NumPy writes for it."""
    return array.view(ml_dtypes.bfloat16) if array.dtype == "V2" else array


def check_zip_entries(file: IO[bytes], names: Collection[str]) -> None:
    """Checks the number of entries of a zip archive, which zipfile does not.

    Args:
        file: the archive.
        names: names of the entries that zipfile lists.

    Raises:
        ValueError: an entry is lost or occurs twice.
    """
    file.seek(-22, os.SEEK_END)  # the end record, unless the archive ends in a comment
    end = file.read()
    count = int.from_bytes(end[10:12], "little")  # 2^16 - 1 stands for a larger number
    different = len({*names})
    if end.startswith(b"PK\5\6") and count < 2**16 - 1 and count != different:
        raise ValueError(f"expected {count} different names, found {different}")


def read_safetensors(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Reads every array of a `.safetensors` file into memory; raises InputError if damaged."""
    with _reading(path, ".safetensors"):
        return safetensors.numpy.load_file(path)


def write_npy(path: str | os.PathLike[str], array: ArrayLike) -> None:
    """Writes one array as `.npy`, whole or not at all."""
    with write_atomically(path) as file:
        np.save(file, np.asarray(array), allow_pickle=False)


def write_npz(path: str | os.PathLike[str], arrays: Mapping[str, ArrayLike]) -> None:
    """Writes named arrays as one uncompressed `.npz`, whole or not at all."""
    with write_atomically(path) as file:
        np.savez(file, allow_pickle=False, **{k: np.asarray(v) for k, v in arrays.items()})


def write_safetensors(path: str | os.PathLike[str], arrays: Mapping[str, np.ndarray]) -> None:
    """Writes named arrays as `.safetensors`, whole or not at all; PyTorch reads it, too."""
    dense = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    with write_atomically(path) as file:
        file.write(safetensors.numpy.save(dense, metadata={"format": "pt"}))


def failed_download(start: bytes) -> str:
    """Returns what a file is, if it starts like a web page or a Git LFS pointer, else ""."""
    start = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if start.startswith((b"<!doctype", b"<html", b"<head", b"<?xml")):
        return "it is a web page (HTML), as a failed download leaves"
    if start.startswith(b"version https://git-lfs"):
        return "it is a pointer of Git LFS: run git lfs pull"
    return ""


def _reason(error: Exception, path: str | os.PathLike[str]) -> str:
    """Returns why a file is unreadable, from its first bytes or else from the parser's error."""
    with contextlib.suppress(OSError), open_regular(path) as file:
        start = file.read(1024).lower()
        if phrase := failed_download(start):
            return phrase
        if start.startswith(b"pk") and isinstance(error, zipfile.BadZipFile):
            return "it is damaged, or ends early"
        if "pickle" in str(error) and not start.startswith((b"pk", b"\x93numpy")):
            return "it is neither an archive nor an array"
    return escaped(" ".join(str(error).split()))[:200] or type(error).__name__
