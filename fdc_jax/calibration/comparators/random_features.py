"""Ridge regression on random features: RanPAC and AnaCP.

Random features and their Gram matrices are float32 at the highest matmul precision under
`jax.jit`, where nearly all the work is. Sums over tasks and the solves are float64 on the host: a
Gram matrix of thousands of correlated features has a condition number far beyond float32.
"""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jaxtyping import Array, Float

from fdc_jax.calibration.comparators.base import (
    ROWS,
    Comparator,
    Samples,
    class_means,
    in_blocks,
)
from fdc_jax.errors import InputError
from fdc_jax.heads import NORM_FLOOR, unit

_HIGHEST = jax.lax.Precision.HIGHEST
RIDGES = 10.0 ** np.arange(-8, 9)


class RanPAC(Comparator):
    """Ridge regression to one-hot labels on h = relu(g R), with R a Gaussian d x M matrix.

    McDonnell et al., "RanPAC: Random Projections and Pre-trained Models for Continual Learning"
    (2023). G += h'h and Q += h'Y over tasks; W = (G + lambda I)^-1 Q. After every task lambda is
    the one of 10^-8 .. 10^8 with the least squared error on the last 20 % of the task's samples
    after a fit to the first 80 %; samples are shuffled first, since sorted ones would leave whole
    classes out of the fit. The last task's lambda holds. A task of one sample keeps the previous
    one, at the start 1.

    Lambda is raised to the float32 machine epsilon times the trace of G where it is below: with
    fewer samples than M, rounding makes eigenvalues of that size out of zeros. The float32 codes
    meet the same errors in their validation and so avoid such a lambda; ours validates in float64.

    Variants of the class score:

    - "original": h W.
    - "pilot", the port in PILOT, which scores through a cosine layer: the cosine of h and each
      column of W.

    Args:
        view: "adapted" or "pretrained".
        variant: one of the two above.
        projections: M. The paper's 10,000 takes 0.8 GB of host memory while fitting.
        seed: of R and of the shuffles.

    Raises:
        InputError: an argument outside its range.
    """

    name = "ranpac"

    def __init__(
        self,
        view: str = "adapted",
        variant: str = "original",
        projections: int = 10_000,
        seed: int = 0,
    ):
        if variant not in ("original", "pilot"):
            raise InputError(f"ranpac: variant: expected original or pilot, found {variant!r}")
        _check_sizes(self.name, seed, projections=projections)
        super().__init__(view)
        self.variant = variant
        self.projections = projections
        self.ridge = 1.0
        self._random = np.random.default_rng(seed)
        self._projection: Float[Array, "d m"] | None = None
        self._gram = np.zeros((projections, projections))

    def _collect(self, samples: Samples) -> Float[np.ndarray, "m c"]:
        if self._projection is None:
            self._projection = _gaussian(self._random, samples.features.shape[1], self.projections)
        order = self._random.permutation(len(samples.rows))
        onehot = samples.onehot[order]
        expanded, sums = [], 0.0
        for part, labels in _parts(samples.features[order], onehot):
            hidden = expand(part, self._projection, "relu")
            gram, cross = _moments(hidden, labels)
            self._gram += np.asarray(gram)
            sums = sums + np.asarray(cross, np.float64)
            expanded.append(np.asarray(hidden))
        split = int(0.8 * len(onehot))
        if split > 0:
            self.ridge = best_ridge(np.concatenate(expanded), onehot, split)
        self.ridge = max(self.ridge, float(np.finfo(np.float32).eps * np.trace(self._gram)))
        return np.asarray(sums)

    def _solve(self) -> Float[Array, "m classes"]:
        targets = np.concatenate(self.statistics, axis=1)
        return jnp.asarray(solve_ridge(self._gram, self.ridge, targets), jnp.float32)

    def _class_scores(self, features: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n classes"]:
        cosine = self.variant == "pilot"
        return in_blocks(
            partial(_ranpac_scores, self._projection, self._solved, cosine=cosine), features
        )

    def _numbers(self) -> int:
        # G and Q; R is regenerated from its seed.
        return self.projections * (self.projections + self.num_classes)


class AnaCP(Comparator):
    """Ridge maps pull features towards spread-out class means; a ridge classifier reads the result.

    Momeni et al., "AnaCP: Toward Upper-Bound Continual Learning via Analytic Contrastive
    Projection" (2025). With x = g/|g|, class means m_c, and S the pooled within-class scatter of x
    over the sample count, plus 1e-4 I:

    1. Targets: centred class means times S^-1/2; their singular values plus 1; times S^1/2; the
       centre added again; normalised.
    2. Each of several heads: z = gelu(x A'), A Gaussian D x d; ridge map from z to the target of
       the sample's class; outputs normalised, then averaged over heads.
    3. Classifier: Gaussian pseudo-features N(m_c, S) per class through step 2, then
       gelu(. B') with B Gaussian D x d and ridge regression to one-hot labels.

    Statistics of steps 1 and 2 accumulate over tasks; the maps are solved in `finalize`. The
    authors' code departs from their paper, and this from it: there, un-whitening multiplies by
    S^-1/2 again, the old covariance is weighted by a count that already includes the new task, and
    1e-4 I is added to the first task's alone; and it adds 1 to the singular value that is zero
    because the means are centred, too, which moves all targets along a direction made of rounding
    errors. Step 3 samples, so scores depend on the seed.

    Args:
        view: "adapted" or "pretrained"; the method is meant for features that do not move.
        projections: D. The default takes 0.6 GB of host memory while fitting.
        heads: number of maps in step 2.
        ridge: regularisation of both steps.
        samples_per_class: pseudo-features in step 3.
        seed: of the random matrices and the pseudo-features.

    Raises:
        InputError: an argument outside its range.
    """

    name = "anacp"
    jitter = 1e-4

    def __init__(
        self,
        view: str = "adapted",
        projections: int = 5_000,
        heads: int = 3,
        ridge: float = 100.0,
        samples_per_class: int = 100,
        seed: int = 0,
    ):
        _check_sizes(
            self.name,
            seed,
            projections=projections,
            heads=heads,
            samples_per_class=samples_per_class,
        )
        if not ridge > 0:
            raise InputError(f"anacp: ridge: expected more than 0, found {ridge}")
        super().__init__(view)
        self.projections = projections
        self.ridge = ridge
        self.samples_per_class = samples_per_class
        self._seed = seed
        # A of each head, then B.
        self._matrices: list[Float[Array, "d m"]] = []
        self._grams = [np.zeros((projections, projections)) for _ in range(heads)]
        self._scatter: Float[np.ndarray, "d d"] | float = 0.0
        self._count = 0

    def _collect(self, samples: Samples) -> tuple[np.ndarray, list[np.ndarray]]:
        """Class means [c, d], and per head the sums of z over each class [m, c]."""
        if not self._matrices:
            random, width = np.random.default_rng(self._seed), samples.features.shape[1]
            self._matrices = [
                _gaussian(random, width, self.projections) for _ in range(len(self._grams) + 1)
            ]
        wide = samples.features.astype(np.float64)
        wide /= np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), NORM_FLOOR)
        means = class_means(wide, samples.rows)
        within = wide - means[samples.rows]
        self._scatter = self._scatter + within.T @ within
        self._count += len(wide)
        sums = [np.zeros((self.projections, len(means))) for _ in self._grams]
        for part, labels in _parts(wide.astype(np.float32), samples.onehot):
            for gram, total, matrix in zip(self._grams, sums, self._matrices, strict=False):
                of_part, cross = _moments(expand(part, matrix, "gelu"), labels)
                gram += np.asarray(of_part)
                total += np.asarray(cross)
        return means, sums

    def _solve(self) -> tuple[list[Float[Array, "m d"]], Float[Array, "m classes"]]:
        covariance = self._scatter / self._count
        covariance = covariance + self.jitter * np.eye(self.width)
        means = np.concatenate([means for means, _ in self.statistics])
        targets = _spread(means, covariance)
        by_task = [sums for _, sums in self.statistics]
        sums = [np.concatenate(parts, axis=1) for parts in zip(*by_task, strict=True)]
        maps = [
            jnp.asarray(solve_ridge(gram, self.ridge, total @ targets), jnp.float32)
            for gram, total in zip(self._grams, sums, strict=True)
        ]
        random = np.random.default_rng([self._seed, 1])
        root = np.linalg.cholesky(covariance)
        gram = np.zeros((self.projections, self.projections))
        cross = np.zeros((self.projections, len(means)))
        for c, mean in enumerate(means):
            noise = random.standard_normal((self.samples_per_class, self.width)) @ root.T
            hidden = _pulled(self._matrices, maps, jnp.asarray(mean + noise, jnp.float32))
            part, total = _moments(hidden, jnp.ones((len(noise), 1)))
            gram += np.asarray(part)
            cross[:, c] = np.asarray(total)[:, 0]
        return maps, jnp.asarray(solve_ridge(gram, self.ridge, cross), jnp.float32)

    def _class_scores(self, features: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n classes"]:
        return in_blocks(partial(_anacp_scores, self._matrices, *self._solved), features)

    def _numbers(self) -> int:
        # Gram matrices and class sums of the maps, class means and counts, covariance.
        size, width, classes = self.projections, self.width, self.num_classes
        return len(self._grams) * size * (size + classes) + classes * (width + 1) + width * width


def _check_sizes(name: str, seed: int, **sizes: int) -> None:
    for argument, size in sizes.items():
        if size < 1:
            raise InputError(f"{name}: {argument}: expected at least 1, found {size}")
    if seed < 0:
        raise InputError(f"{name}: seed: expected a whole number from 0, found {seed}")


def _spread(
    means: Float[np.ndarray, "c d"], covariance: Float[np.ndarray, "d d"]
) -> Float[np.ndarray, "c d"]:
    """AnaCP's targets (step 1)."""
    values, vectors = np.linalg.eigh(covariance)
    root = np.sqrt(np.maximum(values, 0.0) + 1e-8)
    centre = means.mean(axis=0)
    whitened = (means - centre) @ (vectors / root) @ vectors.T
    left, singular, right = np.linalg.svd(whitened, full_matrices=False)
    # Centred means span one dimension less than their number; the direction that the
    # decomposition adds to fill up is rounding noise.
    spanned = singular > len(means) * np.finfo(np.float64).eps * singular[0]
    targets = (left * (singular + spanned)) @ right @ (vectors * root) @ vectors.T + centre
    return targets / np.maximum(np.linalg.norm(targets, axis=1, keepdims=True), NORM_FLOOR)


def _gaussian(random: np.random.Generator, width: int, projections: int) -> Float[Array, "d m"]:
    return jnp.asarray(random.standard_normal((width, projections), np.float32))


def _parts(
    features: Float[np.ndarray, "n d"], onehot: Float[np.ndarray, "n c"]
) -> Iterator[tuple[Float[Array, "rows d"], Float[Array, "rows c"]]]:
    for start in range(0, len(features), ROWS):
        rows = slice(start, start + ROWS)
        yield jnp.asarray(features[rows]), jnp.asarray(onehot[rows])


@partial(jax.jit, static_argnames="activation")
def expand(
    features: Float[Array, "n d"], matrix: Float[Array, "d m"], activation: str
) -> Float[Array, "n m"]:
    """Returns activation(g R), "relu" or the exact "gelu"."""
    products = jnp.matmul(features, matrix, precision=_HIGHEST)
    return (
        jax.nn.relu(products) if activation == "relu" else jax.nn.gelu(products, approximate=False)
    )


@jax.jit
def _moments(
    expanded: Float[Array, "n m"], onehot: Float[Array, "n c"]
) -> tuple[Float[Array, "m m"], Float[Array, "m c"]]:
    """Returns h'h and h'Y."""
    return (
        jnp.matmul(expanded.T, expanded, precision=_HIGHEST),
        jnp.matmul(expanded.T, onehot, precision=_HIGHEST),
    )


@partial(jax.jit, static_argnames="cosine")
def _ranpac_scores(
    projection: Float[Array, "d m"],
    weight: Float[Array, "m classes"],
    features: Float[Array, "n d"],
    cosine: bool,
) -> Float[Array, "n classes"]:
    expanded, rows = expand(features, projection, "relu"), weight.T
    if cosine:
        expanded, rows = unit(expanded), unit(rows)
    return jnp.matmul(expanded, rows.T, precision=_HIGHEST)


@jax.jit
def _pulled(
    matrices: list[Float[Array, "d m"]],
    maps: list[Float[Array, "m d"]],
    features: Float[Array, "n d"],
) -> Float[Array, "n m"]:
    """AnaCP's step 2 and the random features of step 3."""
    *inner, outer = matrices
    outputs = [
        unit(jnp.matmul(expand(features, matrix, "gelu"), theta, precision=_HIGHEST))
        for matrix, theta in zip(inner, maps, strict=True)
    ]
    return expand(sum(outputs) / len(outputs), outer, "gelu")


@jax.jit
def _anacp_scores(
    matrices: list[Float[Array, "d m"]],
    maps: list[Float[Array, "m d"]],
    weight: Float[Array, "m classes"],
    features: Float[Array, "n d"],
) -> Float[Array, "n classes"]:
    return jnp.matmul(_pulled(matrices, maps, unit(features)), weight, precision=_HIGHEST)


def solve_ridge(
    gram: Float[np.ndarray, "m m"], ridge: float, targets: Float[np.ndarray, "m c"]
) -> Float[np.ndarray, "m c"]:
    """Returns (G + lambda I)^-1 Q in float64."""
    shifted = gram.copy()
    shifted[np.diag_indices_from(shifted)] += ridge
    try:
        factor = scipy.linalg.cho_factor(shifted, overwrite_a=True)
        return scipy.linalg.cho_solve(factor, targets)
    except np.linalg.LinAlgError:
        # A tiny lambda cannot outweigh the float32 rounding of a singular G.
        values, vectors = np.linalg.eigh(gram)
        inverse = 1.0 / (np.maximum(values, 0.0) + ridge)
        return (vectors * inverse) @ (vectors.T @ targets)


def best_ridge(
    expanded: Float[np.ndarray, "n m"], onehot: Float[np.ndarray, "n c"], split: int
) -> float:
    """Returns the member of `RIDGES` with the least squared error on the rows from `split` on.

    All candidates share one eigendecomposition, of the smaller of the two Gram matrices of the
    first `split` rows: (H'H + l I)^-1 H'Y = H'(HH' + l I)^-1 Y. Ties go to the smallest.
    """
    wide = expanded.astype(np.float64)
    fit, held = wide[:split], wide[split:]
    labels, truth = onehot[:split].astype(np.float64), onehot[split:]
    if split <= wide.shape[1]:
        values, vectors = np.linalg.eigh(fit @ fit.T)
        left, right = (held @ fit.T) @ vectors, vectors.T @ labels
    else:
        values, vectors = np.linalg.eigh(fit.T @ fit)
        left, right = held @ vectors, vectors.T @ (fit.T @ labels)
    values = np.maximum(values, 0.0)[:, None]
    losses = [np.mean((left @ (right / (values + ridge)) - truth) ** 2) for ridge in RIDGES]
    return float(RIDGES[int(np.argmin(losses))])
