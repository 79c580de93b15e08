"""The numbers that FDC is configured with, and their ranges."""

import math
from typing import NamedTuple

import numpy as np

from fdc_jax.errors import InputError

AFFINITY_REFERENCES = ("own", "nearest")


class Settings(NamedTuple):
    """Settings of a calibrator under their names in `FDC`."""

    retained_energy: float
    attenuation: float
    rlc_weight: float
    pac_weight: float
    adapted_view_weight: float
    pretrained_view_weight: float
    neighbours: int
    affinity_reference: str

    def checked(self) -> "Settings":
        """Returns the settings as plain numbers.

        Raises:
            InputError: one is outside its range.
        """
        for field in self._fields[:6]:
            value = getattr(self, field)
            try:
                valid = not _is_truth(value) and math.isfinite(value) and value >= 0.0
            except TypeError:
                valid = False
            if not valid:
                raise InputError(f"{field}: expected a number not below 0, found {value!r}")
        if not 0.0 < self.retained_energy <= 1.0:
            raise InputError(f"retained_energy: expected 0 < x <= 1, found {self.retained_energy}")
        if self.attenuation > 1.0:
            raise InputError(f"attenuation: expected 0 <= x <= 1, found {self.attenuation}")
        try:
            whole = int(self.neighbours) == self.neighbours >= 1 and not _is_truth(self.neighbours)
        except (TypeError, ValueError):
            whole = False
        if not whole:
            raise InputError(f"neighbours: expected a count from 1, found {self.neighbours!r}")
        if self.affinity_reference not in AFFINITY_REFERENCES:
            raise InputError(
                f"affinity_reference: expected one of {', '.join(AFFINITY_REFERENCES)}, "
                f"found {self.affinity_reference!r}"
            )
        numbers = {field: float(getattr(self, field)) for field in self._fields[:6]}
        return self._replace(**numbers, neighbours=int(self.neighbours))


def _is_truth(value: object) -> bool:
    return isinstance(value, bool | np.bool_)
