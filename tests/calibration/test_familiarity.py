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
    values, gains = familiarity.left_out(
        found._reference_of(np.float64), features[rows], columns[rows], np.bincount(columns)
    )
    expected = [by_hand(features[row], features, labels, row) for row in rows]
    np.testing.assert_allclose(values + gains, expected, rtol=1e-3, atol=1e-3)
    assert (gains >= 0).all()


def test_expectation_and_deviation_are_those_of_the_images_of_a_class():
    """Of the distances to the own class and to all images, for classes of one covariance."""
    rng = np.random.default_rng(2)
    labels, centres = np.repeat(np.arange(4), 3000), 2 * rng.normal(size=(4, 8))
    features = centres[labels] + np.geomspace(1, 0.3, 8) * rng.normal(size=(len(labels), 8))
    # So far from the origin that unit length changes no shape.
    features = np.append(features, np.full((len(labels), 1), 1000.0), axis=1).astype(np.float32)
    found = calibration.Gaussians()
    found.fit_task(features, labels, None, features)
    features = features / np.linalg.norm(features, axis=1, keepdims=True)
    known = found._reference
    away = features - np.asarray(known.middle)
    whole = np.einsum("nd,de,ne->n", away, known.whole, away)
    _, columns = np.unique(labels, return_inverse=True)
    near = away - np.asarray(known.means)[columns]
    values = (whole - np.einsum("nd,de,ne->n", near, known.precision, near)) / 2
    counts = np.bincount(columns)
    means = np.bincount(columns, values) / counts
    np.testing.assert_allclose(known.expected[:4], means, rtol=0.05)
    squares = np.bincount(columns, (values - means[columns]) ** 2) / counts
    np.testing.assert_allclose(known.deviations[:4], np.sqrt(squares), rtol=0.05)


def test_typicality_is_the_share_of_left_out_images_that_are_no_more_familiar():
    left, columns = np.random.default_rng(0).normal(size=5000), np.arange(5000) % 2
    known = familiarity.Reference(*[np.zeros(1)] * 5, np.array([2.0, 2.0]), np.array([1.0, 1.0]))
    kept = familiarity.Familiarity().with_task(known, left, np.zeros(5000), columns)
    # As more tasks have followed.
    later = known._replace(expected=np.array([3.0, 3.0]), deviations=np.array([4.0, 4.0]))
    familiar = 3.0 + 4.0 * (np.quantile(left, [0.1, 0.5, 0.9]) - 2.0)
    shares = kept.typicality(later, familiar)
    np.testing.assert_allclose(shares, [0.1, 0.5, 0.9], atol=0.001)
    assert familiarity.Familiarity().typicality(known, np.array([-1e9]))[0] == 1.0
    # A gain of 1 for the images of the newest task, of which each other image takes the closest.
    some = familiarity.Familiarity().with_task(known, left[:2500], np.zeros(2500), columns[:2500])
    some = some.with_task(known, left[2500:], np.ones(2500), columns[2500:])
    gained = some.typicality(later, familiar + 1.0)
    np.testing.assert_allclose(gained, [0.1, 0.5, 0.9], atol=0.001)
    assert kept.typicality(known, np.array([-1e9]))[0] == 1 / 5001
    # Images that are equally familiar count.
    assert kept.typicality(known, np.array([2.0 + kept.values.max()]))[0] == 1.0


def test_values_of_few_images_fit_the_statistics_of_many():
    """Two classes of 40 images in 96 dimensions, then 28 more classes, which sharpen P."""
    rng = np.random.default_rng(5)
    shape = np.geomspace(1.0, 0.2, 96)
    centres = 1.5 * rng.normal(size=(30, 96)) * shape
    labels = np.repeat(np.arange(30), 40)
    images = centres[labels] + shape * rng.normal(size=(len(labels), 96))
    found = calibration.Gaussians()
    for task in (labels < 2, (labels >= 2) & (labels < 9), labels >= 9):
        found.fit_task(images[task], labels[task], None, images[task])
    exact, gains = familiarity.left_out(
        found._reference_of(np.float64),
        images / np.linalg.norm(images, axis=1, keepdims=True),
        *(labels, np.bincount(labels)),
    )
    kept, known = found.familiarity, found._reference
    restored = kept.values * np.asarray(known.deviations)[kept.columns]
    for first, last in ((0, 2), (2, 9)):
        own = (kept.columns >= first) & (kept.columns < last)
        there = (labels >= first) & (labels < last)
        assert restored[own].std() == pytest.approx(exact[there].std(), rel=0.3)
    # An image as familiar as the least familiar one of the newest task, as it stands now.
    newest = labels >= 9
    low = np.sort((exact + gains)[newest])[:40]
    share = found.familiarity.typicality(known, low)
    all_of_them = np.sort(exact + gains)
    expected = np.searchsorted(all_of_them, low, side="right") / len(labels)
    np.testing.assert_allclose(share, expected, atol=0.02)


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
