"""All tables of the report, one pandas frame each: ours beside the paper's, calibrators, costs."""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fdc_jax import learners
from fdc_jax.machine.files import read_json, write_text
from fdc_jax.report import frames, paper, runs, words
from fdc_jax.report.paper import Published
from fdc_jax.report.runs import Group
from fdc_jax.report.words import number

# A row of a table by heading: labels and cells.
Row = dict[str, Any]


class Table(NamedTuple):
    """A table."""

    name: str  # stem of its files
    title: str
    frame: pd.DataFrame  # what a row is in the index; cells as they read, NaN for a gap
    note: str = ""  # how to read it: units, what is compared with what

    @property
    def shown(self) -> pd.DataFrame:
        """The frame with a dash in every gap."""
        return self.frame.astype(object).where(self.frame.notna(), "–")

    def to_latex(self) -> str:
        """Returns a table environment, which needs the package booktabs."""
        body = self.shown.to_latex(
            escape=True,
            multirow=False,
            caption=f"{self.title}.",
            label=f"tab:{self.name.replace('_', '-')}",
            column_format="l" * self.frame.index.nlevels + "r" * len(self.frame.columns),
        )
        return f"% {self.note}\n{body}"

    def write(self, folder: Path) -> None:
        """Writes `<name>.csv` and `.tex` into a folder."""
        write_text(folder / f"{self.name}.csv", self.frame.to_csv())
        write_text(folder / f"{self.name}.tex", self.to_latex())


# Titles, headings, and how to read each table.
_TEXTS: dict[str, Any] = read_json(Path(__file__).with_name("tables.json"))
# Tables current-benchmark, current-ablation, plugin, logit_standardization and current-aia.
_BESIDE = (
    *("benchmark", "ablation", "plugin", "logit_standardisation"),
    "average_incremental_accuracy",
)


def build(groups: Sequence[Group]) -> list[Table]:
    """Builds the tables of groups that compare something: those of at least two rows."""
    headings = benchmarks(groups)
    rows = {"calibrators": _calibrators(groups)}
    rows |= {name: _beside(groups, name) for name in _BESIDE}
    rows["cost"] = _cost(groups)
    built = [_table(name, lines, [*headings.values(), "Avg."]) for name, lines in rows.items()]
    return [each for each in (of_runs(groups), *built) if len(each.frame) > 1]


def of_runs(groups: Sequence[Group]) -> Table:
    """Builds the table of runs: their accuracies, and the settings in which they differ."""
    rows = {}
    for group in groups:
        best = frames.leading(group).get("best", "raw")
        for run in group.runs:
            of, accuracy = run.results, run.results["accuracy"]
            names = {"learner": group.learner, "benchmark": group.benchmark, "seed": of["seed"]}
            settings = {name: str(each)[:40] for name, each in runs.settings(of).items()}
            found = {f"{name}, %": number(accuracy.get(name)) for name in ("raw", "fdc")}
            found |= {
                "best calibrator": words.method_title(best),
                "best, %": number(accuracy[best]),
            }
            rows["/".join(run.folder.absolute().parts[-2:])] = names | found | settings
    made = pd.DataFrame.from_dict(rows, orient="index").dropna(axis=1).rename_axis("run")
    kept = (made.nunique() > 1) | made.columns.str.endswith("%")
    return Table("runs", _TEXTS["runs"]["title"], made.loc[:, kept], _TEXTS["runs"]["note"])


def of_calibrators(group: Group) -> Table:
    """Builds the table of a group's calibrators."""
    made = _table("calibrators", _calibrators([group]))
    labels = made.frame.index.names[:-1]
    return made._replace(frame=made.frame.droplevel(labels))


def of_tasks(group: Group) -> Table:
    """Builds the table of accuracies on each task, empty where not all were recorded."""
    found = frames.tasks(group).rename(columns=words.method_title).rename_axis("task")
    shown = found.map(lambda value: math.nan if math.isnan(value) else number(value, 1))
    return Table("tasks", _TEXTS["tasks"]["title"], shown, _TEXTS["tasks"]["note"])


def _table(name: str, rows: Iterable[Row], headings: Sequence[str] = ()) -> Table:
    text = _TEXTS[name]
    made = frame(rows, text["labels"], text.get("columns") or headings)
    return Table(name, text["title"], made, text["note"].replace("{ours}", _TEXTS["ours"]))


def frame(rows: Iterable[Row], labels: Sequence[str], columns: Sequence[str]) -> pd.DataFrame:
    """Returns rows as a frame with the labels in its index; rows and columns of gaps are left out.

    A heading that is no cell's is left out, too.
    """
    made = pd.DataFrame(list(rows), columns=[*labels, *columns], dtype=object)
    return made.set_index(list(labels)).dropna(how="all").dropna(how="all", axis=1)


