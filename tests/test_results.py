"""What `results.json` says of memory; everything else in it is tested with the main program."""

import jax

from fdc_jax import devices, results


def test_memory_is_that_of_the_first_training_and_what_came_on_top():
    per_task = [{"training": 700, "task": 710}, {"training": 710, "task": 725}]
    assert results._peak_memory(per_task) == {"training": 700, "fdc_and_evaluation": 25}


def test_memory_that_nobody_recorded_is_none():
    nothing = {"training": None, "fdc_and_evaluation": None}
    assert results._peak_memory([{"training": None, "task": None}]) == nothing
    assert results._peak_memory([None, {"training": 1, "task": 2}]) == nothing


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
