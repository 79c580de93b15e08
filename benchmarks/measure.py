"""Timing of contenders that take turns, each in a process of its own.

Whatever else a machine does then slows all of them alike, and the ratio of medians can be quoted.
`clock` is time as it passes, `processor` what all cores spent, which other programs change little.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fdc_jax.errors import InputError
from fdc_jax.files import check_writable_folder, write_json

PYTORCH = ("eager", "factors", "compiled")

# Where things lie, and what a program tells its own children.
_NO_SETTING = ("output", "data_dir", "contender", "here", "child", "started")

_ROOT = Path(__file__).resolve().parents[1]


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


def arguments(description: str | None, program: str) -> argparse.ArgumentParser:
    """Returns a parser with the flags that the programs share."""
    parser = argparse.ArgumentParser(prog=program, description=(description or "").split("\n")[0])
    parser.add_argument("--variant", default="B/16", help="Ti/16, S/16, B/16, L/16 or digits")
    parser.add_argument("--image_size", type=int, default=224)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--precision", default="parity", help="parity or fast")
    parser.add_argument("--warm_up", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--cores", type=int, default=0, help="of the processor; 0: all")
    parser.add_argument("--peak_tflops", type=float, help="of all devices, for the utilisation")
    parser.add_argument("--output", help="a .json file for the measurements")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    return parser


def check(options: argparse.Namespace, *positive: str) -> None:
    """Checks what `arguments` offers, before any work, and that more numbers are at least 1."""
    check_numbers(options, "image_size", "batch_size", "warm_up", "repeats", *positive)
    if options.cores < 0:
        raise InputError(f"--cores: expected 0 or more, found {options.cores}")
    if options.peak_tflops is not None and not options.peak_tflops > 0:
        raise InputError(f"--peak_tflops: expected more than 0, found {options.peak_tflops}")


def check_numbers(options: argparse.Namespace, *names: str) -> None:
    """Checks that numbers are at least 1, and that --output can be written.

    Raises:
        InputError: names the flag.
    """
    for name in names:
        if getattr(options, name) < 1:
            raise InputError(f"--{name}: expected at least 1, found {getattr(options, name)}")
    check_output(options)


def check_output(options: argparse.Namespace) -> None:
    """Raises InputError where --output cannot be written."""
    if options.output:
        if not options.output.endswith(".json"):
            raise InputError(f"--output: expected a .json file, found {options.output}")
        check_writable_folder("--output", Path(options.output).absolute().parent)


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


def serve(make: Callable[[], Contender], cores: int) -> None:
    """Is the child process: makes a contender and does what the parent asks for."""
    replies, sys.stdout = sys.stdout, sys.stderr
    use_cores(cores)
    try:
        contender = make()
    except InputError as error:
        print(json.dumps({"error": str(error)}), file=replies, flush=True)
        return
    print(json.dumps(contender.about), file=replies, flush=True)
    for line in sys.stdin:
        if line.startswith("outputs "):
            np.savez(line.split(" ", 1)[1].strip(), **contender.outputs)  # pyright: ignore
            print("{}", file=replies, flush=True)
            continue
        clock, processor = time.perf_counter(), time.process_time()
        contender.repeat()
        seconds = {
            "clock": time.perf_counter() - clock,
            "processor": time.process_time() - processor,
        }
        print(json.dumps(seconds), file=replies, flush=True)


class _Child:
    def __init__(self, program: str, name: str):
        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, "-m", program, *sys.argv[1:], f"--contender={name}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ
            | {
                "PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")]),
                # Contenders share the accelerator.
                "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            },
        )
        self.about: dict[str, Any] = {}

    def wait(self) -> None:
        self.about = self._reply()

    def ask(self, question: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(question + "\n")
        self.process.stdin.flush()
        return self._reply()

    def _reply(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise InputError(f"{self.name}: the process ended, see above")
        reply = json.loads(line)
        if "error" in reply:
            raise InputError(reply["error"])
        return reply


@contextlib.contextmanager
def _children(program: str, names: list[str]) -> Iterator[list[_Child]]:
    children: list[_Child] = []
    try:
        # The last are those that a machine may not be able to run; others need not compile first.
        for name in reversed(names):
            children.insert(0, _Child(program, name))
            children[0].wait()
        yield children
    finally:
        for child in children:
            child.process.communicate()


def compare(
    program: str,
    names: list[str],
    options: argparse.Namespace,
    tolerance: float | None,
) -> dict[str, dict[str, Any]]:
    """Returns what was measured, by contender, relative to the first.

    Args:
        program: module that serves a contender by its name.
        names: of the contenders.
        options: of the command.
        tolerance: how far outputs may be from the first contender's; None: not compared.

    Raises:
        InputError: a contender cannot run, or its outputs are others.
    """
    with _children(program, names) as children:
        found = {child.name: dict(child.about) for child in children}
        differences = _differences(children)
        for name, difference in differences.items():
            found[name]["largest_difference"] = difference
            if tolerance is not None and not difference <= tolerance:
                raise InputError(
                    f"{name}: expected the outputs of {names[0]} to {tolerance:g}, "
                    f"found a difference of {difference:.3g}"
                )
        seconds: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        for turn in range(options.warm_up + options.repeats):
            for child in children:
                reply = child.ask("run")
                if turn >= options.warm_up:
                    seconds[child.name].append(reply)
    for name in names:
        found[name]["seconds"] = {
            kind: summary([each[kind] for each in seconds[name]]) for kind in ("clock", "processor")
        }
    first = found[names[0]]["seconds"]
    for name in names[1:]:
        found[name]["times_the_first"] = {
            kind: found[name]["seconds"][kind]["median"] / first[kind]["median"] for kind in first
        }
    return found


def _differences(children: list[_Child]) -> dict[str, float]:
    arrays = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, child in enumerate(children):
            path = Path(folder) / f"{number}.npz"
            child.ask(f"outputs {path}")
            with np.load(path) as file:
                arrays[child.name] = dict(file)
    reference = arrays[children[0].name]
    return {
        name: max(
            float(np.abs(each[key] - reference[key]).max(initial=0.0))
            for key in each.keys() & reference.keys()
        )
        for name, each in arrays.items()
        if name != children[0].name and each.keys() & reference.keys()
    }


def summary(seconds: list[float]) -> dict[str, Any]:
    """Returns the median of repeats, their quartiles' distance relative to it, and all of them."""
    median = statistics.median(seconds)
    spread = float(np.subtract(*np.percentile(seconds, [75, 25]))) / median
    return {"median": median, "relative_spread": spread, "all": seconds}


