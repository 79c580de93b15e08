"""Tables of our numbers beside those of a CSV file, such as the results of another code.

The file has a header and the columns of `Line` in any order (docs/report.md). Values with seeds are
paired with our runs of the same seeds.
"""

import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from fdc_jax import evaluation
from fdc_jax.errors import InputError, did_you_mean, escaped
from fdc_jax.machine.files import open_regular
from fdc_jax.report import quantities, tables
from fdc_jax.report.paper import Published
from fdc_jax.report.runs import Group
from fdc_jax.report.tables import Table


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


def check_matches(path: str | Path, lines: Sequence[Line], groups: Sequence[Group]) -> None:
    """Raises InputError if no line of a file is about one of the groups."""
    known = {(group.benchmark, group.learner) for group in groups}
    listed = dict.fromkeys((line.benchmark, line.learner) for line in lines)
    if known.isdisjoint(listed):
        own, other = (", ".join(map(" ".join, names))[:200] for names in (sorted(known), listed))
        raise InputError(
            f"{path}: expected a line about one of the runs (benchmark and learner {own}), "
            f"found lines about {escaped(other)}"
        )


def table(path: str | Path, lines: Sequence[Line], groups: Sequence[Group]) -> Table:
    """Builds the table of the lines that are about one of the groups."""

    def find(benchmark: str, learner: str, quantity: str) -> Published | None:
        key = benchmark, learner, quantity
        rows = [line for line in lines if (line.benchmark, line.learner, line.quantity) == key]
        if seeds := {line.seed: line.value for line in rows if line.seed is not None}:
            return Published(*evaluation.mean_and_std([*seeds.values()]), len(seeds), seeds)
        return Published(rows[0].value, rows[0].std, rows[0].n) if rows else None

    def quantities_of(groups: Sequence[Group]) -> dict[str, str]:
        return {line.quantity: line.quantity for line in lines if line.learner == groups[0].learner}

    built = tables.beside(groups, "reference", quantities_of, find)
    stem = "".join(c if c.isalnum() else "_" for c in Path(path).stem.lower())
    sources = "; ".join(dict.fromkeys(line.source for line in lines if line.source))
    note = f"{built.note} Reference: {Path(path).name}{f' ({sources})' * bool(sources)}."
    numbers: Any = built.numbers
    numbers = numbers.rename(columns=lambda name: name.replace("paper", "reference"))
    return built._replace(name=f"reference_{stem}", note=note, numbers=numbers)
