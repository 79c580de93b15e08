"""The command `fdc`: `fdc NAME ...` is `python -m fdc_jax NAME ...`, and takes `--help`, too."""

import os
import runpy
import sys

import fdc_jax
from fdc_jax.errors import InputError, did_you_mean, guarded, stop_on_signals

PROGRAMS = {
    "run": "learn a stream of tasks, calibrate and evaluate on the way",
    "report": "write a report about runs",
    "predict": "say the classes of new images by a run",
    "export": "make a run one folder that predicts",
    "posthoc": "calibrate heads from a file of features",
    "bench": "write and check records of the league",
}


def main() -> None:
    """Runs the program that the first word of the command line names."""
    name = sys.argv.pop(1) if len(sys.argv) > 1 else "--help"
    if name not in PROGRAMS:
        if code := guarded("fdc", lambda: _about(name)):
            sys.exit(code)
        return
    sys.path.append(os.getcwd())  # where a learner of the user's own may lie
    if name in ("run", "bench"):
        # Before NumPy loads: threads of OpenBLAS that wait for a busy core spin, and decompositions
        # of a few hundred rows gain nothing from them. XLA's start-up notes are of no use.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if name != "run":
        runpy.run_module(f"fdc_jax.{name}", run_name="__main__")
        return
    # From here on a signal counts; what follows takes seconds to import.
    with stop_on_signals() as stop:
        from fdc_jax import command

        sys.exit(command.main(stop))


def _about(name: str) -> None:
    if name == "--version":
        print(fdc_jax.__version__)
        return
    if name not in ("-h", "--help"):
        raise InputError(did_you_mean("NAME", name, PROGRAMS))
    width = max(map(len, PROGRAMS))
    lines = (f"  {each:<{width}}  {text}" for each, text in PROGRAMS.items())
    print("\n".join(["usage: fdc NAME ...", "", *lines]))


if __name__ == "__main__":
    main()
