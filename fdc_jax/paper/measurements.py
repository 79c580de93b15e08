"""Measurements of `fdc paper` in processes of their own, which free their devices at the end."""

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

from fdc_jax import errors
from fdc_jax.errors import InputError, StopRequest
from fdc_jax.paper.plan import Machines, PlannedRun, say
from fdc_jax.run import configuration, estimate
from fdc_jax.run.config import Config
from fdc_jax.run.folder import RunFolder

_log = logging.getLogger(__name__)


def machine_facts(runs: Sequence[PlannedRun], timed: bool, stop: StopRequest) -> Machines:
    """Returns facts about this machine for every kind of run, as far as they can be measured.

    On processors, training steps are timed only if `timed`.
    """
    kinds: dict[tuple[Any, ...], dict[tuple[str, str], Config]] = {}
    for run in runs:
        kinds.setdefault(estimate.kind(run.config), {})[run.benchmark, run.learner] = run.config
    machines = {}
    for kind, configs in kinds.items():
        try:
            machines[kind] = in_new_process(estimate.machine, configs, timed, stop=stop)
        except Exception as error:  # The plan is useful without hours.
            stop.poll()
            _log.warning("hours and GiB for %s are unknown: %s", kind[0], errors.line(error))
    return machines


def measure_latency(runs: Sequence[PlannedRun], quiet: bool, stop: StopRequest) -> None:
    """Measures the inference latency of the first finished run of each benchmark, if unknown."""
    for run in {run.benchmark: run for run in reversed(runs) if run.results}.values():
        with suppress(InputError):  # A damaged file is written again.
            if RunFolder(run.folder).read_latency().contenders:
                continue
        say(f"{run}: measures the latency of inference", quiet)
        try:
            host = configuration.of_host(run.config)
            in_new_process(_measure_run, run.folder, run.learner, host, stop=stop)
        except Exception as error:  # Only one table needs the latency.
            stop.poll()
            say(f"{run}: latency is unknown: {errors.line(error)}")


def _measure_run(folder: Path, learner: str, host: Mapping[str, Any]) -> None:
    from fdc_jax import latency, open_run  # which import JAX

    latency.measure_run(open_run(folder, learner=learner, host=host))


def in_new_process(function: Callable[..., Any], *arguments: Any, stop: StopRequest) -> Any:
    """Returns the result of a function that runs in a new process, killed if a stop is requested.

    Ctrl-C does not reach the process, which ends with this one, whatever ends it.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, initializer=_end_with_parent) as pool:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            future = pool.submit(function, *arguments)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        while not wait([future], timeout=0.5).done:
            if stop.requested():
                for process in multiprocessing.active_children():
                    process.kill()
        return future.result()


def _end_with_parent() -> None:
    """Starts a thread that ends this process when the process that started it has ended."""

    def wait_for_end() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=wait_for_end, daemon=True).start()
