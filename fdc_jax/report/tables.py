"""All tables of the report, one pandas frame each: ours beside the paper's, costs, statistics."""

import math
import os
import string
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from fdc_jax import evaluation, learners
from fdc_jax.errors import InputError
from fdc_jax.evaluation import Gain
from fdc_jax.files import read_json, write_atomically
from fdc_jax.report import analysis, paper
from fdc_jax.report.analysis import Analyses
from fdc_jax.report.paper import Published
from fdc_jax.report.runs import Group, RunFolder

GAP = "–"


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
        return self.frame.astype(object).where(self.frame.notna(), GAP)

    def to_markdown(self) -> str:
        """Returns the table in GitHub's dialect under its title, with its note."""
        frame = self.shown.reset_index().astype(str).replace(r"\|", r"\\|", regex=True)
        numbers = len(frame.columns) - self.frame.index.nlevels
        align = ["left"] * self.frame.index.nlevels + ["right"] * numbers
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

    def write(self, folder: str | os.PathLike[str]) -> None:
        """Writes `<name>.csv`, `.md` and `.tex` into a folder.

        Raises:
            InputError: the disk refuses.
        """
        for suffix, text in (
            ("csv", self.frame.to_csv()),
            ("md", self.to_markdown()),
            ("tex", self.to_latex()),
        ):
            with write_atomically(Path(folder) / f"{self.name}.{suffix}") as file:
                file.write(text.encode())


def build(
    groups: Sequence[Group],
    analyses: Analyses,
    latency: Sequence[str] = (),
    whole: bool = False,
) -> list[Table]:
    """Builds the tables that these groups have a number for.

    Args:
        groups: from `runs.load`.
        analyses: by path of a run and name of the analysis.
        latency: files that `benchmarks/latency.py` wrote.
        whole: also the paper's rows and tables without a number of ours.

    Raises:
        InputError: a file of `latency` is not as expected.
    """
    layout = Layout.of(groups, analyses, whole)
    built = [
        _benchmark(layout),
        _ablation(layout),
        _plugin(layout),
        _selection(layout),
        _logit_standardisation(layout),
        _average_incremental_accuracy(layout),
        _significance(layout),
        _partitions(layout),
        _cost(layout),
        _latency(latency, whole),
        _beyond(layout),
    ]
    return [table for table in built if not table.frame.dropna(how="all").empty]


# The shape of most tables: a column per benchmark, rows of ours above the paper's -----------------


