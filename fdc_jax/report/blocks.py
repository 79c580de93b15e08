"""Rows of ours beside the paper's, one column a benchmark: the shape of most tables."""

import string
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fdc_jax.report import cells, paper
from fdc_jax.report.cells import Cell, Table
from fdc_jax.report.paper import Published
from fdc_jax.report.runs import Group

Values = Callable[[Group], list[float]]

PROTOCOL = "the paper's protocol"


class Row(NamedTuple):
    """A row before the best are marked; rows of one `rank` compete, None stays out."""

    labels: list[str]
    cells: list[Cell]
    rank: str | None


class Block(NamedTuple):
    """One quantity: ours at every setting, the paper's, and the difference."""

    rows: list[Row]
    records: list[dict[str, Any]]


def columns(groups: Sequence[Group]) -> list[str]:
    """Returns other benchmarks that there are runs of, and after them the paper's."""
    others = [each.benchmark for each in groups if each.benchmark not in paper.benchmarks()]
    return [*dict.fromkeys(others), *paper.benchmarks()]


def headings(names: Sequence[str]) -> list[str]:
    """Returns how benchmarks are called at the top of columns."""
    return [paper.benchmark_title(name) for name in names]


def letters(groups: Sequence[Group]) -> dict[str, str]:
    """Returns a letter for every set of settings that departs from the paper's protocol."""
    titles = dict.fromkeys(each.title for each in groups if each.title)
    names = [*string.ascii_uppercase, *(f"{n}" for n in range(1, len(titles)))]
    return dict(zip(titles, names, strict=False))


def legend(groups: Sequence[Group]) -> str:
    """Returns what the letters stand for, as the end of a note."""
    meanings = "; ".join(f"{letter}: {title}" for title, letter in letters(groups).items())
    return f" Settings other than the paper's: {meanings}." if meanings else ""


def own_label(title: str, letter: dict[str, str]) -> str:
    """Returns what a row of ours is called."""
    return f"ours, {letter[title]}" if title else "ours"


def block(
    labels: dict[str, str],
    groups: Sequence[Group],
    letter: dict[str, str],
    values: Values,
    published: dict[str, Published] | None,
    benchmarks: Sequence[str],
    signed: bool = False,
    digits: int = 2,
) -> Block:
    """Puts one quantity of one learner beside the paper's.

    Args:
        labels: what the rows are, by heading; the text stands in the first row alone.
        groups: of the learner.
        letter: of every title, for all tables alike.
        values: the quantity of a group, one number per seed.
        published: the paper's numbers by benchmark; None where it has no such row.
        benchmarks: columns.
        signed: whether the quantity is a gain.
        digits: after the decimal point.
    """
    published_here = published or {}
    found = {(each.title, each.benchmark): (values(each), each.follows_protocol) for each in groups}
    titles = list(dict.fromkeys(each.title for each in groups if each.title))
    rows, records = [], []
    differences: list[Cell] = []
    for title in ["", *titles]:
        row = []
        for name in benchmarks:
            own, compared = found.get((title, name), ([], not title))
            reference = published_here.get(name)
            distance = cells.difference(own, reference) if compared else None
            cell = cells.ours(own, digits, signed)
            row.append(cell)
            if not title:
                differences.append(_difference(distance, own, reference))
            if own or (reference and not title):
                records.append(
                    labels
                    | {
                        "settings": title or PROTOCOL,
                        "benchmark": name,
                        "mean": cell.mean,
                        "std": cell.std,
                        "n": cell.count or 0,
                        "paper_mean": reference and reference.mean,
                        "paper_std": reference and reference.std,
                        "difference": distance,
                    }
                )
        # Where neither the paper nor we have such a row, nothing is missing from it.
        if published is not None or any(each.title == title for each in groups):
            rows.append(Row([own_label(title, letter)], row, title))
    if published is not None:
        row = [cells.published(published.get(name), digits, signed) for name in benchmarks]
        rows.append(Row(["paper"], row, "paper"))
        if any(cell.mean is not None for cell in differences):
            rows.append(Row(["difference, std"], differences, None))
    blank = [""] * len(labels)
    named = [
        row._replace(labels=[*(blank if index else labels.values()), *row.labels])
        for index, row in enumerate(rows)
    ]
    return Block(named, records)


def _difference(distance: float | None, own: Sequence[float], reference: Published | None) -> Cell:
    return cells.number(distance if own and reference else None, 1, signed=True)


def table(
    name: str,
    title: str,
    note: str,
    labels: Sequence[str],
    groups: Sequence[Group],
    blocks: Sequence[Block],
    mark_best: bool = False,
    compared: bool = True,
    extra: Sequence[str] = (),
) -> Table:
    """Stacks blocks into a table.

    Args:
        name: stem of the files.
        title: what the table shows.
        note: what is particular to the table; what all have in common is added.
        labels: headings of the label columns, without that of ours and paper.
        groups: all of the report.
        blocks: from `block`, or rows of the same shape.
        mark_best: mark the largest mean of each column among rows of one rank.
        compared: whether differences to the paper are among the rows.
        extra: headings of columns behind the benchmarks.
    """
    benchmarks = columns(groups)
    note = " ".join([note, cells.OURS_NOTE, *[cells.DIFFERENCE_NOTE] * compared])
    rows = [row for each in blocks for row in each.rows]
    shown = [list(row.cells) for row in rows]
    if mark_best:
        for rank in dict.fromkeys(row.rank for row in rows if row.rank is not None):
            rivals = [cell for cell, row in zip(shown, rows, strict=True) if row.rank == rank]
            for column in range(len(benchmarks)):
                _mark(rivals, column)
    return Table(
        name,
        title,
        note + legend(groups),
        [*labels, "numbers", *headings(benchmarks), *extra],
        [
            [*(cells.words(text) for text in row.labels), *line]
            for row, line in zip(rows, shown, strict=True)
        ],
        len(labels) + 1,
        [record for each in blocks for record in each.records],
    )


def _mark(rows: Sequence[list[Cell]], column: int) -> None:
    means = [mean for row in rows if (mean := row[column].mean) is not None]
    if len(means) < 2:
        return
    for row in rows:
        if row[column].mean == max(means):
            row[column] = row[column]._replace(best=True)
