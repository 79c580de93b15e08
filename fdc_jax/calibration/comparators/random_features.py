"""Ridge regression on random features: RanPAC and AnaCP.

Random features and their products are float32 in JAX, sums and solves float64 on the host, since a
Gram matrix of thousands of correlated features has a condition number far beyond float32. This
matrix is by far the largest array: products are added by tiles, and the solve makes one copy.
"""

from functools import cached_property, lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jaxtyping import Array, Float, Int

from fdc_jax.calibration.comparators.base import Comparator, within_classes
from fdc_jax.calibration.inputs import BLOCK_ROWS, NotApplicable, float32, in_blocks, whole_number
from fdc_jax.calibration.shapes import row_slices
from fdc_jax.heads import products, unit

_products = jax.jit(products)
MOST = 2**31 - 1  # random features
RIDGES = 10.0 ** np.arange(-8, 9)
# Rows and columns of a Gram matrix that are computed together.
TILE = 2048


class RanPAC(Comparator):
    """Ridge regression to one-hot labels on h = relu(g R), with R a Gaussian d x M matrix.

    McDonnell et al., "RanPAC: Random Projections and Pre-trained Models for Continual Learning"
    (2023). G += h'h and Q += h'Y over tasks; W = (G + lambda I)^-1 Q. Lambda is the one of 10^-8 ..
    10^8 with the least squared error on the last 20 % of the last task's samples, after a shuffle
    and a fit to the first 80 %. A task of one sample keeps the lambda so far, 1 at the start.

    Lambda is at least the float32 machine epsilon times the trace of G: with fewer samples than M,
    rounding turns zero eigenvalues into eigenvalues of that size. Code that chooses lambda in
    float32 sees these errors and avoids such a lambda.

    Args:
        view: "adapted" or "pretrained".
        projections: M. The paper's 10,000 takes 2.2 GB of host memory.
        seed: of R, which is not stored, and of the shuffles.
    """

    name = "ranpac"

    def __init__(self, view: str = "adapted", projections: int = 10_000, seed: int = 0):
        super().__init__(view)
        self.projections = whole_number(projections, "projections", 1, MOST)
        self.ridge = 1.0
        self.seed = whole_number(seed, "seed", 0)

    def _collect(self, features, rows, head) -> Float[np.ndarray, "m c"]:
        projection = self._projection(features)
        # The seed draws R first, then the shuffle of every task.
        random = np.random.default_rng(self.seed)
        if projection is not None:
            random.standard_normal(projection.shape, np.float32)
        sizes = [*(counts.sum() for counts in self.counts), len(rows)]
        order = [random.permutation(size) for size in sizes][-1]
        onehot = _onehot(rows[order])
        hidden = in_blocks(_hidden, projection, features[order])
        self.ridge = chosen_ridge(hidden, onehot, self.ridge)
        self.total = with_gram(self.total, hidden)
        self.ridge = max(self.ridge, float(np.finfo(np.float32).eps * np.trace(self.total)))
        return _sums(hidden, onehot)

    @cached_property
    def _solved(self) -> Float[Array, "m classes"]:
        targets = np.concatenate(self.statistics, axis=1)
        return jax.device_put(float32(solve_ridge(self.total, self.ridge, targets)))

    def _class_scores(self, features: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n classes"]:
        fitted = self._projection(features), self._solved
        return in_blocks(_ridge_scores, fitted, features)

    def _projection(self, features: Float[np.ndarray, "n d"]) -> Float[Array, "d m"] | None:
        return _gaussians(self.seed, (features.shape[1], self.projections))[0]


class Ridge(RanPAC):
    """RanPAC on the features themselves, h = (g, 1); ACIL (Zhuang et al., 2022) adds a layer."""

    name = "ridge"

    def _projection(self, features: Float[np.ndarray, "n d"]) -> None:
        return None


class AnaCP(Comparator):
    """A ridge classifier on features that ridge maps pull towards spread-out class means.

    Momeni et al., "AnaCP: Toward Upper-Bound Continual Learning via Analytic Contrastive
    Projection" (2025). With x = g/|g|, class means m_c, and S the pooled within-class scatter of x
    over the sample count, plus 1e-4 I:

    1. Targets: centred class means times S^-1/2; their singular values plus 1; times S^1/2; the
       centre added again; normalised.
    2. For each of several heads: z = gelu(x A'), A Gaussian D x d; ridge map from z to the target
       of the sample's class; outputs normalised, then averaged over heads.
    3. Classifier: Gaussian pseudo-features N(m_c, S) per class through step 2, then
       gelu(. B') with B Gaussian D x d and ridge regression to one-hot labels.

    Statistics of steps 1 and 2 accumulate over tasks; the maps are solved in `finalize`. Scores
    depend on the seed, as step 3 samples. This is the paper; the authors' code multiplies by S^-1/2
    again instead of S^1/2, weights the old covariance by a count with the new task, adds 1e-4 I for
    the first task alone, and adds 1 also to the singular value that is zero since the means are
    centred, which moves all targets along a direction of rounding errors.

    Args:
        view: "adapted" or "pretrained"; the method is meant for features that do not move.
        projections: D. The default takes 1.5 GB of host memory.
        seed: of the random matrices and the pseudo-features.
    """

    name = "anacp"
    num_heads = 3  # of step 2
    ridge = 100.0  # of steps 2 and 3
    samples_per_class = 100  # of step 3
    jitter = 1e-4  # on the diagonal of S

    def __init__(self, view: str = "adapted", projections: int = 5_000, seed: int = 0):
        super().__init__(view)
        self.projections = whole_number(projections, "projections", 1, MOST)
        self.seed = whole_number(seed, "seed", 0)
        # Gram matrix of each head's z, and the within-class scatter of x.
        self.total: tuple[Any, Any] = [None for _ in range(self.num_heads)], 0.0

    def _collect(self, features, rows, head) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        """Returns class means and counts, and per head the sums of z over each class [m, c]."""
        matrices = self._matrices(features.shape[1])
        wide = unit(features.astype(np.float64))
        means, task_scatter = within_classes(wide, rows)
        (grams, scatter), sums = self.total, []
        for index, matrix in enumerate(matrices[:-1]):
            hidden = in_blocks(gelu_features, matrix, wide)
            grams[index] = with_gram(grams[index], hidden)
            sums.append(_sums(hidden, _onehot(rows)))
        self.total = grams, scatter + task_scatter
        return means, np.bincount(rows), sums

    @cached_property
    def _solved(self) -> tuple[list[Float[Array, "m d"]], Float[Array, "m classes"]]:
        means, counts, by_task = zip(*self.statistics, strict=True)
        means, (grams, scatter) = np.concatenate(means), self.total
        width = means.shape[1]
        covariance = scatter / np.concatenate(counts).sum() + self.jitter * np.eye(width)
        targets = _spread(means, covariance)
        matrices = self._matrices(width)
        maps = []
        for gram, *sums in zip(grams, *by_task, strict=True):
            pulls = np.concatenate(sums, axis=1) @ targets
            maps.append(jax.device_put(float32(solve_ridge(gram, self.ridge, pulls))))
        random = np.random.default_rng([self.seed, 1])
        root = np.linalg.cholesky(covariance)
        outer_gram: Any = None
        sums = []
        # Classes of a block.
        for of_block in row_slices(len(means), max(1, BLOCK_ROWS // self.samples_per_class)):
            centres = np.repeat(means[of_block], self.samples_per_class, axis=0)
            noise = random.standard_normal(centres.shape) @ root.T
            hidden = in_blocks(_pulled, (matrices, maps), centres + noise)
            outer_gram = with_gram(outer_gram, hidden)
            rows = np.arange(len(centres)) // self.samples_per_class
            sums.append(_sums(hidden, _onehot(rows)))
        cross = np.concatenate(sums, axis=1)
        return maps, jax.device_put(float32(solve_ridge(outer_gram, self.ridge, cross)))

    def _class_scores(self, features: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n classes"]:
        matrices = self._matrices(features.shape[1])
        return in_blocks(_anacp_scores, (matrices, *self._solved), features)

    def _matrices(self, width: int) -> list[Float[Array, "d m"]]:
        """Returns A of each head, then B."""
        return _gaussians(self.seed, (width, self.projections), self.num_heads + 1)


def _spread(
    means: Float[np.ndarray, "c d"], covariance: Float[np.ndarray, "d d"]
) -> Float[np.ndarray, "c d"]:
    """Returns AnaCP's targets (step 1)."""
    values, vectors = np.linalg.eigh(covariance)
    root = np.sqrt(np.maximum(values, 0.0) + 1e-8)
    centre = means.mean(axis=0)
    whitened = (means - centre) @ (vectors / root) @ vectors.T
    left, singular, right = np.linalg.svd(whitened, full_matrices=False)
    # Centred means span one dimension less than their number; one direction is rounding noise.
    spanned = singular > len(means) * np.finfo(np.float64).eps * singular[0]
    return unit((left * (singular + spanned)) @ right @ (vectors * root) @ vectors.T + centre)


@lru_cache(maxsize=2)
def _gaussians(seed: int, shape: tuple[int, int], count: int = 1) -> list[Float[Array, "d m"]]:
    """Returns the random matrices of a seed."""
    random = np.random.default_rng(seed)
    return [jax.device_put(random.standard_normal(shape, np.float32)) for _ in range(count)]


def _onehot(rows: Int[np.ndarray, " n"]) -> Float[np.ndarray, "n c"]:
    return np.eye(rows.max() + 1, dtype=np.float32)[rows]


def with_gram(total: np.ndarray | None, hidden: np.ndarray) -> Float[np.ndarray, "m m"]:
    """Returns total + h'h, added in place; products of rows are float32, sums float64."""
    size = hidden.shape[1]
    total = np.zeros((size, size)) if total is None else total
    tiles = row_slices(size, TILE)
    for number, left in enumerate(tiles):
        for right in tiles[number:]:
            tile = _sums(hidden[:, left], hidden[:, right])
            total[left, right] += tile
            if left != right:
                total[right, left] += tile.T
    return total


def _sums(hidden: np.ndarray, onehot: np.ndarray) -> Float[np.ndarray, "m c"]:
    """Returns h'Y; products are float32, sums float64. Raises NotApplicable beyond float32."""
    total = np.zeros((hidden.shape[1], onehot.shape[1]))
    for rows in row_slices(len(hidden), BLOCK_ROWS):
        total += jax.device_get(_products(*jax.device_put((hidden[rows].T, onehot[rows].T))))
    if not np.isfinite(total).all():
        raise NotApplicable(
            "features: their products are too large for float32; scale the features"
        )
    return total


def _hidden(
    projection: Float[Array, "d m"] | None, features: Float[Array, "n d"]
) -> Float[Array, "n m"]:
    """Returns RanPAC's h."""
    if projection is None:
        return jnp.pad(features, ((0, 0), (0, 1)), constant_values=1.0)
    return jnp.maximum(products(features, projection.T), 0.0)


def _ridge_scores(fitted: Any, features: Float[Array, "n d"]) -> Float[Array, "n classes"]:
    projection, weight = fitted
    return products(_hidden(projection, features), weight.T)


def gelu_features(matrix: Float[Any, "d m"], features: Float[Array, "n d"]) -> Float[Array, "n m"]:
    """Returns gelu(g R), with the exact gelu."""
    return jax.nn.gelu(products(features, matrix.T), approximate=False)


def _pulled(fitted: Any, features: Float[Array, "n d"]) -> Float[Array, "n m"]:
    """Returns the random features of AnaCP's step 3, after its step 2."""
    (*inner, outer), maps = fitted
    pairs = zip(inner, maps, strict=True)
    outputs = [unit(products(gelu_features(a, features), theta.T)) for a, theta in pairs]
    return gelu_features(outer, jnp.mean(jnp.stack(outputs), axis=0))


def _anacp_scores(fitted: Any, features: Float[Array, "n d"]) -> Float[Array, "n classes"]:
    matrices, maps, weight = fitted
    return products(_pulled((matrices, maps), unit(features)), weight.T)


def solve_ridge(
    gram: Float[np.ndarray, "m m"], ridge: float, targets: Float[np.ndarray, "m c"]
) -> Float[np.ndarray, "m c"]:
    """Returns (G + lambda I)^-1 Q in float64."""
    shifted = np.array(gram, order="F")  # LAPACK would copy another order.
    shifted[np.diag_indices_from(shifted)] += ridge
    try:
        factor = scipy.linalg.cho_factor(shifted, overwrite_a=True)
        return scipy.linalg.cho_solve(factor, targets)
    except np.linalg.LinAlgError:
        # A tiny lambda cannot outweigh the float32 rounding of a singular G.
        values, vectors = np.linalg.eigh(gram)
        inverse = 1.0 / (np.maximum(values, 0.0) + ridge)
        return (vectors * inverse) @ (vectors.T @ targets)


def chosen_ridge(
    expanded: Float[np.ndarray, "n m"], onehot: Float[np.ndarray, "n c"], otherwise: float
) -> float:
    """Returns the smallest of `RIDGES` with the least squared error on the last fifth of the rows.

    All candidates share the eigendecomposition of the smaller Gram matrix of the other rows:
    (H'H + l I)^-1 H'Y = H'(HH' + l I)^-1 Y. With one row it returns `otherwise`.
    """
    split = int(0.8 * len(onehot))
    if not split:
        return otherwise
    fit, held = np.split(expanded.astype(np.float64), [split])
    labels, truth = np.split(onehot.astype(np.float64), [split])
    few = split <= fit.shape[1]
    values, vectors = np.linalg.eigh(fit @ fit.T if few else fit.T @ fit)
    left = (held @ fit.T if few else held) @ vectors
    right = vectors.T @ (labels if few else fit.T @ labels)
    values = np.maximum(values, 0.0)[:, None]
    losses = [np.mean((left @ (right / (values + ridge)) - truth) ** 2) for ridge in RIDGES]
    return float(RIDGES[int(np.argmin(losses))])
