"""JAX helpers of all calibrators: rows in blocks, and principal directions."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jaxtyping import Array, Float

from fdc_jax.calibration.shapes import row_slices
from fdc_jax.heads import products, unit

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

# Shares of the variance that differ by less are equal but for rounding of float32, and variances of
# less than this share of the largest one are zero.
ROUNDING = 1e-6
# Rows of a scatter matrix that are computed together.
TILE = 256


def centred(features: Any, rows: Any, mean: Any) -> Float[Array, "n d"]:
    """Returns features less a mean, and zero for padding rows, which are 0 in `rows` [n, 1]."""
    return jnp.where(rows > 0, features - mean[None], 0.0)


def principal(
    view: Blocks, rows: Blocks, mean: Float[np.ndarray, " d"], shares: Sequence[float], near: int
) -> list[Float[np.ndarray, "r d"]]:
    """Returns the fewest principal directions with each share of the variance (Eq. task-pca).

    Directions of a smaller share are the first ones of a larger share. `rows`: see `centred`. The
    host decomposes the scatter, since XLA compiles `eigh` for a TPU for minutes; it saves time if
    the number of directions is `near`.
    """
    width = len(mean)
    if max(shares) > 1.0 - ROUNDING or len(view.features) < width:
        return _principal_in_float64(view, shares)
    matrix = np.zeros((width, width), np.float32)
    slices = row_slices(width, TILE)
    # Tiles below the diagonal are not computed.
    centre, tiles = jax.device_put((mean, [matrix[tile, tile.start :] for tile in slices]))
    for block, own in zip(view, rows, strict=True):
        tiles = _scatter(tiles, block, own, centre)
        if view.mapped:
            jax.block_until_ready(tiles)
    for tile, part in zip(slices, jax.device_get(tiles), strict=True):
        matrix[tile, tile.start :] = part
        matrix[tile.start :, tile] = part.T
    total = matrix.trace()
    first = max(width - 5 * near // 4 - 17, 0)
    variances, vectors = scipy.linalg.eigh(matrix, subset_by_index=(first, width - 1))
    if variances[16:].sum() < max(shares) * total:
        variances, vectors = scipy.linalg.eigh(matrix, driver="evd")
    directions = vectors.T[::-1].copy()
    ranks = retained_ranks(variances, total, ROUNDING * variances[-1], shares, len(view.features))
    for rank in ranks:
        _separate(directions, matrix, rank)
    return [directions[:rank] for rank in ranks]


def retained_ranks(
    variances: Float[np.ndarray, " k"],
    total: float,
    rounding: float,
    shares: Sequence[float],
    count: int,
) -> list[int]:
    """Returns how many of the last, ascending variances have each share of a total.

    They are at most those above `rounding`, and one less than the `count` of samples.
    """
    most = min(count - 1, int((variances > rounding).sum()))
    reached = np.cumsum(variances[::-1], dtype=float)
    ranks = []
    for share in shares:
        enough = (share - ROUNDING) * total if share <= 1.0 - ROUNDING else np.inf
        ranks.append(min(int((reached < enough).sum()) + 1, most))
    return ranks


def _principal_in_float64(view: Blocks, shares: Sequence[float]) -> list[Float[np.ndarray, "r d"]]:
    """Returns `principal`, in float64: float32 rounds away the least variances.

    With n < d the inner products X X' are smaller than the scatter X' X: if X X' v = s v, then
    X' v is a direction of X' X.
    """
    features = np.asarray(jax.device_get(view.features), float)
    near = features - features.mean(axis=0)
    few = len(near) < near.shape[1]
    variances, vectors = scipy.linalg.eigh(near @ near.T if few else near.T @ near)
    directions = (near.T @ vectors if few else vectors).T[::-1]
    rounding = 2.0**-46 * np.square(features).sum()
    ranks = retained_ranks(variances, variances.sum(), rounding, shares, len(features))
    return [np.ascontiguousarray(unit(directions[:rank]), np.float32) for rank in ranks]


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
def _scatter(tiles: Any, features: Any, rows: Any, mean: Any) -> list[Array]:
    near = centred(features, rows, mean).T
    pairs = zip(tiles, row_slices(len(near), TILE), strict=True)
    return [total + products(near[tile], near[tile.start :]) for total, tile in pairs]
