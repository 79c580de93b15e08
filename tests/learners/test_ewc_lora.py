"""EWC-LoRA: its penalty, its Fisher information, and how increments are folded in."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdc_jax import heads as head_types
from fdc_jax.model import vit
from tests.learners import toy


def unit(features):
    return features / np.linalg.norm(features, axis=1, keepdims=True)


@pytest.fixture(scope="module")
def run():
    return toy.trajectory("ewc_lora")


@pytest.fixture(scope="module")
def under_way(run):
    """Frozen and trained leaves in the middle of the second task, all of a size that counts."""
    step = run.steps[1]
    importance = jax.tree.map(jnp.square, toy.random_like(step.frozen["importance"], 5))
    return step.frozen | {"importance": importance}, toy.random_like(step.trained, 1)


# The penalty -------------------------------------------------------------------------------------


def test_loss_is_cross_entropy_plus_strength_times_penalty(run, backbone, under_way):
    frozen, trained = under_way
    batch = toy.make_batch(size=6, classes=3, padding=2)
    kernels, omega = toy.float64(frozen["kernels"]), toy.float64(frozen["importance"])

    def expected(leaves):
        change = toy.products(leaves["increment"])
        features = toy.reference_features(
            batch.images[:4], {part: kernels[part] + change[part] for part in toy.PARTS}
        )
        losses = toy.reference_cross_entropy(features, leaves["head"], batch.labels[:4], 3)
        penalty = sum(np.sum(omega[part] * change[part] ** 2) for part in toy.PARTS) / 2
        return losses.mean() + 3.0 * penalty

    value, gradients = toy.value_and_gradients(run.update, backbone, frozen, trained, batch)
    np.testing.assert_allclose(value, expected(toy.float64(trained)), rtol=1e-4)
    direction = toy.float64(toy.random_like(trained, 8))
    found = toy.slope(expected, toy.float64(trained), direction)
    np.testing.assert_allclose(toy.inner(gradients, direction), found, rtol=2e-3)


# Fisher information ------------------------------------------------------------------------------


def largest(importance):
    """The places of the largest entry of every block and part."""
    for part in toy.PARTS:
        for block, found in enumerate(importance[part]):
            yield part, (block, *np.unravel_index(found.argmax(), found.shape))


def gradient_of_each(kernels, part, place, images, head, labels, normalise=False):
    """The gradients of the images' losses by one entry of a kernel, by central differences."""
    losses = []
    for sign in (1, -1):
        moved = {name: kernel.copy() for name, kernel in toy.float64(kernels).items()}
        moved[part][place] += sign * 1e-5
        features = toy.reference_features(images, moved)
        features = unit(features) if normalise else features
        losses.append(toy.reference_cross_entropy(features, head, labels, 3))
    return (losses[0] - losses[1]) / 2e-5


@pytest.mark.parametrize(
    "fisher", ["per_sample", pytest.param("batch_mean", marks=pytest.mark.slow)]
)
def test_fisher_information_by_finite_differences(run, backbone, fisher):
    """The largest entries, added to the old importance times its factor; an image is padding."""
    step, after = run.steps[1], run.steps[1].after
    if fisher == "batch_mean":
        learner = toy.make_learner("ewc_lora", learner__ewc_lora__fisher=fisher)
        after = learner.after_task(
            backbone, step.designed, 1, step.frozen, step.trained, step.images
        )
    importance = {
        part: toy.float64(after.importance[part]) - 0.25 * toy.float64(step.before.importance[part])
        for part in toy.PARTS
    }
    kernels = run.learner.encoder(backbone, step.after, 2)
    for part, place in largest(importance):
        total = 0.0
        for batch in step.images.augmented():
            images, labels = toy.shown([batch])
            gradients = gradient_of_each(kernels, part, place, images, step.trained["head"], labels)
            squares = gradients**2 if fisher == "per_sample" else np.mean(gradients) ** 2
            total += np.sum(squares * np.ones(len(images)))
        assert total > 0
        np.testing.assert_allclose(importance[part][place], total / 11, rtol=2e-3)


# The head on the unit feature, and folding --------------------------------------------------------


def test_the_head_on_the_unit_feature(run, backbone, under_way):
    """In training, in the Fisher pass and in what is offered for inference."""
    learner = toy.make_learner(
        "ewc_lora", learner__ewc_lora__head_input="l2", learner__ewc_lora__accumulation=0.0
    )
    frozen, trained = under_way
    frozen = frozen | {"importance": jax.tree.map(jnp.zeros_like, frozen["importance"])}
    # Unit features are short, so that rows must be long to matter.
    head = jax.tree.map(lambda leaf: 10.0 * leaf, trained["head"])
    trained = trained | {"head": head}
    batch, step = toy.make_batch(size=4, classes=3), run.steps[1]
    found = jax.jit(lambda leaves: learner.loss(backbone, frozen, leaves, batch))(trained)
    after = learner.after_task(backbone, step.designed, 1, frozen, trained, toy.task_images(batch))
    kernels = learner.encoder(backbone, after, 2)
    features = unit(toy.reference_features(batch.images, kernels))
    expected = toy.reference_cross_entropy(features, head, batch.labels, 3)
    np.testing.assert_allclose(found, expected.mean(), rtol=1e-4)
    (_, offered) = learner.heads(after, 2)
    assert isinstance(offered, head_types.NormalisedLinearHead)
    logits = features @ toy.float64(head.weight)[:3].T + toy.float64(head.bias)[:3]
    np.testing.assert_allclose(
        offered.logits(jnp.asarray(5.0 * features, jnp.float32)), logits, atol=1e-4
    )
    importance = toy.float64(after.importance)
    part, place = list(largest(importance))[-1]
    gradients = gradient_of_each(kernels, part, place, batch.images, head, batch.labels, True)
    np.testing.assert_allclose(importance[part][place], np.mean(gradients**2), rtol=2e-3)


@pytest.mark.parametrize("folding", ["products", "factors"])
def test_folding(backbone, folding):
    """Products: W_0 + sum A_i B_i. Factors: the sum of As times the sum of Bs, last task apart."""
    pretrained = toy.float64(vit.pretrained_kernels(backbone))
    learner = toy.make_learner("ewc_lora", learner__ewc_lora__folding=folding)
    state = toy.random_like(learner.initial_state(), 0)
    factors = toy.float64(state.increments)
    for num_tasks in range(4):
        found = learner.encoder(backbone, state, num_tasks)
        next_task = min(num_tasks, 2)
        frozen, _ = learner.start_task(backbone, state, next_task, jax.random.key(0))
        for part in toy.PARTS:
            a, b = factors[part]["A"][:num_tasks], factors[part]["B"][:num_tasks]
            expected = folded = pretrained[part] + (a @ b).sum(0)
            if folding == "factors":
                folded = pretrained[part] + a.sum(0) @ b.sum(0)
                if num_tasks:
                    expected = pretrained[part] + a[:-1].sum(0) @ b[:-1].sum(0) + a[-1] @ b[-1]
            np.testing.assert_allclose(found[part], expected, atol=1e-5)
            if num_tasks == next_task:
                np.testing.assert_allclose(frozen["kernels"][part], folded, atol=1e-5)
            if folding == "products":
                change = np.asarray(found[part], np.float64) - pretrained[part]
                rank = np.linalg.matrix_rank(change, tol=1e-4).max()
                assert rank == min(toy.RANK * num_tasks, toy.TINY.width)
