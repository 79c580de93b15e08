"""The content of `results.json`."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from msgspec import structs

from fdc_jax.machine import devices
from fdc_jax.machine.conversion import convert
from fdc_jax.machine.versions import versions
from fdc_jax.run import configuration, records
from fdc_jax.run import setup as setups
from fdc_jax.run.records import Point, Record, Results, TaskTiming, Timing
from fdc_jax.run.setup import Setup


def collect(
    setup: Setup, seed: int, calibrators: Mapping[str, Any], evaluations: Sequence[Record]
) -> Results:
    """Returns the content of `results.json`, from calibrators of all tasks and their records."""
    config, tasks, last = setup.config, setup.tasks, evaluations[-1]
    complete = len(evaluations) == len(tasks.tasks)
    means: dict[str, float | None] = {}
    for name in last.accuracy:
        if name != "oracle":
            accuracies = [record.accuracy[name] for record in evaluations]
            means[name] = float(np.mean(accuracies)) if complete else None
    storage = {name: calibrator.storage_bytes for name, calibrator in calibrators.items()}
    selected = setup.learner.selected
    if selected not in last.components:  # Without the pretrained view, the other is all.
        selected = selected.removesuffix("_adapted_view")
    return Results(
        benchmark=config.benchmark,
        split=tasks.test.partition,
        learner=config.learner.name,
        seed=seed,
        class_order_seed=config.class_order_seed,
        num_tasks=len(tasks.tasks),
        num_classes=len(tasks.order),
        class_names=tasks.class_names,
        num_train_images=sum(len(indices) for indices in tasks.train_indices),
        num_test_images=len(tasks.test_indices),
        accuracy=last.accuracy,
        routing_accuracy=last.routing_accuracy,
        average_incremental_accuracy=means,
        components=last.components,
        validation=last.validation,
        selected=records.Selected(
            components=selected,
            accuracy=last.components[selected] if selected in last.components else None,
        ),
        decomposition=last.decomposition,
        calibration_error=last.calibration_error,
        chance_calibration_error=last.chance_calibration_error,
        unlike_learned=last.unlike_learned,
        curve=[convert(structs.asdict(record), Point) for record in evaluations],
        fdc_storage_bytes=storage.get("fdc"),
        storage_bytes=storage,
        notes={name: c.note for name, c in calibrators.items() if c.note},
        peak_memory_bytes=peak_memory([record.peak_memory for record in evaluations]),
        timing=_timing([record.timing for record in evaluations]) if complete else None,
        encoder=records.EncoderRecord(
            variant=config.encoder.variant,
            weights=setup.pretrained.path.name,
            sha256=setup.pretrained.sha256,
            input_range=config.data.input_range,
            skipped=list(setup.pretrained.skipped),
            resized_positions=setup.pretrained.resized_positions,
            architecture=setups.architecture(setup),
        ),
        data=records.Images(train_sha256=tasks.train.checksum, test_sha256=tasks.test.checksum),
        skipped=tasks.train.skipped.counts(limit=20),
        device=devices.description(),
        config=configuration.flatten(config) | {"seed": [seed]},
        versions=versions(),
    )


def peak_memory(per_task: Sequence[records.Memory]) -> dict[str, int | None]:
    """Returns the peak of the first task's training, and the bytes that each calibrator added.

    These include the extraction of features and exclude evaluation and other calibrators. None on a
    CPU, and if the first task was trained by a process that did not live to record it.
    """
    first = per_task[0]
    if first.training is None:
        return {"training": None} | dict.fromkeys(first.fit)
    known = [memory for memory in per_task if memory.training is not None]
    extraction = sum(memory.extraction or 0 for memory in known)
    peaks: dict[str, int | None] = {"training": first.training}
    for name in first.fit:
        peaks[name] = extraction + sum(memory.fit[name] or 0 for memory in known)
    return peaks


def _timing(per_task: Sequence[TaskTiming]) -> Timing:
    """Returns sums over tasks, those of calibrators by name, and images per second."""
    sums = jax.tree.map(
        lambda *values: sum(filter(None, values)),
        *map(structs.asdict, per_task),
        is_leaf=lambda leaf: leaf is None,
    )
    total = Timing(**sums)
    if total.training_seconds:
        total.training_images_per_second = (total.training_images or 0) / total.training_seconds
        total.input_wait_fraction = (total.input_wait_seconds or 0) / total.training_seconds
    return total
