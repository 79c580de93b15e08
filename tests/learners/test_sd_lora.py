"""SD-LoRA: old directions normalised and scaled by magnitudes that go on training."""

import jax
import numpy as np

from fdc_jax.model import vit
from tests.learners import toy


def norms(factors):
    return np.sqrt((factors**2).sum((-2, -1), keepdims=True))


def test_loss_and_gradients_in_float64(backbone):
    """Of W_0 + sum over earlier tasks of m A B / (|A| |B|), plus m A B of the current one."""
    run = toy.trajectory("sd_lora")
    step = run.steps[2]
    state, trained = step.before, toy.random_like(step.trained, 1)
    np.testing.assert_array_equal(step.started["magnitudes"], np.float32(0.8))
    pretrained = toy.float64(vit.pretrained_kernels(backbone))

    def expected(leaves, images, labels):
        kernels = dict(pretrained)
        for part in toy.PARTS:
            a, b = (toy.float64(state.increments[part][name]) for name in ("A", "B"))
            directions = a[:2] @ b[:2] / (norms(a) * norms(b))[:2]
            new = leaves["increment"][part]["A"] @ leaves["increment"][part]["B"]
            for magnitude, change in zip(leaves["magnitudes"], (*directions, new), strict=True):
                kernels[part] = kernels[part] + magnitude * change
        features = toy.reference_features(images, kernels)
        return toy.reference_cross_entropy(features, leaves["head"], labels, 2).mean()

    _, slopes = toy.check_loss(run, step.frozen, trained, expected)
    assert np.abs(slopes).min() > 1e-5


def test_kept_magnitudes_continue_from_the_last_task(backbone):
    learner = toy.make_learner("sd_lora", learner__sd_lora__keep_magnitudes=True)
    state = toy.trajectory("sd_lora").steps[2].before
    for task in range(3):
        _, trained = learner.start_task(backbone, state, task, jax.random.key(0))
        expected = np.full(3, 0.8, np.float32)
        expected[:task] = state.magnitudes[task - 1, :task]
        np.testing.assert_array_equal(trained["magnitudes"], expected)
