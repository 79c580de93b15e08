"""Runs and analyses in the shapes that runs and analyses have, with numbers drawn at random."""

from pathlib import Path
from typing import Any

import numpy as np

from fdc_jax.report import runs
from fdc_jax.report.runs import Group, RunFolder

# What makes a configuration follow the paper's protocol.
_DATA = {"cifar100": (50_000, 10_000), "imagenet_r": (24_000, 6_000), "cub200": (9_430, 2_358)}


def predictions(seed: int, num_tasks: int = 4, per_task: int = 30) -> dict[str, np.ndarray]:
    """Columns of a `predictions.npz` that do not contradict each other."""
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
    """A finished run; `config` is what differs from the paper's protocol."""
    rng = np.random.default_rng([seed, len(benchmark), len(learner)])
    raw, gain, oracle = 60 + 3 * rng.random(), 8 + 2 * rng.random(), 93 + rng.random()
    train, test = _DATA.get(benchmark, (100, 120))
    shares = ("right_task_right_class", "right_task_wrong_class")
    shares += ("wrong_task_oracle_right", "wrong_task_oracle_wrong")
    components = {"raw": raw, "tsf": raw + 1, "full": raw + gain, "pretrained_view": raw + 2}
    components |= {"pac+rlc_adapted_view": raw + 4, "pac+rlc_pretrained_view": raw + 3}
    curve = []
    for t in range(num_tasks):
        accuracy = {"raw": raw - t, "fdc": raw + gain - t, "oracle": oracle - t}
        lower = {name: value - t for name, value in components.items()}
        on_tasks = {kind: [value] * (t + 1) for kind, value in accuracy.items()}
        point = {"task": t, "accuracy": accuracy, "components": lower, "task_accuracy": on_tasks}
        curve.append(point)
    results = {
        "benchmark": benchmark,
        "split": "official",
        "learner": learner,
        "seed": seed,
        "class_order_seed": 1993,
        "num_tasks": num_tasks,
        "num_classes": 3 * num_tasks,
        "num_train_images": train,
        "num_test_images": test,
        "accuracy": {"raw": raw, "fdc": raw + gain, "oracle": oracle},
        "components": components,
        "curve": curve,
        "decomposition": {
            name: dict(zip(shares, values, strict=True))
            for name, values in (("raw", (60.0, 2.0, 30.0, 8.0)), ("fdc", (70.0, 3.0, 20.0, 7.0)))
        },
        "encoder": {
            "variant": "B/16",
            "weights": None,
            "sha256": "a" * 64,
            "input_range": "pilot01",
        },
        "data": {"train_sha256": "b" * 64, "test_sha256": "c" * 64},
        "device": "1 x cpu",
        "versions": {"python": "3.11.7", "commit": "d" * 40, "jax": "0.10.2"},
        "config": {"learner.preset": "protocol", "seed": [seed], **config},
    }
    return MadeUpRun(Path(f"runs/{benchmark}_{learner}/seed_{seed}"), results)


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
