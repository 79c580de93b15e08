"""Memory in `results.json`, which a run on a CPU does not have."""

from fdc_jax.run import results
from fdc_jax.run.records import Memory


def memory(training, extraction, **fit):
    return Memory(training=training, extraction=extraction, fit=fit)


def test_memory_of_a_calibrator_is_the_rise_of_the_peak():
    per_task = [memory(700, 5, fdc=3, gaussians=9), memory(720, 1, fdc=0, gaussians=2)]
    expected = {"training": 700, "fdc": 9, "gaussians": 17}
    assert results.peak_memory(per_task) == expected
    # A task that another process trained tells nothing about the rise.
    again = memory(None, 600, fdc=70, gaussians=0)
    assert results.peak_memory([*per_task, again]) == expected


def test_memory_is_unknown_on_a_cpu_and_after_a_kill():
    for first in (memory(None, None, fdc=None), memory(None, 7, fdc=1)):
        actual = results.peak_memory([first, memory(700, 1, fdc=1)])
        assert actual == {"training": None, "fdc": None}
