"""EWC-LoRA: its penalty and its Fisher information."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdc_jax.model import operations
from tests.learners import toy


@pytest.fixture(scope="module")
def run():
    return toy.trajectory("ewc_lora")


def test_loss_is_cross_entropy_plus_strength_times_penalty(run):
    step = run.steps[1]
    importance = jax.tree.map(jnp.square, toy.random_like(step.frozen["importance"], 5))
    frozen = step.frozen | {"importance": importance}
    omega = toy.float64(importance)

    def expected(leaves, images, labels):
        features = toy.features_with(frozen["kernels"], leaves["increment"], images)
        change = toy.products(leaves["increment"])
        losses = toy.reference_cross_entropy(features, leaves["head"], labels, 3)
        return losses.mean() + 1.5 * sum(np.sum(omega[p] * change[p] ** 2) for p in toy.PARTS)

    toy.check_loss(run, frozen, toy.random_like(step.trained, 1), expected, classes=3)


@pytest.mark.parametrize(
    "fisher", ["per_sample", pytest.param("batch_mean", marks=pytest.mark.slow)]
)
def test_fisher_information_by_finite_differences(run, backbone, fisher):
    """The largest entries, added to the old importance; an image is padding."""
    step, after = run.steps[1], run.steps[1].after
    if fisher == "batch_mean":
        learner = toy.make_learner("ewc_lora", learner__ewc_lora__fisher=fisher)
        after = learner.after_task(
            backbone, step.designed, 1, step.frozen, step.trained, step.images
        )
    kernels = toy.float64(run.learner.encoder(backbone, step.after, 2))
    kernels = [kernels[part] for part in toy.PARTS]
    for number, part in enumerate(toy.PARTS):
        added = toy.float64(after.importance[part]) - toy.float64(step.before.importance[part])
        for block, entries in enumerate(added):
            entry, total = np.zeros(added.shape), 0.0
            entry[block, *np.unravel_index(entries.argmax(), entries.shape)] = 1.0
            for batch in step.images.augmented():
                images, labels = toy.shown([batch])

                def losses(kernels, images=images, labels=labels):
                    merged = dict(zip(toy.PARTS, kernels, strict=True))
                    features = toy.reference_features(images, merged)
                    return toy.reference_cross_entropy(features, step.trained["head"], labels, 3)

                gradients = toy.slope(losses, kernels, number, entry)
                if fisher == "batch_mean":
                    gradients = np.full(len(images), gradients.mean())
                total += np.sum(gradients**2)
            assert total > 0
            np.testing.assert_allclose(entries.max(), total / 11, rtol=2e-3)


def test_a_batch_in_portions_makes_the_same_step(run, monkeypatch):
    """A full portion, one partly of padding and one of nothing else."""
    # Factors of a fresh increment are zero on one side, which would hide what it adds.
    given = run.steps[1].frozen, toy.random_like(run.steps[1].trained, 4, 0.05)
    batch, calls = toy.make_batch(3, size=6, classes=3, padding=3), toy.encoder_calls(monkeypatch)
    expected = toy.step(run, *given, batch)
    monkeypatch.setitem(operations.PORTION_TOKENS, "cpu", toy.TWO_IMAGES)
    actual = toy.step(run._replace(update=run.learner.update()), *given, batch)
    assert {len(call[2]) for call in calls} == {2}
    toy.assert_near(actual[1:], expected[1:], 2e-4)
