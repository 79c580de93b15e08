"""Comparators of class means and class Gaussians: the nearest class also chooses the task.

Covariances are inverted in float64 on the host, since those of n < d features have condition
numbers beyond float32. The statistics have a float32 factor F with S^-1 = F F': a distance |(g - m)
F|^2 is a sum of squares, which float32 computes without cancellation.
"""

import itertools
from functools import cached_property

import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jaxtyping import Array, Float

from fdc_jax.calibration.comparators.base import Comparator, class_means, within_classes
from fdc_jax.calibration.inputs import float32, in_blocks
from fdc_jax.calibration.shapes import squared_norm
from fdc_jax.heads import products, unit


class NearestClassMean(Comparator):
    """Score of class c: the cosine of the feature g to the mean m_c of the class's raw features.

    With the pretrained view this is SimpleCIL (Zhou et al., "Revisiting Class-Incremental Learning
    with Pre-Trained Models", 2023), as PILOT has it. In the adapted view, E_T(x) is compared with
    means of E_t(D_t).
    """

    name = "ncm"

    def _collect(self, features, rows, head) -> Float[np.ndarray, "c d"]:
        return class_means(features, rows).astype(np.float32)

    @cached_property
    def _solved(self) -> Float[np.ndarray, "classes d"]:
        return np.concatenate(self.statistics)

    def _class_scores(self, features: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n classes"]:
        return in_blocks(_cosines, self._solved, features)


class Mahalanobis(Comparator):
    """Score of class c: minus a Mahalanobis distance (g - m_c)' S^-1 (g - m_c).

    Lee et al., "A Simple Unified Framework for Detecting Out-of-Distribution Samples" (2018). S is
    the within-class covariance pooled over all tasks: the scatter over the sample count, shrunk to
    (1 - s) S + s tr(S)/d I with s = 0.001. S is the identity if no
    class has any variance.
    """

    name = "mahalanobis"

    def _collect(self, features, rows, head) -> Float[np.ndarray, "c d"]:
        means, scatter = within_classes(features, rows)
        self.total = scatter if self.total is None else self.total + scatter
        return means

    @cached_property
    def _solved(self) -> tuple[np.ndarray, np.ndarray]:
        covariance = self.total / np.concatenate(self.counts).sum()
        level = np.trace(covariance) / len(covariance) * np.eye(len(covariance))
        factor = _inverse_factor(0.999 * covariance + 0.001 * level)
        return np.concatenate(self.statistics), factor

    def _class_scores(self, features: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n classes"]:
        return -squared_distances(features, *self._solved)


class FeCAM(Comparator):
    """Score of class c: minus a Mahalanobis distance with the correlation matrix of the class.

    Goswami et al., "FeCAM: Exploiting the Heterogeneity of Class Distributions" (2023), as in the
    authors' script for ViTs. Features have unit length. S_c is the sample covariance of the class
    (divisor n - 1) plus its mean diagonal on the diagonal, and R_c its correlation matrix. The
    distance is (g/|g| - m_c)' R_c^-1 (g/|g| - m_c); the mean m_c is not normalised again.

    If a class has far fewer images than features have dimensions, R_c has small eigenvalues along
    the directions of the class, and the class of a sample can rank last. A class with a single
    image has S_c = 0. If no feature varies, R_c is the identity.
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
        gaussians = itertools.chain(*self.statistics)
        return -np.concatenate([squared_distances(features, *fit) for fit in gaussians], axis=1)


def squared_distances(
    features: Float[np.ndarray, "n d"],
    means: Float[np.ndarray, "c d"],
    factor: Float[np.ndarray, "d r"],
) -> Float[np.ndarray, "n c"]:
    """Returns |(g - m) F|^2 of all rows g and means m, less the centre of the means."""
    centre = means.mean(axis=0)
    centred, means, factor = map(float32, (features - centre, means - centre, factor))
    return in_blocks(_whitened, (means, factor), centred)


def _cosines(rows: Float[Array, "c d"], features: Float[Array, "n d"]) -> Float[Array, "n c"]:
    return products(unit(features), unit(rows))


def _whitened(
    fitted: tuple[Float[Array, "c d"], Float[Array, "d r"]], features: Float[Array, "n d"]
) -> Float[Array, "n c"]:
    means, factor = fitted
    whitened = products(features, factor.T)
    rows = products(means, factor.T)
    if len(rows) == 1:
        return squared_norm(whitened - rows)[:, None]
    squares = squared_norm(whitened)[:, None] + squared_norm(rows)[None]
    return jnp.maximum(squares - 2.0 * products(whitened, rows), 0.0)


def _correlation_factor(covariance: Float[np.ndarray, "d d"]) -> Float[np.ndarray, "d d"]:
    """Returns `_inverse_factor` of a covariance plus its mean diagonal, as correlations."""
    raised = covariance + np.trace(covariance) / len(covariance) * np.eye(len(covariance))
    scale = np.sqrt(np.diagonal(raised))
    return _inverse_factor(raised / np.outer(scale, scale) if scale.any() else raised)


def _inverse_factor(matrix: Float[np.ndarray, "d d"]) -> Float[np.ndarray, "d d"]:
    """Returns F with F F' the inverse of a positive definite matrix; I for a matrix of zeros."""
    identity = np.eye(len(matrix))
    lower = np.linalg.cholesky(matrix) if matrix.any() else identity
    inverse = scipy.linalg.solve_triangular(lower, identity, lower=True)
    return np.ascontiguousarray(inverse.T, dtype=np.float32)
