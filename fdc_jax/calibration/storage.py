"""The bytes of FDC, and a calibrator as an `.npz` file of a tree of tuples and arrays.

Arrays are concatenated by number type. `tree` is JSON, with the offset and shape of every array,
and with numbers, texts and None themselves. A checksum covers the tree and the arrays.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np

from fdc_jax.calibration.settings import Settings
from fdc_jax.calibration.statistics import Task, by_view
from fdc_jax.errors import InputError, escaped
from fdc_jax.machine.files import named_path, read_npz, write_npz

FORMAT = "fdc_jax calibrator, 12"
_NUMBER_TYPES = {np.dtype(code).name for code in np.typecodes["All"]}


def bytes_of_fdc(settings: Settings, tasks: Sequence[Task], counts: Sequence[Any]) -> int:
    """Returns the bytes of FDC's statistics in use, as the paper counts them: no heads, no F^v."""
    weights = settings.adapted_view_weight, settings.pretrained_view_weight
    bases = weights[0] or settings.attenuation, weights[1]
    count = len(tasks)
    rows = count + int((np.concatenate(counts) > 0).sum())  # means and prototypes
    numbers = 2 * count  # sigma_t without and with TSF
    for weight, basis, views in zip(weights, bases, by_view(tasks), strict=False):
        if basis:
            numbers += sum(view.basis.size for view in views)
        if weight:  # Four moments of each task; mu_F, V_F and tau.
            numbers += rows * len(views[0].mean) + 4 * count + 3 * (count > 1)
    return 4 * numbers


def write(path: str | os.PathLike[str], value: Any) -> None:
    """Writes a tree to a file, whole or not at all.

    Nodes are lists, dictionaries, named tuples, structures and objects with `__getstate__`; leaves
    are NumPy arrays, numbers, texts, truth values and None.
    """
    parts: dict[str, list[np.ndarray]] = {}
    path = named_path("path", path)
    tree = json.dumps(encode(value, parts))
    arrays = {dtype: np.concatenate(chunks) for dtype, chunks in parts.items()}
    write_npz(path, arrays | {"format": FORMAT, "tree": tree, "sha256": checksum(tree, arrays)})


def read(
    path: str | os.PathLike[str],
    types: Mapping[str, type],
    arrays: Mapping[str, np.ndarray] | None = None,
) -> Any:
    """Returns the tree of a file, with tuples and objects of `types` by name; runs no code.

    `arrays` are those of the file, if they were read already.

    Raises:
        InputError: the file is missing, damaged, or of another kind or version.
    """
    path = named_path("path", path)
    arrays = read_npz(path, _check_kind) if arrays is None else dict(arrays)
    _, tree, digest = (str(arrays.pop(name, "")) for name in ("format", "tree", "sha256"))
    try:
        if digest == checksum(tree, arrays):
            return decode(json.loads(tree), arrays, types)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as e:
        raise InputError(f"{path}: not as this version writes it ({e!r})") from e
    raise InputError(f"{path}: damaged: its content is not what was written")


def _check_kind(arrays: Mapping[str, np.ndarray]) -> None:
    """Raises InputError, before other arrays are read, if they are not of a calibrator."""
    kind = str(arrays["format"]) if "format" in arrays else ""
    if kind != FORMAT:
        earlier = kind.startswith(FORMAT.partition(",")[0])
        remedy = "; `fdc posthoc` fits it again, from saved features" if earlier else ""
        raise InputError(f"expected a file of kind {FORMAT!r}, found {kind[:80]!r}{remedy}")
    unknown = {*arrays} - {"format", "tree", "sha256", *_NUMBER_TYPES}
    if unknown:
        raise InputError(f"expected arrays by their type, found {escaped(min(unknown))[:80]}")


def checksum(tree: str, arrays: Mapping[str, np.ndarray]) -> str:
    """Returns the SHA-256 of a tree and its arrays."""
    digest = hashlib.sha256(tree.encode())
    for name in sorted(arrays):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.hexdigest()


def encode(value: Any, parts: dict[str, list[np.ndarray]]) -> Any:
    """Returns a value as JSON; its arrays are appended to `parts` by number type."""
    inner = partial(encode, parts=parts)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        chunks = parts.setdefault(value.dtype.name, [])
        start = sum(part.size for part in chunks)
        chunks.append(value.ravel())
        return {"array": [value.dtype.name, start, *value.shape]}
    if isinstance(value, list):
        return [*map(inner, value)]
    if isinstance(value, dict):
        return {"dict": [[inner(key), inner(item)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {"tuple": [type(value).__name__, *map(inner, value)]}
    structure = isinstance(value, msgspec.Struct)
    state = msgspec.structs.asdict(value) if structure else value.__getstate__()
    return {"object": [type(value).__name__, inner(state)]}


def decode(node: Any, arrays: Mapping[str, np.ndarray], types: Mapping[str, type]) -> Any:
    """Reverses `encode`."""
    inner = partial(decode, arrays=arrays, types=types)
    if isinstance(node, list):
        return [*map(inner, node)]
    if not isinstance(node, dict):
        return node
    ((kind, content),) = node.items()
    if kind == "array":
        dtype, start, *shape = content
        return arrays[dtype][start : start + int(np.prod(shape))].reshape(shape).copy()
    if kind == "dict":
        return {inner(key): inner(item) for key, item in content}
    name, *members = content
    if kind == "tuple":
        return tuple(map(inner, members)) if name == "tuple" else types[name](*map(inner, members))
    (state,) = map(inner, members)
    if issubclass(types[name], msgspec.Struct):
        return msgspec.convert(state, types[name])
    value: Any = object.__new__(types[name])
    value.__setstate__(state)
    return value
