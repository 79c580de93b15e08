"""Validation images: held out from all that is learned or fitted, and evaluated after the run."""

import dataclasses

import numpy as np
import pytest
from PIL import Image

import fdc_jax
from fdc_jax.calibration.settings import COMPONENTS
from fdc_jax.data import digits
from fdc_jax.data.batches import ByteCache
from fdc_jax.errors import InputError
from fdc_jax.features import feature_files
from fdc_jax.features.feature_files import ArrayFolder
from tests import small_runs
from tests.report.feature_sets import reference_of

pytestmark = pytest.mark.ci
SHARE = {"data__validation_share": 0.25, "train__epochs": 1}


@pytest.fixture(scope="module")
def validated_run(tmp_path_factory, cache):
    """The work directory of a small run that holds out three of twelve images of a class."""

    def make(workdir):
        small_runs.run(small_runs.config(cache, **SHARE), workdir)

    return small_runs.shared(tmp_path_factory, "validated", make)


def test_other_held_out_images_change_the_validation_alone(
    validated_run, cache, tmp_path, monkeypatch
):
    """Not the encoder, the heads, the statistics or the predictions of test images.

    Nor do held-out images stay in memory.
    """
    train, test = digits.open_digits()
    held_out = {*fdc_jax.open_run(validated_run).tasks.validation_indices.tolist()}
    noise = Image.effect_noise((8, 8), 90).convert("RGB")

    def read(index):
        return noise if index in held_out else train.read(index)

    other = dataclasses.replace(train, read=read)
    put = ByteCache.put
    kept = set()

    def watched(self, key, pixels):
        put(self, key, pixels)
        if self.get(key) is not None and "train" in key:
            kept.add(key[-1])

    monkeypatch.setattr(ByteCache, "put", watched)
    monkeypatch.setattr(digits, "open_digits", lambda: (other, test))
    actual = small_runs.run(small_runs.config(cache, **SHARE), tmp_path / "run")
    expected = small_runs.results(validated_run)
    assert kept and not kept & held_out
    assert actual["validation"] != expected["validation"]
    assert actual["components"] == expected["components"]
    of_other, of_run = map(small_runs.contents, (tmp_path / "run", validated_run))
    for name in of_run:
        if name.startswith(("features/t", "features/h", "calibrators/", "predictions.npz")):
            assert of_run[name] == of_other[name], name


def test_validation_accuracies_follow_the_equations(validated_run):
    """Of every component, by the reference in float64 on the saved features."""
    features = feature_files.load(validated_run / "features")
    of = ArrayFolder(validated_run / "features/validation")
    fitted, actual = reference_of(features), small_runs.results(validated_run)["validation"]
    for name, switches in COMPONENTS.items():
        views = [switches.get(f"{view}_view", True) for view in ("adapted", "pretrained")]
        on = {part: switches.get(part, True) for part in ("tsf", "rlc", "pac")}
        scores, rows = fitted.score(of["test_adapted"], of["test_pretrained"], **on, views=views)
        labels = []
        for task, row in zip(scores.argmax(axis=1), rows, strict=True):
            labels.append(features.tasks[task].classes[row[task]])
        assert actual[name] == pytest.approx(100 * np.mean(labels == of["test_labels"])), name
    assert actual["fdc"] == actual["full"] and "gaussians" in actual


def test_a_stopped_run_holds_out_the_same_images(validated_run, cache, tmp_path):
    workdir = tmp_path / "run"
    small_runs.stopped(small_runs.config(cache, **SHARE), workdir, 9)
    other = small_runs.config(cache, **SHARE | {"data__validation_share": 0.0})
    with pytest.raises(InputError, match=r"data.validation_share was 0.25, is 0.0;"):
        small_runs.run(other, workdir)
    small_runs.run(small_runs.config(cache, **SHARE), workdir)
    small_runs.same_outcome(workdir, validated_run)
