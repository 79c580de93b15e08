"""Learns a stream of tasks, fits FDC on the way, and reports accuracy with and without it.

    fdc run --config=digits [--workdir=FOLDER] [--config.FIELD=VALUE ...]

A configuration is a file, or the name of one of the package; in a clone `python main.py` is the
same as `fdc run`.
"""

import contextlib
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

from fdc_jax import errors

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "The configuration: a file, or a name such as digits."
)
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


def _expected() -> str:
    """Says what --config may be."""
    known = sorted(path.stem for path in (Path(__file__).parents[1] / "configs").glob("*.py"))
    return f"expected a file, or one of {', '.join(known)}"


flags.register_validator("config", lambda value: value is not None, _expected())


def _joined(arguments: list[str]) -> list[str]:
    """Makes `--config=NAME` of `--config NAME`."""
    found: list[str] = []
    for argument in arguments:
        if found and found[-1] == "--config":
            found[-1] += f"={argument}"
        else:
            found.append(argument)
    return found


def _located(argument: str) -> str:
    """Puts the packaged file in the place of a configuration's name, or of `configs/NAME.py`."""
    flag, _, given = argument.partition("=")
    package = Path(__file__).parents[1]
    if flag == "--config" and not Path(given).is_file():
        for path in (package / "configs" / f"{given}.py", package / given):
            if path.is_file():
                return f"{flag}={path}"
    return argument


def _parse(arguments: list[str]) -> list[str]:
    arguments = [_located(argument) for argument in _joined(arguments)]
    try:
        rest = flags.FLAGS(arguments)
        _CONFIG.value.keys()  # ml_collections reports a file that it could not load at first use
        if len(rest) == 1:
            return rest
        said = f"unexpected argument {rest[1]!r}; fields are set with --config.FIELD=VALUE"
    except OSError as error:
        said = str(error).strip().splitlines()[-1].strip()
        said = f"--config: {said}; {_expected()}"
    except (flags.Error, AttributeError, KeyError, TypeError, ValueError) as error:
        chain: list[BaseException] = [error]
        while cause := chain[-1].__cause__ or chain[-1].__context__:
            chain.append(cause)
        # What a configuration file raised, whatever wraps it.
        told = [str(each) for each in chain if isinstance(each, errors.InputError)]
        if not told:
            told = [_unknown_field(arguments) or str(error).strip() or type(error).__name__]
        said = told[-1]
    print(f"fdc_jax: error: {said.splitlines()[0]}", file=sys.stderr)
    sys.exit(2)


def _unknown_field(arguments: list[str]) -> str | None:
    """Says which flag is no field of the configuration, and the nearest that is."""
    flagged = (argument for argument in arguments if argument.startswith("--"))
    given = {name: value for name, _, value in (each[2:].partition("=") for each in flagged)}
    try:
        from fdc_jax.run import configuration

        config = runpy.run_path(given["config"])["get_config"]()
        fields = [f"config.{field}" for field in configuration.flatten(config)]
    except Exception:  # whatever a file raises that is no configuration
        return None
    for flag in given:
        if "." in flag and flag not in fields:
            nearest = difflib.get_close_matches(flag, fields, 1)
            hint = f"did you mean --{nearest[0]}" if nearest else "configs/base.py lists them all"
            return f"--{flag}: the configuration has no such field; {hint}"
    return None


def main(stop: errors.StopRequest) -> None:
    """Runs the configured experiment; see `fdc_jax.run.command`."""
    from fdc_jax.run import command  # takes seconds

    flag: Any = flags.FLAGS["config"]
    name = Path(flag.config_filename.partition(":")[0]).stem
    if name == "own":
        from fdc_jax.data import sources

        with contextlib.suppress(errors.InputError):  # The program says it, in its place.
            name = sources.name_of(_CONFIG.value.benchmark, _CONFIG.value.data.source)
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
    with errors.stop_on_signals() as requested:
        app.run(lambda arguments: main(requested), flags_parser=_parse)
