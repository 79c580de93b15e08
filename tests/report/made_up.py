"""Runs and analyses in the shapes that runs and analyses have, with numbers drawn at random."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from fdc_jax.machine.conversion import convert
from fdc_jax.report import paper, quantities, runs
from fdc_jax.report.runs import Group
from fdc_jax.run import records
from fdc_jax.run.configuration import PLANNED

# The configuration of a run by the paper's protocol.
PROTOCOL = {
    **paper.NUMBERS["protocol"]["fields"],
    **paper.NUMBERS["protocol"]["unstated"],
}

COMPONENTS = tuple(paper.COMPONENT_TITLES)
SWEPT = """
attenuation=0 attenuation=0.25 attenuation=0.5 attenuation=0.75 attenuation=1
retained_energy=0.5 retained_energy=0.75 retained_energy=0.95
neighbours=1 neighbours=2 neighbours=10 nearest=1 nearest=2 nearest=10
""".split()
SIMILARITIES = "adapted_residual adapted_affinity pretrained_residual pretrained_affinity".split()
METHODS = ("raw", "fdc", "gaussians")


def predictions(seed: int, num_tasks: int = 3) -> dict[str, np.ndarray]:
    """Columns of a `predictions.npz` that do not contradict each other, three classes a task."""
    rng = np.random.default_rng(seed)
    task = np.repeat(np.arange(num_tasks), 30)
    label = 3 * task + rng.integers(3, size=len(task))
    oracle = np.where(rng.random(len(task)) < 0.9, label, 3 * task + (label + 1) % 3)
    columns = {"label": label, "oracle_label": oracle, "task": task}
    for name, routed in zip(METHODS, (0.5, 0.7, 0.8), strict=True):
        other = (task + rng.integers(1, num_tasks, size=len(task))) % num_tasks
        chosen = np.where(rng.random(len(task)) < routed, task, other)
        columns[f"{name}_task"] = chosen
        columns[f"{name}_label"] = np.where(chosen == task, oracle, 3 * chosen)
    return {name: column.astype(np.int32) for name, column in columns.items()}


def results(
    benchmark: str = "cifar100",
    learner: str = "cumulative_lora",
    seed: int = 1,
    num_tasks: int = 3,
    config: dict[str, Any] | None = None,
    **changed: Any,
) -> dict[str, Any]:
    """Content of a results.json; accuracies follow from seed, benchmark and learner.

    Every task costs a point of accuracy.
    """
    rng = np.random.default_rng([seed, len(learner), len(benchmark)])
    raw = 60.0 + 5 * rng.random()
    components = {"raw": raw} | {name: raw + 5 * rng.random() for name in COMPONENTS[1:]}
    curve = []
    for task in range(num_tasks):
        lower = {name: value + num_tasks - 1 - task for name, value in components.items()}
        by_method = {"raw": lower["raw"], "fdc": lower["full"], "gaussians": lower["full"] + 1}
        accuracy = by_method | {"oracle": 95.0}
        point = {
            "accuracy": accuracy,
            "routing_accuracy": {name: value + 0.5 for name, value in by_method.items()},
            "components": lower,
        }
        by_task = {name: [value] * (task + 1) for name, value in accuracy.items()}
        curve.append({"task": task, "task_accuracy": by_task} | point)
    images = paper.sizes(benchmark) or dict.fromkeys(("train", "test"), 30 * num_tasks)
    averages = pd.DataFrame([point["accuracy"] for point in curve])[[*METHODS]].mean()
    content = {
        "benchmark": benchmark,
        "split": "official",
        "learner": learner,
        "seed": seed,
        "class_order_seed": 1993,
        "num_tasks": num_tasks,
        "num_classes": 3 * num_tasks,
        "num_train_images": images["train"],
        "num_test_images": images["test"],
        **point,
        "average_incremental_accuracy": averages.to_dict(),
        "curve": curve,
        "notes": {"gaussians": "class Gaussians with drift compensation"},
        "storage_bytes": {"raw": 0, "fdc": 3 * 2**20, "gaussians": 6 * 2**20},
        "fdc_storage_bytes": 3 * 2**20,
        "timing": {
            "training_seconds": 600.0 + seed,
            "adapted_extraction_seconds": 60.0,
            "pretrained_extraction_seconds": 30.0,
            "pretrained_from_cache": float(seed > 1),
            "fit_seconds": {"fdc": 6.0, "gaussians": 60.0},
        },
        "peak_memory_bytes": {"training": 2**32, "fdc": 2**28},
        "encoder": {
            "variant": "B/16",
            "weights": paper.NUMBERS["protocol"]["weights"][0],
            "sha256": "ab" * 32,
            "input_range": "pilot01",
        },
        "data": {"train_sha256": "cd" * 32, "test_sha256": "ef" * 32},
        "device": "1 x cpu",
        "config": PROTOCOL | {"learner.name": learner, "seed": [seed]} | (config or {}),
        "versions": {"commit": "0123abcd", "jax": "0.10.2"},
    }
    return content | changed


def write_run(folder, content=None, columns=None, **arguments):
    """Writes a run folder with a `results.json`, by default that of `results(**arguments)`."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = {"benchmark": "digits", "learner.name": "loda", "weights sha256": "ab" * 32}
    fields[PLANNED] = [3]
    (folder / "config.json").write_text(json.dumps(fields))
    (folder / "results.json").write_text(json.dumps(content or results(**arguments)))
    if columns is not None:
        np.savez(folder / "predictions.npz", **columns)


