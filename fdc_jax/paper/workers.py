"""Workers of `fdc paper`: runs as processes, on the devices of this machine or by Ray."""

import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from fdc_jax import errors
from fdc_jax.errors import InputError, StopRequest, counted
from fdc_jax.machine.files import InUse, locked
from fdc_jax.paper.plan import LOCK, ByInput, Machines, Run

# The program of a run. When its standard input closes (its parent died), the run saves and ends. It
# waits 3 s first: a scheduler may signal both, and a second signal ends a run without saving.
_PROGRAM = f"""import os, signal, sys, threading, time
def end():
    os.read(0, 1)
    time.sleep(3)
    from fdc_jax import errors
    errors.signals or os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=end, daemon=True).start()
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from fdc_jax.__main__ import main
main()"""
_SAVE_SECONDS = 60  # time in which the run of a dead Ray worker can save and end
_STARTS = 3  # of a run whose process is killed
# On processors, a worker has at least so many cores and so much memory.
_CORES, _MEMORY = 8, 16 * 2**30


class Outcome(NamedTuple):
    """The end of a run."""

    code: int  # exit code
    line: str  # last line of its output
    killed: bool = False


Ended: TypeAlias = Iterator[tuple[Run, Outcome]]


class Worker(NamedTuple):
    """A share of the devices of this machine."""

    label: str = ""  # starts its lines
    environment: Mapping[str, str] = MappingProxyType({})
    cores: tuple[int, ...] = ()  # all if empty


ALONE = Worker()


