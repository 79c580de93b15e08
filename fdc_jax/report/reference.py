"""Any table of numbers beside ours: another code's runs, another paper, an earlier version.

The file is a CSV with a header and these columns, in any order:

    benchmark   as in the configuration, such as cifar100
    learner     likewise, such as cumulative_lora
    quantity    a name of `fdc_jax.report.quantities`, such as raw, fdc, oracle (the task given),
                tsf+rlc, selected, gain:fdc, routing:fdc, aia:raw
    seed        optional: the training seed; empty for a mean over seeds
    value       percent or percentage points
    std         optional: sample standard deviation over seeds; without a seed alone
    n           number of seeds, where there is a std
    source      optional: free text

Values with seeds are paired with our runs of the same seeds.
"""

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fdc_jax import evaluation, learners
from fdc_jax.errors import InputError
from fdc_jax.report import formatting, paper, quantities
from fdc_jax.report.formatting import number
from fdc_jax.report.runs import Group
from fdc_jax.report.tables import Table, frame

_KEY = ["benchmark", "learner", "quantity"]
_OPTIONAL = ["seed", "std", "n", "source"]
# Columns of numbers and the least that they may be.
_LEAST = {"value": -math.inf, "seed": 0, "std": 0, "n": 1}


class Comparison(NamedTuple):
    """Ours minus the reference with its 95 % interval, NaN where that is not known.

    `paired` are the seeds that both have; the numbers are of those seeds alone where there are any.
    """

    mean: float
    low: float = math.nan
    high: float = math.nan
    paired: Sequence[int] = ()


def read(path: str | Path) -> pd.DataFrame:
    """Reads and checks a file.

    Raises:
        InputError: one line with the file, the line and the column of the first fault.
    """
    try:
        rows = pd.read_csv(
            path, dtype=str, encoding="utf-8-sig", engine="python", index_col=False,
            skipinitialspace=True, skip_blank_lines=False,
        )  # fmt: skip
    except (OSError, ValueError, csv.Error) as error:
        raise InputError(f"{path}: unreadable ({error})".splitlines()[0]) from error
    missing = [name for name in (*_KEY, "value") if name not in rows]
    unknown = [name for name in rows if name not in (*_KEY, "value", *_OPTIONAL)]
    if missing or unknown:
        expected = f"expected a column {missing[0]}" if missing else f"unknown column {unknown[0]}"
        raise InputError(f"{path}: line 1: {expected}, found {', '.join(rows)}")
    rows = rows.reindex(columns=[*_KEY, "value", *_OPTIONAL]).astype(object)
    rows = pd.DataFrame({name: rows[name].str.strip() for name in rows})

    def check(good: Any, column: str, expected: str) -> None:
        if not good.all():
            place = good.argmin()
            found = rows[column].fillna("").iloc[place]
            raise InputError(
                f"{path}: line {place + 2}: column {column}: expected {expected}, found {found!r}"
            )

    for column in (*_KEY, "value"):
        check(rows[column].notna(), column, "something")
    names = "a quantity such as raw, fdc, oracle, tsf+rlc, gain:fdc, routing:fdc or aia:raw"
    check(rows.quantity.dropna().map(quantities.is_known), "quantity", names)
    for column, least in _LEAST.items():
        values: Any = pd.to_numeric(rows[column], errors="coerce")
        good = rows[column].isna() | (np.isfinite(values) & (values >= least))
        check(good, column, "a number" + f" from {least}" * math.isfinite(least))
        rows[column] = values
    check(~rows.duplicated([*_KEY, "seed"]), "quantity", "each once, seed included")
    return rows


def compare(ours: Mapping[int, float], rows: pd.DataFrame) -> Comparison:
    """Compares a quantity of our runs, by seed, with the lines of a file about it.

    With seeds in common: Student's t interval of the differences within seeds. Otherwise Welch's
    interval of the difference of two means if both sides have a deviation.
    """
    seeded = dict(zip(rows.seed, rows.value, strict=True))
    common = sorted(seeded.keys() & ours.keys())
    if common:
        before, after = ([of[seed] for seed in common] for of in (seeded, ours))
        gain = evaluation.paired_gain(before, after)
        return Comparison(gain.mean, gain.low, gain.high, common)
    gain = evaluation.welch([*ours.values()], *_summary(rows))
    return Comparison(gain.mean, gain.low, gain.high)


