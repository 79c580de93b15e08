"""Text of names and numbers: on the screen, in files, in figures and on the page."""

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from fdc_jax import evaluation
from fdc_jax.calibration import METHODS


def method_title(name: str) -> str:
    """Returns the title of a calibrator; an unknown name stays itself.

    The key `oracle` of files is the accuracy of the raw logits with the task given.
    """
    if name not in METHODS:
        return {"oracle": "Task given", "selected": "FDC, the paper's choice"}.get(name, name)
    title = METHODS[name].title
    return title[:1].upper() + title[1:]


def number(value: float | None, digits: int = 2, signed: bool = False) -> Any:
    """Formats a number, without a minus before a zero; NaN for None and NaN."""
    if value is None or math.isnan(value):
        return math.nan
    return f"{round(value, digits) + 0.0:{'+' * signed},.{digits}f}"


def mean(
    value: float, std: float, count: float | None = None, digits: int = 2, signed: bool = False
) -> str:
    """Formats a mean over seeds with its deviation and number of seeds, if these are not NaN."""
    deviation = "" if math.isnan(std) else f" ± {std:.{digits}f}"
    seeds = "" if count is None or math.isnan(count) else f" ({count:.0f})"
    return number(value, digits, signed) + deviation + seeds


def spread(values: Sequence[float] | np.ndarray, digits: int = 2, signed: bool = False) -> Any:
    """Formats mean and sample standard deviation over seeds; NaN for no values."""
    if not len(values):
        return math.nan
    return mean(*evaluation.mean_and_std(values), None, digits, signed)


def interval(gain: Any, digits: int = 2, signed: bool = True) -> Any:
    """Formats the `low` and `high` of a gain; NaN where they are not known."""
    if gain is None or math.isnan(gain.low):
        return math.nan
    return " to ".join(number(each, digits, signed) for each in (gain.low, gain.high))


def minus(text: str) -> str:
    """Replaces the hyphen of negative numbers by a minus sign."""
    return re.sub(r"(?<![\w.)])-(?=\d)", "\N{MINUS SIGN}", text)
