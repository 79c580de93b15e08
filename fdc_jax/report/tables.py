"""Tables of the report: ours beside the paper's, calibrators, tasks, and the selection rule."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from tabulate import tabulate

from fdc_jax import evaluation, learners
from fdc_jax.calibration import FDC
from fdc_jax.machine.files import csv_text, read_json, write_text
from fdc_jax.report import analysis, formatting, paper, quantities, reference
from fdc_jax.report.formatting import number
from fdc_jax.report.reference import Line, Published
from fdc_jax.report.runs import Group, Row

# Cells of a row of a table by heading.
Cells = dict[str, Any]
# Returns the number beside ours by benchmark, learner and quantity.
Find = Callable[[str, str, str], Published | None]


class Table(NamedTuple):
    """A table as text, and in long format as numbers."""

    name: str  # stem of its files
    title: str
    frame: pd.DataFrame  # labels of rows in the index; cells as text, NaN for a gap
    note: str = ""  # units and comparisons
    scope: str = ""  # departures from the paper's protocol, above the table
    numbers: pd.DataFrame | None = None  # rows of `Group.record`
    best: frozenset[tuple[int, int]] = frozenset()  # row and column of cells in bold

    def rows(self) -> Iterable[tuple[list[str], list[tuple[str, bool]]]]:
        """Yields labels and cells by row; labels of the row above are empty.

        A cell is its text, a dash in a gap, and True if it is the best.
        """
        labels = self.frame.index.to_frame(index=False).astype(str)
        same = labels.eq(labels.shift()).astype(int).cummin(axis=1).astype(bool)
        same.isetitem(-1, False)
        cells = self.frame.astype(str).where(self.frame.notna(), "–").to_numpy().tolist()
        for row, names in enumerate(labels.mask(same, "").to_numpy().tolist()):
            yield names, [(text, (row, i) in self.best) for i, text in enumerate(cells[row])]

    def to_latex(self) -> str:
        """Returns a table environment, which needs the package booktabs."""
        rows = [
            [
                *map(_latex, labels),
                *(rf"\textbf{{{_latex(text)}}}" if best else _latex(text) for text, best in cells),
            ]
            for labels, cells in self.rows()
        ]
        names = [_latex(name) for name in (*self.frame.index.names, *self.frame.columns)]
        text = pd.DataFrame(rows, columns=names).to_latex(
            index=False,
            escape=False,
            caption=_latex(" ".join(filter(None, (f"{self.title}.", self.scope)))),
            label=f"tab:{self.name.replace('_', '-')}",
            column_format="l" * self.frame.index.nlevels + "r" * self.frame.shape[1],
        )
        text = text.replace(r"\begin{table}", "\\begin{table}\n\\centering\\small", 1)
        reading = f" {READING}" * ("numbers" in self.frame.index.names)
        return f"% {self.note}{reading}\n{text}"

    def to_text(self) -> str:
        """Returns title, scope and cells as plain text."""
        rows = [[*labels, *(text for text, _ in cells)] for labels, cells in self.rows()]
        names = [*self.frame.index.names, *self.frame.columns]
        align = ["left"] * self.frame.index.nlevels + ["right"] * self.frame.shape[1]
        text = tabulate(rows, names, disable_numparse=True, colalign=align)
        return "\n".join([*filter(None, (self.title, self.scope)), "", text, ""])

    def write(self, folder: Path) -> None:
        """Writes `<name>.csv`, `.tex` and `.txt` into a folder."""
        numbers = pd.DataFrame() if self.numbers is None else self.numbers.convert_dtypes()
        write_text(folder / f"{self.name}.csv", csv_text(numbers, index=False))
        write_text(folder / f"{self.name}.tex", self.to_latex())
        write_text(folder / f"{self.name}.txt", self.to_text())


_SIGNS = {"±": r"$\pm$", "–": "--", "γ": r"$\gamma$", "η": r"$\eta$", "ρ": r"$\rho$"}
_SIGNS |= {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}


def _latex(cell: Any) -> str:
    text = re.sub(r"([&%$#{}])", r"\\\1", str(cell).replace("\\", r"\textbackslash "))
    text = re.sub(r"\bE_(\w)", r"$E_\1$", text)
    text = re.sub(r"(?<![$E])_", r"\\_", text)
    text = re.sub(r"(?<![\w.)])([+-])(?=\d)", r"$\1$", text)
    for sign, command in _SIGNS.items():
        text = text.replace(sign, command)
    return text


# Titles, labels, lines and notes of all tables.
_TEXTS: dict[str, Any] = read_json(Path(__file__).with_name("tables.json"))
READING: str = _TEXTS["ours"]
_BESIDE = (
    *("benchmark", "ablation", "plugin", "logit_standardisation", "average_incremental_accuracy"),
    *("task_identity", "sweeps", "diagnostics", "cost", "latency"),
)


def build(groups: Sequence[Group]) -> list[Table]:
    """Builds the tables of groups that have a number of ours."""
    compared = (beside(groups, name) for name in _BESIDE)
    built = [*compared, of_selection(groups), of_calibrators(groups)]
    return [table for table in built if len(table.frame)]


def _table(
    name: str,
    rows: Mapping[tuple[str, ...], Cells],
    scope: str = "",
    numbers: Sequence[Row | Cells] = (),
    columns: Sequence[str] | None = None,
) -> Table:
    """Returns a table of `tables.json` without empty rows and columns.

    Its columns are `columns`, or else those of `tables.json`, or else those of the rows.
    """
    text, records = _TEXTS[name], pd.DataFrame(numbers)
    index = pd.MultiIndex.from_tuples(rows, names=text["labels"]) if rows else None
    names = dict.fromkeys(name for row in rows.values() for name in row)
    columns = [*(columns or text.get("columns") or names)]
    frame = pd.DataFrame([*rows.values()], index, columns, dtype=object)
    frame = frame.dropna(how="all").dropna(how="all", axis=1)
    if "numbers" in frame.index.names and {*frame.index.get_level_values("numbers")} == {"ours"}:
        frame = frame.droplevel("numbers")  # Nothing is compared.
    return Table(name, text["title"], frame, _note(name, frame, records), scope, records)


def _note(name: str, frame: pd.DataFrame, numbers: pd.DataFrame) -> str:
    """Returns the sentences of a note whose row, column or calibrator occurs in the table."""
    calibrators = numbers["calibrator"] if len(numbers) else ()
    occurring = {"", *frame.columns, *frame.index.get_level_values(-1), *calibrators}
    return " ".join(text for key, text in _TEXTS[name]["note"].items() if key in occurring)


def _settings(groups: Sequence[Group]) -> tuple[dict[str, str], str]:
    """Returns row labels by the titles of groups, and the sentence about departures."""
    titles = dict.fromkeys(group.title for group in groups)
    departing = [title for title in titles if title]
    if len(titles) == 1:
        names, scope = dict.fromkeys(titles, "ours"), "".join(departing)
    else:
        names = {"": "ours"} | {title: f"ours ({n})" for n, title in enumerate(departing, 1)}
        scope = "; ".join(f"({n}) {title}" for n, title in enumerate(departing, 1))
    return names, f"Ours depart from the paper's protocol: {scope}." if departing else ""


# Calibrators and tasks ---------------------------------------------------------------------------


def _shown(group: Group) -> list[str]:
    """Returns the names of a group's calibrators, untrained ones, `selected` and `oracle`."""
    names = [*dict.fromkeys([*group.methods, *analysis.UNTRAINED, "oracle"])]
    if learners.selected(group.learner) not in ("full", "") and FDC.name in names:
        names.insert(names.index(FDC.name) + 1, "selected")
    return [*filter(group.values, names)]


