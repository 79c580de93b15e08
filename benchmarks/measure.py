"""Timing of contenders that take turns: ours in one process, each of PyTorch's in one of its own.

Whatever else a machine does then slows all of them alike, and the ratio of medians can be quoted.
A TPU serves one process alone, so that ours share theirs.
`clock` is time as it passes, `processor` what all cores spent, which other programs change little.
"""

import argparse
import contextlib
import importlib.util
import multiprocessing
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import numpy as np

from fdc_jax.errors import InputError
from fdc_jax.machine.files import check_writable_file, write_json

PYTORCH = ("eager", "expert")

# What JAX and PyTorch do in float32 differs by the order of sums.
TOLERANCE = 1e-4

# An encoder and what it is given.
ENCODER = {"variant": "B/16", "image_size": 224, "batch_size": 64, "precision": "parity"}
ENCODER |= {"attention": "auto"}
# How contenders are measured.
TURNS = {"warm_up": 3, "repeats": 10, "cores": 0}

# Where things lie.
_NO_SETTING = ("output", "data_dir")

# A process of its own, which imports the program anew.
_SPAWN = multiprocessing.get_context("spawn")


class Contender(NamedTuple):
    """What a process measures."""

    repeat: Callable[[], Any]  # does the work once and returns when it is done
    outputs: dict[str, np.ndarray]  # by which contenders are checked against each other
    about: dict[str, Any]  # what the report says of it


