"""How one task moves the features of all classes: an affine map from one encoder to the next.

Statistics of earlier tasks are of the encoders of their time, test images come from the newest one.
While the images D_t of task t are at hand, their features by both encoders, X = E_{t-1}(D_t) and
Y = E_t(D_t), give a map that carries means, scatters and directions along (docs/beyond.md). With
means m_X and m_Y, centred rows Xc and R = (Y - m_Y) - Xc,

    Delta = (Xc' Xc + lambda (tr Xc' Xc / d) I)^-1 Xc' R,    g -> g + (g - m_X) Delta + m_Y - m_X.

The ridge pulls towards a mere shift. Its lambda has the least error on images that were left out
one at a time, which the hat matrix gives in closed form.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fdc_jax.calibration.inputs import blocks, float32

if TYPE_CHECKING:
    from jaxtyping import Float

# Candidates of lambda; the last one leaves a shift alone.
RIDGES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, np.inf)
# Images that the error is measured on, evenly spaced; all count for the map.
LEFT_OUT = 2048


class AffineMap(NamedTuple):
    """g -> g A + b on rows g."""

    matrix: Float[np.ndarray, "d d"]  # A = I + Delta
    offset: Float[np.ndarray, " d"]  # b
    ridge: float  # lambda
    residual: Float[np.ndarray, "d d"]  # covariance of the errors on left-out images

    def move(self, rows: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n d"]:
        """Returns features, or means of features, where the newer encoder has them."""
        return rows @ self.matrix + self.offset

    def move_scatter(self, scatter: Float[np.ndarray, "d d"]) -> Float[np.ndarray, "d d"]:
        """Returns A' S A; a factor F of S = F' F becomes F A."""
        return self.matrix.T @ scatter @ self.matrix


def fit_map(before: Float[np.ndarray, "n d"], after: Float[np.ndarray, "n d"]) -> AffineMap:
    """Fits the map from features of some images to features of the same ones by a newer encoder.

    Args:
        before: E_{t-1}(D_t); read block by block, as memory maps may be.
        after: E_t(D_t), rows in the same order.
    """
    count, width = before.shape
    mean = sum(block.sum(axis=0, dtype=np.float64) for _, block in blocks(before)) / count
    target = sum(block.sum(axis=0, dtype=np.float64) for _, block in blocks(after)) / count
    scatter, cross = np.zeros((width, width)), np.zeros((width, width))
    for (_, old), (_, new) in zip(blocks(before), blocks(after), strict=True):
        centred = old - mean
        scatter += centred.T @ centred
        cross += centred.T @ ((new - target) - centred)
    energies, vectors = np.linalg.eigh(scatter)
    energies = np.maximum(energies, 0.0)
    rotated = vectors.T @ cross

    some = np.unique(np.linspace(0, count - 1, min(count, LEFT_OUT)).astype(int))
    centred = float32(before[some]) - mean
    inputs, truth = centred @ vectors, (float32(after[some]) - target) - centred

    def left_out(ridge: float) -> Float[np.ndarray, "n d"]:
        gains = _gains(energies, ridge)
        # An image's own share of its prediction: of the map, and of the mean.
        leverage = (inputs**2) @ gains + 1.0 / count
        kept = np.maximum(1.0 - leverage, 1e-6)[:, None]
        return (truth - (inputs * gains) @ rotated) / kept

    errors = [float((left_out(ridge) ** 2).sum()) for ridge in RIDGES]
    best = int(np.argmin(errors))
    residual = left_out(RIDGES[best])
    delta = vectors @ (_gains(energies, RIDGES[best])[:, None] * rotated)
    matrix = np.eye(width) + delta
    covariance = residual.T @ residual / len(some)
    return AffineMap(matrix, target - mean @ matrix, RIDGES[best], covariance)


def _gains(energies: Float[np.ndarray, " d"], ridge: float) -> Float[np.ndarray, " d"]:
    """Returns 1 / (energies + ridge x their mean); zero where nothing varies, or none may."""
    level = energies.mean()
    if level <= 0 or not np.isfinite(ridge):
        return np.zeros_like(energies)
    return 1.0 / (energies + ridge * level)
