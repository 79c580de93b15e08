"""The paper's numbers, from `paper.json`, and what its tables call things.

Accuracies are in percent, gains in percentage points. The paper's spread is the sample standard
deviation over three training seeds.
"""

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

from fdc_jax.data.benchmarks import BENCHMARKS


class Published(NamedTuple):
    """A number of the paper with its sample standard deviation over `count` seeds."""

    mean: float
    std: float
    count: int = 3


@functools.cache
def numbers() -> dict[str, Any]:
    """Returns the content of `paper.json`; not to be changed."""
    return json.loads(Path(__file__).with_name("paper.json").read_text(encoding="utf-8"))


# Combinations of FDC's components, in the order of Table current-ablation.
COMPONENT_TITLES: dict[str, str] = numbers()["components"]


def benchmarks() -> list[str]:
    """Returns the names of the paper's benchmarks in the order of its tables."""
    return numbers()["benchmarks"]


def benchmark_title(name: str) -> str:
    """Returns how tables call a benchmark; an unknown name stays itself."""
    return BENCHMARKS[name].title if name in BENCHMARKS else name


def row(table: str, learner: str, *keys: str) -> dict[str, Published]:
    """Returns a row by benchmark, empty where the paper has none.

    Args:
        table: `benchmark`, with "raw" or "fdc", which has the components that the paper selects
            (Table current-benchmark); `ablation`, with a component combination
            (current-ablation: gains, but for "raw"); `plugin`, with "selected" or "full" and
            "gain" (plugin); `logit_standardisation`; `average_incremental_accuracy`, without FDC.
        learner: as in configurations.
        keys: what the table asks for.
    """
    found = numbers()["tables"][table]["rows"]
    for name in (learner, *keys):
        found = found.get(name, {})
    return {name: Published(*pair) for name, pair in zip(benchmarks(), found, strict=bool(found))}


def average(learner: str, kind: str) -> float | None:
    """Returns the average of a row of Table plugin, whose `kind` is "selected" or "full"."""
    return numbers()["tables"]["plugin"]["rows"].get(learner, {}).get(kind, {}).get("average")


def columns(table: str, benchmark: str) -> dict[str, float]:
    """Returns a row without deviations by column, empty for other benchmarks.

    Args:
        table: `partitions` (Table training) or `cost` (Table app-cost; Cumulative-LoRA on one
            A100).
        benchmark: as in configurations.
    """
    found = numbers()["tables"][table]
    cells = found["rows"].get(benchmark, ())
    return dict(zip(found["columns"], cells, strict=bool(cells)))