def finish(
    program: str, options: argparse.Namespace, found: dict[str, dict[str, Any]], unit: int
) -> None:
    """Prints a line per contender and writes the report.

    Args:
        program: module of the command.
        options: of the command.
        found: of `compare`, the first contender ours.
        unit: images that a repeat takes.
    """
    for name, each in found.items():
        seconds = each["seconds"]
        each["images_per_second"] = unit / seconds["clock"]["median"]
        # A processor is shared; what its peak was measured by is its time.
        kind = "processor" if each.get("device", "").endswith("cpu") else "clock"
        each["utilisation"] = None
        if each.get("flops") and each.get("peak_flops"):
            each["utilisation"] = each["flops"] / seconds[kind]["median"] / each["peak_flops"]
        print(_line(name, each), flush=True)
    write_report(program, options, {"contenders": found})


def write_report(program: str, options: argparse.Namespace, found: dict[str, Any]) -> None:
    """Writes what was found, with the command, settings and versions, where --output asks."""
    from fdc_jax import results

    if options.output:
        report = {
            "command": shlex.join(["python", "-m", program, *sys.argv[1:]]),
            "settings": {
                key: each for key, each in vars(options).items() if key not in _NO_SETTING
            },
            "versions": results.versions(),
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
        text += f", {100 * each['utilisation']:.1f} % of peak"
    if "times_the_first" in each:
        ratio = each["times_the_first"]
        text += f"; {ratio['clock']:.2f} times the first, processor {ratio['processor']:.2f}"
    return text + f"; {each['device']}"


def in_a_process(
    program: str, arguments: Sequence[str], name: str, **environment: str
) -> dict[str, Any]:
    """Returns what a benchmark, started in a fresh process, prints last, as JSON.

    Args:
        program: module of the benchmark.
        arguments: of the command.
        name: by which an error calls it.
        environment: variables, where not set already.

    Raises:
        InputError: the process failed.
    """
    done = subprocess.run(
        [sys.executable, "-m", program, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env=environment | os.environ,
        cwd=_ROOT,
        check=False,
    )
    if done.returncode:
        raise InputError(f"{name}: the process ended with code {done.returncode}, see above")
    return json.loads(done.stdout.splitlines()[-1])


def run(program: str, body: Callable[[], None]) -> int:
    """Runs a program; an input error is one line and 2."""
    try:
        body()
    except InputError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    return 0
