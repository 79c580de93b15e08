"""Tables as data: cells that know their number and how it reads."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from fdc_jax import evaluation
from fdc_jax.report.paper import Published

GAP = "–"


class Cell(NamedTuple):
    """One cell of a table.

    Attributes:
        text: how it reads.
        mean: the number; None for words and gaps.
        std: sample standard deviation over seeds; None where there is none.
        count: number of seeds; None where it does not apply.
        best: the best of its column.
        gap: a run, a file or a number of the paper is missing.
    """

    text: str
    mean: float | None = None
    std: float | None = None
    count: int | None = None
    best: bool = False
    gap: bool = False


class Table(NamedTuple):
    """A table, ready to be shown and to be written.

    Attributes:
        name: stem of its files.
        title: what it shows.
        note: how to read it: units, what is compared with what.
        columns: headings.
        rows: cells, as many per row as there are headings.
        num_labels: how many columns at the left say what a row is.
        records: the numbers behind the rows for other programs, one dict per number.
    """

    name: str
    title: str
    note: str
    columns: list[str]
    rows: list[list[Cell]]
    num_labels: int = 1
    records: Sequence[dict[str, Any]] = ()


def words(text: str) -> Cell:
    """A cell without a number."""
    return Cell(text)


def gap() -> Cell:
    """A cell whose number nobody has measured."""
    return Cell(GAP, gap=True)


def ours(values: Sequence[float], digits: int = 2, signed: bool = False) -> Cell:
    """Mean and sample standard deviation of one value per seed; in brackets, the number."""
    if not values:
        return gap()
    mean, std = evaluation.mean_and_std(values)
    spread = None if math.isnan(std) else std
    text = f"{_text(mean, spread, digits, signed)} ({len(values)})"
    return Cell(text, mean, spread, len(values))


def published(value: Published | None, digits: int = 2, signed: bool = False) -> Cell:
    """A number of the paper."""
    if value is None:
        return gap()
    return Cell(_text(value.mean, value.std, digits, signed), value.mean, value.std, value.count)


def number(value: float | None, digits: int = 2, signed: bool = False) -> Cell:
    """A single number."""
    return gap() if value is None else Cell(_text(value, None, digits, signed), value)


def _text(mean: float, std: float | None, digits: int, signed: bool) -> str:
    text = f"{mean:+.{digits}f}" if signed else f"{mean:.{digits}f}"
    return text if std is None else f"{text} ± {std:.{digits}f}"


def difference(values: Sequence[float], reference: Published | None) -> float | None:
    """Ours minus the paper's mean in standard deviations of that difference.

    The variance of the difference of two means is s²/n of the one plus s²/n of the other. With one
    seed of ours its deviation is not known; the paper's then stands for it.

    Returns:
        The signed ratio, or None where a number is missing or nothing varies.
    """
    if not values or reference is None or reference.std is None:
        return None
    mean, std = evaluation.mean_and_std(values)
    std = reference.std if math.isnan(std) else std
    error = math.sqrt(std**2 / len(values) + reference.std**2 / reference.count)
    return (mean - reference.mean) / error if error > 0 else None


OURS_NOTE = (
    "Ours: mean ± sample standard deviation over training seeds, in brackets how many; the paper's "
    "are three."
)

DIFFERENCE_NOTE = (
    "Differences are ours minus the paper's mean, in standard deviations of that difference, "
    "√(s²/n + s²/n) with the sample deviations s and numbers of seeds n of both; with one seed of "
    "ours the paper's s stands for ours. Only runs that follow the paper's protocol are compared."
)