def of_calibrators(groups: Sequence[Group]) -> Table:
    """Builds the table of calibrators side by side; intervals are those of `Group.gain`."""
    names, scope = _settings(groups)
    rows, numbers = {}, []
    for group in groups:
        titles = learners.title(group.learner), paper.benchmark_title(group.benchmark)
        for name in _shown(group):
            kinds = [kind for kind in _KINDS if group.values(f"{kind}{name}")]
            unknown = Row(group.benchmark, group.learner, name, "")
            records = dict.fromkeys(_KINDS, unknown)
            records |= {kind: _record(group, f"{kind}{name}") for kind in kinds}
            numbers += [records[kind] for kind in kinds]
            accuracy, right, given, average = (records[kind] for kind in _SHOWN)
            gain = unknown if name in ("raw", "oracle") else records["gain:"]
            missing = 0.0 if name == "raw" else math.nan
            storage = np.array(group.values(f"storage:{name}") or missing) / 2**20
            rows[*titles, names[group.title], formatting.method_title(name)] = {
                "accuracy": formatting.mean(accuracy.mean, accuracy.std),
                "95 % interval": formatting.interval(accuracy.low, accuracy.high, signed=False),
                "paper": formatting.mean(accuracy.paper_mean, accuracy.paper_std),
                "gain": formatting.mean(gain.mean, gain.std, signed=True),
                "interval of the gain": formatting.interval(gain.low, gain.high),
                "right task": formatting.mean(right.mean, right.std),
                "task given": formatting.mean(given.mean, given.std),
                "average over tasks": formatting.mean(average.mean, average.std),
                "storage, MiB": formatting.mean(*evaluation.mean_and_std(storage)),
            }
    made = _table("calibrators", rows, scope, numbers)
    frame = made.frame.droplevel(made.frame.index.names[:-1]) if len(groups) == 1 else made.frame
    return made._replace(frame=frame)


