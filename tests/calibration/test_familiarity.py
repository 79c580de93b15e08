"""Familiarity against float64 NumPy, and the share of known images that are called unlike."""

import numpy as np
import pytest

from fdc_jax import calibration
from fdc_jax.calibration import familiarity
from tests.calibration import streams


def bracket(scatter, count, classes, shrunk=None):
    """Returns the matrix whose inverse is the precision; `shrunk` scatter gives the ridge."""
    shrunk, width = scatter if shrunk is None else shrunk, len(scatter)
    ridge = (0.1 + width / (count - classes)) * np.trace(shrunk) / (width * count)
    return 0.9 * scatter / count + ridge * np.eye(width)


def by_hand(feature, features, labels, out=None):
    """Returns f of a feature; the image `out` has no part in means and scatters."""
    kept = np.arange(len(labels)) != (-1 if out is None else out)
    known = sorted(set(labels))
    means = np.array([features[kept & (labels == c)].mean(axis=0) for c in known])
    scatters = []
    for chosen in (kept, kept | True):
        about = features[chosen] - means[np.searchsorted(known, labels[chosen])]
        if chosen.all() and out is not None:
            full = np.array([features[labels == c].mean(axis=0) for c in known])
            about = features - full[np.searchsorted(known, labels)]
        far = features[chosen] - features[chosen].mean(axis=0)
        scatters.append((about.T @ about, far.T @ far))
    (total, whole), (total_all, whole_all) = scatters
    count = len(labels)
    inner = np.linalg.inv(bracket(total, count, len(known), total_all))
    outer = np.linalg.inv(bracket(whole, count, 1, whole_all))
    near, far = feature - means, feature - features[kept].mean(axis=0)
    return (far @ outer @ far - np.einsum("cd,de,ce->c", near, inner, near).min()) / 2


def reference_of(tasks):
    found = streams.fitted(tasks, method="gaussians")
    features = np.concatenate([task.pretrained for task in tasks]).astype(float)
    labels = np.concatenate([task.labels for task in tasks])
    return found, features / np.linalg.norm(features, axis=1, keepdims=True), labels


def test_familiarity_is_that_of_the_pretrained_view_by_hand():
    tasks = streams.stream(3, 3)
    found, features, labels = reference_of(tasks)
    inputs = streams.probe_inputs(tasks)[1][:20]
    expected = [by_hand(x / np.linalg.norm(x), features, labels) for x in inputs.astype(float)]
    values, _ = familiarity.compare(found._reference, inputs)
    np.testing.assert_allclose(values, expected, rtol=1e-3)


@pytest.mark.parametrize("samples", [(40,), (10,)])
def test_left_out_images_are_those_of_statistics_without_them(samples):
    """The number of images, and the ridge, are kept."""
    tasks = streams.stream(3, 2, samples=samples)
    found, features, labels = reference_of(tasks)
    _, columns = np.unique(labels, return_inverse=True)
    rows = np.flatnonzero(np.bincount(columns)[columns] > 1)[::3]
    values = familiarity.left_out(
        found._reference_of(np.float64), features[rows], columns[rows], np.bincount(columns)
    )
    expected = [by_hand(features[row], features, labels, row) for row in rows]
    np.testing.assert_allclose(values, expected, rtol=1e-3, atol=1e-3)


def test_the_expectation_is_the_mean_over_images_of_a_class():
    """Of the distances to the own class and to all images, for images with the shared scatter."""
    tasks = streams.stream(3, 2, classes=(3,), samples=(4000,))
    found, features, labels = reference_of(tasks)
    known = found._reference
    away = features - np.asarray(known.middle)
    whole = np.einsum("nd,de,ne->n", away, known.whole, away)
    _, columns = np.unique(labels, return_inverse=True)
    near = away - np.asarray(known.means)[columns]
    values = (whole - np.einsum("nd,de,ne->n", near, known.precision, near)) / 2
    means = np.bincount(columns, values) / np.bincount(columns)
    assert np.average(means, weights=np.bincount(columns)) == pytest.approx(
        np.average(known.expected[: len(means)], weights=np.bincount(columns)), rel=1e-3
    )


def test_typicality_is_the_share_of_left_out_images_that_are_no_more_familiar():
    left, columns = np.random.default_rng(0).normal(size=5000), np.arange(5000) % 2
    known = familiarity.Reference(*[np.zeros(1)] * 5, expected=np.array([2.0, 2.0]))
    kept = familiarity.Familiarity().with_task(known, left, columns)
    later = known._replace(expected=np.array([3.0, 3.0]))  # as more tasks have followed
    shares = kept.typicality(later, np.quantile(left, [0.1, 0.5, 0.9]) + 1.0)
    np.testing.assert_allclose(shares, [0.1, 0.5, 0.9], atol=0.001)
    assert familiarity.Familiarity().typicality(known, np.array([-1e9]))[0] == 1.0
    assert kept.typicality(known, np.array([-1e9]))[0] == 1 / 5001


def test_an_encoder_that_learned_its_images_by_heart_flags_no_more_known_images():
    """Adapted features of training images are class means; those of new images are not."""
    rng = np.random.default_rng(1)
    shape = np.geomspace(1.0, 0.1, 12)
    centres = rng.normal(size=(24, 12)) * 2 * shape

    def images(classes, count):
        labels = np.repeat(classes, count)
        return centres[labels] + shape * rng.normal(size=(len(labels), 12)), labels

    found, known = calibration.Gaussians(), []
    for task in range(5):
        classes = np.arange(4 * task, 4 * task + 4)
        features, labels = images(classes, 60)
        found.fit_task(centres[labels], labels, None, features)
        known = [*known, images(classes, 400)[0]]
        new = np.concatenate(known)
        _, typicality = found.assess(new, new)
        assert 0.02 < np.mean(typicality < familiarity.UNTYPICAL) < 0.08
    stranger = images(np.arange(20, 24), 400)[0]
    _, strange = found.assess(stranger, stranger)
    assert np.mean(strange < familiarity.UNTYPICAL) > 0.5
    assert len(np.unique(strange)) > 100  # no ties
