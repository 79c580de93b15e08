"""Starts the programs of `benchmarks/`, for their tests."""

import contextlib
import io
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def bench(name, folder, *arguments):
    """Runs `benchmarks/NAME.py` in a folder, with warnings as errors."""
    return _run([ROOT / "benchmarks" / f"{name}.py", *arguments], folder)


def module(name, *arguments):
    """Runs `python -m benchmarks.NAME` in the repository, likewise."""
    return _run(["-m", f"benchmarks.{name}", *arguments], ROOT)


def refused(name, *arguments, folder=ROOT):
    """Returns the one line with which `benchmarks/NAME.py`, run in this process, ends with 2."""
    output, errors = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [f"{name}.py", *arguments])
        patch.setattr(sys, "path", [*sys.path])
        patch.chdir(folder)
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            with pytest.raises(SystemExit) as ended:
                runpy.run_path(str(ROOT / "benchmarks" / f"{name}.py"), run_name="__main__")
    assert (ended.value.code, output.getvalue()) == (2, "")
    (line,) = errors.getvalue().splitlines()
    return line


def _run(command, folder):
    return subprocess.run(
        [sys.executable, "-W", "error", *command],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        cwd=folder,
        check=False,
    )
