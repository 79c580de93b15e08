"""Inference cost of a finished run: the paper's protocol for Table app-latency.

    python -m fdc_jax latency WORKDIR...

Raw logits (baseline), FDC with E_T (single) and FDC with E_T and E_0 (dual) predict the same batch
of test images. Images and statistics are on the device before the clock starts. The report reads
the result, `latency.json` in the work directory.
"""

import argparse
import copy
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

import fdc_jax
from fdc_jax.calibration import FDC, fdc
from fdc_jax.calibration.settings import Switches, on_device
from fdc_jax.errors import InputError, Program
from fdc_jax.heads import products, unit
from fdc_jax.machine import devices
from fdc_jax.machine.files import write_json, write_manifest
from fdc_jax.machine.versions import versions
from fdc_jax.run.records import Contender, Latency

# The paper's protocol: images per batch; warm-up batches, repeats, and batches per repeat.
IMAGES, PROTOCOL = 64, (10, 3, 20)


def raw_labels(calibrator: FDC) -> Callable[[Sequence[Any]], Any]:
    """Returns a compiled function from [E_T(x)] to the labels of raw logits (paper, Eq. raw)."""
    heads, labels = [head.affine for head in calibrator.heads], np.concatenate(calibrator.classes)
    rows = jnp.concatenate([jnp.asarray(head.rows, jnp.float32) for head in heads])
    bias = jnp.concatenate([jnp.broadcast_to(head.bias, len(head.rows)) for head in heads])

    @jax.jit
    def choose(features, rows, bias):
        inputs = unit(features[0]) if heads[0].normalised else features[0]
        return jnp.asarray(labels)[jnp.argmax(products(inputs, rows) + bias, axis=1)]

    return lambda features: choose(features, rows, bias)


def fdc_labels(calibrator: FDC, views: int) -> Callable[[Sequence[Any]], Any]:
    """Returns a compiled function from features by view to FDC's labels (lines 16 to 20)."""
    copied = copy.deepcopy(calibrator)
    if views == 1:  # without the statistics of the pretrained view in memory
        copied.settings = msgspec.structs.replace(copied.settings, pretrained_view_weight=0.0)
        copied.tasks = [task._replace(views=task.views[:1]) for task in copied.tasks]
        copied.references, copied.widths = copied.references[:1], copied.widths[:1]
    _, packed = copied.batch(*(np.zeros((1, width), np.float32) for width in copied.widths))
    settings = on_device(copied.settings, Switches())
    starts = np.cumsum([0, *map(len, copied.classes)])[:-1]
    labels = np.concatenate(copied.classes)

    @jax.jit
    def choose(features, packed, settings):
        scores, rows = fdc.calibrated(*packed, *settings, *features)
        task = scores[:, : len(starts)].argmax(axis=1)
        return jnp.asarray(labels)[jnp.asarray(starts)[task] + rows[jnp.arange(len(rows)), task]]

    return lambda features: choose(features, packed, settings)


def timings(
    encode: Any, backbone: Any, views: Sequence[Any], images: Any, calibrator: FDC, protocol: Any
) -> dict[str, Contender]:
    """Times baseline, single and dual, in this order, as a process's memory peak never falls.

    Args:
        encode: compiled function `(backbone, images, view) -> features`.
        backbone: pretrained parameters.
        views: replaced parameters of E_T and E_0.
        images: one batch on the device.
        calibrator: fitted in both views.
        protocol: see `PROTOCOL`.

    Returns:
        By name, with a number of milliseconds per repeat.
    """
    warm_up, repeats, batches = protocol

    def run(choose: Callable[..., Any], count: int, times: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready(
            [choose([encode(backbone, images, v) for v in views[:count]]) for _ in range(times)]
        )
        return 1000.0 * (time.perf_counter() - start) / times

    timings = {}
    for name, count in {"baseline": 0, "single": 1, "dual": 2}.items():
        choose = fdc_labels(calibrator, count) if count else raw_labels(calibrator)
        run(choose, max(count, 1), warm_up)
        milliseconds = [run(choose, max(count, 1), batches) for _ in range(repeats)]
        peak = devices.peak_memory()
        timings[name] = Contender(milliseconds=milliseconds, peak_bytes=peak)
    return timings


def measure_run(run: Any, protocol: Any = PROTOCOL) -> Latency:
    """Times a finished run of `fdc_jax.open_run`; writes and returns `latency.json`.

    Raises:
        InputError: the run is not finished, has no FDC in two views, or its test images are gone.
    """
    calibrator = run.calibrator(FDC.name)
    if run.results is None or len(calibrator.widths) < 2:
        raise InputError(f"{run.folder}: expected a finished run with FDC in both views")
    rows = np.arange(run.results.num_test_images)[:IMAGES]
    encoders, views = run.encoders, [run.encoder(t) for t in (run.num_tasks, 0)]
    images = devices.split(encoders.learner.setup.mesh, run.test_images(rows))
    parts = encoders.extract.encode, encoders.backbone, views, images, calibrator
    measured = Latency(
        images=len(rows),
        device=devices.description(),
        versions=versions(),
        precision=run.config.precision,
        contenders=timings(*parts, protocol),
    )
    write_json(run.folder / "latency.json", measured)
    if run.exported:
        write_manifest(run.folder)
    return measured


def parser() -> Program:
    """Returns the options of the command."""
    text = "Time the inference of finished runs: raw, FDC by one and two views."
    program = Program("latency", text, "runs/digits")
    add = program.add_argument
    add("workdir", nargs="+", help="work directory of a run of one seed")
    add("--data", metavar="FOLDER", help="the images of the runs; digits need none")
    add("--weights", metavar="FILE", help="the pretrained encoder, if not in a cache")
    return program


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, or 2 after an error that has been printed as one line."""
    return parser().run(_run, arguments)


def _run(options: argparse.Namespace) -> None:
    for folder in options.workdir:
        measured = measure_run(fdc_jax.open_run(folder, options.data, options.weights))
        base, parts = measured.contenders["baseline"].peak_bytes, []
        for name, timing in measured.contenders.items():
            added = ""
            if base and timing.peak_bytes:
                added = f" (+{(timing.peak_bytes - base) / 2**20:.1f} MiB)"
            parts.append(f"{name} {np.mean(timing.milliseconds):.1f} ms{added}")
        if not options.quiet:
            batch = f"{measured.images} images on {measured.device}"
            memory = "" if base else "; memory is measured on accelerators only"
            print(f"{folder}: {', '.join(parts)} for {batch}{memory}")


if __name__ == "__main__":
    raise SystemExit("use python -m fdc_jax latency")
