"""Kinds and memory of devices; how they share arrays is tested with learners and processes."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from fdc_jax.machine import devices


def test_the_fullest_device_counts(monkeypatch):
    class Device:
        def __init__(self, peak):
            self.peak = peak

        def memory_stats(self):
            return None if self.peak is None else {"peak_bytes_in_use": self.peak}

    monkeypatch.setattr(jax, "local_devices", lambda: [Device(5), Device(9), Device(7)])
    assert devices.peak_memory() == 9
    monkeypatch.setattr(jax, "local_devices", lambda: [Device(None)])
    assert devices.peak_memory() is None


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
