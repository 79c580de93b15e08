"""The built-in heads in one form, so that heads of all tasks can be scored in one kernel."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from fdc_jax.calibration.inputs import check_real, float32, host_array
from fdc_jax.errors import InputError
from fdc_jax.heads import (
    NORM_FLOOR,
    CosineHead,
    LinearHead,
    NearestMeanHead,
    NormalisedLinearHead,
)

KINDS = {
    LinearHead: "linear",
    NormalisedLinearHead: "normalised_linear",
    CosineHead: "cosine",
    NearestMeanHead: "nearest_mean",
}


class HeadRows(NamedTuple):
    """Logits rows . h + bias, where h is first divided by its norm when `normalised`."""

    rows: Float[np.ndarray, "c d"]
    bias: Float[np.ndarray, " c"]
    normalised: bool


def head_kind(head: Any, name: str) -> str:
    """Returns a name of `KINDS`, or "function" for any other head with logits.

    Raises:
        InputError: `head` has no method `logits`.
    """
    kind = KINDS.get(type(head))
    if kind is None and not callable(getattr(head, "logits", None)):
        raise InputError(f"{name}: expected a head with a method logits, found {type(head)}")
    return kind or "function"


def head_rows(head: Any, name: str, width: int) -> HeadRows:
    """Returns a built-in head as rows and bias.

    Args:
        head: of a type in `KINDS`.
        name: what to call it in messages.
        width: head-input dimension.

    Raises:
        InputError: an array of another shape than [c, width] and [c], not of real numbers, or not
            finite.
    """
    if isinstance(head, LinearHead | NormalisedLinearHead):
        rows = _matrix(head.weight, f"{name}: weight", width)
        bias = _numbers(head.bias, f"{name}: bias")
        if bias.shape != (len(rows),):
            raise InputError(f"{name}: bias: expected shape [{len(rows)}], found {[*bias.shape]}")
        result = HeadRows(rows, bias, isinstance(head, NormalisedLinearHead))
    elif isinstance(head, CosineHead):
        rows = _unit(_matrix(head.weight, f"{name}: weight", width))
        plain = isinstance(head.scale, int | float)
        scale = _numbers(np.asarray(head.scale) if plain else head.scale, f"{name}: scale")
        if scale.shape != ():
            raise InputError(f"{name}: scale: expected a number, found {[*scale.shape]}")
        result = HeadRows(scale * rows, np.zeros(len(rows), np.float32), True)
    else:
        rows = _unit(_matrix(head.means, f"{name}: means", width))
        result = HeadRows(2.0 * rows, np.full(len(rows), -2.0, np.float32), True)
    for part, values in (("weights", result.rows), ("bias", result.bias)):
        if not np.isfinite(values).all():
            row = int(np.argmin(np.isfinite(values.reshape(len(rows), -1)).all(axis=1)))
            raise InputError(f"{name}: {part}: row {row} is not finite")
    return result


def common_kind(heads: Sequence[Any]) -> str | None:
    """Returns the kind shared by all heads, None when there are none.

    Raises:
        InputError: heads of different kinds.
    """
    kinds = [head_kind(head, f"head of task {task}") for task, head in enumerate(heads)]
    for task, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise InputError(
                f"head of task {task}: expected a {kinds[0]} head like task 0, found {kind}"
            )
    return kinds[0] if kinds else None


def _matrix(values: Any, name: str, width: int) -> Float[np.ndarray, "c d"]:
    array = _numbers(values, name)
    if array.ndim != 2 or array.shape[0] == 0 or array.shape[1] != width:
        raise InputError(f"{name}: expected shape [classes, {width}], found {[*array.shape]}")
    return array


def _numbers(values: Any, name: str) -> Float[np.ndarray, "..."]:
    array = host_array(values, name)
    check_real(array.dtype, name)
    return float32(array)


def _unit(rows: Float[np.ndarray, "c d"]) -> Float[np.ndarray, "c d"]:
    norms = np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
    return (rows / np.maximum(norms, NORM_FLOOR)).astype(np.float32)
