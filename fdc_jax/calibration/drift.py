"""Drift compensation: an affine map from the features of one encoder to those of the next.

Statistics of earlier tasks were measured with earlier encoders, and test images come from the last
one. While the images D_t of task t are at hand, their features X = E_{t-1}(D_t) and Y = E_t(D_t)
give a map that moves means, scatters and directions (docs/beyond.md). With the means m_X and m_Y,
the centred rows Xc and R = (Y - m_Y) - Xc,

    Delta = (Xc' Xc + lambda (tr Xc' Xc / d) I)^-1 Xc' R,    g -> g + (g - m_X) Delta + m_Y - m_X.

The ridge shrinks the map towards a shift. Its lambda has the least leave-one-out error, which the
hat matrix gives in closed form. The hat matrix also gives the error on the mean of a class if all
of its images are held out. Products of rows are float32, their sums and all solves float64.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import scipy.linalg
from jaxtyping import Float, Int

from fdc_jax.calibration.inputs import BLOCK_ROWS, evenly_spaced, float32
from fdc_jax.calibration.shapes import row_slices

# Candidates of lambda; with the last one the map is a shift.
RIDGES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, np.inf)
# Largest number of images whose leave-one-out error chooses lambda; all images fit the map.
MAX_IMAGES = 2048
# Largest numbers of classes that are held out as a whole, and of images per class.
MAX_CLASSES = 16
MAX_IMAGES_PER_CLASS = 512
# Number of random directions in which all candidates of lambda are compared.
DIRECTIONS = 64


class AffineMap(NamedTuple):
    """g -> g A + b on rows g."""

    matrix: Float[np.ndarray, "d d"]  # A = I + Delta
    offset: Float[np.ndarray, " d"]  # b
    ridge: float  # lambda
    residual: Float[np.ndarray, "d d"]  # covariance of the leave-one-out errors
    class_errors: Float[np.ndarray, "c d"]  # errors on the means of held-out classes

    def move(self, rows: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n d"]:
        """Returns features, or means of features, in the space of the newer encoder."""
        return rows @ self.matrix + self.offset


def fit_map(
    before: Float[np.ndarray, "n d"],
    after: Float[np.ndarray, "n d"],
    transform: Callable[[np.ndarray], Float[np.ndarray, "k d"]] = float32,
    classes: Int[np.ndarray, " n"] | None = None,
) -> AffineMap:
    """Fits the map from features by one encoder to features of the same images by the next.

    Args:
        before: E_{t-1}(D_t); memory maps are read block by block.
        after: E_t(D_t), rows in the same order.
        transform: function that is applied to rows of both before the fit; returns float32.
        classes: class of each image. With fewer than two classes `class_errors` is [0, d].
    """
    count, width = before.shape
    blocks = row_slices(count, BLOCK_ROWS)

    def mean_of(view: np.ndarray) -> Float[np.ndarray, " d"]:
        sums = [transform(view[rows]).sum(axis=0, dtype=np.float64) for rows in blocks]
        return sum(sums) / count

    mean = mean_of(before)
    target = mean_of(after)

    def centred(rows: slice | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns Xc and R of the images in `rows`."""
        old = transform(before[rows]) - float32(mean)
        return old, transform(after[rows]) - float32(target) - old

    chosen = evenly_spaced(np.arange(count), MAX_IMAGES)
    old, changes = centred(chosen)
    # The dual form is smaller if images are fewer than dimensions; all must be in `old`.
    dual = count < min(width, MAX_IMAGES)
    if dual:  # (X' X + l I)^-1 X' R = X' (X X' + l I)^-1 R
        gram, cross = old @ old.T, changes
    else:
        gram, cross = np.zeros((2, width, width))
        for rows in blocks:
            x, r = centred(rows)
            gram += x.T @ x
            cross += x.T @ r
    # Ridge regression with any lambda, in scaled principal coordinates z of Xc: a row z predicts
    # z diag(gains) Z' R. Eigenvectors are float64, since errors are divided by small differences.
    values, columns = np.linalg.eigh(gram.astype(np.float64))
    vectors = columns.astype(np.float32)
    level = float(np.trace(gram)) / width or 1.0
    energies = (np.maximum(values, 0.0) / level).astype(np.float32)
    gains = 1.0 / (energies + np.array(RIDGES, np.float32)[:, None])
    scale = np.sqrt(energies) if dual else np.float32(1.0 / np.sqrt(level))
    coordinates = (vectors if dual else old @ vectors) * scale
    products = (vectors * scale).T @ cross.astype(np.float32)

    def errors(index: int, truth: np.ndarray, responses: np.ndarray) -> tuple[float, np.ndarray]:
        """Returns the sum of squared leave-one-out errors with one lambda, and the errors."""
        shrunk = coordinates * gains[index]
        # One minus the leverage of an image, the diagonal of the hat matrix.
        rest = 1.0 - (shrunk * coordinates).sum(axis=1) - np.float32(1.0 / count)
        values = (truth - shrunk @ responses) / np.maximum(rest, np.float32(1e-6))[:, None]
        return float(np.square(values).sum(dtype=np.float64)), values

    # All candidates are compared in few random directions, the best two in all directions.
    narrow = changes, products
    if width > DIRECTIONS:
        sketch = np.random.default_rng(0).standard_normal((width, DIRECTIONS), np.float32)
        narrow = changes @ sketch, products @ sketch
    order = np.argsort([errors(index, *narrow)[0] for index in range(len(RIDGES))])
    compared = {index: errors(index, changes, products) for index in order[:2]}
    best = min(compared, key=lambda index: compared[index][0])
    residual = compared[best][1]
    matrix = np.eye(width)
    if np.isfinite(RIDGES[best]):
        raised = gram + RIDGES[best] * level * np.eye(len(gram))
        delta = scipy.linalg.cho_solve(scipy.linalg.cho_factor(raised), cross)
        matrix += old.T @ delta if dual else delta

    def class_error(label: int) -> Float[np.ndarray, " d"]:
        """Returns the error on the mean of a class if all of its images are held out."""
        members = evenly_spaced(np.flatnonzero(classes == label), MAX_IMAGES_PER_CLASS)
        x, r = centred(members)
        rows = coordinates[members] if dual else (x @ vectors) * scale
        # Held out, these images have errors (I - H)^-1 e, with e and hat matrix H of the full fit.
        shrunk = rows * gains[best]
        complement = np.eye(len(members)) - (shrunk @ rows.T).astype(np.float64) - 1.0 / count
        weights = np.linalg.solve(complement, np.full(len(members), 1.0 / len(members)))
        return weights @ r - (weights @ shrunk) @ products

    labels = np.unique([] if classes is None else classes)
    held_out = evenly_spaced(labels, MAX_CLASSES) if len(labels) > 1 else labels[:0]
    class_errors = np.reshape([class_error(label) for label in held_out], (len(held_out), width))
    covariance = residual.T @ residual / len(chosen)
    return AffineMap(matrix, target - mean @ matrix, RIDGES[best], covariance, class_errors)
