"""The reference learner, whose numbers published runs hang on, and what all training shares."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import digits
from fdc_jax.data.batches import Batch
from fdc_jax.learners import cumulative_lora, training
from fdc_jax.model import vit
from tests.learners.trajectories import (
    make_batch,
    products,
    random_like,
    reference_cross_entropy,
    reference_features,
    trajectory,
    value_and_gradients,
)


def test_golden_step():
    """One step from a fixed start, to the digit.

    A change here means that the encoder, the initialisation, the loss or Adam changed: published
    runs can no longer be repeated. Change the numbers only when that is intended, and say so.
    """
    config = digits.get_config()
    model = vit.build("digits", 32, config.data.input_range, config.precision)
    setup = training.Setup(model, (2, 2, 2), config)
    backbone = vit.initialise(model, 32, jax.random.key(7))
    update, state = cumulative_lora.update(setup), cumulative_lora.initial_state(setup)
    frozen, trained = cumulative_lora.start(setup, backbone, state, 0, jax.random.key(0))
    rng = np.random.default_rng(0)
    batch = Batch(
        rng.integers(0, 256, (8, 32, 32, 3)).astype(np.uint8),
        rng.integers(0, 2, 8).astype(np.int32),
        np.ones(8, np.float32),
    )
    trained, _, loss = update.step(
        backbone, frozen, trained, update.initialise(trained), batch, 1.0
    )
    observed = {
        "loss": float(loss),
        "B": float(jnp.abs(trained["increment"]["key"]["B"]).sum()),
        "A": float(jnp.abs(trained["increment"]["value"]["A"]).sum()),
        "weight": float(trained["head"].weight.sum()),
        "bias": float(trained["head"].bias[0]),
    }
    assert observed == pytest.approx(
        {
            "loss": 0.783946,
            "B": 1.918556,
            "A": 195.969269,
            "weight": 0.563046,
            "bias": -0.0785203,
        },
        rel=2e-5,
    )


def test_loss_in_float64(backbone):
    """Over the classes of the task; rows of the head that are none have no gradient."""
    run = trajectory("cumulative_lora")
    step = run.steps[2]
    trained = random_like(step.trained, 3)
    batch = make_batch(2, size=6, classes=2, padding=2)
    kernels = cumulative_lora.encoder(run.setup, backbone, step.before, 2)
    changes = products(trained["increment"])
    kernels = {part: np.asarray(kernels[part], np.float64) + changes[part] for part in changes}
    features = reference_features(batch.images, kernels)
    losses = reference_cross_entropy(features, trained["head"], batch.labels, 2)
    value, gradients = value_and_gradients(run.update, backbone, step.frozen, trained, batch)
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
