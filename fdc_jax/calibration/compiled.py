"""JAX helpers of all calibrators: few shapes, rows in blocks, and principal directions."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jaxtyping import Array, Float, Int

from fdc_jax.heads import products

# Rows of a block: few shapes occur, whatever the number of rows.
ROWS = (64, 512)


def padded_size(size: int, least: int = 1) -> int:
    """Returns the smallest of a few sizes that is at least `size` and `least`.

    There are four sizes per doubling up to 64, then eight, so that at most an eighth is padding.
    """
    size = max(size, least)
    step = max(1, 2 ** (size.bit_length() - (3 if size < 64 else 4)))
    return -(-size // step) * step


def padded(array: np.ndarray, size: int, fill: float = 0.0) -> np.ndarray:
    """Returns an array with its leading size padded."""
    widths = [(0, size - len(array)), *[(0, 0)] * (array.ndim - 1)]
    return np.pad(array, widths, constant_values=fill) if size > len(array) else array


def stack(arrays: Sequence[np.ndarray], size: int, fill: float = 0.0) -> np.ndarray:
    """Returns arrays of several leading sizes as one, each padded."""
    return np.stack([padded(np.asarray(array), size, fill) for array in arrays])


def to_device(count: int, array: Any) -> Array:
    """Returns an array on the device, in float32, padded with zeros to a leading size `count`."""
    return jax.device_put(padded(np.asarray(array, np.float32), count))


def squared_norm(vectors: Float[Array, "... d"]) -> Float[Array, "*n"]:
    """Returns squared Euclidean norms."""
    return (vectors * vectors).sum(axis=-1)


# Rows in blocks -----------------------------------------------------------------------------------


class Blocks:
    """Features on the device in blocks of rows, padded with zero rows to one of few sizes.

    NumPy arrays are moved to the device once, memory maps in each pass; JAX arrays stay in place.
    If rows are sharded over devices, each block has equally many rows of each shard.
    """

    def __init__(self, features: Any, shards: int = 1):
        self.features, self.shards, count = features, shards, len(features) // shards
        few, many = (max(rows // shards, 1) for rows in ROWS)
        self.rows = few if count < 2 * many else many
        self.starts = range(0, max(count, 1), self.rows)
        self.moved: list[Array] = []
        if not isinstance(features, np.memmap | jax.Array):
            self.moved = [*self]

    def __iter__(self) -> Iterator[Float[Array, "rows d"]]:
        if isinstance(self.features, jax.Array) and len(self.features):
            return (_cut(self.features, start, self.shards, self.rows) for start in self.starts)
        return iter(
            self.moved or map(jax.device_put, self.split_like(self.features, np.float32, 0.0))
        )

    def split_like(
        self, values: Any, kind: type = np.int32, fill: float = -1
    ) -> Iterator[Int[np.ndarray, "rows ..."]]:
        """Yields values [n, ...] in the same blocks, on the host; padding rows have `fill`."""
        by_shard = values.reshape(self.shards, len(values) // self.shards, *values.shape[1:])
        for start in self.starts:
            parts = np.asarray(by_shard[:, start : start + self.rows], kind)
            yield np.concatenate([padded(part, self.rows, fill) for part in parts])

    def gather(self, results: Sequence[Any]) -> Any:
        """Merges the results of all blocks into trees of host arrays [n, ...] without padding."""
        count = len(self.features)

        def whole(*parts: np.ndarray) -> np.ndarray:
            by_shard = [part.reshape(self.shards, -1, *part.shape[1:]) for part in parts]
            joined = np.concatenate(by_shard, axis=1)[:, : count // self.shards]
            return joined.reshape(count, *parts[0].shape[1:])

        return jax.tree.map(whole, *jax.device_get(results))


def blocks_of(views: Sequence[Any]) -> list[Blocks]:
    """Returns blocks of several views with the same rows."""
    shards = [
        len(view) // view.sharding.shard_shape(view.shape)[0]
        for view in views
        if isinstance(view, jax.Array) and len(view)
    ]
    return [Blocks(view, max(shards, default=1)) for view in views]


@partial(jax.jit, static_argnames=("shards", "rows"))
def _cut(features: Float[Array, "n d"], start: int, shards: int, rows: int) -> Any:
    parts = features.reshape(shards, -1, features.shape[1])
    index, last = start + jnp.arange(rows), parts.shape[1] - 1
    block = jnp.where((index <= last)[:, None], parts[:, jnp.minimum(index, last)], 0)
    return block.reshape(shards * rows, -1).astype(jnp.float32)


def map_blocks(function: Callable[..., Any], *columns: Iterable[Any]) -> list[Any]:
    """Returns the results of a function by block; at most three are computed at a time."""
    results: list[Any] = []
    for blocks in zip(*columns, strict=True):
        results.append(function(*blocks))
        jax.block_until_ready(results[-3:-2])
    return results


def in_blocks(kernel: Callable[..., Any], fitted: Any, *views: Float[Any, "n _"]) -> Any:
    """Returns a tree of arrays [n, ...]: `kernel(fitted, *views)`, computed in blocks of rows."""
    columns = blocks_of(views)
    return columns[0].gather(map_blocks(partial(jax.jit(kernel), fitted), *columns))


# Principal directions -----------------------------------------------------------------------------


def centred(features: Any, rows: Any, mean: Any) -> Float[Array, "n d"]:
    """Returns features less a mean, and zero for padding rows, which have -1 in `rows`."""
    return jnp.where(rows[:, None] >= 0, features - mean, 0.0)


def principal(
    views: Sequence[Blocks],
    rows: Int[np.ndarray, " n"],
    means: Sequence[Any],
    rank: Callable[[Float[np.ndarray, " k"]], int],
) -> list[Float[np.ndarray, "r d"]]:
    """Returns the leading principal directions of each view.

    `rank` returns their number from the energies in descending order. With n < d the inner products
    X X' are smaller than the scatter X' X: if X X' v = s v, then X' v is a direction of X' X. Views
    of one shape are decomposed together.
    """
    matrices, centred_rows = [], []
    for view, mean in zip(views, means, strict=True):
        blocks = zip(view, view.split_like(rows), strict=True)
        near, matrix = None, np.zeros((len(mean), len(mean)), np.float32)
        if len(view.starts) * view.rows * view.shards < len(mean):
            matrix, near = _inner_products([*blocks], mean)
        else:
            for block in blocks:
                matrix = jax.block_until_ready(_scatter(matrix, *block, mean))
        matrices.append(matrix)
        centred_rows.append(near)
    # XLA compiles `eigh` for a TPU for minutes, so that the host's CPU computes it there.
    if jax.default_backend() == "tpu":
        with contextlib.suppress(RuntimeError):  # no CPU in JAX_PLATFORMS
            matrices = jax.device_put(matrices, jax.local_devices(backend="cpu")[0])
    alike = len({matrix.shape for matrix in matrices}) == 1
    groups = [matrices] if alike else [[matrix] for matrix in matrices]
    pairs = [pair for group in groups for pair in zip(*jax.device_get(_eigh(group)), strict=True)]
    directions = []
    for (energies, vectors), matrix, near in zip(pairs, matrices, centred_rows, strict=True):
        vectors = _separated(vectors, jax.device_get(matrix), count := rank(energies))
        vectors = vectors if near is None else jax.device_get(_directions(vectors, near))
        directions.append(vectors[:count].copy())
    return directions


def _separated(
    vectors: Float[np.ndarray, "k k"], matrix: Float[np.ndarray, "k k"], count: int
) -> Float[np.ndarray, "k k"]:
    """Returns eigenvectors as rows, up to 16 on each side of row `count` recomputed in float64.

    Eigenvectors of nearly equal eigenvalues mix in float32: kept directions with discarded ones.
    """
    some = slice(max(count - 16, 0), count + 16)
    near = vectors[some].astype(float)
    turn = scipy.linalg.eigh(near @ matrix.astype(float) @ near.T, near @ near.T)[1]
    parts = vectors[: some.start], turn.T[::-1] @ near, vectors[some.stop :]
    return np.concatenate(parts).astype(np.float32)


@jax.jit
def _scatter(total: Any, features: Any, rows: Any, mean: Any) -> Float[Array, "d d"]:
    near = centred(features, rows, mean)
    return total + products(near.T, near.T)


@jax.jit
def _inner_products(blocks: Any, mean: Any) -> tuple[Array, Array]:
    near = jnp.concatenate([centred(features, rows, mean) for features, rows in blocks])
    return products(near, near), near


@jax.jit
def _eigh(matrices: Sequence[Float[Array, "k k"]]) -> tuple[Array, Array]:
    stacked = jnp.stack(matrices)
    traces = jnp.trace(stacked, axis1=1, axis2=2)[:, None, None]
    values, vectors = jax.vmap(jnp.linalg.eigh)(stacked / jnp.where(traces > 0, traces, 1.0))
    return values[:, ::-1], vectors.mT[:, ::-1]


@jax.jit
def _directions(vectors: Any, near: Any) -> Float[Array, "k d"]:
    # QR makes the directions orthogonal, which rounding may prevent.
    return jnp.linalg.qr(products(near.T, vectors))[0].T
