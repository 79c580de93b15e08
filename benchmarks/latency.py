"""Time and memory of a batch without FDC, with one view and with two (the paper's protocol).

    python -m benchmarks.latency --run=runs/cifar100/seed_1 --output=latency.json
    python -m benchmarks.latency --variant=B/16 --image_size=224 --case=20x100

64 images are put on the device once; after 10 batches to warm up, 3 repeats of 20 batches are timed
with a synchronisation at either end. Raw: one forward pass and the heads. Single: the same pass,
heads with TSF folded in, RLC and PAC in the adapted view. Dual: a second pass of the same backbone
without the increments, and both views. Each is one compiled program, given nothing that it does not
need; its peak memory is that of arguments, results and temporaries as the compiler plans it.

Times depend on shapes, not on values: pixels and encoder weights are random. With --run, tasks,
classes, ranks and the encoder's size are those of the run, from its `calibrator.npz` and
`results.json`; without, a calibrator is fitted on random features of TASKSxCLASSES.
"""

import argparse
import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import synthetic
from benchmarks.calibration import Point, fitted
from benchmarks.measure import ENCODER, parsed, parser_of, run, write_report
from fdc_jax import calibration
from fdc_jax.calibration import fdc, inputs
from fdc_jax.errors import InputError
from fdc_jax.machine import devices
from fdc_jax.model import vit

PROGRAM = "benchmarks.latency"


