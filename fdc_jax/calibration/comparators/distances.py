"""Classes as points and as Gaussians: the nearest one decides task and class.

Covariances are accumulated, inverted and factored in float64 on the host, because inverse
covariances of n < d features have condition numbers beyond float32. What is stored is a float32
factor F with S^-1 = F F', so that a distance is |(g - m) F|^2, a sum of squares that float32
evaluates without cancellation.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jaxtyping import Array, Float

from fdc_jax.calibration.comparators.base import Comparator, Samples, class_means, in_blocks
from fdc_jax.errors import InputError
from fdc_jax.heads import NORM_FLOOR, unit


class NearestClassMean(Comparator):
    """Score of class c: the cosine of the feature g to the mean m_c of the class's raw features.

    With the pretrained view this is SimpleCIL (Zhou et al., "Revisiting Class-Incremental Learning
    with Pre-Trained Models", 2023), as PILOT runs it.

    Args:
        view: "adapted" compares E_T(x) with means of E_t(D_t); "pretrained" uses E_0 for both.
    """

    name = "ncm"

    def _collect(self, samples: Samples) -> Float[np.ndarray, "c d"]:
        return class_means(samples.features, samples.rows).astype(np.float32)

    def _solve(self) -> Float[Array, "classes d"]:
        return jnp.asarray(np.concatenate(self.statistics))

    def _class_scores(self, features: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n classes"]:
        return in_blocks(partial(_cosines, self._solved), features)

    def _numbers(self) -> int:
        return self.num_classes * self.width


class NearestMeanOfExemplars(NearestClassMean):
    """Score of class c: -|g/|g| - p_c|^2 with p_c the normalised mean of normalised features.

    The classifier of iCaRL (Rebuffi et al., 2017) with all training images as exemplars; the same
    ranking as the class-level affinity of PAC (paper, Eq. par) without its standardisation.
    """

    name = "nme"

    def _collect(self, samples: Samples) -> Float[np.ndarray, "c d"]:
        return _unit(class_means(_unit(samples.features), samples.rows)).astype(np.float32)

    def _class_scores(self, features: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n classes"]:
        # |a - b|^2 = 2 - 2 cos(a, b) for unit vectors.
        return 2.0 * super()._class_scores(features) - 2.0


class Mahalanobis(Comparator):
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

    def __init__(self, view: str = "adapted", variant: str = "shared", shrinkage: float = 1e-3):
        if variant not in ("shared", "per_task", "relative"):
            raise InputError(
                f"mahalanobis: variant: expected shared, per_task or relative; found {variant!r}"
            )
        if not 0.0 <= shrinkage <= 1.0:
            raise InputError(f"mahalanobis: shrinkage: expected 0 to 1, found {shrinkage}")
        super().__init__(view)
        self.variant = variant
        self.shrinkage = shrinkage
        # Of the shared variant: within-class scatter and samples of all tasks.
        self._scatter: Any = 0.0
        self._count = 0

    def _collect(self, samples: Samples) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]]:
        wide = samples.features.astype(np.float64)
        means = class_means(wide, samples.rows)
        within = wide - means[samples.rows]
        if self.variant == "shared":
            self._scatter = self._scatter + within.T @ within
            self._count += len(wide)
            return means, []
        gaussians = [(means, self._factor(within.T @ within / len(wide)))]
        if self.variant == "relative":
            mean = wide.mean(axis=0, keepdims=True)
            total = (wide - mean).T @ (wide - mean) / len(wide)
            gaussians.append((mean, self._factor(total)))
        return means, gaussians

    def _factor(self, covariance: Float[np.ndarray, "d d"]) -> Float[np.ndarray, "d d"]:
        width = len(covariance)
        scale = float(np.trace(covariance)) / width
        if scale <= 0.0:
            return np.eye(width, dtype=np.float32)
        if self.shrinkage == 0.0:
            return _pseudo_inverse_factor(covariance, width * float(np.finfo(np.float64).eps))
        shrunk = (1.0 - self.shrinkage) * covariance + self.shrinkage * scale * np.eye(width)
        return _inverse_factor(shrunk)

    def _solve(self) -> Any:
        if self.variant != "shared":
            return [gaussians for _, gaussians in self.statistics]
        means = np.concatenate([means for means, _ in self.statistics])
        return [[(means, self._factor(self._scatter / self._count))]]

    def _class_scores(self, features: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n classes"]:
        scores = []
        for own, *background in self._solved:
            distances = squared_distances(features, *own)
            for gaussian in background:
                distances = distances - squared_distances(features, *gaussian)
            scores.append(-distances)
        return np.concatenate(scores, axis=1)

    def _numbers(self) -> int:
        tasks = len(self.classes)
        matrices = {"shared": min(tasks, 1), "per_task": tasks, "relative": 2 * tasks}
        vectors = self.num_classes + (tasks if self.variant == "relative" else 0)
        return (matrices[self.variant] * self.width + vectors) * self.width


class FeCAM(Comparator):
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
        super().__init__(view)
        self.variant = variant

    def _collect(self, samples: Samples) -> list[tuple[np.ndarray, np.ndarray]]:
        wide = samples.features.astype(np.float64)
        if self.variant == "vit":
            wide = _unit(wide)
        gaussians = []
        for row in range(samples.rows.max() + 1):
            members = wide[samples.rows == row]
            mean = members.mean(axis=0, keepdims=True)
            covariance = (members - mean).T @ (members - mean) / max(len(members) - 1, 1)
            gaussians.append(
                (mean if self.variant == "vit" else _unit(mean), self._factor(covariance))
            )
        return gaussians

    def _factor(self, covariance: Float[np.ndarray, "d d"]) -> Float[np.ndarray, "d d"]:
        width = len(covariance)
        if self.variant == "vit":
            level = np.mean(np.diagonal(covariance))
            if level <= 0.0:
                return np.eye(width, dtype=np.float32)
            return _inverse_factor(_correlation(covariance + level * np.eye(width)))
        if width == 1:
            return np.eye(1, dtype=np.float32)
        rows = covariance + 100.0 * np.eye(width)
        rows = rows - rows.mean(axis=1, keepdims=True)
        cutoff = width * float(np.finfo(np.float32).eps)
        return _pseudo_inverse_factor(_correlation(rows @ rows.T), cutoff)

    def _class_scores(self, features: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n classes"]:
        features = _unit(features)
        return -np.concatenate(
            [squared_distances(features, *each) for task in self.statistics for each in task],
            axis=1,
        )

    def _numbers(self) -> int:
        return self.num_classes * (self.width * self.width + self.width)


def squared_distances(
    features: Float[np.ndarray, "n d"],
    means: Float[np.ndarray, "c d"],
    factor: Float[np.ndarray, "d r"],
) -> Float[np.ndarray, "n c"]:
    """|(g - m) F|^2 for all rows g and means m, about a point amid the means."""
    centre = means.mean(axis=0)
    near = np.asarray(features - centre, np.float32)
    return in_blocks(partial(_whitened, jnp.asarray(means - centre, jnp.float32), factor), near)


@jax.jit
def _cosines(rows: Float[Array, "c d"], features: Float[Array, "n d"]) -> Float[Array, "n c"]:
    return jnp.matmul(unit(features), unit(rows).T, precision=jax.lax.Precision.HIGHEST)


@jax.jit
def _whitened(
    means: Float[Array, "c d"], factor: Float[Array, "d r"], features: Float[Array, "n d"]
) -> Float[Array, "n c"]:
    highest = jax.lax.Precision.HIGHEST
    near = jnp.matmul(features, factor, precision=highest)
    rows = jnp.matmul(means, factor, precision=highest)
    if len(rows) == 1:
        return jnp.sum(jnp.square(near - rows), axis=1, keepdims=True)
    cross = jnp.matmul(near, rows.T, precision=highest)
    squares = jnp.sum(near * near, axis=1)[:, None] + jnp.sum(rows * rows, axis=1)
    return jnp.maximum(squares - 2.0 * cross, 0.0)


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
    wide = rows.astype(np.float64)
    return wide / np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), NORM_FLOOR)
