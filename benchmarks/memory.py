"""Memory of a run by the number of its tasks: learner state, training step, calibrator.

    python -m benchmarks.memory --tasks=1,10,100
    python -m benchmarks.memory --learner=sd_lora --variant=Ti/16 --image_size=128 --run_step

Every number of tasks is measured in a process of its own. Bytes of the learner's state, of what a
task trains and of the optimizer follow from abstract shapes; `live` are the arrays that are in fact
on the device once the last task is about to be trained. The compiled step states its arguments and
its temporary memory; with --run_step it is run once on noise, so that the process's peak includes
it. The calibrator is fitted on random features of the encoder's width.
"""

import argparse
import math
import sys
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import measure, synthetic
from benchmarks.calibration import Features, Point, fitted, peak_bytes
from fdc_jax import learners
from fdc_jax.machine import devices
from fdc_jax.model import vit

PROGRAM = "benchmarks.memory"
# Names here and in what the compiler plans.
OF_A_STEP = {
    **{"arguments": "argument", "outputs": "output", "aliased": "alias"},
    **{"temporary": "temp", "program": "generated_code"},
}


def tree_bytes(tree: Any) -> int:
    """Bytes of a tree of arrays or of their shapes; random keys are not counted."""
    return sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    )


def live_bytes() -> int:
    """Bytes of all arrays on the devices of this process, each buffer once."""
    return sum(array.nbytes for array in jax.live_arrays())


def of_tasks(options: argparse.Namespace, tasks: int) -> dict[str, Any]:
    """Measures one number of tasks in this process."""
    started = peak_bytes()
    model = measure.encoder(options)
    backbone = vit.initialise(model, options.image_size, jax.random.key(0))
    stream = (options.classes,) * tasks
    learner, setup, update, rate = synthetic.learning(options.learner, model, stream)
    encoder = live_bytes()
    state = jax.block_until_ready(learner.initial_state(setup))
    with_state = live_bytes()
    frozen, trained = learner.start(setup, backbone, state, 0, jax.random.key(0))
    frozen, trained = jax.tree.map(jnp.asarray, (frozen, trained))
    optimizer = jax.block_until_ready(update.initialise(trained))
    live = live_bytes()
    parts = {"trained": trained, "frozen": frozen, "optimizer": optimizer}
    task = {name: tree_bytes(tree) for name, tree in parts.items()}
    batch = measure.noise(options.batch_size, options.image_size, options.classes, seed=0)
    arguments = (backbone, frozen, trained, optimizer, batch, rate)
    report: Any = update.step.lower(*arguments).compile().memory_analysis()
    if options.run_step:
        jax.block_until_ready(update.step(*arguments))
    del arguments, parts, trained, optimizer
    trained_peak = peak_bytes()
    return {
        "tasks": tasks,
        "device": jax.devices()[0].device_kind,
        "encoder_bytes": encoder,
        "state_bytes": {"abstract": tree_bytes(state), "live": with_state - encoder},
        "task_bytes": task | {"live": live - with_state},
        "step_bytes": {
            name: getattr(report, f"{of}_size_in_bytes") for name, of in OF_A_STEP.items()
        },
        "calibrator": calibrator_bytes(options, tasks, setup.variant.width),
        "peak_bytes": {
            "started": started,
            "trained": trained_peak,
            "all": peak_bytes(),
            "device": devices.peak_memory(),
        },
    }


def calibrator_bytes(options: argparse.Namespace, tasks: int, width: int) -> dict[str, int]:
    """Fits a calibrator on random features and returns what it holds."""
    before = live_bytes()
    point = Point(tasks, tasks * options.images, tasks * options.classes, width, 2)
    calibrator = fitted(point)
    foreign = sum(view.nbytes for each in calibrator.foreign or [] for view in each)
    calibrator.finalize(release=True)
    calibrator.score(*Features(point, 0).chunk(0, min(64, options.images))[:2])
    return {
        "statistics": calibrator.storage_bytes,
        "foreign_residuals": foreign,
        "live_while_scoring": live_bytes() - before,
    }


def line(record: dict[str, Any]) -> str:
    """A record for the screen, in MiB."""
    mebibytes = {
        "encoder": record["encoder_bytes"],
        "state": record["state_bytes"]["live"],
        "a task's training": record["task_bytes"]["live"],
        "temporary in a step": record["step_bytes"]["temporary"],
        **record["calibrator"],
        "peak of the process": record["peak_bytes"]["all"],
    }
    return f"{record['tasks']} tasks, MiB: " + ", ".join(
        f"{name.replace('_', ' ')} {value / 2**20:.1f}" for name, value in mebibytes.items()
    )


def main() -> None:
    """Prints a line per number of tasks and writes them as JSON."""
    flags = {"tasks": "1,10,100", "learner": "cumulative_lora", "classes": 10, "images": 100}
    parser = measure.parser_of(__doc__, PROGRAM, **flags, **measure.ENCODER, run_step=False)
    options = measure.parsed(parser)
    learners.find(options.learner)
    records = []
    for tasks in measure.numbers(options, "tasks"):
        records.append(measure.in_a_process(of_tasks, options, tasks))
        print(line(records[-1]), flush=True)
    measure.write_report(PROGRAM, options, {"records": records})


if __name__ == "__main__":
    sys.exit(measure.run(PROGRAM, main))
