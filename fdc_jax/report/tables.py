"""Tables of the report: ours beside the paper's, calibrators, tasks, and the selection rule."""

# The stubs of pandas take columns for arrays, scalars or series.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportReturnType=false, reportIndexIssue=false, reportOperatorIssue=false

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from tabulate import tabulate

from fdc_jax import learners
from fdc_jax.calibration import FDC
from fdc_jax.machine.files import csv_text, read_json, write_text
from fdc_jax.report import analysis, formatting, paper, quantities, rows
from fdc_jax.report.formatting import number
from fdc_jax.report.runs import Group, accuracy_matrices, transfer

# Cells of a row of a table by heading.
Cells = dict[str, Any]


class Table(NamedTuple):
    """A table as text, and in long format as numbers."""

    name: str  # stem of its files
    title: str
    frame: pd.DataFrame  # labels of rows in the index; cells as text, NaN for a gap
    note: str = ""  # units and comparisons
    scope: str = ""  # departures from the paper's protocol, above the table
    numbers: pd.DataFrame | None = None  # rows of `Group.rows`
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

    def _lines(
        self, text: Callable[[str], str], bold: Callable[[str], str]
    ) -> tuple[list[str], list[list[str]]]:
        """Returns headings and rows with labels and cells as formatted texts."""
        lines = []
        for labels, cells in self.rows():
            line = [text(label) for label in labels]
            line += [bold(cell) if best else text(cell) for cell, best in cells]
            lines.append(line)
        return [text(name) for name in (*self.frame.index.names, *self.frame.columns)], lines

    def to_latex(self) -> str:
        """Returns a table environment, which needs the package booktabs."""
        names, lines = self._lines(_latex, lambda text: rf"\textbf{{{_latex(text)}}}")
        alignment = ["l" for _ in self.frame.index.names] + ["r" for _ in self.frame.columns]
        text = pd.DataFrame(lines, columns=names).to_latex(
            index=False,
            escape=False,
            caption=_latex(" ".join(filter(None, (f"{self.title}.", self.scope)))),
            label=f"tab:{self.name.replace('_', '-')}",
            column_format="".join(alignment),
        )
        text = text.replace(r"\begin{table}", "\\begin{table}\n\\centering\\small", 1)
        notes = [self.note, reading([self])] if "numbers" in self.frame.index.names else [self.note]
        return f"% {' '.join(notes)}\n{text}"

    def to_text(self) -> str:
        """Returns title, scope and cells as plain text."""
        names, lines = self._lines(str, str)
        align = ["left" for _ in self.frame.index.names] + ["right" for _ in self.frame.columns]
        text = tabulate(lines, names, disable_numparse=True, colalign=align)
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
# Tables of `of_comparison` in the order of `tables.json`.
_COMPARED = [name for name, text in _TEXTS.items() if "compared" in text]


def build(groups: Sequence[Group]) -> list[Table]:
    """Builds the tables of groups that have a number of ours."""
    ours = with_averages(groups, paper.published())
    compared = (of_comparison(groups, name, ours) for name in _COMPARED)
    built = [*compared, of_selection(groups), of_calibrators(groups)]
    return [table for table in built if len(table.frame)]


def reading(tables: Iterable[Table]) -> str:
    """Returns how to read the cells of tables of `of_comparison`."""
    headings = [(*table.frame.index.names, *table.frame.columns) for table in tables]
    return _sentences("ours", ("", *itertools.chain.from_iterable(headings)))


def _sentences(name: str, occurring: Iterable[str]) -> str:
    """Returns the sentences of a note of `tables.json` about what occurs in a table."""
    note: dict[str, str] = _TEXTS[name]["note"]
    return " ".join(text for key, text in note.items() if key in occurring)