class Layout(NamedTuple):
    """What all tables of a report have in common.

    Attributes:
        groups: in the order of rows.
        analyses: by path of a run and name of the analysis.
        whole: whether the paper's rows stand without ours.
        benchmarks: columns; the user's own first, then the paper's.
        letters: of every set of settings that departs from the paper's protocol.
    """

    groups: Sequence[Group]
    analyses: Analyses
    whole: bool
    benchmarks: list[str]
    letters: dict[str, str]

    @classmethod
    def of(cls, groups: Sequence[Group], analyses: Analyses, whole: bool = False) -> "Layout":
        """Returns the layout for all groups of a report."""
        present = dict.fromkeys(each.benchmark for each in groups)
        benchmarks = [name for name in present if name not in paper.benchmarks()]
        benchmarks += [name for name in paper.benchmarks() if whole or name in present]
        titles = dict.fromkeys(each.title for each in groups if each.title)
        names = [*string.ascii_uppercase, *map(str, range(1, len(titles)))]
        return cls(groups, analyses, whole, benchmarks, dict(zip(titles, names, strict=False)))

    @property
    def learners(self) -> list[str]:
        """Learners that have rows, in the paper's order and after them others."""
        present = {each.learner for each in self.groups}
        known = [name for name in learners.names() if self.whole or name in present]
        return list(dict.fromkeys([*known, *(each.learner for each in self.groups)]))

    def ours(self, title: str) -> str:
        """Returns what rows of a setting are called."""
        return f"ours, {self.letters[title]}" if title else "ours"

    def legend(self) -> str:
        """Returns what the letters stand for, as the end of a note."""
        meanings = "; ".join(f"{letter}: {title}" for title, letter in self.letters.items())
        return f" Settings other than the paper's: {meanings}." if meanings else ""

    def labels(self, group: Group) -> tuple[str, str, str]:
        """Returns learner, benchmark and settings of a group as rows name them."""
        titles = learners.title(group.learner), paper.benchmark_title(group.benchmark)
        return (*titles, self.ours(group.title))

    def rows(
        self,
        labels: tuple[str, ...],
        learner: str,
        values: Callable[[Group], list[float]],
        published: Mapping[str, Published] | None = None,
        signed: bool = False,
    ) -> "Rows":
        """Puts one quantity of a learner, one number per seed of a group, beside the paper's."""
        groups = [each for each in self.groups if each.learner == learner]
        published, rows = published or {}, Rows()
        for title in dict.fromkeys([""] * bool(published) + [each.title for each in groups]):
            numbers = {
                each.benchmark: spread(values(each), signed=signed)
                for each in groups
                if each.title == title
            }
            rows.add((*labels, self.ours(title)), numbers, self.whole and not title)
        beside = {
            name for each in rows.cells for name, text in each.items() if isinstance(text, str)
        }
        numbers = {
            name: f"{each.mean:{'+' * signed}.2f} ± {each.std:.2f}"
            for name, each in published.items()
            if self.whole or name in beside
        }
        rows.add((*labels, "paper"), numbers)
        distances = {
            each.benchmark: f"{distance:+.1f}"
            for each in groups
            if each.follows_protocol
            and (distance := difference(values(each), published.get(each.benchmark))) is not None
        }
        rows.add((*labels, "difference, std"), distances)
        return rows

    def table(
        self, name: str, title: str, note: str, labels: Sequence[str], rows: "Rows", *extra: str
    ) -> Table:
        """Returns rows as a table; differences are explained where there are any."""
        columns = {key: paper.benchmark_title(key) for key in self.benchmarks}
        frame = rows.frame([*labels, "numbers"], columns | dict(zip(extra, extra, strict=True)))
        kinds = {each[-1] for each in rows.index}
        note = f"{note} {_OURS_NOTE}{_PAPER_NOTE * ('paper' in kinds)}."
        note += _DIFFERENCE_NOTE * ("difference, std" in kinds)
        return Table(name, title, frame, note + self.legend())


class Rows:
    """Rows of a table while it is put together; cells by column, a missing one is a gap."""

    def __init__(self) -> None:
        self.index: list[tuple[str, ...]] = []
        self.cells: list[dict[str, Any]] = []

    def add(self, labels: tuple[str, ...], cells: Mapping[str, Any], empty: bool = False) -> None:
        """Adds a row; one without a number only if it may be `empty`."""
        if empty or any(not pd.isna(cell) for cell in cells.values()):
            self.index.append(labels)
            self.cells.append(dict(cells))

    def extend(self, other: "Rows") -> None:
        """Adds all rows of others."""
        self.index += other.index
        self.cells += other.cells

    def frame(
        self, labels: Sequence[str], columns: Mapping[str, str] | Sequence[str]
    ) -> pd.DataFrame:
        """Returns the frame, with headings in place of the keys of columns."""
        index = pd.MultiIndex.from_tuples(self.index, names=labels) if self.index else None
        frame = pd.DataFrame(self.cells, index=index, columns=list(columns), dtype=object)
        return frame.rename(columns=columns) if isinstance(columns, Mapping) else frame


_OURS_NOTE = "Ours: mean ± sample standard deviation over training seeds, in brackets how many"
_PAPER_NOTE = "; the paper's are three"
_DIFFERENCE_NOTE = (
    " Differences are ours minus the paper's mean, in standard deviations of that difference, "
    "√(s²/n + s²/n) with the sample deviations s and numbers of seeds n of both; with one seed of "
    "ours the paper's s stands for ours. Only runs that follow the paper's protocol are compared."
)


