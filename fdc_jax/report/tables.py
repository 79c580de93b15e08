"""All tables of the report: ours beside the paper's, calibrators, selection rule, costs."""

import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fdc_jax import learners
from fdc_jax.calibration import FDC
from fdc_jax.machine.files import csv_text, read_json, write_text
from fdc_jax.report import formatting, frames, paper, quantities, runs
from fdc_jax.report.formatting import number
from fdc_jax.report.runs import Group

# A row of a table by heading: labels and cells.
Row = dict[str, Any]


class Table(NamedTuple):
    """A table as text to read and, in long format, as numbers."""

    name: str  # stem of its files
    title: str
    frame: pd.DataFrame  # labels of rows in the index; cells as text, NaN for a gap
    note: str = ""  # how to read it: units, what is compared with what
    scope: str = ""  # departures from the paper's protocol, to be said above the table
    numbers: pd.DataFrame | None = None  # rows of `Group.record`; None: the frame is all there is
    best: frozenset[tuple[int, int]] = frozenset()  # row and column of cells in bold

    @property
    def shown(self) -> pd.DataFrame:
        """The frame with a dash in every gap."""
        return self.frame.astype(object).where(self.frame.notna(), "–")

    @property
    def labels(self) -> pd.DataFrame:
        """Labels of rows as text; a label that the row above has, too, is empty."""
        labels = self.frame.index.to_frame(index=False).astype(str)
        same = labels.eq(labels.shift()).astype(int).cummin(axis=1).astype(bool)
        same.isetitem(-1, False)
        return labels.mask(same, "")

    def to_latex(self) -> str:
        """Returns a table environment, which needs the package booktabs."""
        labels, cells = self.labels.map(_latex), self.shown.map(_latex)
        for row, column in self.best:
            cells.iloc[row, column] = rf"\textbf{{{cells.iloc[row, column]}}}"
        whole = pd.concat([labels, cells.reset_index(drop=True)], axis=1)
        text = whole.rename(columns=_latex).to_latex(
            index=False,
            escape=False,
            caption=_latex(" ".join(filter(None, (f"{self.title}.", self.scope)))),
            label=f"tab:{self.name.replace('_', '-')}",
            column_format="l" * labels.shape[1] + "r" * cells.shape[1],
        )
        opened = r"\begin{table}"
        return f"% {self.note} {READING}\n" + text.replace(
            opened, f"{opened}\n\\centering\\small", 1
        )

    def write(self, folder: Path) -> None:
        """Writes `<name>.csv` and `.tex` into a folder."""
        content = (
            csv_text(self.frame)
            if self.numbers is None
            else csv_text(self.numbers.convert_dtypes(), index=False)
        )
        write_text(folder / f"{self.name}.csv", content)
        write_text(folder / f"{self.name}.tex", self.to_latex())


_SIGNS = {"±": r"$\pm$", "–": "--", "γ": r"$\gamma$", "η": r"$\eta$", "ρ": r"$\rho$"}


def _latex(cell: Any) -> str:
    text = re.sub(r"([&%$#{}])", r"\\\1", str(cell).replace("\\", r"\textbackslash "))
    text = re.sub(r"\bE_(\w)", r"$E_\1$", text)
    text = re.sub(r"(?<![$E])_", r"\\_", text)
    text = re.sub(r"(?<![\w.)])([+-])(?=\d)", r"$\1$", text)
    for sign, command in _SIGNS.items():
        text = text.replace(sign, command)
    return text


# Titles, labels, lines, and how to read each table.
_TEXTS: dict[str, Any] = read_json(Path(__file__).with_name("tables.json"))
READING: str = _TEXTS["ours"]
_BESIDE = (
    *("benchmark", "ablation", "plugin", "logit_standardisation", "average_incremental_accuracy"),
    *("task_identity", "sweeps", "diagnostics", "cost", "latency"),
)


def build(groups: Sequence[Group]) -> list[Table]:
    """Builds the tables of groups; one without a number of ours is left out."""
    built = [of_runs(groups)] * (sum(len(group.runs) for group in groups) > 1)
    built += [of_calibrators(groups), *(_beside(groups, name) for name in _BESIDE)]
    built.append(of_selection(groups))
    return [table for table in built if len(table.frame)]


