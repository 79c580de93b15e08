"""Algorithm 1 from start to end: stopped anywhere it resumes to the same numbers."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import fdc_jax
from fdc_jax.data.batches import ByteCache, evaluation_images
from fdc_jax.errors import InputError, TrainingError
from fdc_jax.features import feature_files
from fdc_jax.features.feature_files import TaskFeatures
from fdc_jax.learners import Learner
from fdc_jax.machine import devices
from fdc_jax.run import experiment
from tests import small_runs
from tests.model import encoders
from tests.small_runs import config, events, predictions, results, run, same_outcome


def test_run_stopped_within_a_task_has_equal_results(finished_run, stopped_run, cache, tmp_path):
    """Also if images are not kept in memory; test_main.py stops the first task, too."""
    folder = small_runs.copied(stopped_run, tmp_path / "run")
    run(config(cache, data__cache_gib=0.0), folder)
    (resume,) = events(folder, "resume")
    assert resume["tasks_done"] == 1 and resume["step"] > 0
    same_outcome(finished_run, folder)
    small_runs.nothing_done_twice(folder)


@pytest.mark.ci
def test_variant_is_recognised_from_the_file_of_weights(cache, tmp_path):
    """Size, mean and deviation, too; the same command finds the run finished."""
    file = str(encoders.FOLDER / "hf_clip" / "model.safetensors")
    fields = dict(encoder__weights=file, encoder__image_size=0, data__input_range="model")
    fields |= dict(train__epochs=1, num_tasks=1)
    actual = run(config(cache, **fields), tmp_path / "run")
    assert run(config(cache, **fields), tmp_path / "run") == actual
    encoder, saved = actual["encoder"], actual["config"]
    assert encoder["variant"] == saved["encoder.variant"] == "clip 24x2/4"
    assert saved["encoder.image_size"] == encoder["architecture"]["image_size"] == 12
    assert encoder["architecture"]["std"] == pytest.approx([0.26862954, 0.26130258, 0.27577711])
    with pytest.raises(InputError, match=r"train\.rank: expected at most 24, .* clip 24x2/4"):
        run(config(cache, **fields, train__rank=25), tmp_path / "wide")


@pytest.mark.ci
def test_run_fits_the_named_calibrators_and_keeps_no_features(
    finished_run, cache, tmp_path, monkeypatch
):
    """Raw logits and those given the task come from the heads alone; images are kept for a task.

    Evaluations after earlier tasks have no effect.
    """
    forget = ByteCache.forget
    freed = []

    def watched(self, kind):
        before = self.room
        forget(self, kind)
        features = sorted(path.name for path in (tmp_path / "features").glob("train_previous_*"))
        freed.append((self.room - before, features))

    monkeypatch.setattr(ByteCache, "forget", watched)
    fields = dict(calibrators="ncm, gaussians", save_features=False, evaluation__every=5)
    actual = run(config(cache, **fields), tmp_path)
    assert freed == [(60 * 3 * 32 * 32, []), (60 * 3 * 32 * 32, ["train_previous_1.npy"])]
    assert not list((tmp_path / "features").iterdir())
    assert actual["accuracy"].keys() == {"raw", "ncm", "gaussians", "oracle"}
    assert actual["components"] == {} and actual["timing"] is None
    assert {*actual["average_incremental_accuracy"].values()} == {None}
    assert [point["task"] for point in actual["curve"]] == [1]
    expected, columns = predictions(finished_run), predictions(tmp_path)
    for name in "raw_label raw_task gaussians_label gaussians_task oracle_label".split():
        assert_array_equal(columns[name], expected[name], err_msg=name)


@pytest.mark.ci
def test_encoder_before_a_task_is_kept_with_the_newest(slca_run, tmp_path):
    """Other encoders are refused when the run is opened."""
    before = fdc_jax.open_run(slca_run.with_name("slca_stopped"))
    images = evaluation_images(before.tasks.train, before.tasks.train_indices[1], 32)
    saved = np.load(before.folder / "features" / "train_previous_1.npy")
    assert_allclose(before.features(images, 1), saved, atol=1e-5)
    after = fdc_jax.open_run(slca_run)
    assert np.abs(after.features(images, 2) - saved).max() > 1e-3
    with pytest.raises(InputError, match=r"keeps no encoder but its newest: .* found E_1"):
        after.encoder(1)
    # The first head was aligned again, and a fit of the saved features predicts with final heads.
    tasks = feature_files.load(slca_run / "features").tasks
    assert [task.final_head is None for task in tasks] == [False, True]
    small_runs.check_fit_again(slca_run, tmp_path / "again.npz", "fdc")


def test_every_step_is_taken_once(finished_run):
    epochs = [(event["task"], event["epoch"]) for event in events(finished_run, "epoch")]
    assert epochs == [(0, 0), (0, 1), (1, 0), (1, 1)]
    timing = results(finished_run)["timing"]
    # The first step of a process compiles and does not count.
    images, seconds = 4 * 60 - 18, timing["training_seconds"]
    assert (timing["training_images"], timing["test_extraction_images"]) == (images, 30 + 60)
    assert timing["training_images_per_second"] == pytest.approx(images / seconds)


def test_the_compilation_of_a_fit_stands_apart(monkeypatch):
    """Of a calibrator that compiles a program in every fit, by a clock of 1,000 s."""

    def compile_and_fit(*arguments, **others):
        jax.jit(lambda values: values + len(arguments))(np.ones(3)).block_until_ready()

    calibrator = SimpleNamespace(fit_task=compile_and_fit, finalize=lambda: None)
    clock = SimpleNamespace(perf_counter=iter([10.0, 1010.0]).__next__)
    monkeypatch.setattr(devices, "time", clock)
    features = TaskFeatures(np.ones((2, 3)), None, np.arange(2), None, np.arange(2))
    timing, _ = experiment.fit({"fdc": calibrator}, features)
    compiled = timing["fit_compile_seconds"]["fdc"]
    assert compiled > 0
    assert timing["fit_seconds"]["fdc"] == pytest.approx(1000 - compiled)


def test_a_loss_that_is_not_finite_names_task_and_learning_rate(cache, tmp_path, monkeypatch):
    def ones(self, backbone, batch, *others):
        return jnp.ones((len(batch.images), self.setup.variant.width))

    monkeypatch.setattr(Learner, "features", ones)
    with pytest.raises(TrainingError, match=r"nan in task 1, epoch 1, step .*head_learn"):
        run(config(cache, train__head_learning_rate=1e38), tmp_path / "run")
    assert not (tmp_path / "run" / "results.json").exists()
