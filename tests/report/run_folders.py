"""Small run folders whose numbers a test knows."""

import json

import numpy as np

from fdc_jax.report import paper

# What a run by the paper's protocol has in its configuration.
PROTOCOL = {
    **paper.numbers()["protocol"]["fields"],
    **paper.numbers()["protocol"]["unstated"],
}

COMPONENTS = tuple(paper.COMPONENT_TITLES)


def predictions(seed, size=60, classes=6, per_task=2):
    """Columns of predictions of `size` images, raw right on some and FDC on others."""
    rng = np.random.default_rng(seed)
    label = np.arange(size) % classes
    task = label // per_task
    oracle = np.where(rng.random(size) < 0.9, label, task * per_task + (label + 1) % per_task)
    columns = {"label": label, "task": task, "oracle_label": oracle}
    for name, share in (("raw", 0.5), ("fdc", 0.8)):
        routed = rng.random(size) < share
        columns[f"{name}_task"] = np.where(routed, task, (task + 1) % (classes // per_task))
        columns[f"{name}_label"] = np.where(routed, oracle, columns[f"{name}_task"] * per_task)
    return columns


def results(
    benchmark="cifar100", learner="cumulative_lora", seed=1, gain=5.0, config=None, **changed
):
    """Content of a results.json; accuracies follow from seed, benchmark and learner."""
    rng = np.random.default_rng([seed, len(learner), len(benchmark), int(10 * gain)])
    raw = 60.0 + 5 * rng.random()
    components = {"raw": raw} | {name: raw + gain * rng.random() for name in COMPONENTS[1:]}
    own = {"classes": 6, "tasks": 3, "train": 90, "test": 60}
    sizes = paper.columns("partitions", benchmark) or own
    accuracy = {"raw": raw, "fdc": components["full"], "oracle": 95.0}
    curve = [
        {
            "task": task,
            "accuracy": {"raw": raw + 9 - task, "fdc": raw + gain + 9 - task, "oracle": 95.0},
            "routing_accuracy": {"raw": raw + 10 - task, "fdc": raw + gain + 9.5 - task},
            "components": {name: value + 9 - task for name, value in components.items()},
        }
        for task in range(3)
    ]
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
