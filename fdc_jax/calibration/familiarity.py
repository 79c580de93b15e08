"""Familiarity: the likeness of a new image to the learned images (docs/predict.md).

With the precision P that all classes share, the familiarity of a feature g is

    f(g) = (D^2 - min_c D_c^2) / 2,    D_c^2 = (g - mu_c)' P (g - mu_c),

where D is the distance to one Gaussian of all images. It is measured in the pretrained view, if
there is one, since that encoder was trained on none of the images: an image that the statistics
leave out is then like a new image. Without one of the n images of a class, its r = g - mu_c becomes
h r with h = n / (n - 1), and P becomes P + b P r r' P / (1 - b r' P r) with b = (1 - a) h / N; the
other parts of P are kept.

Statistics change with later tasks. Values are therefore kept less their expectation for the class,
in units of their standard deviation,

    e_c = (mu' W mu + tr A) / 2,    s_c^2 = tr A^2 / 2 + v mu' W S W mu / N,
    A = (v W - u P) S / N,

where mu = mu_c - m, and m and W are the mean and the precision of all images as one. For an image
that is left out, the squared distance to its class grows by the factor u = h^2 / (1 - b tr P S / N)
with the mean n, that to m by v likewise. Values regard the own class c alone; the gain in f by a
nearer class is known for images of the newest task, and others take the gain of the closest value.
The typicality of an image is the share of values, its own f among them, that are at most its f.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import scipy.linalg
from jaxtyping import Float, Int

from fdc_jax.calibration.inputs import float32
from fdc_jax.calibration.shapes import padded, padded_size
from fdc_jax.heads import products, unit

# Share a of a class's own covariance, and the least lambda (fdc_jax.calibration.gaussians).
OWN_SHARE = 0.1
LEAST_SHRINKAGE = 0.1
# Images that are less typical are unlike anything learned.
UNTYPICAL = 0.05


def shared_precision(
    scatter: Float[np.ndarray, "d d"], images: int, classes: int
) -> Float[np.ndarray, "d d"]:
    """Returns P, the inverse of (1 - a) S / N + lambda (tr S / (N d)) I."""
    width, kind = len(scatter), scatter.dtype.type
    covariance = scatter / kind(images)
    variance = np.trace(covariance) / width
    shrinkage = LEAST_SHRINKAGE + width / max(images - classes, 1)
    covariance *= kind(1 - OWN_SHARE)
    covariance.flat[:: width + 1] += kind(shrinkage * variance if variance > 0 else 1.0)
    lower = scipy.linalg.cholesky(covariance, lower=True, check_finite=False)
    (potri,) = scipy.linalg.get_lapack_funcs(["potri"], [lower])
    half = potri(lower, lower=1)[0]
    return half + np.tril(half, -1).T


class Reference(NamedTuple):
    """Statistics of a view that `compare` reads."""

    precision: Float[Any, "d d"]  # P
    means: Float[Any, "c d"]  # mu_c less m
    constants: Float[Any, " c"]  # (mu_c - m)' P (mu_c - m) / 2, infinite without an image
    middle: Float[Any, " d"]  # m
    whole: Float[Any, "d d"]  # W
    expected: Float[Any, " c"]  # e_c
    deviations: Float[Any, " c"]  # s_c


def reference(known: Any, counts: Int[np.ndarray, " c"], kind: type = np.float64) -> Reference:
    """Returns the reference of `gaussians.ViewClasses`, computed in floats of a kind."""
    images = int(counts.sum())
    size = padded_size(len(counts), 8)
    present = counts > 0
    classes = int(present.sum())
    scatter = known.scatter.astype(kind)
    middle = np.average(known.means, axis=0, weights=counts)
    means = ((known.means - middle) * present[:, None]).astype(kind)
    about = means * np.sqrt(counts, dtype=kind)[:, None]
    total = scatter + about.T @ about
    precision = shared_precision(scatter, images, classes)
    whole = shared_precision(total, images, 1)
    constants = np.where(present, ((means @ precision) * means).sum(axis=1) / 2, np.inf)
    inner = precision @ scatter / kind(images)
    turned = means @ whole
    u = _growth(np.trace(inner), max(images / classes, 2), images)
    v = _growth((whole * total).sum() / images, images, images)
    excess = v * (whole @ scatter / kind(images)) - u * inner
    expected = ((turned * means).sum(axis=1) + np.trace(excess)) / 2
    variances = v * ((turned @ scatter) * turned).sum(axis=1) / images
    variances += (excess * excess.T).sum() / 2
    by_class = padded(means, size), padded(constants, size, np.inf)
    deviations = np.sqrt(np.maximum(variances, 1e-12))
    parts = precision, *by_class, middle, whole, padded(expected, size), padded(deviations, size)
    return Reference(*map(float32, parts))


def _growth(square: Any, count: float, images: int) -> Any:
    """Returns h^2 / (1 - b r' P r), the growth of r' P r if one of `count` images is left out."""
    h = count / max(count - 1.0, 1.0)
    return h**2 / (1.0 - (1.0 - OWN_SHARE) * h / images * square)


def compare(known: Reference, features: Float[Any, "n d"]) -> tuple[Any, Any]:
    """Returns f and D^2 / 2 of features."""
    centred = unit(features) - known.middle[None]
    turned = products(centred, known.precision)
    nearest = (products(turned, known.means) - known.constants[None]).max(axis=-1)
    half_squares = (products(centred, known.whole) * centred).sum(axis=-1) / 2
    return nearest - (turned * centred).sum(axis=-1) / 2 + half_squares, half_squares


def left_out(
    known: Reference,
    features: Float[np.ndarray, "n d"],
    columns: Int[np.ndarray, " n"],
    counts: Int[np.ndarray, " c"],
) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, " n"]]:
    """Returns f of left-out images by their own class alone, and the gain by the nearest class.

    The class of every image must have two or more images.
    """
    near = unit(features) - known.middle

    def without(away: Any, matrix: Any, count: Any) -> tuple[Any, Any, Any]:
        """Returns away' M, h^2 away' M away after the change of M, and b / (1 - b away' M away)."""
        turned = away @ matrix
        square = (turned * away).sum(axis=1)
        h = count / (count - 1.0)
        b = (1.0 - OWN_SHARE) * h / counts.sum()
        return turned, h**2 * square / (1.0 - b * square), b / (1.0 - b * square)

    away = near - known.means[columns]
    turned, own_squares, change = without(away, known.precision, counts[columns])
    to_all = near @ known.precision
    squares = (to_all * near).sum(axis=1)[:, None] + 2 * (known.constants - to_all @ known.means.T)
    along = (turned * near).sum(axis=1)[:, None] - turned @ known.means.T
    squares += change[:, None] * along**2
    squares[np.arange(len(near)), columns] = own_squares
    middle_squares = without(near, known.whole, counts.sum())[1]
    return (middle_squares - own_squares) / 2, (own_squares - squares.min(axis=1)) / 2


class Familiarity(NamedTuple):
    """Standardised familiarity of left-out images with their class, and gains by the nearest."""

    values: Float[np.ndarray, " n"] = np.zeros(0, np.float32)
    columns: Int[np.ndarray, " n"] = np.zeros(0, np.int32)  # index of each image's class
    gains: Float[np.ndarray, " m"] = np.zeros(0, np.float32)  # of the last m images

    def with_task(self, known: Reference, values: Any, gains: Any, columns: Any) -> Familiarity:
        """Returns the values with images of a further task."""
        values = float32((values - known.expected[columns]) / known.deviations[columns])
        columns = np.append(self.columns, columns.astype(np.int32))
        return Familiarity(np.append(self.values, values), columns, float32(gains))

    def typicality(self, known: Reference, familiar: Float[np.ndarray, " n"]) -> Any:
        """Returns the share of left-out images, in (0, 1], that are at most as familiar."""
        expected = np.asarray(known.expected)[self.columns]
        deviations = np.asarray(known.deviations)[self.columns]
        values = expected + deviations * self.values
        if newest := len(self.gains):
            order = np.argsort(self.values[-newest:])
            closest = np.searchsorted(self.values[-newest:][order], self.values)
            values += self.gains[order[np.minimum(closest, newest - 1)]]
        values = np.sort(values)
        return (1.0 + np.searchsorted(values, familiar, side="right")) / (1.0 + len(values))
