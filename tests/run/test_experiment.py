"""Algorithm 1 from start to end: stopped anywhere it goes on to the same numbers."""

import shutil

import numpy as np
import pytest

import fdc_jax
from fdc_jax.data.batches import ByteCache, evaluation_images
from fdc_jax.errors import InputError, TrainingError
from tests import small_runs
from tests.model import make_encoders
from tests.small_runs import config, events, predictions, results, run, same_outcome, stopped


# After preparation a run looks once, then at every step, and at every batch of an extraction.
def test_stopped_in_every_task_it_ends_the_same(whole, cache, tmp_path):
    for looks in (7, 9):
        stopped(config(cache), tmp_path / "run", looks)
        assert not (tmp_path / "run" / "results.json").exists()
    tasks = [each["task"] for each in events(tmp_path / "run", "training")]
    assert set(tasks) == {0, 1}
    run(config(cache), tmp_path / "run")
    same_outcome(whole, tmp_path / "run")
    small_runs.nothing_done_twice(tmp_path / "run")


def test_a_file_of_weights_says_itself_what_it_holds(cache, tmp_path):
    """Size, mean and deviation, too; the same command finds the run finished."""
    file = make_encoders.FOLDER / "hf_clip" / "model.safetensors"
    fields = {"encoder__weights": str(file), "encoder__image_size": 0, "train__epochs": 1}
    fields |= {"data__input_range": "model", "evaluation__every_task": False}
    found = run(config(cache, **fields), tmp_path / "run")
    assert run(config(cache, **fields), tmp_path / "run") == found
    encoder, saved = found["encoder"], found["config"]
    assert encoder["variant"] == saved["encoder.variant"] == "clip 24x2/4"
    assert saved["encoder.image_size"] == encoder["architecture"]["image_size"] == 12
    assert encoder["architecture"]["std"] == pytest.approx([0.26862954, 0.26130258, 0.27577711])
    assert np.load(tmp_path / "run" / "features" / "test_adapted.npy").shape == (60, 24)
    with pytest.raises(InputError, match=r"train\.rank: expected at most 24, .* clip 24x2/4"):
        run(config(cache, **fields, train__rank=25), tmp_path / "wide")


@pytest.fixture(scope="module")
def following(tmp_path_factory, cache):
    """A run whose statistics follow the encoder, that nobody stopped."""
    fields = config(cache, fdc__transport=True)
    return small_runs.shared(tmp_path_factory, "following", lambda workdir: run(fields, workdir))


def test_statistics_that_follow_the_encoder_stand_beside_the_papers(whole, following):
    found, plain = results(following), results(whole)
    for section in ("accuracy", "components", "routing_accuracy"):
        assert found[section] == plain[section]
    components = found["transported"]["components"]
    assert set(components) == {"raw", "full", "adapted_view", "pretrained_view"}
    columns = predictions(following)
    right = 100 * (columns["transported_label"] == columns["label"]).mean()
    assert found["transported"]["accuracy"] == right
    assert found["curve"][-1]["transported"]["accuracy"] == right
    assert found["timing"]["previous_extraction_seconds"] > 0
    # The features of the second task's images by the encoder after the first one.
    opened = fdc_jax.open_run(following)
    e = opened.experiment
    batches = e.evaluation_batches(e.tasks.train, e.tasks.train_indices[1])
    (expected,) = e.extract(e.backbone, [opened.encoder(1)], batches)
    saved = np.load(following / "features" / "train_previous_1.npy")
    np.testing.assert_array_equal(saved, expected.features)
    assert not (following / "features" / "train_previous_0.npy").exists()


def test_with_them_it_ends_the_same_too(following, cache, tmp_path):
    fields = config(cache, fdc__transport=True)
    stopped(fields, tmp_path / "run", 26)
    run(fields, tmp_path / "run")
    same_outcome(following, tmp_path / "run")


def test_a_task_is_learned_again_whose_encoder_before_is_gone(following, cache, tmp_path):
    workdir = small_runs.copied(following, tmp_path / "run")
    (workdir / "features" / "train_previous_1.npy").unlink()
    for name in ("results.json", "calibrator.npz", "calibrators/calibrator_002.npz"):
        (workdir / name).unlink()
    run(config(cache, fdc__transport=True), workdir)
    same_outcome(following, workdir)
    assert len([each for each in events(workdir, "epoch") if each["task"] == 1]) > 2


