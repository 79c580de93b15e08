"""The command `fdc`: `fdc NAME ...` is `python -m fdc_jax.NAME ...`, and takes `--help`, too."""

import runpy
import sys

import fdc_jax
from fdc_jax.errors import InputError, Program, did_you_mean, guarded

PROGRAMS = {
    "run": ("fdc_jax.run", "learn a stream of tasks, calibrate and evaluate on the way"),
    "report": ("fdc_jax.report", "write a report about runs"),
    "predict": ("fdc_jax.predict", "say the classes of new images by a run"),
    "export": ("fdc_jax.export", "make a run one folder that predicts"),
    "posthoc": ("fdc_jax.posthoc", "calibrate heads from a file of features"),
}


def main() -> None:
    """Runs the program that the first word of the command line names."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name not in PROGRAMS:
        if code := guarded("fdc", lambda: _about(name)):
            sys.exit(code)
    else:
        Program.front = "python -m fdc_jax" if sys.argv[0] == __file__ else "fdc"
        sys.argv[1:] = arguments
        runpy.run_module(PROGRAMS[name][0], run_name="__main__", alter_sys=True)


def _about(name: str) -> None:
    if name == "--version":
        print(fdc_jax.__version__)
        return
    if name not in ("-h", "--help"):
        raise InputError(did_you_mean("NAME", name, PROGRAMS))
    width = max(map(len, PROGRAMS))
    lines = (f"  {each:<{width}}  {text}" for each, (_, text) in PROGRAMS.items())
    print("\n".join(["usage: fdc NAME ...", "", *lines]))


if __name__ == "__main__":
    main()
