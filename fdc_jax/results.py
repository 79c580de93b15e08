"""From scores to `results.json`: accuracies of every component combination, curve, provenance."""

import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int

import fdc_jax
from fdc_jax import configuration, devices, evaluation, learners
from fdc_jax.calibration.components import fuse_all

if TYPE_CHECKING:
    from fdc_jax.calibration import FDC, Terms
    from fdc_jax.preparation import Experiment

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "tensorflow-datasets", "numpy")

# Entries of results that stand beside the paper's numbers: the affinity in the whitened metric, or
# the paper's without tanh.
BEYOND = ("whitened", "linear")


def measure(
    terms: "Terms", labels: Int[np.ndarray, " n"], tasks: Int[np.ndarray, " n"]
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns the accuracies in percent of everything that one pass over test images can tell.

    Args:
        terms: per-sample evidence, as the calibrator returns it.
        labels: true class-order positions.
        tasks: true tasks.

    Returns:
        `accuracy`, `routing_accuracy`, `components`, the four shares of raw and FDC, and
        `task_accuracy`, all by the paper's affinity; an entry of `BEYOND` where the calibrator has
        another; and the columns of `predictions.npz`.
    """
    scores = fuse_all(terms)
    raw, fdc = scores["raw"], scores["full"]
    oracle = raw.label_in_task(tasks)
    decompositions = {
        name: evaluation.decompose(tasks, labels, each.task, each.label, each.label_in_task(tasks))
        for name, each in (("raw", raw), ("fdc", fdc))
    }
    accuracies = {
        "accuracy": {
            "raw": decompositions["raw"].accuracy,
            "fdc": decompositions["fdc"].accuracy,
            "oracle": evaluation.accuracy(labels, oracle),
        },
        "routing_accuracy": {name: d.routing_accuracy for name, d in decompositions.items()},
        "components": {
            name: evaluation.accuracy(labels, each.label) for name, each in scores.items()
        },
        "decomposition": {name: d._asdict() for name, d in decompositions.items()},
        "task_accuracy": {
            name: _by_task(tasks, labels, predicted)
            for name, predicted in (("raw", raw.label), ("fdc", fdc.label), ("oracle", oracle))
        },
    }
    predictions = dict(
        label=labels,
        raw_label=raw.label,
        fdc_label=fdc.label,
        oracle_label=oracle,
        fdc_oracle_label=fdc.label_in_task(tasks),
        task=tasks,
        raw_task=raw.task,
        fdc_task=fdc.task,
    )
    if terms.affinity != terms.paper_affinity:
        beyond = fuse_all(terms, terms.affinity)
        found = beyond["full"]
        entry = "whitened" if terms.affinity.metric == "whitened" else "linear"
        accuracies[entry] = {
            "affinity": terms.affinity._asdict(),
            "accuracy": evaluation.accuracy(labels, found.label),
            "oracle": evaluation.accuracy(labels, found.label_in_task(tasks)),
            "routing_accuracy": evaluation.accuracy(tasks, found.task),
            "components": {
                name: evaluation.accuracy(labels, each.label) for name, each in beyond.items()
            },
        }
        predictions |= {f"{entry}_label": found.label, f"{entry}_task": found.task}
    return accuracies, {name: column.astype(np.int32) for name, column in predictions.items()}


def _by_task(
    tasks: Int[np.ndarray, " n"], labels: Int[np.ndarray, " n"], predicted: Int[np.ndarray, " n"]
) -> list[float | None]:
    """Returns the accuracy on each task so far, None for one without test images."""
    found = evaluation.task_accuracies(tasks, labels, predicted, int(tasks.max()) + 1)
    return [None if np.isnan(value) else float(value) for value in found]


def describe(record: dict[str, Any], num_tasks: int) -> str:
    """Returns one line about the accuracies after a task."""
    accuracy, routing = record["accuracy"], record["routing_accuracy"]
    return (
        f"after task {record['task'] + 1}/{num_tasks}: raw {accuracy['raw']:.2f}  "
        f"FDC {accuracy['fdc']:.2f}  oracle {accuracy['oracle']:.2f}  "
        f"routing {routing['raw']:.2f} -> {routing['fdc']:.2f} %"
    )


def collect(
    experiment: "Experiment", seed: int, calibrator: "FDC", records: list[dict[str, Any]]
) -> dict[str, Any]:
    """Returns the content of `results.json` from the records of all tasks."""
    e, config = experiment, experiment.config
    last = records[-1]
    points = ("task", "accuracy", "routing_accuracy", "components", "task_accuracy", *BEYOND)
    curve = [{name: record[name] for name in points if name in record} for record in records]
    complete = len(records) == e.setup.num_tasks
    return {
        "benchmark": config.benchmark,
        "split": e.tasks.test.partition,
        "learner": config.learner.name,
        "seed": seed,
        "class_order_seed": config.class_order_seed,
        "num_tasks": e.setup.num_tasks,
        "num_classes": sum(e.setup.classes_per_task),
        "num_train_images": sum(len(indices) for indices in e.tasks.train_indices),
        "num_test_images": len(e.tasks.test_indices),
        "accuracy": last["accuracy"],
        "routing_accuracy": last["routing_accuracy"],
        # Without the accuracy after every task there is no average over them.
        "average_incremental_accuracy": {
            name: evaluation.average_incremental_accuracy(
                [point["accuracy"][name] for point in curve]
            )
            if complete
            else None
            for name in ("raw", "fdc")
        },
        "components": last["components"],
        "selected": _selected(config.learner.name, last["components"]),
        "decomposition": last["decomposition"],
        **{
            entry: _beyond(entry, curve, complete, calibrator.storage_bytes)
            for entry in BEYOND
            if entry in last
        },
        "curve": curve,
        "fdc_storage_bytes": calibrator.paper_storage_bytes,
        "peak_memory_bytes": _peak_memory([record.get("peak_memory") for record in records]),
        "timing": _timing([record["timing"] for record in records], complete),
        "encoder": {
            "variant": config.encoder.variant,
            "weights": e.pretrained.path.name,
            "sha256": e.pretrained.sha256,
            "input_range": config.data.input_range,
            "skipped": list(e.pretrained.skipped),
            "resized_positions": e.pretrained.resized_positions,
        },
        "data": {"train_sha256": e.tasks.train.checksum, "test_sha256": e.tasks.test.checksum},
        "device": devices.describe(),
        "config": configuration.flatten(config) | {"seed": [seed]},
        "versions": versions(),
    }


def _beyond(
    entry: str, curve: list[dict[str, Any]], complete: bool, storage_bytes: int
) -> dict[str, Any]:
    """Returns what an affinity beyond the paper gives after the last task, and on average."""
    accuracies = [point[entry]["accuracy"] for point in curve]
    average = evaluation.average_incremental_accuracy(accuracies) if complete else None
    return {
        **curve[-1][entry],
        "average_incremental_accuracy": average,
        "storage_bytes": storage_bytes,
    }


def _selected(learner: str, components: dict[str, float]) -> dict[str, Any]:
    """Returns what the paper enables for the learner, and its accuracy."""
    name = learners.selected(learner)
    # Without the pretrained view, the adapted one is all there is.
    name = name if name in components else name.removesuffix("_adapted_view")
    return {"components": name, "accuracy": components.get(name)}


def _peak_memory(per_task: list[dict[str, int | None] | None]) -> dict[str, int | None]:
    """Returns the device memory that training took, and what FDC and evaluation took beyond it.

    A peak never falls: the first task's, before anything was fitted, is that of training. None on
    a CPU, and where that task was trained by a process that did not live to record it.
    """
    first, last = per_task[0] or {}, per_task[-1] or {}
    training, total = first.get("training"), last.get("task")
    beyond = None if training is None or total is None else total - training
    return {"training": training, "fdc_and_evaluation": beyond}


def _timing(per_task: list[dict[str, float]], complete: bool) -> dict[str, Any] | None:
    """Returns sums over tasks, and images per second; None where tasks were not recorded."""
    if not complete:
        return None
    names = sorted({name for timing in per_task for name in timing})
    total: dict[str, Any] = {
        name: sum(timing.get(name, 0.0) for timing in per_task) for name in names
    }
    seconds = total["training_seconds"]
    total["training_images_per_second"] = total["training_images"] / seconds if seconds else None
    total["input_wait_fraction"] = total["input_wait_seconds"] / seconds if seconds else None
    return total


def versions() -> dict[str, str | None]:
    """Returns the versions of Python, of this package and of what it computes with."""
    found = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return {
        "python": platform.python_version(),
        "fdc_jax": fdc_jax.__version__,
        "commit": _commit(),
        **found,
    }


def _commit() -> str | None:
    """Returns the commit that the package is checked out at, or None outside a checkout."""
    folder = Path(fdc_jax.__file__).parents[1]
    if not (folder / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def summarise(per_seed: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns mean and sample standard deviation over seeds, and gains paired within each seed."""

    def over_seeds(values: list[float]) -> dict[str, float]:
        mean, std = evaluation.mean_and_std(values)
        return {"mean": mean, "std": std}

    def of(section: str) -> dict[str, Any]:
        names = [name for name in per_seed[0][section] if per_seed[0][section][name] is not None]
        return {name: over_seeds([run[section][name] for run in per_seed]) for name in names}

    first = per_seed[0]
    gain = evaluation.paired_gain(
        [run["accuracy"]["raw"] for run in per_seed], [run["accuracy"]["fdc"] for run in per_seed]
    )
    return {
        **{name: first[name] for name in ("benchmark", "split", "learner", "class_order_seed")},
        "seeds": [run["seed"] for run in per_seed],
        **{
            section: of(section)
            for section in (
                "accuracy",
                "routing_accuracy",
                "average_incremental_accuracy",
                "components",
            )
        },
        "selected": {"components": first["selected"]["components"]},
        **{entry: _beyond_over_seeds(entry, per_seed) for entry in BEYOND if entry in first},
        "gain": gain._asdict(),
        "component_gains": {
            name: over_seeds(
                [run["components"][name] - run["components"]["raw"] for run in per_seed]
            )
            for name in first["components"]
            if name != "raw"
        },
        "device": first["device"],
        "config": first["config"] | {"seed": [run["seed"] for run in per_seed]},
        "versions": first["versions"],
    }


def _beyond_over_seeds(entry: str, per_seed: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the accuracy of an affinity beyond the paper, and its gain over FDC by seed."""
    own = [run[entry]["accuracy"] for run in per_seed]
    mean, std = evaluation.mean_and_std(own)
    gain = evaluation.paired_gain([run["accuracy"]["fdc"] for run in per_seed], own)
    return {
        "affinity": per_seed[0][entry]["affinity"],
        "accuracy": {"mean": mean, "std": std},
        "gain_over_fdc": gain._asdict(),
    }
