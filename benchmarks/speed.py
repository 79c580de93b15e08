"""Speed on random weights and images: training steps, extraction, latency, FDC's fit and score.

Every function yields rows of a table, and numbers to compare with those of our step in parity mode.
A row's share of peak is its operations per second, by the formula in `benchmarks/flops.py`, divided
by those of a large product in the same process.
"""

import json
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import flops, measure, synthetic
from benchmarks.calibration import Point, fit_and_score
from benchmarks.golden import Number
from fdc_jax import calibration, latency, learners
from fdc_jax.features.extraction import Extractor
from fdc_jax.learners import ewc_lora
from fdc_jax.learners.second_moments import attention_input_moments
from fdc_jax.machine import devices
from fdc_jax.machine.checkpoint import Checkpoints
from fdc_jax.model import vit

GIB = 2**30
REFERENCE = "step_parity"
# Tolerances of losses and gradients, relative to our step in parity mode.
TOLERANCES = {"parity": 1e-3, "fast": 0.05}


def row(
    what: str, seconds: dict[str, Any], images: int, operations: int = 0, peak: float = 0.0
) -> dict[str, Any]:
    """Returns a row of the table from the seconds that `measure.paced` returned."""
    # A processor is shared, so its peak counts processor time.
    spent = seconds["processor" if jax.default_backend() == "cpu" and operations else "clock"]
    memory = devices.peak_memory()
    return {
        "what": what,
        "images_per_second": images / seconds["clock"],
        "milliseconds": 1e3 * seconds["clock"],
        "teraflops": 1e-12 * operations / spent if operations else None,
        "share_of_peak": operations / spent / peak if peak else None,
        "peak_gib": memory / GIB if memory else None,
        "seconds": seconds,
    }


def agreement(options: Any, what: str, precision: str, numbers: dict[str, Any]) -> Iterator[Number]:
    """Yields the numbers of a step to compare with our step in parity mode, if it was measured."""
    path = Path(options.output) / f"{REFERENCE}.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    for name, expected in (rows[0]["numbers"] if rows else {}).items():
        yield Number(f"{name}, {what}", numbers[name], TOLERANCES[precision], expected)


def training_step(
    options: Any, precision: str, attention: str = "auto", learner: str = "", times: int = 1
) -> Iterator[Any]:
    """Yields the row of a learner's step, and comparisons of Cumulative-LoRA's, the default."""
    if attention == "cudnn" and not devices.have_cudnn(devices.data_mesh()):
        raise measure.Skipped("cuDNN's attention needs an NVIDIA GPU from Ampere on")
    model, size = synthetic.encoder(options, precision, attention), times * options.batch_size
    problem = synthetic.problem(model, options.image_size, size)
    stream = (synthetic.CLASSES,) * 2
    method, update, rate = synthetic.learning(learner or "cumulative_lora", model, stream)
    mesh, state = method.setup.mesh, method.initial_state()
    backbone = devices.replicate(mesh, jax.tree.map(jnp.asarray, problem.parameters))
    frozen, trained = method.start_task(backbone, state, 0, jax.random.key(0))
    if not learner:
        trained = {"increment": problem.increment, "head": problem.head}
        trained = jax.tree.map(jnp.asarray, trained)
    frozen, trained = devices.replicate(mesh, (frozen, trained))
    carried = [trained, devices.replicate(mesh, update.initialise(trained))]
    batch, step, more = devices.split(mesh, problem.batch), update.step, {}
    if hasattr(step, "lower"):  # LoDA's step is several programs
        lower: Any = step
        step, seconds = measure.timed(
            lambda: lower.lower(backbone, frozen, *carried, batch, rate).compile()
        )
        plan = step.memory_analysis()
        more = {"temporary_gib": plan.temp_size_in_bytes / GIB, "compile_seconds": seconds[0]}

    def call() -> Any:
        *carried[:], loss = step(backbone, frozen, *carried, batch, rate)
        return loss

    name = learner or f"training step, {precision}, {model.attention}, batch {size}"
    if not learner:
        numbers = {"loss": float(call())}
        # Adam's first moment after one step is a tenth of the gradient.
        moment: Any = carried[1].mu["increment"]  # pyright: ignore[reportAttributeAccessIssue]
        for part, factor in (("key", "A"), ("value", "B")):
            norm = 10.0 * jnp.linalg.norm(moment[part][factor].ravel())
            numbers[f"gradient of {part} {factor}"] = float(norm)
        numbers["second loss"] = float(call())
        more |= {"numbers": numbers}
        if times == 1:
            yield from agreement(options, name, precision, numbers)
    count = flops.training_step(model.variant, options.image_size, synthetic.RANK, size)
    operations: Any = () if learner else (count, flops.peak(precision))
    yield row(name, measure.paced(options, call), size, *operations) | more


