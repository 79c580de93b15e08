"""Time of feature extraction, as a run extracts them: one view, and both in one pass.

    python -m benchmarks.extraction --variant=Ti/16 --image_size=128
    python -m benchmarks.extraction --precision=fast --batch_size=256 --output=extraction.json
    python -m benchmarks.extraction --variant=Ti/16 --image_size=128 --pytorch

Weights and images are random; images are on the host before the clock starts and features there
before it stops. With --pytorch the same encoders in PyTorch take turns with ours, increments merged
into their kernels, checked to have the same features. `jax_dual` places each image once and
encodes it twice, at about 2 times `jax`.
"""

import argparse
import sys
from typing import Any

from benchmarks import measure

PROGRAM = "benchmarks.extraction"


def ours(options: argparse.Namespace, dual: bool) -> measure.Contender:
    """Returns the extraction of `extraction.Extractor`."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from benchmarks import flops, synthetic
    from fdc_jax.data.batches import Batch
    from fdc_jax.features.extraction import Extractor
    from fdc_jax.machine import devices
    from fdc_jax.model import vit

    size, count = options.image_size, options.batch_size
    problem = synthetic.problem(options)
    mesh = devices.data_mesh()
    backbone, kernels = devices.replicate(
        mesh, jax.tree.map(jnp.asarray, (problem.parameters, problem.kernels))
    )
    views = (kernels, vit.pretrained_kernels(backbone)) if dual else (kernels,)
    extract: Any = Extractor(problem.model, mesh)
    batch = Batch(problem.images, np.zeros(count, np.int32), np.ones(count, np.float32))

    def repeat(batches: int = options.batches):
        return extract(backbone, views, [batch] * batches)

    names = ("adapted", "pretrained")
    outputs = {name: found.features for name, found in zip(names, repeat(1), strict=False)}
    images = len(views) * options.batches * count
    about = {
        "device": devices.describe(),
        "flops": images * flops.forward(problem.model.variant, size),
        "peak_flops": flops.peak(options.precision),
    }
    return measure.Contender(repeat, outputs, about)


def contender(options: argparse.Namespace, name: str) -> measure.Contender:
    """Returns the contender that a child process was started for."""
    if name.startswith("jax"):
        return ours(options, dual=name == "jax_dual")
    from benchmarks import pytorch

    return pytorch.extraction(options, name)


def main() -> None:
    """Measures and prints one line per contender."""
    flags = {**measure.ENCODER, **measure.TURNS, "batches": 2}
    parser = measure.parser_of(__doc__, PROGRAM, **flags)
    names = ("jax", "jax_dual")
    measure.contest(PROGRAM, parser, contender, names, lambda o: o.batches * o.batch_size)


if __name__ == "__main__":
    sys.exit(measure.run(PROGRAM, main))