def programs(
    model: Any, parameters: Any, kernels: Any, calibrator: calibration.FDC
) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Returns, by view, a function from (its arguments, images) to labels, and the arguments."""
    arrays, settings, count = calibrator.arrays, calibrator.settings, calibrator.num_tasks
    if arrays.heads is None:
        raise InputError("calibrator: expected heads that FDC can fold TSF into, found functions")
    sizes = [len(classes) for classes in calibrator.classes]
    most = max(sizes)
    table = np.zeros((count, most), np.int32)
    for task, classes in enumerate(calibrator.classes):
        table[task, : sizes[task]] = classes
    labels = jnp.asarray(table)
    scale = jnp.asarray([task.filtered_scale for task in calibrator.tasks], jnp.float32)

    def encode(parameters, images, kernels=None):
        return model.apply({"params": parameters}, images, kernels)

    def choose(scores, rows, labels):
        task = jnp.argmax(scores, axis=1)
        row = jnp.take_along_axis(rows, task[:, None], axis=1)[:, 0]
        return labels[task, row]

    def raw(arguments, images):
        parameters, kernels, rows, bias, labels = arguments
        features = encode(parameters, images, kernels)
        energies = fdc.energy(features) if calibrator.normalised else None
        logits = jnp.stack(
            [fdc.head_logits(features, *head, energies) for head in zip(rows, bias, strict=True)],
            axis=1,
        )[:, :count]
        return choose(logits.max(axis=2), logits.argmax(axis=2), labels)

    def calibrated(arguments, images):
        parameters, kernels, arrays, scale, labels = arguments
        features = encode(parameters, images, kernels)
        pretrained = encode(parameters, images) if len(arrays.views) == 2 else None
        found = fdc.score_batch(
            arrays,
            features,
            pretrained,
            normalised=calibrator.normalised,
            neighbours=settings.neighbours,
            nearest=settings.affinity_reference == "nearest",
        )
        found = {name: each[:, :count] for name, each in found.items() if each.ndim == 2}
        weights = (settings.adapted_view_weight, settings.pretrained_view_weight)
        views = [
            (weight, found[f"{name}_rlc"], jnp.tanh(found[f"{name}_affinity"]))
            for name, weight in zip(inputs.VIEWS[: len(arrays.views)], weights, strict=False)
        ]
        logit = found["filtered_logit"]
        scores = fdc.fused_score(logit, scale, views, settings.rlc_weight, settings.pac_weight)
        return choose(scores, found["filtered_row"], labels)

    made: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {}
    made["raw"] = (raw, (parameters, kernels, arrays.heads.rows, arrays.heads.bias, labels))
    for name, views in (("single", arrays.views[:1]), ("dual", arrays.views)):
        if name == "single" or len(views) == 2:
            known = arrays._replace(views=views)
            made[name] = (calibrated, (parameters, kernels, known, scale, labels))
    return made


def measure(
    function: Callable[..., Any], arguments: Any, images: jax.Array, options: argparse.Namespace
) -> tuple[dict[str, Any], np.ndarray]:
    """Returns milliseconds a batch of each repeat with the peak memory, and the labels."""
    compiled = jax.jit(function).lower(arguments, images).compile()
    planned = compiled.memory_analysis()
    parts = ("argument", "output", "temp")
    peak = planned and sum(getattr(planned, f"{part}_size_in_bytes") for part in parts)
    for _ in range(options.warm_up):
        found = compiled(arguments, images)
    found.block_until_ready()
    milliseconds = []
    for _ in range(options.repeats):
        start = time.perf_counter()
        for _ in range(options.batches):
            found = compiled(arguments, images)
        found.block_until_ready()
        milliseconds.append(1e3 * (time.perf_counter() - start) / options.batches)
    return {"milliseconds": milliseconds, "peak_memory_bytes": peak}, np.asarray(found)


def of_run(folder: str) -> tuple[calibration.FDC, dict[str, Any]]:
    """Returns the calibrator of a finished run and what its results say of the encoder.

    Raises:
        InputError: not a finished run, or a learner whose encoder is not key and value kernels.
    """
    try:
        found = json.loads((Path(folder) / "results.json").read_text(encoding="utf-8"))
        about = {name: found[name] for name in ("benchmark", "learner")}
        about |= {name: found["config"][f"encoder.{name}"] for name in ("variant", "image_size")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"--run={folder}: expected a finished run ({error!r})") from error
    if about["learner"] == "rsiat":
        raise InputError(f"--run={folder}: expected a learner without an adapter, found rsiat")
    return calibration.load(Path(folder) / "calibrator.npz"), about


def measure_views(options: argparse.Namespace) -> dict[str, Any]:
    """Measures all views."""
    if options.run:
        calibrator, about = of_run(options.run)
    else:
        match = re.fullmatch(r"(\d+)x(\d+)", options.case)
        num_tasks, num_classes = map(int, match.groups()) if match else (0, 0)
        if num_tasks < 2 or num_classes % num_tasks:
            raise InputError(f"--case: expected tasks that divide the classes: {options.case}")
        if options.variant not in vit.VARIANTS:
            known = ", ".join(vit.VARIANTS)
            raise InputError(f"--variant: expected one of {known}, found {options.variant}")
        width = vit.VARIANTS[options.variant].width
        images = max(20 * num_classes, 2 * width * num_tasks // 3)
        calibrator = fitted(Point(num_tasks, images, num_classes, width, views=2))
        calibrator.finalize()
        about: dict[str, Any] = {"benchmark": None, "learner": None}
        about |= {"variant": options.variant, "image_size": options.image_size}
    size, variant = about["image_size"], about["variant"]
    encoder = argparse.Namespace(**vars(options) | {"variant": variant, "image_size": size})
    problem = synthetic.problem(encoder)
    model = problem.model
    parameters, kernels, images = jax.tree.map(
        jnp.asarray, (problem.parameters, problem.kernels, problem.images)
    )
    views, labels = {}, {}
    for name, (function, arguments) in programs(model, parameters, kernels, calibrator).items():
        views[name], labels[name] = measure(function, arguments, images, options)
    adapted = model.apply({"params": parameters}, images, kernels)
    pretrained = model.apply({"params": parameters}, images) if "dual" in views else None
    terms = calibrator.terms(adapted, pretrained)
    expected = {
        "raw": terms.raw().label,
        "single": terms.fuse(pretrained_view=False).label,
        "dual": terms.fuse().label,
    }
    ranks = [len(view.basis) for task in calibrator.tasks for view in task.views]
    return about | {
        "encoder": f"{variant}, {size} px, {options.precision}",
        "batch_size": options.batch_size,
        "warm_up_batches": options.warm_up,
        "batches": options.batches,
        "num_tasks": calibrator.num_tasks,
        "num_classes": sum(len(classes) for classes in calibrator.classes),
        "mean_rank": float(np.mean(ranks)),
        "views": views,
        "equal_labels": {name: float(np.mean(labels[name] == expected[name])) for name in views},
        "device": devices.describe(),
    }


def line(found: dict[str, Any]) -> str:
    """A result for the screen."""
    parts = []
    for name, each in found["views"].items():
        mean, raw = (np.mean(of["milliseconds"]) for of in (each, found["views"]["raw"]))
        increase = "" if name == "raw" else f" ({100 * (mean / raw - 1):+.1f} %)"
        memory = each["peak_memory_bytes"]
        memory = "" if memory is None else f", {memory / 2**20:.1f} MiB"
        parts.append(f"{name} {mean:.1f} ms{increase}{memory}")
    return (
        f"{found['encoder']}, batch {found['batch_size']}, {found['num_tasks']} tasks, "
        f"{found['num_classes']} classes, {found['device']}: {'; '.join(parts)}"
    )


def main() -> None:
    """Measures, prints a line and writes JSON."""
    turns = {"warm_up": 10, "batches": 20, "repeats": 3}
    parser = parser_of(__doc__, PROGRAM, **ENCODER, **turns, run="", case="20x100")
    options = parsed(parser)
    found = measure_views(options)
    print(line(found))
    write_report(PROGRAM, options, found)


if __name__ == "__main__":
    sys.exit(run(PROGRAM, main))