def of_runs(groups: Sequence[Group]) -> Table:
    """Builds the table of runs: their accuracies, and the settings in which they differ."""
    rows = {}
    for group in groups:
        best = frames.leading(group).get("best", "raw")
        for run in group.runs:
            of, accuracy = run.results, run.results["accuracy"]
            names = {"learner": group.learner, "benchmark": group.benchmark, "seed": of["seed"]}
            settings = {name: str(each)[:40] for name, each in runs.settings(of).items()}
            accuracies = {f"{name}, %": number(accuracy.get(name)) for name in ("raw", FDC.name)}
            accuracies |= {
                "best calibrator": formatting.method_title(best),
                "best, %": number(accuracy[best]),
            }
            rows["/".join(run.folder.absolute().parts[-2:])] = names | accuracies | settings
    made = pd.DataFrame.from_dict(rows, orient="index").dropna(axis=1).rename_axis("run")
    kept = (made.nunique() > 1) | made.columns.str.endswith("%")
    return Table("runs", _TEXTS["runs"]["title"], made.loc[:, kept], _TEXTS["runs"]["note"])


def of_calibrators(groups: Sequence[Group]) -> Table:
    """Builds the table of calibrators side by side."""
    names, scope = _settings(groups)
    rows = [
        {
            "learner": learners.title(group.learner),
            "benchmark": paper.benchmark_title(group.benchmark),
            "numbers": names[group.title],
            "calibrator": title,
            **cells.to_dict(),
        }
        for group in groups
        for title, cells in frames.calibrators(group).iterrows()
    ]
    kinds = ("", "gain:", "routing:", "aia:", "storage:")
    of = (
        (group, f"{kind}{name}")
        for group in groups
        for name in frames.shown(group)
        for kind in kinds
    )
    made = _table("calibrators", rows, scope, (g.record(q) for g, q in of if g.values(q)))
    one = made.frame.droplevel(made.frame.index.names[:-1]) if len(groups) == 1 else made.frame
    return made._replace(frame=one)


def of_tasks(group: Group) -> Table:
    """Builds the table of accuracies on each task, empty where not all were recorded."""
    accuracy = frames.tasks(group).rename(columns=formatting.method_title).rename_axis("task")
    shown = accuracy.map(lambda value: number(value, 1))
    return Table("tasks", _TEXTS["tasks"]["title"], shown, _TEXTS["tasks"]["note"])


def _table(name: str, rows: Iterable[Row], scope: str, numbers: Iterable[Row] = ()) -> Table:
    text = _TEXTS[name]
    made = frame(rows, text["labels"], text.get("columns"))
    return Table(name, text["title"], made, text["note"], scope, pd.DataFrame(list(numbers)))


def frame(
    rows: Iterable[Row], labels: Sequence[str], columns: Sequence[str] | None = None
) -> pd.DataFrame:
    """Returns rows as a frame with the labels in its index, without rows and columns of gaps.

    Columns are those of the rows unless others are named.
    """
    rows = list(rows)
    columns = columns or [*dict.fromkeys(k for row in rows for k in row if k not in labels)]
    made = pd.DataFrame(rows, columns=[*labels, *columns], dtype=object)
    return made.set_index(list(labels)).dropna(how="all").dropna(how="all", axis=1)


def _settings(groups: Sequence[Group]) -> tuple[dict[str, str], str]:
    """Returns row labels by the titles of groups, and the sentence above the table about them."""
    titles = dict.fromkeys(group.title for group in groups)
    departing = [title for title in titles if title]
    if len(titles) == 1:
        names, scope = dict.fromkeys(titles, "ours"), "".join(departing)
    else:
        numbered = {title: f"ours ({n})" for n, title in enumerate(departing, 1)}
        names, scope = {"": "ours"} | numbered, "; ".join(
            f"({n}) {title}" for n, title in enumerate(departing, 1)
        )  # fmt: skip
    return names, f"Ours depart from the paper's protocol: {scope}." if departing else ""


# Ours beside the paper's -------------------------------------------------------------------------

# Components that the paper selects from, by the key of their stand-alone result.
_PARTS = {"tsf": "TSF", "pac+rlc_pretrained_view": "E_0", "pac+rlc_adapted_view": "E_T"}


