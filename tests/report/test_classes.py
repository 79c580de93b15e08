"""Classes: counts by hand, the order of the confusion, and the page with its wrong pictures."""

import types

import numpy as np
import pytest

from fdc_jax.report import classes, page
from tests.report import made_up
from tests.report.test_page import HOSTILE, Reader

NAMES = ("ant", "bee", "cat", HOSTILE, "emu", "fox")


def group():
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
    return made_up.groups(run)[0]


def test_counts_by_hand():
    found = classes.load(group())
    assert found.pairs == [(0, 3, 2, 200 / 3), (3, 0, 1, 50.0)]
    rows = {label: row.tolist() for label, row in found.table.iterrows()}
    assert rows[0] == pytest.approx([1, 3, 100 / 3, 0, 3]) and rows[1] == [1, 2, 100, 100, -1]
    assert rows[3] == [2, 2, 50, 0, 0] and rows[5] == [3, 1, 100, 0, -1] and len(rows) == 4
    assert list(found.table.index[:2]) == [0, 3]  # The worst first.
    assert found.untested == ["cat", "emu"]
    assert {cell[:3] for cell in found.cells} >= {(0, 0, 1), (0, 3, 2), (5, 5, 1)}
    assert sorted(found.order) == [*range(6)]
    assert abs(found.order.index(0) - found.order.index(3)) == 1
    of = group()
    del of.runs[0].predictions["fdc_label"]
    assert classes.load(of) is None


def test_pairs_that_are_confused_stand_side_by_side():
    rng, size = np.random.default_rng(0), 40
    wrong, partner = np.zeros((size, size)), rng.permutation(size)
    for first, second in partner.reshape(-1, 2):
        wrong[first, second] = 0.1 + rng.random()
    places = np.argsort(classes.sorted_by_likeness(wrong))
    assert (np.abs(np.diff(places[partner.reshape(-1, 2)])) == 1).all()


def test_the_page_has_every_class_and_every_wrong_picture(monkeypatch):
    of = group()
    monkeypatch.setattr(classes, "_BLOCK", 2)
    found = classes.with_pictures(classes.load(of), of)
    assert [(each.true, each.chosen) for each in found.wrong] == [(0, 3), (0, 3), (3, 0)]
    assert (found.number, found.missing) == (3, "") and len({each.uri for each in found.wrong}) == 3
    text = page.render_classes(of, found)
    assert '<th scope="row">emu</th><td></td><td class="number">0</td>' in text
    assert "<script>alert" not in text and "http" not in text.replace("http-equiv", "")
    read = Reader(text.replace("<br>", ""))
    assert {"ant", "bee", "fox", HOSTILE} < set(read.texts("th")) and "66.7" in read.texts("td")
    assert [each["data-is"] for each in read.all("li") if "data-is" in each] == ["0", "0", "3"]
    assert {"0,3", "0,", "5,5"} <= {each.get("data-pair") for _, each in read.elements}
    monkeypatch.setattr(classes, "MOST", 2)
    assert [len(each.wrong) for each in (classes.with_pictures(found, of), found)] == [2, 3]


def test_images_unlike_anything_learned_are_the_least_typical(tmp_path):
    of = group()
    (run,) = of.runs
    run.folder, run.results.accuracy["gaussians"] = tmp_path, 50.0
    (tmp_path / "features").mkdir()
    np.save(tmp_path / "features" / "test_adapted.npy", np.zeros((8, 2)))
    typicality = np.array([0.5, 0.04, 0.9, 0.01, 0.5, 0.5, 0.5, 0.5])
    run.calibrator = lambda name: types.SimpleNamespace(assess=lambda *views: (None, typicality))
    found = classes.with_pictures(classes.load(of), of)
    assert [(each.true, each.chosen) for each in found.unlike] == [(1, 1), (0, 3)]
    assert (found.num_unlike, found.number) == (2, 3)


def test_features_alone_have_no_pictures_and_seeds_are_summed():
    of = group()
    text = page.render_classes(of, classes.with_pictures(classes.load(of), of))
    assert "Wrong pictures" in text and 'class="choose"' in text and "counted over" not in text
    of.runs.append(of.runs[0])
    of.runs[0].results.encoder = None
    found = classes.load(of)
    assert [pair[:3] for pair in found.pairs] == [(0, 3, 4), (3, 0, 2)]
    text = page.render_classes(of, found)
    assert "Images are counted over all 2 seeds." in text and 'class="choose"' not in text
    body = text[text.index("<body>") : text.index("<script>")].lower()
    assert "picture" not in body and "click" not in body


def test_the_page_counts_the_pairs_that_it_leaves_out(monkeypatch):
    monkeypatch.setattr(classes, "WORST", 1)
    of = group()
    found = classes.load(of)
    assert (len(found.pairs), found.num_pairs) == (1, 2)
    assert "The 1 most frequent of 2 pairs." in page.render_classes(of, found)
    monkeypatch.undo()
    assert "most frequent" not in page.render_classes(of, classes.load(of))


def test_where_none_is_wrong_there_is_nothing_to_choose():
    of = group()
    of.runs[0].predictions["fdc_label"] = of.runs[0].predictions["label"]
    read = Reader(page.render_classes(of, classes.with_pictures(classes.load(of), of)))
    assert not read.all("select") and "There are none." in read.texts("p")