def spread(values: Sequence[float], digits: int = 2, signed: bool = False) -> Any:
    """Returns mean and sample standard deviation over seeds, in brackets how many; NaN of none."""
    if not values:
        return math.nan
    mean, std = evaluation.mean_and_std(values)
    text = f"{mean:{'+' * signed}.{digits}f}"
    return (
        f"{text} ({len(values)})"
        if math.isnan(std)
        else f"{text} ± {std:.{digits}f} ({len(values)})"
    )


def number(value: float | None, digits: int = 2, signed: bool = False) -> Any:
    """Returns a single number as it reads; NaN of none."""
    return math.nan if value is None else f"{value:{'+' * signed},.{digits}f}"


def difference(values: Sequence[float], reference: Published | None) -> float | None:
    """Returns ours minus the paper's mean in standard deviations of that difference.

    The variance of the difference of two means is s²/n of the one plus s²/n of the other. With one
    seed of ours its deviation is not known; the paper's then stands for it. None where a number is
    missing or nothing varies.
    """
    if not values or reference is None:
        return None
    mean, std = evaluation.mean_and_std(values)
    std = reference.std if math.isnan(std) else std
    error = math.sqrt(std**2 / len(values) + reference.std**2 / reference.count)
    return (mean - reference.mean) / error if error > 0 else None


# Accuracies and gains -----------------------------------------------------------------------------


def _selected(group: Group) -> list[float]:
    """Final accuracy with the components that the paper selects, one number per seed."""
    return group.of_runs(lambda run: run.component(run.selected))


def _benchmark(layout: Layout) -> Table:
    """Final accuracy before and after FDC (Table current-benchmark)."""
    rows = Rows()
    for learner in layout.learners:
        title = learners.title(learner)
        raw, fdc = (paper.accuracy(learner, kind) for kind in ("raw", "fdc"))
        rows.extend(
            layout.rows((title,), learner, lambda each: each.values("accuracy", "raw"), raw)
        )
        rows.extend(layout.rows((f"{title} + FDC",), learner, _selected, fdc))
    note = "Percent of test images. FDC has the components that the paper selects for the learner."
    return layout.table("benchmark", "Final accuracy before and after FDC", note, ["method"], rows)


def _ablation(layout: Layout) -> Table:
    """Raw accuracy and gains of component and view combinations (Table current-ablation)."""
    rows = Rows()
    for learner in layout.learners:
        for key, text in paper.COMPONENT_TITLES.items():
            published = paper.ablation(key) if learner == "cumulative_lora" else None

            def values(each: Group, key: str = key) -> list[float]:
                return each.values("accuracy", "raw") if key == "raw" else each.gains(key)

            labels = (learners.title(learner), text)
            rows.extend(layout.rows(labels, learner, values, published, signed=key != "raw"))
    note = (
        "Raw: final accuracy in percent; all others: gain over Raw in points, paired within each "
        "seed. The paper has this table for Cumulative-LoRA."
    )
    title = "Components and views: Raw accuracy and gains"
    return layout.table("ablation", title, note, ["learner", "components"], rows)


def _average_incremental_accuracy(layout: Layout) -> Table:
    """Mean over tasks of the accuracy on all classes so far (Table current-aia)."""
    rows = Rows()
    for learner in layout.learners:
        title, published = learners.title(learner), paper.average_incremental_accuracy(learner)

        def raw(each: Group) -> list[float]:
            return each.of_runs(lambda run: run.incremental("raw"))

        def fdc(each: Group) -> list[float]:
            return each.of_runs(lambda run: run.incremental(run.selected))

        rows.extend(layout.rows((title,), learner, raw, published))
        rows.extend(layout.rows((f"{title} + FDC",), learner, fdc))
    note = (
        "Percent. The paper reports it without FDC; ours with FDC has the components that the "
        "paper selects for the learner and calibrates after every task."
    )
    title = "Average incremental accuracy"
    return layout.table("average_incremental_accuracy", title, note, ["method"], rows)