def _lines(table: str, own: Sequence[Group]) -> dict[str, str]:
    """Returns what a table shows of a learner: quantities by their labels."""
    learner, titles = own[0].learner, paper.COMPONENT_TITLES
    if table == "ablation":
        return {titles[key]: key if key == "raw" else f"gain:{key}" for key in titles}
    if table == "plugin":
        return {titles[key]: f"gain:{key}" for key in (learners.selected(learner), "full")}
    if table == "sweeps":
        names = {name for group in own for name in group.numbers if "=" in name}
        pairs = [name.split("=") for name in names]
        order = sorted((quantities.SWEPT.index(s), float(v), s) for s, v in pairs)
        label = _TEXTS[table]["settings"]
        return {f"{label[s]} = {v:g}": f"{s}={v:g}" for _, v, s in order}
    return _TEXTS[table]["lines"]


def _beside(groups: Sequence[Group], table: str) -> Table:
    """Builds a table with a column per benchmark, and rows of ours, the paper's, the difference."""
    text, (names, scope) = _TEXTS[table], _settings(groups)
    rows: dict[tuple[str, ...], Row] = {}
    numbers = []
    for learner in dict.fromkeys(group.learner for group in groups):
        own = [group for group in groups if group.learner == learner]
        for label, quantity in _lines(table, own).items():
            for record in _records(own, quantity):
                numbers.append(record)
                title = record["benchmark"]
                heading = "Avg." if title == paper.AVERAGE else paper.benchmark_title(title)
                for kind, cell in _cells(record, names[record["settings"]]).items():
                    key = learners.title(learner), label, kind
                    rows.setdefault(key, {})[heading] = cell
    labels = [*text["labels"], "numbers"]
    lines = [dict(zip(labels, key, strict=True)) | cells for key, cells in rows.items()]
    made = frame(lines, labels, [*benchmarks(groups).values(), "Avg."])
    best = _best(made) if text.get("best") else frozenset()
    return Table(table, text["title"], made, text["note"], scope, pd.DataFrame(numbers), best)


def _records(own: Sequence[Group], quantity: str) -> Iterable[Row]:
    """Yields a learner's records of a quantity, and of its mean over the paper's benchmarks."""
    records = [group.record(quantity) for group in own if group.values(quantity)]
    yield from records
    published = _published(own[0].learner, quantity)
    for settings in dict.fromkeys(record["settings"] for record in records):
        alike = {each["benchmark"]: each for each in records if each["settings"] == settings}
        if alike.keys() >= {*paper.benchmarks()}:
            mean = float(np.mean([alike[name]["mean"] for name in paper.benchmarks()]))
            gap = None if published is None else mean - published
            of_all = {"benchmark": paper.AVERAGE, "mean": mean, "paper_mean": published}
            yield dict.fromkeys(records[0]) | {
                **{name: records[0][name] for name in ("learner", "calibrator", "quantity")},
                **of_all,
                **{"difference": gap, "settings": settings},
            }


def _published(learner: str, quantity: str) -> float | None:
    """Returns the paper's average, or the mean of its numbers of all five benchmarks."""
    if known := paper.find(paper.AVERAGE, learner, quantity):
        return known.mean
    each = [paper.find(name, learner, quantity) for name in paper.benchmarks()]
    return None if None in each else float(np.mean([of.mean for of in each if of]))


def _cells(record: Row, ours: str) -> dict[str, str]:
    """Returns the text of a record by the label of its row."""
    kind = record["quantity"]
    signed = kind.startswith(("gain", "added", "correlation", "contribution"))

    def text(name: str, count: float | None = None) -> str:
        std = record.get(f"{name}std")
        std = math.nan if std is None else std
        return formatting.mean(record[f"{name}mean"], std, count, signed=signed)

    usual = record["n"] in (None, paper.numbers()["num_seeds"])
    cells = {ours: text("", None if usual else record["n"])}
    if record["paper_mean"] is not None:
        gap = number(record["difference"], signed=True)
        if (low := record["difference_low"]) is not None:
            ends = (number(each, 1, signed=True) for each in (low, record["difference_high"]))
            gap += f" ({' to '.join(ends)})"
        cells |= {"paper": text("paper_"), ours.replace("ours", "difference"): gap}
    return cells


