"""Analyses of run folders: from disk where that is still valid, and absent with a reason if not."""

import json
from pathlib import Path
from typing import NamedTuple

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from fdc_jax import calibration, evaluation, feature_files
from fdc_jax.errors import InputError
from fdc_jax.report import analysis, cache, confusion
from fdc_jax.report.sweeps import sweep
from tests.report.feature_sets import feature_set

CHEAP = ("residual_contributions", "storage")


class Run(NamedTuple):
    path: Path
    results: dict
    features_path: Path | None

    def predictions(self):
        path = self.path / "predictions.npz"
        if not path.exists():
            return {}
        with np.load(path) as file:
            return dict(file)


def predicted():
    """Predictions of six images of three tasks, as a run stores them."""
    return {
        "task": np.array([0, 0, 0, 0, 2, 2]),
        "label": np.array([0, 0, 1, 1, 4, 5]),
        "raw_task": np.array([0, 1, 2, 0, 2, 0]),
        "raw_label": np.array([0, 2, 4, 0, 4, 1]),
        "fdc_task": np.array([0, 0, 0, 0, 2, 1]),
        "fdc_label": np.array([0, 1, 1, 1, 5, 3]),
        "oracle_label": np.array([0, 0, 0, 0, 4, 4]),
    }


@pytest.fixture
def run(tmp_path):
    features = feature_set(dual=False)
    folder = tmp_path / "features"
    for number, task in enumerate(features.tasks):
        feature_files.write_task(
            folder, number, task.adapted, task.labels, task.head, classes=task.classes
        )
    feature_files.write_test(folder, features.test_adapted, labels=features.test_labels)
    np.savez(tmp_path / "predictions.npz", **predicted())
    return Run(tmp_path, {"config": {"fdc.attenuation": 0.25, "benchmark": "digits"}}, folder)


def analyse(run, names=CHEAP):
    """Returns the analyses and which of them were computed."""
    computed = []
    return analysis.analyse(run, names, computed.append), computed


def test_every_analysis_of_a_run(run):
    found, computed = analyse(run, analysis.ANALYSES)
    assert list(found) == computed == list(analysis.ANALYSES)
    again, computed = analyse(run, analysis.ANALYSES)
    assert again == found
    assert computed == []
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    # The run's own settings are what everything else stays at.
    features = feature_files.load(run.features_path)
    settings = calibration.FDC(attenuation=0.25).settings
    assert found["sweep_retained_energy"] == sweep(features, settings, "retained_energy")
    assert found["sweep_attenuation"]["default"] == 0.25
    assert found["sweep_neighbours"]["values"] == [1, 2]


def test_another_setting_is_another_result(run):
    before, _ = analyse(run, ["sweep_retained_energy"])
    other = run._replace(results={"config": {"fdc.attenuation": 1.0}})
    after, computed = analyse(other, ["sweep_retained_energy"])
    assert computed == ["sweep_retained_energy"]
    assert after != before
    # What is stored now is the other's.
    assert analyse(run, ["sweep_retained_energy"]) == (before, ["sweep_retained_energy"])


def test_changed_features_are_analysed_again(run):
    before, _ = analyse(run)
    weight = run.features_path / "head_weight_0.npy"
    np.save(weight, 2.0 * np.load(weight))
    after, computed = analyse(run)
    assert computed == list(CHEAP)
    assert after["residual_contributions"] != before["residual_contributions"]


def test_other_values_are_swept_again(run, monkeypatch):
    analyse(run, ["sweep_attenuation"])
    monkeypatch.setitem(analysis.sweeps.VALUES, "attenuation", (0.0, 1.0))
    found, computed = analyse(run, ["sweep_attenuation"])
    assert found["sweep_attenuation"]["values"] == [0.0, 1.0]
    assert computed == ["sweep_attenuation"]


def test_another_schema_is_computed_again(run, monkeypatch):
    found, _ = analyse(run)
    monkeypatch.setattr(cache, "SCHEMA", cache.SCHEMA + 1)
    assert analyse(run) == (found, list(CHEAP))


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b"[1, 2]",
        b"\xff\xfe\x00",
        b"[" * 100_000,
        pytest.param(lambda text: text[: len(text) // 2], id="half"),
        pytest.param(lambda text: text.replace(b"bytes", b"bites", 1), id="name"),
        pytest.param(
            lambda text: text.replace(b'"total_bytes": ', b'"total_bytes": 1'), id="digit"
        ),
        pytest.param(lambda text: text.replace(b'"result"', b'"resort"'), id="result"),
    ],
)
def test_a_damaged_file_is_computed_again(run, damage):
    found, _ = analyse(run, ["storage"])
    path = run.path / "analysis" / "storage.json"
    sound = path.read_bytes()
    damaged = damage(sound) if callable(damage) else damage
    assert damaged != sound
    path.write_bytes(damaged)
    assert analyse(run, ["storage"]) == (found, ["storage"])
    assert path.read_bytes() == sound


@pytest.mark.parametrize(
    "content",
    [b"{", b"[]", b'{"features/test_labels.npy": "x"}', b'{"features/test_labels.npy": [1, 2]}'],
)
def test_damaged_checksums_are_taken_again(run, content):
    found, _ = analyse(run, ["storage"])
    path = run.path / "analysis" / "checksums.json"
    sound = json.loads(path.read_text())
    path.write_bytes(content)
    assert analyse(run, ["storage"]) == (found, [])
    assert json.loads(path.read_text()) == sound


