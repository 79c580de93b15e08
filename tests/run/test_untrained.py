"""The answer before training: class Gaussians on the frozen encoder, until the run is finished."""

import re

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import fdc_jax
from fdc_jax import predict
from fdc_jax.errors import Interrupted, StopRequest
from fdc_jax.features import feature_files
from fdc_jax.report import runs
from fdc_jax.run import estimate, seeds
from fdc_jax.run import setup as setups
from tests import small_runs
from tests.small_runs import config, events, predictions, results


class StopsAfter(StopRequest):
    """Asks to stop as soon as a file is there."""

    def __init__(self, path):
        super().__init__()
        self.agree = lambda number: 15 * path.exists()


@pytest.fixture(scope="module")
def frozen(cache, tmp_path_factory):
    """A run of the learner `frozen`."""
    fields = config(cache, learner__name="frozen")
    return small_runs.shared(tmp_path_factory, "frozen", lambda it: small_runs.run(fields, it))


def test_a_frozen_encoder_predicts_the_nearest_class_mean(frozen, finished_run):
    assert events(frozen, "epoch") == []
    assert not (frozen / "features" / "train_previous_1.npy").exists()
    saved = feature_files.load(frozen / "features")
    train = np.concatenate([task.adapted for task in saved.tasks]).astype(np.float64)
    labels = np.concatenate([task.labels for task in saved.tasks])
    means = np.stack([train[labels == label].mean(axis=0) for label in range(10)])
    distances = np.linalg.norm(saved.test_adapted[:, None] - means, axis=2)
    assert_array_equal(predictions(frozen)["raw_label"], distances.argmin(axis=1))
    pretrained = np.load(finished_run / "features" / "test_pretrained.npy")
    assert_array_equal(saved.test_adapted, pretrained)
    run = fdc_jax.open_run(frozen)
    expected = np.array(run.class_names)[predictions(frozen)["gaussians_label"]]
    images = [run.tasks.test.image(index) for index in run.tasks.test_indices.tolist()]
    assert_array_equal(run.predict(images)["class"], expected)


@pytest.mark.ci
def test_a_run_answers_before_it_trains(frozen, finished_run, cache, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(seeds, "_SLOW_SECONDS", 0.0)

    folder, fields = tmp_path / "run", config(cache, untrained=True)
    untrained = folder / "untrained"
    command = re.escape(f"; the same command resumes, python -m fdc_jax predict {folder} IMAGES ")
    with pytest.raises(Interrupted, match=f"stopped by SIGTERM{command}answers until then$"):
        seeds.run(fields, str(folder), False, StopsAfter(untrained / "results.json"))
    accuracy = results(untrained)["accuracy"]["gaussians"]
    assert accuracy == results(frozen)["accuracy"]["gaussians"]
    printed = capsys.readouterr().err
    assert f"without training: {accuracy:.1f} %; training on top takes about " in printed
    assert "--config.encoder.image_size=16 (a quarter; " in printed
    assert f"{untrained} has its answer before training" in runs.load([folder])[1][folder]
    known, page = fdc_jax.open_run(frozen), tmp_path / "page.html"
    known.tasks.test.image(0).save(tmp_path / "0.png")
    arguments = [str(folder), f"{tmp_path}/0.png", f"--html={page}", f"--output={tmp_path}/a.csv"]
    assert predict.main(arguments) == 0
    sentence = "raining is not finished: answers by features of the pretrained encoder alone"
    assert sentence in capsys.readouterr().err and sentence in page.read_text()
    images = known.test_images(np.arange(8))
    before, expected = fdc_jax.open_run(folder).predict(images), known.predict(images)
    for column in ("class", "confidence", "typicality"):
        assert_array_equal(before[column], expected[column])
    small_runs.run(fields, folder)
    small_runs.same_outcome(finished_run, folder)
    assert {it["pretrained_from_cache"] for it in events(folder, "statistics")} == {1.0}
    ((group,), _) = runs.load([folder])
    assert group.row("gaussians-pretrained")["mean"] == accuracy
    after = fdc_jax.open_run(folder).predict(images)
    assert before["confidence"].tolist() != after["confidence"].tolist()


@pytest.mark.ci
def test_estimate_counts_the_rest_of_a_resumed_run(cache, tmp_path, capsys):
    # The first task is as large as those of other runs, which share their programs.
    sizes = dict(classes_per_task=(5, 1, 4), num_tasks=2)
    folder, fields = tmp_path / "run", config(cache, untrained=True, **sizes)
    with pytest.raises(Interrupted):
        seeds.run(fields, str(folder), False, StopsAfter(folder / "tasks" / "task_000.json"))
    assert "a loss of 0" not in capsys.readouterr().err
    seeds.run(fields, str(folder))
    printed = capsys.readouterr().err
    assert "; the rest of the training takes about " in printed
    assert printed.count("task 2: a loss of 0 trains nothing; it needs two classes\n") == 1
    setup, records = setups.build(fields), fdc_jax.open_run(folder / "untrained").read_records()
    total, rest = (estimate.seconds_after(setup, records, done) for done in (0, 1))
    assert rest == pytest.approx(total / 6)
