"""Flags, clocks and reports that the benchmarks share.

`clock` is elapsed time, `processor` is the time of all cores, which depends little on other load.
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
    """Returns a parser with a flag per default, of the default's type; False makes a switch."""
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
    """Returns the parsed flags; raises InputError if a number is below 1 or --output is bad."""
    options = parser.parse_args()
    for name, value in vars(options).items():
        if type(value) in (int, float) and not value >= 1:
            raise InputError(f"--{name}: expected at least 1, found {value}")
    if options.output and suffix:
        check_writable_file("--output", options.output, suffix)
    return options


def numbers(options: argparse.Namespace, name: str) -> list[int]:
    """Returns the numbers of a flag such as --tasks=1,10; raises InputError if one is below 1."""
    parts = getattr(options, name).split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise InputError(f"--{name}: expected numbers of at least 1, found {','.join(parts)}")
    return [int(part) for part in parts]


def timed(call: Callable[[], Any]) -> tuple[Any, np.ndarray]:
    """Returns a call's result, when computed, and its seconds by clock and processor, [2]."""
    import jax

    start = np.array([time.perf_counter(), time.process_time()])
    result = jax.block_until_ready(call())
    return result, np.array([time.perf_counter(), time.process_time()]) - start


def named(seconds: np.ndarray, unit: float = 1.0) -> dict[str, float]:
    """Returns the two seconds of `timed` by name, multiplied by `unit`."""
    return dict(zip(("clock", "processor"), (unit * seconds).tolist(), strict=True))


def is_trial(options: argparse.Namespace) -> bool:
    """Returns True for the digits encoder, a quick test that a command works."""
    return options.variant == "digits"


def paced(
    options: argparse.Namespace, call: Callable[[], Any], wait: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Returns the medians of five repeats, and all repeats, in seconds per call.

    A repeat makes up to 20 calls in half a second (in a trial, a single call) and waits for the
    device after the last call. `wait` waits for a device that JAX does not manage.
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
    """Returns a function's result from a new process; raises InputError if the process died."""
    with futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(function, *arguments).result()
        except futures.BrokenExecutor as error:
            raise InputError(f"the process of a measurement ended: {error}") from error


def write_report(program: str, options: argparse.Namespace, record: dict[str, Any]) -> None:
    """Writes a record with the command, settings and versions to --output, if set."""
    if options.output:
        write_json(options.output, about(program, options) | record)


def about(program: str, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the command, its settings, and the versions of packages and commit."""
    from fdc_jax.machine.versions import versions

    settings = {name: value for name, value in vars(options).items() if name != "output"}
    command = shlex.join(["python", "-m", program, *sys.argv[1:]])
    return {"command": command, "settings": settings, "versions": versions()}


def run(program: str, body: Callable[[], int | None]) -> int:
    """Returns the exit code of a program; InputError becomes one line and code 2."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        return body() or 0
    except InputError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
