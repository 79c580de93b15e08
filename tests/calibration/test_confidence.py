"""Probabilities against their definition, and their calibration error."""

import numpy as np
import pytest

from fdc_jax import calibration, evaluation
from fdc_jax.calibration import confidence, familiarity
from tests.calibration import streams


def test_a_fifth_of_every_class_and_no_single_image_is_held_out():
    rows = np.array([2, 0, 2, 2, 1, 2, 2, 2, 3, 3])
    # The first and the sixth of class 2, and the first of class 3.
    np.testing.assert_array_equal(np.flatnonzero(confidence.held_out(rows)), [0, 7, 8])


@pytest.mark.parametrize("factor", [7.0, 0.3], ids=["overconfident", "underconfident"])
def test_the_temperature_has_the_least_loss_and_rows_sum_to_one(factor):
    rng = np.random.default_rng(0)
    truth = rng.normal(size=(4000, 6)) * 2
    chances = np.exp(truth) / np.exp(truth).sum(axis=1, keepdims=True)
    columns = np.array([rng.choice(6, p=row) for row in chances])
    spread = rng.uniform(0.5, 2.0, 4000)
    scores = factor * truth * spread[:, None]
    fitted = confidence.Confidence().with_task(columns, scores, spread)
    probabilities = fitted.probabilities(scores, spread)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1.0)
    # A tenth of the share of wrong answers belongs to no class.
    shared = 0.1 * (np.sum(truth.argmax(axis=1) != columns) + 1) / 4002
    np.testing.assert_allclose(probabilities, (1 - shared) * chances + shared / 6, atol=0.02)
    padded = np.pad(scores, ((0, 0), (0, 1)), constant_values=-np.inf)  # a class without an image
    np.testing.assert_allclose(fitted.probabilities(padded, spread)[:, :6], probabilities)


def test_no_answer_is_certain_without_wrong_held_out_images():
    scores = 9.0 * np.eye(3)[np.arange(30) % 3]
    fitted = confidence.Confidence().with_task(np.arange(30) % 3, scores, np.ones(30))
    probabilities = fitted.probabilities(1e3 * np.eye(3), np.ones(3))
    np.testing.assert_allclose(probabilities.min(), 0.1 / 32 / 3, rtol=1e-6)


def test_confidence_is_accuracy_and_strangers_are_untypical():
    *learned, stranger = streams.stream(3, 4, samples=(1200,))
    calibrator = calibration.Gaussians()
    for task in learned:
        adapted = task.adapted[::2]
        calibrator.fit_task(
            adapted, task.labels[::2], pretrained=task.pretrained[::2], previous=adapted
        )
    views = [np.concatenate([task[column][1::2] for task in learned]) for column in (0, 1)]
    labels = np.concatenate([task.labels[1::2] for task in learned])
    (probabilities, known), label = calibrator.assess(*views), calibrator.score(*views).label
    np.testing.assert_array_equal(probabilities.argmax(axis=1), label)
    assert evaluation.calibration_error(probabilities.max(axis=1), label == labels) < 5.0
    _, strange = calibrator.assess(stranger.adapted, stranger.pretrained)
    limit = familiarity.UNTYPICAL
    assert 0.03 < (known < limit).mean() < 0.07 < 0.3 < (strange < limit).mean()
