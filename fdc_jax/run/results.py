"""The content of `results.json`."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from fdc_jax.machine import devices
from fdc_jax.machine.versions import versions
from fdc_jax.run import configuration
from fdc_jax.run import setup as setups
from fdc_jax.run.setup import Setup

# Fields of the record of a task that are a point of the curve.
_POINT = ("task", "accuracy", "routing_accuracy", "components", "task_accuracy")


def collect(
    setup: Setup, seed: int, calibrators: Mapping[str, Any], records: list[dict[str, Any]]
) -> dict[str, Any]:
    """Returns the content of `results.json`, from the calibrators of all tasks and the records."""
    config, tasks, last = setup.config, setup.tasks, records[-1]
    complete = len(records) == len(tasks.tasks)
    selected = setup.learner.selected
    storage = {name: calibrator.storage_bytes for name, calibrator in calibrators.items()}
    if selected not in last["components"]:  # Without the pretrained view, the other is all.
        selected = selected.removesuffix("_adapted_view")
    return {
        "benchmark": config.benchmark,
        "split": tasks.test.partition,
        "learner": config.learner.name,
        "seed": seed,
        "class_order_seed": config.class_order_seed,
        "num_tasks": len(tasks.tasks),
        "num_classes": len(tasks.order),
        "class_names": tasks.class_names,
        "num_train_images": sum(len(indices) for indices in tasks.train_indices),
        "num_test_images": len(tasks.test_indices),
        "accuracy": last["accuracy"],
        "routing_accuracy": last["routing_accuracy"],
        "average_incremental_accuracy": {  # None if the accuracy after a task is missing
            name: float(np.mean([record["accuracy"][name] for record in records]))
            if complete
            else None
            for name in last["accuracy"]
            if name != "oracle"
        },
        "components": last["components"],
        "selected": {"components": selected, "accuracy": last["components"].get(selected)},
        "decomposition": last["decomposition"],
        # The record may be older, and the run without class Gaussians.
        "calibration_error": last.get("calibration_error") or {},
        "chance_calibration_error": last.get("chance_calibration_error") or {},
        "unlike_learned": last.get("unlike_learned"),
        "curve": [{name: record[name] for name in _POINT} for record in records],
        "fdc_storage_bytes": storage.get("fdc"),
        "storage_bytes": storage,
        "notes": {name: c.note for name, c in calibrators.items() if c.note},
        "peak_memory_bytes": _peak_memory([record["peak_memory"] for record in records]),
        "timing": _timing([record["timing"] for record in records]) if complete else None,
        "encoder": {
            "variant": config.encoder.variant,
            "weights": setup.pretrained.path.name,
            "sha256": setup.pretrained.sha256,
            "input_range": config.data.input_range,
            "skipped": list(setup.pretrained.skipped),
            "resized_positions": setup.pretrained.resized_positions,
            "architecture": setups.architecture(setup),
        },
        "data": {"train_sha256": tasks.train.checksum, "test_sha256": tasks.test.checksum},
        "skipped": tasks.train.skipped.counts(limit=20),
        "device": devices.describe(),
        "config": configuration.flatten(config) | {"seed": [seed]},
        "versions": versions(),
    }


def _peak_memory(per_task: list[dict[str, Any]]) -> dict[str, int | None]:
    """Returns the peak of the first task's training, and the bytes that each calibrator added.

    These include the extraction of features and exclude evaluation and other calibrators. None on a
    CPU, and if the first task was trained by a process that did not live to record it.
    """
    known = [memory for memory in per_task if memory.get("training") is not None]
    if not known or known[0] is not per_task[0]:
        names = per_task[0].get("fit", {})
        return {"training": None} | dict.fromkeys(names)
    extraction = sum(memory["extraction"] for memory in known)
    fitted = {name: sum(memory["fit"][name] for memory in known) for name in known[0]["fit"]}
    return {
        "training": known[0]["training"],
        **{name: extraction + rise for name, rise in fitted.items()},
    }


def _timing(per_task: list[dict[str, float]]) -> dict[str, Any]:
    """Returns sums over tasks, those of calibrators by name, and images per second."""
    total: dict[str, Any] = {}
    for name in sorted(set().union(*per_task)):
        values: list[Any] = [timing.get(name, 0.0) for timing in per_task]
        if isinstance(values[0], dict):
            total[name] = {key: sum(value[key] for value in values) for key in values[0]}
        else:
            total[name] = sum(values)
    seconds = total.get("training_seconds")
    total["training_images_per_second"] = total["training_images"] / seconds if seconds else None
    total["input_wait_fraction"] = total["input_wait_seconds"] / seconds if seconds else None
    return total
