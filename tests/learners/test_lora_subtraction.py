"""LoRA-Subtraction: its spaces, its projected Adam, its triplet loss and its class means."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdc_jax import heads
from fdc_jax.data.batches import Batch
from fdc_jax.learners import lora_subtraction
from fdc_jax.learners.second_moments import attention_input_moments
from fdc_jax.model import vit
from tests.learners import toy


def random_moment(seed=0, width=12):
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(40, width)) * np.linspace(0.05, 2, width)
    return rows.T @ rows / 40


@pytest.mark.parametrize("energy", [0.3, 0.9, 1.0])
def test_drift_resistant_space_holds_the_energy(monkeypatch, energy):
    monkeypatch.setattr(lora_subtraction, "ENERGY", energy)
    moment = random_moment()
    values, vectors = np.linalg.eigh(moment)
    order = np.argsort(-values)
    size = next(k for k in range(1, 13) if values[order[:k]].sum() >= energy * values.sum() - 1e-12)
    space = vectors[:, order[:size]]
    actual = lora_subtraction.drift_resistant_space(moment)
    assert actual.shape == (12, size)
    np.testing.assert_allclose(actual @ actual.T, space @ space.T, atol=1e-12)


def reference_adam(gradients, rate, factors):
    """Sums of finished Adam steps, the epsilon being added to the uncorrected root."""
    first = second = total = np.zeros_like(gradients[0])
    for step, (gradient, factor) in enumerate(zip(gradients, factors, strict=True), start=1):
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient**2
        correction = np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
        total = total - factor * rate * correction * first / (np.sqrt(second) + 1e-8)
    return total


def test_adam_directions_in_float64():
    """Also for gradients so small that it matters where the epsilon is added."""
    rng = np.random.default_rng(0)
    gradients = [rng.normal(size=7) * np.logspace(-9, 0, 7) for _ in range(4)]
    zeros = jnp.zeros(7)
    moments, total = lora_subtraction.Moments(jnp.zeros((), jnp.int32), zeros, zeros), 0.0
    for gradient in gradients:
        moments, direction = lora_subtraction.adam_directions(
            moments, jnp.asarray(gradient, jnp.float32)
        )
        total = total - direction
    np.testing.assert_allclose(total, reference_adam(gradients, 1.0, np.ones(4)), rtol=1e-5)
    assert moments.steps == 4


def reference_triplet(features, labels, means, margin):
    """The mean hinge, image by image; every image has a negative."""
    hinges = []
    for feature, label in zip(features, labels, strict=True):
        distances = np.linalg.norm(features - feature, axis=1)
        others = [*distances[labels != label], *np.linalg.norm(means - feature, axis=1)]
        hinges.append(max(0.0, distances[labels == label].max() - min(others) + margin))
    return np.mean(hinges)


def test_triplet_loss_has_finite_slopes():
    """Also where distances are zero: to the image itself, and between equal images."""
    features = np.eye(6)[[0, 0, 1, 2]]
    batch = Batch(features, np.array([0, 0, 1, 1]), np.ones(4, np.float32))

    def loss(features):
        return lora_subtraction.triplet_loss(
            heads.unit(features), batch, jnp.zeros((2, 6)), jnp.zeros(2, bool), 1.0
        )

    slopes = jax.jit(jax.grad(loss))(jnp.asarray(features, jnp.float32))
    assert np.all(np.isfinite(slopes)) and np.any(np.asarray(slopes) != 0)
    alone = jax.jit(jax.grad(loss))(jnp.ones((4, 6)))
    assert np.all(np.isfinite(alone))


def test_b_starts_with_one_entry_per_rank(backbone):
    """One entry per rank, of deviation 0.01, in a place that is drawn."""
    learner = toy.make_learner("lora_subtraction", train__rank=8)
    state = learner.initial_state()
    _, trained = learner.start_task(backbone, state, 0, jax.random.key(0))
    key, value = (np.asarray(trained["increment"][part]["B"]) for part in toy.PARTS)
    for b in (key, value):
        assert np.all((b != 0).sum(axis=2) == 1) and len(np.unique(np.nonzero(b)[2])) > 5
    assert not np.array_equal(key, value)
    entries = np.concatenate([key[key != 0], value[value != 0]])
    assert np.std(entries) == pytest.approx(0.01, rel=0.4) and entries.min() < 0


@pytest.mark.parametrize("task", [0, 2])
def test_spaces_come_from_the_subtracted_encoder(backbone, task):
    """Nothing is projected in the first task; later, images pass W_0 less all increments so far."""
    run = toy.trajectory("lora_subtraction")
    step = run.steps[task]
    subtracted = run.learner.subtracted(backbone, step.before, task)
    kernels = toy.float64(vit.pretrained_kernels(backbone))
    added = toy.products(step.before.increments)
    for part in toy.PARTS:
        expected = kernels[part] - added[part][:task].sum(0)
        np.testing.assert_allclose(subtracted[part], expected, atol=1e-5)
    if task == 0:
        toy.assert_equal(step.designed, step.before)
        identity = np.tile(np.eye(toy.TINY.width), (toy.TINY.depth, 1, 1))
        np.testing.assert_array_equal(step.frozen["projector"], identity)
        return
    of_subtracted, of_pretrained = (
        attention_input_moments(run.setup, backbone, encoder, step.images.augmented())[0]
        for encoder in (subtracted, vit.pretrained_kernels(backbone))
    )
    # The first block has no kernel before it.
    np.testing.assert_allclose(of_subtracted[0], of_pretrained[0], atol=1e-5)
    assert np.abs(of_subtracted[1:] - of_pretrained[1:]).max() > 1e-2
    for block, moment in enumerate(toy.float64(of_subtracted)):
        space = lora_subtraction.drift_resistant_space(moment)
        size = space.shape[1]
        assert 1 <= size < toy.TINY.width
        assert step.designed.space_sizes[2, block] == size
        projector = space @ space.T / np.sqrt(size)
        np.testing.assert_allclose(step.designed.projector[block], projector, atol=1e-6)
        np.testing.assert_array_equal(step.frozen["projector"], step.designed.projector)


def test_projectors_without_normaliser_are_projections(backbone):
    step = toy.trajectory("lora_subtraction").steps[2]
    options = {"learner__lora_subtraction__normalised_projector": False}
    learner = toy.make_learner("lora_subtraction", **options)
    designed = learner.before_task(backbone, step.before, 2, step.images)
    projector, sizes = designed.projector, np.sqrt(designed.space_sizes[2])[:, None, None]
    np.testing.assert_allclose(projector, sizes * step.designed.projector, atol=1e-5)
    product = np.matmul(projector, projector)
    np.testing.assert_allclose(product, projector, atol=1e-5)


@pytest.mark.parametrize("task", [0, 1])
def test_training_is_projected_adam(backbone, task):
    """Three steps: gradients of the loss, Adam and projection in float64."""
    run = toy.trajectory("lora_subtraction")
    step = run.steps[task]
    trained, factors, history = toy.copy(step.started), (1.0, 0.5, 1.0), []
    before, progress = toy.float64(trained), run.update.initialise(trained)
    for number, factor in enumerate(factors):
        given, batch = (backbone, step.frozen, trained), toy.make_batch(number, size=6, classes=2)
        history.append(toy.value_and_gradients(run.update, *given, batch)[1])
        trained, progress, _ = run.update.step(*given, progress, batch, factor)
    projector = toy.float64(step.frozen["projector"])
    sizes = np.asarray(step.designed.space_sizes[task], np.float64)[:, None, None]
    outside = np.eye(toy.TINY.width) - projector * (1.0 if task == 0 else np.sqrt(sizes))

    def total(path, rate):
        return reference_adam([path(gradients) for gradients in history], rate, factors)

    for part in toy.PARTS:
        for name in ("A", "B"):
            plain = total(lambda tree, p=part, n=name: tree["increment"][p][n], 5e-4)
            expected = projector @ plain if name == "A" else plain @ projector
            change = np.asarray(trained["increment"][part][name], np.float64)
            change = change - before["increment"][part][name]
            np.testing.assert_allclose(change, expected, atol=2e-6)
            left = outside @ change if name == "A" else change @ outside
            np.testing.assert_allclose(left, 0, atol=2e-7)
            assert np.abs(change).max() > 1e-5
            assert (np.abs(plain - expected).max() > 1e-5) == (task == 1)
    for index in range(2):
        expected = total(lambda tree, i=index: tree["head"][i], 5e-3)
        change = np.asarray(trained["head"][index]) - before["head"][index]
        np.testing.assert_allclose(change, expected, atol=2e-5)


def test_loss_in_float64(backbone):
    """Cross-entropy of features plus the weighted triplet loss against means of earlier tasks."""
    run = toy.trajectory("lora_subtraction")
    step = run.steps[1]
    trained, batch = toy.random_like(step.trained, 3), toy.make_batch(2, 6, 2, padding=2)
    kernels = run.learner.encoder(backbone, step.before, 1)
    labels = batch.labels[:4]
    features = toy.features_with(kernels, trained["increment"], batch.images[:4])
    losses = toy.reference_cross_entropy(features, trained["head"], labels, 3)
    # Means of the task itself, of tasks to come, and rows beyond a task's classes would be nearer
    # than any other negative, but do not count. Lengths of means do not count either.
    near = np.repeat(features[:1], 3, axis=0)
    noise = np.random.default_rng(0).normal(0, 0.003, near[:2].shape)
    means = 5.0 * (near[:2] + np.abs(features).mean() * noise)
    slots = np.stack([np.concatenate([means, near[:1]]), near, near])
    state = step.before._replace(means=jnp.asarray(slots, jnp.float32))
    frozen, _ = run.learner.start_task(backbone, state, 1, jax.random.key(0))
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    hinges = reference_triplet(features, labels, means, 1.5)
    assert hinges > reference_triplet(features, labels, means[:0], 1.5) + 1e-3
    value, _ = toy.value_and_gradients(run.update, backbone, frozen, trained, batch)
    np.testing.assert_allclose(value, losses.mean() + 0.7 * hinges, rtol=1e-4)


def test_heads_are_the_class_means(backbone):
    """Means over plain images by the encoder of the task; they are the head."""
    run = toy.trajectory("lora_subtraction")
    step = run.steps[1]
    kernels = run.learner.encoder(backbone, step.after, 2)
    images, labels = toy.shown(step.images.plain())
    features = toy.reference_features(images, kernels)
    means = np.stack([features[labels == label].mean(0) for label in range(3)])
    np.testing.assert_allclose(step.after.means[1], means, atol=1e-4)
    _, head = run.learner.heads(step.after, 2)
    assert type(head) is heads.NearestMeanHead
    toy.assert_equal(head.means, step.after.means[1])


def test_the_native_wave_spans_a_later_tasks_epochs():
    """Whatever the number of the first task's is."""
    learner = toy.make_learner("lora_subtraction", learner__preset="native", train__epochs=5)
    schedule = learner.update().schedule
    assert [schedule(epoch, 10) for epoch in range(5)] == [schedule(epoch, 5) for epoch in range(5)]
    assert schedule(9, 10) == schedule(4, 10) > 0
