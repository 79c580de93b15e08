"""Starts the programs of `benchmarks/`, for their tests."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def bench(name, folder, *arguments):
    """Runs `benchmarks/NAME.py` in a folder, with warnings as errors."""
    return subprocess.run(
        [sys.executable, "-W", "error", ROOT / "benchmarks" / f"{name}.py", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        cwd=folder,
        check=False,
    )
