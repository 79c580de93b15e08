"""Classes and tasks as Gaussians: Mahalanobis distances and FeCAM.

Covariances are accumulated, inverted and factored in float64 on the host, because inverse
covariances of n < d features have condition numbers beyond float32. What is stored is a float32
factor F with S^-1 = F F', so that a distance is |(g - m) F|^2, a sum of squares that float32
evaluates without cancellation, under `jax.jit` at the highest matmul precision.
"""

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jaxtyping import Array, Float

from fdc_jax.calibration.accounting import BYTES
from fdc_jax.calibration.scores import Scores
from fdc_jax.calibration.seen_tasks import SeenTasks, class_means
from fdc_jax.errors import InputError
from fdc_jax.heads import NORM_FLOOR, Head

# Rows per call of a jitted distance, so that memory does not grow with the batch.
_ROWS = 2048


class Mahalanobis:
    """Score of class c: minus a Mahalanobis distance (g - m_c)' S^-1 (g - m_c).

    Lee et al., "A Simple Unified Framework for Detecting Out-of-Distribution Samples" (2018) and,
    for the last variant, Ren et al., "A Simple Fix to Mahalanobis Distance" (2021). Variants:

    - "shared": one S, the within-class covariance pooled over all tasks.
    - "per_task": S_t, the within-class covariance of the class's own task.
    - "relative": as per_task, minus the distance to one Gaussian of all the task's features,
      classes ignored (mean m_t, total covariance). A background common to all tasks would add the
      same number to every score and so route nothing; each task is its own detector here.

    S is the scatter over the sample count, shrunk to (1 - s) S + s tr(S)/d I; s = 0 uses the
    pseudo-inverse, as published. Log-determinants are left out, as published. Without any variance
    (every class one image) S is the identity.

    Args:
        view: "adapted" or "pretrained".
        variant: one of the three above.
        shrinkage: s in [0, 1].

    Raises:
        InputError: an argument outside its range.
    """

    name = "mahalanobis"
    variants = ("shared", "per_task", "relative")

    def __init__(self, view: str = "adapted", variant: str = "shared", shrinkage: float = 1e-3):
        if variant not in self.variants:
            raise InputError(
                f"{self.name}: variant: expected {', '.join(self.variants)}; found {variant!r}"
            )
        if not 0.0 <= shrinkage <= 1.0:
            raise InputError(f"{self.name}: shrinkage: expected 0 to 1, found {shrinkage}")
        self.variant = variant
        self.shrinkage = shrinkage
        self._seen = SeenTasks(self.name, view)
        self._means: list[Float[np.ndarray, "c d"]] = []
        self._scatter: Float[np.ndarray, "d d"] | None = None
        self._count = 0
        # One factor per task, or the shared one alone.
        self._factors: list[Float[np.ndarray, "d d"]] = []
        self._backgrounds: list[tuple[Float[np.ndarray, " d"], Float[np.ndarray, "d d"]]] = []

    def fit_task(
        self,
        adapted: object,
        labels: object,
        head: Head | None = None,
        pretrained: object = None,
        classes: object = None,
    ) -> None:
        """Takes the class means and the scatter of one more task.

        Takes and raises what `NearestClassMean.fit_task` does.
        """
        samples = self._seen.check(adapted, labels, head, pretrained, classes)
        means = class_means(samples)
        wide = samples.features.astype(np.float64)
        within = wide - means[samples.rows]
        scatter = within.T @ within
        if self.variant == "shared":
            self._scatter = scatter + (0.0 if self._scatter is None else self._scatter)
            self._count += len(wide)
            self._factors = []
        else:
            self._factors.append(inverse_factor(scatter / len(wide), self.shrinkage))
        if self.variant == "relative":
            mean = wide.mean(axis=0)
            total = (wide - mean).T @ (wide - mean) / len(wide)
            self._backgrounds.append((mean, inverse_factor(total, self.shrinkage)))
        self._means.append(means)
        self._seen.remember(samples, head)

    def finalize(self) -> None:
        """Factors the shared covariance."""
        if self.variant == "shared" and self._scatter is not None and not self._factors:
            self._factors = [inverse_factor(self._scatter / self._count, self.shrinkage)]

    def score(self, adapted: object, pretrained: object = None) -> Scores:
        """Scores a batch [n, d] of the method's view."""
        features = self._seen.view_features(adapted, pretrained)
        self.finalize()
        if self.variant == "shared":
            return self._seen.scores(
                -squared_distances(features, np.concatenate(self._means), self._factors[0])
            )
        scores = []
        for task, means in enumerate(self._means):
            distances = squared_distances(features, means, self._factors[task])
            if self.variant == "relative":
                mean, factor = self._backgrounds[task]
                distances = distances - squared_distances(features, mean[None], factor)
            scores.append(-distances)
        return self._seen.scores_by_task(scores)

    @property
    def storage_bytes(self) -> int:
        """Class means and d x d matrices; for "relative" also the tasks' means."""
        width, tasks = self._seen.width, len(self._means)
        matrices = {"shared": min(tasks, 1), "per_task": tasks, "relative": 2 * tasks}
        vectors = self._seen.num_classes + (tasks if self.variant == "relative" else 0)
        return BYTES * (matrices[self.variant] * width * width + vectors * width)


