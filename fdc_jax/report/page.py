"""The report as one HTML page: no script, nothing from the network, light, dark and on paper."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from fdc_jax.errors import counted
from fdc_jax.learners import title as learner_title
from fdc_jax.report import (
    figures,
    formatting,
    frames,
    paper,
    pictures,
    quantities,
    runs,
    tables,
)
from fdc_jax.report.classes import Classes
from fdc_jax.report.figures import Drawing
from fdc_jax.report.pictures import Pictures
from fdc_jax.report.runs import Group, Skipped
from fdc_jax.report.tables import Table

_FOLDER = Path(__file__).parent


def render(
    groups: Sequence[Group],
    skipped: Sequence[Skipped],
    compared: Sequence[Table],
    drawings: Sequence[Drawing],
    found: Sequence[Pictures],
    classes: Mapping[int, str],
) -> str:
    """Returns the page; everything that comes from files is escaped.

    Args:
        groups: a section each.
        skipped: folders that could not be used.
        compared: tables over groups, in the order to show them.
        drawings: likewise; those of a run itself stand in the section of its group.
        found: of each group.
        classes: names of the pages of classes, by the number of the group from 1.
    """
    own = [each for each in drawings if each.kind in figures.OF_A_RUN]
    return _fill(
        "page",
        sections=[
            _section(group, own, each) | {"classes": classes.get(place)}
            for place, (group, each) in enumerate(zip(groups, found, strict=True), 1)
        ],
        reading=tables.READING,
        overview=[each for each in compared if each.name == "runs"],
        skipped=skipped,
        # Those of a single group stand in its section.
        tables=[each for each in compared if each.name != "calibrators" or len(groups) > 1],
        figures=[each for each in drawings if each not in own],
    )


def render_classes(group: Group, found: Classes) -> str:
    """Returns the page of a group's classes."""
    place = {label: index for index, label in enumerate(found.order)}
    return _fill("classes", title=group.name, place=place, found=found)


def render_predictions(learner: str, benchmark: str, **material: Any) -> str:
    """Returns a page of images and what a run says of them.

    Args:
        learner: its name.
        benchmark: likewise.
        material: what the template `predictions.html.jinja` shows.
    """
    return _fill("predictions", title=_title(learner, benchmark), **material)


def _fill(template: str, **material: Any) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    for function in (
        _rows,
        _said,
        _inline,
        _bar,
        _breakable,
        _subscripts,
        formatting.minus,
        counted,
    ):
        environment.filters[function.__name__.lstrip("_")] = function
    style = Markup((_FOLDER / "page.css").read_text(encoding="utf-8"))
    return environment.get_template(f"{template}.html.jinja").render(stylesheet=style, **material)


def _title(learner: str, benchmark: str) -> str:
    return f"{learner_title(learner)} on {paper.benchmark_title(benchmark)}"


def _section(group: Group, own: Sequence[Drawing], found: Pictures) -> dict[str, Any]:
    """Returns what the page says of a group."""
    named = {name: group.results.get(name) for name in ("device", "versions")}
    of_first = named | {"settings": runs.settings(group.results)}
    return {
        "group": group,
        "title": _title(group.learner, group.benchmark),
        "results": group.results,
        "headline": _headline(group),
        "verdict": frames.verdict(group),
        "notes": quantities.notes([run.results for run in group.runs]),
        "tables": [tables.of_calibrators([group]), tables.of_tasks(group)],
        "drawings": [each for each in own if each.groups == [group]],
        "pictures": found,
        "provenance": json.dumps(of_first, indent=1, ensure_ascii=False),
    }


def _headline(group: Group) -> dict[str, Any]:
    """Returns what the page begins with, by the roles of `frames.leading`.

    Title, accuracy, its interval, gain over raw, and the interval of that, as they read.
    """
    found = {}
    for role, name in frames.leading(group).items():
        gain = group.gain(name) if role not in ("raw", "oracle") else None
        found[role] = (
            formatting.method_title(name),
            formatting.spread(group.values(name), 1),
            formatting.interval(group.gain(name, None), 1, signed=False),
            gain and formatting.number(gain.mean, 1, signed=True),
            formatting.interval(gain, 1),
        )
    return found


def _rows(table: Table) -> list[tuple[list[str], list[tuple[str, bool]]]]:
    """Returns labels and cells of a table's rows; labels that the row above has are empty.

    A cell is its text, and whether it is the best.
    """
    cells = [
        [
            (formatting.minus(str(cell)), (row, column) in table.best)
            for column, cell in enumerate(of)
        ]
        for row, of in enumerate(table.shown.to_numpy())
    ]
    return list(zip(table.labels.values.tolist(), cells, strict=True))


def _said(cell: Any) -> str:
    """Returns a cell of a table as it reads, empty for NaN."""
    return formatting.minus(cell) if isinstance(cell, str) else ""


def _subscripts(text: str) -> Markup:
    """Sets the names of encoders as the paper does."""
    return Markup(re.sub(r"\bE_(\w)\b", r"E<sub>\1</sub>", str(escape(text))))


def _breakable(name: str) -> Markup:
    """Lets a line break after a separator in a name, so that none breaks within a word."""
    return Markup(re.sub(r"([_./-])", r"\1<wbr>", str(escape(name))))


def _inline(figure: Drawing) -> str:
    """Returns a drawing as an image, whose names and colours are no other's business."""
    return pictures.inline(figure.svg.encode(), "svg+xml")


def _bar(value: float, lines: Sequence[Any]) -> tuple[float, float]:
    """Returns start and length of a bar, in percent of a row that fits all of some evidence."""
    values = [0.0, *(each for line in lines for each in line[1:])]
    low, high = min(values), max(values)
    unit = 100.0 / ((high - low) or 1.0)
    return (min(value, 0.0) - low) * unit, abs(value) * unit
