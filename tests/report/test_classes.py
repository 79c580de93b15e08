"""Classes: counts by hand, and the page with its wrong pictures."""

import types

import numpy as np
import pytest

from fdc_jax.report import classes, page
from tests.report import made_up
from tests.report.test_page import HOSTILE, Reader

NAMES = ("ant", "bee", "cat", HOSTILE, "emu", "fox")


def small_run(folder):
    """Eight images of four of six classes; FDC is right of five of them."""
    run = made_up.run(1, "digits", num_tasks=3)
    run.predictions = {
        "task": np.array([0, 0, 0, 0, 0, 1, 1, 2]),
        "label": np.array([0, 0, 0, 1, 1, 3, 3, 5]),
        "raw_label": np.array([1, 1, 1, 1, 1, 1, 1, 1]),
        "fdc_label": np.array([0, 3, 3, 1, 1, 3, 0, 5]),
        "oracle_label": np.array([0, 0, 0, 1, 1, 3, 3, 5]),
    }
    run.results.accuracy = {"raw": 25.0, "fdc": 62.5, "oracle": 100.0}
    run.class_names, run.results.num_classes = NAMES, len(NAMES)
    run.test_images = lambda rows: np.stack([np.full((8, 8, 3), 9 * row, np.uint8) for row in rows])
    run.features_folder = folder
    return run


@pytest.fixture
def run(tmp_path):
    return small_run(tmp_path)


def load(run):
    """The group of a run, its counts by class, and the same with pictures."""
    (group,) = made_up.groups(run)
    counts = classes.load(group)
    return group, counts, classes.with_pictures(counts, group)


def test_counts_by_hand(run):
    counts = load(run)[1]
    assert counts.pairs == [(0, 3, 2, 200 / 3), (3, 0, 1, 50.0)]
    # Worst first; then by label.
    assert counts.table.reset_index().to_numpy().tolist() == [
        pytest.approx(row)
        for row in (
            [0, 1, 3, 100 / 3, 0, 3],
            [3, 2, 2, 50, 0, 0],
            [1, 1, 2, 100, 100, -1],
            [5, 3, 1, 100, 0, -1],
        )
    ]
    assert counts.untested == ["cat", "emu"]
    assert {cell[:3] for cell in counts.cells} >= {(0, 0, 1), (0, 3, 2), (5, 5, 1)}
    assert sorted(counts.order) == [*range(6)]
    assert abs(counts.order.index(0) - counts.order.index(3)) == 1
    del run.predictions["fdc_label"]
    assert classes.load(made_up.groups(run)[0]) is None


def test_the_page_has_every_class_and_every_wrong_picture(run, monkeypatch):
    monkeypatch.setattr(classes, "_BLOCK", 2)
    group, counts, pictured = load(run)
    assert [(image.true, image.chosen) for image in pictured.wrong] == [(0, 3), (0, 3), (3, 0)]
    assert (pictured.number, pictured.missing) == (3, "")
    assert len({image.uri for image in pictured.wrong}) == 3
    text = page.render_classes(group, pictured)
    assert '<th scope="row">emu</th><td></td><td class="number">0</td>' in text
    assert "<script>alert" not in text and "http" not in text.replace("http-equiv", "")
    read = Reader(text.replace("<br>", ""))
    assert {"ant", "bee", "fox", HOSTILE} < set(read.texts("th")) and "66.7" in read.texts("td")
    assert [item["data-is"] for item in read.all("li") if "data-is" in item] == ["0", "0", "3"]
    pairs = {attributes.get("data-pair") for _, attributes in read.elements}
    assert {"0,3", "0,", "5,5"} <= pairs
    monkeypatch.setattr(classes, "MOST", 2)
    assert len(classes.with_pictures(counts, group).wrong) == 2


def test_images_unlike_anything_learned_are_the_least_typical(run):
    run.results.accuracy["gaussians"] = 50.0
    np.save(run.features_folder / "test_adapted.npy", np.zeros((8, 2)))
    typicality = np.array([0.5, 0.04, 0.9, 0.01, 0.5, 0.5, 0.5, 0.5])
    run.calibrator = lambda name: types.SimpleNamespace(assess=lambda *views: (None, typicality))
    pictured = load(run)[2]
    assert [(image.true, image.chosen) for image in pictured.unlike] == [(1, 1), (0, 3)]
    assert (pictured.num_unlike, pictured.number) == (2, 3)


def test_counts_are_summed_over_seeds(run):
    group = load(run)[0]
    group.runs.append(run)
    assert [pair[:3] for pair in classes.load(group).pairs] == [(0, 3, 4), (3, 0, 2)]
