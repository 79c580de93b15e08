"""Where the arithmetic of calibrators runs: compiled by JAX once per shape, or in NumPy alone.

A kernel is a function of one task's arrays over the namespace that these belong to. JAX maps it
over tasks with `vmap`, for which ranks, classes and tasks are padded to few sizes; NumPy, where JAX
is not installed, takes one task after the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from fdc_jax.calibration.inputs import BLOCK_ROWS, float32

try:
    import jax
    import jax.numpy as jnp
except ImportError:
    jax: Any = None
    jnp = np

if TYPE_CHECKING:
    from jaxtyping import Float

# Rows per call of a kernel; fewer are padded to a power of two, at least 8.
ROWS = 512


def padded_size(size: int, least: int = 1) -> int:
    """Returns a size not below `size` and `least`, one of few per doubling, so that shapes recur.

    They are four, and eight from 64 on. At most a quarter above `least` is padding, an eighth from
    64 on, and the number of different shapes, each of which compiles anew, grows with the logarithm
    of the largest size.
    """
    size = max(size, least)
    step = max(1, 2 ** (size.bit_length() - (3 if size < 64 else 4)))
    return -(-size // step) * step


def stack(
    arrays: Sequence[Any],
    least: int | None = None,
    fill: float = 0.0,
    plain: bool = False,
    turned: bool = True,
) -> Any:
    """Returns the arrays of all tasks as one for `over_tasks`.

    Args:
        arrays: of one shape or, with `least`, of different leading sizes.
        least: pad the leading size to `padded_size(_, least)`.
        fill: the padding. A task that is not there is all zero.
        plain: for NumPy, as where JAX is not installed: a list of the tasks' arrays, and no size
            larger than the largest.
        turned: matrices become [d, tasks, rows], so that rows of all tasks are one without a copy.
    """
    plain, shape, tasks = plain or not jax, np.shape(arrays[0]), len(arrays)
    if least is not None:
        size = max(map(len, arrays))
        shape = (size if plain else padded_size(size, least), *shape[1:])
    if tasks > 1 and not plain:
        tasks = padded_size(tasks, 8)
    stacked = np.full((tasks, *shape), fill, np.float32)
    stacked[len(arrays) :] = 0.0
    for task, array in enumerate(arrays):
        stacked[(task, slice(len(array))) if shape else task] = array
    if plain:
        return list(stacked)
    turned = turned and stacked.ndim == 3
    return jax.device_put(stacked.transpose(2, 0, 1).copy() if turned else stacked)


def over_tasks(function: Callable[..., tuple[Any, ...]], *arrays: Any) -> tuple[Any, ...]:
    """Applies a function of one task's arrays to all tasks; results are [n, tasks, ...]."""
    if isinstance(arrays[0], list):
        results = [function(*each) for each in zip(*arrays, strict=True)]
        return tuple(np.stack(parts, axis=1) for parts in zip(*results, strict=True))

    def of_task(*each: Any) -> tuple[Any, ...]:
        return function(*(array.T for array in each))

    axes = [1 if array.ndim == 3 else 0 for array in arrays]
    return jax.vmap(of_task, axes, 1)(*arrays)


@cache
def _jitted(kernel: Callable[..., Any], static: tuple[str, ...]) -> Callable[..., Any]:
    return jax.jit(kernel, static_argnames=static)


def in_blocks(
    kernel: Callable[..., Any],
    fitted: Any,
    *views: Float[np.ndarray, "n _"],
    plain: bool = False,
    **static: Any,
) -> Any:
    """Returns arrays [n, ...], or several by name: a kernel of `fitted` and of rows of features.

    It takes some rows of all `views` at once; zero rows fill blocks up to a power of two, so that
    few sizes occur. All blocks are handed over before the first result is fetched. NumPy computes
    if `plain`, as where JAX is not installed.
    """
    plain = plain or not jax
    found, sizes, step = [], [], BLOCK_ROWS if plain else ROWS
    count = max(len(views[0]), 1)
    least = 8 if count <= ROWS else ROWS
    for start in range(0, count, step):
        parts = [float32(view[start : start + step]) for view in views]
        sizes.append(len(parts[0]))
        if plain:
            found.append(kernel(fitted, *parts, **static))
            continue
        rows = max(least, 1 << max(sizes[-1] - 1, 0).bit_length())
        padded = [np.pad(part, ((0, rows - len(part)), (0, 0))) for part in parts]
        found.append(_jitted(kernel, tuple(static))(fitted, *padded, **static))
    fetched: list[Any] = found if plain else jax.device_get(found)

    def joined(*parts: Any) -> Any:
        if isinstance(parts[0], dict):
            return {name: joined(*(part[name] for part in parts)) for name in parts[0]}
        return np.concatenate([part[:size] for part, size in zip(parts, sizes, strict=True)])

    return joined(*fetched)


def eigh(matrix: Float[np.ndarray, "k k"]) -> tuple[np.ndarray, np.ndarray]:
    """Returns eigenvalues of a symmetric matrix, descending, and its eigenvectors as rows."""
    # Numbers near one, whatever the features' unit; and few sizes, since each compiles anew. The
    # padding's own eigenvalues are zero.
    size, scale = len(matrix), np.trace(matrix) or 1.0
    padded = np.zeros((-(-size // 64) * 64,) * 2, np.float32)
    padded[:size, :size] = matrix / scale
    with jax.default_device(_host()) if jax else contextlib.nullcontext():
        values, vectors = map(np.asarray, jnp.linalg.eigh(padded))
    return scale * values[::-1][:size].astype(np.float64), vectors.T[::-1][:size, :size]


@cache
def _host() -> Any:
    """Returns the host's processor where the device is a TPU and JAX has both, else None.

    XLA compiles an eigendecomposition for a TPU for minutes, and for every size anew.
    """
    try:
        return jax.local_devices(backend="cpu")[0] if jax.default_backend() == "tpu" else None
    except RuntimeError:  # Left out of JAX_PLATFORMS.
        return None
