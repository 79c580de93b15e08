"""SLCA: every parameter of the encoder is trained, and heads are aligned anew after every task."""

import numpy as np

from fdc_jax.model import increments
from tests.learners import toy
from tests.model import reference


def test_gradients_of_all_parameters_in_float64(backbone):
    """The pretrained encoder has no part in them."""
    run = toy.trajectory("slca")
    step = run.steps[2]

    def expected(leaves, images, labels):
        features = reference.features(leaves["encoder"], images)
        return toy.reference_cross_entropy(features, leaves["head"], labels, 2).mean()

    trained, elsewhere = toy.random_like(step.trained, 3), toy.random_like(backbone, 8)
    _, slopes = toy.check_loss(
        run, step.frozen, trained, expected, backbone=elsewhere, value_rtol=1e-5
    )
    # Of the keys' biases alone there is none.
    assert np.sum(np.abs(slopes) < 1e-5) == toy.TINY.depth


def test_the_encoder_continues_from_task_to_task(backbone):
    first, *later = toy.trajectory("slca").steps
    toy.assert_equal(first.started["encoder"], backbone)
    for step in later:
        toy.assert_equal(step.started["encoder"], step.before.encoder)


def test_without_an_alignment_heads_stay(backbone):
    learner = toy.make_learner("slca", learner__slca__alignment_epochs=0)
    step = toy.trajectory("slca").steps[1]
    given = (backbone, step.designed, 1, step.frozen, step.trained, step.images)
    actual = learner.after_task(*given)
    heads = increments.store(step.before.heads, 1, step.trained["head"])
    toy.assert_equal((actual.aligned, actual.heads, step.after.heads), (heads, heads, heads))
    assert not np.any(step.started["head"].bias)
