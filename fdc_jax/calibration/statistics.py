"""Statistics of tasks as FDC keeps and saves them."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float


class View(NamedTuple):
    """Statistics of a task in one view; moments are population mean and standard deviation."""

    mean: Float[np.ndarray, " d"]  # m_t
    basis: Float[np.ndarray, "r d"]  # U_t; no rows if the features are equal
    prototypes: Float[np.ndarray, "c d"]  # p_{t,c}; zero for classes without an image
    residual: tuple[float, float] = (0.0, 1.0)  # moments of rho_t on the task's samples
    affinity: tuple[float, float] = (0.0, 1.0)  # moments of A_t on the task's samples


class Task(NamedTuple):
    """Statistics of a task: its views, adapted first, and sigma_t without and with TSF."""

    views: list[View]
    raw_scale: float = 1.0
    filtered_scale: float = 1.0


class Foreign(NamedTuple):
    """The reference p_F = N(mean, variance) and tau of a view; with one task p_F is p_O."""

    mean: float = 0.0  # mu_F
    variance: float = 1.0  # V_F
    scale: float = 1.0  # tau
