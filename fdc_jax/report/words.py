"""How numbers read: on the screen, in tables, in figures and on the page."""

import re
from collections.abc import Sequence

import numpy as np

from fdc_jax import evaluation

# Methods that stand beside each other in a report.
METHODS = {
    "raw": "Raw",
    "fdc": "FDC",
    "ncm-pretrained": "nearest class mean, frozen features",
    "mahalanobis-pretrained": "Mahalanobis, frozen features",
    "ridge-pretrained": "ridge regression, frozen features",
    "ranpac-pretrained": "RanPAC, frozen features",
    "ncm": "nearest class mean",
    "mahalanobis": "Mahalanobis",
    "ranpac": "RanPAC",
    "whitened": "whitened affinity",
    "whitened-classes": "whitened affinity, class by class",
    "transported": "transported class Gaussians",
}


def number(value: float, digits: int = 2, signed: bool = False) -> str:
    """Says a number, without a minus before a zero."""
    return f"{round(value, digits) + 0.0:{'+' * signed},.{digits}f}"


def spread(values: Sequence[float] | np.ndarray, digits: int = 2, signed: bool = False) -> str:
    """Says a mean over seeds and, of several, the sample standard deviation."""
    mean, std = evaluation.mean_and_std(values)
    return number(mean, digits, signed) + (f" ± {std:.{digits}f}" if len(values) > 1 else "")


def minus(text: str) -> str:
    """Gives negative numbers a minus sign in place of a hyphen."""
    return re.sub(r"(?<![\w.)])-(?=\d)", "\N{MINUS SIGN}", text)
