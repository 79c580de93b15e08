"""Workers of `fdc paper`: runs as processes, on the devices of this machine or by Ray."""

import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeAlias

from fdc_jax import errors
from fdc_jax.errors import InputError, StopRequest
from fdc_jax.machine.files import InUse, locked
from fdc_jax.paper.plan import LOCK, ByInput, Machines, PlannedRun, say

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
_STARTS = 3  # of a run whose process is killed
# On processors, a worker has at least so many cores and so much memory.
_CORES, _MEMORY = 8, 16 * 2**30


class Outcome(NamedTuple):
    """The end of a run."""

    code: int  # exit code
    line: str  # last line of its output
    killed: bool = False


class Worker(NamedTuple):
    """A share of the devices of this machine."""

    label: str  # starts its lines
    environment: dict[str, str]
    cores: tuple[int, ...]  # all if empty


# Performs a run, unless another process does; prints its lines unless the last argument is True.
Attempt: TypeAlias = Callable[[PlannedRun, StopRequest, Worker, bool], Outcome | None]


def share_devices(text: str, machines: Machines) -> list[Worker]:
    """Returns the workers of `--workers`, a number or `auto`: one per accelerator.

    Without an accelerator, `auto` takes cores and memory into account.

    Raises:
        InputError: it is neither, or there are not so many devices.
    """
    machine = next(iter(machines.values()), None)
    platform, most = (machine.platform, machine.chips) if machine else ("cpu", 1)
    count, cores = most, [0]
    if platform == "cpu":
        if hasattr(os, "sched_getaffinity"):
            cores = sorted(os.sched_getaffinity(0))
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        count = max(1, min(len(cores) // _CORES, memory // _MEMORY))
        most = len(cores)
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


def attempt(run: PlannedRun, stop: StopRequest, worker: Worker, quiet: bool) -> Outcome | None:
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
                start = log.tell()
                child = subprocess.Popen(
                    [sys.executable, "-P", "-c", pinned + _PROGRAM, "run", *run.arguments],
                    env=os.environ | worker.environment,
                    start_new_session=True,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )

            def has_ended() -> bool:
                if stop.requested():
                    child.communicate()  # closes its standard input, so that it saves and ends
                with suppress(subprocess.TimeoutExpired):
                    child.wait(0.5)
                return child.returncode is not None

            try:
                output = watch(run, start, has_ended, worker.label, quiet)
            finally:
                child.communicate()
            stop.poll()
    except InUse:
        return None
    except InputError as error:
        return Outcome(2, str(error))
    except OSError as error:
        return Outcome(2, f"cannot write {run.log}: {error.strerror}")
    if child.returncode < 0:
        return Outcome(1, f"ended by {signal.Signals(-child.returncode).name}", killed=True)
    return Outcome(child.returncode, _last_line(output))


def watch(
    run: PlannedRun, start: int, has_ended: Callable[[], bool], label: str, quiet: bool
) -> str:
    """Returns the log of a run from a byte on when it has ended; prints its lines "after task"."""
    text, shown, ended = "", 0, False
    with open(run.log, encoding="utf-8", errors="replace") as log:
        log.seek(start)
        while not ended:
            ended = has_ended()
            text += log.read()
            complete = text[shown : text.rfind("\n") + 1]
            shown += len(complete)
            for line in complete.splitlines():
                if line.startswith("after task"):
                    say(f"{label}{run}, {line}", quiet)
    return text


def _last_line(text: str) -> str:
    """Returns the last line of a run's output, or the exception of a traceback at its end."""
    _, traceback, end = text.rpartition("Traceback (most recent call last):")
    exceptions = re.findall(r"^[\w.]+: .*", end, re.MULTILINE) if traceback else []
    return [*exceptions, *text.splitlines()[-1:], ""][0]


def work(
    runs: Sequence[PlannedRun],
    workers: Sequence[Worker],
    attempt: Attempt,
    end: Callable[[PlannedRun, Outcome], None],
    missing: ByInput,
    stop: StopRequest,
    quiet: bool,
) -> None:
    """Performs the runs that no other process works on, as many at a time as there are workers.

    A run whose process is killed is resumed, two times at most. Others are passed to `end` when
    they end. Runs that lack something of `missing`, which may grow meanwhile, are passed over.
    """
    taken: set[Path] = set()
    kills: Counter[Path] = Counter()

    def perform(worker: Worker) -> None:
        # Every search starts at the first run, as a process that worked on one may have died.
        while free := [
            run
            for run in runs
            if run.folder not in taken
            and not run.lacks(missing)
            and run.state in ("stopped", "to do")
        ]:
            for run in free:
                stop.poll()
                if run.folder in taken:
                    continue
                taken.add(run.folder)
                outcome = attempt(run, stop, worker, quiet)
                kills[run.folder] += outcome is not None and outcome.killed
                if outcome is None:
                    taken.remove(run.folder)
                    continue
                if outcome.killed and kills[run.folder] < _STARTS:
                    say(f"{worker.label}{run}: {outcome.line}; it is resumed", quiet)
                    taken.remove(run.folder)
                else:
                    end(run, outcome)
                break
            else:
                time.sleep(1)  # Other processes hold all runs that are free.

    with ThreadPoolExecutor(len(workers)) as pool:
        list(pool.map(perform, workers))


def on_ray(address: str, gpus: float) -> tuple[list[Worker], Attempt]:
    """Returns as many workers as Ray performs runs at a time, and the function that performs one.

    Raises:
        InputError: Ray does not start, or its cluster has too few GPUs.
    """
    import ray  # pyright: ignore[reportMissingImports]

    try:
        ray.init(address or None, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # Ray's errors share no base class.
        raise InputError(f"--ray: Ray does not start: {errors.line(error)}") from error
    resources = ray.cluster_resources()
    present = resources.get("GPU", 0.0)
    if present < gpus:
        raise InputError(f"--ray_gpus: expected at most {present:g}, which Ray has, found {gpus:g}")
    count = present // gpus if gpus else resources["CPU"]
    remote = ray.remote(_in_worker).options(num_gpus=gpus, max_retries=0)

    def attempt_on_ray(
        run: PlannedRun, stop: StopRequest, worker: Worker, quiet: bool
    ) -> Outcome | None:
        run.folder.mkdir(parents=True, exist_ok=True)
        run.log.touch()
        start = run.log.stat().st_size
        task = remote.remote(run, worker, os.getcwd())

        def has_ended() -> bool:
            return stop.requested() or bool(ray.wait([task], timeout=0.5)[0])

        watch(run, start, has_ended, "", quiet)
        if stop.requested():
            ray.cancel(task)
        try:
            return ray.get(task)
        except ray.exceptions.RayError as error:
            stop.poll()
            return Outcome(1, errors.line(error), killed=True)

    return [Worker("", {}, ()) for _ in range(int(count))], attempt_on_ray


def _in_worker(run: PlannedRun, worker: Worker, folder: str) -> Outcome | None:
    os.chdir(folder)
    return attempt(run, StopRequest(), worker, True)