def benchmarks(groups: Sequence[Group]) -> dict[str, str]:
    """Returns headings of columns by benchmark; the user's own first, then the paper's."""
    present = dict.fromkeys(each.benchmark for each in groups)
    names = [name for name in present if name not in paper.benchmarks()]
    names += [name for name in paper.benchmarks() if name in present]
    return {name: paper.benchmark_title(name) for name in names}


def ours(group: Group) -> str:
    """Returns what rows of a group's settings are called."""
    return f"ours, {group.title}" if group.title else "ours"


def _labels(group: Group) -> Row:
    benchmark, numbers = paper.benchmark_title(group.benchmark), ours(group)
    learner = learners.title(group.learner)
    return {"learner": learner, "benchmark": benchmark, "numbers": numbers}


# Ours beside the paper's -------------------------------------------------------------------------


class Line(NamedTuple):
    """What a few rows show of a learner: a quantity of its runs beside the paper's by benchmark."""

    labels: Row
    quantity: str  # of `quantities.measured`
    published: Mapping[str, Published] = {}
    average: float | None = None  # The paper's, over its benchmarks.


def _lines(table: str, learner: str) -> list[Line]:
    """Returns what a table of `_BESIDE` shows of a learner."""
    title, row = learners.title(learner), functools.partial(paper.row, table, learner)
    before, after = {"method": title}, {"method": f"{title} + FDC"}
    if table == "benchmark":
        return [Line(before, "raw", row("raw")), Line(after, "selected", row("fdc"))]
    if table == "average_incremental_accuracy":
        return [Line(before, "aia:raw", row()), Line(after, "aia:selected")]
    if table == "logit_standardisation":
        return [Line({"learner": title}, "gain:ls", row())]
    labels = {
        key: {"learner": title, "components": components}
        for key, components in paper.COMPONENT_TITLES.items()
    }
    if table == "ablation":
        names = {key: key if key == "raw" else f"gain:{key}" for key in labels}
        return [Line(labels[key], name, row(key)) for key, name in names.items()]
    kinds = {"full": "full", learners.selected(learner): "selected"}
    return [
        Line(labels[key], f"gain:{key}", row(kind, "gain"), paper.average(learner, kind))
        for key, kind in reversed(kinds.items())
    ]


def _beside(groups: Sequence[Group], table: str) -> Iterable[Row]:
    """Puts quantities of learners beside the paper's."""
    headings = benchmarks(groups)
    for learner in dict.fromkeys(each.learner for each in groups):
        own = [each for each in groups if each.learner == learner]
        for line in _lines(table, learner):
            signed, measured = line.quantity.startswith("gain"), set()
            for title in dict.fromkeys(each.title for each in own):
                alike = [each for each in own if each.title == title]
                found = {each.benchmark: each.values(line.quantity) for each in alike}
                found = {name: values for name, values in found.items() if values}
                cells = {headings[n]: spread(each, signed) for n, each in found.items()}
                means = [np.mean(found.get(name, math.nan)) for name in paper.benchmarks()]
                if not np.isnan(means).any():
                    cells["Avg."] = number(float(np.mean(means)), signed=signed)
                yield line.labels | {"numbers": ours(alike[0])} | cells
                measured |= found.keys()
            known = {n: each for n, each in line.published.items() if n in measured}
            cells = {headings[n]: words.mean(*each[:2], signed=signed) for n, each in known.items()}
            if len(known) == len(paper.benchmarks()):
                cells["Avg."] = number(line.average, signed=signed)
            yield line.labels | {"numbers": "paper"} | cells


def spread(values: Sequence[float], signed: bool = False) -> Any:
    """Says mean and sample standard deviation over seeds, in brackets how many; NaN of none."""
    return words.spread(values, signed=signed, count=True)


# Calibrators, data, costs ------------------------------------------------------------------------


def _calibrators(groups: Sequence[Group]) -> Iterable[Row]:
    """All calibrators of the runs side by side."""
    for group in groups:
        for title, cells in frames.calibrators(group).iterrows():
            yield _labels(group) | {"calibrator": title} | cells.to_dict()


def _cost(groups: Sequence[Group]) -> Iterable[Row]:
    """Time of training and of FDC's statistics, and their storage (Table app-cost)."""
    of_paper = paper.numbers()["tables"]["cost"]
    headings = dict(zip(of_paper["columns"], _TEXTS["cost"]["columns"], strict=True))
    for each in groups:
        devices = sorted({str(run.results.get("device", "unknown")) for run in each.runs})
        cells = {heading: spread(each.values(key)) for key, heading in headings.items()}
        yield _labels(each) | {"device": ", ".join(devices)} | cells
    name = "cumulative_lora"
    labels = {"learner": learners.title(name), "numbers": "paper", "device": of_paper["device"]}
    shown = {each.benchmark for each in groups if each.learner == name}
    for benchmark in paper.benchmarks():
        if benchmark in shown:
            published = paper.columns("cost", benchmark)
            cells = {heading: number(published[key]) for key, heading in headings.items()}
            yield labels | {"benchmark": paper.benchmark_title(benchmark)} | cells
