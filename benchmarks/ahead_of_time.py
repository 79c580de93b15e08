"""Compiler's estimates of a run's programs on a TPU or GPU that is not connected.

    python -m benchmarks.ahead_of_time --target=v5e --output=v5e.json
    python -m benchmarks.ahead_of_time --target=h100 --devices=4 --learner=sd_lora --batch_sizes=64

`benchmarks/targets.json` describes the targets. XLA compiles for them on any Linux machine, for
TPUs if `jax[tpu]` is installed, for GPUs if `jax[cuda12]` is, both in the version of jax. No
program runs. Memory is the compiler's plan; times, for TPUs only, are sums of estimated cycles.
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
from fdc_jax.calibration.settings import Settings, Switches, on_device
from fdc_jax.calibration.statistics import Task, View, pack
from fdc_jax.errors import InputError
from fdc_jax.features.extraction import Extractor
from fdc_jax.heads import LinearHead
from fdc_jax.learners import ewc_lora, second_moments
from fdc_jax.model import operations, vit

PROGRAM = "benchmarks.ahead_of_time"
TARGETS = Path(__file__).with_name("targets.json")
STREAM = {"tasks": 20, "classes": 5}


class Program(NamedTuple):
    """A jitted function, the shapes and shardings of its arguments, and the images per call."""

    function: Any
    arguments: tuple[Any, ...]
    images: int
    counted: bool = True  # False: loops within loops, whose operations the compiler counts once


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
    fixed = _sharded(mesh, (backbone, *jax.eval_shape(start, backbone)))
    arguments = (*fixed, _sharded(mesh, batch, np.ndarray), rate)
    return Program(update.step, arguments, batch_size)


def extraction(mesh: Mesh, model: Any, batch_size: int) -> Program:
    """Returns the extraction of features by one encoder."""
    backbone = vit.parameter_shapes(model, model.variant.image_size)
    fixed = _sharded(mesh, (backbone, jax.eval_shape(vit.pretrained_kernels, backbone)))
    images = synthetic.noise(batch_size, model.variant.image_size, 1, seed=0).images
    function = Extractor(model, mesh).encode
    arguments = (fixed[0], _sharded(mesh, images, np.ndarray), fixed[1])
    return Program(function, arguments, batch_size)


def attention_moments(mesh: Mesh, model: Any, batch_size: int, tasks: int, classes: int) -> Program:
    """Returns the second moments of attention inputs, a pass before or after a task."""
    variant, precise = model.variant, vit.in_float32(model)
    backbone = vit.parameter_shapes(model, variant.image_size)
    kernels = jax.eval_shape(vit.pretrained_kernels, backbone)
    total = jax.ShapeDtypeStruct((variant.depth, variant.width, variant.width), jnp.float32)
    sums = (total, jax.ShapeDtypeStruct((), jnp.float32))
    batch = synthetic.noise(batch_size, variant.image_size, classes, seed=0)
    size = operations.images_together(mesh, batch_size, variant.image_size, variant.patch)
    arguments = _sharded(mesh, (backbone, kernels, batch, sums), np.ndarray)
    return Program(second_moments.add_batch, (precise, size, *arguments), batch_size, False)


def squared_gradients(mesh: Mesh, model: Any, batch_size: int, tasks: int, classes: int) -> Program:
    """Returns EWC-LoRA's sum of squared gradients of images, its pass after a task."""
    method, _, _ = synthetic.learning("ewc_lora", model, (classes,) * tasks, mesh)
    precise, side = vit.in_float32(model), model.variant.image_size
    backbone = vit.parameter_shapes(model, side)

    def start(backbone):
        state = method.initial_state()
        frozen, trained = method.start_task(backbone, state, 0, jax.random.key(0))
        return frozen["kernels"], trained["head"], frozen["class_mask"]

    fixed = jax.eval_shape(start, backbone)
    batch = synthetic.noise(batch_size, side, classes, seed=0)
    placed = _sharded(mesh, (backbone, *fixed, batch, fixed[0]), np.ndarray)
    arguments = (precise, "per_sample", *placed)
    return Program(ewc_lora.add_squared_gradients, arguments, batch_size, False)


# Passes before and after a task, which stand among the names of learners.
PASSES = {"attention_moments": attention_moments, "squared_gradients": squared_gradients}


