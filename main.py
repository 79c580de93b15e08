"""Learns a stream of tasks, fits FDC on the way, and reports accuracy with and without it.

python main.py --config=configs/digits.py --workdir=runs/digits [--config.FIELD=VALUE ...]
"""

import faulthandler
import logging
import os
import re
import sys
import traceback

# Before NumPy loads: threads of OpenBLAS that wait for a busy core spin, and decompositions of a
# few hundred rows gain nothing from them. And XLA's start-up notes are of no use to a reader.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from absl import app, flags
from ml_collections import config_flags

from fdc_jax import errors, interruption

_CONFIG = config_flags.DEFINE_config_file("config", None, "The configuration file.")
_WORKDIR = flags.DEFINE_string("workdir", None, "The folder that receives everything.")
_QUIET = flags.DEFINE_boolean("quiet", False, "Print nothing but errors.")
_TRACEBACK = flags.DEFINE_boolean("traceback", False, "Show where in the code an error arose.")
_DISTRIBUTED = flags.DEFINE_boolean(
    "distributed", False, "Join the other processes of a TPU pod, SLURM or MPI job."
)
_COORDINATOR = flags.DEFINE_string(
    "coordinator_address", None, "Elsewhere: host:port of process 0, the same for all processes."
)
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "Elsewhere: how many there are.")
_PROCESS_ID = flags.DEFINE_integer("process_id", None, "Elsewhere: which one this is, from 0.")
flags.mark_flags_as_required(["config", "workdir"])

# Exit codes. 75 is EX_TEMPFAIL: the same command goes on from where this one stopped.
BAD_INPUT, TRAINING_FAILED, INTERRUPTED = 2, 3, 75
_CODES: dict[type[Exception], int] = {
    errors.InputError: BAD_INPUT,
    errors.TrainingError: TRAINING_FAILED,
    errors.Interrupted: INTERRUPTED,
}


def _parse(arguments: list[str]) -> list[str]:
    try:
        return flags.FLAGS(arguments)
    except flags.Error as error:
        _fail(str(error).splitlines()[0])
    except errors.InputError as error:
        _fail(str(error))
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        _fail(_explain(error, arguments))
    raise AssertionError("unreachable")


def _explain(error: Exception, arguments: list[str]) -> str:
    """Says in one line which flag ml_collections could not apply."""
    for argument in arguments:
        name, _, _ = argument.lstrip("-").partition("=")
        fields = name.split(".")[1:] if isinstance(error, AttributeError | KeyError) else []
        if any(re.search(rf"\b{re.escape(field)}\b", str(error)) for field in fields):
            return f"--{name}: the configuration has no such field; configs/base.py lists them all"
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _fail(message: str, code: int = BAD_INPUT) -> None:
    print(f"fdc_jax: error: {message}", file=sys.stderr)
    sys.exit(code)


def _plain_warnings() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("fdc_jax: %(levelname)s: %(message)s"))
    logger = logging.getLogger("fdc_jax")
    logger.addHandler(handler)
    logger.propagate = False
    # JAX tells of every kind of device that it looked for in vain, and of every connection.
    for name in ("xla_bridge", "distributed"):
        logging.getLogger(f"jax._src.{name}").setLevel(logging.WARNING)
    # And matplotlib of the fonts that it found, in the first report of a machine.
    logging.getLogger("matplotlib").setLevel(logging.WARNING)


def main(arguments: list[str], stop: interruption.StopRequest) -> None:
    """Runs the configured experiment; see `fdc_jax.command`."""
    if len(arguments) > 1:
        _fail(f"unexpected argument {arguments[1]!r}; fields are set with --config.FIELD=VALUE")
    try:
        config = _CONFIG.value
        config.keys()  # ml_collections reports a file that it could not load at first use
    except OSError as error:
        _fail(f"--config: {str(error).strip().splitlines()[-1].strip()}")
    _plain_warnings()
    from fdc_jax import devices

    devices.keep_freed_memory()
    from fdc_jax import command, processes  # takes seconds

    try:
        processes.start(
            _DISTRIBUTED.value, _COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value
        )
        if processes.count() > 1:
            stop.agree = processes.Agreement()
            faulthandler.disable()  # JAX ends those whom another one left, and says so
        if not processes.is_first():
            logging.getLogger("fdc_jax").setLevel(logging.ERROR)
        command.run(config, str(_WORKDIR.value), _QUIET.value, stop)
    except Exception as error:
        _end(error)
    processes.leave()


def _end(error: Exception) -> None:
    """Says in one line what went wrong and exits, together with processes that failed alike."""
    from fdc_jax import processes

    lost = processes.lost(error)
    message = str(error) if type(error) in _CODES else lost
    code = _CODES.get(type(error), INTERRUPTED if message else 1)
    if message is None or _TRACEBACK.value:
        if processes.count() == 1:
            raise error
        traceback.print_exception(error)
    elif processes.is_first():
        print(f"fdc_jax: error: {message}", file=sys.stderr, flush=True)
    number = processes.index()
    if lost is None and processes.leave():
        sys.exit(code)
    if message and number:
        print(f"fdc_jax: error: process {number}: {message}", file=sys.stderr, flush=True)
    # The ordinary end would wait for the others once more.
    os._exit(code)


if __name__ == "__main__":
    sys.path.append(os.getcwd())  # where a learner of the user's own may lie
    with interruption.stop_on_signals() as requested:
        app.run(lambda arguments: main(arguments, requested), flags_parser=_parse)
