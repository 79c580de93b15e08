"""The processes of a run, one or more on each host: how they start, agree, share and end.

All processes run the same program and make the same decisions. Each process decodes its own rows of
every batch; the devices combine gradients, features and moments. State, features, calibrator and
scores are the same on all processes. Only process 0 reads and writes the work directory and sends
the values to the others (`on_first`, `from_first`), which need no access to it. A single process
exchanges nothing.

An error on all processes, or one while they exchange values, ends all of them. A process that fails
alone waits half a minute for the others, reports the error and ends. If a process has ended or
died, JAX's coordination service ends the others, at the latest after 100 seconds without a
heartbeat. The same command on all hosts resumes the run.
"""

import contextlib
import errno
import functools
import json
import logging
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from fdc_jax.errors import Ending, InputError, Interrupted, TrainingError, counted, line

_log = logging.getLogger(__name__)
# Seconds that a process waits for the others at the start, and from when on it says so.
JOINING_SECONDS = 300
SILENT_SECONDS = 10
# Seconds that an ending process waits for the others.
LEAVING_SECONDS = 30
# Batches between two looks at whether any process was asked to stop.
AGREE_EVERY = 8

_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (InputError, TrainingError, Interrupted)
}


def join(where: str | None) -> None:
    """Joins the other processes; does nothing for None.

    `auto` lets JAX find them (TPU pods, SLURM, Open MPI, Kubernetes). Otherwise `HOST:PORT,0/2` is
    an address of process 0, free there and reachable from all hosts, the number of this process
    and the number of processes.

    Raises:
        InputError: the text has another form, the port is in use, there is no job, or the other
            processes do not join in time.
    """
    if where is None:
        return
    arguments: Any = ()
    failed, others = "JAX found no job here; give HOST:PORT,0/2", "the other processes"
    if where != "auto":
        match = re.fullmatch(r"(.+):(\d+),(\d+)/(\d+)", where)
        if match is None or int(match[3]) >= int(match[4]) or int(match[2]) >= 2**16:
            raise InputError(f"--distributed: expected HOST:PORT,0/2 or auto, found {where}")
        address = f"{match[1]}:{match[2]}"
        number, processes = map(int, match.groups()[2:])
        arguments, failed = (address, processes, number), "cannot join the others"
        others = f"process 0 at {address}" if number else counted(processes - 1, "other process")
        if number == 0:
            _check_port(where, int(match[2]))
    # SIGTERM is ours: JAX's own notice of it would replace our handler.
    jax.config.update("jax_enable_preemption_service", False)
    # In a thread, since JAX blocks signals while it waits, and aborts at its own limit.
    limit = {"initialization_timeout": 2 * JOINING_SECONDS}
    joining = ThreadPoolExecutor(1).submit(jax.distributed.initialize, *arguments, **limit)
    if not wait([joining], SILENT_SECONDS).done:
        _log.warning("waits for %s, at most %d seconds", others, JOINING_SECONDS)
    try:
        joining.result(JOINING_SECONDS)
    except TimeoutError as error:
        text = f"no answer from {others} within {JOINING_SECONDS} seconds"
        raise InputError(f"--distributed={where}: {text}") from error
    except (RuntimeError, ValueError) as error:
        raise InputError(f"--distributed={where}: {failed} ({line(error)})") from error


def _check_port(where: str, port: int) -> None:
    """Raises InputError if a port is in use, where JAX may crash."""
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            text = f"port {port} is in use, perhaps by an earlier process that has not ended"
            raise InputError(f"--distributed={where}: {text}") from error


@contextlib.contextmanager
def joined(where: str | None, ending: Ending) -> Iterator[None]:
    """Joins the other processes, as `start` does, for the time of a block, and leaves them.

    If all processes fail, process 0 reports the error; a process that fails alone ends at once.
    """
    try:
        join(where)
    except InputError:
        ending.at_once = True  # JAX may wait on.
        raise
    number = index()
    if count() == 1:
        yield
        return
    if number:
        logging.getLogger("fdc_jax").setLevel(logging.ERROR)
    try:
        yield
    except Exception as error:
        lost = isinstance(error, jax.errors.JaxRuntimeError)
        lost = lost and "RESOURCE_EXHAUSTED" not in str(error)
        ending.at_once = lost or not _leave()
        ending.silent = number > 0 and not ending.at_once
        if number:
            ending.title += f": process {number}"
        if lost:
            text = f"lost another process of this run ({line(error)}); start all processes again"
            raise Interrupted(text) from error
        raise
    _leave()


