"""Padding to few sizes, so that few programs are compiled, and loops over tasks."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

# Tasks per `vmap`: two fit into the caches of a CPU; on an accelerator only memory limits them.
_TASKS_ON_CPU = 2
_TASKS_ON_ACCELERATOR = 64


def padded_size(size: int, least: int = 1) -> int:
    """Returns the smallest of a few sizes that is at least `size` and `least`.

    Up to 64 there are four sizes per doubling, and less than a fifth is padding. Above there are
    eight, and less than an eighth is padding. Padding up to `least` comes on top.
    """
    size = max(size, least)
    step = max(1, 2 ** (size.bit_length() - (3 if size < 64 else 4)))
    return -(-size // step) * step


def row_slices(count: int, size: int) -> list[slice]:
    """Splits `count` rows into slices of `size`; the last one may end beyond `count`."""
    return [slice(start, start + size) for start in range(0, count, size)]


def padded(array: np.ndarray, size: int, fill: float = 0.0) -> np.ndarray:
    """Returns an array with rows of `fill` appended until it has at least `size` rows."""
    if len(array) >= size:
        return array
    padding = np.full((size - len(array), *array.shape[1:]), fill, array.dtype)
    return np.concatenate([array, padding])


def stack(
    arrays: Sequence[Any], count: int, least: Sequence[int], fill: float
) -> Float[np.ndarray, "count ..."]:
    """Stacks arrays into one float32 array and pads them to a common shape.

    Args:
        arrays: at most `count` arrays with equally many axes.
        count: number of rows of the result; rows without an array are padding.
        least: least sizes of the leading axes, which are padded to `padded_size`. The other axes
            have the same size in all arrays.
        fill: value of the padding.
    """
    shape = [max(sizes) for sizes in zip(*map(np.shape, arrays), strict=True)]
    shape[: len(least)] = map(padded_size, shape, least)
    rows = np.full((count, *shape), fill, np.float32)
    for index, array in enumerate(arrays):
        rows[index, *map(slice, np.shape(array))] = array
    return rows


def squared_norm(vectors: Float[Array, "*n d"]) -> Float[Array, "*n"]:
    """Returns squared Euclidean norms."""
    return (vectors * vectors).sum(axis=-1)


def mean_of_smallest(values: Float[Array, "*n c"], count: Any) -> Float[Array, "*n"]:
    """Returns the mean of the `count` smallest values of each row."""
    smallest = jnp.arange(values.shape[-1]) < count
    return jnp.where(smallest, jnp.sort(values), 0.0).sum(axis=-1) / count


def over_tasks(function: Callable[..., Any], tasks: Any) -> Any:
    """Applies a function of one task to all tasks, by `vmap` over several at a time.

    Args:
        function: returns a pytree of arrays [n, ...].
        tasks: a pytree of arrays [t, ...].

    Returns:
        The pytree of the function, with arrays [n, t, ...].
    """
    if len(jax.tree.leaves(tasks)[0]) <= _TASKS_ON_CPU:
        return jax.vmap(function, out_axes=1)(tasks)

    def mapped(tasks: Any, at_once: int) -> Any:
        by_task = jax.lax.map(function, tasks, batch_size=at_once)
        return jax.tree.map(lambda values: jnp.moveaxis(values, 0, 1), by_task)

    on_cpu = partial(mapped, at_once=_TASKS_ON_CPU)
    on_accelerator = partial(mapped, at_once=_TASKS_ON_ACCELERATOR)
    return jax.lax.platform_dependent(tasks, cpu=on_cpu, default=on_accelerator)


def groups_of(count: int) -> tuple[list[slice], int]:
    """Splits `count` tasks into groups for `over_tasks`.

    Returns:
        The slice of every group, and the number of tasks to which a group is padded.
    """
    size = _TASKS_ON_CPU
    if jax.default_backend() != "cpu":
        power_of_two = 1 << (count - 1).bit_length()
        size = min(_TASKS_ON_ACCELERATOR, max(8, power_of_two))
    return row_slices(count, size), size
