"""Checks of named arrays from a file; every fault is one line that names the array."""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float, Int

from fdc_jax.errors import InputError

_CHECKED_ROWS = 4096


def matrix(
    arrays: Mapping[str, np.ndarray], name: str, dimension: int | None, reference: str
) -> Float[np.ndarray, "n d"]:
    """Returns an array as it is, after a look at all its numbers.

    Args:
        arrays: of the file.
        name: of the array, which must be there.
        dimension: columns expected, None for any number.
        reference: which array has as many.

    Raises:
        InputError: not a matrix of that many columns, empty, or not finite in float32.
    """
    array = arrays[name]
    if array.ndim != 2 or array.dtype.kind != "f" or array.dtype.itemsize > 8:
        raise InputError(
            f"{name}: expected a matrix of floating-point numbers, found {array.dtype} of shape "
            f"{array.shape}"
        )
    if not array.size:
        raise InputError(f"{name}: expected at least one row and column, found {array.shape}")
    if dimension is not None and array.shape[1] != dimension:
        raise InputError(
            f"{name}: expected {dimension} columns as in {reference}, found {array.shape[1]}"
        )
    for start in range(0, len(array), _CHECKED_ROWS):
        with np.errstate(over="ignore"):
            rows = np.asarray(array[start : start + _CHECKED_ROWS], np.float32)
        finite = np.isfinite(rows)
        if not finite.all():
            row, column = np.unravel_index(int(np.argmin(finite)), rows.shape)
            value = array[start + row, column]
            raise InputError(
                f"{name}: row {start + int(row)}, column {int(column)} is {value}; expected "
                "numbers that are finite in float32"
            )
    return array


def label_vector(arrays: Mapping[str, np.ndarray], name: str) -> Int[np.ndarray, " n"]:
    """Returns an array as labels in int64.

    Raises:
        InputError: not a vector of integers, empty, or beyond 64 bits.
    """
    array = arrays[name]
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InputError(
            f"{name}: expected a vector of integers, found {array.dtype} of shape {array.shape}"
        )
    if not array.size:
        raise InputError(f"{name}: expected at least one label, found none")
    if array.max() > np.iinfo(np.int64).max:
        raise InputError(f"{name}: row {int(np.argmax(array))} is {array.max()}, beyond 64 bits")
    return np.asarray(array, np.int64)


def check_same_rows(name: str, array: np.ndarray, reference: str, other: np.ndarray) -> None:
    """Raises InputError unless an array has as many rows as another one."""
    if len(array) != len(other):
        raise InputError(
            f"{name}: expected {len(other)} rows as in {reference}, found {len(array)}"
        )


def check_labels_within(
    labels: Int[np.ndarray, " n"], classes: list[int], name: str, where: str
) -> None:
    """Raises InputError naming the first label that is not among the classes."""
    outside = ~np.isin(labels, classes)
    if outside.any():
        row = int(np.argmax(outside))
        raise InputError(f"{name}: row {row} is label {labels[row]}, no class of {where}")


def numbers(
    arrays: Mapping[str, np.ndarray], name: str, shape: tuple[int, ...], default: float
) -> Float[np.ndarray, "..."]:
    """Returns an array in float32, or one full of `default` when the file has none.

    Raises:
        InputError: of another shape, no floating-point numbers, or not finite in float32.
    """
    if name not in arrays:
        return np.full(shape, default, np.float32)
    array = arrays[name]
    if array.shape != shape or array.dtype.kind != "f":
        raise InputError(
            f"{name}: expected floating-point numbers of shape {shape}, found {array.dtype} of "
            f"shape {array.shape}"
        )
    with np.errstate(over="ignore"):
        array = np.asarray(array, np.float32)
    if not np.isfinite(array).all():
        place = np.unravel_index(int(np.argmin(np.isfinite(array))), shape)
        row = f"row {place[0]} " if shape else ""
        raise InputError(f"{name}: {row}is not finite in float32")
    return array