class FeCAM:
    """Score of class c: minus a Mahalanobis distance under the class's own correlation matrix.

    Goswami et al., "FeCAM: Exploiting the Heterogeneity of Class Distributions" (2023). The two
    public codes for Vision Transformers differ, and so do the variants; S_c is the sample
    covariance (divisor n - 1) of the class, m_c its mean:

    - "vit", the authors' script for ViTs: features are normalised first; S_c plus its mean diagonal
      on the diagonal; that as a correlation matrix R_c; distance (g/|g| - m_c)' R_c^+ (g/|g| - m_c)
      with m_c not renormalised.
    - "pilot", the port in PILOT: raw features; R_c holds the correlation coefficients of the *rows*
      of S_c + 100 I, which is not S_c + 100 I as a correlation matrix; distance with
      g/|g| - m_c/|m_c|. Centring the rows makes R_c singular; its pseudo-inverse drops eigenvalues
      below d times the float32 machine epsilon times the largest, as the port's float32 pinv does.

    With far fewer images per class than dimensions "vit" can rank a sample's own class last: R_c
    then has its small eigenvalues along the class's own directions. That is the method's formula,
    not rounding.

    A class of one image has no covariance and gets S_c = 0; where nothing varies, R_c is the
    identity.

    Args:
        view: "adapted" or "pretrained".
        variant: "vit" or "pilot".

    Raises:
        InputError: an unknown view or variant.
    """

    name = "fecam"

    def __init__(self, view: str = "adapted", variant: str = "vit"):
        if variant not in ("vit", "pilot"):
            raise InputError(f"fecam: variant: expected vit or pilot, found {variant!r}")
        self.variant = variant
        self._seen = SeenTasks(self.name, view)
        self._means: list[Float[np.ndarray, "c d"]] = []
        self._factors: list[list[Float[np.ndarray, "d d"]]] = []

    def fit_task(
        self,
        adapted: object,
        labels: object,
        head: Head | None = None,
        pretrained: object = None,
        classes: object = None,
    ) -> None:
        """Takes the mean and the correlation matrix of each class of one more task.

        Takes and raises what `NearestClassMean.fit_task` does.
        """
        samples = self._seen.check(adapted, labels, head, pretrained, classes)
        wide = samples.features.astype(np.float64)
        if self.variant == "vit":
            wide = _unit(wide)
        means = class_means(samples._replace(features=wide))
        factors = []
        for row in range(len(samples.classes)):
            members = wide[samples.rows == row]
            centred = members - means[row]
            covariance = centred.T @ centred / max(len(members) - 1, 1)
            factors.append(self._factor(covariance))
        self._means.append(means if self.variant == "vit" else _unit(means))
        self._factors.append(factors)
        self._seen.remember(samples, head)

    def _factor(self, covariance: Float[np.ndarray, "d d"]) -> Float[np.ndarray, "d d"]:
        width = len(covariance)
        if self.variant == "vit":
            level = np.mean(np.diagonal(covariance))
            if level <= 0.0:
                return np.eye(width, dtype=np.float32)
            return _inverse_factor(_correlation(covariance + level * np.eye(width)))
        rows = covariance + 100.0 * np.eye(width)
        rows = rows - rows.mean(axis=1, keepdims=True)
        if width == 1:
            return np.eye(1, dtype=np.float32)
        cutoff = width * float(np.finfo(np.float32).eps)
        return _pseudo_inverse_factor(_correlation(rows @ rows.T), cutoff)

    def finalize(self) -> None:
        """Nothing remains to be done after the last task."""

    def score(self, adapted: object, pretrained: object = None) -> Scores:
        """Scores a batch [n, d] of the method's view."""
        features = _unit(self._seen.view_features(adapted, pretrained).astype(np.float64))
        scores = []
        for means, factors in zip(self._means, self._factors, strict=True):
            by_class = [
                squared_distances(features, mean[None], factor)[:, 0]
                for mean, factor in zip(means, factors, strict=True)
            ]
            scores.append(-np.stack(by_class, axis=1))
        return self._seen.scores_by_task(scores)

    @property
    def storage_bytes(self) -> int:
        """A mean and a d x d matrix per class."""
        width = self._seen.width
        return BYTES * self._seen.num_classes * (width * width + width)


