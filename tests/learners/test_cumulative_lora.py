"""The reference learner, whose numbers published runs hang on, and what all training shares."""

import jax
import numpy as np
import pytest

from fdc_jax.learners import training
from tests.learners import toy


def test_loss_and_gradients_in_float64(backbone):
    """Over the classes of the task; rows of the head that are none have no gradient."""
    run = toy.trajectory("cumulative_lora")
    step = run.steps[2]
    kernels = run.learner.encoder(backbone, step.before, 2)

    def expected(leaves, images, labels):
        features = toy.features_with(kernels, leaves["increment"], images)
        return toy.reference_cross_entropy(features, leaves["head"], labels, 2).mean()

    toy.check_loss(run, step.frozen, toy.random_like(step.trained, 3), expected)


def test_a_step_takes_over_the_memory_of_its_arguments(backbone):
    run = toy.trajectory("cumulative_lora")
    frozen, trained = toy.placed((run.steps[1].frozen, run.steps[1].trained))
    progress = run.update.initialise(trained)
    batch = next(iter(run.steps[1].images.augmented()))
    with jax.debug_nans(False):  # which keeps the memory of arguments
        run.update.step(backbone, frozen, trained, progress, batch, 1.0)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((trained, progress)))


def test_new_heads_are_uniform_or_normal():
    head = training.new_linear_head(jax.random.key(0), 400, 24)
    for leaf in head:
        assert 0.98 * 24**-0.5 < np.abs(leaf).max() <= 24**-0.5
        assert np.std(leaf) == pytest.approx(24**-0.5 / np.sqrt(3), rel=0.1)
    rows = training.new_cosine_rows(jax.random.key(0), 400, 24)
    assert np.std(rows) == pytest.approx(0.02, rel=0.05)
