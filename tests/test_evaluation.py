"""Accuracies, intervals and calibration errors, by hand and against SciPy."""

import math

import msgspec
import numpy as np
import pytest
import scipy.stats
from numpy.testing import assert_array_equal

from fdc_jax import evaluation
from fdc_jax.calibration import Scores


def test_confusion_and_task_accuracies():
    true_task = np.array([0, 0, 0, 1, 1, 2])
    chosen = np.array([0, 1, 1, 1, 2, 0])
    expected = [[1, 2, 0, 0], [0, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert_array_equal(evaluation.task_confusion(true_task, chosen, 4), expected)
    accuracies = evaluation.task_accuracies(true_task + 1, true_task == chosen)
    assert accuracies == [None, pytest.approx(100 / 3), 50, 0]


def test_interval_of_gains_is_the_paired_t_interval():
    before, after = [84.1, 84.4, 84.5], [88.6, 88.5, 88.8]
    gain = evaluation.student(np.subtract(after, before))
    expected = scipy.stats.ttest_rel(after, before).confidence_interval(0.95)
    assert gain.mean == pytest.approx(np.mean(after) - np.mean(before))
    assert gain[2:] == pytest.approx(expected)
    # Equal seeds, or one seed, give no interval.
    for same in ([1.0, 1.0], [1.0]):
        assert math.isnan(evaluation.student(same).low)
    assert evaluation.student([99.0, 99.9], 0, 100)[2:] == (pytest.approx(93.73, abs=0.01), 100)


def test_interval_of_a_gain_over_samples_equals_the_bootstrap():
    rng = np.random.default_rng(3)
    label = rng.integers(0, 5, 400)
    before = np.where(rng.random(400) < 0.7, label, (label + 1) % 5)
    after = np.where(rng.random(400) < 0.3, (label + (rng.random(400) < 0.2)) % 5, before)
    gains = 100.0 * (after == label) - 100 * (before == label)
    expected = scipy.stats.bootstrap((gains,), np.mean, method="percentile", rng=rng)
    actual = evaluation.sample_gain(label, before, after)
    assert actual.mean == pytest.approx(gains.mean())
    assert actual.std == pytest.approx(expected.standard_error, rel=0.05)
    assert actual[2:] == pytest.approx([*expected.confidence_interval], abs=0.35)


@pytest.mark.parametrize("count", [0, 3, 112])
def test_intervals_of_few_images_are_never_empty(count):
    actual = evaluation.share_of(np.arange(112) < count)
    expected = scipy.stats.binomtest(count, 112).proportion_ci(method="wilson")
    assert actual[2:] == pytest.approx(100 * np.array(expected))
    label = np.zeros(112, int)
    mean, _, *interval = evaluation.sample_gain(label, label, label)
    # Half a sample of 114 is corrected, and half a sample spoiled.
    reach = 100 * scipy.stats.norm.ppf(0.975) / 114
    assert [mean, *interval] == pytest.approx([0.0, -reach, reach])


# Several calibrators -----------------------------------------------------------------------------


def scores(*tasks):
    """Scores that choose a task for each image, and the first class of either task."""
    classes = [np.array([0, 1]), np.array([2, 3])]
    return Scores(np.eye(2)[[*tasks]], np.zeros((len(tasks), 2), int), classes)


def test_decisions_are_decomposed_and_given_the_task():
    """Three images: the first class of each task and the second one of task 1."""
    labels, tasks = np.array([0, 2, 3]), np.array([0, 1, 1])
    both = {"raw": scores(0, 0, 0), "ncm": scores(1, 1, 1)}
    actual = evaluation.measures(both, labels, tasks)
    assert actual.task_accuracy == {"raw": [100, 0], "ncm": [0, 50], "oracle": [100, 50]}
    count, *shares = msgspec.structs.astuple(actual.decomposition["ncm"])
    assert count == 3
    assert [share * 3 / 100 for share in shares] == pytest.approx([1, 2, 2, 1, 1, 1, 0])
    assert evaluation.predictions(both, labels, tasks)["oracle_label"].tolist() == [0, 2, 2]


def test_the_calibration_error_has_fifteen_bins():
    """0.06 is in the first bin, 0.069 in the second one; one of the two of 0.9 is right."""
    confidence, right = np.array([0.06, 0.069, 0.9, 0.9]), np.array([True, False, True, False])
    error = evaluation.calibration_error(confidence, right)
    assert error == pytest.approx(100 * (0.94 + 0.069 + 2 * 0.4) / 4)


def test_few_samples_have_a_calibration_error_by_chance():
    """Of n samples with probability p in one bin, k are right by the binomial distribution."""
    k = np.arange(10)
    expected = 100 * np.sum(scipy.stats.binom.pmf(k, 9, 0.9) * np.abs(k / 9 - 0.9))
    chance = evaluation.chance_calibration_error
    assert chance(np.full(9, 0.9)) == pytest.approx(expected, rel=0.25)
    assert chance(np.full(90_000, 0.9)) < 0.2
    assert chance(np.ones(9)) == 0.0


def test_each_calibrator_is_measured_by_its_own_answers():
    probabilities = np.array([[0.7, 0.2, 0.1, 0.0], [0.6, 0.0, 0.3, 0.1]])
    both = {"gaussians": scores(0, 1), "fdc": scores(1, 0)}
    actual = evaluation.measures(both, np.array([0, 2]), np.array([0, 1]), probabilities)
    # Classes 0 and 1 are of the first task, 2 and 3 of the second.
    errors = {"gaussians": 100 * (0.3 + 0.7) / 2, "fdc": 100 * (0.1 + 0.6) / 2}
    assert actual.calibration_error == pytest.approx(errors)