_KINDS = ("", "gain:", "routing:", "given:", "aia:", "storage:")
_SHOWN = ("", "routing:", "given:", "aia:")


def _record(group: Group, quantity: str, find: Find = paper.find) -> Row:
    """Returns a quantity of a group beside another number."""
    return group.record(quantity, find(group.benchmark, group.learner, quantity))


def of_tasks(group: Group) -> Table:
    """Builds the table of final accuracies by task, with the forgetting below."""
    names = (*group.methods, "oracle")
    columns = {formatting.method_title(name): _by_task(group, name) for name in names}
    shown = pd.DataFrame(columns).rename_axis("task").dropna(how="all", axis=1)
    shown = shown.map(lambda value: number(value, 1))
    return Table("tasks", _TEXTS["tasks"]["title"], shown, _note("tasks", shown, pd.DataFrame()))


def _by_task(group: Group, method: str) -> pd.Series:
    """Returns the final accuracy by task, and the forgetting, means over seeds.

    Forgetting is the mean, over all tasks except the last, of the best earlier accuracy minus the
    final one (Chaudhry et al., "Riemannian Walk for Incremental Learning", 2018). It needs an
    evaluation after every task.
    """
    seeds = []
    for run in group.runs:
        points = [point.task_accuracy for point in run.results.curve]
        after = pd.DataFrame([dict(enumerate(of.get(method, []), 1)) for of in points])
        final = after.astype(float).iloc[-1]
        if len(after) == run.results.num_tasks > 1:
            final["Forgetting"] = (after[:-1].max() - final)[:-1].mean()
        seeds.append(final)
    return pd.concat(seeds, axis=1).mean(axis=1, skipna=False)


# Ours beside the paper's -------------------------------------------------------------------------


def _lines(table: str, groups: Sequence[Group]) -> dict[str, str]:
    """Returns the quantities of a table for the groups of a learner, by their labels."""
    chosen, titles = learners.selected(groups[0].learner), paper.COMPONENT_TITLES
    if table == "ablation":
        return {titles[key]: key if key == "raw" else f"gain:{key}" for key in titles}
    if table == "plugin":
        return {titles[key]: f"gain:{key}" for key in (chosen, "full") if chosen}
    if table == "sweeps":
        names = {name for group in groups for name in group.numbers if "=" in name}
        pairs = [name.split("=") for name in names]
        order = sorted((quantities.SWEPT.index(s), float(v), s) for s, v in pairs)
        label = _TEXTS[table]["settings"]
        return {f"{label[s]} = {v:g}": f"{s}={v:g}" for _, v, s in order}
    lines = _TEXTS[table]["lines"].items()
    return {label: name if chosen else name.replace("selected", FDC.name) for label, name in lines}


