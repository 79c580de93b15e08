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
    n           number of seeds, where there is a std
    source      optional: free text

Values with seeds are paired with our runs of the same seeds.
"""

import csv
import io
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scipy import stats

from fdc_jax import evaluation, learners
from fdc_jax.calibration.components import COMPONENTS
from fdc_jax.errors import InputError
from fdc_jax.report import paper
from fdc_jax.report.runs import Group, RunFolder
from fdc_jax.report.tables import Layout, Table, frame, number, spread

_REQUIRED = ("benchmark", "learner", "quantity", "value")
_OPTIONAL = ("seed", "std", "n", "source")

_RESULTS = {
    "raw": ("accuracy", "raw"),
    "fdc": ("accuracy", "fdc"),
    "oracle": ("accuracy", "oracle"),
    "routing_raw": ("routing_accuracy", "raw"),
    "routing_fdc": ("routing_accuracy", "fdc"),
    "aia": ("average_incremental_accuracy", "raw"),
    "aia_fdc": ("average_incremental_accuracy", "fdc"),
}
_COMBINATIONS = [name for name in COMPONENTS if name != "raw"]
QUANTITIES = (
    *_RESULTS,
    "selected",
    "gain",
    "selected_gain",
    *_COMBINATIONS,
    *(f"gain:{name}" for name in _COMBINATIONS),
)


class Entry(NamedTuple):
    """One line of the file."""

    benchmark: str
    learner: str
    quantity: str
    seed: int | None
    value: float
    std: float | None = None
    count: int | None = None
    source: str = ""


class Comparison(NamedTuple):
    """Ours minus the reference, None without runs, with its 95 % interval where that is known.

    `paired` are the seeds that both have; the numbers are of those seeds alone where there are any.
    """

    difference: float | None
    low: float | None = None
    high: float | None = None
    paired: Sequence[int] = ()


def quantity(run: RunFolder, name: str) -> float | None:
    """Returns a quantity of a run under the name that it has in a file."""
    if name in _RESULTS:
        return run.value(*_RESULTS[name])
    combination = name.removeprefix("gain:")
    combination = {"gain": "full", "selected": run.selected, "selected_gain": run.selected}.get(
        name, combination
    )
    return run.gain(combination) if "gain" in name else run.component(combination)


def read(path: str | os.PathLike[str]) -> list[Entry]:
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
            found = ", ".join(names) or "nothing"
            raise InputError(f"{path}: line 1: expected a column {name}, found {found}")
    for name in names:
        if name not in (*_REQUIRED, *_OPTIONAL):
            expected = ", ".join((*_REQUIRED, *_OPTIONAL))
            raise InputError(f"{path}: line 1: column {name}: expected one of {expected}")
        if names.count(name) > 1:
            raise InputError(f"{path}: line 1: column {name}: named twice")
    if not rows:
        raise InputError(f"{path}: expected at least one line below the header, found none")
    entries: dict[tuple[Any, ...], Entry] = {}
    lines: dict[tuple[Any, ...], int] = {}
    seeded: dict[tuple[Any, ...], bool] = {}
    for line, row in rows:
        try:
            entry = _entry(row)
            if entry[:4] in entries:
                raise InputError(
                    f"column quantity: {entry.quantity} of {entry.learner} on {entry.benchmark} is "
                    f"already on line {lines[entry[:4]]}"
                )
            has_seed = entry.seed is not None
            if seeded.setdefault(entry[:3], has_seed) != has_seed:
                raise InputError(
                    "column seed: expected seeds for all values of a quantity or for none"
                )
        except InputError as error:
            raise InputError(f"{path}: line {line}: {error}") from None
        entries[entry[:4]], lines[entry[:4]] = entry, line
    return list(entries.values())


def _entry(row: dict[Any, Any]) -> Entry:
    if None in row:
        raise InputError("more cells than columns")
    cell = {name: (value or "").strip() for name, value in row.items()}

    def refuse(column: str, expected: str) -> InputError:
        return InputError(f"column {column}: expected {expected}, found {cell[column]!r}")

    def parse(column: str, expected: str, least: float, kind: type = float) -> Any:
        if not cell.get(column):
            return None
        try:
            value = kind(cell[column])
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
    value = parse("value", "a number", -math.inf)
    seed = parse("seed", "a whole number from 0", 0, int)
    std = parse("std", "a number from 0", 0)
    count = parse("n", "a whole number from 1", 1, int)
    for column, given in (("std", std), ("n", count)):
        if seed is not None and given is not None:
            raise refuse(column, "nothing on a line with a seed")
    if std is not None and count is None:
        raise refuse("n", "the number of seeds that std is of")

    def name(column: str, titles: Mapping[str, str]) -> str:
        by_title = {title.lower(): name for name, title in titles.items()}
        return by_title.get(cell[column].lower(), cell[column])

    return Entry(
        name("benchmark", paper.BENCHMARK_TITLES),
        name("learner", {name: learners.title(name) for name in learners.names()}),
        cell["quantity"],
        seed,
        value,
        std,
        count,
        cell.get("source", ""),
    )


def compare(ours: Mapping[int, float], entries: Sequence[Entry]) -> Comparison:
    """Compares a quantity of our runs with the lines of a file about it.

    With seeds in the file and two or more in common: Student's t interval of the differences within
    seeds; with one in common its difference alone. Otherwise Welch's interval of the difference of
    two means where both sides have a deviation over two seeds or more.

    Args:
        ours: values by seed.
        entries: either one line without a seed, or lines with seeds.
    """
    if not ours:
        return Comparison(None)
    seeded = {entry.seed: entry.value for entry in entries if entry.seed is not None}
    common = sorted(seeded.keys() & ours.keys())
    if common:
        before, after = ([of[seed] for seed in common] for of in (seeded, ours))
        gain = evaluation.paired_gain(before, after)
        ends = (None, None) if len(common) == 1 else (gain.low, gain.high)
        return Comparison(gain.mean, *ends, common)
    mean, std = evaluation.mean_and_std(list(ours.values()))
    other, other_std, other_count = _summary(entries)
    parts = [(std, len(ours)), (other_std, other_count)]
    if any(math.isnan(s) or not n or n < 2 for s, n in parts) or not std + other_std:
        return Comparison(mean - other)
    variances = [s**2 / n for s, n in parts]
    freedom = sum(variances) ** 2 / sum(
        variance**2 / (n - 1) for variance, (_, n) in zip(variances, parts, strict=True)
    )
    reach = stats.t.ppf(0.975, freedom) * math.sqrt(sum(variances))
    return Comparison(mean - other, mean - other - reach, mean - other + reach)


def _summary(entries: Sequence[Entry]) -> tuple[float, float, int]:
    """Mean, sample deviation (NaN when not known) and number of seeds (0 likewise)."""
    if entries[0].seed is None:
        std = math.nan if entries[0].std is None else entries[0].std
        return entries[0].value, std, entries[0].count or 0
    mean, std = evaluation.mean_and_std([entry.value for entry in entries])
    return mean, std, len(entries)


def name_of(path: str | os.PathLike[str]) -> str:
    """Returns the name of a file's table."""
    stem = Path(path).stem.lower()
    return "reference_" + "".join(c if c.isalnum() else "_" for c in stem)


