"""The equations of FDC as functions of arrays, under the paper's names.

Features are rows [n, d], and U_t is kept as rows, too. What is measured of features against one
task is written once, for arrays of NumPy and of JAX.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fdc_jax.calibration import inputs
from fdc_jax.calibration.compiled import eigh
from fdc_jax.heads import NORM_FLOOR, namespace, products, unit

if TYPE_CHECKING:
    from jaxtyping import Float, Int

SCALE_FLOOR = 1e-6  # Both floors are of the paper's "Test-Time Calibration".
ENERGY_FLOOR = 1e-12
# Shares of energy nearer than this count as equal: one that is reached but for rounding is reached.
ENERGY_TOLERANCE = 1e-6


# Statistics of a task (lines 6 and 10) ------------------------------------------------------------


def pca(
    features: Float[np.ndarray, "n d"], mean: Float[np.ndarray, " d"], share: float
) -> Float[np.ndarray, "r d"]:
    """Returns U_t, the fewest principal directions with a share of the variance (Eq. task-pca)."""
    count, width = features.shape
    if count >= width:
        scatter = np.zeros((width, width))
        for _, block in inputs.blocks(features):
            centred = (block - mean).astype(np.float32)
            scatter += centred.T @ centred
        energies, vectors = eigh(scatter)
        return vectors[: retained_rank(energies, share, count)].copy()
    # With X X^T v = s v, which is smaller, X^T v is the direction of X^T X. QR takes out of it what
    # rounding left of the directions before it.
    centred = (inputs.float32(features) - mean).astype(np.float32)
    energies, vectors = eigh(centred @ centred.T)
    leading = vectors[: retained_rank(energies, share, count)].astype(np.float64) @ centred
    return np.ascontiguousarray(np.linalg.qr(leading.T)[0].T, np.float32)


def retained_rank(energies: Float[np.ndarray, " k"], share: float, count: int) -> int:
    """Returns how many of descending energies hold a share; `count` samples span `count` - 1."""
    energies = np.clip(energies, 0.0, None)
    total = energies.sum()
    if total <= 0.0 or count < 2:
        return 0
    short = np.cumsum(energies) / total < share - ENERGY_TOLERANCE
    return min(int(short.sum()) + 1, count - 1, len(energies))


def means(
    features: Float[np.ndarray, "n d"], rows: Int[np.ndarray, " n"], classes: int
) -> tuple[Float[np.ndarray, " d"], Float[np.ndarray, "c d"]]:
    """Returns m_t, and p_{t,c} by class rows, zero for classes without an image (Eq. proto)."""
    total, directions = np.zeros(features.shape[1]), np.zeros((classes, features.shape[1]))
    for place, block in inputs.blocks(features):
        total += block.sum(axis=0, dtype=np.float64)
        present, members = np.unique(rows[place], return_inverse=True)
        directions[present] += np.eye(len(present), dtype=np.float32)[members].T @ unit(block)
    return (total / len(features)).astype(np.float32), unit(directions).astype(np.float32)


def moments(values: Float[np.ndarray, " n"]) -> tuple[float, float]:
    """Returns mean and population standard deviation, at least 1e-6, computed in float64."""
    wide = np.asarray(values, np.float64)
    return float(wide.mean()), max(float(wide.std()), SCALE_FLOOR)


# Features against a task (lines 6, 7, 10 and 16 to 18) -------------------------------------------


def energy(vectors: Float[Any, "... d"]) -> Float[Any, "*n"]:
    """Returns squared Euclidean norms."""
    return (vectors * vectors).sum(axis=-1)


def filtered(rows: Float[Any, "n d"], basis: Float[Any, "r d"], gamma: float) -> Float[Any, "n d"]:
    """Returns (1 - gamma) h + gamma (h U) U^T of features, or of weight rows (Eq. osp, line 9)."""
    return (1.0 - gamma) * rows + gamma * products(products(rows, basis), basis.T)


def filtered_energy(
    energies: Float[Any, " n"], inside: Float[Any, "n r"], gamma: float
) -> Float[Any, " n"]:
    """Returns squared lengths of filtered features, of those of h and of h U."""
    kept = energy(inside)
    return (1.0 - gamma) ** 2 * (energies - kept) + kept


def residual_ratio(
    near: Float[Any, "n d"],
    squares: Float[Any, " n"],
    mean: Float[Any, " d"],
    basis: Float[Any, "r d"],
) -> tuple[Float[Any, " n"], Float[Any, "n r"]]:
    """Returns rho_t (Eq. residual), and (g - m_t) U.

    `near` and `mean` are g - o and m_t - o with a point o amid the tasks, since float32 squares of
    features far from zero cancel. `squares` are the energies of `near`.
    """
    xp = namespace(near, basis)
    total = squares - 2.0 * products(near, mean[None])[:, 0] + energy(mean)
    coordinates = products(near, basis) - products(mean[None], basis)
    outside = xp.maximum(total - energy(coordinates), 0.0)
    return outside / xp.maximum(total, ENERGY_FLOOR), coordinates


def cosine_distance(
    near: Float[Any, "n d"],
    squares: Float[Any, " n"],
    prototypes: Float[Any, "c d"],
    absent: Float[Any, " c"],
    k: int,
) -> Float[Any, " n"]:
    """Returns 1 - A_{t,K}, where A_{t,K} is the mean of the K largest cosines (Eq. par).

    The cosine distance of unit vectors is half the square between them. Expanded about a point amid
    the prototypes, which `near` and `prototypes` are relative to, it keeps the digits that 1 - cos
    loses where all point nearly the same way. `squares` are the energies of `near`, plus 1 where
    g = 0, so that its cosines come out as 0. `absent` is infinite for classes without an image.
    """
    squares = squares[:, None] - 2.0 * products(near, prototypes) + energy(prototypes)
    distances, xp = squares / 2.0 + absent, namespace(near, prototypes)
    return distances.min(axis=-1) if k == 1 else xp.sort(distances, axis=-1)[:, :k].mean(axis=-1)


def head_logits(
    features: Float[Any, "n d"],
    rows: Float[Any, "c d"],
    bias: Float[Any, " c"],
    squares: Float[Any, " n"] | None,
) -> Float[Any, "n c"]:
    """Returns h.w + b, with h over its length where its squared length is given."""
    logits, xp = products(features, rows), namespace(features, rows)
    if squares is not None:
        logits = logits / xp.maximum(xp.sqrt(squares), NORM_FLOOR)[:, None]
    return logits + bias


def log_ratio(u: Float[Any, ...], mean: Any, variance: Any) -> Float[Any, ...]:
    """Returns log p_F(u) / p_O(u) with p_F = N(mean, variance) and p_O = N(0, 1) (Eq. llr).

    It is -log(V) / 2 - (u - m)^2 / (2 V) + u^2 / 2, sorted by powers of u.
    """
    constant = -0.5 * (np.log(variance) + mean * mean / variance)
    return ((0.5 - 0.5 / variance) * u + mean / variance) * u + constant


def fused(
    logit: Float[Any, "n tasks"],
    scale: Float[Any, " tasks"],
    views: Sequence[tuple[float, Float[Any, "n tasks"], Float[Any, "n tasks"]]],
    rlc_weight: float = 1.0,
    pac_weight: float = 1.0,
) -> Float[Any, "n tasks"]:
    """Returns S_t (Eq. score-fusion, Eq. dual-main); a view is w_v, its RLC and PAC evidence."""
    for weight, rlc, pac in views:
        logit = logit + weight * scale * (pac_weight * pac - rlc_weight * rlc)
    return logit