@pytest.mark.ci
def test_the_encoder_before_a_task_can_be_had_of_a_learner_that_keeps_the_newest(cache, tmp_path):
    """Which RSIAT does: other encoders are refused when the run is opened."""
    fields = config(cache, learner__name="rsiat", fdc__transport=True)
    stopped(fields, tmp_path / "run", 23)
    before, e = fdc_jax.open_run(tmp_path / "run"), fdc_jax.open_run(tmp_path / "run").experiment
    images = evaluation_images(e.tasks.train, e.tasks.train_indices[1], 32)
    saved = np.load(tmp_path / "run" / "features" / "train_previous_1.npy")
    np.testing.assert_allclose(before.features(images, 1), saved, atol=1e-5)
    found = run(fields, tmp_path / "run")
    assert "transported" in found
    after = fdc_jax.open_run(tmp_path / "run")
    assert np.abs(after.features(images, 2) - saved).max() > 1e-3
    np.testing.assert_array_equal(after.features(images, 0), before.features(images, 0))
    with pytest.raises(InputError, match=r"keeps no encoder but its newest: .* found E_1"):
        after.encoder(1)


def test_the_steps_of_every_task_are_taken_once(whole):
    epochs = [(each["task"], each["epoch"]) for each in events(whole, "epoch")]
    assert epochs == [(0, 0), (0, 1), (1, 0), (1, 1)]
    timing = results(whole)["timing"]
    # The first step of a process compiles and does not count.
    assert timing["training_images"] == 4 * 60 - 18
    assert timing["test_extraction_images"] == 30 + 60
    assert 0 < timing["fit_seconds"] and 0 < timing["training_seconds"]


@pytest.mark.parametrize("saved", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_lost_calibrators_are_fitted_again_where_features_are_saved(whole, cache, tmp_path, saved):
    found = config(cache, save_features=saved)
    stopped(found, tmp_path / "run", 18)
    before = len(events(tmp_path / "run", "training"))
    shutil.rmtree(tmp_path / "run" / "calibrators")
    run(found, tmp_path / "run")
    started = [each["step"] == 0 for each in events(tmp_path / "run", "training")[before:]]
    assert started == ([False] if saved else [True, True])
    ours, expected = predictions(tmp_path / "run"), predictions(whole)
    np.testing.assert_array_equal(ours["fdc_label"], expected["fdc_label"])


def test_a_loss_that_is_not_finite_names_task_and_learning_rate(cache, tmp_path):
    with pytest.raises(TrainingError, match=r"nan in task 1, epoch 1, step .* 1e\+38 \(head\)"):
        run(config(cache, train__head_learning_rate=1e38), tmp_path / "run")
    assert not (tmp_path / "run" / "results.json").exists()


def test_images_are_kept_for_one_task(cache, tmp_path, monkeypatch):
    held, clear = [], ByteCache.clear
    monkeypatch.setattr(ByteCache, "clear", lambda self: held.append(self.bytes) or clear(self))
    run(config(cache, train__first_epochs=1), tmp_path / "run")
    assert held == [60 * 3 * 32 * 32] * 2
    assert [each["task"] for each in events(tmp_path / "run", "epoch")] == [0, 1, 1]


def test_what_is_kept_and_evaluated_on_the_way_has_no_effect(whole, cache, tmp_path):
    """Neither images nor accuracies; features of the pretrained encoder are shared with others."""
    found = run(config(cache, evaluation__every_task=False, data__cache_gib=0.0), tmp_path / "run")
    assert found["timing"] is None
    assert found["average_incremental_accuracy"] == {"raw": None, "fdc": None}
    assert [point["task"] for point in found["curve"]] == [1]
    assert found["accuracy"] == results(whole)["accuracy"]
    for name, column in predictions(whole).items():
        np.testing.assert_array_equal(predictions(tmp_path / "run")[name], column)
    cached = [each["pretrained_from_cache"] for each in events(tmp_path / "run", "statistics")]
    assert cached == [1.0, 1.0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(fdc__neighbours=6), "config.fdc.neighbours: expected at most 5, the classes of task"),
        (dict(train__batch_size=10**9), "config.train.batch_size: expected batches that fit"),
        (dict(classes_per_task=11), "config.classes_per_task: expected at most the 10"),
        (dict(encoder__weights="/nowhere.npz"), "found no file /nowhere.npz"),
        (dict(learner__name="tests.learners.grows"), "must return a state like that of"),
        (dict(learner__name="tests.fails_in_loss"), r"fails_in_loss.py, line \d+: ZeroDivision"),
    ],
)
def test_what_cannot_go_well_is_refused_in_one_line(cache, tmp_path, fields, message):
    with pytest.raises(InputError, match=message) as caught:
        run(config(cache, **fields), tmp_path / "run")
    assert "\n" not in str(caught.value)
    # Nothing was trained, or even begun where the settings alone say it.
    assert "learner__name" in fields or not (tmp_path / "run").exists()
    assert not (tmp_path / "run" / "calibrators").exists()


def test_memory_that_runs_out_names_what_to_lower(cache, tmp_path, monkeypatch):
    def fail(*arguments):
        raise MemoryError("Unable to allocate 3 TiB")

    monkeypatch.setattr("fdc_jax.run.experiment._extract", fail)
    with pytest.raises(InputError, match=r"Unable to allocate 3 TiB\); lower config.train.batch_s"):
        run(config(cache), tmp_path / "run")
