"""Flags, clocks and reports that the benchmarks share.

`clock` is time as it passes, `processor` what all cores spent, which other programs change little.
"""

import argparse
import multiprocessing
import os
import shlex
import sys
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any

import numpy as np

from fdc_jax.errors import InputError
from fdc_jax.machine.files import check_writable_file, write_json


class Skipped(RuntimeError):
    """A measurement that this machine cannot make."""


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
    parser.add_argument("--output", help="where the measurements are written")
    return parser


def parsed(parser: argparse.ArgumentParser, suffix: str = ".json") -> argparse.Namespace:
    """Parses the command line; numbers are at least 1, and --output can be written."""
    options = parser.parse_args()
    for name, value in vars(options).items():
        if type(value) in (int, float) and not value >= 1:
            raise InputError(f"--{name}: expected at least 1, found {value}")
    if options.output and suffix:
        check_writable_file("--output", options.output, suffix)
    return options


def numbers(options: argparse.Namespace, name: str) -> list[int]:
    """Returns the numbers of a flag such as --tasks=1,10, each at least 1."""
    words = getattr(options, name).split(",")
    if not all(word.isdecimal() and int(word) for word in words):
        raise InputError(f"--{name}: expected numbers of at least 1, found {','.join(words)}")
    return [int(word) for word in words]


def timed(call: Callable[[], Any]) -> tuple[Any, np.ndarray]:
    """Returns a result once it is computed, and the seconds of the clock and of the processor."""
    import jax

    start = np.array([time.perf_counter(), time.process_time()])
    result = jax.block_until_ready(call())
    return result, np.array([time.perf_counter(), time.process_time()]) - start


def named(seconds: np.ndarray, unit: float = 1.0) -> dict[str, float]:
    """Names the two numbers of `timed`, in another unit."""
    return dict(zip(("clock", "processor"), (unit * seconds).tolist(), strict=True))


def is_trial(options: argparse.Namespace) -> bool:
    """Returns True for the digits encoder, with which a command only shows that it works."""
    return options.variant == "digits"


def paced(
    options: argparse.Namespace, call: Callable[[], Any], wait: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Times five repeats of several calls, which wait for the device once, after the last of them.

    A repeat makes 20 calls, or as many as take half a second, in a trial a single one. Returns
    medians and all repeats, in seconds per call. `wait` waits for a device that is not JAX's.
    """
    timed(call)
    _, seconds = timed(call)
    calls = 1 if is_trial(options) else max(1, min(20, int(0.5 / seconds[0])))

    def repeat() -> Any:
        for _ in range(calls):
            result = call()
        wait()
        return result

    repeats = np.stack([timed(repeat)[1] / calls for _ in range(5)])
    return named(np.median(repeats, axis=0)) | {"calls": calls, "all": repeats.tolist()}


def in_a_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Returns a function's result from a fresh process; InputError if the process ended before."""
    with futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(function, *arguments).result()
        except futures.BrokenExecutor as error:
            raise InputError(f"the process of a measurement ended: {error}") from error


def write_report(program: str, options: argparse.Namespace, found: dict[str, Any]) -> None:
    """Writes what was found, with the command, settings and versions, where --output asks."""
    if options.output:
        write_json(options.output, about(program, options) | found)


def about(program: str, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the command, its settings, and the versions of everything."""
    from fdc_jax.machine.versions import versions

    settings = {name: value for name, value in vars(options).items() if name != "output"}
    command = shlex.join(["python", "-m", program, *sys.argv[1:]])
    return {"command": command, "settings": settings, "versions": versions()}


def run(program: str, body: Callable[[], int | None]) -> int:
    """Runs a program; an input error is one line and 2."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        return body() or 0
    except InputError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
