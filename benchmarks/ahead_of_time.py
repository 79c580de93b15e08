"""Compiles the programs of a run for a TPU or GPU that is not there, and says what it would do.

    python -m benchmarks.ahead_of_time --target=v5e --output=v5e.json
    python -m benchmarks.ahead_of_time --target=h100 --devices=4 --learner=sd_lora --batch_sizes=64

Targets are described in `benchmarks/targets.json`. XLA compiles for them on any Linux machine: for
TPUs with `jax[tpu]` installed, for GPUs with `jax[cuda12]`, both of the version of jax. Nothing
runs: memory is what the compiler plans, and times, of TPUs alone, are sums of its estimated cycles.
"""

import collections
import importlib.util
import json
import math
import os
import re
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from benchmarks import measure, synthetic
from fdc_jax import learners
from fdc_jax.calibration import fdc
from fdc_jax.calibration.compiled import padded_size
from fdc_jax.calibration.packed import PackedTasks
from fdc_jax.errors import InputError
from fdc_jax.features.extraction import Extractor
from fdc_jax.model import vit

PROGRAM = "benchmarks.ahead_of_time"
TARGETS = Path(__file__).with_name("targets.json")
STREAM = {"tasks": 20, "classes": 5}


class Program(NamedTuple):
    """A jitted function of a run, shapes and places of its arguments, and the images of a call."""

    function: Any
    arguments: tuple[Any, ...]
    images: int


def step(
    mesh: Mesh, model: Any, learner: str, batch_size: int, tasks: int, classes: int
) -> Program:
    """Returns the training step of a learner on a mesh."""
    method, update, rate = synthetic.learning(learner, model, (classes,) * tasks, mesh)

    def start(backbone):
        state = method.initial_state()
        frozen, trained = method.start_task(backbone, state, 0, jax.random.key(0))
        return frozen, trained, update.initialise(trained)

    backbone = vit.parameter_shapes(model, model.variant.image_size)
    batch = synthetic.noise(batch_size, model.variant.image_size, classes, seed=0)
    fixed = _placed(mesh, (backbone, *jax.eval_shape(start, backbone)))
    arguments = (*fixed, _placed(mesh, batch, np.ndarray), rate)
    return Program(update.step, arguments, batch_size)


def extraction(mesh: Mesh, model: Any, batch_size: int) -> Program:
    """Returns the extraction of features by one encoder."""
    backbone = vit.parameter_shapes(model, model.variant.image_size)
    fixed = _placed(mesh, (backbone, jax.eval_shape(vit.pretrained_kernels, backbone)))
    images = synthetic.noise(batch_size, model.variant.image_size, 1, seed=0).images
    function = Extractor(model, mesh).encode
    arguments = (fixed[0], _placed(mesh, images, np.ndarray), fixed[1])
    return Program(function, arguments, batch_size)


