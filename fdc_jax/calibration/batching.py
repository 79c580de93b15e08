"""From one task to all of them, and from rows to batches: padding, mapping, compiling, fetching.

Kernels are functions of one task's arrays over the namespace that these belong to. JAX maps them
over tasks and compiles them once per shape; NumPy takes one task after the other, without padding.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from fdc_jax.calibration import inputs
from fdc_jax.heads import namespace

try:
    import jax
    import jax.numpy as jnp
except ImportError:  # NumPy alone scores, too.
    jax: Any = None
    jnp = np

if TYPE_CHECKING:
    from jaxtyping import Float

_LOGGER = logging.getLogger("fdc_jax.calibration")

# Tasks that a kernel takes at once, which bounds its memory.
TASK_GROUP = 64


def padded_size(size: int, least: int = 1) -> int:
    """Returns a size not below `size` and `least`, one of four per doubling, so that shapes recur.

    At most a quarter above `least` is padding, and the number of different shapes, each of which
    compiles anew, grows with the logarithm of the largest size.
    """
    size = max(size, least)
    step = max(1, 2 ** (size.bit_length() - 3))
    return -(-size // step) * step


def stack(
    arrays: Sequence[Any],
    least: int | None = None,
    fill: float = 0.0,
    xp: Any = np,
) -> Any:
    """Returns the arrays of all tasks as one, padded to few sizes.

    The number of tasks is padded, too, but neither a single one nor where NumPy computes, which has
    no use for it.

    Args:
        arrays: of one shape or, with `least`, of different leading sizes.
        least: pad the leading size to `padded_size(_, least)`.
        fill: the padding.
        xp: `numpy` or `jax.numpy`.
    """
    shape = np.shape(arrays[0])
    if least is not None:
        shape = (padded_size(max(map(len, arrays)), least), *shape[1:])
    tasks = padded_size(len(arrays), 8) if xp is not np and len(arrays) > 1 else len(arrays)
    stacked = np.full((tasks, *shape), fill, np.float32)
    if least is not None:
        stacked[len(arrays) :] = 0.0  # A task that is not there is finite.
    for task, array in enumerate(arrays):
        stacked[(task, slice(len(array))) if shape else task] = array
    return stacked if xp is np else jax.device_put(stacked)


def over_tasks(function: Callable[..., tuple[Any, ...]], *arrays: Any) -> tuple[Any, ...]:
    """Applies a function of one task's arrays to all tasks; results are [n, tasks, ...]."""
    if namespace(arrays[0]) is np:
        results = [function(*each) for each in zip(*arrays, strict=True)]
        return tuple(np.stack(parts, axis=1) for parts in zip(*results, strict=True))
    if len(arrays[0]) <= TASK_GROUP:
        return jax.vmap(function, out_axes=1)(*arrays)
    results = jax.lax.map(lambda each: function(*each), arrays, batch_size=TASK_GROUP)
    return tuple(jnp.swapaxes(each, 0, 1) for each in results)


@cache
def compiled(kernel: Callable[..., Any], static: tuple[str, ...] = ()) -> Callable[..., Any]:
    """Returns a kernel as JAX compiles it, once per shape."""
    return jax.jit(kernel, static_argnames=static)


@contextlib.contextmanager
def off_tpus() -> Iterator[None]:
    """Computes on the host's processor inside, where the device is a TPU.

    XLA compiles an eigendecomposition for a TPU for minutes, and for every size anew.
    """
    if jax is None or jax.default_backend() != "tpu" or (host := _host()) is None:
        yield
        return
    with jax.default_device(host):
        yield


@cache
def _host() -> Any:
    """Returns the processor as a device, or None where JAX has none; says so once."""
    try:
        host = jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        _LOGGER.warning(
            "statistics are fitted on the TPU, for which decompositions compile for minutes; "
            "JAX_PLATFORMS=tpu,cpu lets them be fitted on the host"
        )
        return None
    _LOGGER.warning("statistics are fitted on the host's processor, since the device is a TPU")
    return host


def fetch(batches: Sequence[tuple[Any, ...]], sizes: Sequence[int]) -> list[np.ndarray]:
    """Fetches results of several batches from the device at once; returns their columns, joined.

    Args:
        batches: arrays [padded, ...], the same number in every batch.
        sizes: how many rows of each batch are no padding.
    """
    fetched = batches if jax is None else jax.device_get(list(batches))
    columns = zip(*fetched, strict=True)
    return [
        np.concatenate([part[:size] for part, size in zip(column, sizes, strict=True)])
        for column in columns
    ]


def run(xp: Any, kernel: Callable[..., Any], *arguments: Any, **static: Any) -> Any:
    """Runs a kernel with a namespace: compiled by JAX, or as it is where NumPy computes."""
    if xp is np:
        # What is too large for float32 is reported by name afterwards.
        with np.errstate(over="ignore", invalid="ignore"):
            return kernel(*arguments, **static)
    return compiled(kernel, tuple(static))(*arguments, **static)


def place(xp: Any, features: Float[Any, "n d"], least: int) -> Float[Any, "padded d"]:
    """Returns float32 features for the kernels; for JAX zero rows fill up a power of two.

    That is at least `least`.
    """
    if xp is np:
        return inputs.float32(np.asarray(features))
    rows = max(least, 1 << max(len(features) - 1, 0).bit_length())
    missing = ((0, rows - len(features)), (0, 0))
    if isinstance(features, jax.Array):
        return jnp.pad(features.astype(jnp.float32), missing)
    return jax.device_put(np.pad(inputs.float32(features), missing))
