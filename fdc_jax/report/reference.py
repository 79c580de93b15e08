"""Any table of numbers beside ours: another code's runs, another paper, an earlier version.

The file is a CSV with a header and these columns, in any order:

    benchmark   as in the configuration (cifar100) or as in the tables (CIFAR-100)
    learner     likewise (cumulative_lora or Cumulative-LoRA)
    quantity    raw, fdc, oracle: final accuracy in percent; selected: with the components that the
                paper selects; gain, selected_gain: over raw; routing_raw, routing_fdc: task-routing
                accuracy; aia, aia_fdc: average incremental accuracy; a component combination such
                as tsf+rlc: its accuracy; gain:tsf+rlc: its gain
    seed        optional: the training seed; empty for a mean over seeds
    value       percent or percentage points
    std         optional: sample standard deviation over seeds; without a seed alone
    n           optional: number of seeds
    source      optional: free text

Values with seeds are paired with our runs of the same seeds.
"""

import csv
import io
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scipy import stats

from fdc_jax import evaluation
from fdc_jax.calibration.components import COMPONENTS
from fdc_jax.errors import InputError
from fdc_jax.report import blocks, cells, paper
from fdc_jax.report.cells import Cell, Table
from fdc_jax.report.runs import Group, RunFolder

_REQUIRED = ("benchmark", "learner", "quantity", "value")
_OPTIONAL = ("seed", "std", "n", "source")

CONFIDENCE = 0.95

_RESULTS = {
    "raw": ("accuracy", "raw"),
    "fdc": ("accuracy", "fdc"),
    "oracle": ("accuracy", "oracle"),
    "routing_raw": ("routing_accuracy", "raw"),
    "routing_fdc": ("routing_accuracy", "fdc"),
    "aia": ("average_incremental_accuracy", "raw"),
    "aia_fdc": ("average_incremental_accuracy", "fdc"),
}

QUANTITIES = (
    *_RESULTS,
    "selected",
    "gain",
    "selected_gain",
    *(name for name in COMPONENTS if name != "raw"),
    *(f"gain:{name}" for name in COMPONENTS if name != "raw"),
)


class Entry(NamedTuple):
    """One line of the file."""

    benchmark: str
    learner: str
    quantity: str
    seed: int | None
    value: float
    std: float | None
    count: int | None
    source: str


class Reference(NamedTuple):
    """A whole file, checked."""

    path: Path
    entries: list[Entry]

    def table(self, groups: Sequence[Group]) -> Table:
        """Lines the file up with the groups."""
        return _table(self, groups)


class Comparison(NamedTuple):
    """Ours against the reference.

    Attributes:
        difference: ours minus the reference; None without runs.
        low: lower end of the interval of the difference; None where nothing tells it.
        high: upper end.
        paired: seeds that both have, where the interval is over paired differences.
    """

    difference: float | None
    low: float | None
    high: float | None
    paired: list[int]

    @property
    def outside(self) -> bool | None:
        """Whether no difference at all lies outside the interval; None without one."""
        return None if self.low is None or self.high is None else not self.low <= 0 <= self.high


def quantity(run: RunFolder, name: str) -> float | None:
    """Returns a quantity of a run under the name that it has in a file."""
    if name in _RESULTS:
        return run.value(*_RESULTS[name])
    raw = run.value("accuracy", "raw")
    combination = {"gain": "full", "selected": run.selected, "selected_gain": run.selected}
    value = run.component(combination.get(name, name.removeprefix("gain:")))
    if value is None or raw is None or not (name.endswith("gain") or name.startswith("gain:")):
        return value
    return value - raw


# Reading -----------------------------------------------------------------------------------------


