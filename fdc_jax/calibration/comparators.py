"""All comparators of FDC under one roof; each has FDC's interface and its own file.

    comparator.fit_task(adapted, labels, head, pretrained=None, classes=None)   # in task order
    comparator.finalize()
    comparator.replace_heads(heads)   # optional; only methods that read heads have it
    scores = comparator.score(adapted, pretrained=None)                         # Scores
    comparator.storage_bytes

Every score is per task, so that every method has a routing accuracy; methods that score classes
give a task the score of its best class. Statistics are collected task by task, and no feature of an
old task is needed again.
"""

from fdc_jax.calibration.anacp import AnaCP
from fdc_jax.calibration.gaussian_comparators import FeCAM, Mahalanobis
from fdc_jax.calibration.logit_comparators import (
    Energy,
    LogitStandardisation,
    MaximumSoftmax,
    NegativeEntropy,
    Raw,
    WeightAligning,
)
from fdc_jax.calibration.prototype_comparators import NearestClassMean, NearestMeanOfExemplars
from fdc_jax.calibration.ranpac import RanPAC
from fdc_jax.calibration.residual_comparators import VirtualLogitMatching

__all__ = [
    "AnaCP",
    "Energy",
    "FeCAM",
    "LogitStandardisation",
    "Mahalanobis",
    "MaximumSoftmax",
    "NearestClassMean",
    "NearestMeanOfExemplars",
    "NegativeEntropy",
    "RanPAC",
    "Raw",
    "VirtualLogitMatching",
    "WeightAligning",
]
