"""Text of names and numbers in tables, figures and pages."""

import math
import re
from collections.abc import Mapping
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
    return f"{round(value, digits) + 0.0:{'+' * signed},.{digits}f}"


def mean(record: Mapping[str, Any], prefix: str = "", digits: int = 2, signed: bool = False) -> Any:
    """Formats the mean of a record with its deviation over seeds, if it is known."""
    std = number(record.get(f"{prefix}std"), digits)
    text = number(record.get(f"{prefix}mean"), digits, signed)
    return f"{text} ± {std}" if isinstance(std, str) else text


def interval(
    record: Mapping[str, Any], prefix: str = "", digits: int = 2, signed: bool = True
) -> Any:
    """Formats the interval of a record; NaN if it is not known."""
    ends = [number(record.get(f"{prefix}{end}"), digits, signed) for end in ("low", "high")]
    return " to ".join(ends) if isinstance(ends[0], str) else math.nan


def minus(text: str) -> str:
    """Replaces the hyphen of negative numbers by a minus sign."""
    return re.sub(r"(?<![\w.)])-(?=\d)", "\N{MINUS SIGN}", text)