def share_devices(text: str, machines: Machines) -> list[Worker]:
    """Returns the workers of `--workers`, a number or `auto`: one per accelerator.

    Without an accelerator, `auto` takes cores and memory into account.

    Raises:
        InputError: it is neither, or there are not so many devices.
    """
    machine = next(iter(machines.values()), None)
    platform, chips = (machine.platform, machine.chips) if machine else ("cpu", 1)
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    most = len(cores) if platform == "cpu" else chips
    count = chips
    if platform == "cpu":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        count = max(1, min(len(cores) // _CORES, memory // _MEMORY))
    if text != "auto":
        if not text.isdecimal() or not 1 <= int(text) <= most:
            raise InputError(f"--workers: expected auto or 1 to {most}, found {text!r}")
        count = int(text)
    workers = []
    for number in range(count):
        label = f"worker {number + 1}: " if count > 1 else ""
        share = tuple(cores[number::count]) if platform == "cpu" and count > 1 else ()
        workers.append(Worker(label, _device(platform, number), share))
    return workers


def _device(platform: str, number: int) -> dict[str, str]:
    """Returns the variables by which a process sees one accelerator alone."""
    if platform == "gpu":
        variable = "CUDA_VISIBLE_DEVICES"
        visible = list(filter(None, os.environ.get(variable, "").split(",")))
        return {variable: visible[number] if visible else str(number)}
    if platform == "tpu":
        one = dict.fromkeys(("TPU_CHIPS_PER_PROCESS_BOUNDS", "TPU_PROCESS_BOUNDS"), "1,1,1")
        return {"TPU_VISIBLE_CHIPS": str(number), **one}
    return {}


def attempt(
    run: Run, stop: StopRequest, worker: Worker = ALONE, quiet: bool = True
) -> Outcome | None:
    """Runs `fdc run`, and appends its output to `log.txt`.

    Returns None if another process works on the run.
    """
    pinned = f"import os\nos.sched_setaffinity(0, {worker.cores})\n" if worker.cores else ""
    try:
        with locked(run.folder / LOCK):
            with locked(run.folder / ".lock"):  # fails if a user's own `fdc run` holds it
                pass
            say(f"{worker.label}{run}: {run.command}", quiet)
            with open(run.log, "ab") as log:
                log.write(f"+ {run.command}\n".encode())
                log.flush()
                start = shown = log.tell()
                child = subprocess.Popen(
                    [sys.executable, "-P", "-c", pinned + _PROGRAM, "run", *run.arguments],
                    env=os.environ | worker.environment,
                    start_new_session=True,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
                try:
                    while child.poll() is None and not stop.requested():
                        with suppress(subprocess.TimeoutExpired):
                            child.wait(0.5)
                        shown = show_tasks(run, shown, quiet, worker.label)
                finally:
                    child.communicate()  # closes its standard input, so that it saves and ends
            show_tasks(run, shown, quiet, worker.label)
            stop.poll()
            with open(run.log, "rb") as log:
                log.seek(start)
                last = _last_line(log.read().decode(errors="replace"))
    except InUse:
        return None
    except InputError as error:
        return Outcome(2, str(error))
    except OSError as error:
        return Outcome(2, f"cannot write {run.log}: {error.strerror}")
    if child.returncode < 0:
        return Outcome(1, f"ended by {signal.Signals(-child.returncode).name}", killed=True)
    return Outcome(child.returncode, last)


def _last_line(text: str) -> str:
    """Returns the last line of a run's output, or the exception of a traceback at its end."""
    last = text.rstrip().rpartition("\n")[2]
    _, traceback, end = text.rpartition("Traceback (most recent call last):")
    exceptions = [line for line in end.splitlines() if re.match(r"[\w.]+: ", line)]
    return exceptions[0] if traceback and exceptions else last


def show_tasks(run: Run, start: int, quiet: bool, label: str = "") -> int:
    """Prints the lines "after task" of a log from a byte on; returns the end of its last line."""
    if not run.log.exists():
        return start
    with open(run.log, "rb") as log:
        log.seek(start)
        lines = log.read().splitlines(keepends=True)
    complete = [line for line in lines if line.endswith(b"\n")]
    for line in complete:
        if line.startswith(b"after task"):
            say(f"{label}{run}, {line.decode(errors='replace').rstrip()}", quiet)
    return start + sum(map(len, complete))


def work(
    runs: Sequence[Run], workers: Sequence[Worker], missing: ByInput, stop: StopRequest, quiet: bool
) -> Ended:
    """Performs the runs that no other process works on, as many at a time as there are workers.

    A run whose process is killed is resumed, two times at most. `missing` may grow meanwhile; runs
    that lack something are passed over.
    """
    tried: set[Path] = set()

    def perform_next(worker: Worker) -> tuple[Run, Outcome] | None:
        # Every search starts at the first run, as a process that worked on one may have died.
        while free := [
            run
            for run in runs
            if run.folder not in tried
            and not run.lacks(missing)
            and run.state in ("begun", "to do")
        ]:
            for run in free:
                stop.poll()
                outcome = attempt(run, stop, worker, quiet)
                for _ in range(_STARTS - 1):
                    if outcome and outcome.killed:
                        say(f"{worker.label}{run}: {outcome.line}; it is resumed", quiet)
                        outcome = attempt(run, stop, worker, quiet)
                if outcome:
                    tried.add(run.folder)
                    return run, outcome
            time.sleep(1)  # Other processes hold all runs that are free.
        return None

    with ThreadPoolExecutor(len(workers)) as pool:
        pending = {pool.submit(perform_next, worker): worker for worker in workers}
        while pending:
            for future in wait(pending, 0.5, FIRST_COMPLETED).done:
                worker = pending.pop(future)
                ended = future.result()
                if ended:
                    yield ended
                    pending[pool.submit(perform_next, worker)] = worker


def work_with_ray(
    runs: Sequence[Run], address: str, gpus: float, missing: ByInput, stop: StopRequest, quiet: bool
) -> Ended:
    """Hands all unfinished runs to Ray; yields every run with its outcome when it ends.

    Raises:
        InputError: Ray does not start, or its cluster has too few GPUs.
    """
    import ray  # pyright: ignore[reportMissingImports]

    try:
        ray.init(address or None, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # Ray's errors share no base class.
        raise InputError(f"--ray: Ray does not start: {errors.line(error)}") from error
    present = ray.cluster_resources().get("GPU", 0.0)
    if present < gpus:
        raise InputError(f"--ray_gpus: expected at most {present:g}, which Ray has, found {gpus:g}")
    remote = ray.remote(_in_worker).options(num_gpus=gpus, max_retries=_STARTS)
    shown = {run.folder: show_tasks(run, 0, quiet=True) for run in runs}
    pending = {remote.remote(run, os.getcwd()): run for run in runs if not run.results}
    say(f"Ray has {counted(len(pending), 'run')}; log.txt of a run has its output", quiet)
    try:
        while pending:
            stop.poll()
            finished = ray.wait([*pending], timeout=1.0)[0]
            for run in pending.values():
                shown[run.folder] = show_tasks(run, shown[run.folder], quiet)
            for task in finished:
                run = pending.pop(task)
                try:
                    outcome = ray.get(task)
                except ray.exceptions.RayError as error:
                    outcome = Outcome(1, errors.line(error))
                yield run, outcome
            for task in [task for task, run in pending.items() if run.lacks(missing)]:
                ray.cancel(task)
                del pending[task]
    finally:
        for task in pending:
            ray.cancel(task)
        if pending:
            ray.wait([*pending], num_returns=len(pending), timeout=_SAVE_SECONDS)
        ray.shutdown()


def _in_worker(run: Run, folder: str) -> Outcome:
    """Performs a run in a Ray worker; waits while the process of a dead worker saves the run."""
    os.chdir(folder)
    for _ in range(_SAVE_SECONDS):
        if outcome := attempt(run, StopRequest()):
            return outcome
        time.sleep(1)
    return Outcome(errors.CODES[errors.Interrupted], "another process works on it")


def say(text: str, quiet: bool = False) -> None:
    """Prints a line of the command on standard error."""
    if not quiet:
        print(f"fdc_jax.paper: {text}", file=sys.stderr, flush=True)
