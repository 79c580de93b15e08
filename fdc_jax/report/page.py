"""The report as one HTML page: no script, nothing from the network, light, dark and on paper."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup, escape

from fdc_jax.errors import counted
from fdc_jax.learners import title as learner_title
from fdc_jax.report import figures, frames, paper, pictures, quantities, runs, words
from fdc_jax.report.figures import Drawing
from fdc_jax.report.pictures import Pictures
from fdc_jax.report.runs import Group, Skipped
from fdc_jax.report.tables import Table

_FOLDER = Path(__file__).parent
_MOST_CLASSES = 4  # of a task that are named in a table


def render(
    groups: Sequence[Group],
    skipped: Sequence[Skipped],
    tables: Sequence[Table],
    drawings: Sequence[Drawing],
    found: Sequence[Pictures],
) -> str:
    """Returns the page; everything that comes from files is escaped.

    Args:
        groups: a section each.
        skipped: folders that could not be used.
        tables: in the order to show them.
        drawings: likewise; those of a run itself stand in the section of its group.
        found: of each group.
    """
    own = [each for each in drawings if each.kind in figures.OF_A_RUN]
    names = dict.fromkeys([*(name for group in groups for name in group.methods), "oracle"])
    return _fill(
        "page",
        sections=[_section(group, own, each) for group, each in zip(groups, found, strict=True)],
        columns={name: words.method_title(name) for name in names},
        skipped=skipped,
        tables=tables,
        figures=[each for each in drawings if each not in own],
    )


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
    for function in (_words, _rows, _said, _inline, _bar, _subscripts, words.minus, counted):
        environment.filters[function.__name__.lstrip("_")] = function
    style = Markup((_FOLDER / "page.css").read_text(encoding="utf-8"))
    return environment.get_template(f"{template}.html.jinja").render(stylesheet=style, **material)


def _title(learner: str, benchmark: str) -> str:
    return f"{learner_title(learner)} on {paper.benchmark_title(benchmark)}"


def _section(group: Group, own: Sequence[Drawing], found: Pictures) -> dict[str, Any]:
    """Returns what the page says of a group."""
    lines = {line.name: line for line in quantities.summary(group.methods, group.values, 1)}
    best = quantities.headline(group.methods)
    return {
        "group": group,
        "title": _title(group.learner, group.benchmark),
        "results": group.results,
        "lines": lines,
        "best": lines[best],
        "notes": quantities.notes(group.results),
        "interval": group.gain(best) if best != "raw" else None,
        "tasks": _tasks(group, found.class_names),
        "drawings": [each for each in own if each.groups == [group]],
        "pictures": found,
        "provenance": runs.provenance(group),
    }


def _tasks(group: Group, names: Sequence[str]) -> dict[str, Any]:
    """Returns `columns` and `rows` of accuracies on each task: number, classes, cells as they read.

    Rows of what is measured over all tasks have no number.
    """
    found, known = frames.tasks(group), frames.classes(group)
    rows = []
    index: Sequence[Any] = found.index.tolist()  # numbers of tasks, then names
    for task, values in zip(index, found.to_numpy(), strict=True):
        over = task in frames.OVER_TASKS
        cells = [
            "–" if np.isnan(each) else words.number(each, 1, signed=task == "Backward transfer")
            for each in values
        ]
        classes = known[task] if not over and task < len(known) else ()
        named = task if over else _named(classes, names)
        rows.append(("" if over else task + 1, named, [*map(words.minus, cells)]))
    return {"columns": [words.method_title(name) for name in found], "rows": rows}


def _named(labels: Sequence[int], names: Sequence[str]) -> str:
    known = [names[label] for label in labels if label < len(names)]
    if len(known) > _MOST_CLASSES:
        rest = len(known) - _MOST_CLASSES + 1
        return f"{', '.join(known[: _MOST_CLASSES - 1])} and {rest} more"
    return ", ".join(known)


def _rows(table: Table) -> list[tuple[list[str], list[str]]]:
    """Returns labels and cells of a table's rows as text; what the row above says is empty."""
    labels = table.frame.index.to_frame(index=False).astype(str)
    same = labels.eq(labels.shift()).astype(int).cummin(axis=1).astype(bool)
    same.isetitem(-1, False)
    cells = table.shown.map(lambda cell: words.minus(str(cell)))
    return list(zip(labels.mask(same, "").values.tolist(), cells.values.tolist(), strict=True))


def _said(cell: Any) -> str:
    """Returns a cell of a table as it reads, empty for NaN."""
    return words.minus(cell) if isinstance(cell, str) else ""


def _subscripts(text: str) -> Markup:
    """Sets the names of encoders as the paper does."""
    return Markup(re.sub(r"E_(\w)", r"E<sub>\1</sub>", str(escape(text))))


def _words(value: Any) -> str:
    """Says a value of a configuration or of a record."""
    if value is None or isinstance(value, bool):
        return {None: "not recorded", True: "yes", False: "no"}[value]
    if isinstance(value, Mapping):
        return "; ".join(f"{key}: {_words(each)}" for key, each in value.items())
    if isinstance(value, list):
        return ", ".join(map(_words, value)) or "(none)"
    return str(value) or "(empty)"


def _inline(figure: Drawing) -> str:
    """Returns a drawing as an image, whose names and colours are no other's business."""
    return pictures.inline(figure.svg.encode(), "svg+xml")


def _bar(value: float, lines: Sequence[Any]) -> tuple[float, float]:
    """Returns start and length of a bar, in percent of a row that fits all of some evidence."""
    values = [0.0, *(each for line in lines for each in line[1:])]
    low, high = min(values), max(values)
    unit = 100.0 / ((high - low) or 1.0)
    return (min(value, 0.0) - low) * unit, abs(value) * unit