def _table(name: str, frame: pd.DataFrame, scope: str = "", numbers: Any = None) -> Table:
    """Returns a table of `tables.json` without rows and columns that are all empty."""
    if numbers is not None:
        frame = frame.dropna(how="all")
    frame = frame.dropna(how="all", axis=1)
    if "numbers" in frame.index.names and {*frame.index.get_level_values("numbers")} == {"ours"}:
        frame = frame.droplevel("numbers")  # Nothing is compared.
    calibrators = () if numbers is None or numbers.empty else numbers["calibrator"]
    labels = itertools.chain.from_iterable(frame.index.to_frame().to_numpy())
    occurring = {"", *frame.columns, *labels, *calibrators}
    return Table(name, _TEXTS[name]["title"], frame, _sentences(name, occurring), scope, numbers)


def _pivot(cells: pd.DataFrame, labels: Sequence[str], column: str, value: str) -> pd.DataFrame:
    """Returns values by labels (row) and column, rows in the order of `cells`."""
    order = pd.MultiIndex.from_frame(cells[[*labels]].drop_duplicates())
    cells = cells.drop_duplicates([*labels, column], keep="last")
    return cells.pivot(index=[*labels], columns=column, values=value).reindex(order)


def _settings(groups: Sequence[Group]) -> tuple[dict[str, str], str]:
    """Returns row labels by the titles of groups, and the sentence about departures."""
    titles = dict.fromkeys(group.title for group in groups)
    departing = [title for title in titles if title]
    if len(titles) == 1:
        names = dict.fromkeys(titles, "ours")
        scope = "".join(departing)
    else:
        names = {"": "ours"} | {title: f"ours ({n})" for n, title in enumerate(departing, 1)}
        scope = "; ".join(f"({n}) {title}" for n, title in enumerate(departing, 1))
    return names, f"Ours depart from the paper's protocol: {scope}." if departing else ""


# Columns of the files of numbers.
_WRITTEN = ["benchmark", "learner", "calibrator", "quantity", "mean", "std", "n", "low", "high"]
_WRITTEN += ["paper_mean", "paper_std", "difference", "difference_low", "difference_high"]
_WRITTEN += ["settings"]


# Calibrators and tasks ---------------------------------------------------------------------------

# Columns of the table of calibrators by quantity.
_COLUMNS: dict[str, str] = _TEXTS["calibrators"]["quantities"]


def _shown(group: Group) -> list[str]:
    """Returns the names of a group's calibrators, untrained ones, `selected` and `oracle`."""
    names = [*dict.fromkeys([*group.methods, *analysis.UNTRAINED, "oracle"])]
    if learners.selected(group.learner) not in ("full", "") and FDC.name in names:
        names.insert(names.index(FDC.name) + 1, "selected")
    return [*filter(group.has, names)]


def of_calibrators(groups: Sequence[Group]) -> Table:
    """Builds the table of calibrators side by side; intervals are those of `Group.summary`."""
    names, scope = _settings(groups)
    listed = []
    for group in groups:
        order = pd.MultiIndex.from_product([_shown(group), [*_COLUMNS]])
        listed.append(group.rows.loc[order.intersection(group.rows.index, sort=False)])
    numbers = pd.concat(listed, ignore_index=True)
    cells = _labelled(numbers, names)
    cells["calibrator"] = cells["calibrator"].map(formatting.method_title)
    stored = cells["quantity"] == "storage"
    cells.loc[stored, ["mean", "std"]] /= 2**20
    compared = ~(numbers["calibrator"].isin(["raw", "oracle"]) & (numbers["quantity"] == "gain"))
    cells = cells[compared].assign(column=lambda of: of["quantity"].map(_COLUMNS))
    cells["text"] = [_mean(row) for row in cells.itertuples()]
    cells["interval"] = [
        formatting.interval(row.low, row.high, signed=row.quantity == "gain")
        for row in cells.itertuples()
    ]
    cells["paper"] = [_mean(row, "paper_") for row in cells.itertuples()]
    labels = ["learner", "benchmark", "numbers", "calibrator"]
    frame = _pivot(cells, labels, "column", "text")
    intervals = _pivot(cells, labels, "column", "interval").reindex(columns=["accuracy", "gain"])
    frame[["95 % interval", "interval of the gain"]] = intervals
    frame["paper"] = _pivot(cells, labels, "column", "paper")["accuracy"]
    frame = frame.reindex(columns=_TEXTS["calibrators"]["columns"])
    raw = frame.index.get_level_values("calibrator") == formatting.method_title("raw")
    frame.loc[raw, "storage, MiB"] = frame.loc[raw, "storage, MiB"].fillna(number(0.0))
    made = _table("calibrators", frame, scope, numbers[_WRITTEN])
    if len(groups) == 1:
        made = made._replace(frame=made.frame.droplevel(made.frame.index.names[:-1]))
    return made