def beside(
    groups: Sequence[Group],
    table: str,
    lines: Callable[[Sequence[Group]], Mapping[str, str]] | None = None,
    find: Find = paper.find,
) -> Table:
    """Builds a table with a column per benchmark, and rows of ours, the paper's, and differences.

    Args:
        groups: of `runs.load`.
        table: its name in `tables.json`.
        lines: returns quantities by their labels for the groups of a learner, by default `_lines`.
        find: returns the number beside ours, by default the paper's.
    """
    other = "paper" if find is paper.find else table
    names, scope = _settings(groups)
    rows: dict[tuple[str, ...], Cells] = {}
    means: dict[tuple[str, ...], Cells] = {}  # ours
    numbers = []
    for learner in dict.fromkeys(group.learner for group in groups):
        of_learner = [group for group in groups if group.learner == learner]
        for label, quantity in (lines or partial(_lines, table))(of_learner).items():
            labels = learners.title(learner), label
            for record in _records(of_learner, quantity, find):
                numbers.append(record)
                column, ours = paper.benchmark_title(record.benchmark), names[record.settings]
                means.setdefault((*labels, ours), {})[column] = record.mean
                for kind, cell in _cells(record, ours, other).items():
                    rows.setdefault((*labels, kind), {})[column] = cell
    # The user's own benchmarks come first, then the paper's.
    known, present = paper.benchmarks(), [*dict.fromkeys(group.benchmark for group in groups)]
    ordered = sorted(present, key=lambda name: known.index(name) if name in known else -1)
    columns = [*map(paper.benchmark_title, (*ordered, paper.AVERAGE))]
    made = _table(table, rows, scope, numbers, columns)
    return made._replace(best=_best(made.frame, means)) if "best" in _TEXTS[table] else made


def _records(groups: Sequence[Group], quantity: str, find: Find) -> Iterable[Row]:
    """Yields a learner's records of a quantity, and of its mean over the paper's benchmarks."""
    records = [_record(group, quantity, find) for group in groups if group.values(quantity)]
    yield from records
    for settings in dict.fromkeys(record.settings for record in records):
        means = {row.benchmark: row.mean for row in records if row.settings == settings}
        if means.keys() >= {*paper.benchmarks()}:
            learner, calibrator, kind = records[0][1:4]
            mean = float(np.mean([means[name] for name in paper.benchmarks()]))
            published = find(paper.AVERAGE, learner, quantity)
            average = Row(paper.AVERAGE, learner, calibrator, kind, mean, settings=settings)
            if published:
                gap = mean - published.mean
                average = average._replace(paper_mean=published.mean, difference=gap)
            yield average


def _cells(record: Row, ours: str, other: str) -> dict[str, str]:
    """Returns the texts of a record by the label of the row."""
    signed = record.quantity.startswith(("gain", "added", "correlation", "contribution"))
    text = formatting.mean(record.mean, record.std, signed=signed)
    if record.n not in (None, paper.NUMBERS["num_seeds"]):
        text += f" ({record.n})"
    cells = {ours: text}
    if record.paper_mean is not None:
        gap = number(record.difference, signed=True)
        ends = formatting.interval(record.difference_low, record.difference_high, 1)
        if isinstance(ends, str):
            gap += f" ({ends})"
        cells[other] = formatting.mean(record.paper_mean, record.paper_std, signed=signed)
        cells[ours.replace("ours", "difference")] = gap
    return cells


def _best(
    frame: pd.DataFrame, means: Mapping[tuple[str, ...], Cells]
) -> frozenset[tuple[int, int]]:
    """Returns (row, column) of our largest mean in every column, at the precision of the cells."""
    if frame.empty:
        return frozenset()
    ours = pd.DataFrame([*means.values()], pd.MultiIndex.from_tuples(means))
    if frame.index.nlevels < ours.index.nlevels:
        ours = ours.droplevel(-1)
    shown = ours.reindex(frame.index)[frame.columns].round(2)
    cells = np.argwhere(shown.eq(shown.max()).to_numpy())
    return frozenset((int(row), int(column)) for row, column in cells)


# Beside a reference ------------------------------------------------------------------------------