def _logit_standardisation(layout: Layout) -> Table:
    """What standardising each head's logits alone changes (Table logit_standardization)."""
    rows = Rows()
    for learner in layout.learners:
        published = paper.logit_standardisation() if learner == "cumulative_lora" else None

        def values(each: Group) -> list[float]:
            found = analysis.of_group(each, layout.analyses, "logit_standardisation")
            return [entry["change"] for entry in found]

        labels = (learners.title(learner),)
        rows.extend(layout.rows(labels, learner, values, published, signed=True))
    note = (
        "Change of final accuracy in points when the largest logit of each head is centred and "
        "scaled by its moments on the head's own training images. From the saved features of a run."
    )
    title = "Logit standardisation alone"
    return layout.table("logit_standardisation", title, note, ["learner"], rows)


# FDC plugged into learners, and the rule that selects components ----------------------------------

# The combination that each component alone makes, in the order of the switches TSF, E_0, E_T.
STANDALONE = {"TSF": "tsf", "E_0": "pac+rlc_pretrained_view", "E_T": "pac+rlc_adapted_view"}
COMBINATIONS = {
    (0, 0, 0): "raw",
    (1, 0, 0): "tsf",
    (0, 1, 0): "pac+rlc_pretrained_view",
    (0, 0, 1): "pac+rlc_adapted_view",
    (0, 1, 1): "pac+rlc",
    (1, 1, 0): "pretrained_view",
    (1, 0, 1): "adapted_view",
    (1, 1, 1): "full",
}
_SWITCHES = {combination: switches for switches, combination in COMBINATIONS.items()}


def _plugin(layout: Layout) -> Table:
    """Gains with the paper's selection and with everything enabled (Table plugin)."""
    rows = Rows()
    for learner in layout.learners:
        selected = paper.plugin(learner, "selected")
        switches = selected.switches if selected else (1, 1, 1)
        _add_plugin(rows, layout, learner, switches, selected)
        if switches != (1, 1, 1):
            _add_plugin(rows, layout, learner, (1, 1, 1), paper.plugin(learner, "full"))
    note = (
        "Gains over Raw in points, paired within each seed. Switches: TSF filters; E_0 and E_T "
        "calibrate with RLC and PAC in the pretrained and in the adapted view. First the "
        "components that the paper selects, then all where it leaves some out. Avg. is the mean "
        "over the paper's five benchmarks and a gap unless all are there."
    )
    title = "Plug-and-play: gains with selected and with all components"
    return layout.table("plugin", title, note, ["baseline", *STANDALONE], rows, "Avg.")


def _add_plugin(
    rows: Rows,
    layout: Layout,
    learner: str,
    switches: tuple[int, int, int],
    published: paper.PublishedGain | None,
) -> None:
    """Adds the rows of one configuration, with their mean over the five benchmarks."""

    def gains(each: Group) -> list[float]:
        return each.gains(COMBINATIONS[switches])

    labels = (learners.title(learner), *map(str, switches))
    of_paper = published.gains if published else None
    added = layout.rows(labels, learner, gains, of_paper, signed=True)
    for row, cells in zip(added.index, added.cells, strict=True):
        means = [
            sum(found) / len(found)
            for each in layout.groups
            if each.learner == learner and layout.ours(each.title) == row[-1]
            if each.benchmark in paper.benchmarks() and (found := gains(each))
        ]
        if len(means) == len(paper.benchmarks()):
            cells["Avg."] = number(sum(means) / len(means), signed=True)
        elif row[-1] == "paper" and published and len(cells) == len(paper.benchmarks()):
            cells["Avg."] = number(published.average, signed=True)
    rows.extend(added)


def select(gains: Sequence[Mapping[str, Sequence[float]]], dual: bool = True) -> str | None:
    """Applies the paper's rule ("Plug-and-Play Calibration").

    It enables TSF, and RLC with PAC in either view, where the standalone gain of the component,
    averaged over seeds, is positive on all benchmarks.

    Args:
        gains: for each benchmark, the gains of combinations over raw, one number per seed.
        dual: whether there is a pretrained view; if not, E_0 stays off.

    Returns:
        The combination; None where a standalone gain is not known.
    """
    switches = []
    for component, name in STANDALONE.items():
        if component == "E_0" and not dual:
            switches.append(0)
        elif not gains or not all(each.get(name) for each in gains):
            return None
        else:
            switches.append(int(all(sum(each[name]) > 0 for each in gains)))
    return COMBINATIONS[tuple(switches)]


