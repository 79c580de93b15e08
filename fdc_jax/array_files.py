"""NumPy arrays on disk: npz archives and folders of npy files, read without trusting them.

Pickled objects are never read, and whatever a damaged or hostile file does to the parsers becomes
one InputError with the file and the array.
"""

import os
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import ArrayLike

from fdc_jax.errors import InputError
from fdc_jax.files import write_atomically


def read_folder(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Memory-maps every `.npy` file of a folder, under its name without the suffix.

    Raises:
        InputError: a file is damaged or holds objects, or there is none.
    """
    arrays = {}
    for file in sorted(Path(path).iterdir()):
        # Names with a leading dot are files still being written.
        if file.suffix == ".npy" and not file.name.startswith("."):
            arrays[file.stem] = read_npy(file)
    if not arrays:
        raise InputError(f"{path}: expected .npy files, found none")
    return arrays


def read_npy(path: str | os.PathLike[str]) -> np.ndarray:
    """Memory-maps one `.npy` file.

    Raises:
        InputError: the file is absent, damaged, longer or shorter than it says, or holds objects.
    """
    try:
        with warnings.catch_warnings(action="error"):
            with open(path, "rb") as file:
                size = _data_size(file)
                if file.tell() + size != os.fstat(file.fileno()).st_size:
                    raise ValueError("it is shorter or longer than its header says")
            return np.load(path, mmap_mode="r" if size else None, allow_pickle=False)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except Exception as error:  # Damage surfaces as many types, see read_npz.
        raise InputError(f"{path}: not a readable .npy file: {_reason(error)}") from error


def read_npz(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Reads every array of an `.npz` archive into memory.

    Raises:
        InputError: the file is absent or damaged, holds objects, or has a member that is no array.
    """
    arrays: dict[str, np.ndarray] = {}
    name = ""
    try:
        # Old-format and odd headers warn; here they count as damage.
        with warnings.catch_warnings(action="error"), zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                name = member.filename.removesuffix(".npy")
                if name == member.filename or name in arrays:
                    raise ValueError("expected .npy members, each once")
                arrays[name] = _read_member(archive, member)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file or folder") from None
    except InputError as error:
        raise InputError(f"{path}: {printable(name)}: {error}") from None
    # A damaged archive makes zipfile, its decompressors and the npy parser raise a dozen types
    # (BadZipFile, zlib.error, NotImplementedError, UnicodeError, struct.error, MemoryError, ...).
    except Exception as error:
        place = f"{path}: {printable(name)}" if name else path
        raise InputError(f"{place}: not a readable .npz file: {_reason(error)}") from error
    return arrays


def write_npy(path: str | os.PathLike[str], array: ArrayLike) -> None:
    """Writes one array as `.npy`, whole or not at all."""
    with write_atomically(path) as file:
        np.save(file, np.asarray(array), allow_pickle=False)


def write_npz(path: str | os.PathLike[str], arrays: Mapping[str, ArrayLike]) -> None:
    """Writes named arrays as one uncompressed `.npz`, whole or not at all."""
    with write_atomically(path) as file:
        np.savez(file, allow_pickle=False, **{k: np.asarray(v) for k, v in arrays.items()})


def printable(text: str, limit: int = 80) -> str:
    """A text from a file on one line, without control characters, and not too long."""
    return text.encode("unicode_escape").decode("ascii")[:limit]


def _read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    with archive.open(member) as file:
        size = _data_size(file)
        if file.tell() + size != member.file_size:
            raise ValueError("it is shorter or longer than its header says")
    with archive.open(member) as file:
        # Reading all of a member is what makes zipfile compare its checksum.
        return np.lib.format.read_array(file, allow_pickle=False)


def _data_size(file: IO[bytes]) -> int:
    """Parses an npy header and returns the number of bytes that should follow."""
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    elif version == (2, 0):
        shape, _, dtype = np.lib.format.read_array_header_2_0(file)
    else:
        raise ValueError(f"npy format version {version} is not supported")
    if dtype.hasobject:
        raise InputError("expected numbers, found Python objects (pickle), which are not read")
    size = dtype.itemsize
    for length in shape:
        size *= length
    return size


def _reason(error: Exception) -> str:
    return printable(" ".join(str(error).split()), 200) or type(error).__name__