def test_checksums_are_of_the_content(run, tmp_path):
    first = cache.checksum(run.features_path, tmp_path / "memory")
    assert cache.checksum(run.features_path, tmp_path / "memory") == first
    file = run.features_path / "test_labels.npy"
    file.write_bytes(file.read_bytes())
    assert cache.checksum(run.features_path, tmp_path / "memory") == first
    file.rename(file.with_name("test_label.npy"))
    assert cache.checksum(run.features_path, tmp_path / "memory") != first


def test_remembered_checksums_save_reading(run, monkeypatch):
    analyse(run, ["storage", "task_confusion"])
    monkeypatch.setattr(cache, "sha256", None)
    assert analyse(run, ["storage", "task_confusion"])[1] == []


def test_a_folder_that_cannot_be_written_costs_only_time(run):
    found, _ = analyse(run)
    for path in (run.path / "analysis").iterdir():
        path.unlink()
    (run.path / "analysis").rmdir()
    (run.path / "analysis").write_text("in the way")
    assert analyse(run) == (found, list(CHEAP))
    assert analyse(run) == (found, list(CHEAP))
    assert (run.path / "analysis").read_text() == "in the way"


def test_without_features_the_reason_is_said(run):
    (run.path / "predictions.npz").unlink()
    found, computed = analyse(run._replace(features_path=None), ["storage", "task_confusion"])
    assert found["missing"]["storage"].startswith("no saved features")
    assert found["missing"]["task_confusion"] == "no predictions.npz"
    assert list(found) == ["missing"]
    assert computed == []


def test_broken_features_are_a_reason_and_leave_the_rest(run):
    (run.features_path / "test_labels.npy").write_bytes(b"broken")
    found, _ = analyse(run, ["storage", "task_confusion"])
    assert list(found) == ["task_confusion", "missing"]
    assert "test_labels.npy: not a readable" in found["missing"]["storage"]


def test_features_without_test_labels_allow_what_needs_none(run):
    (run.features_path / "test_labels.npy").unlink()
    found, _ = analyse(run)
    assert "storage" in found
    assert found["missing"] == {
        "residual_contributions": "test_labels: absent, so the true tasks are not known"
    }


def test_settings_of_results():
    known = {"config": {"fdc.neighbours": 2, "train.rank": 10}}
    assert analysis.settings_of(known) == calibration.FDC(neighbours=2).settings
    assert analysis.settings_of({}) == calibration.FDC().settings
    with pytest.raises(InputError, match=r"unknown field fdc\.temperature"):
        analysis.settings_of({"config": {"fdc.temperature": 1.0}})


def test_an_unknown_analysis_is_refused(run):
    with pytest.raises(InputError, match=r"analysis: expected one of sweep_attenuation.*'colour'"):
        analyse(run, ["colour"])


def test_storage_counts_bytes():
    features = feature_set(pretrained_width=12)
    found = analysis.storage(features)
    images = sum(len(task.labels) for task in features.tasks)
    assert found == {
        "train_adapted_bytes": 4 * 16 * images,
        "train_pretrained_bytes": 4 * 12 * images,
        "test_adapted_bytes": 4 * 16 * 90,
        "test_pretrained_bytes": 4 * 12 * 90,
        "total_bytes": 4 * 28 * (images + 90),
    }
    assert analysis.storage(feature_set(dual=False))["train_pretrained_bytes"] == 0


def test_plain_values_are_what_json_has():
    value = {1: np.float32(0.5), "a": (np.int64(2), np.array([[1.0, np.nan]])), "b": float("inf")}
    assert cache.plain(value) == {"1": 0.5, "a": [2, [[1.0, None]]], "b": None}


def test_confusion_and_shares_by_hand():
    found = confusion.task_confusion(predicted())
    assert found["num_images"] == [4, 0, 2]
    assert found["raw"]["confusion"] == [[2, 1, 1], [0, 0, 0], [1, 0, 1]]
    assert found["fdc"]["confusion"] == [[4, 0, 0], [0, 0, 0], [0, 1, 1]]
    assert found["raw"]["right_task_right_class"] == [25.0, None, 50.0]
    assert found["raw"]["right_task_wrong_class"] == [25.0, None, 0.0]
    assert found["raw"]["wrong_task_oracle_right"] == [25.0, None, 0.0]
    assert found["raw"]["wrong_task_oracle_wrong"] == [25.0, None, 50.0]
    assert found["fdc"]["right_task_right_class"] == [75.0, None, 0.0]
    assert found["fdc"]["right_task_wrong_class"] == [25.0, None, 50.0]
    assert found["fdc"]["wrong_task_oracle_wrong"] == [0.0, None, 50.0]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(st.tuples(*[st.integers(0, 3)] * 2, *[st.integers(0, 1)] * 3), min_size=1))
def test_shares_of_tasks_weighted_by_images_are_those_of_the_run(rows):
    """Labels 2 t and 2 t + 1 belong to task t."""
    task, chosen, true, local, oracle = np.array(rows).T
    given_task = 2 * task + oracle
    label = np.where(chosen == task, given_task, 2 * chosen + local)
    columns = dict(task=task, label=2 * task + true, oracle_label=given_task)
    columns |= dict(raw_task=chosen, raw_label=label, fdc_task=task, fdc_label=2 * task)
    found = confusion.task_confusion(columns)
    whole = evaluation.decompose(task, columns["label"], chosen, label, given_task)._asdict()
    images = np.array(found["num_images"])
    for share in confusion.SHARES:
        values = np.array([value or 0.0 for value in found["raw"][share]])
        assert values @ images / len(rows) == pytest.approx(whole[share])
    assert np.trace(found["fdc"]["confusion"]) == len(rows)
