"""Saved calibrators: round trips, refusals, and scoring with NumPy alone."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from fdc_jax import calibration
from fdc_jax.calibration.components import WHITENED, WHITENED_CLASSES
from fdc_jax.errors import InputError
from tests.calibration import streams

KINDS = ("linear", "normalised_linear", "cosine", "nearest_mean")
PAPER = {"attenuation": 0.3, "rlc_weight": 0.9, "neighbours": 2}


def load(path, heads=None):
    """Reads a calibrator, to compute with NumPy like those that the tests save."""
    return calibration.load(path, heads).to_numpy()


@pytest.mark.parametrize(
    ("settings", "kind", "dual"),
    [
        *((PAPER, kind, True) for kind in KINDS),
        (PAPER, "linear", False),
        (WHITENED, "linear", False),
        (WHITENED, "cosine", True),
        (WHITENED_CLASSES, "linear", True),
    ],
)
def test_saved_continued_and_scored_on_a_device(tmp_path, settings, kind, dual):
    stream = streams.stream(8, 4)
    inputs = streams.probe_inputs(stream)[: 1 + dual]
    streams.fitted(stream[:3], kind, dual, **settings).save(tmp_path / "three.npz")
    loaded = streams.fit(load(tmp_path / "three.npz"), stream[3:], kind, dual)
    whole = streams.fitted(stream, kind, dual, **settings)
    assert loaded.settings == whole.settings
    assert loaded.storage_bytes == whole.storage_bytes
    streams.same_scores(loaded, whole, inputs)
    whole.save(tmp_path / "four.npz")
    device = calibration.load(tmp_path / "four.npz")
    for switches in ({}, {"tsf": False}, {"rlc": False}, {"pac": False}, {"adapted_view": False}):
        found = device.terms(*inputs).scores(**switches)
        wanted = whole.terms(*inputs).scores(**switches)
        assert streams.relative_error(found.task_scores, wanted.task_scores) < 1e-4
        assert (found.label == wanted.label).mean() > 0.99


def test_released_residuals_are_not_stored(tmp_path):
    stream = streams.stream(2, 3)
    found = streams.fitted(stream)
    found.save(tmp_path / "whole.npz")
    found.finalize(release=True)
    found.save(tmp_path / "released.npz")
    names = set(np.load(tmp_path / "whole.npz").files) - set(
        np.load(tmp_path / "released.npz").files
    )
    assert names == {"adapted_foreign", "pretrained_foreign"}
    loaded = load(tmp_path / "released.npz")
    inputs = streams.probe_inputs(stream)
    streams.same_scores(loaded, found, inputs)
    with pytest.raises(InputError, match="released"):
        streams.fit(loaded, stream[:1])


def test_a_calibrator_must_be_finalized_to_be_saved(tmp_path):
    with pytest.raises(InputError, match="finalize, first"):
        calibration.FDC().save(tmp_path / "calibrator.npz")
    assert not list(tmp_path.iterdir())


def test_function_heads_are_given_again(tmp_path):
    stream = streams.stream(4, 3)
    found = streams.fitted(stream, "function")
    path = tmp_path / "calibrator.npz"
    found.save(path)
    with pytest.raises(InputError, match=r"calibrator\.npz: head_kind: its heads are functions"):
        calibration.load(path)
    given = [streams.head_of(task, "function") for task in stream]
    with pytest.raises(InputError, match="expected one per task, 3, found 2"):
        calibration.load(path, heads=given[:2])
    streams.same_scores(load(path, heads=given), found, streams.probe_inputs(stream))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "calibrator.npz"
    streams.fitted(streams.stream(5, 3)).save(path)
    return path


def changed(saved, path, **fields):
    arrays = {**np.load(saved), **fields}
    np.savez(path, **{name: value for name, value in arrays.items() if value is not None})
    return path


def poked(name, value, index=1):
    """Returns what puts a value into an array."""

    def change(arrays):
        copy = arrays[name].copy()
        copy[index] = value
        return {name: copy}

    return change


def scaled(name, by):
    """Returns what scales an array."""
    return lambda arrays: {name: arrays[name] * np.float32(by)}


REFUSALS = [
    ({"schema": np.int64(4)}, "schema: expected version 1 to 3, found 4"),
    ({"format": "other"}, "format: expected 'fdc_jax calibrator', found 'other'"),
    ({"format": None}, "format: expected a word"),
    ({"attenuation": np.float64(7)}, "attenuation: expected 0 <= x <= 1"),
    ({"neighbours": None}, "neighbours: missing"),
    ({"adapted_basis": None}, "adapted_basis: missing"),
    ({"adapted_basis": np.zeros((3, 16), np.float32)}, "adapted_basis: expected float32 of shape"),
    ({"pretrained_mean": None}, "pretrained_mean: missing"),
    ({"pretrained_mean": np.zeros((3, 12))}, "pretrained_mean: expected float32 .* found float64"),
    ({"raw_scale": np.full(3, np.nan)}, "raw_scale: holds values that are not finite"),
    ({"samples": np.array([60, 0, 80])}, "samples: expected at least 1, found 0 at place 1"),
    ({"classes": np.arange(5)}, "classes: expected int64 of shape"),
    ({"class_sizes": np.zeros(0, np.int64)}, "class_sizes: expected at least one task"),
    ({"head_kind": "quadratic"}, "head_kind: unknown kind 'quadratic'"),
    ({"head_bias": None}, "head_bias: missing"),
    ({"adapted_foreign_fit": np.zeros(0)}, "adapted_foreign_fit: expected float64 of shape"),
    ({"pretrained_foreign": np.zeros(3, np.float32)}, "pretrained_foreign: expected float32"),
    (poked("raw_scale", 0.0), "raw_scale: expected at least 1e-06, found 0 at place 1"),
    (poked("filtered_scale", -2.0), "filtered_scale: expected at least 1e-06, found -2"),
    (poked("raw_scale", 1e300), "raw_scale: holds values that are not finite in float32"),
    (poked("adapted_residual_std", 0.0), "adapted_residual_std: expected at least"),
    (poked("adapted_residual_mean", np.nan), "adapted_residual_mean: holds values"),
    (poked("pretrained_distance_std", -1.0), "pretrained_distance_std: expected at"),
    (poked("adapted_foreign_fit", -1.0), "adapted_foreign_fit: expected at least 1e-06, found -1"),
    (poked("adapted_foreign_fit", np.nan), "adapted_foreign_fit: holds values"),
    (poked("pretrained_foreign_fit", 0.0, 2), "pretrained_foreign_fit: expected at least 1e-06"),
    (poked("classes", 0, 3), "classes: expected every label once, found 0 again"),
    (poked("class_counts", 0, slice(3)), "class_counts: expected 60 samples in task 0, .* found 0"),
    ({"neighbours": np.int64(3)}, "neighbours: expected at most 2, .* of task 2, found 3"),
    (scaled("adapted_prototypes", 1.01), "adapted_prototypes: .* length 1 or 0, found 1.01 at row"),
    (scaled("pretrained_prototypes", 0.01), "pretrained_prototypes: .* 0, found 0.01 at row 0"),
    (poked("adapted_prototypes", np.nan), "adapted_prototypes: holds values"),
    (poked("adapted_basis", 0.1), "adapted_basis: .* task 0 has"),
    (scaled("pretrained_basis", 1.1), "pretrained_basis: expected orthonormal rows"),
    (poked("head_weight", np.inf), "head_weight: holds values"),
]


def test_refusals_name_the_file_and_the_field(saved, tmp_path):
    arrays = dict(np.load(saved))
    for fields, message in REFUSALS:
        fields = fields(arrays) if callable(fields) else fields
        path = changed(saved, tmp_path / "bad.npz", **fields)
        with pytest.raises(InputError, match=rf"bad\.npz: {message}") as caught:
            calibration.load(path)
        assert "\n" not in str(caught.value)


def test_zero_prototypes_of_classes_without_samples_load(tmp_path):
    task = streams.stream(5, 1)[0]
    calibrator, keep = streams.new(), task.rows != 1
    calibrator.fit_task(
        task.adapted[keep], task.labels[keep], streams.head_of(task, "linear"), classes=[0, 1, 2]
    )
    calibrator.finalize()
    calibrator.save(tmp_path / "c.npz")
    loaded = load(tmp_path / "c.npz")
    assert not loaded.tasks[0].views[0].prototypes[1].any()


def test_files_that_are_no_calibrators_or_damaged(saved, tmp_path):
    content = saved.read_bytes()
    with zipfile.ZipFile(saved) as archive:
        place = archive.getinfo("adapted_basis.npy").header_offset + 400
    flipped = content[:place] + bytes([content[place] ^ 0x10]) + content[place + 1 :]
    for name, damaged in (
        ("text.npz", b"no archive"),
        ("empty.npz", b""),
        ("cut.npz", content[: int(0.9 * len(content))]),
        ("flipped.npz", flipped),
    ):
        (tmp_path / name).write_bytes(damaged)
    np.save(tmp_path / "single.npy", np.zeros(3))
    np.savez(tmp_path / "objects.npz", format=np.array([None], object))
    said = {"absent.npz": "no such file", "flipped.npz": "adapted_basis: not a readable"}
    for path in (*tmp_path.iterdir(), tmp_path / "absent.npz", tmp_path):
        with pytest.raises(InputError, match=f"{path}: {said.get(path.name, '')}"):
            calibration.load(path)


def test_a_failed_save_keeps_the_old_file(saved, tmp_path, monkeypatch):
    path = tmp_path / "calibrator.npz"
    shutil.copy(saved, path)
    found = load(path)

    def full_disk(file, **arrays):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full_disk)
    with pytest.raises(InputError, match=r"calibrator\.npz: No space left"):
        found.save(path)
    assert path.read_bytes() == saved.read_bytes()
    assert os.listdir(tmp_path) == ["calibrator.npz"]


@pytest.mark.parametrize("name", ["schema_1", "schema_2", "schema_2_whitened"])
def test_files_of_earlier_versions_score_as_they_did(name):
    path = Path(__file__).with_name(f"{name}.npz")
    stored = np.load(path)
    stream = streams.stream(31, 3, width=6, pretrained_width=5, samples=(12, 9, 15))
    probe = streams.probe_inputs(stream, size=8)
    for found in (calibration.load(path), load(path)):
        scores = found.score(*probe)
        assert streams.relative_error(scores.task_scores, stored["written_scores"]) < 1e-5
        np.testing.assert_array_equal(scores.label, stored["written_labels"])
    # A fit of today takes further tasks where that of old stopped, and gives the same itself.
    kind = str(stored["head_kind"])
    fields = ("metric", "evidence", "reference", "scope")
    beyond = {f"affinity_{f}": str(stored[f"affinity_{f}"]) for f in fields if name != "schema_1"}
    fresh = streams.fitted(stream, kind, **beyond)
    scores = fresh.score(*probe).task_scores
    assert streams.relative_error(scores, stored["written_scores"]) < 1e-4
    more = streams.stream(32, 4, width=6, pretrained_width=5)[3]._replace(first=50)
    streams.fit(found, [more], kind)
    assert found.num_tasks == 4


ALONE = """
import sys
for name in ("jax", "jaxlib", "jaxtyping", "scipy", "sklearn", "flax"):
    sys.modules[name] = None
import numpy as np
from fdc_jax import calibration
file = np.load(sys.argv[1] + "/inputs.npz")
scorer = calibration.load(sys.argv[1] + "/calibrator.npz").to_numpy()
np.save(sys.argv[1] + "/scores.npy", scorer.score(file["a"], file["b"]).task_scores)
"""


def test_scores_need_numpy_alone(saved, tmp_path):
    shutil.copy(saved, tmp_path)
    adapted, pretrained = streams.probe_inputs(streams.stream(5, 3))
    np.savez(tmp_path / "inputs.npz", a=adapted, b=pretrained)
    root = Path(__file__).resolve().parents[2]
    run = subprocess.run(
        [sys.executable, "-c", ALONE, str(tmp_path)], cwd=root, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    expected = calibration.load(saved).score(adapted, pretrained).task_scores
    assert streams.relative_error(np.load(tmp_path / "scores.npy"), expected) < 1e-5
