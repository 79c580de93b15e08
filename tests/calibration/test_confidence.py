"""Probabilities against their definition, and their calibration error."""

import numpy as np
import pytest
from scipy.stats import binom

from fdc_jax import calibration, evaluation
from fdc_jax.calibration import confidence, familiarity
from tests.calibration import streams

VIEWS = ("adapted", "pretrained")


def test_a_fifth_of_every_class_is_held_out_and_no_single_image():
    rows = np.array([2, 0, 2, 2, 1, 2, 2, 2, 3, 3])
    expected = np.flatnonzero(confidence.held_out(rows))
    # The first and the sixth of class 2, the first of class 3, none of those of one image.
    np.testing.assert_array_equal(expected, [0, 7, 8])


def test_the_temperature_is_the_one_of_the_least_loss_and_rows_sum_to_one():
    rng = np.random.default_rng(0)
    truth = rng.normal(size=(4000, 6)) * 2
    chances = np.exp(truth) / np.exp(truth).sum(axis=1, keepdims=True)
    columns = np.array([rng.choice(6, p=each) for each in chances])
    spread = rng.uniform(0.5, 2.0, 4000)
    scores = 7.0 * truth * spread[:, None]  # seven times too sure
    found = confidence.Confidence().with_task(columns, scores, spread)
    probabilities = found.probabilities(scores, spread)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1.0)
    # A tenth of the share of wrong answers belongs to no class.
    shared = 0.1 * (np.sum(truth.argmax(axis=1) != columns) + 1) / 4002
    assert shared > 0.03
    np.testing.assert_allclose(probabilities, (1 - shared) * chances + shared / 6, atol=0.02)
    none = np.pad(scores, ((0, 0), (0, 1)), constant_values=-np.inf)  # a class without an image
    np.testing.assert_allclose(found.probabilities(none, spread)[:, :6], probabilities)


def test_an_answer_is_never_certain_where_no_held_out_image_was_answered_wrong():
    sure = 9.0 * np.eye(3)[np.arange(30) % 3]
    found = confidence.Confidence().with_task(np.arange(30) % 3, sure, np.ones(30))
    probabilities = found.probabilities(1e3 * np.eye(3), np.ones(3))
    np.testing.assert_allclose(probabilities.min(), 0.1 / 32 / 3, rtol=1e-6)


def test_answers_are_as_sure_as_they_are_right_and_strangers_are_told():
    *learned, stranger = streams.stream(3, 4, samples=(1200,))
    found = calibration.Gaussians()
    for task in learned:
        half = task.adapted[::2]
        found.fit_task(half, task.labels[::2], None, task.pretrained[::2], None, half)
    views = [np.concatenate([getattr(t, v)[1::2] for t in learned]) for v in VIEWS]
    labels = np.concatenate([t.labels[1::2] for t in learned])
    (probabilities, known), classes = found.assess(*views), np.concatenate(found.classes)
    label = found.score(*views).label
    np.testing.assert_array_equal(classes[probabilities.argmax(axis=1)], label)
    stated = probabilities.max(axis=1)
    assert evaluation.calibration_error(stated, label == labels) < 5.0
    _, strange = found.assess(stranger.adapted, stranger.pretrained)
    limit = familiarity.UNTYPICAL
    assert 0.03 < (known < limit).mean() < 0.07 < 0.3 < (strange < limit).mean()


def test_so_few_images_are_off_by_chance_alone():
    """Of n sure by p in one bin, |k / n - p| with k binomial; many are off by little."""
    few, many = np.full(9, 0.9), np.full(90_000, 0.9)
    k = np.arange(10)
    expected = 100 * np.sum(binom.pmf(k, 9, 0.9) * np.abs(k / 9 - 0.9))
    assert evaluation.chance_calibration_error(few) == pytest.approx(expected, rel=0.25)
    assert evaluation.chance_calibration_error(many) < 0.2
    assert evaluation.chance_calibration_error(np.ones(9)) == 0.0
