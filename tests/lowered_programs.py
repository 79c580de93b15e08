"""Lowers the programs of a run for TPUs and GPUs, and looks at what four devices exchange.

XLA_FLAGS=--xla_force_host_platform_device_count=4 python -m tests.lowered_programs
"""

import re
from types import SimpleNamespace
from typing import Any

import jax
from jax._src.cudnn import fused_attention_stablehlo

from benchmarks import ahead_of_time
from fdc_jax import learners
from fdc_jax.machine import devices
from fdc_jax.model import vit

# Sizes of which none is one that another could be taken for.
VARIANT = vit.Variant(width=128, depth=2, heads=2, patch=8, image_size=32)
BATCH, TOKENS, TASKS, CLASSES = 12, 17, 3, 5
ACTIVATIONS = {BATCH, TOKENS, BATCH * TOKENS}
PLATFORMS = ("cuda", "tpu")
# Code for a processor need not be fast here.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def model_for(platform: str) -> vit.VisionTransformer:
    return vit.build(VARIANT, VARIANT.image_size, precision="fast", cudnn=platform == "cuda")


def trace(program: ahead_of_time.Program) -> Any:
    return program.function.trace(*program.arguments)


def lowered(traced: Any, platform: str) -> str:
    return traced.lower(lowering_platforms=(platform,)).as_text(debug_info=True)


def float32_products(lowered: str) -> list[tuple[set[int], str]]:
    """Returns sizes and names of the products for which an operand is float32, or becomes it."""
    known = dict(re.findall(r'^(#loc\d+) = loc\("(.*?)"', lowered, re.MULTILINE))
    pattern = r"stablehlo\.(?:dot_general|convolution).* : \((.*)\) -> .* loc\((#loc\d*)\)"
    products = []
    for types, location in re.findall(pattern, lowered):
        if re.search(r"tensor<(?:\d+x)*f32>", types):
            sizes = {int(size) for size in re.findall(r"(\d+)x", types)}
            products.append((sizes, known.get(location, "")))
    return products


def check_products(text: str, where: str) -> None:
    """Asserts that no product in the encoder has float32 activations.

    Those of kernels with increments are of parameters alone. Heads and losses are float32, one row
    an image. The gradient of attention's scores is float32 until it is multiplied: casting it
    before is estimated slower on TPUs; where cuDNN attends, this is left to the last block.
    """
    products = float32_products(text)
    assert products or where.startswith("extraction"), where  # Heads and losses have some.
    for sizes, name in products:
        scores = "bqhd,bkhd->bhqk" in name and "transpose(jvp" in name
        if sizes & ACTIVATIONS and not scores:
            assert "Transformer" not in name, (where, name)
            assert not sizes & {TOKENS, BATCH * TOKENS}, (where, name, sizes)


def check_exchange(lowered: Any, trained: Any, where: str) -> None:
    """Asserts that devices add up one gradient, and gather nothing larger than features."""
    compiled = lowered.compile(compiler_options=QUICK)
    features = 4 * BATCH * VARIANT.width
    # Sums over the batch beside it are as small.
    most = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(trained)) + 4 * features
    exchanged = ahead_of_time.collectives(compiled.as_text())
    reduced = sum(size for kind, size in exchanged if kind == "all-reduce")
    assert 0 < reduced <= most, (where, reduced, most)
    for kind, size in exchanged:
        assert kind == "all-reduce" or size <= features, (where, kind, size)


def forbidden():
    raise AssertionError("what is traced asks for the devices of this process")


if __name__ == "__main__":
    mesh = devices.data_mesh()
    assert mesh.size == 4
    jax.default_backend = jax.device_count = forbidden
    # All that tracing asks of cuDNN, which need not be here, is its version.
    fused_attention_stablehlo.cuda_versions = SimpleNamespace(cudnn_get_version=lambda: 91002)
    compiled = set()
    for name in learners.names(trained=True):
        program = ahead_of_time.step(mesh, model_for("tpu"), name, BATCH, TASKS, CLASSES)
        step = trace(program)
        check_products(lowered(step, "tpu"), f"{name}, tpu")
        on_processor = step.lower()
        if on_processor.as_text() not in compiled:  # Several learners have the same step.
            compiled.add(on_processor.as_text())
            check_exchange(on_processor, program.arguments[2], name)
    # Heads and losses are the same on GPUs, and the encoder is that of all learners.
    program = ahead_of_time.step(mesh, model_for("cuda"), "cumulative_lora", BATCH, TASKS, CLASSES)
    check_products(lowered(trace(program), "cuda"), "cuda")
    for platform in PLATFORMS:
        program = ahead_of_time.extraction(mesh, model_for(platform), BATCH)
        check_products(lowered(trace(program), platform), f"extraction, {platform}")
        for make_pass in ahead_of_time.PASSES.values():
            program = make_pass(mesh, model_for(platform), BATCH, TASKS, CLASSES)
            assert lowered(trace(program), platform)
        program = ahead_of_time.scoring(mesh, VARIANT.width, TASKS, CLASSES, BATCH)
        assert lowered(trace(program), platform)
    print("no program surprises")
