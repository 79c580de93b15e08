"""Files that are either whole or absent, and their checksums."""

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from fdc_jax.errors import InputError


@contextlib.contextmanager
def write_atomically(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Opens a temporary file beside `path` and renames it to `path` when the block succeeds.

    Args:
        path: final name; its folder is made when missing.

    Yields:
        A binary file open for writing. On any error the temporary file is removed and an existing
        `path` keeps its old content.

    Raises:
        InputError: the file system refuses the write (full disk, no permission).
    """
    path = Path(path)
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes private files; results are for everybody whom the umask admits.
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, path)
        temporary = None
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Writes a JSON file, whole or not at all."""
    with write_atomically(path) as file:
        file.write((json.dumps(value, indent=2) + "\n").encode())


def read_json(path: Path) -> Any:
    """Reads a JSON file.

    Raises:
        InputError: unreadable.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: unreadable JSON ({error})") from error


def check_writable_folder(flag: str, folder: str | os.PathLike[str]) -> None:
    """Refuses, before any work, a folder that is none, or cannot be made or written in.

    Args:
        flag: that named it, such as `--output`.
        folder: may be missing, with any number of folders above it.

    Raises:
        InputError: names the flag and what stands in the way.
    """
    path = Path(folder).absolute()
    existing = next(each for each in (path, *path.parents) if each.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise InputError(f"{flag}={folder}: expected a folder to write in, found {existing}")


def sha256(path: str | os.PathLike[str]) -> str:
    """Returns the SHA-256 of a file as 64 hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
