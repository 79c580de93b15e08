"""Familiarity against float64 NumPy, and the share of known images that are called unlike."""

import numpy as np
import pytest

from fdc_jax import calibration
from fdc_jax.calibration import familiarity
from tests.calibration import gaussian_reference as reference
from tests.calibration import streams


def reference_of(calibrator):
    counts = np.concatenate(calibrator.counts)
    return familiarity.reference(calibrator.views[-1], counts, np.float64)


@pytest.mark.parametrize("samples", [(40,), (10,)])
def test_images_and_left_out_images_equal_float64(samples):
    tasks = streams.stream(3, 3, samples=samples)
    calibrator = streams.fitted(tasks, method="gaussians")
    features = reference.unit(np.concatenate([task.pretrained for task in tasks]))
    labels = np.concatenate([task.labels for task in tasks])
    _, probes = streams.probe_inputs(tasks, size=20)
    expected = [reference.familiarity(x, features, labels) for x in reference.unit(probes)]
    known = reference_of(calibrator)
    actual, _ = familiarity.compare(known, probes)
    np.testing.assert_allclose(actual, expected, rtol=1e-3)
    counts = np.bincount(labels)
    rows = np.flatnonzero(counts[labels] > 1)[::3]
    values, gains = familiarity.left_out(known, features[rows], labels[rows], counts)
    expected = [reference.familiarity(features[row], features, labels, row) for row in rows]
    np.testing.assert_allclose(values + gains, expected, rtol=1e-3, atol=1e-3)
    assert (gains >= 0).all()


def test_expectation_and_deviation_match_the_images():
    rng = np.random.default_rng(2)
    labels, centres = np.repeat(np.arange(4), 3000), 2 * rng.normal(size=(4, 8))
    features = centres[labels] + np.geomspace(1, 0.3, 8) * rng.normal(size=(len(labels), 8))
    # So far from the origin that unit length changes no shape.
    features = np.append(features, np.full((len(labels), 1), 1000.0), axis=1).astype(np.float32)
    calibrator = calibration.Gaussians()
    calibrator.fit_task(features, labels, None, features)
    known = reference_of(calibrator)
    deviations, _ = reference.within(reference.unit(features), labels)
    away = reference.unit(features) - np.asarray(known.middle)
    near = np.einsum("nd,de,ne->n", deviations, known.precision, deviations)
    values = (np.einsum("nd,de,ne->n", away, known.whole, away) - near) / 2
    by_class = values.reshape(4, 3000)
    np.testing.assert_allclose(known.expected[:4], by_class.mean(axis=1), rtol=0.05)
    np.testing.assert_allclose(known.deviations[:4], by_class.std(axis=1), rtol=0.05)


def test_typicality_is_the_share_of_no_more_familiar_images():
    left, columns = np.random.default_rng(0).normal(size=5000), np.arange(5000) % 2
    known = familiarity.Reference(*[np.zeros(1)] * 5, np.array([2.0, 2.0]), np.array([1.0, 1.0]))
    later = known._replace(expected=np.array([3.0, 3.0]), deviations=np.array([4.0, 4.0]))
    shares = np.array([0.1, 0.5, 0.9])
    familiar = 3.0 + 4.0 * (np.quantile(left, shares) - 2.0)
    kept = familiarity.Familiarity()
    # The newest task has a gain of 1, and every other image takes the closest image's gain.
    for rows in (slice(2500), slice(2500, 5000)):
        kept = kept.with_task(known, left[rows], np.ones(2500), columns[rows])
    actual = kept.typicality(later, familiar + 1.0)
    np.testing.assert_allclose(actual, shares, atol=0.001)
    # Equally familiar images count, the image itself among them.
    ends = np.array([-1e9, 3.0 + kept.values.max()])
    np.testing.assert_array_equal(kept.typicality(known, ends), [1 / 5001, 1.0])


def test_class_means_as_adapted_features_flag_few_known_images():
    """Adapted features of training images are class means; those of new images are not."""
    rng = np.random.default_rng(1)
    shape = np.geomspace(1.0, 0.1, 12)
    centres = rng.normal(size=(16, 12)) * 2 * shape

    def images(classes, count):
        labels = np.repeat(classes, count)
        return centres[labels] + shape * rng.normal(size=(len(labels), 12)), labels

    calibrator, known = calibration.Gaussians(), []
    for task in range(3):
        classes = np.arange(4 * task, 4 * task + 4)
        features, labels = images(classes, 60)
        calibrator.fit_task(centres[labels], labels, None, features)
        known.append(images(classes, 400)[0])
        new = np.concatenate(known)
        _, typicality = calibrator.assess(new, new)
        assert 0.02 < np.mean(typicality < familiarity.UNTYPICAL) < 0.08
    stranger = images(np.arange(12, 16), 400)[0]
    _, strange = calibrator.assess(stranger, stranger)
    assert np.mean(strange < familiarity.UNTYPICAL) > 0.5
    assert len(np.unique(strange)) > 100  # no ties
