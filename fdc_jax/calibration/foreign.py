"""The foreign-task reference of RLC: how residuals of later tasks look to earlier ones."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from fdc_jax.calibration.measures import SCALE_FLOOR

# Up to this many numbers are gathered and sorted; of more, only those near the median.
GATHERED = 1 << 22


class ForeignReference(NamedTuple):
    """Moments of p_F and the scale tau of the log-likelihood ratio, in one view."""

    mean: float
    variance: float
    scale: float


def log_likelihood_ratio(
    residuals: Float[np.ndarray, "..."], mean: float, variance: float
) -> Float[np.ndarray, "..."]:
    """Returns log p_F(u) - log p_O(u) for p_F = N(mean, variance) and p_O = N(0, 1) (Eq. llr)."""
    residuals = np.asarray(residuals, np.float64)
    return 0.5 * (residuals**2 - (residuals - mean) ** 2 / variance - np.log(variance))


def fit_foreign_reference(
    residuals: Sequence[Float[np.ndarray, "earlier n"]],
) -> ForeignReference | None:
    """Fits the foreign reference of one view (Eq. foreign, Algorithm 1, line 13).

    Args:
        residuals: for each task t, its features' standardised residuals against every earlier
            task j, as [t, n_t]; empty for the first task.

    Returns:
        Mean and variance with every pair of tasks weighted equally, and the median absolute
        log-likelihood ratio over all samples; None with fewer than two tasks. Float64 throughout.
    """
    tasks = [task for task in residuals if task.size]
    if not tasks:
        return None
    moments = [_pair_moments(task) for task in tasks]
    means, variances = np.concatenate(moments, axis=1)
    mean = float(means.mean())
    variance = max(float(np.mean(variances + (means - mean) ** 2)), SCALE_FLOOR)
    scale = _median(lambda: (np.abs(log_likelihood_ratio(t, mean, variance)) for t in tasks))
    return ForeignReference(mean, variance, max(scale, SCALE_FLOOR))


def _pair_moments(task: Float[np.ndarray, "earlier n"]) -> Float[np.ndarray, "2 earlier"]:
    wide = np.ascontiguousarray(task, np.float64)
    return np.stack([wide.mean(axis=1), wide.var(axis=1)])


def _median(parts: Callable[[], Iterable[Float[np.ndarray, "..."]]]) -> float:
    """Returns the exact median of numbers of at least 0, which come in parts, several times over.

    The order of such numbers is that of their bit patterns. Counting the leading 16 bits shows
    which of them the median has; only the few numbers that share them are gathered.
    """
    total = sum(part.size for part in parts())
    ranks = np.array([(total - 1) // 2, total // 2])
    if total <= GATHERED:
        near = np.concatenate([part.ravel() for part in parts()])
    else:
        counts = np.zeros(1 << 16, np.int64)
        for part in parts():
            counts += np.bincount(_leading_bits(part), minlength=len(counts))
        ends = np.cumsum(counts)
        first, last = np.searchsorted(ends, ranks, side="right")
        near = np.concatenate(
            [
                part.ravel()[(leading >= first) & (leading <= last)]
                for part in parts()
                for leading in [_leading_bits(part)]
            ]
        )
        ranks -= ends[first] - counts[first]
    return float(np.mean(np.partition(near, ranks)[ranks]))


def _leading_bits(numbers: Float[np.ndarray, "..."]) -> Int[np.ndarray, " n"]:
    return (np.ascontiguousarray(numbers).ravel().view(np.uint64) >> np.uint64(48)).astype(np.int64)


def foreign_coefficients(reference: ForeignReference | None) -> Float[np.ndarray, " 3"]:
    """Returns (a, b, c) such that log(p_F(u) / p_O(u)) / tau = a u^2 + b u + c (Eq. llr).

    Without a foreign reference all are zero, and so is RLC.
    """
    if reference is None:
        return np.zeros(3, np.float32)
    mean, variance, scale = reference
    quadratic = 0.5 - 0.5 / variance
    constant = -0.5 * (np.log(variance) + mean * mean / variance)
    return (np.array([quadratic, mean / variance, constant]) / scale).astype(np.float32)
