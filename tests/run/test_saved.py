"""Opening a work directory again."""

import json

import numpy as np
import pytest

import fdc_jax
from fdc_jax.data.batches import evaluation_images
from fdc_jax.errors import InputError
from tests import small_runs
from tests.small_runs import contents, results


def test_a_finished_run_is_opened_without_a_change(whole, cache):
    before = contents(whole)
    run = fdc_jax.open_run(whole)
    assert (run.num_tasks, run.config["train.rank"]) == (2, 10)
    assert run.results == results(whole)
    assert sorted(run.class_names) == [str(digit) for digit in range(10)]
    rows = np.array([3, 0, 58])
    images = run.test_images(rows)
    assert (images.shape, images.dtype) == ((3, 32, 32, 3), np.uint8)
    for name, t in (("test_adapted", 2), ("test_pretrained", 0)):
        expected = np.load(whole / "features" / f"{name}.npy")[rows]
        np.testing.assert_allclose(run.features(rows, t), expected, atol=1e-5)
        np.testing.assert_array_equal(run.features(images, t), run.features(rows, t))
    train = np.load(whole / "features" / "train_adapted_0.npy")
    tasks = run.tasks
    first = evaluation_images(tasks.train, tasks.train_indices[0][:4], 32)
    np.testing.assert_allclose(run.features(first, 1), train[:4], atol=1e-5)
    adapted, pretrained = (
        np.load(whole / "features" / f"test_{view}.npy") for view in ("adapted", "pretrained")
    )
    fdc = run.calibrator()
    np.testing.assert_array_equal(
        fdc.score(adapted, pretrained).label, run.predictions["fdc_label"]
    )
    for head, other in zip(run.heads(), fdc.heads, strict=True):
        np.testing.assert_array_equal(head.weight, other.weight)
    with pytest.raises(InputError, match="expected E_0 to E_2, found E_3"):
        run.encoder(3)
    assert contents(whole) == before


def test_a_stopped_run_is_opened_as_far_as_it_went(half):
    run = fdc_jax.open_run(half)
    assert (run.results, run.num_tasks, len(run.heads())) == (None, 2, 1)
    assert [record["task"] for record in run.read_records()] == [0]
    assert run.calibrator().num_tasks == 1
    run.encoder(1)
    with pytest.raises(InputError, match="expected E_0 to E_1, found E_2"):
        run.encoder(2)
    with pytest.raises(InputError, match=r"predictions.npz"):
        run.test_images(np.arange(2))


def test_what_is_no_run_or_another_one_is_refused(whole, tmp_path):
    copy = small_runs.copied(whole, tmp_path / "copy")
    with pytest.raises(InputError, match=r"found no config.json"):
        fdc_jax.open_run(tmp_path)
    (tmp_path / "seed_2").mkdir()
    with pytest.raises(InputError, match=r"of several seeds, open one: .*seed_2"):
        fdc_jax.open_run(tmp_path)
    weights = small_runs.other_weights(tmp_path)
    with pytest.raises(InputError, match=r"expected the weights that .* was run with"):
        fdc_jax.open_run(copy, weights=str(weights)).encoder(0)
    with np.load(copy / "predictions.npz") as file:
        columns = dict(file)
    np.savez(copy / "predictions.npz", **columns | {"label": columns["label"][::-1]})
    with pytest.raises(InputError, match="predictions are not of the test images"):
        fdc_jax.open_run(copy).test_images(np.arange(2))


def test_a_run_of_an_earlier_version_is_opened_and_goes_on(whole, cache, tmp_path):
    """Its fields that came later have their defaults; one that is gone is passed over."""
    copy = small_runs.copied(whole, tmp_path / "copy")
    saved = json.loads((copy / "config.json").read_text())
    later = [name for name in saved if name.startswith("learner.slca.")]
    later += ["encoder.heads", "evaluation.every", "train.schedule"]
    earlier = {name: value for name, value in saved.items() if name not in later}
    (copy / "config.json").write_text(json.dumps(earlier | {"train.gone": 1, "num_tasks": None}))
    run = fdc_jax.open_run(copy)
    assert {name: run.config[name] for name in later} == {name: saved[name] for name in later}
    rows = np.arange(3)
    np.testing.assert_array_equal(run.features(rows, 2), fdc_jax.open_run(whole).features(rows, 2))
    (copy / "results.json").unlink()
    small_runs.run(small_runs.config(cache), copy)
    small_runs.same_outcome(whole, copy)


def test_code_of_a_learner_outside_the_package_runs_where_the_caller_names_it(whole, tmp_path):
    copy = small_runs.copied(whole, tmp_path / "copy")
    saved = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(saved | {"learner.name": "tests.fails_in_loss"}))
    run = fdc_jax.open_run(copy)
    assert run.results is not None
    with pytest.raises(InputError, match="to run its code, name it: --learner="):
        run.encoder(1)
    fdc_jax.open_run(copy, learner="tests.fails_in_loss").encoder(1)
