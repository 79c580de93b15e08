"""The reference learner, whose numbers published runs hang on, and what all training shares."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdc_jax.learners import training
from tests.learners import toy


def test_golden_step():
    """One step from a fixed start, to the digit.

    A change here means that the encoder, the initialisation, the loss or Adam changed: published
    runs can no longer be repeated. Change the numbers only when that is intended, and say so.
    """
    learner, backbone = toy.make_learner("cumulative_lora"), toy.make_backbone()
    update, state = learner.update(), learner.initial_state()
    frozen, trained = learner.start_task(backbone, state, 0, jax.random.key(0))
    trained, _, loss = update.step(
        backbone, frozen, trained, update.initialise(trained), toy.make_batch(0, size=6), 1.0
    )
    observed = {
        "loss": float(loss),
        "B": float(jnp.abs(trained["increment"]["key"]["B"]).sum()),
        "A": float(jnp.abs(trained["increment"]["value"]["A"]).sum()),
        "weight": float(trained["head"].weight.sum()),
        "bias": float(trained["head"].bias[0]),
    }
    expected = {"loss": 0.694454, "B": 0.0477393, "A": 9.46178, "weight": 1.633125}
    assert observed == pytest.approx(expected | {"bias": -0.1620406}, rel=2e-5)


def test_loss_in_float64(backbone):
    """Over the classes of the task; rows of the head that are none have no gradient."""
    run = toy.trajectory("cumulative_lora")
    step = run.steps[2]
    trained = toy.random_like(step.trained, 3)
    batch = toy.make_batch(2, size=6, classes=2, padding=2)
    kernels = run.learner.encoder(backbone, step.before, 2)
    features = toy.features_with(kernels, trained["increment"], batch.images)
    losses = toy.reference_cross_entropy(features, trained["head"], batch.labels, 2)
    value, gradients = toy.value_and_gradients(run.update, backbone, step.frozen, trained, batch)
    np.testing.assert_allclose(value, losses[:4].mean(), rtol=1e-4)
    for leaf in gradients["head"]:
        np.testing.assert_array_equal(leaf[2:], 0)
        assert np.abs(leaf[:2]).min() > 0


def test_a_new_head_is_uniform():
    head = training.new_linear_head(jax.random.key(0), 400, 24)
    for leaf in head:
        assert 0.98 * 24**-0.5 < np.abs(leaf).max() <= 24**-0.5
        assert np.std(leaf) == pytest.approx(24**-0.5 / np.sqrt(3), rel=0.1)
    assert np.abs(head.weight[0, 0] - head.bias[0]) > 0
