"""All tables of the report, one pandas frame each: ours beside the paper's, calibrators, costs."""

import functools
import math
import string
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from fdc_jax import evaluation, learners
from fdc_jax.machine.files import read_json, write_text
from fdc_jax.report import paper, quantities, words
from fdc_jax.report.paper import Published
from fdc_jax.report.runs import Group
from fdc_jax.report.words import number

# A row of a table by heading: labels and cells.
Row = dict[str, Any]


class Table(NamedTuple):
    """A table.

    Attributes:
        name: stem of its files.
        title: what it shows.
        frame: one row per line, what a row is in the index; cells as they read, NaN for a gap.
        note: how to read it: units, what is compared with what.
    """

    name: str
    title: str
    frame: pd.DataFrame
    note: str = ""

    @property
    def shown(self) -> pd.DataFrame:
        """The frame with a dash in every gap."""
        return self.frame.astype(object).where(self.frame.notna(), "–")

    def to_markdown(self) -> str:
        """Returns the table in GitHub's dialect under its title, with its note."""
        frame = self.shown.reset_index().replace(r"\|", r"\\|", regex=True)
        labels = self.frame.index.nlevels
        align = ["left"] * labels + ["right"] * (len(frame.columns) - labels)
        body = frame.to_markdown(index=False, disable_numparse=True, colalign=align)
        return f"**{self.title}**\n\n{body}\n\n{self.note}\n"

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
        """Writes `<name>.csv`, `.md` and `.tex` into a folder."""
        texts = {"csv": words.csv(self.frame.reset_index())}
        texts |= {"md": self.to_markdown(), "tex": self.to_latex()}
        for suffix, text in texts.items():
            write_text(folder / f"{self.name}.{suffix}", text)


def build(groups: Sequence[Group]) -> list[Table]:
    """Builds the tables of groups that compare something: those of at least two rows."""
    layout = Layout(groups)
    built = [
        _made("calibrators", layout, _calibrators(layout)),
        *(_beside(layout, name) for name in _BESIDE),
        _made("partitions", layout, _partitions(layout)),
        _made("cost", layout, _cost(layout)),
    ]
    return [table for table in built if len(table.frame) > 1]


def frame(rows: Iterable[Row], labels: Sequence[str], columns: Sequence[str]) -> pd.DataFrame:
    """Returns rows as a frame with the labels in its index; rows and columns of gaps are left out.

    A heading that is no cell's is left out, too.
    """
    made = pd.DataFrame(list(rows), columns=[*labels, *columns], dtype=object)
    return made.set_index(list(labels)).dropna(how="all").dropna(how="all", axis=1)


def spread(values: Sequence[float], digits: int = 2, signed: bool = False) -> Any:
    """Returns mean and sample standard deviation over seeds, in brackets how many; NaN of none."""
    return f"{words.spread(values, digits, signed)} ({len(values)})" if len(values) else math.nan


def difference(values: Sequence[float], published: Published) -> float | None:
    """Returns ours minus the paper's mean in standard deviations of that difference.

    The variance of the difference of two means is s²/n of the one plus s²/n of the other. With one
    seed of ours its deviation is not known; the paper's then stands for it. None where there is no
    number or nothing varies.
    """
    if not values:
        return None
    mean, std = evaluation.mean_and_std(values)
    std = published.std if math.isnan(std) else std
    error = math.sqrt(std**2 / len(values) + published.std**2 / published.count)
    return (mean - published.mean) / error if error > 0 else None


class Layout:
    """What all tables of a report have in common.

    Attributes:
        groups: in the order of rows.
        benchmarks: headings of columns by name; the user's own first, then the paper's.
        learners: that have rows, in the paper's order and after them others.
        letters: of every set of settings that departs from the paper's protocol.
    """

    def __init__(self, groups: Sequence[Group]):
        self.groups = groups
        present = dict.fromkeys(each.benchmark for each in groups)
        names = [name for name in present if name not in paper.benchmarks()]
        names += [name for name in paper.benchmarks() if name in present]
        self.benchmarks = {name: paper.benchmark_title(name) for name in names}
        self.learners = list(dict.fromkeys(each.learner for each in groups))
        titles = dict.fromkeys(each.title for each in groups if each.title)
        letters = [*string.ascii_uppercase, *map(str, range(1, len(titles)))]
        self.letters = dict(zip(titles, letters, strict=False))

    def of(self, learner: str) -> dict[str, list[Group]]:
        """Returns the groups of a learner by their title."""
        found: dict[str, list[Group]] = {}
        for each in self.groups:
            if each.learner == learner:
                found.setdefault(each.title, []).append(each)
        return found

    def ours(self, title: str) -> str:
        """Returns what rows of a setting are called."""
        return f"ours, {self.letters[title]}" if title else "ours"

    def legend(self) -> str:
        """Returns what the letters stand for, as the end of a note."""
        meanings = "; ".join(f"{letter}: {title}" for title, letter in self.letters.items())
        return f" Settings: {meanings}." if meanings else ""

    def labels(self, group: Group) -> Row:
        """Returns learner, benchmark and settings of a group as rows name them."""
        benchmark, numbers = paper.benchmark_title(group.benchmark), self.ours(group.title)
        learner = learners.title(group.learner)
        return {"learner": learner, "benchmark": benchmark, "numbers": numbers}