def scoring(mesh: Mesh, width: int, tasks: int, classes: int, rows: int) -> Program:
    """Returns FDC's scoring of a batch with two views, by subspaces of 128 directions a task."""

    def array(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    tasks, of_head = padded_size(tasks, 8), padded_size(classes, 4)
    classes = padded_size(classes + 1, 8) - 1
    shapes = ((width,), (128, width), (), (classes + 1, width), (classes,), (2,), (2,), (2,))
    statistics = [array(tasks, *shape) for shape in shapes]
    heads = array(tasks, 2 * of_head, width), array(tasks, of_head)
    views = [PackedTasks._make([*statistics, each]) for each in (heads, None)]
    ratios = [array(3)] * 2

    def score(views, ratios, *features):
        both = zip(features, views, strict=True)
        measured = [fdc.measure(each, of, 0.5, neighbours=1, normalised=False) for each, of in both]
        return fdc.fuse(measured, views, ratios, (1.0, 1.0), (True, 1.0, 1.0, False))

    first = Mesh(mesh.devices.ravel()[:1], mesh.axis_names)
    arguments = _placed(first, (views, ratios, array(rows, width), array(rows, width)))
    return Program(jax.jit(score), arguments, rows)


def _placed(mesh: Mesh, tree: Any, split: type | tuple = ()) -> Any:
    """Returns shapes with places: on every device, or leaves of a type split between them."""

    def place(leaf):
        spec = PartitionSpec("data") if isinstance(leaf, split) else PartitionSpec()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(place, tree)


# The device ---------------------------------------------------------------------------------------


def mesh_of(target: str, count: int) -> Mesh:
    """Returns a mesh of described devices; InputError says which package is missing for them."""
    described = json.loads(TARGETS.read_text())
    if target not in described:
        raise InputError(f"--target: expected one of {', '.join(described)}, found {target}")
    found = described[target]
    tpu = "topologies" in found
    module, extra = ("libtpu", "tpu") if tpu else ("jax_cuda12_plugin", "cuda12")
    if importlib.util.find_spec(module) is None:
        raise InputError(
            f"--target={target}: expected {module} to be installed (pip install "
            f"'jax[{extra}]=={jax.__version__}')"
        )
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
    os.environ |= {"TPU_ACCELERATOR_TYPE": "v5litepod-4", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    # Else plugins look for devices of their own.
    jax.config.update("jax_platforms", "cpu")
    if tpu:
        if count > 8:
            raise InputError(f"--devices: expected at most 8, found {count}")
        topology = topologies.get_topology_desc(found["topologies"][count > 4], "tpu")
    else:
        shape = {"target_config": found["description"], "topology": f"1x1x{count}"}
        topology = topologies.get_topology_desc("", "cuda", **shape)
    return Mesh(np.array(topology.devices[:count]), ("data",), axis_types=(AxisType.Auto,))


# What a program says ------------------------------------------------------------------------------


_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
_COLLECTIVE = (
    r"= (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)


def collectives(compiled: str) -> list[tuple[str, int]]:
    """Returns kind and bytes of what devices exchange, one for every exchanged array."""
    found = []
    for types, kind in re.findall(_COLLECTIVE, compiled):
        for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", types):
            size = math.prod(int(each) for each in shape.split(",") if each)
            found.append((kind, size * _BYTES[dtype]))
    return found


def cycles(compiled: str) -> int:
    """Returns a TPU's estimated cycles of a compiled program."""
    own: collections.Counter = collections.Counter()
    calls: dict[str, list[tuple[str, str]]] = collections.defaultdict(list)
    turns: dict[str, int] = {}  # of a loop, by the computation of its condition
    computation = entry = ""
    for line in compiled.splitlines():
        if opened := re.match(r"(ENTRY )?%?([\w.-]+) \(.*\{$", line):
            computation = opened[2]
            entry = computation if opened[1] else entry
        if estimate := re.search(r'estimated_cycles":"?(\d+)', line):
            own[computation] += int(estimate[1])
        if body := re.search(r"\bbody=%?([\w.-]+)", line):
            condition = re.search(r"\bcondition=%?([\w.-]+)", line)
            calls[computation].append((body[1], condition[1] if condition else ""))
        if bound := re.search(r"= s32\[\]\S* constant\((\d+)\)", line):
            turns[computation] = int(bound[1])
        if branches := re.search(r"branch_computations=\{(.*?)\}", line):
            # The last branch is the largest, and several devices take it.
            calls[computation].append((branches[1].split(", ")[-1].strip("%"), ""))

    def total(name: str) -> int:
        return own[name] + sum(turns.get(of, 1) * total(callee) for callee, of in calls[name])

    return total(entry)


def record_of(program: Program, target: str) -> dict[str, Any]:
    """Compiles a program and returns what the compiler plans and estimates."""
    described = json.loads(TARGETS.read_text())[target]
    clock = time.process_time()
    traced = program.function.trace(*program.arguments)
    lowered = traced.lower()
    # Without a device to try them on, some products find no tile sizes.
    options = {} if "topologies" in described else {"xla_gpu_enable_triton_gemm": False}
    executable = lowered.compile(compiler_options=options)
    seconds = time.process_time() - clock
    plan, cost = executable.memory_analysis(), executable.cost_analysis() or {}
    kinds = {"arguments": "argument", "outputs": "output", "aliased": "alias"}
    kinds |= {"temporary": "temp", "program": "generated_code"}
    sizes = {name: getattr(plan, f"{of}_size_in_bytes") for name, of in kinds.items()}
    sizes["peak"] = sum(sizes.values()) - 2 * sizes["aliased"]
    exchanged = collectives(executable.as_text())
    # The compiler counts the body of a loop once; of portions of a batch, or of LoDA's half steps,
    # it is nearly everything.
    loops = [each.params["length"] for each in traced.jaxpr.eqns if each.primitive.name == "scan"]
    turns = max(loops, default=1)
    found = {
        "turns": turns,
        "compile_processor_seconds": seconds,
        "memory_bytes": sizes | {"of_the_device": described["memory_bytes"]},
        "operations": turns * cost["flops"] if cost else None,
        "bytes_accessed": turns * cost["bytes accessed"] if cost else None,
        "collective_bytes": {
            kind: sum(size for each, size in exchanged if each == kind) for kind, _ in exchanged
        },
    }
    if "gigahertz" in described:
        total = cycles(executable.as_text()) / (1e9 * described["gigahertz"])
        found |= {"milliseconds": 1e3 * total, "images_per_second": program.images / total}
        if found["operations"]:
            found["share_of_peak"] = found["operations"] / total / (1e12 * described["teraflops"])
    return found


def main() -> None:
    """Prints a line per program, and writes all records after each."""
    flags = {"target": "v5e", "devices": "1", "learner": "all", "batch_sizes": "64,256"}
    encoder = {"variant": "B/16", "image_size": 224}
    options = measure.parsed(measure.parser_of(__doc__, PROGRAM, **flags, **encoder))
    meshes = [mesh_of(options.target, count) for count in measure.numbers(options, "devices")]
    names = learners.names(trained=True) if options.learner == "all" else options.learner.split(",")
    for name in names:
        learners.find(name)
    sizes, records = measure.numbers(options, "batch_sizes"), []
    if any(size % mesh.size for size in sizes for mesh in meshes):
        raise InputError(
            f"--batch_sizes: expected multiples of {options.devices}, found {options.batch_sizes}"
        )
    given = {"variant": options.variant, "image_size": options.image_size}
    for mesh in meshes:
        model = synthetic.encoder(options, "fast", mesh=mesh)
        for size in sizes:
            makers = {name: partial(step, mesh, model, name, size, **STREAM) for name in names}
            makers["extraction"] = partial(extraction, mesh, model, size)
            makers["scoring"] = partial(scoring, mesh, model.variant.width, **STREAM, rows=size)
            for name, make in makers.items():
                what = {"program": name, "batch_size": size, "devices": mesh.size}
                what |= given | STREAM | {"target": options.target, "attention": model.attention}
                found = record_of(make(), options.target)
                records.append(what | found)
                measure.write_report(PROGRAM, options, {"records": records})
                memory = found["memory_bytes"]["temporary"] / 2**30
                took = found.get("milliseconds", math.nan)
                print(f"{what}: {memory:.2f} GiB temporary, {took:.2f} ms", flush=True)


if __name__ == "__main__":
    sys.exit(measure.run(PROGRAM, main))
