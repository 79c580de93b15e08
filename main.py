"""Learns a stream of tasks, fits FDC on the way, and reports accuracy with and without it.

python main.py --config=configs/digits.py [--workdir=FOLDER] [--config.FIELD=VALUE ...]
"""

import difflib
import os
import runpy
import sys
from pathlib import Path
from typing import Any

# Before NumPy loads: threads of OpenBLAS that wait for a busy core spin, and decompositions of a
# few hundred rows gain nothing from them. And XLA's start-up notes are of no use to a reader.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from absl import app, flags
from ml_collections import config_flags

from fdc_jax import errors, interruption

_CONFIG = config_flags.DEFINE_config_file("config", None, "The configuration file.")
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "The folder that receives everything; by default runs/NAME of configs/NAME.py."
)
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
flags.mark_flag_as_required("config")


def _parse(arguments: list[str]) -> list[str]:
    try:
        rest = flags.FLAGS(arguments)
        _CONFIG.value.keys()  # ml_collections reports a file that it could not load at first use
    except flags.Error as error:
        _fail(str(_cause(error)).splitlines()[0])
    except errors.InputError as error:
        _fail(str(error))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        _fail(_explain(error, arguments))
    except OSError as error:
        _fail(f"--config: {str(error).strip().splitlines()[-1].strip()}")
    else:
        if len(rest) == 1:
            return rest
        _fail(f"unexpected argument {rest[1]!r}; fields are set with --config.FIELD=VALUE")
    raise AssertionError("unreachable")


def _cause(error: BaseException | None) -> BaseException | None:
    """Returns what a configuration file raised, whatever wraps it, or the error itself."""
    chain = [error]
    while error := error and (error.__cause__ or error.__context__):
        chain.append(error)
    return next((each for each in chain[::-1] if isinstance(each, errors.InputError)), chain[0])


def _explain(error: Exception, arguments: list[str]) -> str:
    """Says in one line which flag ml_collections could not apply, and the nearest that it could."""
    parts = [argument.lstrip("-").partition("=") for argument in arguments]
    given = {name: value for name, _, value in parts}
    config = runpy.run_path(given["config"])["get_config"]() if given.get("config") else None
    known = [f"config.{field}" for field in _fields(config.to_dict())] if config else []
    for flag in given:
        if config and flag.startswith("config.") and flag not in known:
            nearest = difflib.get_close_matches(flag, known, 1)
            hint = f"did you mean --{nearest[0]}" if nearest else "configs/base.py lists them all"
            return f"--{flag}: the configuration has no such field; {hint}"
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _fields(tree: dict) -> list[str]:
    return [
        ".".join((name, *rest))
        for name, value in tree.items()
        for rest in ([(each,) for each in _fields(value)] if isinstance(value, dict) else [()])
    ]


def _fail(message: str) -> None:
    print(f"fdc_jax: error: {message}", file=sys.stderr)
    sys.exit(2)


def main(stop: interruption.StopRequest) -> None:
    """Runs the configured experiment; see `fdc_jax.command`."""
    from fdc_jax import command  # takes seconds

    flag: Any = flags.FLAGS["config"]
    name = Path(flag.config_filename.partition(":")[0]).stem
    command.main(
        _CONFIG.value,
        _WORKDIR.value or f"runs/{name}",
        stop,
        quiet=_QUIET.value,
        show_traceback=_TRACEBACK.value,
        join=(_DISTRIBUTED.value, _COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value),
    )


if __name__ == "__main__":
    sys.path.append(os.getcwd())  # where a learner of the user's own may lie
    with interruption.stop_on_signals() as requested:
        app.run(lambda arguments: main(requested), flags_parser=_parse)
