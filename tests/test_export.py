"""Exported runs: the same answers without the images and the file of the encoder."""

import json
import re
import shutil

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import fdc_jax
from fdc_jax import calibration, export
from fdc_jax.data import task_stream
from fdc_jax.machine.files import read_json, write_json
from fdc_jax.model import weights
from fdc_jax.run import configuration
from tests import small_runs
from tests.calibration import streams
from tests.errors import input_error

ROWS = np.arange(0, 60, 5)


@pytest.fixture
def out(finished_run, tmp_path):
    """An export of the run."""
    export.write(finished_run, tmp_path / "out")
    return tmp_path / "out"


def answers(run, images):
    """Returns features of E_0 and E_T, and what calibrators say of them."""
    actual = {"adapted": run.features(images, run.num_tasks), "pretrained": run.features(images, 0)}
    views = [*actual.values()]
    for name in ("fdc", "gaussians"):
        scores = run.calibrator(name).score(*views)
        actual |= {f"{name} scores": scores.task_scores, f"{name} label": scores.label}
    return actual


@pytest.mark.parametrize("state", ["finished_run", pytest.param("slca_run", marks=pytest.mark.ci)])
def test_an_export_answers_alone_as_the_run_does(state, request, tmp_path, monkeypatch):
    workdir = small_runs.copied(request.getfixturevalue(state), tmp_path / "run")
    file = str(shutil.copy(weights.DIGITS_WEIGHTS, tmp_path / "encoder.npz"))
    run = fdc_jax.open_run(workdir, weights=file)
    images = run.test_images(ROWS)
    expected = answers(run, images)
    heads = run.heads()
    export.write(workdir, tmp_path / "out", weights_file=file)

    shutil.rmtree(workdir)
    (tmp_path / "encoder.npz").unlink()
    monkeypatch.setattr(weights, "DIGITS_WEIGHTS", tmp_path / "encoder.npz")
    monkeypatch.setattr(task_stream, "build", lambda *_, **__: pytest.fail("images are read"))
    exported = fdc_jax.open_run((tmp_path / "out").rename(tmp_path / "moved"))
    small_runs.assert_equal(answers(exported, images), expected)
    assert_array_equal(exported.predictions["fdc_label"][ROWS], expected["fdc label"])
    assert exported.results.accuracy == run.results.accuracy
    np.testing.assert_equal(exported.heads(), heads)
    for t in (1, 3):
        with input_error(r"is an export, .* but E_0 and E_2"):
            exported.encoder(t)


def test_missing_files_of_an_export_are_named(out):
    """tests/test_fuzz.py changes all of them."""
    known = json.loads((out / "manifest.json").read_text())["sha256"]
    assert {*known, "manifest.json"} == {*small_runs.contents(out)}
    for name in ("predictions.npz", "manifest.json"):
        (out / name).unlink()
        with input_error(name):
            fdc_jax.open_run(out)


def replace_by_link(path):
    path.rename(path.parents[1] / "elsewhere")
    path.symlink_to(path.parents[1] / "elsewhere")


FOREIGN = {
    "file": lambda out: shutil.copy(out / "calibrators/fdc.npz", out / "calibrators/ncm.npz"),
    "folder link": lambda out: replace_by_link(out / "calibrators"),
    "no checksums": lambda out: (out / "manifest.json").write_text('{"sha256": {}}'),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_file_that_the_manifest_does_not_name_is_refused(out, kind):
    (out / ".DS_Store").touch()
    fdc_jax.open_run(out)
    FOREIGN[kind](out)
    with input_error(r"is not in manifest.json|is not what was written"):
        fdc_jax.open_run(out)


def put_another_calibrator(workdir):
    streams.fitted(streams.known(0, 2)).save(workdir / "calibrators/fdc.npz")


def change_heads(workdir):
    path = workdir / "calibrators/gaussians.npz"
    gaussians = calibration.load(path)
    gaussians.replace_heads(gaussians.heads[::-1])
    gaussians.save(path)


def move_labels(workdir):
    columns = small_runs.predictions(workdir)
    columns["fdc_label"] = (columns["fdc_label"] + 1) % 10
    np.savez(workdir / "predictions.npz", **columns)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda run: (run / "calibrators/fdc.npz").unlink(),
            r"expected the calibrator fdc",
        ),
        (put_another_calibrator, r"fdc.npz: is of another run: other classes or tasks"),
        (change_heads, r"gaussians.npz: is of another run: other heads"),
        (move_labels, r"predictions.npz: is of another run: expected an accuracy of"),
    ],
)
def test_files_of_another_run_are_not_exported(finished_run, tmp_path, change, message):
    workdir = small_runs.copied(finished_run, tmp_path / "run")
    change(workdir)
    with input_error(message):
        export.write(workdir, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_same_run_gives_the_same_bytes(finished_run, tmp_path):
    """Nothing tells of the machine."""
    workdir = small_runs.copied(finished_run, tmp_path / "run")
    source = {"data.source": str(tmp_path / "images")}
    record = small_runs.results(workdir)
    write_json(workdir / "results.json", record | {"config": record["config"] | source})
    write_json(workdir / "config.json", read_json(workdir / "config.json") | source)
    for name in ("one", "two"):
        assert export.main([str(workdir), str(tmp_path / name), "--quiet"]) == 0
    with input_error(r"one: exists already; name a folder that does not"):
        export.write(workdir, tmp_path / "one")
    files = small_runs.contents(tmp_path / "one")
    assert files == small_runs.contents(tmp_path / "two")
    assert not [name for name, content in files.items() if str(tmp_path).encode() in content]
    assert not configuration.OF_A_HOST & json.loads(files["config.json"]).keys()


def test_encoder_in_timms_layout_gives_features_of_the_run(finished_run, out):
    path = out / "timm" / "model.safetensors"
    run = fdc_jax.open_run(finished_run)
    _, variant = weights.recognise(str(path), "")
    model = run.encoders.learner.setup.model.clone(variant=variant, input_range="model")
    images = run.test_images(ROWS)
    params = weights.load(path, variant, 32).params
    actual = jax.jit(model.apply)({"params": params}, images)
    assert_allclose(actual, run.features(images, 2), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    "moved, flags, message",
    [
        ("results.json", (), r"/run: unfinished: no results.json, 2 tasks done"),
        ("checkpoints", (), r"expected a checkpoint of the run"),
        (None, ("--weights=absent.npz",), r"found no file absent.npz"),
    ],
)
def test_unsupported_exports_are_one_line(finished_run, tmp_path, capsys, moved, flags, message):
    workdir = small_runs.copied(finished_run, tmp_path / "run")
    if moved:
        (workdir / moved).rename(tmp_path / "elsewhere")
    before = [*tmp_path.iterdir()]
    assert export.main([str(workdir), str(tmp_path / "out"), *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line)
    assert [*tmp_path.iterdir()] == before
