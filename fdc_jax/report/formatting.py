"""Text of names and numbers in tables, figures and pages."""

import math
import re
from typing import Any

from fdc_jax.calibration import METHODS


def method_title(name: str) -> str:
    """Returns the title of a calibrator, of `oracle` or `selected`, else the name."""
    if name not in METHODS:
        return {"oracle": "Task given", "selected": "FDC, the paper's choice"}.get(name, name)
    title = METHODS[name].title
    return title[:1].upper() + title[1:]


def number(value: float | None, digits: int = 2, signed: bool = False) -> Any:
    """Formats a number, without a minus before a zero; NaN for None and NaN."""
    if value is None or math.isnan(value):
        return math.nan
    sign = "+" if signed else ""
    return f"{round(value, digits) + 0.0:{sign},.{digits}f}"


def mean(
    value: float | None, std: float | None = None, digits: int = 2, signed: bool = False
) -> Any:
    """Formats a mean with its deviation over seeds, if it is known."""
    text = number(value, digits, signed)
    deviation = number(std, digits)
    return f"{text} ± {deviation}" if isinstance(deviation, str) else text


def interval(low: float | None, high: float | None, digits: int = 2, signed: bool = True) -> Any:
    """Formats an interval; NaN if it is not known."""
    start = number(low, digits, signed)
    end = number(high, digits, signed)
    return f"{start} to {end}" if isinstance(start, str) else math.nan


def minus(text: str) -> str:
    """Replaces the hyphen of negative numbers by a minus sign."""
    return re.sub(r"(?<![\w.)])-(?=\d)", "\N{MINUS SIGN}", text)
