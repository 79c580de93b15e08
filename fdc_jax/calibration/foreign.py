"""The foreign-task reference of RLC: how residuals of later tasks look to earlier ones."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from fdc_jax.calibration.measures import SCALE_FLOOR


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
    pairs = [row.astype(np.float64) for task in residuals for row in task]
    if not pairs:
        return None
    means = np.array([pair.mean() for pair in pairs])
    variances = np.array([pair.var() for pair in pairs])
    mean = float(means.mean())
    variance = max(float(np.mean(variances + (means - mean) ** 2)), SCALE_FLOOR)
    ratios = np.abs(log_likelihood_ratio(np.concatenate(pairs), mean, variance))
    return ForeignReference(mean, variance, max(float(np.median(ratios)), SCALE_FLOOR))


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
