"""LoRA-Subtraction: its spaces, its projected Adam, its triplet loss and its class means."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdc_jax import heads
from fdc_jax.learners import lora_subtraction
from fdc_jax.model import vit
from tests.learners import toy


@pytest.fixture(scope="module")
def run():
    return toy.trajectory("lora_subtraction")


@pytest.mark.parametrize("energy", [0.3, 1.0])
def test_drift_resistant_space_holds_the_energy(monkeypatch, energy):
    monkeypatch.setattr(lora_subtraction, "ENERGY", energy)
    rows = np.random.default_rng(0).normal(size=(40, 12)) * np.linspace(0.05, 2, 12)
    moment = rows.T @ rows
    space = lora_subtraction.drift_resistant_space(moment)
    leading = np.linalg.eigvalsh(moment)[::-1][: space.shape[1]]
    np.testing.assert_allclose(np.trace(space.T @ moment @ space), leading.sum())
    share = energy * np.trace(moment)
    assert leading[:-1].sum() < share <= leading.sum() + 1e-9


def test_adam_directions_in_float64():
    """The epsilon is added to the uncorrected root, which matters for small gradients."""
    rng, zeros = np.random.default_rng(0), np.zeros(7, np.float32)
    moments = lora_subtraction.Moments(np.int32(0), zeros, zeros)
    directions = jax.jit(lora_subtraction.adam_directions)
    first = second = np.zeros(7)
    for step in range(1, 5):
        gradient = rng.normal(size=7) * np.logspace(-9, 0, 7)
        moments, actual = directions(moments, gradient.astype(np.float32))
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient**2
        correction = np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
        expected = correction * first / (np.sqrt(second) + 1e-8)
        np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_b_starts_with_one_entry_per_rank(run):
    """One entry per rank, of deviation 0.01, in a place that is drawn."""
    starts = [step.started["increment"][part]["B"] for step in run.steps for part in toy.PARTS]
    b = np.concatenate(starts)
    columns, entries = np.nonzero(b)[2], b[b != 0]
    assert np.all((b != 0).sum(axis=2) == 1)
    assert len(np.unique(columns)) > 8
    assert np.std(entries) == pytest.approx(0.01, rel=0.4) and entries.min() < 0


@pytest.mark.parametrize("normalised", [True, False])
def test_spaces_come_from_the_subtracted_encoder(run, backbone, normalised):
    """Images pass W_0 less all increments so far; nothing is projected in the first task."""
    identity = np.tile(np.eye(toy.TINY.width), (toy.TINY.depth, 1, 1))
    np.testing.assert_array_equal(run.steps[0].frozen["projector"], identity)
    options = {"learner__lora_subtraction__normalised_projector": normalised}
    learner, step = toy.make_learner("lora_subtraction", **options), run.steps[2]
    designed = learner.before_task(backbone, step.before, 2, step.images)
    pretrained = toy.float64(vit.pretrained_kernels(backbone))
    added = toy.products(step.before.increments)
    subtracted = {part: pretrained[part] - added[part][:2].sum(0) for part in toy.PARTS}
    for block, moment in enumerate(toy.input_moments(run, subtracted, step.images)):
        space = lora_subtraction.drift_resistant_space(moment)
        size = space.shape[1]
        assert 1 <= size < toy.TINY.width
        assert designed.space_sizes[2, block] == size
        projector = space @ space.T / (np.sqrt(size) if normalised else 1.0)
        atol = 1e-6 if normalised else 1e-5
        np.testing.assert_allclose(designed.projector[block], projector, atol=atol)


def test_finished_adam_steps_are_projected(run):
    """Adam's moments average whole gradients; heads are not projected."""
    step, batch = run.steps[1], toy.make_batch(0, size=6, classes=2)
    projector = toy.float64(step.frozen["projector"])
    identity = jnp.tile(jnp.eye(toy.TINY.width), (toy.TINY.depth, 1, 1))
    ends = []
    for frozen in (step.frozen | {"projector": identity}, step.frozen):
        ends.append(toy.step(run, frozen, step.started, batch)[:2])
    (plain, moments), (projected, same_moments) = ends
    toy.assert_equal((projected["head"], same_moments), (plain["head"], moments))
    for part in toy.PARTS:
        start = toy.float64(step.started["increment"][part])
        moved = {name: plain["increment"][part][name] - start[name] for name in start}
        actual = jax.tree.map(np.subtract, projected["increment"][part], start)
        expected = {"A": projector @ moved["A"], "B": moved["B"] @ projector}
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-7), actual, expected)
        assert np.abs(actual["A"] - moved["A"]).max() > 1e-5


def reference_triplet(features, labels, means, margin):
    """The mean hinge, image by image, over unit vectors; every image has a negative."""
    features, means = (
        rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (features, means)
    )
    hinges = []
    for feature, label in zip(features, labels, strict=True):
        distances = np.linalg.norm(features - feature, axis=1)
        others = [*distances[labels != label], *np.linalg.norm(means - feature, axis=1)]
        hinges.append(max(0.0, distances[labels == label].max() - min(others) + margin))
    return np.mean(hinges)


def test_loss_and_gradients_in_float64(run, backbone):
    """Cross-entropy of features plus the weighted triplet loss against means of earlier tasks."""
    step = run.steps[1]
    trained = toy.random_like(step.trained, 3)
    kernels = run.learner.encoder(backbone, step.before, 1)
    # Means of the task itself, of tasks to come, and rows beyond a task's classes would be nearer
    # than any other negative, but do not count. Lengths of means do not count either.
    images = toy.make_batch(2, size=6).images[:1]
    near = toy.features_with(kernels, trained["increment"], images)[[0, 0, 0]]
    noise = np.random.default_rng(0).normal(0, 0.003, near[:2].shape)
    means = 5.0 * (near[:2] + np.abs(near).mean() * noise)
    slots = np.stack([np.concatenate([means, near[:1]]), near, near])
    state = step.before._replace(means=jnp.asarray(slots, jnp.float32))
    frozen, _ = run.learner.start_task(backbone, state, 1, jax.random.key(0))

    def expected(leaves, images, labels):
        features = toy.features_with(kernels, leaves["increment"], images)
        losses = toy.reference_cross_entropy(features, leaves["head"], labels, 3)
        return losses.mean() + 0.7 * reference_triplet(features, labels, means, 1.5)

    toy.check_loss(run, frozen, trained, expected)


def test_heads_are_the_class_means(run, backbone):
    """Means over plain images by the encoder of the task; they are the head."""
    step = run.steps[1]
    images, labels = toy.shown(step.images.plain())
    features = toy.reference_features(images, run.learner.encoder(backbone, step.after, 2))
    means = np.stack([features[labels == label].mean(0) for label in range(3)])
    _, head = run.learner.heads(step.after, 2)
    assert type(head) is heads.NearestMeanHead
    np.testing.assert_allclose(head.means, means, atol=1e-4)


def test_the_native_wave_spans_a_later_tasks_epochs():
    """Whatever the number of the first task's is."""
    learner = toy.make_learner("lora_subtraction", learner__preset="native", train__epochs=5)
    schedule = learner.update().schedule
    assert [schedule(epoch, 10) for epoch in (3, 9)] == [schedule(epoch, 5) for epoch in (3, 4)]
