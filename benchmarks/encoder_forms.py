"""Time, memory and compilation of ways to run the encoder's blocks forward and backward.

    python -m benchmarks.encoder_forms --precision=fast --cudnn
    python -m benchmarks.encoder_forms --variant=Ti/16 --image_size=128 --batch_size=16

What is measured is the loss and its gradient by a task's increment and head, without the optimiser:
`unrolled`, block after block, as the library does it; `scanned`, by `jax.lax.scan` over parameters
that lie stacked in memory; `rematerialised`, unrolled, where the backward pass computes a block's
activations again; `cudnn` (with --cudnn), unrolled with `config.encoder.attention=cudnn`. They take
turns and are checked to have the same losses and gradients.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

# Run as a file, the repository's root is not on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import measure

PROGRAM = "benchmarks.encoder_forms"
FORMS = ("unrolled", "scanned", "rematerialised")
# Sums of squares in the gradients of float32 differ by their order.
TOLERANCE = 1e-4


def stacked(parameters: Any, depth: int) -> Any:
    """Returns encoder parameters with those of all blocks but the last one as one tree."""
    import jax
    import jax.numpy as jnp

    transformer = dict(parameters["Transformer"])
    blocks = [transformer.pop(f"encoderblock_{block}") for block in range(depth - 1)]
    transformer["stacked"] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)
    return parameters | {"Transformer": transformer}


def in_form(form: str, call: Any, arguments: tuple[Any, ...], options: dict, context: Any) -> Any:
    """Runs the blocks in another form; a method interceptor of Flax."""
    import flax.linen as nn
    import jax
    import jax.numpy as jnp

    from fdc_jax.model import vit

    module = context.module
    if not isinstance(module, vit._Transformer):
        return call(*arguments, **options)
    x: Any = arguments[0]
    leaves = arguments[1:3]
    parameters, last = module.variables["params"], module.variant.depth - 1
    x = vit._PositionEmbedding().apply({"params": parameters["posembed_input"]}, x)

    def block(x, parameters, leaves, is_last=False):
        of_module = (module.variant, module.dtype, module.precision, is_last, module.attention)
        return vit._Block(*of_module).apply({"params": parameters}, x, *leaves, None, 0.0)

    def leaves_at(place: Any):
        return jax.tree.map(lambda leaf: leaf[place], leaves)

    if form == "scanned":
        each = (parameters["stacked"], leaves_at(slice(last)))
        x, _ = jax.lax.scan(lambda x, one: (block(x, *one), None), x, each)
    else:
        for number in range(last):
            own = parameters[f"encoderblock_{number}"]
            x = jax.checkpoint(block)(x, own, leaves_at(number))
    x = block(x, parameters[f"encoderblock_{last}"], leaves_at(last), True)
    norm = nn.LayerNorm(epsilon=1e-6, dtype=jnp.float32)
    return norm.apply({"params": parameters["encoder_norm"]}, x[:, 0])


def contender(options: argparse.Namespace) -> measure.Contender:
    """Returns the form that a child process was started for."""
    from functools import partial

    import flax.linen as nn
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    from benchmarks import flops, synthetic
    from fdc_jax import devices
    from fdc_jax.model import vit

    form, size, count = options.contender, options.image_size, options.batch_size
    problem = synthetic.problem(options.variant, size, count, options.precision)
    attention = "cudnn" if form == "cudnn" else "xla"
    model = vit.build(options.variant, size, precision=options.precision, attention=attention)
    parameters: Any = jax.tree.map(jnp.asarray, problem.parameters)
    if form == "scanned":
        parameters = stacked(parameters, model.variant.depth)
    frozen = (parameters, jax.tree.map(jnp.asarray, problem.pretrained))
    trained = jax.tree.map(jnp.asarray, (problem.increment, problem.head))
    images, labels = jnp.asarray(problem.images), jnp.asarray(problem.labels)

    def loss(trained, frozen):
        increment, head = trained
        parameters, kernels = frozen
        features = model.apply({"params": parameters}, images, kernels, increment)
        losses = optax.softmax_cross_entropy_with_integer_labels(head.logits(features), labels)
        return losses.mean()

    step = jax.jit(jax.value_and_grad(loss))
    clock = time.perf_counter()
    if form in ("unrolled", "cudnn"):
        compiled = step.lower(trained, frozen).compile()
    else:
        with nn.intercept_methods(partial(in_form, form)):
            compiled = step.lower(trained, frozen).compile()
    seconds = time.perf_counter() - clock

    def repeat():
        return jax.block_until_ready(compiled(trained, frozen))

    value, gradients = repeat()
    outputs = {str(i): np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(gradients))}
    memory: Any = compiled.memory_analysis()
    about = {
        "device": devices.describe(),
        "compile_seconds": seconds,
        "temporary_bytes": memory.temp_size_in_bytes,
        "flops": flops.training_step(model.variant, size, synthetic.RANK, count),
        "peak_flops": flops.peak(options.precision, options.peak_tflops),
    }
    return measure.Contender(repeat, outputs | {"loss": np.asarray(value)}, about)


def main() -> None:
    """Measures and prints two lines per form."""
    parser = measure.arguments(__doc__, PROGRAM)
    parser.add_argument("--cudnn", action="store_true", help="on NVIDIA GPUs, with precision=fast")
    options = parser.parse_args()
    if options.contender:
        from fdc_jax import host_memory

        host_memory.keep_freed_memory()
        measure.serve(lambda: contender(options), options.cores)
        return
    measure.check(options)
    tolerance = TOLERANCE if options.precision == "parity" else None
    names = [*FORMS, *(["cudnn"] if options.cudnn else [])]
    found = measure.compare(PROGRAM, names, options, tolerance)
    for name, each in found.items():
        mebibytes = each["temporary_bytes"] / 2**20
        print(f"{name}: compiled in {each['compile_seconds']:.1f} s, {mebibytes:.0f} MiB beside")
    measure.finish(PROGRAM, options, found, options.batch_size)


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    sys.exit(measure.run(PROGRAM, main))
