"""Pictures: which images, what they are called, and evidence that adds up to the score."""

import base64
import io
import types

import numpy as np
import pytest
from PIL import Image

from fdc_jax.calibration import FDC
from fdc_jax.errors import InputError
from fdc_jax.report import pictures
from tests.report import made_up
from tests.report.feature_sets import feature_set

NAMES = ("ant", "bee", "cat", "dog", "emu", "fox", "gnu", "hen", "ibex", "jay")


def opened(folder, dual=True):
    """A run with features and predictions, and its terms of the test images.

    All pixels of a test image are its row.
    """
    features, rng = feature_set(dual=dual, offset=1.0), np.random.default_rng(3)
    names = ("test_adapted", "test_pretrained")[: 1 + dual]
    views = []
    for name in names:
        view = getattr(features, name)
        views.append(view + rng.standard_normal(view.shape, np.float32))
        np.save(folder / f"{name}.npy", views[-1])
    calibrator = features.fit(FDC())
    terms = calibrator.terms(*views)
    raw, fdc = terms.fuse(tsf=False, rlc=False, pac=False), terms.fuse()
    run = made_up.run()
    run.features_folder, run.class_names, run.calibrator = folder, NAMES, lambda name: calibrator
    run.test_images = lambda rows: np.stack([np.full((8, 8, 3), row, np.uint8) for row in rows])
    # Raw logits and FDC choose the true task of every other image.
    turn = np.arange(len(views[0])) % 2 == 0
    run.predictions = {
        "label": np.where(turn, fdc.label, raw.label),
        "task": np.where(turn, fdc.task, raw.task),
        "raw_label": raw.label,
        "raw_task": raw.task,
        "fdc_label": fdc.label,
        "fdc_task": fdc.task,
    }
    return run, terms


@pytest.mark.parametrize("dual", [True, False])
def test_parts_of_the_evidence_add_up_to_the_score(tmp_path, dual):
    run, terms = opened(tmp_path, dual)
    shown, columns = pictures.load(run), run.predictions
    scores, raw = terms.fuse().task_scores, terms.fuse(tsf=False, rlc=False, pac=False).task_scores
    assert shown.repaired and shown.broken and not shown.missing
    for kind, chosen in ((shown.repaired, "raw_task"), (shown.broken, "fdc_task")):
        for picture in kind:
            tasks = [columns["task"][picture.row], columns[chosen][picture.row]]
            values = np.array([(part.true, part.wrong) for part in picture.evidence])
            names = [part.name for part in picture.evidence]
            assert (names[0], names[-1], len(names)) == ("Raw logit", "FDC score", 5 + 2 * dual)
            np.testing.assert_allclose(values[0], raw[picture.row, tasks], atol=1e-4)
            np.testing.assert_allclose(values[-1], scores[picture.row, tasks], atol=1e-4)
            np.testing.assert_allclose(values[1:-1].sum(axis=0), values[-1], atol=1e-4)
            # The larger score is that of the task that FDC chose.
            assert (values[-1, 0] > values[-1, 1]) == (chosen == "raw_task")


def test_images_belong_to_their_rows(tmp_path):
    run, _ = opened(tmp_path)
    shown, columns = pictures.load(run), run.predictions
    right = columns["label"] == columns["fdc_label"]
    repaired = np.flatnonzero(right & (columns["raw_task"] != columns["task"]))
    assert shown.num_repaired == len(repaired) and len(shown.repaired) <= pictures.PICTURES
    for picture in (*shown.repaired, *shown.broken):
        assert picture.small and picture.uri.startswith("data:image/png;base64,")
        image = Image.open(io.BytesIO(base64.b64decode(picture.uri.partition(",")[2])))
        assert (np.asarray(image) == picture.row).all()
        assert picture.true.name == NAMES[columns["label"][picture.row]]
        assert picture.raw.task == columns["raw_task"][picture.row] + 1
    for picture in shown.repaired:
        assert picture.row in repaired and picture.fdc == picture.true
    for picture in shown.broken:
        assert picture.raw == picture.true != picture.fdc


def test_missing_pictures_have_a_reason(tmp_path):
    run, _ = opened(tmp_path)
    (tmp_path / "test_adapted.npy").unlink()
    assert not any(picture.evidence for picture in pictures.load(run).repaired)

    def fail(rows):
        raise InputError("digits: no images here")

    run.test_images = fail
    assert pictures.load(run).missing == "The test images could not be read: digits: no images here"
    del run.predictions["fdc_task"]
    assert "no predictions of FDC" in pictures.load(run).missing


def test_pretrained_features_replace_no_adapted_ones(tmp_path):
    np.save(tmp_path / "test_pretrained.npy", np.ones((2, 3), np.float32))
    run = types.SimpleNamespace(features_folder=tmp_path)
    assert pictures.test_views(run) == []
    np.save(tmp_path / "test_adapted.npy", np.zeros((2, 3), np.float32))
    np.testing.assert_array_equal(pictures.test_views(run), [np.zeros((2, 3)), np.ones((2, 3))])
