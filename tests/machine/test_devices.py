"""Kinds of devices; how they share arrays is tested with learners and processes."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from fdc_jax.machine import devices


@pytest.mark.parametrize(
    "platform, capability, expected",
    [
        ("gpu", "12.0", True),
        ("gpu", "7.5", False),
        ("gpu", "gfx90a", False),
        ("tpu", "", False),
        ("cpu", "", False),
    ],
)
def test_fused_attention_runs_on_recent_gpus_of_nvidia(platform, capability, expected):
    device = SimpleNamespace(platform=platform, compute_capability=capability)
    assert devices.have_cudnn(SimpleNamespace(devices=np.array([device]))) is expected


def test_a_stopwatch_takes_compilation_apart():
    double = jax.jit(lambda values: 2 * values)
    first = devices.Stopwatch()
    double(np.ones(3)).block_until_ready()
    compiled = first.read()
    assert compiled.compile_seconds > 0 and compiled.seconds >= 0
    second = devices.Stopwatch()
    double(np.ones(3)).block_until_ready()
    assert second.read().compile_seconds == 0
    assert second.read().seconds > 0
