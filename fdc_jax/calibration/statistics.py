"""Settings of FDC, rows of the paper's ablation, and the statistics that FDC keeps."""

from __future__ import annotations

from dataclasses import dataclass, fields
from numbers import Real
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from fdc_jax.errors import InputError

# Table current-ablation, and the views of Table plugin without TSF, as arguments of `Terms.fuse`.
COMPONENTS = {
    "raw": {"tsf": False, "rlc": False, "pac": False},
    "tsf": {"rlc": False, "pac": False},
    "pac": {"tsf": False, "rlc": False},
    "rlc": {"tsf": False, "pac": False},
    "tsf+pac": {"rlc": False},
    "tsf+rlc": {"pac": False},
    "pac+rlc": {"tsf": False},
    "full": {},
    "adapted_view": {"pretrained_view": False},
    "pretrained_view": {"adapted_view": False},
    "pac+rlc_adapted_view": {"tsf": False, "pretrained_view": False},
    "pac+rlc_pretrained_view": {"tsf": False, "adapted_view": False},
}


@dataclass(frozen=True)
class Settings:
    """Settings of FDC; the defaults are the paper's. InputError if one is out of range."""

    retained_energy: float = 0.75  # eta, share of a task's variance in its subspace, in (0, 1]
    attenuation: float = 0.5  # gamma, how much TSF removes outside the subspace, in [0, 1]
    rlc_weight: float = 1.0  # alpha
    pac_weight: float = 1.0  # beta
    adapted_view_weight: float = 1.0  # w_T
    pretrained_view_weight: float = 1.0  # w_0; with 0 no pretrained features are needed to score
    neighbours: int = 1  # K, class prototypes whose cosines PAC averages

    def __post_init__(self):
        for field in fields(self):
            value, kind = getattr(self, field.name), type(field.default)
            least, what = (1, "count") if kind is int else (0, "finite number")
            real = issubclass(type(value), Real) and not isinstance(value, bool)
            if not (real and abs(value) < 1e300 and kind(value) == value >= least):
                raise InputError(f"{field.name}: expected a {what} from {least}, found {value!r}")
            object.__setattr__(self, field.name, kind(value))
        if not 0.0 < self.retained_energy <= 1.0:
            raise InputError(f"retained_energy: expected 0 < x <= 1, found {self.retained_energy}")
        if self.attenuation > 1.0:
            raise InputError(f"attenuation: expected 0 <= x <= 1, found {self.attenuation}")

    def check_neighbours(self, task: int, counts: Int[np.ndarray, " c"]) -> None:
        """Raises InputError if a task has fewer classes with samples than there are neighbours."""
        if (present := int((counts > 0).sum())) < self.neighbours:
            wanted = f"{self.neighbours} neighbours need as many classes with samples"
            raise InputError(f"task {task}: {wanted}, found {present}")


class View(NamedTuple):
    """Statistics of a task in one view; moments are population mean and standard deviation."""

    mean: Float[np.ndarray, " d"]  # m_t
    basis: Float[np.ndarray, "r d"]  # U_t; no row if nothing varies
    prototypes: Float[np.ndarray, "c d"]  # p_{t,c}; zero for classes without an image
    residual: tuple[float, float] = (0.0, 1.0)  # moments of the task's own rho_t
    affinity: tuple[float, float] = (0.0, 1.0)  # of its own A_t


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
