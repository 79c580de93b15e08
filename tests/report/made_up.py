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

# What a run by the paper's protocol has in its configuration.
PROTOCOL = {
    **paper.NUMBERS["protocol"]["fields"],
    **paper.NUMBERS["protocol"]["unstated"],
}

COMPONENTS = tuple(paper.COMPONENT_TITLES)
SWEPT = [f"attenuation={value:g}" for value in (0, 0.25, 0.5, 0.75, 1)]
SWEPT += [f"retained_energy={value:g}" for value in (0.5, 0.65, 0.75, 0.85, 0.95)]
SWEPT += [f"{name}={count}" for name in ("neighbours", "nearest") for count in (1, 2, 10)]
METHODS = ("raw", "fdc", "gaussians")


def predictions(seed: int, num_tasks: int = 3, per_task: int = 30) -> dict[str, np.ndarray]:
    """Columns of a `predictions.npz` that do not contradict each other, three classes a task."""
    rng = np.random.default_rng(seed)
    task = np.repeat(np.arange(num_tasks), per_task)
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

    `num_tasks` is that of the curve, and of benchmarks that the paper does not have.
    """
    rng = np.random.default_rng([seed, len(learner), len(benchmark)])
    raw = 60.0 + 5 * rng.random()
    components = {"raw": raw} | {name: raw + 5 * rng.random() for name in COMPONENTS[1:]}
    own = {"tasks": num_tasks, "classes": 3 * num_tasks}
    own |= {"train": 30 * num_tasks, "test": 30 * num_tasks}
    sizes = paper.sizes(benchmark) or own

    def point(lost: float) -> dict[str, Any]:
        """Accuracies, so much below the ones after the first task."""
        lower = {name: value + 9 - lost for name, value in components.items()}
        by_method = {"raw": lower["raw"], "fdc": lower["full"], "gaussians": lower["full"] + 1}
        return {
            "accuracy": by_method | {"oracle": 95.0},
            "routing_accuracy": {name: value + 0.5 for name, value in by_method.items()},
            "components": lower,
        }

    curve = []
    for task in range(num_tasks):
        found = point(task)
        by_task = {name: [value] * (task + 1) for name, value in found["accuracy"].items()}
        curve.append({"task": task} | found | {"task_accuracy": by_task})
    accuracies = np.array([[each["accuracy"][name] for name in METHODS] for each in curve])
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
        **point(9),
        "average_incremental_accuracy": dict(
            zip(METHODS, accuracies.mean(axis=0).tolist(), strict=True)
        ),
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
    return found | changed


def write_run(folder, found=None, columns=None, **arguments):
    """Writes a run folder and returns its results."""
    found = results(**arguments) if found is None else found
    folder.mkdir(parents=True, exist_ok=True)
    fields = {"benchmark": "digits", "learner.name": "loda", "weights sha256": "ab" * 32}
    fields[PLANNED] = [3]
    (folder / "config.json").write_text(json.dumps(fields))
    (folder / "results.json").write_text(json.dumps(found))
    if columns is not None:
        np.savez(folder / "predictions.npz", **columns)
    return found


class MadeUpRun:
    """What `fdc_jax.open_run` returns, without files."""

    def __init__(self, folder: Path, results: dict[str, Any]):
        self.folder, self.results = folder, convert(results, records.Results)
        self.predictions_file = Path(__file__)  # one that is there
        self.predictions = predictions(self.results.seed, self.results.num_tasks)
        self.class_names = ()

    @property
    def features_folder(self):
        """The folder of saved features, which is missing."""
        return self.folder / "features"

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
    """A finished run of so many tasks; `config` is what differs from the paper's protocol."""
    found = results(benchmark, learner, seed, num_tasks)
    found["config"] = PROTOCOL | {"learner.name": learner, "seed": [seed], **config}
    sizes = {"num_classes": 3 * num_tasks, "num_test_images": 30 * num_tasks}
    found |= {"num_tasks": num_tasks, "num_train_images": 50_000, **sizes}
    if benchmark in paper.benchmarks():
        found["num_test_images"] = paper.sizes(benchmark)["test"]
        found["num_train_images"] = paper.sizes(benchmark)["train"]
    return MadeUpRun(Path(f"runs/{benchmark}_{learner}/seed_{seed}"), found)


def groups(*members: MadeUpRun) -> list[Group]:
    """Groups of runs; three seeds of one protocol run without any."""
    return runs.group(members or [run(seed) for seed in (1, 2, 3)])


def analysed(*members: MadeUpRun) -> list[Group]:
    """The same with every analysis."""
    analysed = []
    for group in groups(*members):
        rng = np.random.default_rng(len(group.runs))
        swept = {name: 70 + rng.normal(size=len(group.runs)) for name in SWEPT}
        of_runs = [_analyses(run) for run in group.runs]
        analyses = {name: [of[name] for of in of_runs] for name in of_runs[0]}
        analysed.append(dataclasses.replace(with_numbers(group, swept), analyses=analyses))
    return analysed


def with_numbers(group: Group, values: Mapping[str, Sequence[float]]) -> Group:
    """A group with other values of quantities, one per seed."""
    numbers = group.numbers
    for name, by_seed in values.items():
        calibrator, quantity = quantities.parse(name)
        of = numbers["calibrator"].eq(calibrator) & numbers["quantity"].eq(quantity)
        labels = {"benchmark": group.benchmark, "learner": group.learner, "settings": group.title}
        labels |= {"calibrator": calibrator, "quantity": quantity}
        rows = pd.DataFrame({"seed": group.seeds, "value": by_seed}).assign(**labels)
        numbers = pd.concat([numbers[~of], rows], ignore_index=True)
    return dataclasses.replace(group, numbers=numbers)


def _analyses(of: MadeUpRun) -> dict[str, Any]:
    count, seed = of.results.num_tasks, of.results.seed
    rng = np.random.default_rng([7, seed])
    tasks = np.arange(count)
    pairs = pd.MultiIndex.from_tuples([(s, t) for s in tasks for t in tasks if s != t])
    error = rng.gamma(1.0, 4.0, len(pairs))
    alike = {
        f"{view}_{kind}": scale * error - 6 + noise * rng.normal(size=len(pairs))
        for view, noise in (("adapted", 3.0), ("pretrained", 6.0))
        for kind, scale in (("residual", 1.0), ("affinity", 0.2))
    }
    grid = np.linspace(-3, 8, 40)
    densities = {
        head: pd.DataFrame(
            {t: stats.norm.pdf(grid, 0.5 if t == own else 3 + 0.3 * t) for t in range(count)}, grid
        )
        for head, own in (("first", 0), ("last", count - 1))
    }
    prototypes = pd.DataFrame(rng.normal(size=(4 * count, 2)), columns=["x", "y"])
    prototypes["task"] = np.concatenate([np.repeat(tasks, 3), tasks])
    prototypes["label"] = np.concatenate([np.arange(3 * count), np.full(count, -1)])
    contributions = {"own": rng.normal(-0.2, 0.1, count), "foreign": rng.normal(0.6, 0.2, count)}

    return {
        "similarity": pd.DataFrame({"error": error} | alike, pairs),
        "residual_contributions": pd.DataFrame(contributions),
        "residual_distributions": {"adapted": densities, "pretrained": densities},
        "prototype_geometry": {"adapted": prototypes, "pretrained": prototypes},
    }
