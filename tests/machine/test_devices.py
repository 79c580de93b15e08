"""Kinds of devices; how they share arrays is tested with learners and processes."""

from types import SimpleNamespace

import numpy as np
import pytest

from fdc_jax.machine import devices


@pytest.mark.parametrize(
    ("platform", "capability", "expected"),
    [
        *(("gpu", "9.0", True), ("gpu", "12.0", True), ("gpu", "7.5", False)),
        *(("gpu", "gfx90a", False), ("tpu", "", False), ("cpu", "", False)),
    ],
)
def test_fused_attention_runs_on_recent_gpus_of_nvidia(platform, capability, expected):
    device = SimpleNamespace(platform=platform, compute_capability=capability)
    assert devices.have_cudnn(SimpleNamespace(devices=np.array([device]))) is expected
