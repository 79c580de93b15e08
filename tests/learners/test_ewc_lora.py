"""EWC-LoRA: its penalty and its Fisher information."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.learners import toy


@pytest.fixture(scope="module")
def run():
    return toy.trajectory("ewc_lora")


def test_loss_is_cross_entropy_plus_strength_times_penalty(run, backbone):
    step = run.steps[1]
    importance = jax.tree.map(jnp.square, toy.random_like(step.frozen["importance"], 5))
    frozen = step.frozen | {"importance": importance}
    trained = toy.random_like(step.trained, 1)
    batch = toy.make_batch(size=6, classes=3, padding=2)
    kernels, omega = toy.float64(frozen["kernels"]), toy.float64(frozen["importance"])

    def expected(leaves):
        features = toy.features_with(kernels, leaves["increment"], batch.images[:4])
        change = toy.products(leaves["increment"])
        losses = toy.reference_cross_entropy(features, leaves["head"], batch.labels[:4], 3)
        penalty = sum(np.sum(omega[part] * change[part] ** 2) for part in toy.PARTS) / 2
        return losses.mean() + 3.0 * penalty

    value, gradients = toy.value_and_gradients(run.update, backbone, frozen, trained, batch)
    np.testing.assert_allclose(value, expected(toy.float64(trained)), rtol=1e-4)
    toy.assert_slopes(expected, trained, gradients)


def largest(importance):
    """Yields part and index of the largest entry of every block and part."""
    for part in toy.PARTS:
        for block, entries in enumerate(importance[part]):
            yield part, (block, *np.unravel_index(entries.argmax(), entries.shape))


def gradients_of_images(kernels, part, index, images, head, labels):
    """The gradients of the images' losses by one entry of a kernel, by central differences."""
    losses = []
    for sign in (1, -1):
        moved = {name: kernel.copy() for name, kernel in toy.float64(kernels).items()}
        moved[part][index] += sign * 1e-5
        features = toy.reference_features(images, moved)
        losses.append(toy.reference_cross_entropy(features, head, labels, 3))
    return (losses[0] - losses[1]) / 2e-5


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
    importance = {
        part: toy.float64(after.importance[part]) - toy.float64(step.before.importance[part])
        for part in toy.PARTS
    }
    kernels = run.learner.encoder(backbone, step.after, 2)
    for part, index in largest(importance):
        total = 0.0
        for batch in step.images.augmented():
            images, labels = toy.shown([batch])
            gradients = gradients_of_images(
                kernels, part, index, images, step.trained["head"], labels
            )
            squares = gradients**2 if fisher == "per_sample" else np.mean(gradients) ** 2
            total += np.sum(squares * np.ones(len(images)))
        assert total > 0
        np.testing.assert_allclose(importance[part][index], total / 11, rtol=2e-3)
