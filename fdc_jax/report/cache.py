"""Results of analyses on disk, each beside the run that it is of, and when they are still valid."""

import contextlib
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from fdc_jax.errors import InputError
from fdc_jax.files import sha256, write_atomically

# Raised whenever the content or the meaning of an analysis changes.
SCHEMA = 1

_CHECKSUMS = "checksums"


def cached(
    folder: Path, name: str, key: Mapping[str, Any], compute: Callable[[], Mapping[str, Any]]
) -> dict[str, Any]:
    """Returns the stored result of an analysis, or computes and stores it.

    A file that is absent, damaged, of another schema or of another key is replaced. Where the
    folder cannot be written, the result is merely not stored.

    Args:
        folder: made when missing; receives `<name>.json`.
        name: of the analysis.
        key: everything that the result depends on.
        compute: called without arguments; its numbers may be NumPy's.

    Returns:
        The result as JSON has it: lists, and None for what is not finite.
    """
    wanted = plain({"schema": SCHEMA, **key})
    stored = _read(folder / f"{name}.json")
    if isinstance(stored, dict) and stored.get("key") == wanted:
        result = stored.get("result")
        if isinstance(result, dict) and stored.get("digest") == _digest(result):
            return result
    result = plain(compute())
    _write(folder / f"{name}.json", {"key": wanted, "digest": _digest(result), "result": result})
    return result


def plain(value: Any) -> Any:
    """Returns a value in the types of JSON: NumPy's become Python's, not finite becomes None."""
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, list | tuple | range):
        return [plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def checksum(source: Path, folder: Path) -> str:
    """Returns one checksum over the names and contents of a file, or of the files in a folder.

    Checksums are remembered in `folder` and read again only for files whose size or time of change
    is another.

    Raises:
        InputError: a file cannot be read.
    """
    memory = folder / f"{_CHECKSUMS}.json"
    known = _read(memory)
    known = known if isinstance(known, dict) else {}
    paths = sorted(source.iterdir()) if source.is_dir() else [source]
    found: dict[str, list[Any]] = {}
    for path in paths:
        # Names with a leading dot are files still being written.
        if path.name.startswith(".") or not path.is_file():
            continue
        name = path.relative_to(source.parent).as_posix()
        try:
            state = path.stat()
            stamp = [state.st_size, state.st_mtime_ns]
            entry = known.get(name)
            digest = entry[2] if _is_entry(entry) and entry[:2] == stamp else sha256(path)
        except OSError as error:
            raise InputError(f"{path}: {error.strerror or error}") from error
        found[name] = [*stamp, digest]
    others = {name: known[name] for name in known if name.split("/")[0] != source.name}
    if known != others | found:
        _write(memory, others | found)
    whole = "".join(f"{name} {entry[2]}\n" for name, entry in found.items())
    return hashlib.sha256(whole.encode()).hexdigest()


def _is_entry(entry: Any) -> TypeGuard[list[Any]]:
    return isinstance(entry, list) and [type(each) for each in entry] == [int, int, str]


def _digest(result: Any) -> str:
    text = json.dumps(result, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def _write(path: Path, value: Any) -> None:
    # Where it cannot be written, nothing is lost but the time that it takes again.
    with contextlib.suppress(InputError), write_atomically(path) as file:
        file.write((json.dumps(value, allow_nan=False) + "\n").encode())
