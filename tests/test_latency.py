"""The protocol of inference timing, and what the contenders answer."""

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from sklearn.metrics.pairwise import cosine_similarity

import fdc_jax
from fdc_jax import calibration, export, latency
from fdc_jax.errors import InputError
from fdc_jax.heads import NearestMeanHead


def test_every_contender_is_warmed_up_and_timed_in_turn(monkeypatch):
    events, peaks = [], [100, 150, 170]
    monkeypatch.setattr(latency.devices, "peak_memory", lambda: peaks.pop(0))
    monkeypatch.setattr(latency, "raw_labels", lambda _: lambda views: events.append("raw"))
    monkeypatch.setattr(latency, "fdc_labels", lambda _, n: lambda v: events.append(f"fdc {n}"))

    def encode(backbone, images, view):
        events.append(view)

    actual = latency.timings(encode, None, ("adapted", "pretrained"), None, None, (2, 3, 5))
    expected = 17 * ["adapted", "raw"] + 17 * ["adapted", "fdc 1"]
    assert events == expected + 17 * ["adapted", "pretrained", "fdc 2"]
    assert [timing.peak_bytes for timing in actual.values()] == [100, 150, 170]
    assert all(len(timing.milliseconds) == 3 for timing in actual.values())


@pytest.mark.ci
def test_contenders_answer_as_the_run_did(finished_run):
    run = fdc_jax.open_run(finished_run)
    fdc, encoders, images = run.calibrator("fdc"), run.encoders, run.test_images(np.arange(60))
    views = [encoders.extract.encode(encoders.backbone, images, run.encoder(t)) for t in (2, 0)]
    raw = latency.raw_labels(fdc)(views[:1])
    assert_array_equal(raw, run.predictions["raw_label"])
    single = latency.fdc_labels(fdc, 1)(views[:1])
    assert_array_equal(single, fdc.components(*views)["adapted_view"].label)
    dual = latency.fdc_labels(fdc, 2)(views)  # The calibrator itself keeps both views.
    assert_array_equal(dual, run.predictions["fdc_label"])


def test_heads_that_divide_by_the_norm_keep_doing_so():
    rng, fdc = np.random.default_rng(0), calibration.FDC()
    means = rng.normal(size=(2, 3, 4)).astype("f4")
    fdc.heads = [*map(NearestMeanHead, means)]
    fdc.classes = np.array([[7, 3, 5], [2, 9, 1]])
    features = 1e3 * rng.normal(size=(20, 4)).astype("f4")
    cosines = cosine_similarity(features, means.reshape(6, 4))
    expected = fdc.classes.ravel()[cosines.argmax(axis=1)]
    assert_array_equal(latency.raw_labels(fdc)([features]), expected)


@pytest.mark.ci
def test_command_writes_latencies_without_memory_on_a_cpu(
    finished_run, tmp_path, capsys, monkeypatch
):
    """The file is beside those of a manifest; an export that was measured still opens."""
    folder = tmp_path / "out"
    export.write(finished_run, folder)
    monkeypatch.setattr(latency.measure_run, "__defaults__", ((1, 2, 1),))
    assert latency.main([str(folder)]) == 0
    assert "memory is measured on accelerators only" in capsys.readouterr().out
    measured = fdc_jax.open_run(folder).read_latency()
    assert measured.images == 60
    assert [measured.contenders[name].peak_bytes for name in ("baseline", "dual")] == [None, None]


def test_a_run_that_is_not_finished_is_refused(stopped_run):
    with pytest.raises(InputError, match="expected a finished run with FDC in both views"):
        latency.measure_run(fdc_jax.open_run(stopped_run))
