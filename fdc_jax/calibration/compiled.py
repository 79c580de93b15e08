"""JAX helpers of all calibrators: rows in blocks, and principal directions."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jaxtyping import Array, Float

from fdc_jax.calibration.shapes import row_slices
from fdc_jax.heads import products

# Rows of a block: few shapes occur, whatever the number of rows.
ROWS = (64, 512)
# Blocks of memory maps whose results are computed at a time.
IN_MEMORY = 4


# Rows in blocks -----------------------------------------------------------------------------------


class Blocks:
    """Features on the device in blocks of rows, padded with zero rows to one of few sizes.

    Arrays are cut, and moved to the device if they are NumPy's, once; memory maps in each pass. If
    rows are sharded over devices, each block has equally many rows of each shard.
    """

    def __init__(self, features: Any, shards: int = 1):
        self.features = features
        self.shards = shards
        count = len(features) // shards
        few, many = (max(rows // shards, 1) for rows in ROWS)
        self.rows = few if count < 2 * many else many
        self.starts = range(0, max(count, 1), self.rows)
        self.mapped = isinstance(features, np.memmap)
        self._moved = None if self.mapped else [*self._move()]

    def __iter__(self) -> Iterator[Float[Array, "rows d"]]:
        return iter(self._moved or self._move())

    def _move(self) -> Iterator[Float[Array, "rows d"]]:
        if isinstance(self.features, jax.Array) and len(self.features):
            for start in jax.device_put([*map(np.int32, self.starts)]):
                yield _cut(self.features, start, self.shards, self.rows)
            return
        count, width = self.features.shape
        by_shard = self.features.reshape(self.shards, count // self.shards, width)
        for start in self.starts:
            block = np.zeros((self.shards, self.rows, width), np.float32)
            rows = by_shard[:, start : start + self.rows]
            block[:, : rows.shape[1]] = rows
            yield jax.device_put(block.reshape(-1, width))

    def gather(self, results: Sequence[Any]) -> Any:
        """Merges the results of all blocks into trees of host arrays [n, ...] without padding."""
        count = len(self.features)

        def whole(*parts):
            by_shard = [part.reshape(self.shards, -1, *part.shape[1:]) for part in parts]
            joined = np.concatenate(by_shard, axis=1)[:, : count // self.shards]
            return joined.reshape(count, *joined.shape[2:])

        return jax.tree.map(whole, *jax.device_get(results))


def blocks_of(views: Sequence[Any]) -> list[Blocks]:
    """Returns blocks of several views with the same rows."""
    shards = [
        len(view) // view.sharding.shard_shape(view.shape)[0]
        for view in views
        if isinstance(view, jax.Array) and len(view)
    ]
    return [Blocks(view, max(shards, default=1)) for view in views]


def map_blocks(function: Callable[..., Any], *blocks: Blocks) -> list[Any]:
    """Returns the results of a function by block; of memory maps, few blocks are in memory."""
    mapped = any(view.mapped for view in blocks)
    results: list[Any] = []
    for parts in zip(*blocks, strict=True):
        results.append(function(*parts))
        if mapped:
            jax.block_until_ready(results[-IN_MEMORY:][0])
    return results


@partial(jax.jit, static_argnames=("shards", "rows"))
def _cut(features: Float[Array, "n d"], start: Any, shards: int, rows: int) -> Any:
    parts = features.reshape(shards, -1, features.shape[1])
    block = parts.at[:, start + jnp.arange(rows)].get(mode="fill", fill_value=0)
    return block.reshape(shards * rows, -1).astype(jnp.float32)


# Principal directions -----------------------------------------------------------------------------

# Shares of the variance that differ by less are equal up to float32 rounding. Variances below this
# share of the largest one are zero.
ROUNDING = 1e-6
# Rows of a scatter matrix that are computed together.
TILE = 256


def centred(features: Any, rows: Any, mean: Any) -> Float[Array, "n d"]:
    """Returns features less a mean, and zero for padding rows, which are 0 in `rows` [n, 1]."""
    return jnp.where(rows > 0, features - mean[None], 0.0)


def principal(
    views: Sequence[Blocks],
    rows: Blocks,
    means: Sequence[Float[np.ndarray, " d"]],
    shares: Sequence[float],
) -> list[list[Float[np.ndarray, "r d"]]]:
    """Returns by view the fewest principal directions with each share of the variance.

    Directions of a smaller share are the first ones of a larger share (Eq. task-pca). `rows`: see
    `centred`.
    """
    count = len(rows.features)
    # Float32 rounds away the least variances, which decide here.
    exact = max(shares) > 1.0 - ROUNDING or count < max(map(len, means))
    scatter = _scatter_in_float64 if exact else _scatter
    matrices = [scatter(view, rows, mean) for view, mean in zip(views, means, strict=True)]
    bases = []
    decompositions = zip(matrices, means, decomposed(matrices), strict=True)
    for matrix, mean, (variances, vectors) in decompositions:
        rounding = ROUNDING * variances[0]
        if exact:
            rounding = 2.0**-46 * (variances.sum() + count * np.square(mean, dtype=float).sum())
        ranks = retained_ranks(variances, rounding, shares, count)
        for rank in ranks:
            _separate(vectors, matrix, rank)
        bases.append([vectors[:rank].astype(np.float32) for rank in ranks])
    return bases


def _scatter(view: Blocks, rows: Blocks, mean: Any) -> Float[np.ndarray, "d d"]:
    """Returns the sum of outer products of features less their mean."""
    shape = 2 * mean.shape
    centre, total = jax.device_put((mean, np.zeros(shape, np.float32)))
    for block, own in zip(view, rows, strict=True):
        total = _add_products(total, block, own, centre)
        if view.mapped:
            jax.block_until_ready(total)
    upper = jax.device_get(total)
    return np.where(np.tri(*shape, dtype=bool), upper.T, upper)


def _scatter_in_float64(view: Blocks, *_: Any) -> Float[np.ndarray, "d d"]:
    features = np.asarray(jax.device_get(view.features), float)
    near = features - features.mean(axis=0)
    return near.T @ near


def decomposed(
    matrices: Sequence[Float[np.ndarray, "d d"]],
) -> list[tuple[Float[np.ndarray, " d"], Float[np.ndarray, "d d"]]]:
    """Returns eigenvalues in descending order, and eigenvectors as rows, of symmetric matrices."""
    device = None
    if jax.default_backend() == "tpu":  # for which XLA compiles `eigh` for minutes
        with contextlib.suppress(RuntimeError):  # no CPU in JAX_PLATFORMS
            device = jax.local_devices(backend="cpu")[0]
    groups = itertools.groupby(matrices, np.shape)
    with jax.enable_x64(True):  # for matrices in float64
        stacks = jax.device_put([np.stack([*alike]) for _, alike in groups], device)
        decompositions = jax.device_get([*map(_eigh, stacks)])
    pairs = []
    for values_and_vectors in decompositions:
        pairs += zip(*map(np.array, values_and_vectors), strict=True)
    return pairs


@jax.jit
def _eigh(matrices: Float[Array, "v d d"]) -> tuple[Array, Array]:
    values, vectors = jax.vmap(jnp.linalg.eigh)(matrices)
    return values[:, ::-1], vectors.mT[:, ::-1]


def retained_ranks(
    variances: Float[np.ndarray, " d"], rounding: float, shares: Sequence[float], count: int
) -> list[int]:
    """Returns how many of descending variances have each share of their sum.

    They are at most those above `rounding`, and one less than the `count` of samples.
    """
    most = min(count - 1, int((variances > rounding).sum()))
    reached = np.cumsum(variances, dtype=float)
    wanted = np.array(shares)[:, None] - ROUNDING
    enough = np.where(wanted > 1.0 - 2 * ROUNDING, np.inf, wanted * reached.max())
    return np.minimum((reached < enough).sum(axis=1) + 1, most).tolist()


def _separate(
    vectors: Float[np.ndarray, "k d"], matrix: Float[np.ndarray, "d d"], count: int
) -> None:
    """Replaces up to 16 eigenvectors on each side of row `count` by those in float64.

    Eigenvectors of nearly equal eigenvalues mix in float32: kept directions with discarded ones.
    """
    some = slice(max(count - 16, 0), count + 16)
    near = vectors[some].astype(float)
    turn = scipy.linalg.eigh(near @ matrix.astype(float) @ near.T, near @ near.T)[1]
    vectors[some] = turn.T[::-1] @ near


@partial(jax.jit, donate_argnums=0)
def _add_products(total: Any, features: Any, rows: Any, mean: Any) -> Float[Array, "d d"]:
    near = centred(features, rows, mean).T
    for tile in row_slices(len(near), TILE):  # None is below the diagonal.
        total = total.at[tile, tile.start :].add(products(near[tile], near[tile.start :]))
    return total
