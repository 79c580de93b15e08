"""The command `fdc`: `fdc NAME ...` is `python -m fdc_jax NAME ...`, and takes `--help`, too."""

import os
import sys

import fdc_jax
from fdc_jax.machine.search_path import leave_out_current_folder

PROGRAMS = {
    "run": "learn a stream of tasks, calibrate and evaluate on the way",
    "paper": "all runs of the paper, and its tables from them",
    "report": "write a report about runs",
    "predict": "say the classes of new images by a run",
    "latency": "time the inference of runs by the paper's protocol",
    "export": "make a run one folder that predicts",
    "posthoc": "calibrate heads from a file of features",
}


def end_at_once(number: int, frame: object) -> None:
    """Handles Ctrl-C before a program handles it: nothing is written, imports may swallow it."""
    os.write(2, b"fdc_jax: stopped by SIGINT\n")
    os._exit(130)


def main() -> None:
    """Runs the program that the first word of the command line names."""
    leave_out_current_folder()
    import signal

    signal.signal(signal.SIGINT, end_at_once)
    import functools
    import importlib

    from fdc_jax.errors import did_you_mean, stop_on_signals

    name = sys.argv.pop(1) if len(sys.argv) > 1 else "--help"
    os.environ["JAX_ENABLE_X64"] = "0"  # before JAX is imported
    if name == "run":
        with stop_on_signals() as stop:
            from absl import app

            from fdc_jax import command

            app.run(functools.partial(command.main, stop), flags_parser=command.parse)
    elif name in PROGRAMS:
        module = f"{name}.command" if name in ("report", "posthoc") else name
        sys.exit(importlib.import_module(f"fdc_jax.{module}").main())
    elif name == "--version":
        print(fdc_jax.__version__)
    elif name in ("-h", "--help"):
        print("usage: fdc NAME ...\nexample: fdc run --config=digits\n")
        width = max(map(len, PROGRAMS))
        print("\n".join(f"  {name:<{width}}  {text}" for name, text in PROGRAMS.items()))
    else:
        print(f"fdc: {did_you_mean('NAME', name, PROGRAMS)}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
