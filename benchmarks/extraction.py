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
import os
import sys
from pathlib import Path
from typing import Any

# Run as a file, the repository's root is not on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import measure

PROGRAM = "benchmarks.extraction"
TOLERANCE = 1e-4


class Batches:
    """The same images over and over, without reading them."""

    def __init__(self, images, count: int):
        import numpy as np

        from fdc_jax.data.batches import Batch

        size = len(images)
        batch = Batch(images, np.zeros(size, np.int32), np.ones(size, np.float32))
        self._batches = [batch] * count
        self.input_wait_seconds = 0.0

    def __iter__(self):
        return iter(self._batches)


def ours(options: argparse.Namespace, dual: bool) -> measure.Contender:
    """Returns the extraction of `extraction.Extractor`."""
    import jax
    import jax.numpy as jnp

    from benchmarks import flops, synthetic
    from fdc_jax import devices
    from fdc_jax.features import Extractor
    from fdc_jax.model import vit

    size, count = options.image_size, options.batch_size
    problem = synthetic.problem(options.variant, size, count, options.precision)
    mesh = devices.data_mesh()
    backbone, kernels = devices.replicate(
        mesh, jax.tree.map(jnp.asarray, (problem.parameters, problem.kernels))
    )
    views = (kernels, vit.pretrained_kernels(backbone)) if dual else (kernels,)
    extract: Any = Extractor(problem.model, mesh)

    def repeat(batches: int = options.batches):
        images = Batches(problem.images, batches)
        return extract(backbone, views, images)

    names = ("adapted", "pretrained")
    outputs = {name: found.features for name, found in zip(names, repeat(1), strict=False)}
    passes = 2 if dual else 1
    about = {
        "device": devices.describe(),
        "flops": passes * options.batches * count * flops.forward(problem.model.variant, size),
        "peak_flops": flops.peak(options.precision, options.peak_tflops),
    }
    return measure.Contender(repeat, outputs, about)


def contender(options: argparse.Namespace) -> measure.Contender:
    """Returns the contender that a child process was started for."""
    if options.contender in ("jax", "jax_dual"):
        return ours(options, options.contender == "jax_dual")
    from benchmarks import pytorch_contenders

    return pytorch_contenders.extraction(options)


def main() -> None:
    """Measures and prints one line per contender."""
    parser = measure.arguments(__doc__, PROGRAM)
    parser.add_argument("--batches", type=int, default=2, help="that a repeat takes")
    parser.add_argument(
        "--pytorch", nargs="?", const="eager,compiled", default="", help="beside PyTorch"
    )
    options = parser.parse_args()
    if options.contender:
        from fdc_jax import devices

        if options.contender.startswith("jax"):
            devices.keep_freed_memory()
        measure.serve(lambda: contender(options), options.cores)
        return
    measure.check(options, "batches")
    names = ["jax", "jax_dual", *measure.pytorch_names(options.pytorch)]
    tolerance = TOLERANCE if options.precision == "parity" else None
    found = measure.compare(PROGRAM, names, options, tolerance)
    measure.finish(PROGRAM, options, found, options.batches * options.batch_size)


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    sys.exit(measure.run(PROGRAM, main))
