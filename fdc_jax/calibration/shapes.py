"""Padding to few sizes, so that few programs are compiled, and loops over tasks."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

# Tasks at once: two fit into the caches of a CPU; elsewhere memory alone limits them.
ON_CPU = 2
ELSEWHERE = 64


def padded_size(size: int, least: int = 1) -> int:
    """Returns the smallest of a few sizes that is at least `size` and `least`.

    There are four sizes per doubling up to 64, then eight, so that at most an eighth is padding.
    """
    size = max(size, least)
    step = max(1, 2 ** (size.bit_length() - (3 if size < 64 else 4)))
    return -(-size // step) * step


def row_slices(count: int, size: int) -> list[slice]:
    """Returns slices of at most `size` rows."""
    return [slice(start, start + size) for start in range(0, count, size)]


def padded(array: np.ndarray, size: int, fill: float = 0.0) -> np.ndarray:
    """Returns an array with its leading size padded."""
    if len(array) >= size:
        return array
    rest = np.full((size - len(array), *array.shape[1:]), fill, array.dtype)
    return np.concatenate([array, rest])


def stack(
    arrays: Sequence[Any], count: int, least: Sequence[int], fill: float
) -> Float[np.ndarray, "count ..."]:
    """Returns arrays as rows of one of `count`, padded.

    The leading axes have at least the sizes `least`, and few sizes; others are all equal.
    """
    shape = [max(sizes) for sizes in zip(*map(np.shape, arrays), strict=True)]
    shape[: len(least)] = map(padded_size, shape, least)
    rows = np.full((count, *shape), fill, np.float32)
    for index, array in enumerate(arrays):
        rows[index, *map(slice, np.shape(array))] = array
    return rows


def squared_norm(vectors: Float[Array, "... d"]) -> Float[Array, "*n"]:
    """Returns squared Euclidean norms."""
    return (vectors * vectors).sum(axis=-1)


def mean_of_smallest(values: Float[Array, "*n c"], count: Any) -> Float[Array, "*n"]:
    """Returns the mean of the `count` smallest values of each row."""
    smallest = jnp.arange(values.shape[-1]) < count
    return jnp.where(smallest, jnp.sort(values), 0.0).sum(axis=-1) / count


def over_tasks(function: Callable[..., Any], tasks: Any) -> Any:
    """Returns results [n, t, ...] of a function of one task, by `vmap` over several at a time."""
    if len(jax.tree.leaves(tasks)[0]) <= ON_CPU:
        return jax.vmap(function, out_axes=1)(tasks)

    def mapped(tasks: Any, at_once: int) -> Any:
        by_task = jax.lax.map(function, tasks, batch_size=at_once)
        return jax.tree.map(lambda values: jnp.moveaxis(values, 0, 1), by_task)

    on_cpu = partial(mapped, at_once=ON_CPU)
    elsewhere = partial(mapped, at_once=ELSEWHERE)
    return jax.lax.platform_dependent(tasks, cpu=on_cpu, default=elsewhere)


def groups_of(count: int) -> tuple[list[slice], int]:
    """Returns groups of tasks for `over_tasks`, and the size to which each is padded."""
    size = ON_CPU
    if jax.default_backend() != "cpu":
        size = min(ELSEWHERE, 1 << max(count - 1, 7).bit_length())
    return row_slices(count, size), size
