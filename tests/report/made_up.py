"""Runs and analyses in the shapes that runs and analyses have, with numbers drawn at random."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from fdc_jax.report import paper, runs
from fdc_jax.report.runs import Group, RunFolder

# What a run by the paper's protocol has in its configuration.
PROTOCOL = {
    **paper.numbers()["protocol"]["fields"],
    **paper.numbers()["protocol"]["unstated"],
}

COMPONENTS = tuple(paper.COMPONENT_TITLES)


def predictions(seed: int, num_tasks: int = 3, per_task: int = 30) -> dict[str, np.ndarray]:
    """Columns of a `predictions.npz` that do not contradict each other, three classes a task."""
    rng = np.random.default_rng(seed)
    task = np.repeat(np.arange(num_tasks), per_task)
    label = 3 * task + rng.integers(3, size=len(task))
    oracle = np.where(rng.random(len(task)) < 0.9, label, 3 * task + (label + 1) % 3)
    columns = {"label": label, "oracle_label": oracle, "task": task}
    for name, routed in (("raw", 0.5), ("fdc", 0.7)):
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

    `num_tasks` is that of the curve, and of benchmarks that the paper does not have.
    """
    rng = np.random.default_rng([seed, len(learner), len(benchmark)])
    raw = 60.0 + 5 * rng.random()
    components = {"raw": raw} | {name: raw + 5 * rng.random() for name in COMPONENTS[1:]}
    own = {"tasks": num_tasks, "classes": 3 * num_tasks}
    own |= {"train": 30 * num_tasks, "test": 30 * num_tasks}
    sizes = paper.columns("partitions", benchmark) or own
    accuracy = {"raw": raw, "fdc": components["full"], "oracle": 95.0}
    curve = []
    for task in range(num_tasks):
        lower = {name: value + 9 - task for name, value in components.items()}
        reached = {"raw": lower["raw"], "fdc": lower["full"], "oracle": 95.0}
        point = {
            "task": task,
            "accuracy": reached,
            "routing_accuracy": {"raw": raw + 10 - task, "fdc": lower["full"] + 0.5},
            "components": lower,
            "task_accuracy": {kind: [value] * (task + 1) for kind, value in reached.items()},
        }
        curve.append(point)
    found = {
        "benchmark": benchmark,
        "split": "official",
        "learner": learner,
        "seed": seed,
        "class_order_seed": 1993,
        "num_tasks": sizes["tasks"],
        "num_classes": sizes["classes"],
        "num_train_images": sizes["train"],
        "num_test_images": sizes["test"],
        "accuracy": accuracy,
        "routing_accuracy": {"raw": raw + 1, "fdc": components["full"] + 0.5},
        "average_incremental_accuracy": {
            name: float(np.mean([point["accuracy"][name] for point in curve]))
            for name in ("raw", "fdc")
        },
        "components": components,
        "curve": curve,
        "fdc_storage_bytes": 3 * 2**20,
        "timing": {
            "training_seconds": 600.0 + seed,
            "adapted_extraction_seconds": 60.0,
            "pretrained_extraction_seconds": 30.0,
            "pretrained_from_cache": float(seed > 1),
            "fit_seconds": 6.0,
        },
        "encoder": {
            "variant": "B/16",
            "weights": paper.numbers()["protocol"]["weights"][0],
            "sha256": "ab" * 32,
            "input_range": "pilot01",
        },
        "data": {"train_sha256": "cd" * 32, "test_sha256": "ef" * 32},
        "device": "1 x cpu",
        "config": PROTOCOL | {"learner.name": learner, "seed": [seed]} | (config or {}),
        "versions": {"commit": "0123abcd", "jax": "0.10.2"},
    }
    return found | changed


def write_run(folder, found=None, columns=None, **arguments):
    """Writes a run folder and returns its results."""
    found = results(**arguments) if found is None else found
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(found))
    if columns is not None:
        np.savez(folder / "predictions.npz", **columns)
    return found


