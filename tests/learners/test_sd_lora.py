"""SD-LoRA: old directions normalised and scaled by magnitudes that go on training."""

import jax
import jax.numpy as jnp
import numpy as np

from fdc_jax.learners import sd_lora
from fdc_jax.model import vit
from tests.learners import toy


def random_state(learner, num_tasks, seed=0):
    """State after `num_tasks` tasks whose leaves are noise; later slots are empty."""
    state = toy.random_like(learner.initial_state(), seed)
    rows = jnp.tril(1.0 + jnp.abs(state.magnitudes))
    return jax.tree.map(
        lambda slots: slots.at[num_tasks:].set(0.0), state._replace(magnitudes=rows)
    )


def norms(factors):
    return np.sqrt((factors**2).sum((-2, -1), keepdims=True))


def expected_kernels(backbone, stack, magnitudes, task, current):
    """W_0 + sum over earlier tasks of m A B / (|A| |B|), plus m A B of the current one."""
    kernels = toy.float64(vit.pretrained_kernels(backbone))
    stack, magnitudes, current = toy.float64(stack), toy.float64(magnitudes), toy.float64(current)
    for part in toy.PARTS:
        for earlier in range(task):
            a, b = stack[part]["A"][earlier], stack[part]["B"][earlier]
            kernels[part] = kernels[part] + magnitudes[earlier] * (a @ b) / (norms(a) * norms(b))
        product = current[part]["A"] @ current[part]["B"]
        kernels[part] = kernels[part] + magnitudes[task] * product
    return kernels


def test_loss_and_gradients_in_float64(backbone):
    """In the middle of a task, along a random direction of each part."""
    run = toy.trajectory("sd_lora")
    state = random_state(run.learner, 2)
    frozen, trained = run.learner.start_task(backbone, state, 2, jax.random.key(0))
    np.testing.assert_array_equal(trained["magnitudes"], np.float32(0.8))
    trained = toy.random_like(trained, 1)
    trained["magnitudes"] = jnp.abs(trained["magnitudes"]) + 0.5
    batch = toy.make_batch(0, size=6, padding=1)

    def expected(leaves):
        kernels = expected_kernels(
            backbone, state.increments, leaves["magnitudes"], 2, leaves["increment"]
        )
        features = toy.reference_features(batch.images[:5], kernels)
        return toy.reference_cross_entropy(features, leaves["head"], batch.labels[:5], 2).mean()

    value, gradients = toy.value_and_gradients(run.update, backbone, frozen, trained, batch)
    np.testing.assert_allclose(value, expected(toy.float64(trained)), rtol=1e-4)
    slopes = toy.assert_slopes(expected, trained, gradients)
    assert np.abs(slopes).min() > 1e-5


def test_kept_magnitudes_continue_from_the_last_task(backbone):
    learner = toy.make_learner("sd_lora", learner__sd_lora__keep_magnitudes=True)
    state = random_state(learner, 2)
    for task in range(3):
        _, trained = learner.start_task(backbone, state, task, jax.random.key(0))
        expected = np.full(3, 0.8, np.float32)
        expected[:task] = state.magnitudes[task - 1, :task]
        np.testing.assert_array_equal(trained["magnitudes"], expected)


def test_zero_directions_give_zero():
    directions = sd_lora._directions(toy.make_learner("sd_lora").initial_state().increments, 2)
    for part in toy.PARTS:
        for name, axis in (("A", -1), ("B", -2)):
            assert directions[part][name].shape[axis] == len(toy.CLASSES) * toy.RANK
            np.testing.assert_array_equal(directions[part][name], 0)