def read(path: str | os.PathLike[str]) -> Reference:
    """Reads and checks a file.

    Raises:
        InputError: one line with the file, the line and the column of the first fault.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: unreadable ({error})") from error
    reader = csv.DictReader(io.StringIO(text, newline=""), skipinitialspace=True, strict=True)
    try:
        rows = [(reader.line_num, row) for row in reader]
    except csv.Error as error:
        raise InputError(f"{path}: line {reader.reader.line_num}: {error}") from error
    names = reader.fieldnames or []
    for name in _REQUIRED:
        if name not in names:
            raise InputError(
                f"{path}: line 1: expected a column {name}, found {', '.join(names) or 'nothing'}"
            )
    for name in names:
        if name not in (*_REQUIRED, *_OPTIONAL):
            expected = ", ".join((*_REQUIRED, *_OPTIONAL))
            raise InputError(f"{path}: line 1: column {name}: expected one of {expected}")
        if names.count(name) > 1:
            raise InputError(f"{path}: line 1: column {name}: named twice")
    if not rows:
        raise InputError(f"{path}: expected at least one line below the header, found none")
    entries: list[Entry] = []
    earlier: dict[tuple, int] = {}
    seeded: dict[tuple, tuple[bool, int]] = {}
    for line, row in rows:
        entry = _entry(row, f"{path}: line {line}")
        key = entry[:4]
        if key in earlier:
            raise InputError(
                f"{path}: line {line}: column quantity: {entry.quantity} of {entry.learner} on "
                f"{entry.benchmark} is already on line {earlier[key]}"
            )
        kind, first = seeded.setdefault(key[:3], (entry.seed is not None, line))
        if kind != (entry.seed is not None):
            raise InputError(
                f"{path}: line {line}: column seed: expected seeds for all values of a quantity "
                f"or for none, unlike line {first}"
            )
        earlier[key] = line
        entries.append(entry)
    return Reference(path, entries)


def _entry(row: dict[Any, Any], place: str) -> Entry:
    if None in row:
        raise InputError(f"{place}: more cells than columns")
    cell = {name: (value or "").strip() for name, value in row.items()}

    def refuse(column: str, expected: str) -> InputError:
        return InputError(f"{place}: column {column}: expected {expected}, found {cell[column]!r}")

    def number(column: str, expected: str, least: float, whole: bool = False) -> Any:
        if not cell.get(column):
            return None
        try:
            value = int(cell[column]) if whole else float(cell[column])
        except ValueError:
            raise refuse(column, expected) from None
        if not math.isfinite(value) or value < least:
            raise refuse(column, expected)
        return value

    for column in _REQUIRED:
        if not cell[column]:
            raise refuse(column, "something")
    if cell["quantity"] not in QUANTITIES:
        raise refuse("quantity", f"one of {', '.join(QUANTITIES[:10])} or a component combination")
    value = number("value", "a number", -math.inf)
    seed = number("seed", "a whole number from 0", 0, whole=True)
    std = number("std", "a number from 0", 0)
    count = number("n", "a whole number from 1", 1, whole=True)
    for column, given in (("std", std), ("n", count)):
        if seed is not None and given is not None:
            raise refuse(column, "nothing on a line with a seed")
    if std is not None and count is None:
        raise refuse("n", "the number of seeds that std is of")
    return Entry(
        _name(cell["benchmark"], paper.BENCHMARK_TITLES),
        _name(cell["learner"], paper.LEARNER_TITLES),
        cell["quantity"],
        seed,
        value,
        std,
        count,
        cell.get("source", ""),
    )


def _name(text: str, titles: dict[str, str]) -> str:
    """The name in configurations of what a table may call by its title."""
    by_title = {title.lower(): name for name, title in titles.items()}
    return by_title.get(text.lower(), text)


# Comparing ----------------------------------------------------------------------------------------


def compare(ours: dict[int, float], entries: Sequence[Entry]) -> Comparison:
    """Compares a quantity of our runs with the lines of a file about it.

    With seeds in the file and two or more in common: Student's t interval of the differences within
    seeds; with one in common its difference alone. Otherwise Welch's interval of the difference of
    two means where both sides have a deviation over two seeds or more; where one side has,
    Student's interval around its mean, with a single value of the other side taken as one more
    draw.

    Args:
        ours: values by seed.
        entries: either one line without a seed, or lines with seeds.
    """
    if not ours:
        return Comparison(None, None, None, [])
    seeded = {entry.seed: entry.value for entry in entries if entry.seed is not None}
    common = sorted(seed for seed in seeded if seed in ours)
    if len(common) > 1:
        gain = evaluation.paired_gain(
            [seeded[seed] for seed in common], [ours[seed] for seed in common], CONFIDENCE
        )
        return Comparison(gain.mean, gain.low, gain.high, common)
    if common:
        return Comparison(ours[common[0]] - seeded[common[0]], None, None, common)
    mean, std = evaluation.mean_and_std(list(ours.values()))
    other, other_std, other_count = _summary(entries)
    reach = _reach(std, len(ours), other_std, other_count)
    difference = mean - other
    if reach is None:
        return Comparison(difference, None, None, [])
    return Comparison(difference, difference - reach, difference + reach, [])


def _summary(entries: Sequence[Entry]) -> tuple[float, float, int | None]:
    """Mean, sample deviation (NaN when not known) and number of seeds of a reference."""
    if entries[0].seed is None:
        std = math.nan if entries[0].std is None else entries[0].std
        return entries[0].value, std, entries[0].count
    mean, std = evaluation.mean_and_std([entry.value for entry in entries])
    return mean, std, len(entries)


def _reach(std: float, count: int, other_std: float, other_count: int | None) -> float | None:
    quantile = 0.5 + CONFIDENCE / 2
    sides = [(std, count), (other_std, other_count or 1)]
    known = [(s, n) for s, n in sides if not math.isnan(s) and n > 1]
    if len(known) == 2:
        parts = [s**2 / n for s, n in known]
        if not sum(parts):
            return 0.0
        freedom = sum(parts) ** 2 / sum(
            part**2 / (n - 1) for part, (_, n) in zip(parts, known, strict=True)
        )
        return float(stats.t.ppf(quantile, freedom)) * math.sqrt(sum(parts))
    if not known:
        return None
    (s, n), single = known[0], (other_count or 1) if known[0] == sides[0] else count
    return float(stats.t.ppf(quantile, n - 1)) * s * math.sqrt(1 / n + 1 / single)


def _table(reference: Reference, groups: Sequence[Group]) -> Table:
    letter = blocks.letters(groups)
    lines: dict[tuple[str, str, str], list[Entry]] = {}
    for entry in reference.entries:
        lines.setdefault(entry[:3], []).append(entry)
    rows: list[list[Cell]] = []
    records: list[dict[str, Any]] = []
    for (benchmark, learner, name), entries in lines.items():
        titles = (paper.benchmark_title(benchmark), paper.learner_title(learner), name)
        of = [each for each in groups if (each.benchmark, each.learner) == (benchmark, learner)]
        signed = "gain" in name
        for index, each in enumerate(of or [None]):
            ours = {} if each is None else _by_seed(each, name)
            found = compare(ours, entries)
            if found.paired:  # The two sides are shown as they are compared.
                ours = {seed: ours[seed] for seed in found.paired}
            paired = [e for e in entries if e.seed in found.paired] or entries
            label = "ours" if each is None else blocks.own_label(each.title, letter)
            rows.append(
                [
                    *(cells.words("" if index else title) for title in titles),
                    cells.words(label),
                    cells.ours(list(ours.values()), signed=signed),
                    _shown(paired, signed),
                    cells.number(found.difference, signed=True),
                    _interval(found),
                    cells.words(_verdict(found, "" if each is None else letter.get(each.title))),
                    cells.words("; ".join(dict.fromkeys(e.source for e in entries if e.source))),
                ]
            )
            mean, std, count = _summary(paired)
            records.append(
                {
                    "benchmark": benchmark,
                    "learner": learner,
                    "quantity": name,
                    "settings": "" if each is None else each.title or blocks.PROTOCOL,
                    "mean": rows[-1][4].mean,
                    "std": rows[-1][4].std,
                    "n": len(ours),
                    "reference_mean": mean,
                    "reference_std": None if math.isnan(std) else std,
                    "reference_n": count,
                    "difference": found.difference,
                    "low": found.low,
                    "high": found.high,
                    "outside": found.outside,
                    "paired_seeds": " ".join(map(str, found.paired)),
                    "source": rows[-1][-1].text,
                }
            )
    note = (
        "Percent and points. Difference: ours minus the reference, with its 95 % interval: over "
        "differences within seeds where the reference has seeds of ours, without interval "
        "where that is one seed, else from "
        "the deviations over seeds that are known (Welch; with one deviation only, Student). "
        "Outside: the interval excludes zero. The reference says nothing of settings, so every "
        "group of runs of the learner on the benchmark is lined up, with the letter of settings "
        "that are not the paper's." + blocks.legend(groups)
    )
    columns = ["benchmark", "learner", "quantity", "numbers", "ours", "reference", "difference"]
    columns += ["95 % interval", "verdict", "source"]
    title = f"Reference {reference.path.name}"
    name = "reference_" + "".join(c if c.isalnum() else "_" for c in reference.path.stem.lower())
    return Table(name, title, note, columns, rows, 4, records)


def _by_seed(each: Group, name: str) -> dict[int, float]:
    found = {run.seed: quantity(run, name) for run in each.runs}
    return {seed: value for seed, value in found.items() if value is not None}


def _shown(entries: Sequence[Entry], signed: bool) -> Cell:
    mean, std, count = _summary(entries)
    spread = None if math.isnan(std) else std
    cell = cells.published(paper.Published(mean, spread, count or 1), signed=signed)
    return cell._replace(text=f"{cell.text} ({count})") if count else cell


def _interval(found: Comparison) -> Cell:
    if found.low is None or found.high is None:
        return cells.gap()
    return cells.words(f"{found.low:+.2f} to {found.high:+.2f}")


def _verdict(found: Comparison, letter: str | None) -> str:
    if found.difference is None:
        return "no run"
    verdicts = {None: "no interval", True: "outside", False: "inside"}
    parts = [verdicts[found.outside]]
    if found.paired:
        noun = "seed" if len(found.paired) == 1 else "seeds"
        parts.append(f"{noun} {', '.join(map(str, found.paired))} paired")
    if letter:
        parts.append(f"settings {letter}")
    return ", ".join(parts)
