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

from fdc_jax.calibration.comparators.base import (
    Comparator,
    class_means,
    in_blocks,
    within_classes,
)
from fdc_jax.heads import products, unit


class NearestClassMean(Comparator):
    """Score of class c: the cosine of the feature g to the mean m_c of the class's raw features.

    With the pretrained view this is SimpleCIL (Zhou et al., "Revisiting Class-Incremental Learning
    with Pre-Trained Models", 2023), as PILOT runs it. The adapted view compares E_T(x) with means
    of E_t(D_t).
    """

    name = "ncm"

    def _collect(self, features, rows, head) -> Float[np.ndarray, "c d"]:
        return class_means(features, rows).astype(np.float32)

    def _solve(self) -> Float[Array, "classes d"]:
        return jnp.asarray(np.concatenate(self.statistics))

    def _class_scores(self, features: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n classes"]:
        return in_blocks(partial(_cosines, self._solved), features)


class NearestMeanOfExemplars(NearestClassMean):
    """Score of class c: -|g/|g| - p_c|^2 with p_c the normalised mean of normalised features.

    The classifier of iCaRL (Rebuffi et al., 2017) with all training images as exemplars; the same
    ranking as the class-level affinity of PAC (paper, Eq. par) without its standardisation.
    """

    name = "nme"

    def _collect(self, features, rows, head) -> Float[np.ndarray, "c d"]:
        return unit(class_means(unit(features.astype(np.float64)), rows)).astype(np.float32)

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

    S is the scatter over the sample count, shrunk to (1 - s) S + s tr(S)/d I with s = 0.001.
    Log-determinants are left out, as published. Without any variance (every class one image) S is
    the identity.
    """

    name = "mahalanobis"
    variants = ("shared", "per_task", "relative")
    _count = 0

    def _collect(self, features, rows, head) -> Any:
        wide = features.astype(np.float64)
        means, scatter = within_classes(wide, rows)
        if self.variant == "shared":
            self.total = scatter if self.total is None else self.total + scatter
            self._count += len(wide)
            return means
        gaussians = [(means, _shrunk_factor(scatter / len(wide)))]
        if self.variant == "relative":
            mean, total = within_classes(wide, np.zeros(len(wide), int))
            gaussians.append((mean, _shrunk_factor(total / len(wide))))
        return gaussians

    def _solve(self) -> Any:
        if self.variant != "shared":
            return self.statistics
        return [[(np.concatenate(self.statistics), _shrunk_factor(self.total / self._count))]]

    def _class_scores(self, features: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n classes"]:
        scores = []
        for own, *background in self._solved:
            distances = squared_distances(features, *own)
            for gaussian in background:
                distances = distances - squared_distances(features, *gaussian)
            scores.append(-distances)
        return np.concatenate(scores, axis=1)


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
    not rounding. A class of one image has S_c = 0; where nothing varies, R_c is the identity.
    """

    name = "fecam"
    variants = ("vit", "pilot")

    def _collect(self, features, rows, head) -> list[tuple[np.ndarray, np.ndarray]]:
        pilot = self.variant == "pilot"
        wide = features.astype(np.float64) if pilot else unit(features.astype(np.float64))
        gaussians = []
        for row in range(rows.max() + 1):
            members = wide[rows == row]
            mean, scatter = within_classes(members, np.zeros(len(members), int))
            covariance = scatter / max(len(members) - 1, 1)
            factor = _pilot_factor(covariance) if pilot else _vit_factor(covariance)
            gaussians.append((unit(mean) if pilot else mean, factor))
        return gaussians

    def _class_scores(self, features: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n classes"]:
        features = unit(features.astype(np.float64))
        gaussians = [gaussian for task in self.statistics for gaussian in task]
        return -np.concatenate([squared_distances(features, *each) for each in gaussians], axis=1)


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
    return products(unit(features), unit(rows))


@jax.jit
def _whitened(
    means: Float[Array, "c d"], factor: Float[Array, "d r"], features: Float[Array, "n d"]
) -> Float[Array, "n c"]:
    near, rows = products(features, factor.T), products(means, factor.T)
    if len(rows) == 1:
        return jnp.sum(jnp.square(near - rows), axis=1, keepdims=True)
    squares = jnp.sum(near * near, axis=1)[:, None] + jnp.sum(rows * rows, axis=1)
    return jnp.maximum(squares - 2.0 * products(near, rows), 0.0)


# Factors F with F F' the inverse of a covariance or of what a method makes of it ------------------


def _shrunk_factor(covariance: Float[np.ndarray, "d d"]) -> Float[np.ndarray, "d d"]:
    level = np.trace(covariance) / len(covariance)
    if level <= 0.0:
        return np.eye(len(covariance), dtype=np.float32)
    return _inverse_factor(0.999 * covariance + 0.001 * level * np.eye(len(covariance)))


def _vit_factor(covariance: Float[np.ndarray, "d d"]) -> Float[np.ndarray, "d d"]:
    level = np.mean(np.diagonal(covariance))
    if level <= 0.0:
        return np.eye(len(covariance), dtype=np.float32)
    return _inverse_factor(_correlation(covariance + level * np.eye(len(covariance))))


def _pilot_factor(covariance: Float[np.ndarray, "d d"]) -> Float[np.ndarray, "d d"]:
    width = len(covariance)
    if width == 1:
        return np.eye(1, dtype=np.float32)
    rows = covariance + 100.0 * np.eye(width)
    rows = rows - rows.mean(axis=1, keepdims=True)
    values, vectors = np.linalg.eigh(_correlation(rows @ rows.T))
    kept = values > width * np.finfo(np.float32).eps * values[-1]
    inverse = np.divide(1.0, values, out=np.zeros_like(values), where=kept)
    return (vectors * np.sqrt(inverse)).astype(np.float32)


def _inverse_factor(matrix: Float[np.ndarray, "d d"]) -> Float[np.ndarray, "d d"]:
    """Of a positive definite matrix; a fraction of the time of `eigh`."""
    lower = np.linalg.cholesky(matrix)
    inverse = scipy.linalg.solve_triangular(lower, np.eye(len(matrix)), lower=True)
    return np.ascontiguousarray(inverse.T, dtype=np.float32)


def _correlation(covariance: Float[np.ndarray, "d d"]) -> Float[np.ndarray, "d d"]:
    scale = np.sqrt(np.diagonal(covariance))
    return covariance / np.outer(scale, scale)
