"""SLCA: every parameter of the encoder is trained, and heads are aligned anew after every task."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdc_jax.data.batches import Batch
from fdc_jax.learners import gaussian_alignment, slca
from fdc_jax.model import layouts, vit
from tests.learners import toy
from tests.learners.test_inflora_ca import reference_alignment
from tests.model import reference


def reference_loss(trained, batch, classes):
    """The mean over images with a weight, in float64 NumPy, of what is trained alone."""
    images, labels = toy.shown([batch])
    features = reference.features(trained["encoder"], images)
    return toy.reference_cross_entropy(features, trained["head"], labels, classes).mean()


def test_gradients_of_all_parameters_in_float64(backbone):
    """Of every leaf along a direction of its own; the backbone has no part in them."""
    run = toy.trajectory("slca")
    step = run.steps[2]
    batch, trained = toy.make_batch(2, 6, 2, padding=2), toy.random_like(step.trained, 3)
    elsewhere = toy.random_like(backbone, 8)
    _, momentum, value = run.update.step(
        elsewhere, step.frozen, toy.copy(trained), run.update.initialise(trained), batch, 1.0
    )
    # The first of SGD's momenta is the gradient.
    gradients, start = toy.float64(momentum.trace), toy.float64(trained)
    assert float(value) == pytest.approx(reference_loss(start, batch, 2), rel=1e-5)
    leaves, structure = jax.tree.flatten(start)
    direction, along = toy.float64(toy.random_like(start, 5, 1.0)), []
    for number, each in enumerate(jax.tree.leaves(direction)):
        one = [np.zeros_like(leaf) for leaf in leaves]
        one[number] = each
        one = jax.tree.unflatten(structure, one)
        slope = toy.slope(lambda tree: reference_loss(tree, batch, 2), start, one)
        along.append((toy.inner(gradients, one), slope))
    actual, expected = np.array(along).T
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-5)
    # Of the keys' biases alone there is none.
    assert np.sum(np.abs(expected) < 1e-5) == toy.TINY.depth


@pytest.mark.parametrize("temperature", [0.4, 0.0])
def test_alignment_starts_from_the_trained_heads(backbone, one_batch, monkeypatch, temperature):
    """Classes of one image have no spread, so that every draw is a scaled mean."""
    monkeypatch.setattr(slca, "RIDGE", 0.0)
    learner = toy.make_learner("slca", learner__slca__logit_temperature=temperature)
    state = toy.random_like(learner.initial_state(), 0)
    zero = np.zeros_like(state.gaussians.factors)
    state = state._replace(gaussians=gaussian_alignment.ClassGaussians(state.gaussians.means, zero))
    frozen, trained = learner.start_task(backbone, state, 1, jax.random.key(0))
    classes, images = toy.CLASSES[1], toy.random_images(4, toy.CLASSES[1])
    batch = Batch(images, np.arange(classes, dtype=np.int32), np.ones(classes, np.float32))
    after = learner.after_task(backbone, state, 1, frozen, trained, toy.task_images(batch))

    toy.assert_equal(after.encoder, trained["encoder"])
    toy.assert_equal(after.heads.weight[0], state.heads.weight[0])
    toy.assert_equal(after.heads.weight[1], trained["head"].weight)
    sizes = toy.CLASSES[:2]
    heads = [
        (toy.float64(after.heads.weight[t, :c]), toy.float64(after.heads.bias[t, :c]))
        for t, c in enumerate(sizes)
    ]
    old = toy.float64(state.gaussians.means[0, : sizes[0]])
    means = np.concatenate([old, reference.features(trained["encoder"], images)])
    tasks, rates = np.repeat([0, 1], sizes), 5e-3 * (1 + np.cos(np.pi * np.arange(5) / 5))
    weight, bias = reference_alignment(
        heads, means, tasks, np.array([0.95, 1.0]), temperature, rates, native=True
    )
    for task, head in enumerate(learner.heads(after, 2)):
        np.testing.assert_allclose(head.weight, weight[tasks == task], atol=3e-5)
        np.testing.assert_allclose(head.bias, bias[tasks == task], atol=3e-5)


def test_without_an_alignment_heads_stay(backbone):
    learner = toy.make_learner("slca", learner__slca__alignment_epochs=0)
    run = toy.trajectory("slca")
    step = run.steps[1]
    given = (backbone, step.designed, 1, step.frozen, step.trained, step.images)
    actual, aligned = learner.after_task(*given), step.after
    toy.assert_equal(actual.aligned, actual.heads)
    toy.assert_equal(actual.heads, aligned.heads)
    assert np.abs(aligned.aligned.weight - aligned.heads.weight)[:2].max() > 1e-3


def test_timm_layout_has_the_trained_parameters(backbone):
    """The same arrays as those of a pretrained encoder that has them."""
    other = toy.random_params(5)
    pretrained = vit.pretrained_kernels(other)
    expected, config = layouts.as_timm(other, toy.TINY, pretrained, toy.SIDE)
    replaced = vit.AllParameters(parameters=other)
    actual, same = layouts.as_timm(backbone, toy.TINY, replaced, toy.SIDE)
    toy.assert_equal(actual, expected)
    assert same == config


@pytest.mark.parametrize(
    ("benchmark", "epochs", "first"), [("cifar100", 20, 18), ("cub200", 50, 40)]
)
def test_native_rates_fall_where_the_authors_do(benchmark, epochs, first):
    learner = toy.make_learner("slca", benchmark=benchmark, learner__preset="native")
    schedule = learner.update().schedule
    factors = [schedule(epoch, epochs) for epoch in range(epochs)]
    assert factors == [1.0] * first + [0.1] * (epochs - first)


def test_heads_start_as_the_authors(backbone):
    learner = toy.make_learner("slca", (200,))
    _, trained = learner.start_task(backbone, learner.initial_state(), 0, jax.random.key(0))
    assert np.std(trained["head"].weight) == pytest.approx(0.02, rel=0.05)
    assert not jnp.any(trained["head"].bias)
