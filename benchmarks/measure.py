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
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from multiprocessing.connection import Connection
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
    """What a process measures.

    Attributes:
        repeat: does the work once and returns when it is done.
        outputs: arrays by which contenders are checked against each other.
        about: what the report says of it.
    """

    repeat: Callable[[], Any]
    outputs: dict[str, np.ndarray]
    about: dict[str, Any]


def parser_of(description: str | None, program: str, **defaults: Any) -> argparse.ArgumentParser:
    """Returns a parser with a flag for each default, of its type; False is a switch."""
    parser = argparse.ArgumentParser(
        prog=program,
        description=(description or "").split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for name, default in defaults.items():
        kind: dict[str, Any] = {
            "default": default,
            "type": str if default is None else type(default),
        }
        if default is False:
            kind = {"action": "store_true"}
        parser.add_argument(f"--{name}", help=" ", **kind)
    parser.add_argument("--output", help="a .json file for the measurements")
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parses the command line; whole numbers are at least 1, and --output can be written.

    Raises:
        InputError: names the flag.
    """
    options = parser.parse_args()
    for name, value in vars(options).items():
        least = 0 if name == "cores" else 1
        if type(value) is int and value < least:
            raise InputError(f"--{name}: expected at least {least}, found {value}")
    if options.output:
        check_writable_file("--output", options.output, ".json")
    return options


def numbers(options: argparse.Namespace, name: str) -> list[int]:
    """Returns the numbers of a flag such as --tasks=1,10.

    Raises:
        InputError: one is no whole number from 1.
    """
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
    """Returns the names of PyTorch's contenders.

    Raises:
        InputError: PyTorch is not installed, or there is no such contender.
    """
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


def use_cores(cores: int) -> None:
    """Keeps this process on the first cores of the processor, where a number is given."""
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])


def _serve(
    connection: Connection,
    make: Callable[[argparse.Namespace, str], Contender],
    options: argparse.Namespace,
    names: Sequence[str],
) -> None:
    """Is the process of some contenders: makes them, and repeats the one that is named."""
    from fdc_jax.machine import devices

    devices.keep_freed_memory()
    use_cores(options.cores)
    try:
        made = {name: make(options, name) for name in names}
    except InputError as error:
        return connection.send(error)
    connection.send({name: (each.about, each.outputs) for name, each in made.items()})
    for name in iter(connection.recv, None):
        connection.send(named(timed(made[name].repeat)[1]))


class _Child:
    def __init__(self, names: Sequence[str], *arguments: Any):
        self.names = names
        self.connection, other = _SPAWN.Pipe()
        self.process = _SPAWN.Process(target=_serve, args=(other, *arguments, names))
        self.process.start()
        other.close()
        self.made = self.reply()

    def reply(self) -> dict[str, Any]:
        try:
            reply = self.connection.recv()
        except EOFError:
            raise InputError(f"{', '.join(self.names)}: the process ended, see above") from None
        if isinstance(reply, InputError):
            raise reply
        return reply

    def repeat(self, name: str) -> dict[str, Any]:
        self.connection.send(name)
        return self.reply()


@contextlib.contextmanager
def _children(groups: list[Sequence[str]], *arguments: Any) -> Iterator[dict[str, _Child]]:
    """Starts a process for every group and yields them by contender."""
    children: list[_Child] = []
    # Contenders share the accelerator.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    try:
        # The last are those that a machine may not be able to run; others need not compile first.
        for names in reversed(groups):
            children.insert(0, _Child(names, *arguments))
        yield {name: child for child in children for name in child.names}
    finally:
        for child in children:
            with contextlib.suppress(OSError):
                child.connection.send(None)
            child.process.join()


def contest(
    program: str,
    parser: argparse.ArgumentParser,
    make: Callable[[argparse.Namespace, str], Contender],
    ours: Sequence[str],
    pytorch: str,
    unit: Callable[[argparse.Namespace], int],
) -> None:
    """Is the program of contenders: measures, prints a line for each and writes the report.

    Args:
        program: its module.
        parser: with the flags `ENCODER` and `TURNS`.
        make: returns a contender by its name; runs in the contender's process.
        ours: names of our contenders, to the first of which all others are compared.
        pytorch: names of PyTorch's that --pytorch without a value stands for.
        unit: images that a repeat takes.

    Raises:
        InputError: a contender cannot run, or its outputs are others.
    """
    add = parser.add_argument
    add("--pytorch", nargs="?", const=pytorch, default="", help=f"beside PyTorch: {PYTORCH}")
    options = parsed(parser)
    groups = [ours, *([name] for name in pytorch_names(options.pytorch))]
    tolerance = TOLERANCE if options.precision == "parity" else np.inf
    with _children(groups, make, options) as children:
        names = list(children)
        found: dict[str, dict[str, Any]] = {}
        first = children[names[0]].made[names[0]][1]
        for name, child in children.items():
            found[name], outputs = child.made[name]
            shared = first.keys() & outputs.keys()
            if name != names[0] and shared:
                differences = [np.abs(outputs[key] - first[key]).max(initial=0) for key in shared]
                found[name]["largest_difference"] = difference = float(max(differences))
                if not difference <= tolerance:
                    raise InputError(
                        f"{name}: expected the outputs of {names[0]} to {tolerance:g}, "
                        f"found a difference of {difference:.3g}"
                    )
        seconds: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        for turn in range(options.warm_up + options.repeats):
            for name, child in children.items():
                reply = child.repeat(name)
                if turn >= options.warm_up:
                    seconds[name].append(reply)
    for name, each in found.items():
        clock, processor = (summary([s[k] for s in seconds[name]]) for k in ("clock", "processor"))
        each["seconds"] = {"clock": clock, "processor": processor}
        if name != names[0]:
            first = found[names[0]]["seconds"]
            each["times_the_first"] = {
                kind: each["seconds"][kind]["median"] / first[kind]["median"] for kind in first
            }
        each["images_per_second"] = unit(options) / clock["median"]
        # A processor is shared; what its peak was measured by is its time.
        of = processor if each.get("device", "").endswith("cpu") else clock
        each["utilisation"] = None
        if each.get("flops") and each.get("peak_flops"):
            each["utilisation"] = each["flops"] / of["median"] / each["peak_flops"]
        print(_line(name, each), flush=True)
    write_report(program, options, {"contenders": found})


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
    text = (
        f"{name}: {each['images_per_second']:.1f} images/s, {1e3 * clock['median']:.1f} ms "
        f"(spread {100 * clock['relative_spread']:.0f} %), processor "
        f"{1e3 * processor['median']:.1f} ms ({100 * processor['relative_spread']:.0f} %)"
    )
    if each["utilisation"] is not None:
        text += f", {100 * each['utilisation']:.1f} % of a large product"
    if "times_the_first" in each:
        ratio = each["times_the_first"]
        text += f"; {ratio['clock']:.2f} times the first, processor {ratio['processor']:.2f}"
    return text + f"; {each['device']}"


def in_a_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Returns what a function of a benchmark returns in a fresh process.

    Raises:
        InputError: the process ended, such as for want of memory; or of the function.
    """
    with futures.ProcessPoolExecutor(1, _SPAWN) as pool:
        try:
            return pool.submit(function, *arguments).result()
        except futures.BrokenExecutor as error:
            raise InputError(f"the process of a measurement ended: {error}") from error


def run(program: str, body: Callable[[], None]) -> int:
    """Runs a program; an input error is one line and 2."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        body()
    except InputError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    return 0
