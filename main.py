"""Learns a stream of tasks, fits FDC on the way, and reports accuracy with and without it.

python main.py --config=configs/digits.py --workdir=runs/digits [--config.FIELD=VALUE ...]
"""

import logging
import os
import re
import sys

# Before NumPy loads: threads of OpenBLAS that wait for a busy core spin, and decompositions of a
# few hundred rows gain nothing from them. And XLA's start-up notes are of no use to a reader.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from absl import app, flags
from ml_collections import config_flags

from fdc_jax import errors, host_memory, interruption

_CONFIG = config_flags.DEFINE_config_file("config", None, "The configuration file.")
_WORKDIR = flags.DEFINE_string("workdir", None, "The folder that receives everything.")
_QUIET = flags.DEFINE_boolean("quiet", False, "Print nothing but errors.")
_TRACEBACK = flags.DEFINE_boolean("traceback", False, "Show where in the code an error arose.")
flags.mark_flags_as_required(["config", "workdir"])

# Exit codes. 75 is EX_TEMPFAIL: the same command goes on from where this one stopped.
BAD_INPUT, TRAINING_FAILED, INTERRUPTED = 2, 3, 75


def _parse(arguments: list[str]) -> list[str]:
    try:
        return flags.FLAGS(arguments)
    except flags.Error as error:
        _fail(str(error).splitlines()[0])
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
    # JAX tells of every kind of device that it looked for in vain.
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.WARNING)


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
    try:
        from fdc_jax import command  # takes seconds

        command.run(config, str(_WORKDIR.value), _QUIET.value, stop)
    except (errors.InputError, errors.TrainingError, errors.Interrupted) as error:
        if _TRACEBACK.value:
            raise
        code = {errors.InputError: BAD_INPUT, errors.TrainingError: TRAINING_FAILED}
        _fail(str(error), code.get(type(error), INTERRUPTED))


if __name__ == "__main__":
    host_memory.keep_freed_memory()
    sys.path.append(os.getcwd())  # where a learner of the user's own may lie
    with interruption.stop_on_signals() as requested:
        app.run(lambda arguments: main(arguments, requested), flags_parser=_parse)
