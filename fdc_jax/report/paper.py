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


class Plugged(NamedTuple):
    """A row of Table plugin: gains by benchmark, and their average."""

    gains: dict[str, Published]
    average: float


@functools.cache
def numbers() -> dict[str, Any]:
    """Returns the content of `paper.json`; not to be changed."""
    return json.loads(Path(__file__).with_name("paper.json").read_text(encoding="utf-8"))


# Of `fdc_jax.calibration.components.COMPONENTS`, in the order of Table current-ablation.
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


def plugin(learner: str, kind: str) -> Plugged | None:
    """Returns gains with the "selected" or the "full" components, None for other learners.

    Cumulative-LoRA has no row in Table plugin: all its components are on, and its gains are those
    of the full combination in Table current-ablation.
    """
    if learner == "cumulative_lora":
        gains = row("ablation", learner, "full")
        return Plugged(gains, sum(each.mean for each in gains.values()) / 5)
    found = numbers()["tables"]["plugin"]["rows"].get(learner, {}).get(kind)
    return found and Plugged(row("plugin", learner, kind, "gain"), found["average"])


def columns(table: str, benchmark: str) -> dict[str, float]:
    """Returns a row without deviations by column, empty for other benchmarks.

    Args:
        table: `partitions` (Table training), `cost` (Table app-cost; Cumulative-LoRA on one A100)
            or `latency` (Table app-latency: milliseconds a batch of 64, increases in percent;
            `single_mib` and `dual_mib` are increases over `raw_mib`).
        benchmark: as in configurations.
    """
    found = numbers()["tables"][table]
    cells = found["rows"].get(benchmark, ())
    return dict(zip(found["columns"], cells, strict=bool(cells)))
