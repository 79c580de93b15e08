"""The reference learner, whose numbers published runs hang on, and what all training shares."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdc_jax.learners import training
from tests.learners import toy

GOLDEN = {
    "cumulative_lora": [0.694454, 1.633125, -0.1620406, 0.0477393, 9.46178],
    "e2_lora": [0.6928388, -0.3835717, 9.182304e-05, 351.9626, 0.00363142, 468.2347, 0.004162984],
}
FACTORS = {
    "cumulative_lora": [("key", "B"), ("value", "A")],
    "e2_lora": [("qkv", "A"), ("qkv", "B"), ("fc1", "A"), ("fc1", "B")],
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_step(backbone, name):
    """One step from a fixed start, to the digit.

    A change here means that the encoder, the initialisation, the loss or Adam changed: published
    runs can no longer be repeated. Change the numbers only when that is intended, and say so.
    """
    learner = toy.make_learner(name)
    update = learner.update()
    frozen, trained = learner.start_task(backbone, learner.initial_state(), 0, jax.random.key(0))
    given = (backbone, frozen, trained, update.initialise(trained), toy.make_batch(0, size=6))
    trained, _, loss = update.step(*given, 1.0)
    observed = [loss, trained["head"].weight.sum(), trained["head"].bias[0]]
    for kernel, factor in FACTORS[name]:
        observed.append(jnp.abs(trained["increment"][kernel][factor]).sum())
    assert [float(number) for number in observed] == pytest.approx(GOLDEN[name], rel=2e-5)


def test_loss_and_gradients_in_float64(backbone):
    """Over the classes of the task; rows of the head that are none have no gradient."""
    run = toy.trajectory("cumulative_lora")
    step = run.steps[2]
    trained = toy.random_like(step.trained, 3)
    batch = toy.make_batch(2, size=6, classes=2, padding=2)
    kernels = run.learner.encoder(backbone, step.before, 2)

    def expected(leaves):
        features = toy.features_with(kernels, leaves["increment"], batch.images[:4])
        return toy.reference_cross_entropy(features, leaves["head"], batch.labels[:4], 2).mean()

    value, gradients = toy.value_and_gradients(run.update, backbone, step.frozen, trained, batch)
    np.testing.assert_allclose(value, expected(toy.float64(trained)), rtol=1e-4)
    toy.assert_slopes(expected, trained, gradients)


def test_new_heads_are_uniform_or_normal():
    head = training.new_linear_head(jax.random.key(0), 400, 24)
    for leaf in head:
        assert 0.98 * 24**-0.5 < np.abs(leaf).max() <= 24**-0.5
        assert np.std(leaf) == pytest.approx(24**-0.5 / np.sqrt(3), rel=0.1)
    assert np.abs(head.weight[0, 0] - head.bias[0]) > 0
    rows = training.new_cosine_rows(jax.random.key(0), 400, 24)
    assert np.std(rows) == pytest.approx(0.02, rel=0.05)
