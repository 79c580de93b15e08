"""Runs whose learner rewrites earlier heads: what is saved, and what a refit makes of it."""

import contextlib
import io
import time

import numpy as np
import pytest

from fdc_jax import calibration, feature_files
from fdc_jax.posthoc.__main__ import main
from fdc_jax.posthoc.methods import METHODS, Settings
from fdc_jax.posthoc.methods import run as fit
from tests import interruptions

OPTIONS = (
    "--config.learner.name=inflora_ca",
    "--config.learner.inflora_ca.epochs=2",
    "--config.learner.inflora_ca.samples_per_class=64",
    "--config.train.epochs=1",
    "--config.data.train_per_class=16",
    "--config.classes_per_task=4",
    "--quiet",
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, cache):
    """A small run of InfLoRA+CA, which aligns all heads after every task."""
    workdir = tmp_path_factory.mktemp("runs") / "whole"
    interruptions.finish(interruptions.start(workdir, *OPTIONS, cache=cache))
    return workdir


@pytest.fixture(scope="module")
def predictions(whole):
    with np.load(whole / "predictions.npz") as file:
        return {name: file[name] for name in file.files}


def test_final_heads_of_aligned_tasks_are_saved(whole):
    features = feature_files.load(whole / "features")
    # The last alignment is part of the last task.
    assert [task.final_head is None for task in features.tasks] == [False, False, True]
    calibrator = calibration.load(whole / "calibrator.npz")
    for stored, used in zip(features.final_heads, calibrator.heads, strict=True):
        np.testing.assert_array_equal(stored.weight, used.weight)
        np.testing.assert_array_equal(stored.bias, used.bias)


def test_the_command_gives_the_labels_of_the_run(whole, predictions, tmp_path):
    output = tmp_path / "again.npz"
    with contextlib.redirect_stdout(io.StringIO()):
        assert main([str(whole / "features"), f"--output={output}", "--quiet"]) == 0
    with np.load(output) as again:
        np.testing.assert_array_equal(again["raw_label"], predictions["raw_label"])
        np.testing.assert_array_equal(again["label"], predictions["fdc_label"])


def test_without_final_heads_the_labels_would_be_others(whole, predictions):
    """And so they are for every method that reads heads."""
    features = feature_files.load(whole / "features")
    early = features._replace(tasks=tuple(t._replace(final_head=None) for t in features.tasks))
    settings = Settings({}, projections=50, seed=0)
    for name in METHODS:
        if name.startswith(("ranpac", "anacp", "mahalanobis", "fecam")):
            continue
        first, final = (fit(name, each, settings).scores for each in (early, features))
        reads_heads = not name.startswith(("ncm", "nme"))
        assert np.any(first.task_scores != final.task_scores) == reads_heads, name
    assert np.any(fit("raw", early, settings).scores.label != predictions["raw_label"])


@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_features(whole, tmp_path, cache):
    workdir = tmp_path / "killed"
    process = interruptions.start(workdir, *OPTIONS, cache=cache)
    events = workdir / "metrics.jsonl"
    while process.poll() is None:
        if events.exists() and events.read_text().count('"event": "evaluation"') >= 2:
            break
        time.sleep(0.05)
    process.kill()
    process.communicate()
    interruptions.finish(interruptions.start(workdir, *OPTIONS, cache=cache))
    interruptions.same_outcome(whole, workdir)
    names = {file.name for file in (whole / "features").iterdir()}
    assert {file.name for file in (workdir / "features").iterdir()} == names
    for name in names:
        expected, found = (np.load(each / "features" / name) for each in (whole, workdir))
        np.testing.assert_array_equal(found, expected, err_msg=name)
