"""Gaussians of classes, features drawn from them, and heads trained on these features."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fdc_jax.errors import TrainingError
from fdc_jax.learners import gaussian_alignment
from fdc_jax.learners.gaussian_alignment import ClassGaussians
from tests.learners import toy

SEEN = np.array([[True, True], [True, False], [False, False]])
# Of the older of two tasks, and of the newest.
SCALES = np.array([0.95, 1.0, 1.0])
HEADS = {"count": np.zeros((3, 2)), "sum": np.zeros((3, 2, 4)), "steps": np.zeros(3)}
GAUSSIANS = ClassGaussians(
    np.random.default_rng(0).normal(size=(3, 2, 4)).astype(np.float32),
    np.tril(np.random.default_rng(1).normal(size=(3, 2, 4, 4))).astype(np.float32),
)


def test_fit_of_huge_features_is_finite():
    """The ridge is far below the rounding of this covariance, where Cholesky would fail."""
    features = 1e9 * np.random.default_rng(0).normal(size=(3, 20))
    _, factor = gaussian_alignment.fit(features, 1e-4)
    np.testing.assert_allclose(factor @ factor.T, np.cov(features, rowvar=False), rtol=1e-6)


def test_classes_that_cannot_be_fitted_are_named():
    features, labels = np.ones((4, 4), np.float32), np.array([0, 0, 2, 2])
    gaussians = gaussian_alignment.empty(3, 3, 4)
    with pytest.raises(TrainingError, match="class 1 of task 3: expected training images"):
        gaussian_alignment.fit_task(gaussians, 2, features, labels, 3, 1e-4)
    features[2, 1] = np.nan
    with pytest.raises(TrainingError, match="class 2 of task 1: expected finite features"):
        gaussian_alignment.fit_task(gaussians, 0, features, np.array([0, 1, 2, 2]), 3, 1e-4)


def test_draws_have_the_moments_of_their_gaussian():
    drawn = gaussian_alignment.draw(jax.random.key(0), GAUSSIANS, 20_000, 2)
    np.testing.assert_array_equal(drawn[2], 0)
    for task, label in np.ndindex(2, 2):
        features, factor = toy.float64((drawn[task, label], GAUSSIANS.factors[task, label]))
        mean = SCALES[task] * GAUSSIANS.means[task, label]
        np.testing.assert_allclose(features.mean(0), mean, atol=0.08)
        covariance, actual = factor @ factor.T, np.cov(features, rowvar=False)
        np.testing.assert_allclose(actual, covariance, atol=0.06 * np.abs(covariance).max())


def retrained(monkeypatch, samples, batch_size, rates, *seeds, start=0.0, transformation=None):
    """Trains "heads" that count steps and samples, and add up features, per class and seed."""

    def loss(heads, features, labels, weights, seen):
        sums = jnp.sum(heads["sum"].reshape(-1, 4)[labels] * features, axis=1)
        chosen = heads["count"].reshape(-1)[labels] + sums
        return -jnp.sum(weights * chosen) - heads["steps"][0]

    monkeypatch.setattr(gaussian_alignment, "SAMPLES", samples)
    monkeypatch.setattr(gaussian_alignment, "BATCH_SIZE", batch_size)
    transformation, rates = transformation or optax.identity(), np.array(rates, np.float32)
    retrain = gaussian_alignment.retraining(loss, transformation, rates)
    heads = jax.tree.map(lambda leaf: np.float32(leaf + start), HEADS)
    ends = [retrain(heads, GAUSSIANS, SEEN, jax.random.key(seed)) for seed in seeds]
    return jax.tree.map(np.asarray, ends)


def test_every_epoch_and_key_has_its_own_draws(monkeypatch):
    """All of them are seen once; the last batch of an epoch, or the only one, may be smaller."""
    first, other_key = retrained(monkeypatch, 5, 4, [1, 0], 3, 4)
    (second,) = retrained(monkeypatch, 5, 64, [0, 1], 3)
    for actual, steps in ((first, 4), (second, 1)):
        assert actual["steps"][0] == steps
        np.testing.assert_array_equal(actual["count"], 5 * SEEN)
    for other in (second, other_key):
        assert np.abs(first["sum"] - other["sum"])[SEEN].min() > 1e-3


def test_batches_are_shuffled(monkeypatch):
    """A transformation that lets only the first step through shows what is in its batch."""

    def first_only(updates, count, params=None):
        return jax.tree.map(lambda leaf: jnp.where(count == 0, leaf, 0.0), updates), count + 1

    once = optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), first_only)
    (actual,) = retrained(monkeypatch, 40, 40, [1], 0, transformation=once)
    assert actual["count"][SEEN].min() >= 5
    assert actual["count"].sum() == 40


def test_diverged_alignment_is_an_error(monkeypatch):
    message = "alignment after task 2: expected finite heads"
    with jax.debug_nans(False), pytest.raises(TrainingError, match=message):
        retrained(monkeypatch, 5, 4, [1, 0], 0, start=np.inf)
