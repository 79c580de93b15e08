"""How names and numbers read: on the screen, in files, in figures and on the page."""

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from fdc_jax import evaluation
from fdc_jax.calibration import METHODS


def method_title(name: str) -> str:
    """Returns what a calibrator is called; an unknown name stays itself.

    The key `oracle` of files is the accuracy of the raw logits where the task is given.
    """
    if name not in METHODS:
        return {"oracle": "Task given", "selected": "FDC, the paper's choice"}.get(name, name)
    title = METHODS[name].title
    return title[:1].upper() + title[1:]


def number(value: float | None, digits: int = 2, signed: bool = False) -> Any:
    """Says a number, without a minus before a zero; NaN of none."""
    if value is None:
        return math.nan
    return f"{round(value, digits) + 0.0:{'+' * signed},.{digits}f}"


def mean(
    value: float, std: float, count: float | None = None, digits: int = 2, signed: bool = False
) -> str:
    """Says a mean over seeds with what is known of the deviation (else NaN) and of their number."""
    deviation = "" if math.isnan(std) else f" ± {std:.{digits}f}"
    seeds = "" if count is None or math.isnan(count) else f" ({count:.0f})"
    return number(value, digits, signed) + deviation + seeds


def spread(
    values: Sequence[float] | np.ndarray, digits: int = 2, signed: bool = False, count: bool = False
) -> Any:
    """Says mean and sample standard deviation over seeds, and how many if asked; NaN of none."""
    if not len(values):
        return math.nan
    return mean(*evaluation.mean_and_std(values), len(values) if count else None, digits, signed)


def interval(gain: Any, digits: int = 2, signed: bool = True) -> Any:
    """Says the `low` and `high` of a gain; NaN where they are not known."""
    if gain is None or math.isnan(gain.low):
        return math.nan
    return " to ".join(number(each, digits, signed) for each in (gain.low, gain.high))


def minus(text: str) -> str:
    """Gives negative numbers a minus sign in place of a hyphen."""
    return re.sub(r"(?<![\w.)])-(?=\d)", "\N{MINUS SIGN}", text)
