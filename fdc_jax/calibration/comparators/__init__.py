"""All comparators of FDC: each is a `Calibrator`, holds one idea, and shares one base.

Every score is per task, so that every method has a routing accuracy; methods that score classes
give a task the score of its best class. No feature of an old task is needed again.
"""

from fdc_jax.calibration.comparators.distances import (
    FeCAM,
    Mahalanobis,
    NearestClassMean,
)
from fdc_jax.calibration.comparators.logits import (
    Energy,
    LogitStandardisation,
    MaximumSoftmax,
    NegativeEntropy,
    Raw,
    VirtualLogitMatching,
    WeightAligning,
)
from fdc_jax.calibration.comparators.random_features import AnaCP, RanPAC, Ridge

__all__ = [
    "AnaCP",
    "Energy",
    "FeCAM",
    "LogitStandardisation",
    "Mahalanobis",
    "MaximumSoftmax",
    "NearestClassMean",
    "NegativeEntropy",
    "RanPAC",
    "Raw",
    "Ridge",
    "VirtualLogitMatching",
    "WeightAligning",
]
