"""Post-hoc calibration of task heads from feature statistics: arrays in, arrays out."""

from fdc_jax.calibration.fdc import FDC
from fdc_jax.calibration.numpy_scorer import NumpyScorer
from fdc_jax.calibration.scores import Scores
from fdc_jax.calibration.terms import Terms

__all__ = ["FDC", "NumpyScorer", "Scores", "Terms"]
