"""InfLoRA+CA: InfLoRA's encoder, and heads aligned on one Gaussian per class."""

import jax
import numpy as np
import pytest

from fdc_jax.errors import TrainingError
from fdc_jax.learners import gaussian_alignment, inflora_ca
from tests.learners import toy


def test_steps_are_those_of_inflora(backbone):
    """From the same state, key and images both design, start and train alike."""
    runs = [toy.trajectory(name) for name in ("inflora_ca", "inflora")]
    aligned, plain = (run.steps[0] for run in runs)
    toy.assert_equal(aligned.designed[:4], tuple(plain.designed))
    frozen = {name: leaf for name, leaf in aligned.frozen.items() if name != "alignment"}
    toy.assert_equal((frozen, aligned.started), (plain.frozen, plain.started))
    given, batch = (backbone, plain.frozen, plain.started), toy.make_batch()
    toy.assert_equal(*(toy.value_and_gradients(run.update, *given, batch) for run in runs))


def reference_alignment(heads, means, tasks, scales, temperature, rates, native):
    """Full-batch alignment in float64 on features that are exactly the scaled means."""
    weight = np.concatenate([head[0] for head in heads])
    bias = np.concatenate([head[1] for head in heads])
    means = means * scales[tasks][:, None]
    labels = np.arange(len(means))

    def gradients(weight, bias):
        z = means @ weight.T + bias
        u = z
        if temperature:
            members = [tasks == task for task in np.unique(tasks)]
            norms = np.stack(
                [np.linalg.norm(z[:, columns], axis=1) + 1e-7 for columns in members], 1
            )
            mean_norm = norms.mean(1)
            u = z / mean_norm[:, None] / temperature
        p = np.exp(u - u.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        d = (p - np.eye(len(z))[labels]) / len(z)
        if temperature:
            inner = np.sum(d * z, axis=1) / mean_norm**2
            slope = np.concatenate(
                [
                    z[:, columns] / np.linalg.norm(z[:, columns], axis=1)[:, None]
                    for columns in members
                ],
                1,
            ) / len(members)
            d = (d / mean_norm[:, None] - inner[:, None] * slope) / temperature
        return [d.T @ means, d.sum(0)]

    leaves = [weight, bias]
    optimizer = toy.Optimizer(*(("sgd", 5e-4) if native else ("adam", 0.0)))
    for rate in rates:
        directions = optimizer(gradients(*leaves), leaves)
        leaves = [leaf - rate * d for leaf, d in zip(leaves, directions, strict=True)]
    return leaves


@pytest.mark.parametrize(
    ("preset", "rates", "temperature"),
    [
        ("protocol", [5.0e-3, 4.52e-3, 3.27e-3, 1.73e-3, 4.8e-4], 0.1),
        ("native", [1.0e-2, 9.05e-3, 6.55e-3, 3.45e-3, 9.5e-4], 0.0),
    ],
)
def test_alignment_in_float64(one_batch, preset, rates, temperature):
    """Classes without spread make every draw a scaled mean; one batch an epoch has no order."""
    learner = toy.make_learner(
        "inflora_ca",
        learner__preset=preset,
        learner__inflora_ca__logit_temperature=temperature,
    )
    native = preset == "native"
    heads = toy.random_like(learner.initial_state().heads, 0, 1.0)
    gaussians = gaussian_alignment.empty(3, 3, toy.TINY.width)
    gaussians = gaussians._replace(means=toy.random_like(gaussians.means, 1, 1.0))
    seen = learner.setup.classes_of_first(2)
    aligned = learner.align(heads, gaussians, seen, jax.random.key(0))
    sizes = toy.CLASSES[:2]
    start = [
        (toy.float64(heads.weight[t, :c]), toy.float64(heads.bias[t, :c]))
        for t, c in enumerate(sizes)
    ]
    means = np.concatenate([toy.float64(gaussians.means[t, :c]) for t, c in enumerate(sizes)])
    tasks = np.repeat([0, 1], sizes)
    # Of the first of two tasks 0.9 + 0.1 / 2.
    scales = np.array([0.95, 1.0])
    weight, bias = reference_alignment(start, means, tasks, scales, temperature, rates, native)
    for task, classes in enumerate(sizes):
        np.testing.assert_allclose(aligned.weight[task, :classes], weight[tasks == task], atol=2e-5)
        np.testing.assert_allclose(aligned.bias[task, :classes], bias[tasks == task], atol=2e-5)
    # Weight decay shrinks unseen heads too, which new heads replace before anything reads them.
    if not native:
        toy.assert_equal(aligned.weight[2], heads.weight[2])
        toy.assert_equal(aligned.weight[0, 2], heads.weight[0, 2])


def test_diverged_alignment_is_an_error(monkeypatch):
    monkeypatch.setattr(inflora_ca, "LEARNING_RATE", 1e38)
    learner = toy.make_learner("inflora_ca")
    gaussians = toy.random_like(gaussian_alignment.empty(3, 3, toy.TINY.width), 0)
    heads = toy.random_like(learner.initial_state().heads, 1)
    message = "alignment after task 2: expected finite heads"
    with jax.debug_nans(False), pytest.raises(TrainingError, match=message):
        learner.align(heads, gaussians, learner.setup.classes_of_first(2), jax.random.key(0))
