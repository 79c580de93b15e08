"""LoRA-Subtraction: its spaces, its projected Adam, its triplet loss and its class means."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import base
from fdc_jax import configuration, heads, learners
from fdc_jax.data.batches import Batch
from fdc_jax.errors import InputError
from fdc_jax.learners import lora_subtraction, training
from fdc_jax.learners.second_moments import attention_input_moments
from fdc_jax.model import vit
from tests.learners import small_stream
from tests.learners.small_stream import TINY, float64, make_batch, make_setup

PARTS = ("key", "value")


@pytest.fixture(scope="module")
def update():
    return lora_subtraction.update(make_setup())


def random_state(setup, num_tasks, seed=0):
    """State after `num_tasks` tasks whose increments and means are noise."""
    state = lora_subtraction.initial_state(setup)

    def emptied(slots):
        return slots.at[num_tasks:].set(0.0)

    increments = small_stream.random_like(state.increments, seed)
    means = small_stream.random_like(state.means, seed + 1)
    return state._replace(increments=jax.tree.map(emptied, increments), means=emptied(means))


def random_moment(seed=0, width=12):
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(40, width)) * np.linspace(0.05, 2, width)
    return rows.T @ rows / 40


@pytest.mark.parametrize("energy", [0.3, 0.9, 0.99, 1.0])
def test_drift_resistant_projector(energy):
    moment = random_moment()
    values, vectors = np.linalg.eigh(moment)
    order = np.argsort(-values)
    size = next(k for k in range(1, 13) if values[order[:k]].sum() >= energy * values.sum() - 1e-12)
    space = vectors[:, order[:size]]
    projector, found = lora_subtraction.drift_resistant_projector(moment, energy, True)
    assert found == size
    np.testing.assert_allclose(projector, space @ space.T / np.sqrt(size), atol=1e-12)
    assert np.linalg.norm(projector) == pytest.approx(1.0)
    assert np.trace(projector) == pytest.approx(np.sqrt(size))
    expected = np.repeat([0.0, 1 / np.sqrt(size)], [12 - size, size])
    np.testing.assert_allclose(np.linalg.eigvalsh(projector), expected, atol=1e-12)
    plain, _ = lora_subtraction.drift_resistant_projector(moment, energy, False)
    np.testing.assert_allclose(plain @ plain, plain, atol=1e-12)
    np.testing.assert_allclose(plain, space @ space.T, atol=1e-12)


def test_a_moment_of_one_direction_or_of_nothing():
    direction = np.zeros(5)
    direction[2] = 2.0
    projector, size = lora_subtraction.drift_resistant_projector(
        np.outer(direction, direction), 0.99, True
    )
    assert size == 1
    np.testing.assert_allclose(projector, np.diag([0, 0, 1.0, 0, 0]), atol=1e-12)
    projector, size = lora_subtraction.drift_resistant_projector(np.zeros((5, 5)), 0.99, True)
    assert size == 1 and np.isfinite(projector).all()


@pytest.mark.parametrize(("energy", "normalise"), [(0.99, True), (0.8, False)])
def test_spaces_come_from_the_subtracted_encoder(backbone, energy, normalise):
    setup = make_setup(
        learner__lora_subtraction__energy=energy,
        learner__lora_subtraction__normalise_projector=normalise,
    )
    state = random_state(setup, 2)
    kernels = float64(vit.pretrained_kernels(backbone))
    factors = float64(state.increments)
    subtracted = lora_subtraction.subtracted(setup, backbone, state, 2)
    for part in PARTS:
        added = (factors[part]["A"][:2] @ factors[part]["B"][:2]).sum(0)
        np.testing.assert_allclose(subtracted[part], kernels[part] - added, atol=1e-5)
    batches = [make_batch(1), make_batch(2, padding=1)]
    found = lora_subtraction.before_task(
        setup, backbone, state, 2, small_stream.task_images(*batches)
    )
    moments, _ = attention_input_moments(setup.model, backbone, subtracted, batches)
    pretrained, _ = attention_input_moments(
        setup.model, backbone, vit.pretrained_kernels(backbone), batches
    )
    # The first block has no kernel before it.
    np.testing.assert_allclose(moments[0], pretrained[0], atol=1e-5)
    assert np.abs(moments[1:] - pretrained[1:]).max() > 1e-2
    for block in range(TINY.depth):
        projector, size = lora_subtraction.drift_resistant_projector(
            np.asarray(moments[block], np.float64), energy, normalise
        )
        assert 1 <= size < TINY.width
        assert found.space_sizes[2, block] == size
        np.testing.assert_allclose(found.projector[block], projector, atol=1e-6)
    np.testing.assert_array_equal(found.space_sizes[:2], state.space_sizes[:2])
    jax.tree.map(np.testing.assert_array_equal, found.increments, state.increments)
    # Increments of nothing subtract nothing.
    empty = lora_subtraction.subtracted(setup, backbone, lora_subtraction.initial_state(setup), 2)
    jax.tree.map(np.testing.assert_array_equal, empty, vit.pretrained_kernels(backbone))


def test_nothing_is_projected_in_the_first_task(backbone):
    setup = make_setup()
    state = lora_subtraction.initial_state(setup)
    after = lora_subtraction.before_task(setup, backbone, state, 0, None)
    jax.tree.map(np.testing.assert_array_equal, after, state)
    np.testing.assert_array_equal(state.projector, np.tile(np.eye(TINY.width), (3, 1, 1)))


def reference_adam(gradients, rate, factors):
    """Sums of finished Adam steps, the epsilon being added to the uncorrected root."""
    first = second = total = np.zeros_like(gradients[0])
    steps = []
    for step, (gradient, factor) in enumerate(zip(gradients, factors, strict=True), start=1):
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient**2
        correction = np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
        steps.append(-factor * rate * correction * first / (np.sqrt(second) + 1e-8))
        total = total + steps[-1]
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


@pytest.mark.parametrize("task", [0, 1])
def test_training_is_projected_adam(backbone, update, task):
    """Three steps: gradients of the loss, Adam and projection in float64."""
    setup = make_setup()
    state = random_state(setup, task)
    batches = [make_batch(step, classes=setup.classes_per_task[task]) for step in range(3)]
    state = lora_subtraction.before_task(
        setup, backbone, state, task, small_stream.task_images(*batches)
    )
    frozen, trained = lora_subtraction.start(setup, backbone, state, task, jax.random.key(0))
    before = float64(trained)
    optimizer = update.initialise(trained)
    gradient = jax.jit(jax.grad(partial(lora_subtraction.loss, setup), argnums=2))
    history, factors = [], (1.0, 0.5, 1.0)
    for batch, factor in zip(batches, factors, strict=True):
        history.append(float64(gradient(backbone, frozen, trained, batch)))
        trained, optimizer, _ = update.step(backbone, frozen, trained, optimizer, batch, factor)
    projector = float64(state.projector)

    def total(path, rate):
        return reference_adam([path(each) for each in history], rate, factors)

    for part in PARTS:
        for name in ("A", "B"):
            plain = total(lambda tree, p=part, n=name: tree["increment"][p][n], 5e-4)
            step = projector @ plain if name == "A" else plain @ projector
            old, new = before["increment"][part][name], trained["increment"][part][name]
            np.testing.assert_allclose(new, old + step, atol=2e-6)
            outside = np.eye(TINY.width) - projector * (
                1.0 if task == 0 else np.sqrt(float64(state.space_sizes[1]))[:, None, None]
            )
            change = np.asarray(new, np.float64) - old
            left = outside @ change if name == "A" else change @ outside
            np.testing.assert_allclose(left, 0, atol=2e-7)
            assert np.abs(change).max() > 1e-5
            if task == 1:
                assert np.abs(plain - step).max() > 1e-5
    for index in range(2):
        step = total(lambda tree, i=index: tree["head"][i], 5e-3)
        np.testing.assert_allclose(trained["head"][index], before["head"][index] + step, atol=2e-5)


def reference_triplet(features, labels, means, margin):
    hinges = []
    for i, feature in enumerate(features):
        positive, negative = 0.0, np.inf
        for j, other in enumerate(features):
            distance = np.sqrt(np.sum((feature - other) ** 2))
            if labels[j] == labels[i]:
                positive = max(positive, distance)
            else:
                negative = min(negative, distance)
        if negative == np.inf:
            negative = positive + margin
        for mean in means:
            negative = min(negative, np.sqrt(np.sum((feature - mean) ** 2)))
        hinges.append(max(0.0, positive - negative + margin))
    return np.mean(hinges)


def unit_rows(rng, count, width=6):
    rows = rng.normal(size=(count, width))
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def triplet(features, labels, means, margin, padding=0, masked=1):
    """The loss with `padding` images and `masked` means that must not count."""
    rng = np.random.default_rng(9)
    weights = np.concatenate([np.ones(len(features)), np.zeros(padding)])
    features = np.concatenate([features, features[:1].repeat(padding, 0)])
    labels = np.concatenate([labels, np.zeros(padding, int)])
    counts = np.arange(len(means) + masked) < len(means)
    means = np.concatenate([means.reshape(-1, features.shape[1]), unit_rows(rng, masked)])
    return lora_subtraction.triplet_loss(
        jnp.asarray(features, jnp.float32),
        jnp.asarray(labels),
        jnp.asarray(weights, jnp.float32),
        jnp.asarray(means, jnp.float32),
        jnp.asarray(counts),
        margin,
    )


@pytest.mark.parametrize("margin", [0.1, 1.0, 2.0])
@pytest.mark.parametrize("num_means", [0, 3])
def test_triplet_loss_pair_by_pair(margin, num_means):
    rng = np.random.default_rng(num_means)
    features, means = unit_rows(rng, 7), unit_rows(rng, num_means)
    labels = np.array([0, 1, 2, 0, 1, 0, 2])
    expected = reference_triplet(features, labels, means, margin)
    assert expected > 0
    found = triplet(features, labels, means, margin, padding=2, masked=4)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_slopes_of_the_triplet_loss_reach_both_images_of_a_pair():
    """Against central differences in float64 of features before they are normalised."""
    rng = np.random.default_rng(3)
    features, means = rng.normal(size=(7, 6)), unit_rows(rng, 3)
    labels = np.array([0, 1, 2, 0, 1, 0, 2])

    def units(rows):
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)

    def loss(rows):
        return lora_subtraction.triplet_loss(
            heads.unit(rows), labels, jnp.ones(7), jnp.asarray(means), jnp.ones(3, bool), 1.0
        )

    found = jax.grad(loss)(jnp.asarray(features, jnp.float32))
    for place in np.ndindex(features.shape):
        step = np.zeros_like(features)
        step[place] = 1e-6
        ends = [reference_triplet(units(features + s * step), labels, means, 1.0) for s in (1, -1)]
        assert found[place] == pytest.approx((ends[0] - ends[1]) / 2e-6, abs=1e-5)
    assert np.abs(found).max() > 0.1


def test_triplet_loss_of_easy_batches():
    rng = np.random.default_rng(0)
    features = unit_rows(rng, 5)
    none = np.zeros((0, 6))
    assert triplet(features, np.ones(5, int), none, 1.0, masked=3) == 0
    tight = np.repeat(np.eye(6)[:2], 3, axis=0)
    assert triplet(tight, np.repeat([0, 1], 3), none, 1.0, masked=3) == 0
    assert triplet(tight, np.repeat([0, 1], 3), none, 1.5) > 0
    labels = np.array([0, 1, 0, 1, 0])
    means = unit_rows(rng, 6)
    values = [triplet(features, labels, means[:count], 0.3) for count in (0, 1, 3, 6)]
    assert np.all(np.diff(values) >= 0)
    assert values[-1] > values[0]


def test_triplet_loss_has_finite_slopes():
    """Also where distances are zero: to the image itself, and between equal images."""
    features = np.eye(6)[[0, 0, 1, 2]]
    labels = np.array([0, 0, 1, 1])

    def loss(features):
        return lora_subtraction.triplet_loss(
            heads.unit(features), labels, jnp.ones(4), jnp.zeros((2, 6)), jnp.zeros(2, bool), 1.0
        )

    slopes = jax.grad(loss)(jnp.asarray(features, jnp.float32))
    assert np.all(np.isfinite(slopes)) and np.any(np.asarray(slopes) != 0)
    alone = jax.grad(loss)(jnp.ones((4, 6)))
    assert np.all(np.isfinite(alone))


def test_loss_in_float64(backbone):
    """Cross-entropy of features plus the weighted triplet loss against means of earlier tasks."""
    fields = {"learner__lora_subtraction__triplet_weight": 0.7}
    setup = make_setup(learner__lora_subtraction__margin=1.5, **fields)
    state = random_state(setup, 2)
    _, trained = lora_subtraction.start(setup, backbone, state, 1, jax.random.key(0))
    trained = small_stream.random_like(trained, 3)
    batch = make_batch(2, classes=2, padding=1)
    factors, kernels = float64(trained["increment"]), float64(vit.pretrained_kernels(backbone))
    earlier = float64(state.increments)
    for part in PARTS:
        kernels[part] = (
            kernels[part]
            + earlier[part]["A"][0] @ earlier[part]["B"][0]
            + factors[part]["A"] @ factors[part]["B"]
        )
    features = small_stream.reference_features(backbone, batch.images, kernels)
    losses = small_stream.reference_cross_entropy(features, trained["head"], batch.labels, 3)
    # Means of the task itself, of tasks to come, and rows beyond a task's classes would be nearer
    # than any other negative, but do not count. Lengths of means do not count either.
    near = np.repeat(features[:1], 3, axis=0)
    scale = np.abs(features).mean()
    means = 5.0 * (near[:2] + scale * np.random.default_rng(0).normal(0, 0.003, near[:2].shape))
    state = state._replace(
        means=jnp.asarray(np.stack([np.concatenate([means, near[:1]]), near, near]), jnp.float32)
    )
    frozen, _ = lora_subtraction.start(setup, backbone, state, 1, jax.random.key(0))
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    features = features[:3] / np.linalg.norm(features[:3], axis=1, keepdims=True)
    distances = reference_triplet(features, batch.labels[:3], means, 1.5)
    assert distances > reference_triplet(features, batch.labels[:3], means[:0], 1.5) + 1e-3
    found = jax.jit(partial(lora_subtraction.loss, setup))(backbone, frozen, trained, batch)
    np.testing.assert_allclose(found, losses[:3].mean() + 0.7 * distances, rtol=1e-4)


def test_start_of_b(backbone):
    setup = make_setup(train__rank=8)
    state = lora_subtraction.initial_state(setup)
    entries = []
    for seed in range(6):
        _, trained = lora_subtraction.start(setup, backbone, state, 0, jax.random.key(seed))
        for part in PARTS:
            b = np.asarray(trained["increment"][part]["B"])
            assert np.all((b != 0).sum(axis=2) == 1)
            entries.append(b[b != 0])
            assert len(np.unique(np.nonzero(b)[2])) > 5
            a = np.asarray(trained["increment"][part]["A"])
            assert 0.9 * 24**-0.5 < np.abs(a).max() <= 24**-0.5
        key, value = (trained["increment"][part] for part in PARTS)
        assert not np.array_equal(key["A"], value["A"])
        assert not np.array_equal(key["B"], value["B"])
    entries = np.concatenate(entries)
    assert len(entries) == 6 * 2 * 3 * 8
    assert np.std(entries) == pytest.approx(0.01, rel=0.15)
    assert abs(np.mean(entries)) < 0.003
    setup = make_setup(learner__lora_subtraction__sparse_start=False)
    _, trained = lora_subtraction.start(setup, backbone, state, 0, jax.random.key(0))
    for part in PARTS:
        np.testing.assert_array_equal(trained["increment"][part]["B"], 0)


def test_means_and_heads(backbone):
    """Means over plain images by the encoder of the task; logits are minus squared distances."""
    setup = make_setup()
    state = random_state(setup, 1)
    frozen, trained = lora_subtraction.start(setup, backbone, state, 1, jax.random.key(0))
    trained = small_stream.random_like(trained, 4)
    plain = [make_batch(1, classes=3), make_batch(2, classes=3, padding=2)]
    images = small_stream.task_images()._replace(plain=lambda: iter(plain))
    kept = small_stream.copy(state)
    after = lora_subtraction.after_task(setup, backbone, state, 1, frozen, trained, images)
    jax.tree.map(np.testing.assert_array_equal, kept, state)
    kernels = float64(lora_subtraction.encoder(setup, backbone, after, 2))
    factors, start = float64(after.increments), float64(vit.pretrained_kernels(backbone))
    for part in PARTS:
        added = factors[part]["A"][:2] @ factors[part]["B"][:2]
        np.testing.assert_allclose(kernels[part], start[part] + added.sum(0), atol=1e-5)
    features = np.concatenate(
        [small_stream.reference_features(backbone, batch.images, kernels) for batch in plain]
    )[:6]
    labels = np.concatenate([batch.labels for batch in plain])[:6]
    means = np.stack([features[labels == label].mean(0) for label in range(3)])
    np.testing.assert_allclose(after.means[1], means, atol=1e-4)
    np.testing.assert_array_equal(after.means[0], state.means[0])
    found = lora_subtraction.heads(setup, after, 2)
    assert [type(head) for head in found] == [heads.NearestMeanHead] * 2
    assert [head.means.shape for head in found] == [(2, TINY.width), (3, TINY.width)]
    expected = -np.sum(
        (
            features[:, None] / np.linalg.norm(features, axis=1)[:, None, None]
            - means / np.linalg.norm(means, axis=1)[:, None]
        )
        ** 2,
        axis=2,
    )
    logits = found[1].logits(jnp.asarray(features, jnp.float32))
    np.testing.assert_allclose(logits, expected, atol=1e-5)
    larger = heads.NearestMeanHead(7.0 * found[1].means)
    np.testing.assert_allclose(
        larger.logits(jnp.asarray(0.1 * features, jnp.float32)), expected, atol=1e-5
    )


def test_earlier_tasks_and_the_backbone_stay(backbone, update):
    setup = make_setup()
    before = small_stream.copy(backbone)
    states = [lora_subtraction.initial_state(setup)]
    for task in range(2):
        states.append(
            small_stream.train_whole(lora_subtraction, setup, backbone, states[-1], task, update)
        )
    jax.tree.map(np.testing.assert_array_equal, before, backbone)
    for old, new in zip(
        jax.tree.leaves((states[1].increments, states[1].means)),
        jax.tree.leaves((states[2].increments, states[2].means)),
        strict=True,
    ):
        np.testing.assert_array_equal(old[0], new[0])
        assert np.any(np.asarray(old[1]) != np.asarray(new[1]))
        np.testing.assert_array_equal(new[2], 0)


def test_a_task_goes_on_from_its_state(backbone):
    """What start() returns for a task under way needs no images: the spaces are in the state."""
    setup = make_setup()
    images = small_stream.task_images(make_batch(1, classes=3))
    state = lora_subtraction.before_task(setup, backbone, random_state(setup, 1), 1, images)
    frozen, _ = lora_subtraction.start(setup, backbone, state, 1, jax.random.key(0))
    np.testing.assert_array_equal(frozen["projector"], state.projector)
    assert np.abs(np.asarray(state.projector) - np.eye(TINY.width)).max() > 0.1


def test_one_compilation_and_one_size_for_all_tasks(backbone):
    setup = make_setup((3, 2) * 10)
    update = lora_subtraction.update(setup)
    functions = (update.step, lora_subtraction._add_features)
    alive, compiled = small_stream.cost_of_tasks(
        lora_subtraction, setup, backbone, update, functions
    )
    assert alive[1] == alive[17]
    assert compiled[1] == compiled[17]
    assert compiled[1][0] == 1


@pytest.mark.parametrize(
    ("benchmark", "rate"), [("cifar100", 2e-3), ("imagenet_r", 5e-4), ("cub200", 1e-3)]
)
def test_native_rates_and_schedule(monkeypatch, benchmark, rate):
    """One step from a loss of known slope; no encoder is needed."""

    def linear(setup, backbone, frozen, trained, batch):
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(trained))

    monkeypatch.setattr(lora_subtraction, "loss", linear)
    setup = make_setup(learner__preset="native", benchmark=benchmark)
    update = lora_subtraction.update(setup)
    # The wave spans a later task's epochs, whatever the first task's number is.
    epochs = setup.config.train.epochs
    for first in (epochs, 2 * epochs):
        found = [update.schedule(epoch, first) for epoch in range(first)]
        assert found == [training.quarter_cosine(epoch, epochs) for epoch in range(first)]
    one = jnp.ones((1, 1, 1))
    trained = {
        "increment": {part: {"A": 5 * one, "B": 5 * one} for part in PARTS},
        "head": heads.LinearHead(jnp.zeros((1, 1)), jnp.zeros(1)),
    }
    frozen = {"projector": 2 * one}
    stepped, _, _ = update.step(None, frozen, trained, update.initialise(trained), None, 0.5)
    np.testing.assert_allclose(stepped["head"].weight, -0.5 * rate, rtol=1e-5)
    # The projector doubles the finished step.
    np.testing.assert_allclose(stepped["increment"]["key"]["A"], 5 - 5e-4, rtol=1e-6)


def test_protocol_follows_the_schedule_of_the_run(update):
    assert update.schedule is None


@pytest.mark.parametrize(
    ("field", "value"),
    [("triplet_weight", -0.1), ("margin", float("nan")), ("energy", 0.0), ("energy", 1.1)],
)
def test_impossible_settings_are_named(field, value):
    config = base.get_config()
    config.learner.lora_subtraction[field] = value
    with pytest.raises(
        InputError, match=rf"^config\.learner\.lora_subtraction\.{field}: expected "
    ):
        configuration.validate(config)


def test_it_is_found_by_its_name():
    assert learners.find("lora_subtraction") is lora_subtraction


def test_padding_counts_for_nothing(backbone):
    setup = make_setup()
    state = random_state(setup, 1)
    frozen, trained = lora_subtraction.start(setup, backbone, state, 1, jax.random.key(0))
    trained = small_stream.random_like(trained, 4)
    batch = make_batch(3, size=4, classes=3)
    short = Batch(*(leaf[:3] for leaf in batch))
    padded = Batch(batch.images, batch.labels, np.array([1, 1, 1, 0], np.float32))
    loss = jax.jit(partial(lora_subtraction.loss, setup))
    np.testing.assert_allclose(
        loss(backbone, frozen, trained, padded), loss(backbone, frozen, trained, short), rtol=1e-5
    )
