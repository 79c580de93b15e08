"""Learners on four devices: what they leave behind is what one device gives."""

import subprocess
import sys
from pathlib import Path

import pytest

from fdc_jax import learners
from tests import small_runs

# RSIAT's loss pairs images, which lie on different devices.
FAST = ("rsiat",)


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(FAST, marks=pytest.mark.ci),
        pytest.param(sorted({*learners.names()} - {*FAST}), marks=pytest.mark.slow),
    ],
    ids=["rsiat", "others"],
)
def test_four_devices_leave_what_one_leaves(names, cache):
    done = subprocess.run(
        [sys.executable, "-m", "tests.learners.several_devices", *names],
        cwd=Path(__file__).resolve().parents[2],
        env=small_runs.with_devices(4),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "four devices agree with one\n"