def _selection(layout: Layout) -> Table:
    """The rule of the paper applied to our runs, and evaluated on images that it did not see."""
    rows = Rows()
    for learner in layout.learners:
        of = [each for each in layout.groups if each.learner == learner]
        for title in dict.fromkeys(each.title for each in of):
            alike = [each for each in of if each.title == title]
            for text, combination, gains in _choices(learner, alike, layout.analyses):
                switches = ["?"] * 3 if combination is None else _SWITCHES[combination]
                labels = (learners.title(learner), *map(str, switches), text)
                numbers = {
                    each.benchmark: spread(gains(each, combination), signed=True)
                    for each in alike
                    if combination is not None
                }
                rows.add((*labels, layout.ours(title)), numbers)
    note = (
        "Gains over Raw in points, paired within each seed. The rule enables every component whose "
        "standalone gain, averaged over seeds, is positive on all benchmarks that there are runs "
        "of at the same settings. The paper applies it to the test images on which it reports the "
        "gain; the last two lines choose on the first, third, ... test image of each class and "
        "report the gain on the others, and the other way round, from the saved features of a run."
    )
    title = "The selection rule applied to these runs"
    return layout.table("selection", title, note, ["baseline", *STANDALONE, "what"], rows)


_Gains = Callable[[Group, str], list[float]]


def _choices(
    learner: str, alike: Sequence[Group], analyses: Analyses
) -> list[tuple[str, str | None, _Gains]]:
    """Returns what is chosen how, and the gains to report, for groups of one learner."""
    dual = all(run.dual for each in alike for run in each.runs)

    def all_images(each: Group, name: str) -> list[float]:
        return each.gains(name)

    def half(which: str) -> _Gains:
        def gains(each: Group, name: str) -> list[float]:
            found = analysis.of_group(each, analyses, "selection")
            return [run[which][name] - run[which]["raw"] for run in found if name in run[which]]

        return gains

    def chosen_on(gains: _Gains) -> str | None:
        return select(
            [{name: gains(each, name) for name in STANDALONE.values()} for each in alike], dual
        )

    in_paper = paper.plugin(learner, "selected")
    first, second = half("first"), half("second")
    choices = [
        ("by the rule, on all test images", chosen_on(all_images), all_images),
        ("by the rule, on the first half", chosen_on(first), second),
        ("by the rule, on the second half", chosen_on(second), first),
    ]
    if in_paper is not None:
        chosen = COMBINATIONS[in_paper.switches]
        choices.insert(0, ("the paper's selection", chosen, all_images))
    return choices


# Statistics ---------------------------------------------------------------------------------------


def _significance(layout: Layout) -> Table:
    """Gains of full FDC with intervals and p-values: a row for all seeds of a group, and per seed.

    A group's p-value is the largest of its runs': below a level only when each seed's own p-value
    is, which bounds the chance of a false claim that every seed gains.
    """
    tests = {}
    for group in layout.groups:
        columns = {run.seed: run.predictions() for run in group.runs}
        tests[group.name] = {
            seed: [each[name] for name in ("label", "raw_label", "fdc_label")]
            for seed, each in columns.items()
            if each
        }
    p_values = {
        name: {seed: evaluation.mcnemar(*each) for seed, each in seeds.items()}
        for name, seeds in tests.items()
    }
    largest = {
        each.name: max(p_values[each.name].values())
        for each in layout.groups
        if len(p_values[each.name]) == len(each.runs)
    }
    corrected = dict(zip(largest, evaluation.holm(list(largest.values())), strict=True))
    rows = Rows()
    for group in layout.groups:
        labels, name = layout.labels(group), group.name
        gain = evaluation.paired_gain(
            group.values("accuracy", "raw"), group.values("accuracy", "fdc")
        )
        cells = _gain_cells(gain, largest.get(name))
        cells |= {"gain": spread(group.gains("full"), signed=True)}
        rows.add((*labels, f"all {len(group.runs)}"), cells | {"p, Holm": _p(corrected.get(name))})
        for seed, columns in tests[name].items():
            cells = _gain_cells(evaluation.bootstrap_gain(*columns), p_values[name][seed])
            rows.add((*labels, f"seed {seed}"), cells)
    note = (
        "Gain of FDC with all components over Raw in points. One seed: percentile bootstrap over "
        "test images, paired by image, 9,999 resamples; p of the exact two-sided McNemar test. All "
        "seeds: mean ± sample standard deviation of the gains within each seed, Student t interval "
        "(two seeds or more); p is the largest of the seeds', so that it is small only when every "
        "seed's is. Holm: corrected over all rows of this kind, the learner and benchmark pairs of "
        "this report. Intervals cover 95 %; they are not corrected." + layout.legend()
    )
    columns = ["gain", "95 % interval", "p", "p, Holm"]
    frame = rows.frame(["learner", "benchmark", "numbers", "seeds"], columns)
    return Table("significance", "Gains with intervals and p-values", frame, note)


