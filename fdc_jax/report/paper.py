"""The paper's protocol (`paper.json`) and its numbers (`paper.csv`).

`paper.csv` has the columns of `reference.Line` and every mean of the paper's tables under the names
of `quantities`: percent, points, and sample standard deviations over three training seeds. The
benchmark `average` is the mean over all five, `source` the label of a table or section.
"""

import functools
import json
import math
from pathlib import Path
from typing import Any

from fdc_jax import learners
from fdc_jax.calibration import FDC
from fdc_jax.data.benchmarks import BENCHMARKS
from fdc_jax.report import reference
from fdc_jax.report.reference import Published

CSV = Path(__file__).with_name("paper.csv")
AVERAGE = "average"


# The content of `paper.json`.
NUMBERS: dict[str, Any] = json.loads(CSV.with_suffix(".json").read_text(encoding="utf-8"))
# Combinations of FDC's components, in the order of Table current-ablation.
COMPONENT_TITLES: dict[str, str] = NUMBERS["components"]


@functools.cache
def _means() -> dict[tuple[str, str, str], Published]:
    return reference.published(reference.read(CSV))


def benchmarks() -> list[str]:
    """Returns the names of the paper's benchmarks in the order of its tables."""
    return NUMBERS["benchmarks"]


def benchmark_title(name: str) -> str:
    """Returns the title of a benchmark in tables; an unknown name stays itself."""
    return BENCHMARKS[name].title if name in BENCHMARKS else {AVERAGE: "Avg."}.get(name, name)


def find(benchmark: str, learner: str, quantity: str) -> Published | None:
    """Returns the paper's mean of a quantity, None if the paper has none.

    The components that the paper selects for a learner have the name `selected`. The average is the
    paper's, else the average of its means of all five benchmarks.
    """
    kind, colon, name = quantity.rpartition(":")
    name = "full" if name == FDC.name else name
    if name == learners.selected(learner) and kind in ("", "gain"):
        name = "selected"
    key = benchmark, learner, f"{kind}{colon}{name}"
    if key in _means():
        return _means()[key]
    if benchmark == AVERAGE:
        of_sets = [find(name, learner, quantity) for name in benchmarks()]
        means = [one.mean for one in of_sets if one]
        if len(means) == len(of_sets):
            return Published(sum(means) / len(means), math.nan, math.nan)
    return None


def plugged() -> list[str]:
    """Returns the eight learners of Table plugin."""
    rows = (learner for _, learner, quantity in _means() if quantity == "gain:selected")
    return [name for name in dict.fromkeys(rows) if name != "cumulative_lora"]


def sizes(benchmark: str) -> dict[str, int]:
    """Returns a row of Table training by column; empty for other benchmarks."""
    table = NUMBERS["partitions"]
    cells = table["rows"].get(benchmark, ())
    return dict(zip(table["columns"], cells, strict=bool(cells)))
