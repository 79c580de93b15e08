"""What `results.json` says of memory and of other affinities; the rest is tested with runs."""

import jax
import numpy as np
import pytest

from fdc_jax import devices, evaluation, results
from fdc_jax.calibration.components import WHITENED
from tests.calibration import streams


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


@pytest.mark.parametrize(
    ("variant", "entry"), [({"affinity_evidence": "linear"}, "linear"), (WHITENED, "whitened")]
)
def test_another_affinity_stands_beside_the_papers(variant, entry):
    stream = streams.stream(0, 3)
    inputs = streams.probe_inputs(stream)
    labels = np.arange(len(inputs[0])) % 9
    tasks = np.searchsorted([3, 7], labels, side="right")
    paper, columns = evaluation.measure(streams.fitted(stream).terms(*inputs), labels, tasks)
    terms = streams.fitted(stream, **variant).terms(*inputs)
    found, more = evaluation.measure(terms, labels, tasks)
    assert {name: found[name] for name in paper} == paper
    assert found.keys() - paper.keys() == {entry}
    assert more.keys() - columns.keys() == {f"{entry}_label", f"{entry}_task"}
    assert found[entry]["affinity"]["evidence"] == "linear"
    np.testing.assert_array_equal(more[f"{entry}_label"], terms.scores().label)
    np.testing.assert_array_equal(more["fdc_label"], terms.fuse().label)
    assert (more[f"{entry}_label"] != more["fdc_label"]).any()
    assert found[entry]["accuracy"] == evaluation.accuracy(labels, terms.scores().label)


def test_each_task_so_far_has_an_accuracy():
    stream = streams.stream(0, 3)
    inputs = streams.probe_inputs(stream)
    labels = np.where(np.arange(len(inputs[0])) % 2, 1, 8)
    tasks = np.where(labels == 1, 0, 2)  # no image of the task between
    found, columns = evaluation.measure(streams.fitted(stream).terms(*inputs), labels, tasks)
    for name in ("raw", "fdc", "oracle"):
        right = columns[f"{name}_label"] == labels
        first, none, last = found["task_accuracy"][name]
        assert none is None
        assert first == pytest.approx(100 * right[tasks == 0].mean())
        assert last == pytest.approx(100 * right[tasks == 2].mean())
