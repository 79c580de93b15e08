"""RSIAT's calibration of cosine heads, number for number."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import digits
from fdc_jax.errors import TrainingError
from fdc_jax.learners import rsiat
from fdc_jax.learners.gaussian_alignment import ClassGaussians

WIDTH = 10
CLASSES = (2, 3, 2)
KEY = jax.random.key(0)


def settings(**fields):
    found = digits.get_config().learner.rsiat
    found.update(dict(scale=5.0, samples_per_class=4, calibration_epochs=4) | fields)
    return found


def seen(tasks):
    return (np.arange(3) < np.array(CLASSES)[:, None]) & (np.arange(3)[:, None] < tasks)


def problem(spread=0.0):
    rng = np.random.default_rng(0)
    heads = rng.normal(size=(3, 3, WIDTH)) * seen(2)[:, :, None]
    factors = np.tile(spread * np.eye(WIDTH), (3, 3, 1, 1))
    gaussians = ClassGaussians(
        jnp.asarray(rng.normal(size=(3, 3, WIDTH)), jnp.float32), factors.astype(np.float32)
    )
    return jnp.asarray(heads, jnp.float32), gaussians


def reference(rows, means, scale, rates, decay, optimizer):
    """Full-batch SGD or Adam in float64 on features that lie where the means lie."""
    units = means / np.linalg.norm(means, axis=1, keepdims=True)
    momentum, squares = np.zeros_like(rows), np.zeros_like(rows)
    for step, rate in enumerate(rates, start=1):
        norms = np.linalg.norm(rows, axis=1, keepdims=True)
        directions = rows / norms
        cosines = units @ directions.T
        shares = np.exp(scale * cosines)
        shares /= shares.sum(axis=1, keepdims=True)
        slopes = scale * (shares - np.eye(len(rows))) / len(units)
        gradient = slopes.T @ units - np.sum(slopes * cosines, axis=0)[:, None] * directions
        gradient = gradient / norms + decay * rows
        if optimizer == "sgd":
            momentum = 0.9 * momentum + gradient
            rows = rows - rate * momentum
        else:
            momentum = 0.9 * momentum + 0.1 * gradient
            squares = 0.999 * squares + 0.001 * gradient**2
            root = np.sqrt(squares / (1 - 0.999**step))
            rows = rows - rate * momentum / (1 - 0.9**step) / (root + 1e-8)
    return rows


@pytest.mark.parametrize(("optimizer", "decay"), [("sgd", 0.0), ("sgd", 0.3), ("adam", 0.0)])
def test_against_its_formula(optimizer, decay):
    """Classes without spread make every draw a mean; one batch an epoch has no order."""
    heads, gaussians = problem()
    found = rsiat.calibrate(
        settings(calibration_batch_size=20, calibration_optimizer=optimizer),
        heads,
        gaussians,
        seen(2),
        0.5,
        decay,
        jax.random.key(0),
    )
    rates = 0.5 * np.array([1.0, 0.5 + 0.125**0.5, 0.5, 0.5 - 0.125**0.5])
    rows, means = (np.asarray(array, np.float64)[seen(2)] for array in (heads, gaussians.means))
    expected = reference(rows, means, 5.0, rates, decay, optimizer)
    assert np.abs(expected - rows).max() > 0.1
    np.testing.assert_allclose(np.asarray(found)[seen(2)], expected, atol=1e-5)
    np.testing.assert_array_equal(np.asarray(found)[~seen(2)], 0)


@pytest.mark.parametrize("tasks", [2, 3])
def test_what_is_drawn_and_how_fast_it_is_learned(monkeypatch, tasks):
    heads, gaussians = problem()
    met = {}

    def calibration(*arguments):
        met["settings"] = arguments
        return lambda *arguments: met.update(arguments=arguments) or arguments[0]

    monkeypatch.setattr(rsiat, "_calibration", calibration)
    found = rsiat.calibrate(settings(), heads, gaussians, seen(tasks), 0.02, 0.1, KEY)
    assert found is heads
    assert met["settings"] == ("sgd", 5.0, 0.1, 4, 256)
    _, drawn_from, drawn, scales, rates, used = met["arguments"]
    assert drawn_from is gaussians and used is KEY
    np.testing.assert_array_equal(drawn, seen(tasks))
    expected = [0.9 + 0.1 * (task + 1) / tasks for task in range(tasks)]
    np.testing.assert_allclose(scales[:tasks], expected, rtol=1e-6)
    assert scales[tasks - 1] == 1.0
    np.testing.assert_allclose(rates[[0, 2]], [0.02, 0.01], rtol=1e-6)


def test_a_late_head_no_longer_takes_every_feature():
    """Rows of both heads lie near the later classes' means, as after a drift."""
    rng = np.random.default_rng(0)
    means = np.zeros((3, 3, WIDTH), np.float32)
    means[0, :2], means[1, :3] = 3.0 * np.eye(WIDTH)[:2], 3.0 * np.eye(WIDTH)[2:5]
    rows = means + 0.0
    rows[0, :2] = np.eye(WIDTH)[:2] + 2.0 * np.eye(WIDTH)[5:7]
    factors = np.tile(0.5 * np.eye(WIDTH, dtype=np.float32), (3, 3, 1, 1))
    gaussians = ClassGaussians(jnp.asarray(means), factors)
    heads = rsiat.calibrate(
        settings(samples_per_class=64, calibration_batch_size=64, scale=20.0),
        jnp.asarray(rows),
        gaussians,
        seen(2),
        0.5,
        0.0,
        KEY,
    )
    labels = rng.integers(0, 5, 500)
    features = means[seen(2)][labels] + 0.5 * rng.normal(size=(500, WIDTH))

    def accuracy(rows):
        rows = np.asarray(rows, np.float64)[seen(2)]
        scores = features @ (rows / np.linalg.norm(rows, axis=1, keepdims=True)).T
        return np.mean(scores.argmax(1) == labels)

    assert accuracy(heads) > accuracy(rows) + 0.01


def test_one_that_diverged_says_so():
    heads, gaussians = problem()
    gaussians = gaussians._replace(means=gaussians.means.at[0].set(jnp.nan))
    with pytest.raises(TrainingError, match="calibration after task 2 diverged"):
        rsiat.calibrate(
            settings(calibration_batch_size=20),
            heads,
            gaussians,
            seen(2),
            0.5,
            0.0,
            jax.random.key(0),
        )
