"""The report as one HTML page: no script, nothing from the network, light, dark and on paper."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from fdc_jax import learners
from fdc_jax.calibration import METHODS
from fdc_jax.errors import counted
from fdc_jax.report import console, figures, formatting, paper, pictures, runs, tables
from fdc_jax.report.classes import Classes
from fdc_jax.report.figures import Drawing
from fdc_jax.report.pictures import Pictures
from fdc_jax.report.runs import Group
from fdc_jax.report.tables import Table

_FOLDER = Path(__file__).parent


def render(
    groups: Sequence[Group],
    skipped: Mapping[Path, str],
    compared: Sequence[Table],
    drawings: Sequence[Drawing],
    shown: Sequence[Pictures],
    classes: Sequence[Classes | None],
) -> str:
    """Returns the page; everything that comes from files is escaped.

    Args:
        groups: a section each.
        skipped: folders that could not be used, with the reason.
        compared: tables over groups, in the order to show them.
        drawings: likewise; those of a run itself stand in the section of its group.
        shown: pictures of each group.
        classes: counts by class of each group, None where there is no page of them.
    """
    own = [drawing for drawing in drawings if drawing.kind in figures.OF_A_RUN]
    sections = [
        _section(group, own, shown[index]) | {"classes": classes[index]}
        for index, group in enumerate(groups)
    ]
    return _fill(
        "page",
        sections=sections,
        folded=not any(group.benchmark in paper.benchmarks() for group in groups),
        reading=tables.READING,
        skipped=skipped,
        # That of a single group stands in its section.
        tables=[of for of in compared if of.name != "calibrators" or len(groups) > 1],
        figures=[drawing for drawing in drawings if drawing not in own],
    )


def _section(group: Group, own: Sequence[Drawing], shown: Pictures) -> dict[str, Any]:
    """Returns what the page says of a group."""
    best, first = group.leading.get("best", "raw"), group.results
    accuracy = group.record(best)
    provenance = {name: first.get(name) for name in ("device", "versions")}
    provenance |= {"settings": runs.settings(first)}
    return {
        "group": group,
        "title": _title(group.learner, group.benchmark),
        "best": METHODS[best].title,
        "accuracy": formatting.mean(accuracy, digits=1),
        "interval": formatting.interval(accuracy, digits=1, signed=False),
        "verdict": console.verdict(group),
        "notes": console.notes(group),
        "tables": [tables.of_calibrators([group]), tables.of_tasks(group)],
        "drawings": [drawing for drawing in own if drawing.groups == [group]],
        "pictures": shown,
        "provenance": json.dumps(provenance, indent=1, ensure_ascii=False),
    }


def render_classes(group: Group, classes: Classes) -> str:
    """Returns the page of a group's classes."""
    place = {label: index for index, label in enumerate(classes.order)}
    return _fill("classes", title=group.name, place=place, found=classes)


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
    for function in (_inline, _bar, _breakable, _subscripts, formatting.minus, counted):
        environment.filters[function.__name__.lstrip("_")] = function
    style = Markup((_FOLDER / "page.css").read_text(encoding="utf-8"))
    return environment.get_template(f"{template}.html.jinja").render(stylesheet=style, **material)


def _title(learner: str, benchmark: str) -> str:
    return f"{learners.title(learner)} on {paper.benchmark_title(benchmark)}"


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
    values = [0.0, *(number for line in lines for number in line[1:])]
    low, high = min(values), max(values)
    unit = 100.0 / ((high - low) or 1.0)
    return (min(value, 0.0) - low) * unit, abs(value) * unit