# Titles, headings, and how to read each table.
_TEXTS: dict[str, Any] = read_json(Path(__file__).with_name("tables.json"))


def _made(name: str, layout: Layout, rows: Iterable[Row], more: str = "") -> Table:
    """Returns a table of rows; `more` is added to its note."""
    text = _TEXTS[name]
    columns = text.get("columns") or [*layout.benchmarks.values(), "Avg."]
    note = text["note"].replace("{ours}", _TEXTS["ours"])
    made = frame(rows, text["labels"], columns)
    return Table(name, text["title"], made, note + more + layout.legend())


# Ours beside the paper's -------------------------------------------------------------------------


class Line(NamedTuple):
    """What a few rows show of a learner: a quantity of its runs beside the paper's by benchmark."""

    labels: Row
    quantity: str  # of `quantities.measured`
    published: Mapping[str, Published] = {}
    average: float | None = None  # The paper's, over its benchmarks.


# Tables current-benchmark, current-ablation, plugin, logit_standardization and current-aia.
_BESIDE = (
    *("benchmark", "ablation", "plugin", "logit_standardisation"),
    "average_incremental_accuracy",
)


def _lines(table: str, learner: str) -> list[Line]:
    """Returns what a table of `_BESIDE` shows of a learner."""
    title, row = learners.title(learner), functools.partial(paper.row, table, learner)
    before, after = {"method": title}, {"method": f"{title} + FDC"}
    if table == "benchmark":
        return [Line(before, "raw", row("raw")), Line(after, "selected", row("fdc"))]
    if table == "average_incremental_accuracy":
        return [Line(before, "aia", row()), Line(after, "aia:selected")]
    if table == "logit_standardisation":
        return [Line({"learner": title}, "gain:ls", row())]
    if table == "ablation":
        names = {key: key if key == "raw" else f"gain:{key}" for key in paper.COMPONENT_TITLES}
        labels = [{"learner": title, "components": s} for s in paper.COMPONENT_TITLES.values()]
        pairs = zip(labels, names.items(), strict=True)
        return [Line(label, name, row(key)) for label, (key, name) in pairs]
    lines, kinds = [], {"full": "full", learners.selected(learner): "selected"}
    for combination, kind in reversed(kinds.items()):
        gains, average = paper.plugin(learner, kind) or paper.Plugged({}, math.nan)
        switches = zip(SWITCHES, map(str, COMBINATIONS[combination]), strict=True)
        labels = {"baseline": title} | dict(switches)
        lines.append(Line(labels, f"gain:{combination}", gains, average))
    return lines


def _beside(layout: Layout, name: str) -> Table:
    """Returns a table of `_BESIDE`."""
    pairs = [(learner, line) for learner in layout.learners for line in _lines(name, learner)]
    rows = [row for learner, line in pairs for row in _rows(layout, learner, line)]
    kinds = set(_made(name, layout, rows).frame.index.get_level_values("numbers"))
    more = f" {_TEXTS['ours']}{'; the paper has three' * ('paper' in kinds)}."
    more += f" {_TEXTS['difference']}" * ("difference, std" in kinds)
    return _made(name, layout, rows, more)


