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
_MODULES = {
    "run": "run_command",
    "paper": "paper.paper_command",
    "report": "report.report_command",
    "posthoc": "posthoc.posthoc_command",
}


def load(name: str):
    """Returns a program, after the set-up of the process that it is to run in.

    SIGTERM and Ctrl-C end the process at once, with one line, unless a loop turns them into a
    request (`errors.stop_on_signals`): an exception would be lost in imports and in callbacks of
    the garbage collector, and what compiled programs leave behind may crash at the end of Python.
    """
    leave_out_current_folder()
    import atexit
    import signal

    def end(number: int, frame: object) -> None:
        text, code = signal.Signals(number).name, 128 + number
        if name in ("run", "paper"):
            text, code = f"{text}; the same command resumes", 75
        os.write(2, f"fdc_jax.{name}: stopped by {text}\n".encode())
        os._exit(code)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
        # Python frees its modules after this, for long, without handlers; all work is done.
        atexit.register(signal.signal, number, signal.SIG_IGN)
    os.environ["JAX_ENABLE_X64"] = "0"  # before JAX is imported
    import importlib

    from fdc_jax.errors import Ending

    with Ending(f"fdc_jax.{name}") as ending:  # JAX reads its variables when it is imported.
        return importlib.import_module(f"fdc_jax.{_MODULES.get(name, name)}").main
    sys.exit(ending.code)


def main() -> None:
    """Runs the program that the first word of the command line names."""
    name = sys.argv.pop(1) if len(sys.argv) > 1 else "--help"
    if name in PROGRAMS:
        sys.exit(load(name)())
    leave_out_current_folder()
    if name == "--version":
        print(fdc_jax.__version__)
    elif name in ("-h", "--help"):
        print("usage: fdc NAME ...\nexample: fdc run --config=digits\n")
        width = max(map(len, PROGRAMS))
        print("\n".join(f"  {name:<{width}}  {text}" for name, text in PROGRAMS.items()))
    else:
        from fdc_jax.errors import did_you_mean, displayed

        print(displayed(f"fdc: {did_you_mean('NAME', name, PROGRAMS)}"), file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
