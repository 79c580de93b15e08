"""Runs whose learner rewrites earlier heads: what is saved, and what a refit makes of it."""

import contextlib
import io

import numpy as np
import pytest

from fdc_jax import calibration
from fdc_jax.features import feature_files
from fdc_jax.posthoc.__main__ import main
from tests import small_runs

pytestmark = pytest.mark.ci


def config(cache, **fields):
    aligned = dict(learner__name="inflora_ca", classes_per_task=4, train__epochs=1)
    return small_runs.config(cache, **aligned, **fields)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, cache):
    """A run of InfLoRA+CA, which aligns all heads after every task."""
    return small_runs.shared(
        tmp_path_factory, "aligned", lambda workdir: small_runs.run(config(cache), workdir)
    )


@pytest.fixture(scope="module")
def predictions(whole):
    return small_runs.predictions(whole)


def test_final_heads_of_aligned_tasks_are_saved(whole):
    features = feature_files.load(whole / "features")
    # The last alignment is part of the last task.
    assert [task.final_head is None for task in features.tasks] == [False, False, True]
    calibrator = calibration.load(whole / "calibrators" / "fdc.npz")
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