def parser_of(description: str | None, program: str, **defaults: Any) -> argparse.ArgumentParser:
    """Returns a parser with a flag for each default, of its type; False is a switch."""
    parser = argparse.ArgumentParser(
        prog=program,
        description=(description or "").split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for name, default in defaults.items():
        kind: dict[str, Any] = {"default": default, "type": type(default)}
        if default is False:
            kind = {"action": "store_true"}
        parser.add_argument(f"--{name}", help=" ", **kind)
    parser.add_argument("--output", help="a .json file for the measurements")
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parses the command line; whole numbers are at least 1, and --output can be written."""
    options = parser.parse_args()
    for name, value in vars(options).items():
        least = 0 if name == "cores" else 1
        if type(value) is int and value < least:
            raise InputError(f"--{name}: expected at least {least}, found {value}")
    if options.output:
        check_writable_file("--output", options.output, ".json")
    return options


def numbers(options: argparse.Namespace, name: str) -> list[int]:
    """Returns the numbers of a flag such as --tasks=1,10, each at least 1."""
    text = getattr(options, name)
    try:
        found = [int(each) for each in text.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise InputError(f"--{name}: expected numbers of at least 1, found {text}")
    return found


def timed(call: Callable[[], Any]) -> tuple[Any, np.ndarray]:
    """Returns a result once it is there, and the seconds of the clock and of the processor."""
    import jax

    start = np.array([time.perf_counter(), time.process_time()])
    result = jax.block_until_ready(call())
    return result, np.array([time.perf_counter(), time.process_time()]) - start


def named(seconds: np.ndarray, unit: float = 1.0) -> dict[str, float]:
    """Names what `timed` returns, in another unit."""
    return dict(zip(("clock", "processor"), (unit * seconds).tolist(), strict=True))


def pytorch_names(chosen: str) -> list[str]:
    """Returns the names of PyTorch's contenders; InputError where it is not installed."""
    kinds = [kind for kind in chosen.split(",") if kind]
    for kind in kinds:
        if kind not in PYTORCH:
            raise InputError(f"--pytorch: expected some of {','.join(PYTORCH)}, found {kind}")
    if kinds and importlib.util.find_spec("torch") is None:
        raise InputError("--pytorch: expected PyTorch to be installed (pip install torch)")
    return [f"pytorch_{kind}" for kind in kinds]


def encoder(options: argparse.Namespace) -> Any:
    """Returns the encoder of the flags `ENCODER`; raises InputError as `vit.build` does."""
    from fdc_jax.machine import devices
    from fdc_jax.model import vit

    kind = {name: getattr(options, name) for name in ("precision", "attention")}
    cudnn = devices.have_cudnn(devices.data_mesh())
    return vit.build(options.variant, options.image_size, **kind, cudnn=cudnn)


def noise(size: int, side: int, classes: int, seed: int) -> Any:
    """Returns a training batch of random pixels."""
    from fdc_jax.data.batches import Batch

    pixels = np.random.default_rng(seed).integers(0, 256, (size, side, side, 3), np.uint8)
    labels = (np.arange(size) % classes).astype(np.int32)
    return Batch(pixels, labels, np.ones(size, np.float32))


_made: dict[str, Contender] = {}  # of the process of some contenders


def _make(
    make: Callable[[argparse.Namespace, str], Contender],
    options: argparse.Namespace,
    names: Sequence[str],
) -> dict[str, Any]:
    """Makes the contenders of this process; returns what is said of each, and its outputs."""
    from fdc_jax.machine import devices

    devices.keep_freed_memory()
    if options.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    _made.update({name: make(options, name) for name in names})
    return {name: (each.about, each.outputs) for name, each in _made.items()}


def _repeat(name: str) -> dict[str, float]:
    return named(timed(_made[name].repeat)[1])


def _in(pool: futures.Executor, function: Callable[..., Any], *arguments: Any) -> Any:
    """Returns what a function returns in a process; InputError where that ends."""
    try:
        return pool.submit(function, *arguments).result()
    except futures.BrokenExecutor as error:
        raise InputError(f"the process of a measurement ended: {error}") from error


def in_a_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Returns what a function of a benchmark returns in a fresh process."""
    with futures.ProcessPoolExecutor(1, _SPAWN) as pool:
        return _in(pool, function, *arguments)


def contest(
    program: str,
    parser: argparse.ArgumentParser,
    make: Callable[[argparse.Namespace, str], Contender],
    ours: Sequence[str],
    unit: Callable[[argparse.Namespace], int],
) -> None:
    """Is the program of contenders: measures, prints a line for each and writes the report.

    Args:
        program: its module.
        parser: with the flags `ENCODER` and `TURNS`.
        make: returns a contender by its name; runs in the contender's process.
        ours: names of our contenders, to the first of which all others are compared.
        unit: images that a repeat takes.
    """
    text, every = f"beside PyTorch: {PYTORCH}", ",".join(PYTORCH)
    parser.add_argument("--pytorch", nargs="?", const=every, default="", help=text)
    options = parsed(parser)
    groups = [ours, *([name] for name in pytorch_names(options.pytorch))]
    # Contenders share the accelerator.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    made, pools = {}, {}
    with contextlib.ExitStack() as stack:
        # The last are those that a machine may not be able to run; others need not compile first.
        for names in reversed(groups):
            pool = stack.enter_context(futures.ProcessPoolExecutor(1, _SPAWN))
            made = _in(pool, _make, make, options, names) | made
            pools |= dict.fromkeys(names, pool)
        seconds: dict[str, list[dict[str, float]]] = {name: [] for name in made}
        _compare(made, np.inf if options.precision == "fast" else TOLERANCE)
        for _ in range(options.warm_up + options.repeats):
            for name in made:
                seconds[name].append(_in(pools[name], _repeat, name))
    found = {name: about for name, (about, _) in made.items()}
    first = found[ours[0]]
    for name, each in found.items():
        own = seconds[name][options.warm_up :]
        each["seconds"] = {kind: summary([s[kind] for s in own]) for kind in own[0]}
        median = {kind: of["median"] for kind, of in each["seconds"].items()}
        if each is not first:
            of_first = first["seconds"]
            each["times_the_first"] = {k: median[k] / of_first[k]["median"] for k in median}
        each["images_per_second"] = unit(options) / median["clock"]
        # A processor is shared; what its peak was measured by is its time.
        spent = median["processor" if each.get("device", "").endswith("cpu") else "clock"]
        known = each.get("flops") and each.get("peak_flops")
        each["utilisation"] = each["flops"] / spent / each["peak_flops"] if known else None
        print(_line(name, each), flush=True)
    write_report(program, options, {"contenders": found})


def _compare(made: dict[str, Any], tolerance: float) -> None:
    """Notes how far outputs are from those of the first contender; refuses others."""
    (reference, (_, first)), *others = made.items()
    for name, (about, outputs) in others:
        differences = [np.abs(outputs[key] - first[key]).max() for key in outputs.keys() & first]
        about["largest_difference"] = difference = float(max(differences, default=0.0))
        if not difference <= tolerance:
            raise InputError(
                f"{name}: expected the outputs of {reference} to {tolerance:g}, found a "
                f"difference of {difference:.3g}"
            )


def summary(seconds: list[float]) -> dict[str, Any]:
    """Returns the median of repeats, their quartiles' distance relative to it, and all of them."""
    median = statistics.median(seconds)
    spread = float(np.subtract(*np.percentile(seconds, [75, 25]))) / median
    return {"median": median, "relative_spread": spread, "all": seconds}


def write_report(program: str, options: argparse.Namespace, found: dict[str, Any]) -> None:
    """Writes what was found, with the command, settings and versions, where --output asks."""
    from fdc_jax.machine.versions import versions

    if options.output:
        report = {
            "command": shlex.join(["python", "-m", program, *sys.argv[1:]]),
            "settings": {
                key: each for key, each in vars(options).items() if key not in _NO_SETTING
            },
            "versions": versions(),
        }
        write_json(options.output, report | found)


def _line(name: str, each: dict[str, Any]) -> str:
    clock, processor = (each["seconds"][kind] for kind in ("clock", "processor"))
    times = (
        f"{1e3 * of['median']:.1f} ms (spread {100 * of['relative_spread']:.0f} %)"
        for of in (clock, processor)
    )
    text = f"{name}: {each['images_per_second']:.1f} images/s, {', processor '.join(times)}"
    if each["utilisation"] is not None:
        text += f", {100 * each['utilisation']:.1f} % of a large product"
    if "times_the_first" in each:
        ratio = each["times_the_first"]
        text += f"; {ratio['clock']:.2f} times the first, processor {ratio['processor']:.2f}"
    return text + f"; {each['device']}"


def run(program: str, body: Callable[[], None]) -> int:
    """Runs a program; an input error is one line and 2."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        body()
    except InputError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    return 0
