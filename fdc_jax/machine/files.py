"""Files that are either whole or absent: JSON, NumPy arrays, checksums, locks."""

import contextlib
import errno
import fcntl
import glob
import hashlib
import io
import json
import logging
import os
import secrets
import shutil
import socket
import stat
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import safetensors.numpy
from numpy.typing import ArrayLike

from fdc_jax.errors import InputError

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def write_atomically(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Opens a temporary binary file and renames it to `path` when the block succeeds.

    The folder is made when missing. On any error an existing `path` keeps its old content. What a
    writer of `path` left that was killed is removed.

    Raises:
        InputError: the file system refuses the write (full disk, no permission).
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for other in path.parent.glob(f".{glob.escape(path.name)}.{'[0-9a-f]' * 8}"):
            # Who still writes holds a lock.
            with contextlib.suppress(OSError), open_regular(other) as left:
                fcntl.flock(left, fcntl.LOCK_EX | fcntl.LOCK_NB)
                other.unlink()
        try:
            with open(temporary, "xb") as file:
                with contextlib.suppress(OSError):  # not every file system has locks
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error


def user_cache() -> Path:
    """Returns `$FDC_JAX_CACHE`, or `fdc_jax` in the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("FDC_JAX_CACHE") or Path(home) / "fdc_jax")


@contextlib.contextmanager
def write_folder_atomically(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a temporary folder and renames it to `folder`, which is none yet, at the end.

    After a kill, the same call starts afresh.

    Raises:
        InputError: the file system refuses.
    """
    folder = Path(folder)
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        try:
            yield unfinished
            os.rename(unfinished, folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        raise InputError(f"cannot write {folder}: {error.strerror or error}") from error


def open_regular(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Opens a regular file for reading; a pipe or a device might never end.

    Raises:
        OSError: there is no such file, it may not be read, or it is none.
    """
    # Without O_NONBLOCK, a pipe into which nobody writes would not even open.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind == stat.S_IFREG:
        return open(descriptor, "rb")
    os.close(descriptor)
    found = {stat.S_IFDIR: "folder", stat.S_IFIFO: "pipe"}.get(kind, "device")
    raise OSError(errno.EINVAL, f"expected a regular file, found a {found}", os.fspath(path))


def open_lock(path: Path) -> io.FileIO:
    """Opens the file of a lock, made when missing and never emptied; follows no link.

    Raises:
        InputError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A link could lead to anybody's file, which the holder of a lock may write.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        return open(descriptor, "r+b", buffering=0)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error


@contextlib.contextmanager
def locked(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Keeps other processes out of a folder, by a lock on its file `.lock`.

    The file says whose the lock is. The lock ends with the process, also where that is killed; what
    then stays is the name alone.

    Raises:
        InputError: another process is there, which is named, or `.lock` cannot be written.
    """
    with open_lock(Path(folder) / ".lock") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = printable(file.read(200).decode("ascii", "replace").strip())
            raise InputError(
                f"{folder} is in use by {holder or 'another process'}; wait for it, stop it or "
                "choose another folder"
            ) from error
        except OSError:
            _log.warning("%s: the file system has no locks; start one process alone there", folder)
            yield
            return
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
        try:
            yield
        finally:
            file.truncate(0)


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Writes a JSON file, whole or not at all."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes a text in UTF-8, whole or not at all; what UTF-8 lacks is escaped."""
    with write_atomically(path) as file:
        file.write(text.encode("utf-8", "backslashreplace"))


def read_json(path: Path) -> Any:
    """Reads a JSON file; raises InputError where it cannot be read."""
    try:
        with open_regular(path) as file:
            return json.loads(file.read().decode())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: unreadable JSON ({error})") from error


def read_object(path: Path) -> dict[str, Any]:
    """Reads a JSON object, empty where there is no file; InputError where it is none."""
    found = read_json(path) if path.exists() else {}
    check_form(found, {}, f"{path}: ")
    return found


def check_form(value: Any, form: Any, place: str) -> None:
    """Checks a JSON value from a file.

    Args:
        value: the value.
        form: a type or a tuple of types, none of which is bool unless it says so; a tuple of two
            numbers that bound it, whole ones for whole numbers; a list of the form of every item;
            or a dictionary of forms by name. There, a name with `?` may be absent or null, and `*`
            stands for all other names.
        place: where the value stands, the start of a line.

    Raises:
        InputError: says where the value is of another form.
    """

    def refuse(expected: str) -> None:
        found = "none" if value is None else printable(repr(value), 60)
        found = type(value).__name__ if isinstance(value, list | dict) else found
        raise InputError(f"{place.rstrip('. ').rstrip(':')}: expected {expected}, found {found}")

    if isinstance(form, list):
        if not isinstance(value, list):
            refuse("a list")
        for index, each in enumerate(value):
            check_form(each, form[0], f"{place}{index}.")
    elif isinstance(form, dict):
        if not isinstance(value, dict):
            refuse("a JSON object")
        named = {name.rstrip("?"): name for name in form}
        for name in (*named, *(value.keys() - named.keys())):
            if (key := named.get(name, named.get("*"))) and name != "*":
                if value.get(name) is not None or not key.endswith("?"):
                    check_form(value.get(name), form[key], f"{place}{printable(name)}.")
    elif isinstance(form, tuple) and not isinstance(form[0], type):
        low, high = form
        kinds, noun = (int, "a whole number") if isinstance(low, int) else (int | float, "a number")
        if not isinstance(value, kinds) or isinstance(value, bool) or not low <= value <= high:
            refuse(f"{noun} from {low:g} to {high:g}")
    else:
        kinds = form if isinstance(form, tuple) else (form,)
        if type(value) not in kinds:
            refuse(" or ".join(each.__name__ for each in kinds))


# A folder's manifest ------------------------------------------------------------------------------

MANIFEST = "manifest.json"


def read_manifest(folder: str | os.PathLike[str]) -> dict[str, str]:
    """Returns the SHA-256 of files of a folder by their names in there; empty without a manifest.

    Raises:
        InputError: the manifest is none.
    """
    path = Path(folder) / MANIFEST
    known = read_object(path).get("sha256", None if path.exists() else {})
    if not isinstance(known, dict) or not all(isinstance(each, str) for each in known.values()):
        raise InputError(f"{path}: expected checksums under the key sha256")
    return known


def write_manifest(folder: str | os.PathLike[str], known: Mapping[str, str]) -> None:
    """Writes what `read_manifest` reads, whole or not at all."""
    write_json(Path(folder) / MANIFEST, {"sha256": dict(sorted(known.items()))})


def check_manifest(folder: str | os.PathLike[str], remedy: str) -> dict[str, str]:
    """Returns what `read_manifest` does, after comparing every file that it names, byte for byte.

    Raises:
        InputError: a file is missing or another; the line ends with what to do then.
    """
    known = read_manifest(folder)
    for name, digest in known.items():
        try:
            found = sha256(Path(folder) / name)
        except (OSError, ValueError) as error:
            raise InputError(
                f"{folder}: {MANIFEST} names {printable(name)}, which cannot be read; {remedy}"
            ) from error
        if found != digest:
            raise InputError(f"{Path(folder) / name}: is not what was written; {remedy}")
    return known


def check_writable_folder(flag: str, folder: str | os.PathLike[str]) -> None:
    """Refuses, before any work, a folder that is none, or cannot be made or written in.

    It may be missing, with any number of folders above it. The InputError names the flag that
    named it, such as `--output`, and what stands in the way.
    """
    path = Path(folder).absolute()
    try:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.stat()
    except OSError as error:
        raise InputError(f"{flag}={str(folder)[:200]}: {error.strerror}") from error
    existing = next(each for each in (path, *path.parents) if os.path.exists(each))
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise InputError(f"{flag}={folder}: expected a folder to write in, found {existing}")


def check_writable_file(flag: str, path: str | os.PathLike[str], suffix: str) -> Path:
    """Refuses, before any work, what is no name of a file that can be written; returns its path.

    The InputError names the flag, as that of `check_writable_folder` does.
    """
    path = Path(path)
    if path.suffix != suffix or path.is_dir():
        raise InputError(f"{flag}: expected a file that ends in {suffix}, found {path}")
    check_writable_folder(flag, path.absolute().parent)
    return path


def sha256(path: str | os.PathLike[str]) -> str:
    """Returns the SHA-256 of a regular file as 64 hexadecimal digits."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Arrays ------------------------------------------------------------------------------------------
#
# Pickled objects are never read, and whatever a damaged or hostile file does to the parsers becomes
# one InputError with the file and the array.


def read_folder(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Memory-maps every `.npy` file of a folder, under its name without the suffix.

    Raises:
        InputError: a file is damaged or holds objects, or there is none.
    """
    # Names with a leading dot are files still being written.
    files = [file for file in sorted(Path(path).glob("*.npy")) if not file.name.startswith(".")]
    if not files:
        raise InputError(f"{path}: expected .npy files, found none")
    return {file.stem: read_npy(file) for file in files}


def read_npy(path: str | os.PathLike[str]) -> np.ndarray:
    """Memory-maps one `.npy` file.

    Raises:
        InputError: the file is absent, damaged, longer or shorter than it says, or holds objects.
    """
    try:
        with warnings.catch_warnings(action="error"), open_regular(path):
            array = np.lib.format.open_memmap(path, mode="r")
        if array.offset + array.nbytes != os.path.getsize(path):
            raise ValueError("it is longer than its header says")
    except Exception as error:  # Damage surfaces as many types, see read_npz.
        raise InputError(f"{path}: not a readable .npy file: {_reason(error, path)}") from error
    return array


def read_npz(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Reads every array of an `.npz` archive into memory.

    Raises:
        InputError: the file is absent or damaged, holds objects, or has a member that is no array.
    """
    arrays: dict[str, np.ndarray] = {}
    name = ""
    try:
        # Old-format and odd headers warn; here they count as damage.
        with (
            warnings.catch_warnings(action="error"),
            open_regular(path) as opened,
            zipfile.ZipFile(opened) as archive,
        ):
            # Of its directory zipfile does not compare the number of members.
            opened.seek(-12 - len(archive.comment), os.SEEK_END)
            if int.from_bytes(opened.read(2), "little") not in (len(archive.filelist), 0xFFFF):
                raise ValueError("its directory lacks members")
            for member in archive.infolist():
                name = member.filename.removesuffix(".npy")
                if name == member.filename or name in arrays:
                    raise ValueError("expected .npy members, each once")
                with archive.open(member) as file:
                    arrays[name] = np.lib.format.read_array(file, allow_pickle=False)
                    # At the end of a member zipfile compares its checksum.
                    if file.read(1):
                        raise ValueError("it is longer than its header says")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file or folder") from None
    # A damaged archive makes zipfile, its decompressors and the npy parser raise a dozen types
    # (BadZipFile, zlib.error, NotImplementedError, UnicodeError, struct.error, MemoryError, ...).
    except Exception as error:
        where = f"{path}: {printable(name)}" if name else f"{path}"
        reason = _reason(error, path)
        raise InputError(f"{where}: not a readable .npz file: {reason}") from error
    return arrays


def write_npy(path: str | os.PathLike[str], array: ArrayLike) -> None:
    """Writes one array as `.npy`, whole or not at all."""
    with write_atomically(path) as file:
        np.save(file, np.asarray(array), allow_pickle=False)


def write_npz(path: str | os.PathLike[str], arrays: Mapping[str, ArrayLike]) -> None:
    """Writes named arrays as one uncompressed `.npz`, whole or not at all."""
    with write_atomically(path) as file:
        np.savez(file, allow_pickle=False, **{k: np.asarray(v) for k, v in arrays.items()})


def read_safetensors(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Reads every array of a `.safetensors` file into memory.

    Raises:
        InputError: the file is absent or damaged.
    """
    try:
        with open_regular(path):
            return safetensors.numpy.load_file(path)
    except Exception as error:  # As above.
        raise InputError(
            f"{path}: not a readable .safetensors file: {_reason(error, path)}"
        ) from error


def write_safetensors(path: str | os.PathLike[str], arrays: Mapping[str, np.ndarray]) -> None:
    """Writes named arrays as `.safetensors`, whole or not at all; PyTorch reads it, too."""
    dense = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    with write_atomically(path) as file:
        file.write(safetensors.numpy.save(dense, metadata={"format": "pt"}))


def printable(text: str, limit: int = 80) -> str:
    """A text from a file on one line, without control characters, and not too long."""
    return text.encode("unicode_escape").decode("ascii")[:limit]


def _reason(error: Exception, path: str | os.PathLike[str]) -> str:
    with contextlib.suppress(OSError), open_regular(path) as file:
        start = file.read(1024).lstrip(b"\xef\xbb\xbf \t\r\n").lower()
        if start.startswith((b"<!doctype", b"<html", b"<head", b"<?xml")):
            return "it is a web page (HTML), as a failed download leaves"
        if start.startswith(b"pk") and isinstance(error, zipfile.BadZipFile):
            return "it is damaged, or ends early"
    return printable(" ".join(str(error).split()), 200) or type(error).__name__
