"""The protocol of inference timing, and what the contenders answer."""

import json

import numpy as np
import pytest

import fdc_jax
from fdc_jax import export, latency
from fdc_jax.errors import InputError
from tests import small_runs


def test_every_contender_is_placed_warmed_up_and_timed_in_turn(monkeypatch):
    events, peaks = [], iter([100, 150])
    monkeypatch.setattr(latency.devices, "peak_memory", lambda: next(peaks))

    def contender(name):
        def place():
            events.append(f"place {name}")
            return lambda: events.append(name)

        return place

    found = latency.measure({name: contender(name) for name in "ab"}, 2, 3, 5)
    assert events == ["place a", *["a"] * 17, "place b", *["b"] * 17]
    assert [each["peak_bytes"] for each in found.values()] == [100, 150]
    assert all(len(each["milliseconds"]) == 3 for each in found.values())


def test_contenders_answer_as_the_run_did(whole):
    run = fdc_jax.open_run(whole)
    rows, fdc = np.arange(60), run.calibrator("fdc")
    encoders = run.encoders
    given = run.encoder(2), run.encoder(0), run.test_images(rows), fdc
    calls = latency.contenders(encoders.extract.encode, encoders.backbone, *given)
    answers = {name: np.asarray(place()()) for name, place in calls.items()}
    np.testing.assert_array_equal(answers["baseline"], run.predictions["raw_label"])
    np.testing.assert_array_equal(answers["dual"], run.predictions["fdc_label"])
    views = [np.load(whole / "features" / f"test_{view}.npy") for view in ("adapted", "pretrained")]
    expected = fdc.components(*views)["adapted_view"].label
    np.testing.assert_array_equal(answers["single"], expected)


def test_heads_that_divide_by_the_norm_keep_doing_so():
    rng = np.random.default_rng(0)
    heads = [latency.Affine(rng.normal(size=(3, 4)), -2.0, True) for _ in range(2)]
    features = rng.normal(size=(20, 4)) * 10.0 ** rng.integers(-3, 3, (20, 1))
    rows = np.concatenate([head.rows for head in heads])
    expected = (features / np.linalg.norm(features, axis=1, keepdims=True) @ rows.T).argmax(axis=1)
    np.testing.assert_array_equal(latency.classifier(heads)(features.astype("f4")), expected)


def test_the_command_writes_a_file_and_says_that_a_processor_tells_no_memory(
    whole, tmp_path, capsys, monkeypatch
):
    folder = small_runs.copied(whole, tmp_path / "run")
    monkeypatch.setattr(latency.measure, "__defaults__", (1, 2, 1))
    assert latency.main([str(folder)]) == 0
    assert "a processor does not tell its memory" in capsys.readouterr().out
    found = json.loads((folder / "latency.json").read_text())
    assert found["images"] == 60 and list(found["contenders"]) == ["baseline", "single", "dual"]
    assert {each["peak_bytes"] for each in found["contenders"].values()} == {None}


def test_an_export_that_was_measured_still_opens(whole, tmp_path, monkeypatch):
    export.write(whole, tmp_path / "out")
    monkeypatch.setattr(latency, "of_run", lambda run: {"contenders": {}})
    monkeypatch.setattr(latency, "describe", str)
    assert latency.main([str(tmp_path / "out")]) == 0
    assert fdc_jax.open_run(tmp_path / "out").exported


def test_a_run_that_is_not_finished_is_refused(half):
    with pytest.raises(InputError, match="expected a finished run with FDC in both views"):
        latency.of_run(fdc_jax.open_run(half))
