"""E2-LoRA: directions by energy, their release, and the loss with its distillation."""

import collections

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from hypothesis import given, settings
from hypothesis import strategies as st

from fdc_jax.learners import e2_lora
from fdc_jax.model import vit
from tests.learners import toy
from tests.model import reference

NAMES = ("qkv", "fc1")
WEIGHT = 0.6 * 2.0**2  # option times the squared temperature


@pytest.fixture(scope="module")
def run():
    return toy.trajectory("e2_lora")


def features_of(backbone, kernels, images, inputs=None):
    """Returns features in float64 under kernels [l, d, e] of float64, by name."""
    pretrained = toy.float64(vit.pretrained_kernels(backbone, NAMES))
    query, key, value = np.split(kernels["qkv"] - pretrained["qkv"], 3, axis=2)
    updates = dict(query=query, key=key, value=value, fc1=kernels["fc1"] - pretrained["fc1"])
    return reference.features(backbone, images, updates, inputs=inputs)


def in_training(frozen, trained, task):
    """Returns the kernels of the encoder in training; `trained` has float64 leaves."""
    kernels = {}
    for name in NAMES:
        free = np.asarray(frozen["free"][name])[:, None]
        factors = trained["increment"][name]
        B = factors["B"] if task == 0 else toy.float64(frozen["basis"][name])
        kernels[name] = toy.float64(frozen["kernels"][name]) + (factors["A"] * free) @ B
    return kernels


def softened(features, heads):
    """Returns log-probabilities of the classes of the first task at temperature 2."""
    weight, bias = toy.float64(heads)
    logits = features @ weight[0, :2].T + bias[0, :2]
    return scipy.special.log_softmax(logits / 2.0, axis=1)


@pytest.mark.parametrize("task", [0, 1])
def test_loss_and_gradients_in_float64(run, backbone, task):
    """B has no gradient after the first task, and no rank that is kept."""
    frozen, trained = run.steps[task].frozen, toy.random_like(run.steps[task].trained, 4)
    classes = toy.CLASSES[task]

    def expected(leaves, images, labels):
        features = features_of(backbone, in_training(frozen, leaves, task), images)
        value = toy.reference_cross_entropy(features, leaves["head"], labels, classes).mean()
        if task == 0:
            return value
        earlier = features_of(backbone, toy.float64(frozen["kernels"]), images)
        target, actual = (softened(rows, frozen["heads"]) for rows in (earlier, features))
        return value + WEIGHT * np.sum(np.exp(target) * (target - actual)) / len(labels)

    gradients, _ = toy.check_loss(
        run, frozen, trained, expected, classes, rtol=1e-3, value_rtol=1e-5
    )
    for name, factors in gradients["increment"].items():
        kept = ~np.asarray(frozen["free"][name])
        assert not factors["A"].swapaxes(1, 2)[kept].any()
        assert factors["B"].any() == (task == 0)


def test_directions_follow_the_drift_of_a_batch(run, backbone):
    """By the SVD of the centred drift of one batch, over all tokens of its images."""
    for task, step in enumerate(run.steps):
        images, _ = toy.shown([next(step.images.augmented())])
        kernels = in_training(step.frozen, toy.float64(step.trained), task)
        inputs = collections.defaultdict(list)
        features_of(backbone, kernels, images, inputs)
        for name in NAMES:
            change = kernels[name] - toy.float64(step.frozen["kernels"][name])
            for block in range(toy.TINY.depth):
                drift = np.concatenate(inputs[name, block]) @ change[block]
                deviations = np.linalg.svd(drift - drift.mean(axis=0), compute_uv=False)
                energies = np.cumsum(deviations[::-1] ** 2)[::-1] / np.sum(deviations**2)
                free = np.asarray(step.frozen["free"][name])[block]
                remaining = np.asarray(step.after.remaining[name])[block, free]
                size = min(len(energies), len(remaining))
                np.testing.assert_allclose(remaining[:size], energies[:size], atol=1e-5)


def test_a_task_trains_released_directions_alone(run, backbone):
    """Rows of B stay orthonormal, kept ranks stay, and the sum is what training left."""
    pretrained = toy.float64(vit.pretrained_kernels(backbone, NAMES))
    for task, step in enumerate(run.steps):
        kernels = in_training(step.frozen, toy.float64(step.trained), task)
        for name in NAMES:
            old, new = (toy.float64(state.increment[name]) for state in (step.designed, step.after))
            A, B = new["A"], new["B"]
            identity = np.broadcast_to(np.eye(B.shape[1]), B.shape)
            np.testing.assert_allclose(B @ B.swapaxes(1, 2), identity, atol=2e-6)
            np.testing.assert_allclose(pretrained[name] + A @ B, kernels[name], atol=1e-5)
            kept = ~np.asarray(step.frozen["free"][name])
            assert kept.any() == (task > 0)
            toy.assert_equal(B[kept], old["B"][kept])
            toy.assert_equal(A.swapaxes(1, 2)[kept], old["A"].swapaxes(1, 2)[kept])


def reference_kept(shares, task, size):
    """Returns the kept directions by lowering the threshold until they fit."""
    limit, multiple = task * size // (task + 1), 1
    while np.sum(shares >= multiple * 1e-5) > limit:
        multiple += 1
    return shares >= multiple * 1e-5


@given(st.integers(1, 6), st.integers(0, 2**32 - 1), st.floats(4.0, 8.0))
@settings(max_examples=40, deadline=None)
def test_release_lowers_the_threshold_until_the_rest_fits(task, seed, decades):
    shares = 10.0 ** -np.random.default_rng(seed).uniform(0.0, decades, 24).astype(np.float32)
    actual = np.asarray(e2_lora.kept(jnp.asarray(shares)[None], task))[0]
    expected = reference_kept(shares.astype(np.float64), task, len(shares))
    # A share within rounding of a multiple may stay or go.
    near = np.abs(shares / 1e-5 - np.round(shares / 1e-5)) < 1e-2
    np.testing.assert_array_equal(actual[~near], expected[~near])


def test_directions_without_drift_are_released():
    """A task of one class does not train; its directions go to the next task, as at first all."""
    assert not np.asarray(e2_lora.kept(jnp.zeros((2, 6)), 0)).any()
    A, _, remaining = e2_lora.principal_directions(np.eye(3), np.zeros((3, 4)), np.eye(4))
    assert not A.any() and not remaining.any()