def _gain_cells(gain: Gain, p_value: float | None) -> dict[str, Any]:
    interval = math.nan if math.isnan(gain.low) else f"{gain.low:+.2f} to {gain.high:+.2f}"
    return {"gain": number(gain.mean, signed=True), "95 % interval": interval, "p": _p(p_value)}


def _p(value: float | None) -> Any:
    return math.nan if value is None else "< 0.0001" if value < 1e-4 else f"{value:.4f}"


# Data and costs -----------------------------------------------------------------------------------

_PARTITION = {
    "classes": "classes",
    "tasks": "tasks",
    "classes_per_task": "classes a task",
    "train": "training images",
    "test": "test images",
    "same": "against the paper",
}


def _partitions(layout: Layout) -> Table:
    """Classes, tasks and images of the runs against the paper's (Table training)."""
    rows = Rows()
    for name in layout.benchmarks:
        title, published = paper.benchmark_title(name), paper.columns("partitions", name)
        parts = ("classes", "tasks", "train_images", "test_images")
        found: dict[tuple[Any, ...], str] = {}
        for each in layout.groups:
            if each.benchmark == name:
                split = each.runs[0].results.get("split")
                text = layout.ours(each.title) + (f", {split} split" if split else "")
                sizes = [each.runs[0].results.get(f"num_{part}") for part in parts]
                classes, tasks, *images = sizes
                a_task = -(-classes // tasks) if classes and tasks else None
                found.setdefault((classes, tasks, a_task, *images), text)
        for own, text in found.items():
            numbers = {key: number(value, 0) for key, value in zip(_PARTITION, own, strict=False)}
            if published:
                numbers["same"] = "equal" if own == tuple(published.values()) else "differs"
            rows.add((title, text), numbers)
        rows.add((title, "paper"), {key: number(value, 0) for key, value in published.items()})
    note = (
        "Sizes of the class-disjoint tasks and of the data sets, from the results of the runs; "
        "settings with the same numbers share a line." + layout.legend()
    )
    frame = rows.frame(["benchmark", "numbers"], _PARTITION).dropna(axis=1, how="all")
    return Table("partitions", "Data partitions", frame, note)


def _training_minutes(run: RunFolder) -> float | None:
    seconds = run.value("timing", "training_seconds")
    return None if seconds is None else seconds / 60


def _fdc_minutes(run: RunFolder) -> float | None:
    names = ("adapted_extraction_seconds", "pretrained_extraction_seconds", "fit_seconds")
    parts = [run.value("timing", name) for name in names]
    # Without the record it is not known whether the cache had them.
    if run.value("timing", "pretrained_from_cache") != 0:
        return None
    return None if None in parts else sum(filter(None, parts)) / 60


def _scaled(unit: float, *keys: str) -> Callable[[RunFolder], float | None]:
    def read(run: RunFolder) -> float | None:
        value = run.value(*keys)
        return None if value is None else value / unit

    return read


_COSTS: dict[str, tuple[str, Callable[[RunFolder], float | None]]] = {
    "training_minutes": ("training, min", _training_minutes),
    "fdc_minutes": ("FDC, min", _fdc_minutes),
    "peak_memory_gib": ("peak memory, GiB", _scaled(2**30, "peak_memory_bytes", "training")),
    "fdc_peak_memory_gib": (
        "FDC peak memory, GiB",
        _scaled(2**30, "peak_memory_bytes", "fdc_and_evaluation"),
    ),
    "storage_mib": ("FDC storage, MiB", _scaled(2**20, "fdc_storage_bytes")),
}


def _cost(layout: Layout) -> Table:
    """Time of training and of FDC's statistics, and their storage (Table app-cost)."""
    rows, shown = Rows(), set()
    for each in layout.groups:
        devices = sorted({str(run.results.get("device", "unknown")) for run in each.runs})
        numbers = {key: spread(each.of_runs(read)) for key, (_, read) in _COSTS.items()}
        rows.add((*layout.labels(each), ", ".join(devices)), numbers)
        if each.learner == "cumulative_lora":
            shown.add(each.benchmark)
    device, learner = paper.numbers()["tables"]["cost"]["device"], "cumulative_lora"
    for name in paper.benchmarks():
        if layout.whole or name in shown:
            labels = (learners.title(learner), paper.benchmark_title(name), "paper", device)
            numbers = paper.columns("cost", name)
            rows.add(labels, {key: number(value) for key, value in numbers.items()})
    note = (
        "Training: optimisation of all tasks including waiting for images, without compilation and "
        "evaluation. FDC: extraction of the training features in both views and fitting; left out "
        "are runs that found features of the pretrained encoder in the cache, or do not say. "
        "Storage: bases, prototypes, means and scalars. Peak memory is that of the device; a CPU "
        "has none. Mean ± sample standard deviation over seeds, in brackets how many; the paper "
        "measured seed 1 of Cumulative-LoRA, and devices differ, so that times are shown side by "
        "side only." + layout.legend()
    )
    columns = {key: heading for key, (heading, _) in _COSTS.items()}
    frame = rows.frame(["learner", "benchmark", "numbers", "device"], columns)
    return Table("cost", "Training-stage time and storage", frame, note)


def read_latency(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads what `benchmarks/latency.py` wrote.

    Raises:
        InputError: unreadable, or a field is missing.
    """
    found = read_json(Path(path))
    if not isinstance(found, dict) or not isinstance(found.get("views"), dict):
        raise InputError(f"{path}: expected an object with a field views, as latency.py writes it")
    for view in ("raw", *found["views"]):
        entry = found["views"].get(view)
        repeats = entry.get("milliseconds") if isinstance(entry, dict) else None
        good = view in ("raw", "single", "dual") and isinstance(repeats, list) and repeats
        if not good or not all(isinstance(each, int | float) and each > 0 for each in repeats):
            raise InputError(
                f"{path}: views.{view}.milliseconds: expected positive numbers, found {repeats!r}"
            )
    return found


_LATENCY = {
    "raw_ms": "baseline, ms",
    "single_ms": "single, ms",
    "dual_ms": "dual, ms",
    "single_increase_percent": "single, + %",
    "dual_increase_percent": "dual, + %",
    "raw_mib": "baseline, MiB",
    "single_mib": "single, + MiB",
    "dual_mib": "dual, + MiB",
}


def _latency(files: Sequence[str], whole: bool) -> Table:
    """Time and memory of a batch without FDC, with one view and with two (Table app-latency)."""
    rows, shown = Rows(), set()
    for path in files:
        found = read_latency(path)
        benchmark, views = str(found.get("benchmark") or "random weights"), found["views"]
        shown.add(benchmark)
        label = f"ours, {found.get('encoder', 'unknown encoder')}"
        names = ("batches", "warm_up_batches", "batch_size")
        batches, warm_up, size = (found.get(name) for name in names)
        if None not in (batches, warm_up, size):
            repeats = len(views["raw"]["milliseconds"])
            label += f", {repeats} × {batches} batches of {size} after {warm_up}"
        numbers: dict[str, float] = {}
        for view, entry in views.items():
            numbers[f"{view}_ms"], _ = evaluation.mean_and_std(entry["milliseconds"])
            if isinstance(memory := entry.get("peak_memory_bytes"), int | float):
                numbers[f"{view}_mib"] = memory / 2**20
            if view != "raw":
                increase = 100 * (numbers[f"{view}_ms"] / numbers["raw_ms"] - 1)
                numbers[f"{view}_increase_percent"] = increase
                if memory is not None:
                    numbers[f"{view}_mib"] -= numbers["raw_mib"]
        labels = (paper.benchmark_title(benchmark), label, str(found.get("device", "unknown")))
        rows.add(labels, {key: number(value, 1) for key, value in numbers.items()})
    device = paper.numbers()["tables"]["latency"]["device"]
    for name in paper.benchmarks():
        if whole or name in shown:
            numbers = paper.columns("latency", name)
            labels = (paper.benchmark_title(name), "paper", device)
            rows.add(labels, {key: number(value, 1) for key, value in numbers.items()})
    note = (
        "Milliseconds for a batch, image loading excluded, and increases over the baseline: the "
        "paper's is of 64 images, mean of 3 repeats of 20 batches after 10 for warming up. "
        "Memory: peak, for ours as the compiler plans it, and increases over the baseline. "
        "Single: adapted view; dual: a second forward pass for the pretrained view. The paper's "
        "are of Cumulative-LoRA on an A100 in float32; devices differ, so that they stand side by "
        "side only."
    )
    frame = rows.frame(["benchmark", "numbers", "device"], _LATENCY)
    return Table("latency", "Inference time and memory", frame, note)


# Beyond the paper ---------------------------------------------------------------------------------

_METHODS = {
    "raw": "Raw",
    "fdc": "FDC",
    "whitened": "whitened affinity",
    "whitened_classes": "whitened affinity, class by class",
}


def _beyond(layout: Layout) -> Table:
    """The whitened affinity beside FDC: accuracies, gain, storage."""
    rows = Rows()
    for group in layout.groups:
        found = analysis.of_group(group, layout.analyses, "beyond")
        for name, title in _METHODS.items():
            of_method = [(each[name], each["fdc"]) for each in found if name in each]
            cells = {
                "accuracy": spread([own["accuracy"] for own, _ in of_method]),
                "task given": spread([own["oracle"] for own, _ in of_method]),
                "storage, MiB": spread([own["storage_bytes"] / 2**20 for own, _ in of_method], 3),
                "times FDC's": spread(
                    [own["storage_bytes"] / fdc["storage_bytes"] for own, fdc in of_method]
                ),
            }
            if of_method and name != "fdc":
                pairs = [(fdc["accuracy"], own["accuracy"]) for own, fdc in of_method]
                gain = _gain_cells(evaluation.paired_gain(*zip(*pairs, strict=True)), None)
                gains = [after - before for before, after in pairs]
                cells["gain over FDC"] = spread(gains, signed=True)
                cells["95 % interval"] = gain["95 % interval"]
            rows.add((*layout.labels(group), title), cells)
    note = (
        "Nothing here is in the paper, and nothing of it is in the other tables. The whitened "
        "affinity replaces PAC's (docs/beyond.md); FDC has all components, as these variants have. "
        "Percent of test images; gains over FDC in points, paired within each seed, with Student's "
        "t interval over seeds (95 %, two seeds or more). Task given: among the classes of the "
        "true task. Storage of the statistics as the paper counts it, and how many times FDC's. "
        "Mean ± sample standard deviation over seeds, in brackets how many. From the saved "
        "features of a run." + layout.legend()
    )
    columns = ["accuracy", "gain over FDC", "95 % interval", "task given"]
    columns += ["storage, MiB", "times FDC's"]
    labels = ["learner", "benchmark", "numbers", "method"]
    frame = rows.frame(labels, columns)
    return Table("beyond", "Beyond the paper: the whitened affinity", frame, note)