def benchmarks(groups: Sequence[Group]) -> dict[str, str]:
    """Returns headings of columns by benchmark; the user's own first, then the paper's."""
    present = dict.fromkeys(each.benchmark for each in groups)
    names = [name for name in present if name not in paper.benchmarks()]
    names += [name for name in paper.benchmarks() if name in present]
    return {name: paper.benchmark_title(name) for name in names}


def _best(made: pd.DataFrame) -> frozenset[tuple[int, int]]:
    """Returns row and column of the largest mean of ours in every column."""
    own = [str(label[-1]).startswith("ours") for label in made.index]
    means = made.map(lambda cell: float(cell.split()[0]) if isinstance(cell, str) else math.nan)
    largest = means[own].max()
    places = np.argwhere((means.eq(largest) & np.array(own)[:, None]).to_numpy())
    return frozenset((int(row), int(column)) for row, column in places)


# Selection rule ----------------------------------------------------------------------------------


def selected(own: Sequence[Group]) -> str:
    """Returns the components, as a key of `components`, that own runs of a learner select.

    The paper's rule ("Plug-and-Play Calibration"): a component is enabled if its stand-alone gain,
    averaged over seeds, is positive on every benchmark.
    """
    tsf, pretrained, adapted = (
        all(np.mean(group.values(f"gain:{key}")) > 0 for group in own) for key in _PARTS
    )
    if adapted and pretrained:
        return "full" if tsf else "pac+rlc"
    if not (adapted or pretrained):
        return "tsf" if tsf else "raw"
    view = "adapted_view" if adapted else "pretrained_view"
    return view if tsf else f"pac+rlc_{view}"


def of_selection(groups: Sequence[Group]) -> Table:
    """Builds the table of selected components, and of the pairs of learner and set with a gain."""
    names, scope = _settings(groups)
    rows, numbers, pooled = [], [], {}
    members: dict[tuple[str, str], list[Group]] = {}
    for group in groups:
        if group.values("gain:selected") and group.values("gain:full"):
            members.setdefault((group.title, group.learner), []).append(group)

    def add(learner: str, title: str, label: str, gains: dict[str, list[float]], **more: Any):
        pairs = {f"gains, {kind}": _pairs(of)[0] for kind, of in gains.items()}
        rows.append({"learner": label, "numbers": title} | more | pairs)
        for kind, of in gains.items():
            for name, value in zip(("pairs with a gain", "gain"), _pairs(of)[1:], strict=True):
                labels = {"learner": learner, "calibrator": kind, "quantity": name}
                numbers.append(labels | {"mean": value, "n": len(of), "settings": title})

    for (title, learner), own in members.items():
        ruled, chosen = selected(own), learners.selected(learner)
        keys = {"the paper's choice": "selected", "own choice": ruled, "all components": "full"}
        gains = {
            kind: [float(np.mean(group.values(f"gain:{key}"))) for group in own]
            for kind, key in keys.items()
        }
        least = {
            part: number(
                min(float(np.mean(group.values(f"gain:{key}"))) for group in own), signed=True
            )
            for key, part in _PARTS.items()
        }
        titles = {
            kind: paper.COMPONENT_TITLES[key]
            for kind, key in (("own choice", ruled), ("the paper's choice", chosen))
        }
        add(learner, names[title], learners.title(learner), gains, **least, **titles)
        if learner in paper.plugged():
            for kind, of in gains.items():
                pooled.setdefault(names[title], {}).setdefault(kind, []).extend(of)
    if any(group.benchmark in paper.benchmarks() for group in groups):
        kinds = {"the paper's choice": "selected", "all components": "full"}
        pooled["paper"] = {
            kind: [
                published.mean
                for learner in paper.plugged()
                for name in paper.benchmarks()
                if (published := paper.find(name, learner, f"gain:{key}"))
            ]
            for kind, key in kinds.items()
        }
    for title, gains in pooled.items():
        add("plugged", title, "learners of Table plugin", gains)
    return _table("selection", rows, scope, numbers)


def _pairs(gains: Sequence[float]) -> tuple[str, int, float]:
    """Returns the number of positive gains and the mean gain, first both as text."""
    positive, mean = sum(gain > 0 for gain in gains), float(np.mean(gains))
    return f"{positive} of {len(gains)}, {number(mean, signed=True)}", positive, mean
