"""Features that a run did not save, from its last checkpoint."""

import json
import shutil

import numpy as np
import pytest

from fdc_jax.files import read_folder
from fdc_jax.learners import cumulative_lora
from fdc_jax.report import recompute
from tests import interruptions

OPTIONS = (
    "--config.train.epochs=1",
    "--config.data.train_per_class=16",
    "--config.data.test_per_class=10",
    "--config.classes_per_task=4",
    "--config.evaluation.every_task=False",
    "--quiet",
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, cache):
    """A small run of the reference learner with its features."""
    workdir = tmp_path_factory.mktemp("runs") / "whole"
    interruptions.finish(interruptions.start(workdir, *OPTIONS, cache=cache))
    return workdir


@pytest.fixture
def run(whole, tmp_path, cache, monkeypatch):
    """The same run without them."""
    monkeypatch.setenv("FDC_JAX_CACHE", str(cache))
    copy = tmp_path / "run"
    shutil.copytree(whole, copy, ignore=shutil.ignore_patterns("features"))
    return copy


def refused(run, capsys):
    """Returns the one line with which the command refuses."""
    before = sorted(run.rglob("*"))
    assert recompute.main([str(run), "--quiet"]) == 2
    assert sorted(run.rglob("*")) == before
    output, errors = capsys.readouterr()
    assert output == ""
    (line,) = errors.splitlines()
    assert line.startswith("fdc_jax: error: ")
    return line


def test_the_features_are_those_of_the_run(run, whole, capsys):
    others = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert recompute.main([str(run)]) == 0
    assert f"features: {run / 'features'}" in capsys.readouterr().out
    found, expected = read_folder(run / "features"), read_folder(whole / "features")
    assert sorted(found) == sorted(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
    for path, content in others.items():
        assert path.read_bytes() == content, path
    assert "the features are there already" in refused(run, capsys)


def test_heads_that_changed_later_are_refused(run, capsys, monkeypatch):
    heads = cumulative_lora.heads

    def aligned(*arguments):
        first, *others = heads(*arguments)
        return [first._replace(weight=1.01 * first.weight), *others]

    monkeypatch.setattr(cumulative_lora, "heads", aligned)
    line = refused(run, capsys)
    assert "cumulative_lora: its final state does not give the head that task 0 was" in line


def test_an_encoder_that_is_not_kept_is_refused(run, capsys, monkeypatch):
    encoder = cumulative_lora.encoder

    def newest(setup, backbone, state, num_tasks):
        return encoder(setup, backbone, state, setup.num_tasks)

    monkeypatch.setattr(cumulative_lora, "encoder", newest)
    line = refused(run, capsys)
    assert "cumulative_lora: its final state does not give the encoder after task 0" in line


@pytest.mark.parametrize("name", ["config.json", "results.json", "calibrator.npz"])
def test_unfinished_runs_are_refused(run, name, capsys):
    (run / name).unlink()
    assert f"expected a finished run of one seed, found no {name}" in refused(run, capsys)


def test_without_a_checkpoint_there_is_nothing_to_compute(run, capsys):
    shutil.rmtree(run / "checkpoints")
    assert "expected the run's last checkpoint, found none" in refused(run, capsys)


def test_other_images_are_refused(run, capsys):
    config = json.loads((run / "config.json").read_text())
    config["test images sha256"] = "0" * 64
    (run / "config.json").write_text(json.dumps(config))
    assert "test images sha256" in refused(run, capsys)


def test_a_configuration_of_another_version_is_refused(run, capsys):
    config = json.loads((run / "config.json").read_text())
    del config["precision"]
    (run / "config.json").write_text(json.dumps(config))
    assert "precision" in refused(run, capsys)
