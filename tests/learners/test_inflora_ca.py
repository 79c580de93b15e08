"""InfLoRA+CA: InfLoRA's encoder, and heads aligned on one Gaussian per class."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdc_jax import heads as head_types
from fdc_jax.errors import TrainingError
from fdc_jax.learners import gaussian_alignment, inflora_ca
from tests.learners.trajectories import (
    CLASSES,
    TINY,
    assert_equal,
    copy,
    encode,
    float64,
    make_setup,
    random_like,
    shown,
    trajectory,
    value_and_gradients,
)


def test_steps_are_those_of_inflora(backbone):
    """From the same state, key and images both design, start and train alike."""
    run, inflora = trajectory("inflora_ca"), trajectory("inflora")
    step = inflora.steps[0]
    assert run.update.schedule is inflora.update.schedule
    first = run.steps[0]
    assert_equal(first.designed.inflora, step.designed)
    ours = {name: leaf for name, leaf in first.frozen.items() if name != "alignment"}
    assert_equal((ours, first.started), (step.frozen, step.started))
    batch = next(step.images.augmented())
    found = [
        value_and_gradients(each.update, backbone, one.frozen, copy(one.started), batch)
        for each, one in ((run, first), (inflora, step))
    ]
    assert_equal(*found)


def test_gaussians_come_from_plain_images_and_stay(backbone):
    run = trajectory("inflora_ca")
    for task, step in enumerate(run.steps):
        pixels, labels = shown(step.images.plain())
        kernels = inflora_ca.encoder(run.setup, backbone, step.after, task + 1)
        features = float64(encode(run.setup, pixels, kernels))
        for label in range(CLASSES[task]):
            own = features[labels == label]
            mean = step.after.gaussians.means[task, label]
            np.testing.assert_allclose(mean, own.mean(0), atol=1e-5)
            factor = float64(step.after.gaussians.factors)[task, label]
            expected = np.cov(own, rowvar=False) + 1e-2 * np.eye(TINY.width)
            np.testing.assert_allclose(factor @ factor.T, expected, atol=1e-5)
        assert type(step.after.gaussians.factors) is np.ndarray


# The alignment, number for number ----------------------------------------------------------------


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
            norms = np.stack([np.linalg.norm(z[:, own], axis=1) + 1e-7 for own in members], 1)
            mean_norm = norms.mean(1)
            u = z / mean_norm[:, None] / temperature
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
    ("preset", "rates", "temperature", "scales"),
    [
        ("protocol", [5.0e-3, 4.52e-3, 3.27e-3, 1.73e-3, 4.8e-4], 0.1, [0.95, 1.0]),
        ("native", [1.0e-2, 9.05e-3, 6.55e-3, 3.45e-3, 9.5e-4], 0.0, [0.95, 1.0]),
        pytest.param("protocol", [5.0e-3] * 5, 0.1, [1.0, 1.0], marks=pytest.mark.slow),
    ],
)
def test_alignment_against_its_formula(preset, rates, temperature, scales):
    """Classes without spread make every draw a scaled mean; one batch an epoch has no order."""
    setup = make_setup(
        "inflora_ca",
        learner__preset=preset,
        learner__inflora_ca__epochs=5,
        learner__inflora_ca__samples_per_class=4,
        learner__inflora_ca__batch_size=20,
        learner__inflora_ca__logit_temperature=temperature,
        learner__inflora_ca__schedule="cosine" if rates[1] < rates[0] else "constant",
        # Of the first of two tasks 0.9 + 0.1 / 2, or none.
        learner__inflora_ca__mean_scale=0.9 if scales[0] < 1 else 1.0,
    )
    native = preset == "native"
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
    sizes = CLASSES[:2]
    start = [
        (float64(heads.weight[t, :c]), float64(heads.bias[t, :c])) for t, c in enumerate(sizes)
    ]
    means = np.concatenate([float64(gaussians.means[t, :c]) for t, c in enumerate(sizes)])
    tasks = np.repeat([0, 1], sizes)
    weight, bias = reference_alignment(
        start, means, tasks, np.array(scales), temperature, rates, native
    )
    for task, classes in enumerate(sizes):
        np.testing.assert_allclose(aligned.weight[task, :classes], weight[tasks == task], atol=2e-5)
        np.testing.assert_allclose(aligned.bias[task, :classes], bias[tasks == task], atol=2e-5)
    # Weight decay shrinks unseen heads too, which new heads replace before anything reads them.
    if not native:
        assert_equal(aligned.weight[2], heads.weight[2])
        assert_equal(aligned.weight[0, 2], heads.weight[0, 2])


def test_an_alignment_that_diverges_says_so():
    setup = make_setup("inflora_ca", learner__inflora_ca__learning_rate=1e38)
    gaussians = random_like(gaussian_alignment.empty(3, 3, TINY.width), 0)
    heads = random_like(inflora_ca.initial_state(setup).inflora.heads, 1)
    with pytest.raises(TrainingError, match="alignment after task 2 diverged"):
        inflora_ca.align(setup, heads, gaussians, 1, jax.random.key(0))
