"""The parts of RSIAT's method against their formulas: losses, projector, calibration."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdc_jax.data.batches import Batch
from fdc_jax.learners import rsiat
from fdc_jax.learners.gaussian_alignment import ClassGaussians
from tests.learners import rsiat_reference, toy

LABELS = np.array([0, 1, 2, 0, 1, 2, 0, 0])
# The last two rows are padding, labelled as padding is.
WEIGHTS = np.array([1, 1, 1, 1, 1, 1, 0, 0], np.float32)
WIDTH = 12


def random_features(seed, count=8):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(count, WIDTH)), jnp.float32)


# Losses at their edges; test_rsiat.py has the losses ----------------------------------------------


def test_steering_without_pairs_of_a_kind_is_finite():
    features = random_features(0)
    value, gradient = jax.value_and_grad(rsiat.steering_loss)(
        features, Batch(None, np.arange(8), WEIGHTS), 1.0, 1.5
    )
    assert float(value) == 0.0
    np.testing.assert_array_equal(gradient, 0)
    one = rsiat.steering_loss(features, Batch(None, np.zeros(8, int), WEIGHTS), 1.0, -1.0)
    expected = rsiat_reference.steering(toy.float64(features)[:6], np.zeros(6), 1.0, -1.0)
    np.testing.assert_allclose(one, expected, rtol=1e-5)


# The projector -----------------------------------------------------------------------------------


# Calibration of cosine heads ---------------------------------------------------------------------

CLASSES = (2, 3, 2)
KEY = jax.random.key(0)


def seen(tasks):
    return (np.arange(3) < np.array(CLASSES)[:, None]) & (np.arange(3)[:, None] < tasks)


def calibration_problem():
    """Classes without spread make every draw a mean; one batch an epoch has no order."""
    rng = np.random.default_rng(0)
    heads = rng.normal(size=(3, 3, WIDTH)) * seen(2)[:, :, None]
    gaussians = ClassGaussians(
        jnp.asarray(rng.normal(size=(3, 3, WIDTH)), jnp.float32),
        np.zeros((3, 3, WIDTH, WIDTH), np.float32),
    )
    return jnp.asarray(heads, jnp.float32), gaussians


def reference_calibration(rows, of_classes, scale, rates, decay):
    """Full-batch SGD in float64 on features that lie where the means lie."""
    units = of_classes / np.linalg.norm(of_classes, axis=1, keepdims=True)
    optimizer = toy.Optimizer("sgd", decay)
    for rate in rates:
        norms = np.linalg.norm(rows, axis=1, keepdims=True)
        directions = rows / norms
        cosines = units @ directions.T
        shares = np.exp(scale * cosines)
        shares /= shares.sum(axis=1, keepdims=True)
        slopes = scale * (shares - np.eye(len(rows))) / len(units)
        gradient = slopes.T @ units - np.sum(slopes * cosines, axis=0)[:, None] * directions
        rows = rows - rate * optimizer(gradient / norms, rows)
    return rows


@pytest.mark.parametrize("preset", ["protocol", "native"])
def test_calibration_against_its_formula(one_batch, monkeypatch, preset):
    """With decay by the authors' rates for a data set, without it by the protocol's."""
    heads, gaussians = calibration_problem()
    decay = 0.3 if preset == "native" else 0.0
    monkeypatch.setattr(rsiat, "CALIBRATION_RATE", 0.5)
    monkeypatch.setattr(rsiat, "CALIBRATION_EPOCHS", 4)
    rates = rsiat.NativeRates(0.5, decay, 0.0, 0.0)
    monkeypatch.setitem(rsiat.NATIVE_RATES, "imagenet_a", rates)
    learner = toy.make_learner("rsiat", CLASSES, learner__preset=preset, learner__rsiat__scale=5.0)
    found = learner.calibrate(heads, gaussians, 1, KEY)
    rates = 0.5 * np.array([1.0, 0.5 + 0.125**0.5, 0.5, 0.5 - 0.125**0.5])
    rows, of_classes = (np.asarray(each, np.float64)[seen(2)] for each in (heads, gaussians.means))
    expected = reference_calibration(rows, of_classes, 5.0, rates, decay)
    assert np.abs(expected - rows).max() > 0.1
    np.testing.assert_allclose(np.asarray(found)[seen(2)], expected, atol=1e-5)
    np.testing.assert_array_equal(np.asarray(found)[~seen(2)], 0)