class MadeUpRun(RunFolder):
    """A run whose predictions are made up rather than read."""

    @property
    def predictions(self) -> dict[str, np.ndarray]:
        return predictions(self.seed, self.results["num_tasks"])


def run(
    seed: int = 1,
    benchmark: str = "cifar100",
    learner: str = "cumulative_lora",
    num_tasks: int = 4,
    **config: Any,
) -> RunFolder:
    """A finished run of so many tasks; `config` is what differs from the paper's protocol."""
    found = results(benchmark, learner, seed, num_tasks)
    found["config"] = {"learner.preset": "protocol", "seed": [seed], **config}
    found |= {"num_tasks": num_tasks, "num_classes": 3 * num_tasks}
    return MadeUpRun(Path(f"runs/{benchmark}_{learner}/seed_{seed}"), found)


def groups(*members: RunFolder) -> list[Group]:
    """Groups of runs; three seeds of one protocol run without any."""
    return runs.group(members or [run(seed) for seed in (1, 2, 3)])


def analysed(*members: RunFolder) -> list[Group]:
    """The same with every analysis."""
    found = groups(*members)
    for each in (run for group in found for run in group.runs):
        each.analyses.update(_analyses(each))
    return found


def _analyses(of: RunFolder) -> dict[str, Any]:
    count = of.results["num_tasks"]
    rng = np.random.default_rng([7, of.seed])
    pairs = [(s, t) for s in range(count) for t in range(count) if s != t]
    error = rng.gamma(1.0, 4.0, len(pairs))
    views = {
        view: {
            "residual": (error - 30 + noise * rng.normal(size=len(pairs))).tolist(),
            "affinity": (0.2 * error - 6 + noise * rng.normal(size=len(pairs))).tolist(),
        }
        for view, noise in (("adapted", 3.0), ("pretrained", 6.0))
    }
    rank = {"correlation": 0.5, "p_value": 0.01}
    grid = np.linspace(-3, 8, 40)

    def bell(centre: float) -> list[float]:
        return (np.exp(-0.5 * (grid - centre) ** 2) / np.sqrt(2 * np.pi)).tolist()

    densities = {
        place: {
            "task": task,
            "grid": grid.tolist(),
            "own": bell(0.5),
            "foreign": {str(t): bell(3 + 0.3 * t) for t in range(count) if t != task},
            "foreign_mean": bell(3.5),
        }
        for place, task in (("first", 0), ("last", count - 1))
    }
    geometry = {
        view: {
            "classes": rng.normal(size=(3 * count, 2)).tolist(),
            "tasks": rng.normal(size=(count, 2)).tolist(),
        }
        for view in views
    }

    def sweep(values: list[float], default: float) -> dict[str, Any]:
        found = [70 - 8 * (value - default) ** 2 + 0.2 * rng.normal() for value in values]
        return {"values": values, "default": default, "accuracy": found}

    neighbours: dict[str, Any] = {"values": [1, 2, 3], "default": 1}
    for name, start in (("own", 70.0), ("nearest", 69.0)):
        accuracy = [start - step + 0.2 * rng.normal() for step in range(3)]
        neighbours[name] = {"accuracy": accuracy, "routing_accuracy": accuracy}
    return {
        "similarity": {
            "true_task": [s for s, _ in pairs],
            "other_task": [t for _, t in pairs],
            "routing_error_percent": error.tolist(),
            "spearman": {view: {"residual": rank, "affinity": rank} for view in views},
            **views,
        },
        "residual_contributions": {
            "own": rng.normal(-0.2, 0.1, count).tolist(),
            "foreign": rng.normal(0.6, 0.2, count).tolist(),
        },
        "residual_distributions": {view: densities for view in views},
        "prototype_geometry": {
            "class_labels": list(range(3 * count)),
            "class_tasks": np.repeat(np.arange(count), 3).tolist(),
            **geometry,
        },
        "sweep_attenuation": sweep([0.0, 0.25, 0.5, 0.75, 1.0], 0.5),
        "sweep_retained_energy": sweep([0.5, 0.65, 0.75, 0.85, 0.95], 0.75),
        "sweep_neighbours": neighbours,
    }
