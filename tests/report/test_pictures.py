"""Pictures: which images, what they are called, and evidence that adds up to the score."""

import base64
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fdc_jax.calibration import FDC
from fdc_jax.errors import InputError
from fdc_jax.report import pictures
from tests.report.feature_sets import feature_set


class Run:
    """What `fdc_jax.open_run` returns, of a stream made up."""

    class_names = ("ant", "bee", "cat", "dog", "emu", "fox", "gnu", "hen", "ibex", "jay")

    def __init__(self, folder, calibrator, predictions):
        self.fitted, self.predictions = calibrator, predictions
        self.features_folder = folder / "features"
        self.predictions_file, self.refuse = Path(__file__), False  # one that is there

    def calibrator(self, name="fdc"):
        """The calibrator of the last task."""
        return self.fitted

    def test_images(self, rows):
        """An image a row, all pixels of which are the row."""
        if self.refuse:
            raise InputError("digits: no images here")
        return np.stack([np.full((8, 8, 3), row, np.uint8) for row in rows])


def opened(folder, dual=True):
    """A run with features and predictions, and its terms of the test images."""
    features, rng = feature_set(dual=dual, offset=1.0), np.random.default_rng(3)
    test = [features.test_adapted] + [features.test_pretrained] * dual
    views = [view + rng.standard_normal(view.shape, np.float32) for view in test]
    calibrator = features.fit(FDC())
    terms = calibrator.terms(*views)
    raw, fdc = terms.fuse(tsf=False, rlc=False, pac=False), terms.fuse()
    # Every image is of the task that one of the two chose.
    turn = np.arange(len(views[0])) % 2 == 0
    columns = {"label": np.where(turn, fdc.label, raw.label)}
    columns |= {"task": np.where(turn, fdc.task, raw.task)}
    columns |= {"raw_label": raw.label, "raw_task": raw.task}
    columns |= {"fdc_label": fdc.label, "fdc_task": fdc.task}
    (folder / "features").mkdir(parents=True)
    for name, view in zip(("test_adapted", "test_pretrained"), views, strict=False):
        np.save(folder / "features" / f"{name}.npy", view)
    return Run(folder, calibrator, columns), terms


@pytest.mark.parametrize("dual", [True, False])
def test_the_parts_of_the_evidence_add_up_to_the_score(tmp_path, dual):
    run, terms = opened(tmp_path, dual)
    found, columns = pictures.load(run), run.predictions
    scores, raw = terms.fuse().task_scores, terms.fuse(tsf=False, rlc=False, pac=False).task_scores
    assert found.repaired and found.broken and not found.missing
    for kind, chosen in ((found.repaired, "raw_task"), (found.broken, "fdc_task")):
        for each in kind:
            first, *parts, last = each.evidence
            true, wrong = columns["task"][each.row], columns[chosen][each.row]
            assert (first.name, last.name, len(parts)) == ("Raw logit", "FDC score", 3 + 2 * dual)
            for name, t in (("true", true), ("wrong", wrong)):
                assert getattr(first, name) == pytest.approx(raw[each.row, t], abs=1e-4)
                assert getattr(last, name) == pytest.approx(scores[each.row, t], abs=1e-4)
                total = sum(getattr(part, name) for part in parts)
                assert total == pytest.approx(getattr(last, name), abs=1e-4)
            # What decides is what FDC chose.
            assert (last.true > last.wrong) == (chosen == "raw_task")


def test_images_are_those_of_their_rows(tmp_path):
    run, _ = opened(tmp_path)
    found, columns = pictures.load(run), run.predictions
    right = columns["label"] == columns["fdc_label"]
    repaired = np.flatnonzero(right & (columns["raw_task"] != columns["task"]))
    assert found.num_repaired == len(repaired) and len(found.repaired) <= pictures.PICTURES
    for each in (*found.repaired, *found.broken):
        assert each.small and each.uri.startswith("data:image/png;base64,")
        image = Image.open(io.BytesIO(base64.b64decode(each.uri.partition(",")[2])))
        assert (np.asarray(image) == each.row).all()
        assert each.true.name == Run.class_names[columns["label"][each.row]]
        assert each.raw.task == columns["raw_task"][each.row] + 1
    assert all(each.row in repaired and each.fdc == each.true for each in found.repaired)
    assert all(each.raw == each.true != each.fdc for each in found.broken)


def test_what_cannot_be_shown_is_said(tmp_path):
    run, _ = opened(tmp_path)
    run.refuse = True
    assert pictures.load(run).missing == "The test images could not be read: digits: no images here"
    run.refuse = False
    (tmp_path / "features" / "test_adapted.npy").unlink()
    assert not any(each.evidence for each in pictures.load(run).repaired)
    own = run.predictions
    run.predictions = own | {"raw_task": own["task"], "fdc_task": own["task"]}
    assert "no image" in pictures.load(run).missing
    run.predictions = {name: column for name, column in own.items() if name[:3] != "fdc"}
    assert "no predictions of FDC" in pictures.load(run).missing