def _labelled(rows: pd.DataFrame, names: Mapping[str, str]) -> pd.DataFrame:
    """Replaces learner and benchmark by titles, and adds the label `numbers` of ours."""
    return rows.assign(
        learner=rows["learner"].map(learners.title),
        benchmark=rows["benchmark"].map(paper.benchmark_title),
        numbers=rows["settings"].map(names),
    )


def _mean(row: Any, side: str = "") -> Any:
    """Formats the mean and the deviation of ours, or of the side `paper_`."""
    signed = quantities.row_of(row.quantity).signed
    mean, std = (getattr(row, f"{side}{name}") for name in ("mean", "std"))
    return formatting.mean(mean, std, signed=signed)


def of_tasks(group: Group) -> Table:
    """Builds the table of final accuracies by task, with forgetting and transfer below."""
    columns = {}
    for name in (*group.methods, "oracle"):
        matrices = accuracy_matrices(group, name).values()
        seeds = [{**matrix.iloc[-1], **transfer(matrix)} for matrix in matrices]
        columns[formatting.method_title(name)] = pd.DataFrame(seeds).mean(skipna=False)
    shown = pd.DataFrame(columns).rename_axis("task")
    return _table("tasks", shown.map(lambda value: number(value, 1)))


def of_matrices(groups: Sequence[Group]) -> pd.DataFrame:
    """Returns a row per group, seed, calibrator, number of learned tasks and task."""
    parts = []
    for group in groups:
        labels = {"benchmark": group.benchmark, "learner": group.learner, "settings": group.title}
        for name in (*group.methods, "oracle"):
            for seed, matrix in accuracy_matrices(group, name).items():
                cells = matrix.melt(ignore_index=False, value_name="accuracy").reset_index()
                parts.append(cells.assign(**labels, seed=seed, calibrator=name))
    return pd.concat(parts).dropna()[[*labels, "seed", "calibrator", "after", "task", "accuracy"]]


# Ours beside the paper's -------------------------------------------------------------------------


