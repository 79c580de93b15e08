"""Post-hoc calibration of task heads from feature statistics: arrays in, arrays out.

`FDC` is the paper's method; `from_settings` also gives `WhitenedFDC`, which is beyond it; `load`
reads what `save` of either wrote. `check` tells before any training whether settings suit tasks.
"""

from fdc_jax.calibration.fdc import FDC, Settings, Terms
from fdc_jax.calibration.scores import Scores
from fdc_jax.calibration.storage import load
from fdc_jax.calibration.whitened import Affinity, WhitenedFDC, WhitenedTerms, check, from_settings

__all__ = [
    "FDC",
    "Affinity",
    "Scores",
    "Settings",
    "Terms",
    "WhitenedFDC",
    "WhitenedTerms",
    "check",
    "from_settings",
    "load",
]
