"""The paper's numbers, from `paper.json`, and the names that its tables give to things.

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

LEARNER_TITLES = {
    "cumulative_lora": "Cumulative-LoRA",
    "ewc_lora": "EWC-LoRA",
    "sd_lora": "SD-LoRA",
    "splitlora": "SplitLoRA",
    "inflora": "InfLoRA",
    "inflora_ca": "InfLoRA+CA",
    "lora_subtraction": "LoRA-Subtraction",
    "loda": "LoDA",
    "rsiat": "RSIAT",
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
    """A number of the paper; `std` is None where the paper gives none."""

    mean: float
    std: float | None = None
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


def learner_title(name: str) -> str:
    """Returns how tables call a learner; an unknown name stays itself."""
    return LEARNER_TITLES.get(name, name)


def source(table: str) -> str:
    """Returns the paper's label of a table of `paper.json`."""
    return numbers()["tables"][table]["source"]


def _row(pairs: list[list[float]] | None) -> dict[str, Published]:
    if pairs is None:
        return {}
    named = zip(benchmarks(), pairs, strict=True)
    return {name: Published(mean, std) for name, (mean, std) in named}


def accuracy(learner: str, kind: str) -> dict[str, Published]:
    """Final accuracy by benchmark (Table current-benchmark).

    Args:
        learner: name as in `LEARNER_TITLES`; an unknown one has no numbers.
        kind: "raw" or "fdc", the latter with the components that the paper selects.
    """
    return _row(numbers()["tables"]["benchmark"]["rows"].get(learner, {}).get(kind))


def ablation(components: str) -> dict[str, Published]:
    """Raw accuracy, or the gain of a component combination, of Cumulative-LoRA by benchmark."""
    return _row(numbers()["tables"]["ablation"]["rows"].get(components))


def plugin(learner: str, kind: str) -> PublishedGain | None:
    """Gains with the selected or with all components (Table plugin).

    Cumulative-LoRA has no row there: all its components are on, and its gains are those of the
    full combination in Table current-ablation.

    Args:
        learner: name as in `LEARNER_TITLES`.
        kind: "selected" or "full".
    """
    if learner == "cumulative_lora":
        gains = ablation("full")
        average = sum(each.mean for each in gains.values()) / len(gains)
        return PublishedGain((1, 1, 1), gains, average)
    row = numbers()["tables"]["plugin"]["rows"].get(learner, {}).get(kind)
    if row is None:
        return None
    return PublishedGain(tuple(row["switches"]), _row(row["gain"]), row["average"])


def logit_standardisation() -> dict[str, Published]:
    """Change of accuracy of Cumulative-LoRA by benchmark (Table logit_standardization)."""
    return _row(numbers()["tables"]["logit_standardisation"]["row"])


def average_incremental_accuracy(learner: str) -> dict[str, Published]:
    """Without FDC, by benchmark (Table current-aia)."""
    return _row(numbers()["tables"]["average_incremental_accuracy"]["rows"].get(learner))


def _columns(table: str, benchmark: str) -> dict[str, float]:
    found = numbers()["tables"][table]
    row = found["rows"].get(benchmark)
    return {} if row is None else dict(zip(found["columns"], row, strict=True))


def partition(benchmark: str) -> dict[str, float]:
    """Classes, tasks, classes_per_task, train and test images (Table training)."""
    return _columns("partitions", benchmark)


def cost(benchmark: str) -> dict[str, float]:
    """Training-stage costs of Cumulative-LoRA on one A100 (Table app-cost)."""
    return _columns("cost", benchmark)


def latency(benchmark: str) -> dict[str, float]:
    """Milliseconds a batch of 64, increases in percent, and memory in MiB (Table app-latency).

    `single_mib` and `dual_mib` are increases over `raw_mib`.
    """
    return _columns("latency", benchmark)