def with_averages(groups: Sequence[Group], published: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows of groups and of averages over the paper's benchmarks, compared."""
    summary = pd.concat([group.summary for group in groups])
    numbers = pd.concat([group.numbers for group in groups])
    ours = rows.with_published(summary, numbers, published)
    five = ours[ours.index.isin(paper.benchmarks(), level="benchmark")]
    by_learner = five.groupby(level=rows.KEY[1:], sort=False)["mean"]
    complete = by_learner.size() == len(paper.benchmarks())
    averages = by_learner.mean()[complete].to_frame().reindex(columns=summary.columns)
    averages = pd.concat({paper.AVERAGE: averages}, names=["benchmark"])
    averages = rows.with_published(averages, numbers[:0], published)
    return pd.concat([ours, averages]).reset_index()


def _lines(table: str, groups: Sequence[Group]) -> dict[str, str]:
    """Returns the names of quantities of a table for the groups of a learner, by their labels."""
    chosen = learners.selected(groups[0].learner)
    titles = paper.COMPONENT_TITLES
    if table == "ablation":
        return {titles[key]: key if key == "raw" else f"gain:{key}" for key in titles}
    if table == "plugin":
        return {titles[key]: f"gain:{key}" for key in (chosen, "full") if chosen}
    if table == "sweeps":
        label = _TEXTS[table]["settings"]
        names = pd.concat([group.rows["quantity"] for group in groups]).unique()
        pairs = [name.split("=") for name in names if "=" in name]
        order = sorted((quantities.SWEPT.index(s), float(v), s) for s, v in pairs)
        return {f"{label[s]} = {v:g}": f"{s}={v:g}" for _, v, s in order}
    lines = dict(_TEXTS[table]["lines"])
    if chosen not in ("full", "") and "+ FDC" in lines:
        lines[f"+ {formatting.method_title('selected')}"] = lines.pop("+ FDC")
    return {label: n if chosen else n.replace("selected", FDC.name) for label, n in lines.items()}


def of_comparison(
    groups: Sequence[Group],
    table: str,
    ours: pd.DataFrame,
    lines: Callable[[str, Sequence[Group]], Mapping[str, str]] = _lines,
) -> Table:
    """Builds a table with a column per benchmark, and rows of ours, the paper's, and differences.

    Args:
        groups: of `runs.load`.
        table: its name in `tables.json`.
        ours: rows of the groups and of averages, see `with_averages`.
        lines: returns names of quantities by their labels for the groups of a learner.
    """
    names, scope = _settings(groups)
    wanted = []
    for learner in dict.fromkeys(group.learner for group in groups):
        listed = lines(table, [group for group in groups if group.learner == learner])
        wanted += [(learner, label, *quantities.parse(name)) for label, name in listed.items()]
    columns = ["learner", "label", "calibrator", "quantity"]
    numbers = pd.DataFrame(wanted, columns=columns).merge(ours, on=["learner", *columns[2:]])
    if table in _MEASURED:
        devices = _devices(groups, table, compared=numbers["paper_mean"].notna().any())
        scope = " ".join(filter(None, (scope, devices)))
    cells = _labelled(numbers, names)
    texts = pd.DataFrame([_texts(row) for row in cells.itertuples()], columns=_KINDS)
    kinds = {
        "ours": cells["numbers"],
        "paper": "reference" if table == "reference" else "paper",
        "difference": cells["numbers"].str.replace("ours", "difference"),
    }
    parts = [cells.assign(numbers=label, text=texts[kind]) for kind, label in kinds.items()]
    parts[1:] = [part.assign(mean=math.nan) for part in parts[1:]]
    cells = pd.concat(parts).dropna(subset="text").sort_index(kind="stable")
    # The user's own benchmarks come first, then the paper's.
    known = paper.benchmarks()
    present = dict.fromkeys(group.benchmark for group in groups)
    ordered = sorted(present, key=lambda name: known.index(name) if name in known else -1)
    columns = [*dict.fromkeys(map(paper.benchmark_title, (*ordered, paper.AVERAGE)))]
    labels = ["learner", "label", "numbers"]
    frame = _pivot(cells, labels, "benchmark", "text").reindex(columns=columns)
    frame.index.names = _TEXTS[table]["labels"]
    made = _table(table, frame.rename_axis(columns=None), scope, numbers[_WRITTEN])
    if "best" not in _TEXTS[table]:
        return made
    # Bold: our largest mean in every column, at the precision of the cells.
    means = _pivot(cells, labels, "benchmark", "mean").reindex(columns=made.frame.columns).round(2)
    bold = np.argwhere(means.eq(means.max()).to_numpy())
    return made._replace(best=frozenset(map(tuple, bold.tolist())))


_MEASURED = ("cost", "latency")  # tables whose numbers are of a device


def _devices(groups: Sequence[Group], table: str, compared: bool) -> str:
    """Returns the sentence about the devices of the runs, and of the paper if it has numbers."""
    devices: list[str] = []
    for run in itertools.chain.from_iterable(group.runs for group in groups):
        devices.append(run.results.device if table == "cost" else run.read_latency().device)
    ours = ", ".join(filter(None, dict.fromkeys(devices))) or "not recorded"
    if not compared:
        return f"Device: {ours}."
    return f"Devices: ours {ours}; the paper's {paper.NUMBERS['cost_device']}."


_KINDS = ["ours", "paper", "difference"]


def _texts(row: Any) -> list[Any]:
    """Returns the texts of ours, of the paper's number and of the difference; NaN if unknown."""
    ours = _mean(row)
    if row.n not in (paper.NUMBERS["num_seeds"],) and not math.isnan(row.n):
        ours += f" ({row.n:g})"
    gap = number(row.difference, signed=True)
    ends = formatting.interval(row.difference_low, row.difference_high, 1)
    return [ours, _mean(row, "paper_"), f"{gap} ({ends})" if isinstance(ends, str) else gap]


# Beside a reference ------------------------------------------------------------------------------


def of_reference(path: str | Path, lines: pd.DataFrame, groups: Sequence[Group]) -> Table:
    """Builds the table of the lines of a file that are about one of the groups."""

    def names(_: str, groups: Sequence[Group]) -> dict[str, str]:
        of = lines[lines["learner"] == groups[0].learner]
        listed = map(quantities.column_name, of["calibrator"], of["quantity"])
        return {name: name for name in listed}

    ours = with_averages(groups, lines)
    built = of_comparison(groups, "reference", ours, names)
    stem = "".join(c if c.isalnum() else "_" for c in Path(path).stem.lower())
    sources = "; ".join(filter(None, lines["source"].unique()))
    source = f" ({sources})" if sources else ""
    note = f"{built.note} Reference: {Path(path).name}{source}."
    numbers: Any = built.numbers
    numbers = numbers.rename(columns=lambda name: name.replace("paper", "reference"))
    return built._replace(name=f"reference_{stem}", note=note, numbers=numbers)


# Selection rule ----------------------------------------------------------------------------------

# Components of the selection rule by the key of their stand-alone result.
_PARTS = {"tsf": "TSF", "pac+rlc_pretrained_view": "E_0", "pac+rlc_adapted_view": "E_T"}


def components_key(least: Mapping[str, float]) -> str:
    """Returns the key of the components that the runs of a learner select.

    The paper's rule ("Plug-and-Play Calibration"): a component is enabled if its stand-alone gain,
    averaged over seeds, is positive on every benchmark.

    Args:
        least: the least mean gain of a benchmark, by the key of the component.
    """
    tsf, pretrained, adapted = (least[key] > 0 for key in _PARTS)
    if adapted and pretrained:
        return "full" if tsf else "pac+rlc"
    if not (adapted or pretrained):
        return "tsf" if tsf else "raw"
    view = "adapted_view" if adapted else "pretrained_view"
    return view if tsf else f"pac+rlc_{view}"


def gains(groups: Sequence[Group], quantity: str = "accuracy") -> pd.DataFrame:
    """Returns gains by learner, settings, benchmark and seed (row) and combination (column).

    They are of test images, or of validation images if the quantity is `validation`.
    """
    ours = pd.concat([group.numbers for group in groups], ignore_index=True)
    ours = ours[ours["quantity"] == quantity]
    labels = ["learner", "settings", "benchmark", "seed"]
    keys = [*paper.COMPONENT_TITLES, "selected"]
    table = _pivot(ours, labels, "calibrator", "value").reindex(columns=keys)
    return table.sub(table["raw"], axis=0).dropna(subset=["selected", "full", *_PARTS])


def best_settings(groups: Sequence[Group]) -> str:
    """Returns the values of γ, η and K with the highest accuracy on validation images, or "".

    Accuracies are means over seeds, then over benchmarks; of equal ones the paper's value counts.
    """
    numbers = pd.concat([group.numbers for group in groups], ignore_index=True)
    chosen = []
    for setting, sign in (("attenuation", "γ"), ("retained_energy", "η"), ("neighbours", "K")):
        own = numbers[numbers["quantity"].str.startswith(f"validation_{setting}=")]
        # Of K, the values that all benchmarks allow.
        means = own.pivot_table("value", "benchmark", "quantity").dropna(axis=1).mean()
        by_value = {float(name.partition("=")[2]): mean for name, mean in means.items()}
        default = paper.NUMBERS["protocol"]["fields"][f"fdc.{setting}"]
        if by_value:
            best = max(by_value, key=lambda value: (by_value[value], value == default))
            chosen.append(f"{sign} {best:g}")
    return ", ".join(chosen)


def of_selection(groups: Sequence[Group]) -> Table:
    """Builds the table of selected components and of pairs of learner and benchmark with a gain."""
    names, scope = _settings(groups)
    cells: dict[tuple[str, str], Cells] = {}
    pairs = []
    held_out = gains(groups, "validation")
    grouped: Any = gains(groups).groupby(["learner", "settings"], sort=False)
    for (learner, title), by_seed in grouped:
        own = by_seed.groupby("benchmark", sort=False).mean()
        least = own.min()
        chosen = components_key(least)
        keys = {"the paper's choice": "selected", "own choice": chosen, "all components": "full"}
        row = {part: number(least[key], signed=True) for key, part in _PARTS.items()}
        row["own choice"] = paper.COMPONENT_TITLES[chosen]
        row["the paper's choice"] = paper.COMPONENT_TITLES[learners.selected(learner)]
        if (learner, title) in held_out.index.droplevel([2, 3]):
            validated = components_key(
                held_out.loc[learner, title].groupby("benchmark").mean().min()
            )
            keys["choice by validation"] = validated
            row["choice by validation"] = paper.COMPONENT_TITLES[validated]
            alike = [of for of in groups if (of.learner, of.title) == (learner, title)]
            row["settings by validation"] = best_settings(alike) or math.nan
        for choice, key in keys.items():
            labels = {"learner": learner, "settings": names[title], "choice": choice}
            pairs.append(own[key].to_frame("mean").assign(**labels))
        positive = int((by_seed["selected"] > 0).sum())
        row["pairs of benchmark and seed"] = f"{positive} of {len(by_seed)}"
        cells[learner, names[title]] = row
    of_paper = _gains_of_paper()
    if not any(group.benchmark in paper.benchmarks() for group in groups):
        of_paper = of_paper[:0]
    table = pd.concat([*pairs, of_paper], ignore_index=True)
    plugged = table[table["learner"].isin(paper.plugged())].assign(learner="plugged")
    table = pd.concat([table[table["settings"] != "paper"], plugged])
    labels = ["learner", "settings", "choice"]
    counts = table.groupby(labels, sort=False)["mean"].agg(
        positive=lambda values: (values > 0).sum(), n="size", mean="mean"
    )
    for row in counts.reset_index().itertuples():
        text = f"{row.positive} of {row.n}, {number(row.mean, signed=True)}"
        cells.setdefault((row.learner, row.settings), {})[f"gains, {row.choice}"] = text
    columns = {"choice": "calibrator", "positive": "pairs with a gain", "mean": "gain"}
    numbers = counts.reset_index().rename(columns=columns)
    labels = ["learner", "settings", "calibrator", "n"]
    numbers = numbers.melt(labels, var_name="quantity", value_name="mean", ignore_index=False)
    written = ["learner", "calibrator", "quantity", "mean", "n", "settings"]
    numbers = numbers.sort_index(kind="stable")[written]
    titles = {"plugged": "learners of Table plugin"}
    rows = [(titles.get(learner) or learners.title(learner), title) for learner, title in cells]
    index = pd.MultiIndex.from_tuples(rows, names=_TEXTS["selection"]["labels"]) if rows else None
    frame = pd.DataFrame([*cells.values()], index, dtype=object)
    return _table("selection", frame, scope, numbers)


def _gains_of_paper() -> pd.DataFrame:
    """Returns the paper's gains of the learners that FDC is plugged into."""
    known = paper.published()
    known = known[known["learner"].isin(paper.plugged()) & (known["quantity"] == "gain")]
    choices = {"selected": "the paper's choice", "full": "all components"}
    known = known.assign(choice=known["calibrator"].map(choices), settings="paper")
    known = known[known["choice"].notna() & (known["benchmark"] != paper.AVERAGE)]
    return known.rename(columns={"value": "mean"}).sort_values("choice", ascending=False)