def steps_of_learners(options: Any) -> Iterator[Any]:
    """Yields the step of every learner in fast mode."""
    for name in learners.names(trained=True)[: 1 if measure.is_trial(options) else None]:
        yield from training_step(options, "fast", learner=name)


def passes_of_learners(options: Any) -> Iterator[Any]:
    """Yields a batch of the passes that learners make before and after the training of a task."""
    model, batch, backbone, (kernels, _) = encoders(options, "fast", options.batch_size)
    learner, _, _ = synthetic.learning("ewc_lora", model, (synthetic.CLASSES,) * 2)
    setup, placed = learner.setup, devices.split(learner.setup.mesh, batch)
    problem = synthetic.problem(model, options.image_size, options.batch_size)

    def moments() -> Any:
        return attention_input_moments(setup, backbone, kernels, [placed])[0]

    precise = vit.in_float32(model)
    fixed = (backbone, kernels, problem.head, setup.class_mask(0), placed)
    squares = [jax.tree.map(jnp.zeros_like, kernels)]

    def squared_gradients() -> Any:
        squares[0] = ewc_lora.add_squared_gradients(precise, "per_sample", *fixed, squares[0])
        return squares[0]

    for what, call in (("second moments", moments), ("squared gradients", squared_gradients)):
        _, compilation = measure.timed(call)
        seconds = measure.paced(options, call)
        more = {"compile_seconds": compilation[0]}
        yield row(f"{what}, batch {options.batch_size}", seconds, options.batch_size) | more


def checkpoints(options: Any) -> Iterator[Any]:
    """Yields the time for which a checkpoint within a task stops training, and until it is written.

    The learners keep increments of 20 tasks, and all parameters beside a Gaussian of every class.
    """
    model, tasks = synthetic.encoder(options, "fast"), 2 if measure.is_trial(options) else 20
    backbone = synthetic.parameters(model, options.image_size)
    rng = np.random.default_rng(0)
    for name in ("cumulative_lora", "slca"):
        learner, update, _ = synthetic.learning(name, model, (10,) * tasks)
        state = learner.initial_state()
        _, trained = learner.start_task(backbone, state, 0, jax.random.key(0))
        tree = {"state": state, "trained": trained, "optimizer": update.initialise(trained)}

        def noise(leaf):  # zeros would be compressed
            values = rng.standard_normal(leaf.shape, np.float32)
            return jnp.asarray(values) if isinstance(leaf, jax.Array) else values

        tree = devices.replicate(learner.setup.mesh, jax.tree.map(noise, tree))
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) / 2**20
        stops, writes = [], []
        with tempfile.TemporaryDirectory(dir=options.output) as folder:
            store = Checkpoints(folder)
            for number in range(6):
                _, stopped = measure.timed(partial(store.save, number, {}, tree, {}))
                _, written = measure.timed(store.wait)
                stops.append(stopped)
                writes.append(stopped + written)
        for what, seconds in (("stops training", stops), ("is written", writes)):
            repeats = np.stack(seconds[1:])
            medians = measure.named(np.median(repeats, axis=0)) | {"all": repeats.tolist()}
            yield {
                "what": f"checkpoint of {name}, {size:.0f} MiB, {what}",
                "milliseconds": 1e3 * medians["clock"],
                "seconds": medians,
            }


