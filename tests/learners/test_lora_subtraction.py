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


def test_adam_directions_in_float64():
    """The epsilon is added to the uncorrected root, which matters for small gradients."""
    rng = np.random.default_rng(0)
    zeros = jnp.zeros(7)
    moments, total = lora_subtraction.Moments(jnp.zeros((), jnp.int32), zeros, zeros), 0.0
    first = second = expected = np.zeros(7)
    for step in range(1, 5):
        gradient = rng.normal(size=7) * np.logspace(-9, 0, 7)
        single = jnp.asarray(gradient, jnp.float32)
        moments, direction = lora_subtraction.adam_directions(moments, single)
        total = total + np.asarray(direction, np.float64)
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient**2
        correction = np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
        expected = expected + correction * first / (np.sqrt(second) + 1e-8)
    np.testing.assert_allclose(total, expected, rtol=1e-5)
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

    @jax.jit
    @jax.grad
    def slopes(features):
        batch = Batch(None, np.array([0, 0, 1, 1]), np.ones(4, np.float32))
        means = jnp.zeros((2, 6)), jnp.zeros(2, bool)
        return lora_subtraction.triplet_loss(heads.unit(features), batch, *means, 1.0)

    for rows in ([0, 0, 1, 2], [0, 0, 0, 0]):
        actual = slopes(jnp.eye(6)[np.array(rows)])
        assert np.all(np.isfinite(actual))
        assert np.any(actual != 0) == (max(rows) > 0)


def test_b_starts_with_one_entry_per_rank():
    """One entry per rank, of deviation 0.01, in a place that is drawn."""
    starts = [step.started for step in toy.trajectory("lora_subtraction").steps]
    b = np.concatenate([start["increment"][part]["B"] for start in starts for part in toy.PARTS])
    columns, entries = np.nonzero(b)[2], b[b != 0]
    assert len(columns) == b.shape[0] * b.shape[1] and np.all((b != 0).sum(axis=2) == 1)
    assert len(np.unique(columns)) > 8
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
    augmented = step.images.augmented()
    moments, _ = attention_input_moments(run.setup, backbone, subtracted, augmented)
    for block, moment in enumerate(toy.float64(moments)):
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
    projector = learner.before_task(backbone, step.before, 2, step.images).projector
    sizes = np.sqrt(step.designed.space_sizes[2])[:, None, None]
    np.testing.assert_allclose(projector, sizes * step.designed.projector, atol=1e-5)


def test_finished_adam_steps_are_projected(backbone):
    """Adam's moments average whole gradients; heads are not projected."""
    run, batch = toy.trajectory("lora_subtraction"), toy.make_batch(0, size=6, classes=2)
    step = run.steps[1]
    identity = jnp.tile(jnp.eye(toy.TINY.width), (toy.TINY.depth, 1, 1))
    ends = []
    for projector in (identity, step.frozen["projector"]):
        frozen, trained = step.frozen | {"projector": projector}, toy.copy(step.started)
        progress = run.update.initialise(trained)
        ends.append(run.update.step(backbone, frozen, trained, progress, batch, 1.0)[:2])
    (plain, moments), (projected, same_moments) = ends
    toy.assert_equal((projected["head"], same_moments), (plain["head"], moments))
    projector, start = toy.float64((step.frozen["projector"], step.started["increment"]))
    for part in toy.PARTS:
        actual, unprojected = (
            {name: end["increment"][part][name] - start[part][name] for name in ("A", "B")}
            for end in (projected, plain)
        )
        np.testing.assert_allclose(actual["A"], projector @ unprojected["A"], atol=2e-7)
        np.testing.assert_allclose(actual["B"], unprojected["B"] @ projector, atol=2e-7)
        assert np.abs(actual["A"] - unprojected["A"]).max() > 1e-5


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
