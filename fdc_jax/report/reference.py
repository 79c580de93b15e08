"""CSV files of published numbers: the paper's, and results of another code.

A file has a header and the columns of `Line` in any order (docs/report.md). Values with seeds are
paired with our runs of the same seeds.
"""

import csv
import io
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from fdc_jax import evaluation
from fdc_jax.errors import InputError, did_you_mean, escaped
from fdc_jax.machine.files import open_regular
from fdc_jax.report import quantities


class Published(NamedTuple):
    """A mean over `n` seeds; NaN if the deviation or the number of seeds is not given."""

    mean: float
    std: float
    n: float
    by_seed: Mapping[int, float] = {}


class Line(msgspec.Struct, forbid_unknown_fields=True):
    """A line of the CSV file, with one number."""

    benchmark: str
    learner: str
    quantity: str
    value: Annotated[float, Meta(ge=-1e12, le=1e12)]  # percent or percentage points
    seed: Annotated[int, Meta(ge=0)] | None = None  # None: a mean over seeds
    std: Annotated[float, Meta(ge=0)] = math.nan  # sample deviation over `n` seeds, of a mean
    n: Annotated[float, Meta(ge=1)] = math.nan
    source: str = ""


def read(path: str | Path) -> list[Line]:
    """Reads a file; raises InputError with the line of the first fault."""
    lines: dict[tuple[str | int | None, ...], Line] = {}
    number, cells = 1, {}
    try:
        with io.TextIOWrapper(open_regular(path), "utf-8-sig", newline="") as file:
            rows = csv.DictReader(file, restkey="more cells than columns", skipinitialspace=True)
            for name in map(str.strip, rows.fieldnames or ()):
                if name not in Line.__struct_fields__:
                    raise ValueError(did_you_mean("header", name, Line.__struct_fields__))
            for row in rows:
                number = rows.line_num
                cells = {name.strip(): str(cell or "").strip() for name, cell in row.items()}
                fields = {name: cell for name, cell in cells.items() if cell}
                line = msgspec.convert(fields, Line, strict=False)
                if not quantities.is_known(line.quantity):
                    raise ValueError(
                        "quantity: expected one such as raw, fdc, oracle, tsf+rlc, gain:fdc, "
                        "routing:fdc or aia:raw"
                    )
                key = line.benchmark, line.learner, line.quantity, line.seed
                if lines.setdefault(key, line) is not line:
                    raise ValueError("quantity: expected each once, seed included")
    except OSError as error:
        raise InputError(f"{path}: unreadable ({error})") from error
    except (ValueError, csv.Error) as error:
        reason = escaped(f"{error}, found {cells}" if cells else str(error))
        raise InputError(f"{path}: line {number}: {reason}") from error
    return [*lines.values()]


def check_matches(path: str | Path, lines: Iterable[Line], known: set[tuple[str, str]]) -> None:
    """Raises InputError if no line of a file is about a known benchmark and learner."""
    listed = dict.fromkeys((line.benchmark, line.learner) for line in lines)
    if known.isdisjoint(listed):
        own = ", ".join(map(" ".join, sorted(known)))[:200]
        other = ", ".join(map(" ".join, listed))[:200]
        raise InputError(
            f"{path}: expected a line about one of the runs (benchmark and learner {own}), "
            f"found lines about {escaped(other)}"
        )


def published(lines: Iterable[Line]) -> dict[tuple[str, str, str], Published]:
    """Returns means by benchmark, learner and quantity; of values with seeds, those over seeds."""
    same: dict[tuple[str, str, str], list[Line]] = {}
    for line in lines:
        same.setdefault((line.benchmark, line.learner, line.quantity), []).append(line)
    means = {}
    for key, (first, *others) in same.items():
        seeds = {line.seed: line.value for line in (first, *others) if line.seed is not None}
        means[key] = Published(first.value, first.std, first.n)
        if seeds:
            mean, std = evaluation.mean_and_std([*seeds.values()])
            means[key] = Published(mean, std, len(seeds), seeds)
    return means
