"""How one task moves the features of all classes: an affine map from one encoder to the next.

Statistics of earlier tasks are of the encoders of their time, test images come from the newest one.
While the images D_t of task t are at hand, their features by both encoders, X = E_{t-1}(D_t) and
Y = E_t(D_t), give a map that carries means, scatters and directions along (docs/beyond.md). With
means m_X and m_Y, centred rows Xc and R = (Y - m_Y) - Xc,

    Delta = (Xc' Xc + lambda (tr Xc' Xc / d) I)^-1 Xc' R,    g -> g + (g - m_X) Delta + m_Y - m_X.

The ridge pulls towards a mere shift. Its lambda has the least error on images that were left out
one at a time, which the hat matrix gives in closed form. The same matrix gives the error on the
mean of a class whose images are all left out. Products of rows are taken in float32 and added up in
float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import scipy.linalg

from fdc_jax.calibration.inputs import blocks, float32

if TYPE_CHECKING:
    from jaxtyping import Float, Int

# Candidates of lambda; the last one leaves a shift alone.
RIDGES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, np.inf)
# Images that the error is measured on, evenly spaced; all count for the map.
LEFT_OUT = 2048
# Classes that are left out as a whole, evenly spaced, and images of each.
CLASSES, OF_CLASS = 16, 512
# Random directions of the errors in which candidates of lambda are compared.
DIRECTIONS = 64


class AffineMap(NamedTuple):
    """g -> g A + b on rows g."""

    matrix: Float[np.ndarray, "d d"]  # A = I + Delta
    offset: Float[np.ndarray, " d"]  # b
    ridge: float  # lambda
    residual: Float[np.ndarray, "d d"]  # covariance of the errors on left-out images
    class_errors: Float[np.ndarray, "c d"]  # mean errors of classes that were left out

    def move(self, rows: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n d"]:
        """Returns features, or means of features, where the newer encoder has them."""
        return rows @ self.matrix + self.offset

    def move_scatter(self, scatter: Float[np.ndarray, "d d"]) -> Float[np.ndarray, "d d"]:
        """Returns A' S A; a factor F of S = F' F becomes F A."""
        return self.matrix.T @ scatter @ self.matrix


class Path(NamedTuple):
    """Maps one after the other as one, in float64, and the way back.

    What is kept of classes stays in the frame where the path began, and is moved when it is needed.
    """

    matrix: Float[np.ndarray, "d d"]
    offset: Float[np.ndarray, " d"]
    inverse: Float[np.ndarray, "d d"]

    @property
    def reversed(self) -> Path:
        """The way back."""
        return Path(self.inverse, -self.offset @ self.inverse, self.matrix)

    @property
    def amplification(self) -> float:
        """How much rounding at the beginning grows to the end, at least 1; 1 for rotations."""
        lengths = np.linalg.norm(self.matrix), np.linalg.norm(self.inverse)
        return float(lengths[0] * lengths[1]) / len(self.matrix)


def path(known: Path | None, by: AffineMap) -> Path:
    """Returns a path with one more map; the way back of a singular one is infinite."""
    matrix, offset = by.matrix, by.offset
    if known:
        matrix, offset = known.matrix @ matrix, by.move(known.offset)
    try:
        inverse = np.linalg.inv(matrix)
    except np.linalg.LinAlgError:
        inverse = np.full_like(matrix, np.inf)
    return Path(matrix, offset, inverse)


def fit_map(
    before: Float[np.ndarray, "n d"],
    after: Float[np.ndarray, "n d"],
    take: Callable[[np.ndarray], Float[np.ndarray, "k d"]] = float32,
    classes: Int[np.ndarray, " n"] | None = None,
) -> AffineMap:
    """Fits the map from features of some images to features of the same ones by a newer encoder.

    Args:
        before: E_{t-1}(D_t); read block by block, as memory maps may be.
        after: E_t(D_t), rows in the same order.
        take: what of some rows the map is of, in float32.
        classes: of the images; without, or with a single one, there are no `class_errors`.
    """
    count, width = before.shape
    mean, target = (
        sum(take(block).sum(axis=0, dtype=np.float64) for _, block in blocks(each)) / count
        for each in (before, after)
    )
    some = np.unique(np.linspace(0, count - 1, min(count, LEFT_OUT)).astype(int))
    centred, truth = _centred(take(before[some]), take(after[some]), mean, target)
    few = count < min(width, LEFT_OUT)
    if few:  # (X' X + l I)^-1 X' R = X' (X X' + l I)^-1 R, which is smaller.
        gram, cross = centred @ centred.T, truth
    else:
        gram, cross = np.zeros((width, width)), np.zeros((width, width))
        for (_, old), (_, new) in zip(blocks(before), blocks(after), strict=True):
            rows, change = _centred(take(old), take(new), mean, target)
            gram += rows.T @ rows
            cross += rows.T @ change
    # In float64: what the errors of left-out images divide by amplifies rounding.
    found, columns = np.linalg.eigh(gram.astype(np.float64))
    vectors = columns.T.astype(np.float32)
    level = float(np.trace(gram)) / width or 1.0
    energies = (np.maximum(found, 0.0) / level).astype(np.float32)
    gains = 1.0 / (energies + np.array(RIDGES, np.float32)[:, None])
    lengths, unit = np.sqrt(energies), np.float32(1.0 / np.sqrt(level))
    inputs = vectors.T * lengths if few else (centred @ vectors.T) * unit
    rotated = (vectors @ cross.astype(np.float32)) * (lengths[:, None] if few else unit)
    # An image's own share of its prediction: of the map, and of the mean.
    leverage = (inputs**2) @ gains.T + np.float32(1.0 / count)
    kept = np.maximum(1.0 - leverage, np.float32(1e-6))

    def left_out(
        place: int, truth: Float[np.ndarray, "n k"], rotated: Float[np.ndarray, "d k"]
    ) -> tuple[float, Float[np.ndarray, "n k"]]:
        errors = (truth - (inputs * gains[place]) @ rotated) / kept[:, place, None]
        return float((errors * errors).sum(dtype=np.float64)), errors

    # All candidates in few directions, the best two in full.
    narrow = truth, rotated
    if width > DIRECTIONS:
        sketch = np.random.default_rng(0).standard_normal((width, DIRECTIONS), np.float32)
        narrow = truth @ sketch, rotated @ sketch
    order = np.argsort([left_out(place, *narrow)[0] for place in range(len(RIDGES))])
    compared = [(*left_out(place, truth, rotated), RIDGES[place]) for place in order[:2]]
    _, residual, ridge = min(compared, key=lambda each: each[0])
    matrix = np.eye(width)
    if np.isfinite(ridge):
        raised = gram + ridge * level * np.eye(len(gram))
        delta = scipy.linalg.cho_solve(scipy.linalg.cho_factor(raised), cross)
        matrix += centred.T @ delta if few else delta
    covariance, class_errors = residual.T @ residual / len(some), np.zeros((0, width))
    names = np.unique([] if classes is None else classes)
    for name in names[np.linspace(0, len(names) - 1, min(len(names), CLASSES)).astype(int)]:
        own = np.flatnonzero(classes == name)
        if len(own) == count:
            break
        own = own[np.linspace(0, len(own) - 1, min(len(own), OF_CLASS)).astype(int)]
        old, change = _centred(take(before[own]), take(after[own]), mean, target)
        rows = inputs[own] if few else (old @ vectors.T) * unit
        shrunk = rows * gains[RIDGES.index(ridge)]
        # Errors of a class left out are (I - H)^-1 e, with the hat matrix of its images alone.
        rest = (shrunk @ -rows.T).astype(np.float64) - 1.0 / count
        rest.flat[:: len(own) + 1] += 1.0
        weights = np.linalg.solve(rest, np.full(len(own), 1.0 / len(own)))
        error = weights @ change - (weights @ shrunk) @ rotated
        class_errors = np.vstack([class_errors, error])
    return AffineMap(matrix, target - mean @ matrix, ridge, covariance, class_errors)


def _centred(
    before: np.ndarray, after: np.ndarray, mean: np.ndarray, target: np.ndarray
) -> tuple[Float[np.ndarray, "n d"], Float[np.ndarray, "n d"]]:
    """Returns Xc and R of some rows in float32."""
    centred = before - float32(mean)
    return centred, after - float32(target) - centred