def inverse_factor(
    covariance: Float[np.ndarray, "d d"], shrinkage: float
) -> Float[np.ndarray, "d d"]:
    """Returns F with F F' the (pseudo-)inverse of the shrunk covariance; see `Mahalanobis`."""
    width = len(covariance)
    scale = float(np.trace(covariance)) / width
    if scale <= 0.0:
        return np.eye(width, dtype=np.float32)
    if shrinkage == 0.0:
        return _pseudo_inverse_factor(covariance, width * float(np.finfo(np.float64).eps))
    return _inverse_factor((1.0 - shrinkage) * covariance + shrinkage * scale * np.eye(width))


def _inverse_factor(matrix: Float[np.ndarray, "d d"]) -> Float[np.ndarray, "d d"]:
    """F with F F' the inverse of a positive definite matrix; a fraction of the time of `eigh`."""
    try:
        lower = np.linalg.cholesky(matrix)
    except np.linalg.LinAlgError:  # Definite, but not by more than rounding.
        return _pseudo_inverse_factor(matrix, len(matrix) * float(np.finfo(np.float64).eps))
    inverse = scipy.linalg.solve_triangular(lower, np.eye(len(matrix)), lower=True)
    return np.ascontiguousarray(inverse.T, dtype=np.float32)


def _pseudo_inverse_factor(
    matrix: Float[np.ndarray, "d d"], cutoff: float
) -> Float[np.ndarray, "d d"]:
    """F with F F' = pinv(matrix); eigenvalues below `cutoff` times the largest count as zero."""
    values, vectors = np.linalg.eigh(matrix)
    kept = values > cutoff * values[-1]
    inverse = np.divide(1.0, values, out=np.zeros_like(values), where=kept)
    return (vectors * np.sqrt(inverse)).astype(np.float32)


def _correlation(covariance: Float[np.ndarray, "d d"]) -> Float[np.ndarray, "d d"]:
    scale = np.sqrt(np.diagonal(covariance))
    return covariance / np.outer(scale, scale)


def _unit(rows: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n d"]:
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), NORM_FLOOR)


def squared_distances(
    features: Float[np.ndarray, "n d"],
    means: Float[np.ndarray, "c d"],
    factor: Float[np.ndarray, "d r"],
) -> Float[np.ndarray, "n c"]:
    """|(g - m) F|^2 for all rows g and means m; infinite for a NaN mean."""
    present = ~np.isnan(means[:, 0])
    if not present.any():
        return np.full((len(features), len(means)), np.inf, np.float32)
    centre = means[present].mean(axis=0)
    near = np.asarray(features - centre, np.float32)
    rows = jnp.asarray(means - centre, jnp.float32)
    parts = [
        np.asarray(_whitened(jnp.asarray(near[start : start + _ROWS]), rows, factor))
        for start in range(0, len(near), _ROWS)
    ]
    return np.concatenate(parts) if parts else np.zeros((0, len(means)), np.float32)


@jax.jit
def _whitened(
    features: Float[Array, "n d"], means: Float[Array, "c d"], factor: Float[Array, "d r"]
) -> Float[Array, "n c"]:
    highest = jax.lax.Precision.HIGHEST
    near = jnp.matmul(features, factor, precision=highest)
    if means.shape[0] == 1:
        squares = jnp.sum(jnp.square(near - jnp.matmul(means, factor, precision=highest)), axis=1)
        return jnp.where(jnp.isnan(means[:, 0]), jnp.inf, squares[:, None])
    rows = jnp.matmul(means, factor, precision=highest)
    cross = jnp.matmul(near, rows.T, precision=highest)
    squares = jnp.sum(near * near, axis=1)[:, None] + jnp.sum(rows * rows, axis=1)
    return jnp.where(jnp.isnan(means[:, 0]), jnp.inf, jnp.maximum(squares - 2.0 * cross, 0.0))
