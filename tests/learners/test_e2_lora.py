"""E2-LoRA: directions by energy, their release, and the loss with its distillation."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fdc_jax.learners import e2_lora
from fdc_jax.model import vit
from tests.learners import toy
from tests.model import reference

NAMES = ("qkv", "fc1")
WEIGHT = 0.6 * 2.0**2  # option times the squared temperature
GOLDEN = [0.6928388, -0.3835717, 9.182304e-05, 351.9626, 0.00363142, 468.2347, 0.004162984]


@pytest.fixture(scope="module")
def run():
    return toy.trajectory("e2_lora")


def parameters(backbone, kernels):
    """Returns the backbone in float64 with kernels [l, d, e] of float64, by name."""
    params = copy.deepcopy(toy.float64(backbone))
    for name, stacked in kernels.items():
        paths = vit.UPDATED_LAYERS[name]
        for block, kernel in enumerate(stacked):
            layers = params["Transformer"][f"encoderblock_{block}"]
            parts = np.split(kernel, len(paths), axis=1)
            for (part, layer), columns in zip(paths, parts, strict=True):
                leaf = layers[part][layer]
                leaf["kernel"] = columns.reshape(leaf["kernel"].shape)
    return params


def in_training(frozen, trained, task):
    """Returns the kernels of the encoder in training; `trained` has float64 leaves."""
    kernels = {}
    for name in NAMES:
        free = np.asarray(frozen["free"][name])[:, None]
        factors = trained["increment"][name]
        B = factors["B"] if task == 0 else toy.float64(frozen["basis"][name])
        kernels[name] = toy.float64(frozen["kernels"][name]) + (factors["A"] * free) @ B
    return kernels


def softened(features, heads, classes):
    """Returns probabilities of the classes of earlier tasks at temperature 2."""
    logits = [
        features @ toy.float64(heads.weight[task, :count]).T + toy.float64(heads.bias[task, :count])
        for task, count in enumerate(classes)
    ]
    exponentials = np.exp(np.concatenate(logits, axis=1) / 2.0)
    return exponentials / exponentials.sum(axis=1, keepdims=True)


def reference_loss(backbone, frozen, trained, batch, task):
    images, labels = toy.shown([batch])
    kernels = in_training(frozen, trained, task)
    features = reference.features(parameters(backbone, kernels), images)
    classes = toy.CLASSES[task]
    value = toy.reference_cross_entropy(features, trained["head"], labels, classes).mean()
    if task == 0:
        return value
    kept = parameters(backbone, toy.float64(frozen["kernels"]))
    given = frozen["heads"], toy.CLASSES[:task]
    target = softened(reference.features(kept, images), *given)
    divergence = np.sum(target * np.log(target / softened(features, *given)), axis=1)
    return value + WEIGHT * divergence.mean()


@pytest.mark.parametrize("task", [0, 1])
def test_loss_and_gradients_in_float64(run, backbone, task):
    """B has no gradient after the first task, and no rank that is kept."""
    step = run.steps[task]
    batch = toy.make_batch(3, size=6, classes=toy.CLASSES[task], padding=1)
    trained = toy.random_like(step.trained, 4)
    progress = run.update.initialise(trained)
    _, momentum, value = run.update.step(
        backbone, step.frozen, toy.copy(trained), progress, batch, 1.0
    )
    gradients, trained = toy.float64(momentum.trace), toy.float64(trained)

    def expected(leaves):
        return reference_loss(backbone, step.frozen, leaves, batch, task)

    assert float(value) == pytest.approx(expected(trained), rel=1e-5)
    for name in NAMES:
        of_kernel = gradients["increment"][name]
        kept = ~np.asarray(step.frozen["free"][name])
        assert not of_kernel["A"].swapaxes(1, 2)[kept].any()
        assert of_kernel["B"].any() == (task == 0)
        for part in ("A", "B"):
            direction = jax.tree.map(np.zeros_like, trained)
            noise = np.random.default_rng(0).normal(size=of_kernel[part].shape)
            direction["increment"][name][part] = noise
            slope = toy.slope(expected, trained, direction)
            assert toy.inner(gradients, direction) == pytest.approx(slope, rel=1e-3, abs=1e-6)
    direction = jax.tree.map(np.zeros_like, trained)
    direction["head"] = toy.float64(toy.random_like(trained["head"], 1))
    slope = toy.slope(expected, trained, direction)
    assert toy.inner(gradients, direction) == pytest.approx(slope, rel=1e-3)


def test_golden_step(backbone):
    """A change here changes published runs; see Cumulative-LoRA's."""
    learner = toy.make_learner("e2_lora")
    update, state = learner.update(), learner.initial_state()
    frozen, trained = learner.start_task(backbone, state, 0, jax.random.key(0))
    given = (backbone, frozen, trained, update.initialise(trained), toy.make_batch(0, size=6))
    trained, _, loss = update.step(*given, 1.0)
    factors = trained["increment"]
    observed = [loss, trained["head"].weight.sum(), trained["head"].bias[0]]
    observed += [jnp.abs(factors[name][part]).sum() for name in NAMES for part in ("A", "B")]
    assert [float(number) for number in observed] == pytest.approx(GOLDEN, rel=2e-5)


