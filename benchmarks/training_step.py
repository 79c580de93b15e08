"""Time of a training step of Cumulative-LoRA, the one that a run makes.

    python -m benchmarks.training_step --variant=Ti/16 --image_size=128
    python -m benchmarks.training_step --precision=fast --batch_size=256 --output=step.json
    python -m benchmarks.training_step --variant=Ti/16 --image_size=128 --pytorch

Weights and images are random; the images are on the device before the clock starts. With --pytorch
the same encoder, increments and head in PyTorch take turns with ours, checked to have the same
features, gradients and losses: `eager`, with increments as the codes of the field compute them;
`factors`, eager with the cheaper increments; `compiled`, `eager` through torch.compile. Utilisation
is the operations of the formula in `benchmarks/flops.py` over what the device can do at most.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

# Run as a file, the repository's root is not on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import measure

PROGRAM = "benchmarks.training_step"
RATES = {"increment": 5e-4, "head": 5e-3}
# Sums of squares in the gradients of float32 differ by their order.
TOLERANCE = 1e-4


class Prepared(NamedTuple):
    """A step of Cumulative-LoRA and what it takes, on the devices."""

    setup: Any
    update: Any
    backbone: Any
    frozen: Any
    trained: Any
    batch: Any


def prepared(options: argparse.Namespace) -> Prepared:
    """Returns the step of `learners.cumulative_lora` with random weights and images."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from benchmarks import synthetic
    from configs import base
    from fdc_jax import devices
    from fdc_jax.data.batches import Batch
    from fdc_jax.learners import cumulative_lora, training

    size, count = options.image_size, options.batch_size
    problem = synthetic.problem(options.variant, size, count, options.precision)
    config: Any = base.get_config()
    config.encoder.variant = options.variant
    config.train.increment_learning_rate = RATES["increment"]
    config.train.head_learning_rate = RATES["head"]
    setup = training.Setup(problem.model, (synthetic.CLASSES,) * 2, config)
    mesh = devices.data_mesh()
    backbone = devices.replicate(mesh, jax.tree.map(jnp.asarray, problem.parameters))
    frozen, _ = cumulative_lora.start(
        setup, backbone, cumulative_lora.initial_state(setup), 0, jax.random.key(0)
    )
    trained = jax.tree.map(jnp.asarray, {"increment": problem.increment, "head": problem.head})
    frozen, trained = devices.replicate(mesh, (frozen, trained))
    batch = Batch(problem.images, problem.labels, np.ones(count, np.float32))
    batch = devices.split(mesh, batch)
    return Prepared(setup, cumulative_lora.update(setup), backbone, frozen, trained, batch)


def ours(options: argparse.Namespace) -> measure.Contender:
    """Returns the step of `learners.cumulative_lora`."""
    import numpy as np

    from benchmarks import flops, synthetic
    from fdc_jax import devices

    setup, update, backbone, frozen, trained, batch = prepared(options)
    state = [trained, devices.replicate(devices.data_mesh(), update.initialise(trained))]

    def repeat():
        *state[:], loss = update.step(backbone, frozen, *state, batch, 1.0)
        return loss.block_until_ready()

    first = repeat()
    # After one step, Adam's first moment is a tenth of the gradient.
    moment = state[1].mu["increment"]
    outputs = {
        "A": 10.0 * np.asarray(moment["key"]["A"]),
        "B": 10.0 * np.asarray(moment["value"]["B"]),
    }
    # The next step takes the moment's memory.
    outputs["loss"] = np.asarray([first, repeat()])
    about = {
        "device": devices.describe(),
        "flops": flops.training_step(
            setup.variant, options.image_size, synthetic.RANK, options.batch_size
        ),
        "peak_flops": flops.peak(options.precision, options.peak_tflops),
    }
    return measure.Contender(repeat, outputs, about)


def contender(options: argparse.Namespace) -> measure.Contender:
    """Returns the contender that a child process was started for."""
    if options.contender == "jax":
        return ours(options)
    from benchmarks import pytorch_contenders

    return pytorch_contenders.training_step(options, RATES)


def main() -> None:
    """Measures and prints one line per contender."""
    parser = measure.arguments(__doc__, PROGRAM)
    parser.add_argument(
        "--pytorch", nargs="?", const="eager,factors,compiled", default="", help="beside PyTorch"
    )
    options = parser.parse_args()
    if options.contender:
        from fdc_jax import devices

        if options.contender == "jax":
            devices.keep_freed_memory()
        measure.serve(lambda: contender(options), options.cores)
        return
    measure.check(options)
    names = ["jax", *measure.pytorch_names(options.pytorch)]
    tolerance = TOLERANCE if options.precision == "parity" else None
    found = measure.compare(PROGRAM, names, options, tolerance)
    measure.finish(PROGRAM, options, found, options.batch_size)


if __name__ == "__main__":
    # Importing nothing that starts a thread before the allocator's options are set.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    sys.exit(measure.run(PROGRAM, main))
