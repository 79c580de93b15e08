"""Time of a training step of Cumulative-LoRA, the one that a run makes.

    python -m benchmarks.training_step --variant=Ti/16 --image_size=128
    python -m benchmarks.training_step --precision=fast --batch_size=256 --output=step.json
    python -m benchmarks.training_step --variant=Ti/16 --image_size=128 --pytorch

Weights and images are random; the images are on the device before the clock starts. With --pytorch
the same encoder, increments and head in PyTorch take turns with ours, checked to have the same
features, gradients and losses: `eager`, as the codes of the field compute them, and `expert`, what
PyTorch can do. Utilisation is the operations of the formula in `benchmarks/flops.py` a second over
those of a large product.
"""

import argparse
import sys

from benchmarks import measure

PROGRAM = "benchmarks.training_step"


def ours(options: argparse.Namespace) -> measure.Contender:
    """Returns the step of `learners.cumulative_lora`, on random weights and images."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from benchmarks import flops, synthetic
    from fdc_jax.data.batches import Batch
    from fdc_jax.machine import devices

    problem, stream = synthetic.problem(options), (synthetic.CLASSES,) * 2
    learner, update, _ = synthetic.learning("cumulative_lora", problem.model, stream)
    mesh, state = learner.setup.mesh, learner.initial_state()
    backbone = devices.replicate(mesh, jax.tree.map(jnp.asarray, problem.parameters))
    frozen, _ = learner.start_task(backbone, state, 0, jax.random.key(0))
    trained = jax.tree.map(jnp.asarray, {"increment": problem.increment, "head": problem.head})
    frozen, trained = devices.replicate(mesh, (frozen, trained))
    batch = Batch(problem.images, problem.labels, np.ones(options.batch_size, np.float32))
    batch = devices.split(mesh, batch)
    state = [trained, devices.replicate(mesh, update.initialise(trained))]

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
            problem.model.variant, options.image_size, synthetic.RANK, options.batch_size
        ),
        "peak_flops": flops.peak(options.precision),
    }
    return measure.Contender(repeat, outputs, about)


def contender(options: argparse.Namespace, name: str) -> measure.Contender:
    """Returns the contender that a child process was started for."""
    if name == "jax":
        return ours(options)
    from benchmarks import pytorch

    return pytorch.training_step(options, name)


def main() -> None:
    """Measures and prints one line per contender."""
    parser = measure.parser_of(__doc__, PROGRAM, **measure.ENCODER, **measure.TURNS)
    measure.contest(PROGRAM, parser, contender, ["jax"], lambda o: o.batch_size)


if __name__ == "__main__":
    sys.exit(measure.run(PROGRAM, main))