def scoring(mesh: Mesh, width: int, tasks: int, classes: int, rows: int) -> Program:
    """Returns FDC's scoring of `rows` images in two views, with 128 directions per task."""
    view = View(np.zeros(width), np.zeros((128, width)), np.zeros((classes, width)))
    heads = [LinearHead(np.zeros((classes, width)), np.zeros(classes))] * tasks
    packed = pack([Task([view, view])] * tasks, [np.ones(classes)] * tasks, heads, tasks)
    features = [np.zeros((rows, width), np.float32)] * 2
    ratios = [fdc.log_ratio(1.0, 1.0)] * 2
    arguments = packed, ratios, *on_device(Settings(), Switches()), *features
    first = Mesh(mesh.devices.ravel()[:1], mesh.axis_names)
    return Program(fdc.calibrated, _sharded(first, jax.device_put(arguments)), rows)


def _sharded(mesh: Mesh, tree: Any, split: type | tuple = ()) -> Any:
    """Returns the tree's shapes, leaves of type `split` sharded by row, all others replicated."""

    def shape(leaf):
        spec = PartitionSpec("data") if isinstance(leaf, split) else PartitionSpec()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(shape, tree)


# The device ---------------------------------------------------------------------------------------


def mesh_of(target: str, count: int) -> Mesh:
    """Returns a mesh of `count` devices; raises InputError if a package is missing for them."""
    targets = json.loads(TARGETS.read_text())
    if target not in targets:
        raise InputError(f"--target: expected one of {', '.join(targets)}, found {target}")
    described = targets[target]
    tpu = "topologies" in described
    module, extra = ("libtpu", "tpu") if tpu else ("jax_cuda12_plugin", "cuda12")
    if importlib.util.find_spec(module) is None:
        raise InputError(
            f"--target={target}: expected {module} to be installed (pip install "
            f"'jax[{extra}]=={jax.__version__}')"
        )
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
    os.environ |= {"TPU_ACCELERATOR_TYPE": "v5litepod-4", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    # Otherwise the plugins search for connected devices.
    jax.config.update("jax_platforms", "cpu")
    if tpu:
        if count > 8:
            raise InputError(f"--devices: expected at most 8, found {count}")
        topology = topologies.get_topology_desc(described["topologies"][count > 4], "tpu")
    else:
        shape = {"target_config": described["description"], "topology": f"1x1x{count}"}
        topology = topologies.get_topology_desc("", "cuda", **shape)
    return Mesh(np.array(topology.devices[:count]), ("data",), axis_types=(AxisType.Auto,))


# Compiled programs --------------------------------------------------------------------------------


_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
_COLLECTIVE = (
    r"= (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)


def collectives(compiled: str) -> list[tuple[str, int]]:
    """Returns (kind, bytes) of every array that devices exchange."""
    arrays = []
    for types, kind in re.findall(_COLLECTIVE, compiled):
        for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", types):
            size = math.prod(int(length) for length in shape.split(",") if length)
            arrays.append((kind, size * _BYTES[dtype]))
    return arrays


def cycles(compiled: str) -> int:
    """Returns the estimated cycles of a program compiled for a TPU, loops by their length."""
    own: collections.Counter = collections.Counter()
    calls: dict[str, list[tuple[str, str]]] = collections.defaultdict(list)
    turns: dict[str, int] = {}  # iterations of a loop, by its condition's computation
    computation = entry = ""
    for line in compiled.splitlines():
        if header := re.match(r"(ENTRY )?%?([\w.-]+) \(.*\{$", line):
            computation = header[2]
            entry = computation if header[1] else entry
        if estimate := re.search(r'estimated_cycles":"?(\d+)', line):
            own[computation] += int(estimate[1])
        if body := re.search(r"\bbody=%?([\w.-]+)", line):
            condition = re.search(r"\bcondition=%?([\w.-]+)", line)
            calls[computation].append((body[1], condition[1] if condition else ""))
        if bound := re.search(r"= s32\[\]\S* constant\((\d+)\)", line):
            turns[computation] = int(bound[1])
        if branches := re.search(r"branch_computations=\{(.*?)\}", line):
            # The last branch is the largest; several devices take it.
            calls[computation].append((branches[1].split(", ")[-1].strip("%"), ""))

    def total(name: str) -> int:
        return own[name] + sum(turns.get(loop, 1) * total(body) for body, loop in calls[name])

    return total(entry)


def record_of(program: Program, target: str, known: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Returns the compiler's plan of memory, and its estimates, of a program on a target.

    Equal programs of several learners are compiled once: `known` keeps records by program.
    """
    described = json.loads(TARGETS.read_text())[target]
    clock = time.process_time()
    traced = program.function.trace(*program.arguments)
    lowered = traced.lower()
    text = lowered.as_text()
    if text in known:
        return known[text]
    # XLA finds no tile sizes for some Triton products if no device is connected.
    options = {} if "topologies" in described else {"xla_gpu_enable_triton_gemm": False}
    executable = lowered.compile(compiler_options=options)
    seconds = time.process_time() - clock
    plan = executable.memory_analysis()
    cost = executable.cost_analysis() if program.counted else None
    kinds = {"arguments": "argument", "outputs": "output", "aliased": "alias"}
    kinds |= {"temporary": "temp", "program": "generated_code"}
    sizes = {name: getattr(plan, f"{kind}_size_in_bytes") for name, kind in kinds.items()}
    sizes["peak"] = sum(sizes.values()) - 2 * sizes["aliased"]
    exchanged = collectives(executable.as_text())
    # The compiler counts the body of a loop once. The loop over portions of a batch, or over LoDA's
    # half steps, is nearly the whole program.
    loops = [row.params["length"] for row in traced.jaxpr.eqns if row.primitive.name == "scan"]
    turns = max(loops, default=1)
    record = {
        "turns": turns,
        "compile_processor_seconds": seconds,
        "memory_bytes": sizes | {"of_the_device": described["memory_bytes"]},
        "operations": turns * cost["flops"] if cost else None,
        "bytes_accessed": turns * cost["bytes accessed"] if cost else None,
        "collective_bytes": {
            kind: sum(size for other, size in exchanged if other == kind) for kind, _ in exchanged
        },
    }
    if "gigahertz" in described:
        total = cycles(executable.as_text()) / (1e9 * described["gigahertz"])
        record |= {"milliseconds": 1e3 * total, "images_per_second": program.images / total}
        if operations := record["operations"]:
            record["share_of_peak"] = operations / total / (1e12 * described["teraflops"])
    known[text] = record
    return record


def main() -> None:
    """Prints a line per program, and writes all records after every program."""
    flags = {"target": "v5e", "devices": "1", "learner": "all", "batch_sizes": "64,256"}
    encoder = {"variant": "B/16", "image_size": 224}
    options = measure.parsed(measure.parser_of(__doc__, PROGRAM, **flags, **encoder))
    meshes = [mesh_of(options.target, count) for count in measure.numbers(options, "devices")]
    every = (*learners.names(trained=True), *PASSES)
    names = every if options.learner == "all" else options.learner.split(",")
    names = [] if names == ["none"] else names  # features and scores alone
    for name in names:
        if name not in PASSES:
            learners.find(name)
    sizes = measure.numbers(options, "batch_sizes")
    records, known = [], {}
    if any(size % mesh.size for size in sizes for mesh in meshes):
        raise InputError(
            f"--batch_sizes: expected multiples of {options.devices}, found {options.batch_sizes}"
        )
    fixed = {"variant": options.variant, "image_size": options.image_size} | STREAM
    for mesh in meshes:
        model = synthetic.encoder(options, "fast", mesh=mesh)
        for size in sizes:
            makers = {}
            for name in names:
                make = PASSES.get(name) or partial(step, learner=name)
                makers[name] = partial(make, mesh, model, batch_size=size, **STREAM)
            makers["extraction"] = partial(extraction, mesh, model, size)
            makers["scoring"] = partial(scoring, mesh, model.variant.width, **STREAM, rows=size)
            for name, make in makers.items():
                settings = {"program": name, "batch_size": size, "devices": mesh.size}
                settings |= fixed | {"target": options.target, "attention": model.attention}
                record = record_of(make(), options.target, known)
                records.append(settings | record)
                measure.write_report(PROGRAM, options, {"records": records})
                memory = record["memory_bytes"]["temporary"] / 2**30
                time_ms = record.get("milliseconds", math.nan)
                print(f"{settings}: {memory:.2f} GiB temporary, {time_ms:.2f} ms", flush=True)


if __name__ == "__main__":
    sys.exit(measure.run(PROGRAM, main))
