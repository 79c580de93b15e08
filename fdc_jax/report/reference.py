"""CSV files of published numbers: the paper's, and results of another code.

A file has a header and the columns of `Line` in any order (docs/report.md). Values with seeds are
paired with our runs of the same seeds.
"""

# The stubs of pandas take columns for arrays, scalars or series.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportReturnType=false, reportIndexIssue=false, reportOperatorIssue=false

import csv
import io
import itertools
import math
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pandas as pd
from msgspec import Meta

from fdc_jax import learners
from fdc_jax.data.benchmarks import BENCHMARKS
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


def check_matches(path: str | Path, lines: pd.DataFrame, known: set[tuple[str, str]]) -> str:
    """Returns a line about benchmarks and learners of a file without runs, or "".

    Args:
        path: the file.
        lines: its content.
        known: benchmarks and learners of the runs.

    Raises:
        InputError: no line is about one of the runs, or accuracies are fractions.
    """
    ranges = [quantities.row_of(name) for name in lines["quantity"]]
    values: Any = lines["value"][[(of.low, of.high) == (0, 100) for of in ranges]]
    if 0 < values.max() <= 1:
        raise InputError(f"{path}: expected percent, found fractions such as {values.max():g}")
    listed = dict.fromkeys(zip(lines["benchmark"], lines["learner"], strict=True))
    unknown = [pair for pair in listed if pair not in known]
    if not unknown:
        return ""
    # Names by titles, which somebody may have copied from a table.
    names = {learners.title(learner): learner for _, learner in known}
    names |= {BENCHMARKS[name].title: name for name, _ in known if name in BENCHMARKS}
    copied = dict.fromkeys(itertools.chain.from_iterable(unknown))
    hints = [f"; {title} is named {names[title]}" for title in copied if title in names]
    text = escaped(", ".join(map(" ".join, unknown))[:200]) + "".join(hints)
    if len(unknown) == len(listed):
        own = ", ".join(map(" ".join, sorted(known)))[:200]
        raise InputError(
            f"{path}: expected a line about one of the runs (benchmark and learner {own}), "
            f"found lines about {text}"
        )
    return f"{path}: no run of {text}"