def _rows(layout: Layout, learner: str, of: Line) -> Iterable[Row]:
    """Puts a quantity of a learner beside the paper's; averages stand under "Avg."."""
    headings, five, measured = layout.benchmarks, paper.benchmarks(), set()
    signed = of.quantity.startswith("gain")
    distances: Row = {}
    for title, groups in layout.of(learner).items():
        found = {each.benchmark: each.values(of.quantity) for each in groups}
        measured |= {name for name, values in found.items() if values}
        cells = {headings[name]: spread(values, signed=signed) for name, values in found.items()}
        if of.average is not None and all(found.get(name) for name in five):
            means = [sum(found[name]) / len(found[name]) for name in five]
            cells["Avg."] = number(sum(means) / len(five), signed=signed)
        yield of.labels | {"numbers": layout.ours(title)} | cells
        for each in groups:
            published = of.published.get(each.benchmark)
            if each.follows_protocol and published:
                distance = difference(found[each.benchmark], published)
                distances[headings[each.benchmark]] = number(distance, 1, signed=True)
    of_paper = {
        headings[name]: f"{number(each.mean, signed=signed)} ± {each.std:.2f}"
        for name, each in of.published.items()
        if name in measured
    }
    if of.average is not None and len(of_paper) == len(five):
        of_paper["Avg."] = number(of.average, signed=signed)
    yield of.labels | {"numbers": "paper"} | of_paper
    yield of.labels | {"numbers": "difference, std"} | distances


# What TSF, E_0 and E_T, switched off or on, are called.
SWITCHES = ("TSF", "E_0", "E_T")
COMBINATIONS = {
    "raw": (0, 0, 0),
    "tsf": (1, 0, 0),
    "pac+rlc_pretrained_view": (0, 1, 0),
    "pac+rlc_adapted_view": (0, 0, 1),
    "pac+rlc": (0, 1, 1),
    "pretrained_view": (1, 1, 0),
    "adapted_view": (1, 0, 1),
    "full": (1, 1, 1),
}


# Calibrators, data, costs ------------------------------------------------------------------------


def _calibrators(layout: Layout) -> Iterable[Row]:
    """All calibrators of the runs side by side."""
    for group in layout.groups:
        for line in quantities.summary(group.methods, group.values):
            gained = line.name not in ("raw", "oracle")
            yield layout.labels(group) | {
                "calibrator": line.title,
                "seeds": str(len(group.runs)),
                "accuracy": line.accuracy,
                "gain": line.gain,
                "95 % interval": words.interval(group.gain(line.name)) if gained else math.nan,
                "right task": line.routing,
                "average over tasks": line.average,
                "storage, MiB": line.storage,
            }


_COUNTED = ("classes", "tasks", "train_images", "test_images")


def _partitions(layout: Layout) -> Iterable[Row]:
    """Classes, tasks and images of the runs against the paper's (Table training)."""
    headings = _TEXTS["partitions"]["columns"]
    for name, title in layout.benchmarks.items():
        published = tuple(paper.columns("partitions", name).values())
        lines: dict[tuple[float | None, ...], str] = {}
        for each in (group for group in layout.groups if group.benchmark == name):
            classes, tasks, *images = (each.results.get(f"num_{part}") for part in _COUNTED)
            sizes = (classes, tasks, -(-classes // tasks) if classes and tasks else None, *images)
            split = f", {each.results['split']} split" if each.results.get("split") else ""
            lines.setdefault(sizes, layout.ours(each.title) + split)
        for sizes, numbers in [*lines.items(), (published, "paper")]:
            cells = dict(zip(headings, (number(size, 0) for size in sizes), strict=False))
            if published and numbers != "paper":
                cells["against the paper"] = "equal" if sizes == published else "differs"
            yield {"benchmark": title, "numbers": numbers} | cells


def _cost(layout: Layout) -> Iterable[Row]:
    """Time of training and of FDC's statistics, and their storage (Table app-cost)."""
    of_paper = paper.numbers()["tables"]["cost"]
    headings = dict(zip(of_paper["columns"], _TEXTS["cost"]["columns"], strict=True))
    for each in layout.groups:
        devices = sorted({str(run.results.get("device", "unknown")) for run in each.runs})
        cells = {heading: spread(each.values(key)) for key, heading in headings.items()}
        yield layout.labels(each) | {"device": ", ".join(devices)} | cells
    name = "cumulative_lora"
    labels = {"learner": learners.title(name), "numbers": "paper", "device": of_paper["device"]}
    shown = {each.benchmark for each in layout.groups if each.learner == name}
    for benchmark in paper.benchmarks():
        if benchmark in shown:
            published = paper.columns("cost", benchmark)
            cells = {heading: number(published[key]) for key, heading in headings.items()}
            yield labels | {"benchmark": paper.benchmark_title(benchmark)} | cells
