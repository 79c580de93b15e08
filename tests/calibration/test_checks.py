"""Warnings of mistakes that the features betray, and none of features without a mistake."""

import logging
import re
from pathlib import Path

import numpy as np
import pytest
from sklearn import metrics

import fdc_jax
from fdc_jax import calibration
from fdc_jax.calibration import checks
from fdc_jax.features import feature_files

EXAMPLE = Path(fdc_jax.__file__).parent / "assets" / "example_features.npz"
METHODS = ("fdc", "gaussians")


@pytest.fixture(scope="module")
def example():
    return feature_files.load(EXAMPLE)


def fitted(features, method):
    calibrator = features.fit(calibration.make(method))
    calibrator.components(features.test_adapted, features.test_pretrained)
    return calibrator


def lines(caplog):
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("view", "number", "method"),
    [
        ("pretrained", 0, "fdc"),
        ("pretrained", 3, "gaussians"),
        ("previous", 2, "gaussians"),
        ("adapted", 1, "ncm"),
    ],
)
def test_rows_in_another_order_are_named(example, caplog, view, number, method):
    tasks = [*example.tasks]
    rows = np.random.default_rng(0).permutation(getattr(tasks[number], view))
    tasks[number] = tasks[number]._replace(**{view: rows})
    fitted(example._replace(tasks=tasks), method)
    (line,) = lines(caplog)
    assert line.startswith(f"{view} features of task {number} (from 0): classes explain ")
    share, expected, other = map(float, re.findall(r"([\d.]+)%", line))
    assert share < 8 and expected < 8 and other > 20


@pytest.mark.parametrize("method", METHODS)
def test_swapped_views_are_named_once(example, caplog, tmp_path, method):
    calibrator = fitted(example, method)
    calibrator.save(tmp_path / "calibrator.npz")
    for given in (calibrator, calibration.load(tmp_path / "calibrator.npz")):
        caplog.clear()
        for _ in range(2):
            given.components(example.test_pretrained, example.test_adapted)
        (line,) = lines(caplog)
        share, rows = map(int, re.search(r"(\d+)% of (\d+) rows differ", line).groups())
        assert share >= 85 and rows == checks.ROWS


def test_later_batches_are_compared_less_often(example, caplog):
    calibrator = fitted(example, "gaussians")
    for _ in range(4):
        calibrator.components(example.test_adapted, example.test_pretrained)
    for batch in (6, 7):
        calibrator.components(example.test_pretrained, example.test_adapted)
        assert not lines(caplog), batch
    calibrator.components(example.test_pretrained, example.test_adapted)
    assert len(lines(caplog)) == 1


@pytest.mark.parametrize("method", METHODS)
def test_features_without_a_mistake_give_no_warning(example, caplog, method):
    calibrator = fitted(example, method)
    for label in np.unique(example.test_labels):  # batches of one class
        rows = np.flatnonzero(example.test_labels == label)
        rows = np.resize(rows, checks.ROWS)
        views = example.test_adapted[rows], example.test_pretrained[rows]
        assert not checks.warn_of_swapped(views, calibrator.unit_means)
    assert not lines(caplog)


def test_random_features_give_no_warning(caplog):
    rng, calibrator = np.random.default_rng(0), calibration.make("gaussians")
    for task in range(3):
        adapted, pretrained, previous = rng.normal(size=(3, 120, 24)).astype(np.float32)
        labels = 4 * task + rng.integers(0, 4, 120)
        before = previous if task else None
        calibrator.fit_task(adapted, labels, pretrained=pretrained, previous=before)
    assert not lines(caplog)


def test_the_explained_share_is_the_between_class_share():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 60)
    features = rng.normal(size=(60, 5)) + 2.0 * labels[:, None]
    means = np.stack([features[labels == label].mean(axis=0) for label in range(3)])
    expected = metrics.r2_score(features, means[labels], multioutput="variance_weighted")
    actual = checks.explained(features, labels)
    assert actual[:2] == (pytest.approx(expected, rel=1e-5), pytest.approx(2 / 59, rel=0.5))


@pytest.fixture(autouse=True)
def warnings_are_kept(caplog):
    with caplog.at_level(logging.WARNING, "fdc_jax"):
        yield
