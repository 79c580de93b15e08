"""Post-hoc calibration of task heads from feature statistics: arrays in, arrays out.

`FDC` is the paper's method, `Gaussians` goes beyond it, and `comparators` are what others do; all
have the interface of `Calibrator`. `make` gives one by its name in `METHODS`, `load` reads what
`save` wrote.
"""

from fdc_jax.calibration.calibrator import Calibrator, Scores
from fdc_jax.calibration.fdc import FDC, Settings, Terms
from fdc_jax.calibration.gaussians import Gaussians
from fdc_jax.calibration.methods import METHODS, Method, find, load, make

__all__ = [
    "FDC",
    "METHODS",
    "Calibrator",
    "Gaussians",
    "Method",
    "Scores",
    "Settings",
    "Terms",
    "find",
    "load",
    "make",
]
