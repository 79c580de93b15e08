"""Runs without a mistake give no warning of their features (`calibration.checks`)."""

import logging

import pytest

from fdc_jax import learners
from tests import small_runs
from tests.conftest import SHARED_ASSETS


@pytest.fixture(autouse=True)
def messages(caplog):
    with caplog.at_level(logging.WARNING, "fdc_jax.calibration"):
        yield
    assert not [record.getMessage() for record in caplog.records if "probably" in record.msg]


@pytest.mark.slow
@pytest.mark.parametrize("name", learners.names())
def test_features_of_a_learner_give_no_warning(name, cache, tmp_path):
    fields = {"learner.name": name, "classes_per_task": 2, "data.train_per_class": 40}
    results = small_runs.run(small_runs.config(cache, **fields), tmp_path / "run")
    assert results["num_test_images"] == 60


@pytest.mark.ci
def test_photographs_give_no_warning(cache, tmp_path, shared_asset):
    data = shared_asset("tensorflow_datasets")
    fields = {
        "benchmark": "cifar100",
        "data.dir": str(data),
        "data.train_per_class": 40,
        "num_tasks": 2,
        "encoder.variant": "Ti/16",
        "encoder.weights": str(SHARED_ASSETS / "Ti_16-augreg-i21k-ft-i1k.npz"),
        "encoder.image_size": 64,
        "train.epochs": 1,
    }
    results = small_runs.run(small_runs.config(cache, **fields), tmp_path / "run")
    assert results["num_classes"] == 10
