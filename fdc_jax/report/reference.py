"""CSV files of published numbers: the paper's, and results of another code.

A file has a header and the columns of `Line` in any order (docs/report.md). Values with seeds are
paired with our runs of the same seeds.
"""

import csv
import io
import math
from pathlib import Path
from typing import Annotated

import msgspec
import pandas as pd
from msgspec import Meta

from fdc_jax.errors import InputError, did_you_mean, escaped
from fdc_jax.machine.files import open_regular
from fdc_jax.report import quantities


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


def read(path: str | Path) -> pd.DataFrame:
    """Reads a file; raises InputError with the line of the first fault.

    Returns:
        A row per line with the columns of `Line`, NaN if a cell is empty; `calibrator` and
        `quantity` instead of the name.
    """
    lines: dict[tuple[str | int | None, ...], dict[str, object]] = {}
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
                calibrator, quantity = quantities.parse(line.quantity)
                key = line.benchmark, line.learner, line.quantity, line.seed
                if key in lines:
                    raise ValueError("quantity: expected each once, seed included")
                lines[key] = msgspec.structs.asdict(line)
                lines[key] |= {"calibrator": calibrator, "quantity": quantity}
    except OSError as error:
        raise InputError(f"{path}: unreadable ({error})") from error
    except (ValueError, csv.Error) as error:
        reason = escaped(f"{error}, found {cells}" if cells else str(error))
        raise InputError(f"{path}: line {number}: {reason}") from error
    columns = [*Line.__struct_fields__, "calibrator"]
    return pd.DataFrame([*lines.values()], columns=columns).astype({"seed": float})


def check_matches(path: str | Path, lines: pd.DataFrame, known: set[tuple[str, str]]) -> None:
    """Raises InputError if no line of a file is about a known benchmark and learner."""
    listed = dict.fromkeys(zip(lines["benchmark"], lines["learner"], strict=True))
    if known.isdisjoint(listed):
        own = ", ".join(map(" ".join, sorted(known)))[:200]
        other = ", ".join(map(" ".join, listed))[:200]
        raise InputError(
            f"{path}: expected a line about one of the runs (benchmark and learner {own}), "
            f"found lines about {escaped(other)}"
        )
