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
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
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
    chosen = {"gain": "full", "selected": run.selected, "selected_gain": run.selected}
    combination = chosen.get(name, name.removeprefix("gain:"))
    return run.gain(combination) if "gain" in name else run.component(combination)


def read(path: str | os.PathLike[str]) -> list[Entry]:
    """Reads and checks a file.

    Raises:
        InputError: one line with the file, the line and the column of the first fault.
    """
    try:
        rows = pd.read_csv(
            path, dtype=str, encoding="utf-8-sig", engine="python", index_col=False,
            skipinitialspace=True, skip_blank_lines=False, keep_default_na=False,
        ).fillna("")  # fmt: skip
    except (OSError, ValueError, csv.Error) as error:
        raise InputError(f"{path}: unreadable ({error})".splitlines()[0]) from error
    missing = [name for name in _REQUIRED if name not in rows]
    unknown = [name for name in rows if name not in (*_REQUIRED, *_OPTIONAL)]
    if missing or unknown:
        expected = f"expected a column {missing[0]}" if missing else f"unknown column {unknown[0]}"
        raise InputError(f"{path}: line 1: {expected}, found {', '.join(rows)}")
    if rows.empty:
        raise InputError(f"{path}: expected at least one line below the header, found none")
    entries: dict[tuple[Any, ...], Entry] = {}
    for line, row in enumerate(rows.to_dict("records"), 2):
        try:
            entry = _entry({name: text.strip() for name, text in row.items()})
            alike = [each for key, each in entries.items() if key[:3] == entry[:3]]
            if entry[:4] in entries:
                raise InputError("column quantity: the same quantity, seed included, stands above")
            if any((each.seed is None) != (entry.seed is None) for each in alike):
                raise InputError(
                    "column seed: expected seeds for all values of a quantity or for none"
                )
        except InputError as error:
            raise InputError(f"{path}: line {line}: {error}") from None
        entries[entry[:4]] = entry
    return list(entries.values())


def _entry(cell: dict[str, str]) -> Entry:
    def number(column: str, expected: str, least: float, kind: type = float) -> Any:
        text = cell.get(column, "")
        try:
            value = kind(text) if text else None
            if value is None or (math.isfinite(value) and value >= least):
                return value
        except ValueError:
            pass
        raise InputError(f"column {column}: expected {expected}, found {text!r}")

    def name(column: str, titles: Mapping[str, str]) -> str:
        by_title = {title.lower(): name for name, title in titles.items()}
        return by_title.get(cell[column].lower(), cell[column])

    for column in _REQUIRED:
        if not cell[column]:
            raise InputError(f"column {column}: expected something, found nothing")
    if cell["quantity"] not in QUANTITIES:
        raise InputError(
            f"column quantity: expected one of {', '.join(QUANTITIES[:10])} or a component "
            f"combination, found {cell['quantity']!r}"
        )
    seed = number("seed", "a whole number from 0", 0, int)
    std = number("std", "a number from 0", 0)
    count = number("n", "a whole number from 1", 1, int)
    if seed is not None and (std is not None or count is not None):
        raise InputError("columns std and n: expected nothing on a line with a seed")
    if std is not None and count is None:
        raise InputError("column n: expected the number of seeds that std is of, found nothing")
    return Entry(
        name("benchmark", paper.BENCHMARK_TITLES),
        name("learner", {name: learners.title(name) for name in learners.names()}),
        cell["quantity"],
        seed,
        number("value", "a number", -math.inf),
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
    reach = float(stats.t.ppf(0.975, freedom)) * math.sqrt(sum(variances))
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
    layout, rows = Layout(groups, {}), []
    lines: dict[tuple[str, str, str], list[Entry]] = {}
    for entry in entries:
        lines.setdefault(entry[:3], []).append(entry)
    for (benchmark, learner, name), of in lines.items():
        labels = {
            "benchmark": paper.benchmark_title(benchmark),
            "learner": learners.title(learner),
            "quantity": name,
        }
        for each in [g for g in layout.of(learner) if g.benchmark == benchmark] or [None]:
            values = {run.seed: quantity(run, name) for run in each.runs} if each else {}
            ours = {seed: value for seed, value in values.items() if value is not None}
            found = compare(ours, of)
            if found.paired:  # The two sides are shown as they are compared.
                ours = {seed: ours[seed] for seed in found.paired}
            mean, std, count = _summary([e for e in of if e.seed in found.paired] or of)
            signed = "gain" in name
            deviation = "" if math.isnan(std) else f" ± {std:.2f}"
            cells = {
                "numbers": layout.ours(each.title) if each else "no run",
                "ours": spread(list(ours.values()), signed=signed),
                "reference": number(mean, signed=signed) + deviation + f" ({count})" * bool(count),
                "paired seeds": ", ".join(map(str, found.paired)) or math.nan,
                "difference": number(found.difference, signed=True),
                "source": "; ".join(dict.fromkeys(e.source for e in of if e.source)) or math.nan,
            }
            if found.low is not None and found.high is not None:
                cells["95 % interval"] = f"{found.low:+.2f} to {found.high:+.2f}"
            rows.append(labels | cells)
    note = (
        f"From {Path(path).name}. Percent and points. Difference: ours minus the reference, with "
        "its 95 % interval: over differences within seeds where the reference has two or more "
        "seeds of ours, else Welch's from the deviations over seeds of both. The reference says "
        "nothing of settings, so every group of runs of the learner on the benchmark is lined up."
        + layout.legend()
    )
    columns = ["ours", "reference", "paired seeds", "difference", "95 % interval", "source"]
    made = frame(rows, ["benchmark", "learner", "quantity", "numbers"], columns)
    return Table(name_of(path), "Comparison with a reference", made, note)
