"""The report as one HTML page: no script, nothing from the network, light, dark and on paper."""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup

from fdc_jax import evaluation
from fdc_jax.files import write_atomically
from fdc_jax.learners import title as learner_title
from fdc_jax.report import drawing, paper
from fdc_jax.report.accuracy_figures import gain_interval
from fdc_jax.report.figures import Drawing
from fdc_jax.report.runs import Group, Loaded, Skipped
from fdc_jax.report.tables import Table

HEADING = "Feature Distribution Calibration: report"

_FOLDER = Path(__file__).parent


class Summary(NamedTuple):
    """What was run and what came out, in sentences and a table."""

    scope: str
    sentences: list[str]
    columns: list[str]
    rows: list[list[str]]
    note: str


def write(
    folder: Path,
    groups: Sequence[Group],
    skipped: Sequence[Skipped],
    tables: Sequence[Table],
    figures: Sequence[Drawing],
    provenance: Sequence[Mapping[str, Any]],
) -> Path:
    """Writes `report.html` into a folder that has `tables/` and `figures/`; returns its path."""
    path = folder / "report.html"
    text = render(Loaded(list(groups), list(skipped)), tables, figures, provenance)
    with write_atomically(path) as file:
        file.write(text.encode())
    return path


def render(
    loaded: Loaded,
    tables: Sequence[Table],
    figures: Sequence[Drawing],
    provenance: Sequence[Mapping[str, Any]],
) -> str:
    """Returns the page; it links to `tables/` and `figures/` beside it.

    Everything that comes from files is escaped.

    Args:
        loaded: what was read and what was skipped.
        tables: in the order to show them.
        figures: likewise.
        provenance: what `runs.provenance` returned.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "words": _words,
        "minus": _minus,
        "safe_table": lambda table: Markup(table.to_html()),
    }
    return environment.get_template("page.html.jinja").render(
        heading=HEADING,
        stylesheet=Markup((_FOLDER / "page.css").read_text(encoding="utf-8")),
        summary=summarise(loaded.groups, len(loaded.skipped)),
        tables=tables,
        figures=_shown(figures),
        figure_contents=_contents(figures),
        skipped=loaded.skipped,
        provenance=provenance,
    )


def _contents(figures: Sequence[Drawing]) -> list[tuple[str, list[tuple[int, str]]]]:
    """Returns, for each kind of figure, its title and the numbers and names of its figures."""
    numbered = enumerate(figures, 1)
    kinds = [list(alike) for _, alike in groupby(numbered, key=lambda pair: pair[1].kind)]
    return [
        (alike[0][1].title.split(": ")[0], [(number, each.name) for number, each in alike])
        for alike in kinds
    ]


def _shown(figures: Sequence[Drawing]) -> list[dict[str, Any]]:
    """Returns what the page says of every figure; the same caption is not said twice."""
    first: dict[str, int] = {}
    shown = []
    for number, figure in enumerate(figures, 1):
        before = first.setdefault(figure.caption, number)
        caption = figure.caption if before == number else f"As in Figure {before}."
        label = f"figure-{figure.name}-title"
        shown.append(
            {
                "name": figure.name,
                "title": figure.title,
                "caption": f"{caption} {figure.shown}".strip(),
                "wide": figure.figure.get_figwidth() > drawing.COLUMN,
                "drawing": Markup(drawing.inline_svg(figure.svg, f"drawing-{figure.name}", label)),
            }
        )
    return shown


def _minus(text: str) -> str:
    """Gives negative numbers a minus sign in place of a hyphen."""
    return re.sub(r"(?<![\w.)])-(?=\d)", "\N{MINUS SIGN}", text)


def _words(value: Any) -> str:
    """Says a value of a configuration or of a record."""
    if value is None:
        return "not recorded"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value or "(empty)"
    if isinstance(value, Mapping):
        return "; ".join(f"{key}: {_words(each)}" for key, each in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_words(each) for each in value) or "(none)"
    return json.dumps(value)


# Summary ------------------------------------------------------------------------------------------


def summarise(groups: Sequence[Group], num_skipped: int = 0) -> Summary:
    """Returns what was run and the headline numbers, in percent and percentage points."""
    columns = ["Runs", "Raw", "FDC", "Gain", "95 %", "Task given", "Seed numbers", "Settings"]
    if not groups:
        scope = "No run could be read"
        if num_skipped:
            verb = "was" if num_skipped == 1 else "were"
            scope += f"; {_count(num_skipped, 'folder')} {verb} skipped"
        return Summary(f"{scope}.", [], columns, [], "")
    num_runs = sum(len(group.runs) for group in groups)
    scope = ", ".join(
        (
            _count(num_runs, "run"),
            _count(len({group.learner for group in groups}), "learner"),
            _count(len({group.benchmark for group in groups}), "benchmark"),
        )
    )
    protocol = sum(group.follows_protocol for group in groups)
    scope += (
        f". {protocol or 'None'} of {_count(len(groups), 'configuration')} "
        f"follow{'' if protocol > 1 else 's'} the paper's protocol."
    )
    if num_skipped:
        scope += f" {_count(num_skipped, 'folder')} skipped, with reasons below."
    note = (
        "Final accuracy in percent, mean ± sample standard deviation over seeds; Task given is raw "
        "restricted to the true task's classes. The gain of full FDC is in percentage points, with "
        "Student's t interval over seeds, or a bootstrap over test images for one seed."
    )
    return Summary(scope, _sentences(groups), columns, [_row(group) for group in groups], note)


def _sentences(groups: Sequence[Group]) -> list[str]:
    gains = [
        (sum(values) / len(values), group) for group in groups if (values := group.gains("full"))
    ]
    if not gains:
        return []
    means = [gain for gain, _ in gains]
    if len(gains) == 1:
        verb = "raises" if means[0] >= 0 else "lowers"
        first = f"FDC {verb} final accuracy by {abs(means[0]):.2f} percentage points."
    else:
        better = sum(gain > 0 for gain in means)
        first = (
            f"FDC raises final accuracy in {better} of {len(gains)} configurations: by "
            f"{min(means):+.2f} to {max(means):+.2f} percentage points."
        )
    shares = [share for group in groups if (share := _repaired(group)) is not None]
    if not shares:
        return [first]
    span = f"{min(shares):.0f}"
    if len(shares) > 1 and f"{max(shares):.0f}" != span:
        span += f" to {max(shares):.0f}"
    return [first, f"Knowing the task would repair {span} % of the errors of raw predictions."]


def _repaired(group: Group) -> float | None:
    """Share in percent of the raw errors that the true task repairs, mean over seeds."""
    lost = [
        (100.0 - raw, oracle - raw)
        for run in group.runs
        if (raw := run.value("accuracy", "raw")) is not None
        and (oracle := run.value("accuracy", "oracle")) is not None
        and raw < 100
    ]
    return sum(100.0 * fixed / errors for errors, fixed in lost) / len(lost) if lost else None


def _row(group: Group) -> list[str]:
    low, high, kind = gain_interval(group)
    return [
        f"{learner_title(group.learner)}, {paper.benchmark_title(group.benchmark)}",
        _spread(group.values("accuracy", "raw")),
        _spread(group.values("accuracy", "fdc")),
        _spread(group.gains("full"), signed=True),
        f"{low:+.2f} to {high:+.2f}" if kind else "–",
        _spread(group.values("accuracy", "oracle")),
        ", ".join(str(seed) for seed in group.seeds),
        group.title or "the paper's",
    ]


def _spread(values: Sequence[float], signed: bool = False) -> str:
    if not values:
        return "–"
    mean, std = evaluation.mean_and_std(values)
    text = f"{mean:+.2f}" if signed else f"{mean:.2f}"
    return f"{text} ± {std:.2f}" if len(values) > 1 else text


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