def encoders(options: Any, precision: str, size: int) -> Any:
    """Returns a model and a batch, and on the devices E_0's parameters and E_T's, E_0's kernels."""
    model, mesh = synthetic.encoder(options, precision), devices.data_mesh()
    problem = synthetic.problem(model, options.image_size, size)
    arrays = jax.tree.map(jnp.asarray, (problem.parameters, problem.kernels))
    backbone, kernels = devices.replicate(mesh, arrays)
    return model, problem.batch, backbone, (kernels, vit.pretrained_kernels(backbone))


def extraction(options: Any) -> Iterator[Any]:
    """Yields extraction by one encoder and by two, from images to features on the host."""
    size = 4 * options.batch_size
    model, batch, backbone, views = encoders(options, "fast", size)
    extract, peak = Extractor(model, devices.data_mesh()), flops.peak("fast")
    count = flops.forward(model.variant, options.image_size)
    for used in (1, 2):
        arguments: Any = (backbone, views[:used], [batch] * 4)
        seconds = measure.paced(options, partial(extract, *arguments))
        what = f"extraction, fast, {model.attention}, batch {size}, views: {used}"
        yield row(what, seconds, 4 * size, 4 * used * size * count, peak)


def latencies(options: Any) -> Iterator[Any]:
    """Yields the latency of a batch by the paper's protocol: without FDC, with one view, with two.

    FDC is fitted on ten tasks of ten classes; a trial has two tasks, and parity mode alone.
    """
    size, width = options.batch_size, vit.VARIANTS[options.variant].width
    point, precisions, protocol = (10, 1000, 100), ("parity", "fast"), latency.PROTOCOL
    if measure.is_trial(options):
        point, precisions, protocol = (2, 200, 20), ("parity",), (1, 3, 2)
    point, fdc, mesh = Point(*point, width, 2), calibration.FDC(), devices.data_mesh()
    for task in range(point.tasks):
        fdc.fit_task(**point.features(task))
    fdc.finalize()
    for precision in precisions:
        model, batch, backbone, views = encoders(options, precision, size)
        images, encode = devices.split(mesh, batch.images), Extractor(model, mesh).encode
        timings = latency.timings(encode, backbone, views, images, fdc, protocol)
        base, least = timings["baseline"].milliseconds, timings["baseline"].peak_bytes
        for name, record in timings.items():
            clock, peak = np.median(record.milliseconds), record.peak_bytes
            more = {"times_baseline": clock / np.median(base), "all": record.milliseconds}
            if peak and least and precision == "parity":  # The peak of a process never falls.
                more["mib_over_baseline"] = (peak - least) / 2**20
            seconds = {"clock": clock / 1e3}
            yield row(f"latency, {precision}, {name}, batch {size}", seconds, size) | more


def statistics(options: Any) -> Iterator[Any]:
    """Yields fit and score of FDC for 20 tasks of 2,500 images in two views, on the device.

    Tasks and images are fewer if --batch_size is below 64.
    """
    tasks = min(20, options.batch_size)
    images, width = tasks * min(2500, 40 * options.batch_size), vit.VARIANTS[options.variant].width
    for what in ("cold", "warm"):
        point = Point(tasks, images, 10 * tasks, width, 2)
        record = fit_and_score(point, "fdc", 5, put=jax.device_put)
        total = record["fit_seconds"]["clock"] + record["finalize_seconds"]["clock"]
        yield row(f"FDC's fit, {what}: {images} images", {"clock": total}, images) | record
        for size, times in record["score_milliseconds"].items():
            seconds = {"clock": 1e-3 * times["clock"]}
            yield row(f"FDC's score, {what}: batch {size}", seconds, int(size))
