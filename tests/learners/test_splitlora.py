"""SplitLoRA: the split of directions, where A is drawn, and what training leaves alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fdc_jax.errors import InputError
from fdc_jax.learners import splitlora
from fdc_jax.model import vit
from tests.learners import toy

MAJOR = (2, 21)


@given(st.integers(0, 10**6), st.integers(1, 20), st.floats(1.0, 20.0))
@settings(deadline=None, max_examples=60, derandomize=True)
def test_split_counts_shares_above_a_cut_off(seed, tasks_done, alpha):
    """The minimum in closed form: directions from the second on with more than alpha / (t d)."""
    rng = np.random.default_rng(seed)
    values = rng.uniform(0.6, 1.0) ** np.arange(48) * rng.uniform(0.1, 1.0, 48)
    values = np.sort(values)[::-1] / values.sum()
    above = int(np.sum(values[1:] > alpha / (tasks_done * 48)))
    assert splitlora.num_major(values, tasks_done, alpha) == max(above, 1) + 1


def state_with_directions(learner, major=MAJOR):
    shape = (toy.TINY.depth, toy.TINY.width, toy.TINY.width)
    directions = np.linalg.qr(np.random.default_rng(0).normal(size=shape))[0]
    return learner.initial_state()._replace(
        directions=jnp.asarray(directions, jnp.float32), major=jnp.asarray(major, jnp.int32)
    )


def test_A_fills_the_minor_subspace_and_shrinks_with_tasks():
    state, width = state_with_directions(toy.make_learner("splitlora")), toy.TINY.width
    reference = jnp.ones((toy.TINY.depth, width, 4000))
    A = toy.float64(splitlora.within_minor(jax.random.key(0), state, reference, 2))
    for block, major in enumerate(MAJOR):
        norm = np.linalg.norm(A[block])
        np.testing.assert_allclose(norm, (width * 4000) ** 0.5 / 3, rtol=1e-5)
        coordinates = toy.float64(state.directions)[block].T @ A[block]
        assert np.linalg.norm(coordinates[:major]) <= 1e-5 * norm
        variances = np.mean(coordinates[major:] ** 2, axis=1)
        np.testing.assert_allclose(variances, width / (width - major) / 9, rtol=0.15)


def test_too_few_minor_directions_are_an_error(backbone):
    learner = toy.make_learner("splitlora")
    state = state_with_directions(learner, major=(2, 23))
    assert learner.before_task(backbone, state, 0, None) is state
    message = r"splitlora.alpha: expected at least 2 .*found 1 of 24 in block 1 after 3"
    with pytest.raises(InputError, match=message):
        learner.before_task(backbone, state, 3, None)


def test_moments_average_over_all_tokens(backbone):
    """Every task's inputs count equally, each seen by the encoder of that task's end."""
    run, total = toy.trajectory("splitlora"), 0.0
    A = run.steps[2].frozen["A"]
    assert np.abs(A["key"] - A["value"]).max() > 1e-2
    for task, step in enumerate(run.steps):
        kernels = run.learner.encoder(backbone, step.after, task + 1)
        total = total + toy.input_moments(run, kernels, step.images)
        assert float(step.after.tokens) == 110 * (task + 1)  # Eleven images of ten tokens a task.
        np.testing.assert_allclose(step.after.moments, total / (task + 1), atol=1e-5)
        moments, directions = toy.float64((step.after.moments, step.after.directions))
        for moment, basis, major in zip(moments, directions, step.after.major, strict=True):
            values = np.linalg.eigvalsh(moment)[::-1]
            np.testing.assert_allclose(basis.T @ basis, np.eye(toy.TINY.width), atol=1e-5)
            np.testing.assert_allclose(basis.T @ moment @ basis, np.diag(values), atol=1e-4)
            assert major == splitlora.num_major(values, task + 1, 0.05)
    assert np.asarray(run.steps[-1].after.major).max() > 3


def test_native_loss_divides_logits_by_the_temperature(backbone, monkeypatch):
    step, batch = toy.trajectory("splitlora").steps[1], toy.make_batch(5, classes=3)
    learner = toy.make_learner("splitlora", learner__preset="native")
    features = toy.random_like(np.zeros((4, toy.TINY.width)), 0, 1.0)
    monkeypatch.setattr(vit, "encode", lambda *arguments: features)
    cooler = jax.tree.map(lambda leaf: leaf / 30.0, step.trained["head"])
    expected = toy.reference_cross_entropy(toy.float64(features), cooler, batch.labels, 3).mean()
    actual = jax.jit(learner.loss)(backbone, step.frozen, step.trained, batch)
    np.testing.assert_allclose(actual, expected, rtol=1e-4)
