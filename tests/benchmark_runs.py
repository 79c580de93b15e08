"""Starts the programs of `benchmarks/`, for their tests."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def bench(name, folder, *arguments):
    """Runs `benchmarks/NAME.py` in a folder, with warnings as errors."""
    return _run([ROOT / "benchmarks" / f"{name}.py", *arguments], folder)


def module(name, *arguments):
    """Runs `python -m benchmarks.NAME` in the repository, likewise."""
    return _run(["-m", f"benchmarks.{name}", *arguments], ROOT)


def _run(command, folder):
    return subprocess.run(
        [sys.executable, "-W", "error", *command],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        cwd=folder,
        check=False,
    )
