"""HTML pages of reports, classes and predictions, which load nothing else."""

import functools
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from fdc_jax import learners
from fdc_jax.calibration import FDC, METHODS
from fdc_jax.errors import counted, escaped
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
    """Returns the page of the report; text that comes from files is escaped.

    Args:
        groups: finished runs, a section per group.
        skipped: reasons by folder that cannot be used.
        compared: tables over all groups.
        drawings: figures that compare groups, and figures of one group for its section.
        shown: pictures by group.
        classes: counts by class and group, None if there is no page of classes.
    """
    of_runs = [drawing for drawing in drawings if drawing.kind in figures.OF_A_RUN]
    material = zip(groups, shown, classes, strict=True)
    sections = [
        _section(group, of_runs, images) | {"classes": counts} for group, images, counts in material
    ]
    gained = [group for group in groups if group.has(FDC.name, "gain")]
    # The calibrators of a single group stand in its section.
    omitted = [] if len(groups) > 1 else ["calibrators"]
    return _fill(
        "page",
        sections=sections,
        gains=[group.row(FDC.name, "gain")["mean"] for group in gained],
        fdc_in_words=console.FDC_IN_WORDS,
        folded=not any(group.known for group in groups),
        reading=tables.reading(compared),
        methods=set().union(*(group.methods for group in groups)),
        skipped=skipped,
        tables=[table for table in compared if table.name not in omitted],
        figures=[drawing for drawing in drawings if drawing not in of_runs],
    )


def _section(group: Group, drawings: Sequence[Drawing], shown: Pictures) -> dict[str, Any]:
    """Returns the content of the section of a group."""
    first, accuracy = group.results, group.row(group.headline)
    settings = runs.settings(first)
    gain = group.values(group.headline, "gain").mean() if group.headline != "raw" else None
    provenance = {"device": first.device, "versions": first.versions, "settings": settings}
    return {
        "group": group,
        "title": _title(group.learner, group.benchmark, group.headline),
        "best": _answering(group.headline),
        "rank": _rank(group),
        "accuracy": formatting.mean(accuracy["mean"], accuracy["std"], digits=1),
        "interval": formatting.interval(accuracy["low"], accuracy["high"], 1, signed=False),
        "gain": formatting.number(gain, 1, signed=True),
        "verdict": console.verdict(group),
        "notes": console.notes(group),
        "tables": [tables.of_calibrators([group]), tables.of_tasks(group)],
        "drawings": [drawing for drawing in drawings if drawing.groups == [group]],
        "pictures": shown,
        "provenance": json.dumps(provenance, indent=1, ensure_ascii=False),
    }


def render_classes(group: Group, classes: Classes) -> str:
    """Returns the page of a group's classes."""
    position = {label: index for index, label in enumerate(classes.order)}
    title = _title(group.learner, group.benchmark, group.headline)
    best = _answering(group.headline) + _rank(group)
    material = {"classes": classes, "images": group.has_images}
    return _fill("classes", title=title, best=best, position=position, **material)


def render_predictions(benchmark: str, method: str, **material: Any) -> str:
    """Returns the page of predictions of a calibrator; `predictions.html.jinja` has its content."""
    data = paper.benchmark_title(benchmark)
    return _fill("predictions", data=data, method=_answering(method), **material)


def _fill(template: str, **material: Any) -> str:
    style = Markup((_FOLDER / "page.css").read_text(encoding="utf-8"))
    page = _templates().get_template(f"{template}.html.jinja")
    lines = page.render(stylesheet=style, **material).split("\n")
    return "\n".join(map(escaped, lines))  # names of files may have any character


@functools.cache
def _templates() -> jinja2.Environment:
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
    return environment


def _rank(group: Group) -> str:
    """Returns how the accuracy of the headline method compares with those of the others."""
    others = [name for name in group.leading if name != group.headline]
    if not others:
        return ", the most accurate method of the run"
    titles = " and ".join(map(_answering, others))
    if group.headline in group.leading:
        return f", as accurate as {titles}"
    accuracy = formatting.number(group.row(others[0])["mean"], 1)
    return f"; the most accurate method of the run is {titles}, {accuracy} %"


def _answering(method: str) -> str:
    return "raw logits" if method == "raw" else METHODS[method].title


def _title(learner: str, benchmark: str, method: str) -> str:
    data = paper.benchmark_title(benchmark)
    return f"{learners.title(learner)} with {_answering(method)} on {data}"


def _subscripts(text: str) -> Markup:
    """Sets the index of E_T and E_0 lower."""
    return Markup(re.sub(r"\bE_(\w)\b", r"E<sub>\1</sub>", str(escape(text))))


def _breakable(name: str) -> Markup:
    """Allows line breaks after the separators of a name."""
    return Markup(re.sub(r"(?<!\bE)([_./+-])(?=\w)", r"\1<wbr>", str(escape(name))))


def _inline(figure: Drawing) -> str:
    """Returns a drawing as an image of its own, apart from the page's styles."""
    return pictures.inline(figure.svg.encode(), "svg+xml")


def _bar(value: float, lines: Sequence[Any]) -> tuple[float, float]:
    """Returns start and length of a bar, in percent of a row that fits all evidence."""
    values = [0.0, *itertools.chain.from_iterable(line[1:] for line in lines)]
    low = min(values)
    unit = 100.0 / ((max(values) - low) or 1.0)
    return (min(value, 0.0) - low) * unit, abs(value) * unit
