"""Every learner on four devices: what it leaves behind is what one device gives."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fdc_jax import learners

REPOSITORY = Path(__file__).resolve().parents[2]
# The programs are tiny; nearly all the time goes into compiling them.
FLAGS = (
    "--xla_force_host_platform_device_count=4",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
)


def run(what):
    done = subprocess.run(
        [sys.executable, "-m", "tests.learners.several_devices", what],
        cwd=REPOSITORY,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(FLAGS)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def some_are_slow(learner):
    """Marks learners whose passes over devices are those of the others.

    RSIAT's loss pairs images, as LoRA-Subtraction's does, and LoDA takes groups of them.
    """
    fast = learner in ("cumulative_lora", "loda", "rsiat")
    return pytest.param(learner, marks=() if fast else pytest.mark.slow)


@pytest.mark.parametrize("learner", [some_are_slow(learner) for learner in learners.names()])
def test_four_devices_leave_what_one_leaves(learner):
    assert run(learner).endswith(" arrays agree\n")


def test_second_moments_move_no_images_between_devices():
    assert run("second_moments") == "moments agree\n"
