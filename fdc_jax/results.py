"""What `results.json` holds: measurements of all tasks, with what they are of and cost."""

import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Any

import fdc_jax
from fdc_jax import configuration, devices, evaluation, learners
from fdc_jax.evaluation import BEYOND
from fdc_jax.preparation import Experiment

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "tensorflow-datasets", "numpy")


def collect(
    e: Experiment, seed: int, calibrator: Any, records: list[dict[str, Any]]
) -> dict[str, Any]:
    """Returns the content of `results.json` from the records of all tasks."""
    config, last = e.config, records[-1]
    points = ("task", "accuracy", "routing_accuracy", "components", "task_accuracy", *BEYOND)
    curve = [{name: record[name] for name in points if name in record} for record in records]
    complete = len(records) == e.setup.num_tasks
    selected = learners.selected(config.learner.name)
    if selected not in last["components"]:  # Without the pretrained view, the other is all.
        selected = selected.removesuffix("_adapted_view")

    def average(accuracies: list[float]) -> float | None:
        # Without the accuracy after every task there is no average over them.
        return evaluation.average_incremental_accuracy(accuracies) if complete else None

    return {
        "benchmark": config.benchmark,
        "split": e.tasks.test.partition,
        "learner": config.learner.name,
        "seed": seed,
        "class_order_seed": config.class_order_seed,
        "num_tasks": e.setup.num_tasks,
        "num_classes": sum(e.setup.classes_per_task),
        "class_names": e.tasks.class_names,
        "num_train_images": sum(len(indices) for indices in e.tasks.train_indices),
        "num_test_images": len(e.tasks.test_indices),
        "accuracy": last["accuracy"],
        "routing_accuracy": last["routing_accuracy"],
        "average_incremental_accuracy": {
            name: average([point["accuracy"][name] for point in curve]) for name in ("raw", "fdc")
        },
        "components": last["components"],
        "selected": {"components": selected, "accuracy": last["components"].get(selected)},
        "decomposition": last["decomposition"],
        **{
            entry: {
                **last[entry],
                "average_incremental_accuracy": average([p[entry]["accuracy"] for p in curve]),
                "storage_bytes": calibrator.beyond_storage_bytes[entry],
            }
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
            "architecture": e.architecture,
        },
        "data": {"train_sha256": e.tasks.train.checksum, "test_sha256": e.tasks.test.checksum},
        "device": devices.describe(),
        "config": configuration.flatten(config) | {"seed": [seed]},
        "versions": versions(),
    }


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
    names = sorted(set().union(*per_task))
    total: dict[str, Any] = {name: sum(each.get(name, 0.0) for each in per_task) for name in names}
    seconds = total.get("training_seconds")
    total["training_images_per_second"] = total["training_images"] / seconds if seconds else None
    total["input_wait_fraction"] = total["input_wait_seconds"] / seconds if seconds else None
    return total


def versions() -> dict[str, str | None]:
    """Returns the versions of Python, of this package and of what it computes with."""
    own = {"python": platform.python_version(), "fdc_jax": fdc_jax.__version__, "commit": _commit()}
    return own | {name: importlib.metadata.version(name) for name in _PACKAGES}


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
