"""Arrays of few shapes for compiled programs, and loops over tasks."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jaxtyping import Array, Float

# Tasks at once: two fit into the caches of a CPU; elsewhere memory alone limits them.
ON_CPU, ELSEWHERE = 2, 64


def padded_size(size: int, least: int = 1) -> int:
    """Returns the smallest of a few sizes that is at least `size` and `least`.

    There are four sizes per doubling up to 64, then eight, so that at most an eighth is padding.
    """
    size = max(size, least)
    step = max(1, 2 ** (size.bit_length() - (3 if size < 64 else 4)))
    return -(-size // step) * step


def padded(array: np.ndarray, size: int, fill: float = 0.0) -> np.ndarray:
    """Returns an array with its leading size padded."""
    widths = [(0, size - len(array))] + [(0, 0)] * (array.ndim - 1)
    return np.pad(array, widths, constant_values=fill) if size > len(array) else array


def stack(arrays: Sequence[np.ndarray], size: int, fill: float = 0.0) -> np.ndarray:
    """Returns arrays of several leading sizes as one, each padded."""
    return np.stack([padded(np.asarray(array), size, fill) for array in arrays])


def to_device(count: int, array: Any, fill: float = 0.0) -> Array:
    """Returns an array on the device, in float32, padded to a leading size `count`."""
    return jax.device_put(padded(np.asarray(array, np.float32), count, fill))


def squared_norm(vectors: Float[Array, "... d"]) -> Float[Array, "*n"]:
    """Returns squared Euclidean norms."""
    return (vectors * vectors).sum(axis=-1)


def mean_of_smallest(values: Float[Array, "*n c"], count: Any) -> Float[Array, "*n"]:
    """Returns the mean of the `count` smallest values of each row; a sort takes longer."""

    def several() -> Float[Array, "*n"]:
        one, other = values[..., None], values[..., None, :]
        smaller, equal = (other < one).sum(axis=-1), (other == one).sum(axis=-1)
        # Equal values share what is left for them.
        weights = jnp.clip(count - smaller, 0, equal) / equal
        return jnp.where(weights > 0, weights * values, 0.0).sum(axis=-1) / count

    return jax.lax.cond(count > 1, several, lambda: values.min(axis=-1))


def over_tasks(function: Callable[..., Any], tasks: Any) -> Any:
    """Returns results [n, t, ...] of a function of one task, by `vmap` over several at a time."""
    count = len(jax.tree.leaves(tasks)[0])
    at_once = jax.vmap(function, out_axes=1)

    def in_groups(tasks: Any, size: int) -> Any:
        by_task = jax.lax.map(function, tasks, batch_size=size)
        return jax.tree.map(lambda values: jnp.moveaxis(values, 0, 1), by_task)

    if count <= ON_CPU:
        return at_once(tasks)
    elsewhere = at_once if count <= ELSEWHERE else partial(in_groups, size=ELSEWHERE)
    on_cpu = partial(in_groups, size=ON_CPU)
    return jax.lax.platform_dependent(tasks, cpu=on_cpu, default=elsewhere)


def in_groups(tasks: Sequence[Any], pack: Callable[[Sequence[Any], int], Any]) -> list[Any]:
    """Returns `pack(group, size)` of groups of tasks for `over_tasks`; sizes are few."""
    size = ON_CPU
    if jax.default_backend() != "cpu":
        size = min(ELSEWHERE, 1 << max(len(tasks) - 1, 7).bit_length())
    return [pack(tasks[start : start + size], size) for start in range(0, len(tasks), size)]


def register_tree(kind: type[msgspec.Struct]) -> None:
    """Makes structures of a kind trees of their fields, which compiled functions accept."""

    def restored(_: None, values: Any) -> Any:
        return kind(**dict(zip(kind.__struct_fields__, values, strict=True)))

    jax.tree_util.register_pytree_node(
        kind, lambda value: (msgspec.structs.astuple(value), None), restored
    )
