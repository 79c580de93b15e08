"""Classes as points and as Gaussians: the nearest one decides task and class.

Covariances are accumulated, inverted and factored in float64 on the host, because inverse
covariances of n < d features have condition numbers beyond float32. What is stored is a float32
factor F with S^-1 = F F', so that a distance is |(g - m) F|^2, a sum of squares that float32
evaluates without cancellation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.linalg

from fdc_jax.calibration.comparators.base import Comparator, class_means, within_classes
from fdc_jax.calibration.compiled import in_blocks, jnp
from fdc_jax.calibration.equations import energy
from fdc_jax.heads import products, unit

if TYPE_CHECKING:
    from jaxtyping import Array, Float


class NearestClassMean(Comparator):
    """Score of class c: the cosine of the feature g to the mean m_c of the class's raw features.

    With the pretrained view this is SimpleCIL (Zhou et al., "Revisiting Class-Incremental Learning
    with Pre-Trained Models", 2023), as PILOT runs it. The adapted view compares E_T(x) with means
    of E_t(D_t).
    """

    name = "ncm"

    def _collect(self, features, rows, head) -> Float[np.ndarray, "c d"]:
        return class_means(features, rows).astype(np.float32)

    def _solve(self) -> Float[np.ndarray, "classes d"]:
        return np.concatenate(self.statistics)

    def _class_scores(self, features: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n classes"]:
        return in_blocks(_cosines, self._solved, features)


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

    def _collect(self, features, rows, head) -> Any:
        if self.variant != "shared":  # A task's images alone leave directions without variance.
            features = features.astype(np.float64)
        means, scatter = within_classes(features, rows)
        if self.variant == "shared":
            self.total = scatter if self.total is None else self.total + scatter
            return means
        gaussians = [(means, _shrunk_factor(scatter / len(rows)))]
        if self.variant == "relative":
            mean, total = within_classes(features, np.zeros_like(rows))
            gaussians.append((mean, _shrunk_factor(total / len(rows))))
        return gaussians

    def _solve(self) -> Any:
        if self.variant != "shared":
            return self.statistics
        covariance = self.total / sum(each.sum() for each in self.counts)
        return [[(np.concatenate(self.statistics), _shrunk_factor(covariance))]]

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

    Goswami et al., "FeCAM: Exploiting the Heterogeneity of Class Distributions" (2023), as the
    authors' script for ViTs has it: features are normalised first; S_c is the sample covariance
    (divisor n - 1) of the class plus its mean diagonal on the diagonal, R_c that as a correlation
    matrix, and the distance (g/|g| - m_c)' R_c^-1 (g/|g| - m_c) with m_c not renormalised.

    With far fewer images per class than dimensions it can rank a sample's own class last: R_c then
    has its small eigenvalues along the class's own directions. That is the method's formula, not
    rounding. A class of one image has S_c = 0; where nothing varies, R_c is the identity.
    """

    name = "fecam"

    def _collect(self, features, rows, head) -> list[tuple[np.ndarray, np.ndarray]]:
        wide = unit(features.astype(np.float64))
        gaussians = []
        for row in range(rows.max() + 1):
            members = wide[rows == row]
            mean, scatter = within_classes(members, np.zeros(len(members), int))
            gaussians.append((mean, _correlation_factor(scatter / max(len(members) - 1, 1))))
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
    narrow = (np.asarray(part, np.float32) for part in (means - centre, factor))
    near = np.asarray(features - centre, np.float32)
    return in_blocks(_whitened, tuple(narrow), near)


def _cosines(rows: Float[Array, "c d"], features: Float[Array, "n d"]) -> Float[Array, "n c"]:
    return products(unit(features), unit(rows))


def _whitened(
    fitted: tuple[Float[Array, "c d"], Float[Array, "d r"]], features: Float[Array, "n d"]
) -> Float[Array, "n c"]:
    means, factor = fitted
    near, rows = products(features, factor.T), products(means, factor.T)
    if len(rows) == 1:
        return energy(near - rows)[:, None]
    squares = energy(near)[:, None] + energy(rows)
    return jnp.maximum(squares - 2.0 * products(near, rows), 0.0)


# Factors F with F F' the inverse of what a method makes of a covariance; I without variance ------


def _shrunk_factor(covariance: Float[np.ndarray, "d d"]) -> Float[np.ndarray, "d d"]:
    level = np.trace(covariance) / len(covariance) * np.eye(len(covariance))
    return _inverse_factor(0.999 * covariance + 0.001 * level)


def _correlation_factor(covariance: Float[np.ndarray, "d d"]) -> Float[np.ndarray, "d d"]:
    raised = covariance + np.trace(covariance) / len(covariance) * np.eye(len(covariance))
    scale = np.sqrt(np.diagonal(raised))
    return _inverse_factor(raised / np.outer(scale, scale) if scale.any() else raised)


def _inverse_factor(matrix: Float[np.ndarray, "d d"]) -> Float[np.ndarray, "d d"]:
    """Of a positive definite matrix, in a fraction of the time of `eigh`."""
    identity = np.eye(len(matrix))
    lower = np.linalg.cholesky(matrix) if matrix.any() else identity
    inverse = scipy.linalg.solve_triangular(lower, identity, lower=True)
    return np.ascontiguousarray(inverse.T, dtype=np.float32)
