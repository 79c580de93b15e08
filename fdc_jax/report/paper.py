"""The paper's protocol (`paper.json`) and its numbers (`paper.csv`).

`paper.csv` has the columns of `reference.Line` and every mean of the paper's tables under the names
of `quantities`: percent, points, and sample standard deviations over three training seeds. The
benchmark `average` is the mean over all five, `source` the label of a table or section.
"""

# The stubs of pandas take columns for arrays, scalars or series.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportReturnType=false, reportIndexIssue=false, reportOperatorIssue=false

import functools
import json
from pathlib import Path
from typing import Any

import pandas as pd

from fdc_jax import learners
from fdc_jax.calibration import FDC
from fdc_jax.data.benchmarks import BENCHMARKS
from fdc_jax.report import reference, rows

CSV = Path(__file__).with_name("paper.csv")
AVERAGE = "average"


# The content of `paper.json`.
NUMBERS: dict[str, Any] = json.loads(CSV.with_suffix(".json").read_text(encoding="utf-8"))
# Combinations of FDC's components, in the order of Table current-ablation.
COMPONENT_TITLES: dict[str, str] = NUMBERS["components"]


@functools.cache
def published() -> pd.DataFrame:
    """Returns the rows of `paper.csv` under the names of our numbers, for `rows.with_published`.

    FDC has all components; those that the paper selects for a learner have their own name and
    `selected`. An average that the paper does not give is that of its means of all five benchmarks.
    """
    lines = reference.read(CSV)
    learner = lines["learner"].map(learners.selected)
    of_all = lines[lines["calibrator"] == "full"].assign(calibrator=FDC.name)
    chosen = lines[lines["calibrator"] == "selected"]
    chosen = chosen.assign(calibrator=learner)
    of_fdc = chosen[chosen["calibrator"] == "full"].assign(calibrator=FDC.name)
    lines = pd.concat([of_fdc, chosen, lines, of_all]).drop_duplicates(rows.MATCH)
    five = lines[lines["benchmark"] != AVERAGE].groupby(rows.MATCH[1:])["value"]
    means = five.mean()[five.size() == len(benchmarks())].reset_index()
    lines = pd.concat([lines, means.assign(benchmark=AVERAGE)])
    return lines.drop_duplicates(rows.MATCH)


def benchmarks() -> list[str]:
    """Returns the names of the paper's benchmarks in the order of its tables."""
    return NUMBERS["benchmarks"]


def benchmark_title(name: str) -> str:
    """Returns the title of a benchmark in tables; an unknown name stays itself."""
    return BENCHMARKS[name].title if name in BENCHMARKS else {AVERAGE: "Avg."}.get(name, name)


def plugged() -> list[str]:
    """Returns the eight learners of Table plugin."""
    lines = reference.read(CSV)
    gains = lines[(lines["calibrator"] == "selected") & (lines["quantity"] == "gain")]
    return [name for name in gains["learner"].unique() if name != "cumulative_lora"]


def sizes(benchmark: str) -> dict[str, int]:
    """Returns a row of Table training by column; empty for other benchmarks."""
    table = NUMBERS["partitions"]
    cells = table["rows"].get(benchmark, ())
    return dict(zip(table["columns"], cells, strict=bool(cells)))