def test_directions_follow_the_drift_of_a_batch(run, backbone):
    """By the SVD of the centred drift of one batch, over all tokens of its images."""
    for task, step in enumerate(run.steps):
        images, _ = toy.shown([next(step.images.augmented())])
        trained = toy.float64(step.trained)
        params = parameters(backbone, in_training(step.frozen, trained, task))
        inputs = {name: [[] for _ in range(toy.TINY.depth)] for name in NAMES}
        reference.features(params, images, attention_inputs=inputs["qkv"], mlp_inputs=inputs["fc1"])
        for name in NAMES:
            new = e2_lora.current(step.frozen, jax.tree.map(jnp.asarray, step.trained))[name]
            change = toy.float64(new["A"]) @ toy.float64(new["B"])
            for block in range(toy.TINY.depth):
                drift = np.concatenate(inputs[name][block]) @ change[block]
                deviations = np.linalg.svd(drift - drift.mean(axis=0), compute_uv=False)
                energies = np.cumsum(deviations[::-1] ** 2)[::-1] / np.sum(deviations**2)
                free = np.asarray(step.frozen["free"][name])[block]
                remaining = np.asarray(step.after.remaining[name])[block, free]
                size = min(len(energies), len(remaining))
                np.testing.assert_allclose(remaining[:size], energies[:size], atol=1e-5)


def test_a_task_trains_released_directions_alone(run, backbone):
    """Rows of B stay orthonormal, kept ranks stay, and the sum is what training left."""
    for task, step in enumerate(run.steps):
        trained = toy.float64(step.trained)
        kernels = in_training(step.frozen, trained, task)
        pretrained = toy.float64(vit.pretrained_kernels(backbone, NAMES))
        for name in NAMES:
            A, B = (toy.float64(step.after.increment[name][part]) for part in ("A", "B"))
            identity = np.broadcast_to(np.eye(B.shape[1]), B.shape)
            np.testing.assert_allclose(B @ B.swapaxes(1, 2), identity, atol=2e-6)
            np.testing.assert_allclose(pretrained[name] + A @ B, kernels[name], atol=1e-5)
            kept = ~np.asarray(step.frozen["free"][name])
            assert (
                kept.any() == (task > 0)
                and kept.sum(axis=1).max() <= task / (task + 1) * A.shape[2]
            )
            before = toy.float64(step.designed.increment[name])
            np.testing.assert_array_equal(B[kept], before["B"][kept])
            columns = (array.swapaxes(1, 2)[kept] for array in (A, before["A"]))
            np.testing.assert_array_equal(*columns)


def reference_kept(shares, task, size):
    """Returns the kept directions by lowering the threshold until they fit."""
    limit, multiple = task * size // (task + 1), 1
    while np.sum(shares >= multiple * 1e-5) > limit:
        multiple += 1
    return shares >= multiple * 1e-5


@given(st.integers(1, 6), st.integers(0, 2**32 - 1), st.floats(0.5, 8.0))
@settings(max_examples=40, deadline=None)
def test_release_lowers_the_threshold_until_the_rest_fits(task, seed, decay):
    rng, size = np.random.default_rng(seed), 24
    energies = np.exp(-decay * np.arange(size // task) * rng.uniform(0.2, 1.0))
    shares = np.cumsum(energies[::-1])[::-1] / energies.sum()
    shares = np.concatenate([np.repeat(shares, task), np.zeros(size - task * len(shares))])
    shares = (shares * rng.uniform(0.9, 1.0, size)).astype(np.float32)
    actual = np.asarray(e2_lora.kept(jnp.asarray(shares)[None], task))[0]
    expected = reference_kept(shares.astype(np.float64), task, size)
    # A share within rounding of a multiple may stay or go.
    near = np.abs(shares / 1e-5 - np.round(shares / 1e-5)) < 1e-2
    np.testing.assert_array_equal(actual[~near], expected[~near])
    assert actual.sum() <= task * size // (task + 1)


def test_nothing_is_kept_before_the_first_task():
    assert not np.asarray(e2_lora.kept(jnp.zeros((2, 6)), 0)).any()


def test_directions_without_drift_are_released():
    """A task of one class does not train; its directions go to the next task."""
    A, B, remaining = e2_lora.principal_directions(np.eye(3), np.zeros((3, 4)), np.eye(4))
    assert not A.any() and not remaining.any()
    np.testing.assert_allclose(B @ B.T, np.eye(4), atol=1e-12)


@pytest.mark.parametrize(
    ("benchmark", "epochs", "first"), [("cifar100", 5, 4), ("imagenet_a", 10, 4), ("cub200", 9, 9)]
)
def test_native_rates_fall_where_the_authors_do(benchmark, epochs, first):
    learner = toy.make_learner("e2_lora", benchmark=benchmark, learner__preset="native")
    schedule = learner.update().schedule
    factors = [schedule(epoch, epochs) for epoch in range(epochs)]
    assert factors == [1.0] * first + [0.1] * (epochs - first)