class MadeUpRun:
    """A run as `fdc_jax.open_run` returns it, without files."""

    def __init__(self, folder: Path, content: dict[str, Any]):
        self.folder, self.results = folder, convert(content, records.Results)
        self.features_folder = folder / "features"  # missing
        self.predictions_file = Path(__file__)  # one that exists
        self.predictions = predictions(self.results.seed, self.results.num_tasks)
        self.class_names = ()

    def read_latency(self):
        """Of a run whose inference was not timed."""
        return records.Latency()


def run(
    seed: int = 1,
    benchmark: str = "cifar100",
    learner: str = "cumulative_lora",
    num_tasks: int = 4,
    **config: Any,
) -> MadeUpRun:
    """A finished run; `config` has the fields that differ from the paper's protocol."""
    content = results(benchmark, learner, seed, num_tasks, config)
    return MadeUpRun(Path(f"runs/{benchmark}_{learner}/seed_{seed}"), content)


def groups(*members: MadeUpRun) -> list[Group]:
    """Groups of runs, by default of three seeds by the paper's protocol."""
    return runs.group(members or [run(seed) for seed in (1, 2, 3)])


def analysed(*members: MadeUpRun) -> list[Group]:
    """Groups of runs with every analysis."""
    analysed_groups = []
    for group in groups(*members):
        rng = np.random.default_rng(len(group.runs))
        swept = {name: 70 + rng.normal(size=len(group.runs)) for name in SWEPT}
        of_runs = [_analyses(run) for run in group.runs]
        analyses = {name: [of[name] for of in of_runs] for name in of_runs[0]}
        group = dataclasses.replace(with_numbers(group, swept), analyses=analyses)
        analysed_groups.append(group)
    return analysed_groups


def with_numbers(group: Group, values: Mapping[str, Sequence[float]]) -> Group:
    """A group with other values of quantities, one per seed."""
    labels = {"benchmark": group.benchmark, "learner": group.learner, "settings": group.title}
    tables = [group.numbers]
    for name, by_seed in values.items():
        labels["calibrator"], labels["quantity"] = quantities.parse(name)
        tables.append(pd.DataFrame({"seed": group.seeds, "value": by_seed} | labels))
    keys = ["seed", "calibrator", "quantity"]
    numbers = pd.concat(tables).drop_duplicates(keys, keep="last", ignore_index=True)
    return dataclasses.replace(group, numbers=numbers)


def _analyses(run: MadeUpRun) -> dict[str, Any]:
    count = run.results.num_tasks
    rng = np.random.default_rng([7, run.results.seed])
    tasks = np.arange(count)
    pairs = pd.MultiIndex.from_arrays(np.nonzero(~np.eye(count, dtype=bool)))
    similarity = pd.DataFrame({"error": rng.gamma(1.0, 4.0, len(pairs))}, pairs)
    for name in SIMILARITIES:
        similarity[name] = similarity["error"] + 5 * rng.normal(size=len(pairs))
    grid = np.linspace(-3, 8, 40)
    densities = pd.DataFrame({task: stats.norm.pdf(grid, task) for task in range(count)}, grid)
    by_head = {"first": densities, "last": densities}
    prototypes = pd.DataFrame(rng.normal(size=(4 * count, 2)), columns=["x", "y"])
    prototypes["task"] = np.concatenate([np.repeat(tasks, 3), tasks])
    prototypes["label"] = np.concatenate([np.arange(3 * count), np.full(count, -1)])
    return {
        "similarity": similarity,
        "residual_contributions": pd.DataFrame({"own": rng.random(count), "foreign": 0.6}),
        "residual_distributions": {"adapted": by_head, "pretrained": by_head},
        "prototype_geometry": {"adapted": prototypes, "pretrained": prototypes},
    }
