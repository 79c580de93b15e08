"""Memory of devices; how arrays are split between them is tested with learners and processes."""

import jax

from fdc_jax import devices


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
