"""A calibrator as one `.npz` file, and back: a tree of tuples and arrays, whatever it means.

Arrays of one number type are joined into one member; `tree` says as JSON where each lies. Numbers,
words and None stand in the tree itself. A checksum of everything makes damage one clear line.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from fdc_jax.errors import InputError
from fdc_jax.machine.files import read_npz, write_npz

FORMAT = "fdc_jax calibrator, 9"


def write(path: str | os.PathLike[str], value: Any) -> None:
    """Writes a tree to a file, whole or not at all.

    Its nodes are lists, dictionaries, named tuples, dataclasses, random generators and objects with
    `__getstate__`; its leaves NumPy arrays, numbers, words, truth values and None.
    """
    parts: dict[str, list[np.ndarray]] = {}
    tree = json.dumps(_taken_apart(value, parts, collections.Counter()))
    arrays = {dtype: np.concatenate(each) for dtype, each in parts.items()}
    write_npz(path, arrays | {"format": FORMAT, "tree": tree, "sha256": _checksum(tree, arrays)})


def read(path: str | os.PathLike[str], types: Mapping[str, type]) -> Any:
    """Reads a tree whose tuples and objects are of these `types`, by their names; runs no code.

    Raises:
        InputError: the file is missing, damaged, or of another kind or version.
    """
    arrays = read_npz(path)
    kind, tree = (str(arrays.pop(name, "")) for name in ("format", "tree"))
    if kind != FORMAT:
        earlier = kind.startswith(FORMAT.partition(",")[0])
        remedy = "; `fdc posthoc` fits it anew, from saved features" * earlier
        raise InputError(f"{path}: expected a file of kind {FORMAT!r}, found {kind[:80]!r}{remedy}")
    try:
        intact = str(arrays.pop("sha256", "")) == _checksum(tree, arrays)
        found = _put_together(json.loads(tree), arrays, types) if intact else None
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as e:
        raise InputError(f"{path}: not as this version writes it ({e!r})") from e
    if not intact:
        raise InputError(f"{path}: damaged: its content is not what was written")
    return found


def _checksum(tree: str, arrays: Mapping[str, np.ndarray]) -> str:
    found = hashlib.sha256(tree.encode())
    for name in sorted(arrays):
        found.update(name.encode())
        found.update(np.ascontiguousarray(arrays[name]).data)
    return found.hexdigest()


def _taken_apart(
    value: Any, parts: dict[str, list[np.ndarray]], ends: collections.Counter[str]
) -> Any:
    """Returns a value as JSON; its arrays are appended to `parts` by number type.

    `ends` are how many numbers of a type there are by now.
    """

    def inner(each: Any) -> Any:
        return _taken_apart(each, parts, ends)

    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        name = value.dtype.name
        start, ends[name] = ends[name], ends[name] + value.size
        parts.setdefault(name, []).append(value.ravel())
        return {"array": [name, start, *value.shape]}
    if isinstance(value, list):
        return [inner(each) for each in value]
    if isinstance(value, dict):
        return {"dict": [[inner(key), inner(each)] for key, each in value.items()]}
    if isinstance(value, np.random.Generator):
        return {"generator": value.bit_generator.state}
    if isinstance(value, tuple):
        return {"tuple": [type(value).__name__, *map(inner, value)]}
    fields = dataclasses.is_dataclass(value)
    state = vars(value) if fields else value.__getstate__()
    return {"object": [type(value).__name__, inner(state)]}


def _put_together(node: Any, arrays: Mapping[str, np.ndarray], types: Mapping[str, type]) -> Any:
    """Reverses `_taken_apart`."""

    def inner(each: Any) -> Any:
        return _put_together(each, arrays, types)

    if isinstance(node, list):
        return [inner(each) for each in node]
    if not isinstance(node, dict):
        return node
    ((kind, content),) = node.items()
    if kind == "array":
        dtype, start, *shape = content
        return arrays[dtype][start : start + int(np.prod(shape))].reshape(shape).copy()
    if kind == "dict":
        return {inner(key): inner(each) for key, each in content}
    if kind == "generator":
        generator = np.random.default_rng()
        generator.bit_generator.state = content
        return generator
    name, *members = content
    if kind == "tuple":
        return tuple(map(inner, members)) if name == "tuple" else types[name](*map(inner, members))
    (state,) = map(inner, members)
    if dataclasses.is_dataclass(types[name]):
        return types[name](**state)
    value: Any = object.__new__(types[name])
    value.__setstate__(state)
    return value