def of_reference(path: str | Path, lines: Sequence[Line], groups: Sequence[Group]) -> Table:
    """Builds the table of the lines of a file that are about one of the groups."""
    means = reference.published(lines)

    def find(benchmark: str, learner: str, quantity: str) -> Published | None:
        key = benchmark, learner, quantity
        return means[key] if key in means else None

    def quantities_of(groups: Sequence[Group]) -> dict[str, str]:
        return {line.quantity: line.quantity for line in lines if line.learner == groups[0].learner}

    built = beside(groups, "reference", quantities_of, find)
    stem = "".join(c if c.isalnum() else "_" for c in Path(path).stem.lower())
    sources = "; ".join(dict.fromkeys(line.source for line in lines if line.source))
    source = f" ({sources})" if sources else ""
    note = f"{built.note} Reference: {Path(path).name}{source}."
    numbers: Any = built.numbers
    numbers = numbers.rename(columns=lambda name: name.replace("paper", "reference"))
    return built._replace(name=f"reference_{stem}", note=note, numbers=numbers)


# Selection rule ----------------------------------------------------------------------------------

# Components of the selection rule by the key of their stand-alone result.
_PARTS = {"tsf": "TSF", "pac+rlc_pretrained_view": "E_0", "pac+rlc_adapted_view": "E_T"}


def _gains(groups: Sequence[Group], key: str) -> list[float]:
    """Returns the mean gain of a combination of components for every group."""
    return [float(np.mean(group.values(f"gain:{key}"))) for group in groups]


def selected(groups: Sequence[Group]) -> str:
    """Returns the key of the components that the groups of a learner select.

    The paper's rule ("Plug-and-Play Calibration"): a component is enabled if its stand-alone gain,
    averaged over seeds, is positive on every benchmark.
    """
    tsf, pretrained, adapted = (min(_gains(groups, key)) > 0 for key in _PARTS)
    if adapted and pretrained:
        return "full" if tsf else "pac+rlc"
    if not (adapted or pretrained):
        return "tsf" if tsf else "raw"
    view = "adapted_view" if adapted else "pretrained_view"
    return view if tsf else f"pac+rlc_{view}"


def of_selection(groups: Sequence[Group]) -> Table:
    """Builds the table of selected components and of pairs of learner and benchmark with a gain."""
    names, scope = _settings(groups)
    members: dict[tuple[str, str], list[Group]] = {}
    for group in groups:
        if all(group.values(f"gain:{key}") for key in ("selected", "full", *_PARTS)):
            members.setdefault((group.learner, names[group.title]), []).append(group)
    rows, gains = {}, []
    for (learner, title), own in members.items():
        keys = {
            "the paper's choice": "selected",
            "own choice": selected(own),
            "all components": "full",
        }
        for choice, key in keys.items():
            gains += [(learner, title, choice, gain) for gain in _gains(own, key)]
        least = {part: number(min(_gains(own, key)), signed=True) for key, part in _PARTS.items()}
        rows[learner, title] = least | {
            "own choice": paper.COMPONENT_TITLES[keys["own choice"]],
            "the paper's choice": paper.COMPONENT_TITLES[learners.selected(learner)],
        }
    gains += [("plugged", *gain[1:]) for gain in gains if gain[0] in paper.plugged()]
    if any(group.benchmark in paper.benchmarks() for group in groups):
        gains += [
            ("plugged", "paper", choice, published.mean)
            for choice, key in (("the paper's choice", "selected"), ("all components", "full"))
            for learner in paper.plugged()
            for name in paper.benchmarks()
            if (published := paper.find(name, learner, f"gain:{key}"))
        ]
    numbers: list[Cells] = []
    table: Any = pd.DataFrame(gains, columns=["learner", "settings", "choice", "gain"])
    for key, pairs in table.groupby(["learner", "settings", "choice"], sort=False)["gain"]:
        learner, title, choice = key
        positive, mean = int((pairs > 0).sum()), float(pairs.mean())
        text = f"{positive} of {len(pairs)}, {number(mean, signed=True)}"
        rows.setdefault((learner, title), {})[f"gains, {choice}"] = text
        for name, value in (("pairs with a gain", positive), ("gain", mean)):
            labels = {"learner": learner, "calibrator": choice, "quantity": name}
            numbers.append(labels | {"mean": value, "n": len(pairs), "settings": title})
    titles = {"plugged": "learners of Table plugin"}
    titled = {
        (titles.get(learner) or learners.title(learner), title): row
        for (learner, title), row in rows.items()
    }
    return _table("selection", titled, scope, numbers)
