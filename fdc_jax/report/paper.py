"""The paper's numbers, from `paper.json`, and what its tables call things.

Accuracies are in percent, gains in percentage points. The paper's spread is the sample standard
deviation over three training seeds.
"""

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

BENCHMARK_TITLES = {
    "cifar100": "CIFAR-100",
    "imagenet_a": "ImageNet-A",
    "imagenet_r": "ImageNet-R",
    "cub200": "CUB-200",
    "omnibench": "OmniBenchmark",
    "imagenet_a_random80": "ImageNet-A, random 80/20",
    "imagenet_r_random80": "ImageNet-R, random 80/20",
    "cub200_random80": "CUB-200, random 80/20",
    "digits": "Digits",
}

# Keys of `fdc_jax.calibration.components.COMPONENTS`, in the order of Table current-ablation.
COMPONENT_TITLES = {
    "raw": "Raw",
    "tsf": "TSF",
    "pac": "Dual PAC",
    "rlc": "Dual RLC",
    "tsf+pac": "TSF + Dual PAC",
    "tsf+rlc": "TSF + Dual RLC",
    "pac+rlc": "Dual PAC + Dual RLC",
    "full": "Full (Dual FDC)",
    "adapted_view": "FDC (E_T calibration)",
    "pretrained_view": "FDC (E_0 calibration)",
    "pac+rlc_adapted_view": "PAC + RLC (E_T)",
    "pac+rlc_pretrained_view": "PAC + RLC (E_0)",
}


class Published(NamedTuple):
    """A number of the paper with its sample standard deviation over `count` seeds."""

    mean: float
    std: float
    count: int = 3


class PublishedGain(NamedTuple):
    """A row of Table plugin: switches (TSF, E_0, E_T), gains by benchmark, and their average."""

    switches: tuple[int, int, int]
    gains: dict[str, Published]
    average: float


@functools.cache
def numbers() -> dict[str, Any]:
    """Returns the content of `paper.json`; not to be changed."""
    return json.loads(Path(__file__).with_name("paper.json").read_text(encoding="utf-8"))


def benchmarks() -> list[str]:
    """Returns the names of the paper's benchmarks in the order of its tables."""
    return numbers()["benchmarks"]


def benchmark_title(name: str) -> str:
    """Returns how tables call a benchmark; an unknown name stays itself."""
    return BENCHMARK_TITLES.get(name, name)


def _row(table: str, *path: str) -> dict[str, Published]:
    """Returns a row by benchmark, empty where the paper has none."""
    found = numbers()["tables"][table]
    for name in path:
        found = found.get(name, {})
    return {name: Published(*pair) for name, pair in zip(benchmarks(), found, strict=bool(found))}


def accuracy(learner: str, kind: str) -> dict[str, Published]:
    """Final accuracy by benchmark (Table current-benchmark); `kind` is "raw" or "fdc".

    The latter has the components that the paper selects.
    """
    return _row("benchmark", "rows", learner, kind)


def ablation(components: str) -> dict[str, Published]:
    """Raw accuracy, or the gain of a component combination, of Cumulative-LoRA by benchmark."""
    return _row("ablation", "rows", components)


def logit_standardisation() -> dict[str, Published]:
    """Change of accuracy of Cumulative-LoRA by benchmark (Table logit_standardization)."""
    return _row("logit_standardisation", "row")


def average_incremental_accuracy(learner: str) -> dict[str, Published]:
    """Without FDC, by benchmark (Table current-aia)."""
    return _row("average_incremental_accuracy", "rows", learner)


def plugin(learner: str, kind: str) -> PublishedGain | None:
    """Gains with the selected or with all components (Table plugin), None for other learners.

    Cumulative-LoRA has no row there: all its components are on, and its gains are those of the
    full combination in Table current-ablation.

    Args:
        learner: as in configurations.
        kind: "selected" or "full".
    """
    if learner == "cumulative_lora":
        gains = ablation("full")
        return PublishedGain((1, 1, 1), gains, sum(each.mean for each in gains.values()) / 5)
    row = numbers()["tables"]["plugin"]["rows"].get(learner, {}).get(kind)
    if row is None:
        return None
    gains = _row("plugin", "rows", learner, kind, "gain")
    return PublishedGain(tuple(row["switches"]), gains, row["average"])


def columns(table: str, benchmark: str) -> dict[str, float]:
    """Returns a row without deviations by column, empty for other benchmarks.

    Args:
        table: `partitions` (Table training), `cost` (Table app-cost; Cumulative-LoRA on one A100)
            or `latency` (Table app-latency: milliseconds a batch of 64, increases in percent;
            `single_mib` and `dual_mib` are increases over `raw_mib`).
        benchmark: as in configurations.
    """
    found = numbers()["tables"][table]
    row = found["rows"].get(benchmark)
    return {} if row is None else dict(zip(found["columns"], row, strict=True))