def _summary(rows: pd.DataFrame) -> tuple[float, float, float]:
    """Mean, sample deviation and number of seeds, NaN where not known."""
    if rows.seed.notna().any():
        return float(rows.value.mean()), float(rows.value.std()), len(rows)
    first = rows.iloc[0]
    return first["value"], first["std"], first["n"]


def name_of(path: str | Path) -> str:
    """Returns the name of a file's table."""
    stem = Path(path).stem.lower()
    return "reference_" + "".join(c if c.isalnum() else "_" for c in stem)


def check_matches(path: str | Path, lines: pd.DataFrame, groups: Sequence[Group]) -> None:
    """Raises InputError unless a file has a line about one of the groups."""
    known = {(group.benchmark, group.learner) for group in groups}
    given = dict.fromkeys(zip(lines.benchmark, lines.learner, strict=True))
    if known.isdisjoint(given):
        found, expected = (", ".join(map(" ".join, of))[:200] for of in (given, sorted(known)))
        raise InputError(
            f"{path}: expected a line about one of the runs (benchmark and learner {expected}), "
            f"found lines about {found}"
        )


def table(path: str | Path, lines: pd.DataFrame, groups: Sequence[Group]) -> Table:
    """Lines a file up with the groups."""
    rows, numbers = [], []
    by_quantity: Any = lines.groupby(_KEY, sort=False)
    for (benchmark, learner, name), of in by_quantity:
        labels = (paper.benchmark_title(benchmark), learners.title(learner), name)
        place, signed = (learner, benchmark), name.startswith("gain:")
        for each in [g for g in groups if (g.learner, g.benchmark) == place] or [None]:
            own = each.numbers[name].dropna().to_dict() if each and name in each.numbers else {}
            found = compare(own, of) if own else Comparison(math.nan)
            if found.paired:  # The two sides are shown as they are compared.
                own = {seed: own[seed] for seed in found.paired}
            other = _summary(of[of.seed.isin(found.paired)] if found.paired else of)
            count, values = len(own), [*own.values()]
            mean, std = evaluation.mean_and_std(values) if own else (math.nan, math.nan)
            cells = {
                "numbers": (each.title or "ours") if each else "no run",
                "ours": formatting.mean(mean, std, count, signed=signed) if own else math.nan,
                "reference": formatting.mean(*other, signed=signed),
                "paired seeds": ", ".join(map(str, found.paired)) or math.nan,
                "difference": number(found.mean if own else None, signed=True),
                "95 % interval": formatting.interval(found),
                "source": "; ".join(of.source.dropna().unique()) or math.nan,
            }
            rows.append(dict(zip(_KEY, labels, strict=True)) | cells)
            numbers.append(
                {**dict(zip(_KEY, (benchmark, learner, name), strict=True))}
                | {"mean": mean, "std": std, "n": count}
                | {
                    f"reference_{key}": v
                    for key, v in zip(("mean", "std", "n"), other, strict=True)
                }
                | {"difference": found.mean, "low": found.low, "high": found.high}
                | {"settings": each.title if each else "no run"}
            )
    note = (
        f"From {Path(path).name}. Percent and points. Difference: ours minus the reference, with "
        "its 95 % interval: over differences within seeds where the reference has two or more "
        "seeds of ours, else Welch's from the deviations over seeds of both. The reference says "
        "nothing of settings, so every group of runs of the learner on the benchmark is lined up."
    )
    columns = ["ours", "reference", "paired seeds", "difference", "95 % interval", "source"]
    made = frame(rows, [*_KEY, "numbers"], columns)
    title = "Comparison with a reference"
    return Table(name_of(path), title, made, note, numbers=pd.DataFrame(numbers))
