"""Helpers of all calibrators for JAX: few shapes, rows in blocks, and principal directions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jaxtyping import Array, Float, Int

from fdc_jax.heads import products

# Rows of a block: few shapes occur, whatever the number of rows.
ROWS = (8, 64, 512)


def padded_size(size: int, least: int = 1) -> int:
    """Returns a size not below `size` and `least`, one of few per doubling, so that shapes recur.

    They are four, and eight from 64 on. At most a quarter above `least` is padding, an eighth from
    64 on, and the number of different shapes, each of which compiles anew, grows with the logarithm
    of the largest size.
    """
    size = max(size, least)
    step = max(1, 2 ** (size.bit_length() - (3 if size < 64 else 4)))
    return -(-size // step) * step


def padded(array: np.ndarray, size: int, fill: float = 0.0) -> np.ndarray:
    """Returns an array whose leading size is padded."""
    if len(array) == size:
        return array
    widths = [(0, size - len(array)), *[(0, 0)] * (array.ndim - 1)]
    return np.pad(array, widths, constant_values=fill)


def stack(arrays: Sequence[np.ndarray], size: int, fill: float = 0.0) -> np.ndarray:
    """Returns arrays of different leading sizes as one."""
    return np.stack([padded(np.asarray(array), size, fill) for array in arrays])


def placed(count: int, array: Any) -> Array:
    """Returns an array on the device, in float32, padded with zeros."""
    return jax.device_put(padded(np.asarray(array, np.float32), count))


def energy(vectors: Float[Array, "... d"]) -> Float[Array, "*n"]:
    """Returns squared Euclidean norms."""
    return (vectors * vectors).sum(axis=-1)


class Blocks:
    """Features on the device, a block of rows at a time, padded with zero rows to few sizes.

    NumPy arrays are moved; with `keep` the device keeps them for further passes. Memory maps are
    read again in each pass. JAX arrays stay where they are. If devices share the rows of an array,
    each block has equally many rows of each of these `shards` and stays shared.
    """

    def __init__(self, features: Any, shards: int = 1, keep: bool = False):
        self.features, self.count, self.shards = features, len(features), shards
        size = self.count // shards
        fewest, few, many = (max(rows // shards, 1) for rows in ROWS)
        self.rows = fewest if size <= fewest else few if size < 2 * many else many
        keep = keep and not isinstance(features, np.memmap | jax.Array)
        self._kept = [*self._blocks()] if keep else None

    def __iter__(self) -> Iterator[Float[Array, "rows d"]]:
        return self._blocks() if self._kept is None else iter(self._kept)

    def _blocks(self) -> Iterator[Float[Array, "rows d"]]:
        if isinstance(self.features, jax.Array) and self.count:
            for start in self._starts():
                yield _cut(self.features, start, self.shards, self.rows)
        else:
            yield from map(jax.device_put, self._cut_on_host(self.features, np.float32, 0.0))

    def beside(self, values: Int[np.ndarray, " n"]) -> Iterator[Int[np.ndarray, " rows"]]:
        """Yields the values of each block's rows, -1 for padding rows."""
        return self._cut_on_host(values, np.int32, -1)

    def _starts(self) -> range:
        return range(0, max(self.count // self.shards, 1), self.rows)

    def _cut_on_host(self, array: Any, kind: type, fill: float) -> Iterator[np.ndarray]:
        apart = array.reshape(self.shards, self.count // self.shards, *array.shape[1:])
        for start in self._starts():
            parts = np.asarray(apart[:, start : start + self.rows], kind)
            whole = [padded(part, self.rows, fill) for part in parts]
            yield np.concatenate(whole) if self.shards > 1 else whole[0]

    def first(self) -> Float[np.ndarray, " d"]:
        """Returns the first row on the host."""
        on_device = isinstance(self.features, jax.Array)
        return np.asarray(
            jax.device_get(next(iter(self))) if on_device else self.features[:1], np.float32
        )[0]

    def gather(self, results: Sequence[Any]) -> Any:
        """Returns trees of arrays [n, ...] on the host from those of every block."""

        def whole(*parts: np.ndarray) -> np.ndarray:
            apart = [part.reshape(self.shards, -1, *part.shape[1:]) for part in parts]
            joined = np.concatenate(apart, axis=1)[:, : self.count // self.shards]
            return joined.reshape(self.count, *parts[0].shape[1:])

        return jax.tree.map(whole, *jax.device_get(results))


def blocks_of(views: Sequence[Any], keep: bool = False) -> list[Blocks]:
    """Returns blocks of several views with the same rows."""
    shards = [
        len(view) // view.sharding.shard_shape(view.shape)[0]
        for view in views
        if isinstance(view, jax.Array) and len(view)
    ]
    return [Blocks(view, max(shards, default=1), keep) for view in views]


@partial(jax.jit, static_argnames=("shards", "rows"))
def _cut(features: Float[Array, "n d"], start: int, shards: int, rows: int) -> Any:
    parts = features.reshape(shards, -1, features.shape[1])
    index, last = start + jnp.arange(rows), parts.shape[1] - 1
    block = jnp.where((index <= last)[:, None], parts[:, jnp.minimum(index, last)], 0)
    return block.reshape(shards * rows, -1).astype(jnp.float32)


def in_order(function: Callable[..., Any], *columns: Iterable[Any]) -> list[Any]:
    """Returns the results of block after block; at most three are under way at a time."""
    results: list[Any] = []
    for blocks in zip(*columns, strict=True):
        results.append(function(*blocks))
        jax.block_until_ready(results[-3:-2])
    return results


@cache
def _jitted(kernel: Callable[..., Any], static: tuple[str, ...]) -> Callable[..., Any]:
    return jax.jit(kernel, static_argnames=static)


def in_blocks(
    kernel: Callable[..., Any], fitted: Any, *views: Float[np.ndarray, "n _"], **static: Any
) -> Any:
    """Returns arrays [n, ...], or a tree of them: a jitted kernel of `fitted` and rows of views."""
    jitted, columns = partial(_jitted(kernel, tuple(static)), fitted, **static), blocks_of(views)
    return columns[0].gather(in_order(jitted, *columns))


def first_not_finite(features: Array) -> int | None:
    """Returns the first row on the device that is not finite in float32; None if all are."""
    (blocks,) = blocks_of([features])
    finite = blocks.gather(in_order(_finite, blocks))
    return None if finite.all() else int(np.argmin(finite))


@jax.jit
def _finite(block: Float[Array, "n d"]) -> Array:
    return jnp.isfinite(energy(block))


# Principal directions -----------------------------------------------------------------------------


def centred(features: Any, rows: Any, mean: Any) -> Float[Array, "n d"]:
    """Returns features less a mean; padding rows, whose row is -1, are zero."""
    return jnp.where(rows[:, None] >= 0, features - mean, 0.0)


def principal(
    views: Sequence[Blocks],
    rows: Int[np.ndarray, " n"],
    means: Sequence[Any],
    rank: Callable[[Float[np.ndarray, " k"]], int],
) -> list[Float[np.ndarray, "r d"]]:
    """Returns the leading principal directions of each view: `rank` of the energies, descending.

    With n < d the inner products X X' are smaller than the scatter X' X: if X X' v = s v, then X' v
    is a direction of X' X. Views of one shape are decomposed together.
    """
    matrices, kept = [], []
    for view, mean in zip(views, means, strict=True):
        blocks, rest = zip(view, view.beside(rows), strict=True), None
        if len(rows) < len(mean):
            size = -(-len(rows) // 64) * 64 if view.shards == 1 else None
            matrix, rest = _inner_products([*blocks], mean, size)
        else:
            matrix = np.zeros((len(mean), len(mean)), np.float32)
            for block in blocks:
                matrix = jax.block_until_ready(_scatter(matrix, *block, mean))
        matrices.append(matrix)
        kept.append(rest)
    # XLA compiles `eigh` for a TPU for minutes, so that the host's CPU computes it there.
    if jax.default_backend() == "tpu":
        with contextlib.suppress(RuntimeError):  # no CPU in JAX_PLATFORMS
            matrices = jax.device_put(matrices, jax.local_devices(backend="cpu")[0])
    alike = len({matrix.shape for matrix in matrices}) == 1
    together = [matrices] if alike else [[matrix] for matrix in matrices]
    found = [jax.device_get(_eigh(each)) for each in together]
    pairs = [pair for energies, vectors in found for pair in zip(energies, vectors, strict=True)]
    directions = []
    for (energies, vectors), matrix, rest in zip(pairs, matrices, kept, strict=True):
        vectors = _separated(vectors, jax.device_get(matrix), count := rank(energies))
        vectors = vectors if rest is None else jax.device_get(_directions(vectors, rest))
        directions.append(vectors[:count].copy())
    return directions


def _separated(
    vectors: Float[np.ndarray, "k k"], matrix: Float[np.ndarray, "k k"], count: int
) -> Float[np.ndarray, "k k"]:
    """Returns eigenvectors after a second decomposition, in float64, within 32 about row `count`.

    In float32 eigenvectors of nearly equal eigenvalues mix; at row `count` kept ones would mix with
    others.
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


@partial(jax.jit, static_argnames="size")
def _inner_products(blocks: Any, mean: Any, size: int | None) -> tuple[Array, Array]:
    near = jnp.concatenate([centred(of, numbers, mean) for of, numbers in blocks])[:size]
    return products(near, near), near


@jax.jit
def _eigh(matrices: Sequence[Float[Array, "k k"]]) -> tuple[Array, Array]:
    def one(matrix: Float[Array, "k k"]) -> tuple[Array, Array]:
        trace = jnp.trace(matrix)
        values, vectors = jnp.linalg.eigh(matrix / jnp.where(trace > 0, trace, 1.0))
        return values[::-1], vectors.T[::-1]

    return jax.vmap(one)(jnp.stack(matrices))


@jax.jit
def _directions(vectors: Any, near: Any) -> Float[Array, "k d"]:
    # QR takes out of each direction what rounding left of the directions before it.
    return jnp.linalg.qr(products(near.T, vectors))[0].T
