"""Inference cost of a run: the paper's protocol for Table app-latency.

    python -m fdc_jax.latency WORKDIR...

It compares the raw logits (baseline) with FDC by E_T alone (single) and by E_T and E_0 (dual), on
the last checkpoint of a run and its first test images. The images lie on the device before the
clock starts; TSF is folded into the heads. Each contender first runs some batches as a warm-up;
then the clock runs over repeats of several batches, from an idle device to an idle device. The
result is `latency.json` in the work directory, which the report reads.
"""

import argparse
import copy
import dataclasses
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, UInt8

import fdc_jax
from fdc_jax.calibration import FDC
from fdc_jax.errors import InputError, Program
from fdc_jax.heads import Affine, products, unit
from fdc_jax.machine import devices
from fdc_jax.machine.files import write_json, write_manifest
from fdc_jax.machine.versions import versions

IMAGES, WARM_UP, REPEATS, BATCHES = 64, 10, 3, 20  # the paper's

Call = Callable[[], Any]


def measure(
    contenders: Mapping[str, Callable[[], Call]],
    warm_up: int = WARM_UP,
    repeats: int = REPEATS,
    batches: int = BATCHES,
) -> dict[str, dict[str, Any]]:
    """Times the work on one batch, contender after contender.

    Args:
        contenders: by name, functions that place what a contender needs on the device and return
            its work on one batch. The process's peak memory never falls, so the contender that
            needs least comes first, in a process that has done nothing larger.
        warm_up: batches before the clock starts, at least 1.
        repeats: timings of each contender.
        batches: batches of each timing.

    Returns:
        For each contender `milliseconds` per batch, one number per repeat, and `peak_bytes`, the
        device's peak so far, None on a CPU.
    """
    timings = {}
    for name, prepare in contenders.items():
        call = prepare()
        for _ in range(warm_up):
            jax.block_until_ready(call())
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            results = [call() for _ in range(batches)]
            jax.block_until_ready(results)
            times.append(1000.0 * (time.perf_counter() - start) / batches)
        timings[name] = {"milliseconds": times, "peak_bytes": devices.peak_memory()}
    return timings


def contenders(
    encode: Callable[..., Any],
    backbone: Any,
    adapted: Any,
    pretrained: Any,
    images: UInt8[Any, "n s s 3"],
    fdc: FDC,
) -> dict[str, Callable[[], Call]]:
    """Returns the contenders `baseline`, `single` and `dual` for `measure`.

    Args:
        encode: `(backbone, images, encoder) -> features`, compiled.
        backbone: pretrained parameters.
        adapted: what E_T has in the place of parameters of E_0.
        pretrained: likewise for E_0.
        images: one batch, on the device.
        fdc: fitted in both views.
    """

    def baseline() -> Call:
        classify = classifier([head.affine for head in fdc.heads])
        return lambda: classify(encode(backbone, images, adapted))

    def single() -> Call:
        calibrator = adapted_alone(fdc)
        return lambda: calibrator.score(encode(backbone, images, adapted)).label

    def dual() -> Call:
        def call() -> Any:
            views = [encode(backbone, images, encoder) for encoder in (adapted, pretrained)]
            return fdc.score(*views).label

        return call

    return {"baseline": baseline, "single": single, "dual": dual}


def classifier(heads: Sequence[Affine]) -> Callable[[Any], Int[Any, " n"]]:
    """Returns the compiled choice of the largest logit among all heads (paper, Eq. raw)."""
    rows = jnp.concatenate([jnp.asarray(head.rows, jnp.float32) for head in heads])
    parts = [np.broadcast_to(head.bias, len(head.rows)) for head in heads]
    bias, normalised = jnp.asarray(np.concatenate(parts), jnp.float32), heads[0].normalised

    @jax.jit
    def choose(features):
        inputs = unit(features) if normalised else features
        return jnp.argmax(products(inputs, rows) + bias, axis=1)

    return choose


def adapted_alone(fdc: FDC) -> FDC:
    """Returns a copy of FDC that keeps and reads the statistics of the adapted view alone."""
    single = copy.deepcopy(fdc)
    single.settings = dataclasses.replace(fdc.settings, pretrained_view_weight=0.0)
    single.tasks = [task._replace(views=task.views[:1]) for task in fdc.tasks]
    single.references, single.widths = fdc.references[:1], fdc.widths[:1]
    return single


def of_run(run: Any, **protocol: int) -> dict[str, Any]:
    """Measures a finished run.

    Args:
        run: work directory, opened by `fdc_jax.open_run`.
        protocol: `warm_up`, `repeats` and `batches` of `measure`.

    Returns:
        `contenders` as `measure` returns them, and what else the numbers depend on.

    Raises:
        InputError: the run is not finished, has no FDC in two views, or its test images are gone.
    """
    fdc = run.calibrator(FDC.name)
    if run.results is None or len(fdc.widths) < 2:
        raise InputError(f"{run.folder}: expected a finished run with FDC in both views")
    rows = np.arange(run.results["num_test_images"])[:IMAGES]
    encoders = run.encoders
    images = devices.split(encoders.learner.setup.mesh, run.test_images(rows))
    adapted, pretrained = (run.encoder(t) for t in (run.num_tasks, 0))
    given = encoders.extract.encode, encoders.backbone, adapted, pretrained, images, fdc
    return {
        "images": len(rows),
        "device": devices.describe(),
        "precision": run.config["precision"],
        "versions": versions(),
        "contenders": measure(contenders(*given), **protocol),
    }


def parser() -> Program:
    """Returns the options of the command."""
    made = Program("latency", "Time the inference of finished runs: raw, FDC by one and two views.")
    made.add_argument("workdir", nargs="+", help="work directory of a run of one seed")
    made.add_argument("--data", metavar="FOLDER", help="the images of the runs; digits need none")
    made.add_argument("--weights", metavar="FILE", help="the pretrained encoder, if not in a cache")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, or 2 after an error that has been printed as one line."""
    return parser().run(_run, arguments)


def _run(options: argparse.Namespace) -> None:
    for folder in options.workdir:
        run = fdc_jax.open_run(folder, options.data, options.weights)
        measured = of_run(run)
        write_json(run.folder / "latency.json", measured)
        if run.exported:
            write_manifest(run.folder)
        if not options.quiet:
            print(f"{folder}: {describe(measured)}")


def describe(measured: Mapping[str, Any]) -> str:
    """Returns a line of text about the result of `of_run`."""
    base = measured["contenders"]["baseline"]
    parts = []
    for name, timing in measured["contenders"].items():
        text = f"{name} {np.mean(timing['milliseconds']):.1f} ms"
        if timing is not base and base["peak_bytes"] is not None:
            text += f" (+{(timing['peak_bytes'] - base['peak_bytes']) / 2**20:.1f} MiB)"
        parts.append(text)
    memory = "" if base["peak_bytes"] is not None else "; a processor does not tell its memory"
    return f"{', '.join(parts)} for {measured['images']} images on {measured['device']}{memory}"


if __name__ == "__main__":
    sys.exit(main())
