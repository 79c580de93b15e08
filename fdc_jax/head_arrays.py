"""Heads of a feature file: which kinds it can hold, and each as named arrays."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from fdc_jax import heads
from fdc_jax.array_checks import numbers
from fdc_jax.errors import InputError

# Each kind's type, and the array that stands beside its rows.
KINDS: dict[str, tuple[Any, str | None]] = {
    "linear": (heads.LinearHead, "head_bias"),
    "normalised_linear": (heads.NormalisedLinearHead, "head_bias"),
    "cosine": (heads.CosineHead, "head_scale"),
    "nearest_mean": (heads.NearestMeanHead, None),
}
NAMES = ("head_weight", "head_bias", "head_scale")


def read_kind(arrays: Mapping[str, np.ndarray]) -> str:
    """Returns the kind that all heads of a file are of, `linear` when it names none.

    Raises:
        InputError: it names another kind.
    """
    if "head_kind" not in arrays:
        return "linear"
    array = arrays["head_kind"]
    kind = str(array) if array.ndim == 0 and array.dtype.kind in "US" else None
    if array.dtype.kind == "S" and array.ndim == 0:
        kind = array.item().decode("ascii", "replace")
    if kind not in KINDS:
        found = kind or f"{array.dtype} of shape {array.shape}"
        raise InputError(f"head_kind: expected one of {', '.join(KINDS)}; found {found[:40]}")
    return kind


def read(
    arrays: Mapping[str, np.ndarray], task: int, kind: str, weight: np.ndarray, prefix: str = ""
) -> heads.Head:
    """Returns the head whose rows are `weight`, with what stands beside them in the file.

    Args:
        arrays: of the file.
        task: index from 0.
        kind: of `KINDS`.
        weight: checked rows [c, d].
        prefix: before every name.

    Raises:
        InputError: an array is malformed, or belongs to another kind.
    """
    for name in NAMES[1:]:
        if f"{prefix}{name}_{task}" in arrays and name != KINDS[kind][1]:
            owners = " or ".join(owner for owner, (_, own) in KINDS.items() if own == name)
            raise InputError(
                f"{prefix}{name}_{task}: expected only for {owners} heads, head_kind is {kind}"
            )
    make, name = KINDS[kind]
    rows = jnp.asarray(np.asarray(weight, np.float32))
    if name is None:
        return make(rows)
    if name == "head_scale":
        return make(rows, float(numbers(arrays, f"{prefix}{name}_{task}", (), 1.0)))
    return make(rows, jnp.asarray(numbers(arrays, f"{prefix}{name}_{task}", (len(rows),), 0.0)))


def to_arrays(head: heads.Head, task: int) -> tuple[str, dict[str, np.ndarray]]:
    """Returns the kind of a head, and its arrays in float32 by their names in a file.

    Raises:
        InputError: a head of no kind that can be stored as arrays.
    """
    for kind, (stored, name) in KINDS.items():
        if isinstance(head, stored):
            parts: Any = head
            named = zip(("head_weight", name), parts, strict=False)
            return kind, {key: np.asarray(part, np.float32) for key, part in named if key}
    raise InputError(
        f"head of task {task}: expected a {' or '.join(KINDS)} head, which can be stored as "
        f"arrays; found {type(head).__name__}"
    )