def _leave() -> bool:
    """Leaves the others; returns False, for the caller to end at once, if not all leave in time."""
    from jax._src import distributed

    try:
        # The barrier within `shutdown` would end this process if the others stayed away.
        # JAX has no public barrier with a time limit.
        client: Any = distributed.global_state.client
        client.wait_at_barrier("fdc_jax/leave", LEAVING_SECONDS * 1000)
        jax.distributed.shutdown()
    except RuntimeError:
        return False
    return True


def count() -> int:
    """Returns the number of processes of the run."""
    return jax.process_count() if jax.distributed.is_initialized() else 1


def index() -> int:
    """Returns the number of this process, from 0."""
    return jax.process_index() if count() > 1 else 0


def is_first() -> bool:
    """Returns True on process 0, which may be the only one."""
    return index() == 0


def all_values(function: Callable[[], Any], takes_part: bool = True) -> list[Any]:
    """Returns a function's JSON values on all processes; an error on one is raised on all.

    The value of a process that takes no part is None.
    """
    if count() == 1:
        return [function()]
    message: dict[str, Any] = {"value": None}
    failure: Exception | None = None
    try:
        message["value"] = function() if takes_part else None
    except Exception as error:
        if getattr(error, "shared", False):
            raise
        failure = error
        message |= {"kind": type(error).__name__, "text": str(error)}
    text = np.frombuffer(json.dumps(message).encode(), np.uint8)
    sizes = np.asarray(multihost_utils.process_allgather(np.int32(text.size)))
    # A power of two, since each length compiles another program.
    padded = np.zeros(1 << max(10, int(sizes.max() - 1).bit_length()), np.uint8)
    padded[: text.size] = text
    rows = np.asarray(multihost_utils.process_allgather(padded))
    messages = [json.loads(bytes(row[:size])) for row, size in zip(rows, sizes, strict=True)]
    for number, answer in enumerate(messages):
        if "kind" in answer:
            if number != index() or failure is None:
                kind = _KINDS.get(answer["kind"], RuntimeError)
                prefix = f"process {number}: " if number or kind is RuntimeError else ""
                failure = kind(f"{prefix}{answer['text']}")
            failure.shared = True  # pyright: ignore[reportAttributeAccessIssue]
            raise failure
    return [answer["value"] for answer in messages]


def on_first(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function run on process 0 alone; its JSON value, or its exception, reaches all."""

    @functools.wraps(function)
    def run(*arguments: Any, **options: Any) -> Any:
        return all_values(lambda: function(*arguments, **options), is_first())[0]

    return run


def together(function: Callable[[], Any]) -> Any:
    """Returns this process's value of a function, of any type; raises like `all_values`."""
    result: list[Any] = []
    all_values(lambda: result.append(function()))
    return result[0]


def from_first(
    read: Callable[[], Mapping[str, np.ndarray] | None],
) -> Mapping[str, np.ndarray] | None:
    """Returns on all processes, bit for bit, arrays by name that a function reads on process 0."""
    if count() == 1:
        return read()
    arrays: dict[str, np.ndarray] = {}

    def describe() -> dict[str, Any] | None:
        if (read_arrays := read()) is None:
            return None
        arrays.update(read_arrays)
        return {name: [str(a.dtype), list(a.shape)] for name, a in read_arrays.items()}

    described = all_values(describe, is_first())[0]
    for name, (dtype, shape) in (described or {}).items():
        array = arrays.get(name, np.zeros(shape, jnp.dtype(dtype)))
        # As bytes: sums of floats would turn -0 into 0.
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        received = np.asarray(multihost_utils.broadcast_one_to_all(flat), np.uint8)
        arrays[name] = received.view(array.dtype).reshape(array.shape)
    return None if described is None else arrays


def check_same(values: dict[str, Any]) -> None:
    """Raises InputError on all processes when JSON values by name differ between them."""
    first, *others = all_values(lambda: values)
    for number, other in enumerate(others, start=1):
        for name in sorted(first.keys() | other.keys()):
            if first.get(name) != other.get(name):
                raise InputError(
                    f"process {number} has {name} {other.get(name)!r}, process 0 has "
                    f"{first.get(name)!r}; expected the same on all"
                )


class Agreement:
    """The largest number that a process has passed, the same at the same call on all processes.

    All processes must call it equally often; they exchange numbers at every eighth call.
    """

    def __init__(self) -> None:
        self._calls, self._agreed = 0, 0

    def __call__(self, number: int) -> int:
        """Returns the number agreed so far; `number` is this process's own."""
        if not self._agreed and self._calls % AGREE_EVERY == 0:
            self._agreed = max(all_values(lambda: number))
        self._calls += 1
        return self._agreed
