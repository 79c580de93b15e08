"""InfLoRA+CA: InfLoRA's encoder, and heads aligned on one Gaussian per class."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import cifar100
from fdc_jax import heads as head_types
from fdc_jax import learners
from fdc_jax.errors import TrainingError
from fdc_jax.learners import gaussian_alignment, inflora, inflora_ca, training
from tests.learners import small_stream
from tests.learners.small_stream import TINY, float64, make_batch, make_setup

FIELDS = dict(
    learner__inflora_ca__epochs=3,
    learner__inflora_ca__samples_per_class=8,
    learner__inflora_ca__batch_size=8,
    learner__inflora_ca__ridge=1e-2,
)


@pytest.fixture(scope="module")
def update():
    return inflora.update(make_setup(**FIELDS))


def images_of(task, classes):
    """Augmented and plain images of a task, which differ."""
    seen = [make_batch(10 * task + i, size=6, classes=classes) for i in range(2)]
    plain = [make_batch(10 * task + 5 + i, size=6, classes=classes, padding=i) for i in range(2)]
    return training.TaskImages(lambda: iter(seen), lambda: iter(plain))


@pytest.fixture(scope="module")
def trajectories(backbone, update):
    """What InfLoRA and InfLoRA+CA pass through over three tasks, with the same keys and images."""
    setup = make_setup(**FIELDS)
    found = {}
    for learner in (inflora, inflora_ca):
        state, steps = learner.initial_state(setup), []
        for task, classes in enumerate(setup.classes_per_task):
            images = images_of(task, classes)
            state = learner.before_task(setup, backbone, state, task, images)
            frozen, trained = learner.start(setup, backbone, state, task, jax.random.key(task))
            optimizer = update.initialise(trained)
            for batch in images.augmented():
                trained, optimizer, _ = update.step(
                    backbone, frozen, trained, optimizer, batch, 10.0
                )
            before = state
            state = learner.after_task(setup, backbone, state, task, frozen, trained, images)
            steps.append((before, frozen, trained, images, state))
        found[learner] = steps
    return setup, found


def test_encoder_and_training_are_those_of_inflora(trajectories):
    _, found = trajectories
    for plain, aligned in zip(found[inflora], found[inflora_ca], strict=True):
        ours = aligned[1].copy()
        del ours["alignment"]
        jax.tree.map(np.testing.assert_array_equal, plain[1:3], (ours, aligned[2]))
        jax.tree.map(
            np.testing.assert_array_equal,
            plain[4]._replace(heads=None),
            aligned[4].inflora._replace(heads=None),
        )


def test_heads_change_from_the_second_task_on(trajectories):
    _, found = trajectories
    for task, (before, _, trained, _, after) in enumerate(found[inflora_ca]):
        heads = after.inflora.heads
        if task == 0:
            jax.tree.map(
                lambda slots, own: np.testing.assert_array_equal(slots[0], own),
                heads,
                trained["head"],
            )
        else:
            assert np.abs(heads.weight[task] - trained["head"].weight).max() > 1e-3
            moved = np.abs(heads.weight[:task] - before.inflora.heads.weight[:task])
            assert moved.max(axis=(1, 2)).min() > 1e-3
        np.testing.assert_array_equal(heads.weight[task + 1 :], 0)
        np.testing.assert_array_equal(heads.bias[task + 1 :], 0)
    setup, steps = make_setup(**FIELDS), found[inflora_ca]
    # FDC takes its score scales from the head of a task's own end and predicts with the last.
    early = inflora_ca.heads(setup, steps[1][4], 2)
    late = inflora_ca.heads(setup, steps[2][4], 2)
    assert [head.weight.shape for head in late] == [(2, TINY.width), (3, TINY.width)]
    assert np.abs(early[1].weight - late[1].weight).max() > 1e-3


def test_gaussians_come_from_plain_images_and_stay(backbone, trajectories):
    setup, found = trajectories
    for task, (before, _, _, images, after) in enumerate(found[inflora_ca]):
        batches = list(images.plain())
        pixels = np.concatenate([batch.images for batch in batches])
        labels = np.concatenate([batch.labels for batch in batches])
        counted = np.concatenate([batch.weights for batch in batches]) > 0
        kernels = inflora_ca.encoder(setup, backbone, after, task + 1)
        features = float64(small_stream.encode(setup, backbone, pixels, kernels))
        for label in range(setup.classes_per_task[task]):
            own = features[counted & (labels == label)]
            np.testing.assert_allclose(after.gaussians.means[task, label], own.mean(0), atol=1e-5)
            factor = float64(after.gaussians.factors)[task, label]
            expected = np.cov(own, rowvar=False) + 1e-2 * np.eye(TINY.width)
            np.testing.assert_allclose(factor @ factor.T, expected, atol=1e-5)
        for old, new in zip(before.gaussians, after.gaussians, strict=True):
            np.testing.assert_array_equal(old[:task], new[:task])
            np.testing.assert_array_equal(new[task + 1 :], 0)


def test_factors_stay_on_the_host(trajectories):
    _, found = trajectories
    for before, frozen, trained, _, after in found[inflora_ca]:
        for state in (before, after):
            assert type(state.gaussians.factors) is np.ndarray
            assert isinstance(state.gaussians.means, jax.Array)
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves((frozen, trained)))


def test_the_end_of_a_task_can_be_repeated(backbone, trajectories):
    """A run that was killed while it ended a task comes to the same heads."""
    setup, found = trajectories
    before, frozen, trained, images, after = found[inflora_ca][1]
    again, _ = inflora_ca.start(setup, backbone, before, 1, jax.random.key(1))
    jax.tree.map(np.testing.assert_array_equal, frozen, again)
    repeated = inflora_ca.after_task(setup, backbone, before, 1, again, trained, images)
    jax.tree.map(np.testing.assert_array_equal, after, repeated)
    other, _ = inflora_ca.start(setup, backbone, before, 1, jax.random.key(7))
    drawn = inflora_ca.after_task(setup, backbone, before, 1, other, trained, images)
    assert np.abs(drawn.inflora.heads.weight - after.inflora.heads.weight).max() > 1e-4


def test_the_alignment_has_a_key_of_its_own(backbone):
    setup, key = make_setup(**FIELDS), jax.random.key(3)
    state = inflora_ca.initial_state(setup)
    frozen, _ = inflora_ca.start(setup, backbone, state, 0, key)
    used = [key, *jax.random.split(key)]
    for other in used:
        assert np.any(frozen["alignment"] != jax.random.key_data(other))


def test_one_compilation_and_one_size_for_all_tasks(trajectories, update):
    _, found = trajectories
    assert update.step._cache_size() == 2  # InfLoRA's frozen leaves, and with a key beside them
    shapes = [jax.tree.map(jnp.shape, step[:3]) for step in found[inflora_ca]]
    assert shapes[0] == shapes[1] == shapes[2]
    assert inflora_ca._retraining(False, 0.1, 8, 8)._cache_size() == 1


# The alignment, number for number ----------------------------------------------------------------


def class_logits(weight, bias, means):
    """Logits [class, class], rows in the order of the classes."""
    return means @ weight.T + bias


def reference_alignment(heads, means, tasks, scales, temperature, rates, native):
    """Full-batch alignment in float64 on features that are exactly the scaled means."""
    weight = np.concatenate([head[0] for head in heads])
    bias = np.concatenate([head[1] for head in heads])
    means = means * scales[tasks][:, None]
    labels = np.arange(len(means))

    def gradients(weight, bias):
        z = class_logits(weight, bias, means)
        if temperature:
            members = [tasks == task for task in np.unique(tasks)]
            norms = np.stack([np.linalg.norm(z[:, own], axis=1) + 1e-7 for own in members], 1)
            mean_norm = norms.mean(1)
            u = z / mean_norm[:, None] / temperature
        else:
            u = z
        p = np.exp(u - u.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        d = (p - np.eye(len(z))[labels]) / len(z)
        if temperature:
            inner = np.sum(d * z, axis=1) / mean_norm**2
            slope = np.concatenate(
                [z[:, own] / np.linalg.norm(z[:, own], axis=1)[:, None] for own in members], 1
            ) / len(members)
            d = (d / mean_norm[:, None] - inner[:, None] * slope) / temperature
        return [d.T @ means, d.sum(0)]

    leaves = [weight, bias]
    moments = [[np.zeros_like(leaf), np.zeros_like(leaf)] for leaf in leaves]
    for step, rate in enumerate(rates, start=1):
        for i, gradient in enumerate(gradients(*leaves)):
            if native:
                moments[i][0] = 0.9 * moments[i][0] + gradient + 5e-4 * leaves[i]
                leaves[i] = leaves[i] - rate * moments[i][0]
            else:
                moments[i][0] = 0.9 * moments[i][0] + 0.1 * gradient
                moments[i][1] = 0.999 * moments[i][1] + 0.001 * gradient**2
                corrected = moments[i][0] / (1 - 0.9**step)
                spread = np.sqrt(moments[i][1] / (1 - 0.999**step))
                leaves[i] = leaves[i] - rate * corrected / (spread + 1e-8)
    return leaves


@pytest.mark.parametrize(
    ("preset", "rates", "schedule", "temperature", "scales"),
    [
        ("protocol", [5.0e-3, 4.52e-3, 3.27e-3, 1.73e-3, 4.8e-4], "cosine", 0.0, [0.95, 1.0]),
        ("protocol", [5.0e-3, 4.52e-3, 3.27e-3, 1.73e-3, 4.8e-4], "cosine", 0.1, [0.95, 1.0]),
        ("native", [1.0e-2, 9.05e-3, 6.55e-3, 3.45e-3, 9.5e-4], "cosine", 0.0, [0.95, 1.0]),
        ("native", [1.0e-2, 9.05e-3, 6.55e-3, 3.45e-3, 9.5e-4], "cosine", 0.1, [0.95, 1.0]),
        ("protocol", [5.0e-3] * 5, "constant", 0.1, [1.0, 1.0]),
    ],
)
def test_alignment_against_its_formula(preset, rates, schedule, temperature, scales):
    """Classes without spread make every draw a scaled mean; one batch an epoch has no order."""
    setup = make_setup(
        learner__preset=preset,
        learner__inflora_ca__samples_per_class=4,
        learner__inflora_ca__batch_size=20,
        learner__inflora_ca__logit_temperature=temperature,
        learner__inflora_ca__schedule=schedule,
        # Of the first of two tasks 0.9 + 0.1 / 2, or none.
        learner__inflora_ca__mean_scale=0.9 if scales[0] < 1 else 1.0,
    )
    settings = setup.config.learner.inflora_ca
    found = inflora_ca.learning_rates(settings, preset == "native")
    np.testing.assert_allclose(found, rates, atol=6e-6)
    rng = np.random.default_rng(0)
    heads = head_types.LinearHead(
        jnp.asarray(rng.normal(size=(3, 3, TINY.width)), jnp.float32),
        jnp.asarray(rng.normal(size=(3, 3)), jnp.float32),
    )
    gaussians = gaussian_alignment.ClassGaussians(
        jnp.asarray(rng.normal(size=(3, 3, TINY.width)), jnp.float32),
        np.zeros((3, 3, TINY.width, TINY.width), np.float32),
    )
    aligned = inflora_ca.align(setup, heads, gaussians, 1, jax.random.key(0))
    sizes = setup.classes_per_task[:2]
    start = [
        (float64(heads.weight[t, :c]), float64(heads.bias[t, :c])) for t, c in enumerate(sizes)
    ]
    means = np.concatenate([float64(gaussians.means[t, :c]) for t, c in enumerate(sizes)])
    tasks = np.repeat([0, 1], sizes)
    weight, bias = reference_alignment(
        start, means, tasks, np.array(scales), temperature, found, preset == "native"
    )
    for task, classes in enumerate(sizes):
        np.testing.assert_allclose(aligned.weight[task, :classes], weight[tasks == task], atol=2e-5)
        np.testing.assert_allclose(aligned.bias[task, :classes], bias[tasks == task], atol=2e-5)
    # Weight decay shrinks unseen heads too, which new heads replace before anything reads them.
    if preset == "protocol":
        np.testing.assert_array_equal(aligned.weight[2], heads.weight[2])
        np.testing.assert_array_equal(aligned.weight[0, 2], heads.weight[0, 2])


def test_alignment_makes_heads_comparable():
    """A later head with far larger logits no longer takes every feature."""
    setup = make_setup((2, 2), learner__inflora_ca__samples_per_class=64)
    rng = np.random.default_rng(0)
    means = np.concatenate([np.eye(TINY.width)[:4] * 3.0]).reshape(2, 2, TINY.width)
    weight = means * np.array([0.1, 1.0])[:, None, None]
    heads = head_types.LinearHead(
        jnp.asarray(weight, jnp.float32), jnp.asarray([[0.0, 0.0], [4.0, 4.0]])
    )
    factors = np.tile(0.5 * np.eye(TINY.width), (2, 2, 1, 1))
    gaussians = gaussian_alignment.ClassGaussians(
        jnp.asarray(means, jnp.float32), factors.astype(np.float32)
    )
    setup.config.learner.inflora_ca.learning_rate = 0.5
    aligned = inflora_ca.align(setup, heads, gaussians, 1, jax.random.key(0))
    labels = rng.integers(0, 4, 400)
    features = means.reshape(4, -1)[labels] + 0.5 * rng.normal(size=(400, TINY.width))

    def accuracy(heads):
        logits = features @ float64(heads.weight).reshape(4, -1).T + float64(heads.bias).ravel()
        return np.mean(logits.argmax(1) == labels)

    assert accuracy(heads) < 0.6
    assert accuracy(aligned) > 0.9


def test_an_alignment_that_diverges_says_so():
    setup = make_setup(learner__inflora_ca__learning_rate=1e38, **FIELDS)
    gaussians = gaussian_alignment.empty(3, 3, TINY.width)
    gaussians = small_stream.random_like(gaussians, 0)
    heads = small_stream.random_like(inflora_ca.initial_state(setup).inflora.heads, 1)
    with pytest.raises(TrainingError, match="alignment after task 2 diverged"):
        inflora_ca.align(setup, heads, gaussians, 1, jax.random.key(0))


def test_what_is_trained_and_how_it_is_found(backbone):
    assert learners.find("inflora_ca") is inflora_ca
    setup = make_setup()
    state = inflora_ca.initial_state(setup)
    _, trained = inflora_ca.start(setup, backbone, state, 0, jax.random.key(0))
    _, of_inflora = inflora.start(setup, backbone, state.inflora, 0, jax.random.key(0))
    assert jax.tree.structure(trained) == jax.tree.structure(of_inflora)
    assert inflora_ca.update(setup).schedule is training.quarter_cosine


def test_cifar100_has_settings_of_its_own():
    found = cifar100.get_config().learner
    assert (found.inflora.lamb, found.inflora_ca.logit_temperature) == (0.95, 0.0)
    assert (make_setup().config.learner.inflora.lamb) == 0.98
