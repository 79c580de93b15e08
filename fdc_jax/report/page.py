"""The report as one HTML page: no script, nothing from the network, light, dark and on paper."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

import fdc_jax
from fdc_jax.errors import InputError, counted
from fdc_jax.learners import title as learner_title
from fdc_jax.report import drawing, figures, overview, paper, pictures, words
from fdc_jax.report.figures import Drawing
from fdc_jax.report.pictures import Pictures
from fdc_jax.report.runs import Group, RunFolder, Skipped
from fdc_jax.report.tables import Table

_FOLDER = Path(__file__).parent
_MOST_CLASSES = 4  # of a task that are named in a table


def material(run: RunFolder) -> Pictures:
    """Opens the work directory of a run for class names and pictures."""
    try:
        return pictures.load(run, fdc_jax.open_run(run.path))
    except InputError as error:
        return Pictures(missing=f"The work directory does not open: {error}")


def render(
    groups: Sequence[Group],
    skipped: Sequence[Skipped],
    tables: Sequence[Table],
    drawings: Sequence[Drawing],
    provenance: Sequence[Mapping[str, Any]],
    found: Sequence[Pictures],
) -> str:
    """Returns the page; everything that comes from files is escaped.

    Args:
        groups: a section each.
        skipped: folders that could not be used.
        tables: in the order to show them.
        drawings: likewise; those of a run itself stand in the section of its group.
        provenance: by group, what its numbers come from.
        found: of each group.
    """
    own = [each for each in drawings if each.kind in figures.OF_A_RUN]
    return _fill(
        "page",
        sections=[_section(group, own, each) for group, each in zip(groups, found, strict=True)],
        skipped=skipped,
        tables=tables,
        figures=[each for each in drawings if each not in own],
        provenance=provenance,
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
    for function in (_words, _rows, _spread, _drawn, _bar, _subscripts, words.minus, counted):
        environment.filters[function.__name__.lstrip("_")] = function
    style = Markup((_FOLDER / "page.css").read_text(encoding="utf-8"))
    return environment.get_template(f"{template}.html.jinja").render(stylesheet=style, **material)


def _title(learner: str, benchmark: str) -> str:
    return f"{learner_title(learner)} on {paper.benchmark_title(benchmark)}"


def _section(group: Group, own: Sequence[Drawing], found: Pictures) -> dict[str, Any]:
    """Returns what the page says of a group."""
    tasks = overview.tasks(group)
    if len(tasks):
        tasks["names"] = [_named(labels, found.class_names) for labels in tasks["classes"]]
    return {
        "group": group,
        "title": _title(group.learner, group.benchmark),
        "results": group.runs[0].results,
        "accuracy": {kind: group.values(kind) for kind in overview.KINDS},
        "gain": group.values("gain"),
        "interval": overview.gain_interval(group),
        "sentences": overview.sentences(group),
        "tasks": tasks.to_dict("records"),
        "forgetting": overview.over_tasks(group, overview.forgetting),
        "backward_transfer": overview.over_tasks(group, overview.backward_transfer),
        "command": overview.command(group),
        "drawings": [each for each in own if each.groups == [group]],
        "pictures": found,
    }


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


def _spread(values: Sequence[float], digits: int = 1, signed: bool = False) -> str:
    return words.minus(words.spread(values, digits, signed))


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


def _drawn(figure: Drawing) -> Markup:
    return Markup(drawing.inline_svg(figure.svg, figure.name))


def _bar(value: float, lines: Sequence[Any]) -> tuple[float, float]:
    """Returns start and length of a bar, in percent of a row that fits all of some evidence."""
    values = [0.0, *(each for line in lines for each in line[1:])]
    low, high = min(values), max(values)
    unit = 100.0 / ((high - low) or 1.0)
    return (min(value, 0.0) - low) * unit, abs(value) * unit