def table(path: str | os.PathLike[str], entries: Sequence[Entry], groups: Sequence[Group]) -> Table:
    """Lines the entries of a file up with the groups."""
    layout = Layout(groups, {})
    rows, lines = [], {}
    for entry in entries:
        lines.setdefault(entry[:3], []).append(entry)
    for (benchmark, learner, name), of in lines.items():
        titles = {
            "benchmark": paper.benchmark_title(benchmark),
            "learner": learners.title(learner),
            "quantity": name,
        }
        alike = [each for each in groups if (each.benchmark, each.learner) == (benchmark, learner)]
        for each in alike or [None]:
            values = {run.seed: quantity(run, name) for run in each.runs} if each else {}
            ours = {seed: value for seed, value in values.items() if value is not None}
            found = compare(ours, of)
            if found.paired:  # The two sides are shown as they are compared.
                ours = {seed: ours[seed] for seed in found.paired}
            paired = [entry for entry in of if entry.seed in found.paired] or of
            mean, std, count = _summary(paired)
            signed = "gain" in name
            text = f"{mean:{'+' * signed}.2f}" + ("" if math.isnan(std) else f" ± {std:.2f}")
            cells = {
                "ours": spread(list(ours.values()), signed=signed),
                "reference": text + (f" ({count})" if count else ""),
                "difference": number(found.difference, signed=True),
                "verdict": _verdict(found),
                "source": "; ".join(dict.fromkeys(e.source for e in of if e.source)) or math.nan,
            }
            if found.low is not None and found.high is not None:
                cells["95 % interval"] = f"{found.low:+.2f} to {found.high:+.2f}"
            rows.append(titles | {"numbers": layout.ours(each.title if each else "")} | cells)
    note = (
        f"From {Path(path).name}. Percent and points. Difference: ours minus the reference, with "
        "its 95 % interval: over differences within seeds where the reference has two or more "
        "seeds of ours, else Welch's from the deviations over seeds of both. Outside: the interval "
        "excludes zero. The reference says nothing of settings, so every group of runs of the "
        "learner on the benchmark is lined up." + layout.legend()
    )
    columns = ["ours", "reference", "difference", "95 % interval", "verdict", "source"]
    made = frame(rows, ["benchmark", "learner", "quantity", "numbers"], columns)
    return Table(name_of(path), "Comparison with a reference", made, note)


def _verdict(found: Comparison) -> str:
    if found.difference is None:
        return "no run"
    if found.low is None or found.high is None:
        verdict = "no interval"
    else:
        verdict = "inside" if found.low <= 0 <= found.high else "outside"
    seeds = f", seed{'s' * (len(found.paired) > 1)} {', '.join(map(str, found.paired))} paired"
    return verdict + (seeds if found.paired else "")
