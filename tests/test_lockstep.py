"""Seeds that make their steps together: same numbers, wherever each starts; all stop and save."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fdc_jax import lockstep
from fdc_jax.errors import InputError, Interrupted
from fdc_jax.learners import training

TASKS, STEPS = 2, 4


def make_update():
    transformation = optax.scale_by_adam()

    def step(backbone, frozen, trained, optimizer, batch, rate):
        def loss(leaves):
            return jnp.mean((batch @ (backbone + leaves["A"]) - frozen) ** 2)

        value, gradients = jax.value_and_grad(loss)(trained)
        directions, optimizer = transformation.update(gradients, optimizer)
        trained = jax.tree.map(lambda leaf, d: leaf - rate * d, trained, directions)
        return trained, optimizer, value

    return training.Update(transformation.init, jax.jit(step, donate_argnums=(2, 3)))


UPDATE = make_update()
BACKBONE = jnp.arange(3.0)


def work(seed, first=(0, 0), stop_at=None, saved=None):
    """One seed's steps from a place on; returns what it learned and its losses."""
    learned, losses = [], []
    for task in range(first[0], TASKS):
        rng = np.random.default_rng([seed, task])
        frozen = jnp.asarray(rng.normal(size=5), jnp.float32)
        trained = {"A": jnp.asarray(rng.normal(size=3), jnp.float32)}
        optimizer = UPDATE.initialise(trained)
        for step in range(first[1] if task == first[0] else 0, STEPS):
            batch = jnp.asarray(np.random.default_rng([seed, task, step]).normal(size=(5, 3)))
            trained, optimizer, loss = yield lockstep.Step(
                (task, step), frozen, trained, optimizer, batch, 0.1 / (step + 1)
            )
            losses.append(float(loss))
            if stop_at is not None and (task, step) >= stop_at:
                saved[seed] = (task, step, lockstep.whole(trained))
                raise Interrupted("stopped")
        learned.append(np.asarray(lockstep.whole(trained)["A"]))
    return learned, losses


def alone(*arguments):
    return lockstep.run([work(*arguments)], UPDATE, BACKBONE)[0]


@pytest.fixture
def sizes(monkeypatch):
    """How many seeds each common step had."""
    found = []
    original = lockstep._Together.__call__

    def counted(self, steps):
        found.append(len(steps))
        return original(self, steps)

    monkeypatch.setattr(lockstep._Together, "__call__", counted)
    return found


def same(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.stack(ours[0]), np.stack(theirs[0]), rtol=1e-5)
        np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-5)


def test_three_seeds_together_learn_what_each_learns_alone(sizes):
    found = lockstep.run([work(seed) for seed in (1, 2, 3)], UPDATE, BACKBONE)
    assert sizes == [3] * TASKS * STEPS
    same(found, [alone(seed) for seed in (1, 2, 3)])
    assert np.abs(found[0][0][0] - found[1][0][0]).max() > 0.01


def test_seeds_that_resume_at_different_steps_meet(sizes):
    firsts = {1: (0, 2), 2: (0, 0), 3: (1, 1)}
    found = lockstep.run([work(*each) for each in firsts.items()], UPDATE, BACKBONE)
    # The second catches up with the first; the third has them for company from its step on.
    assert sizes == [3] * (STEPS - 1)
    same(found, [alone(*each) for each in firsts.items()])


def test_a_stop_lets_every_seed_save():
    saved = {}
    works = [work(1, (0, 0), (0, 1), saved), work(2, (0, 0), (0, 1), saved)]
    works.append(work(3, (1, 0), (0, 1), saved))
    with pytest.raises(Interrupted, match="stopped"):
        lockstep.run(works, UPDATE, BACKBONE)
    assert {seed: place[:2] for seed, place in saved.items()} == {1: (0, 1), 2: (0, 1), 3: (1, 0)}
    expected = {}
    with pytest.raises(Interrupted):
        alone(1, (0, 0), (0, 1), expected)
    np.testing.assert_allclose(saved[1][2]["A"], expected[1][2]["A"], rtol=1e-5)


def test_a_failure_of_one_seed_closes_the_others():
    closed = []

    def fails():
        yield from work(1)
        raise ValueError("broken")

    def watched():
        try:
            yield from work(2)
            yield from work(2)
        finally:
            closed.append(True)

    works = [watched(), fails()]  # held, so that no collection of garbage closes them
    with pytest.raises(ValueError, match="broken"):
        lockstep.run(works, UPDATE, BACKBONE)
    assert closed == [True]


def test_too_little_device_memory_is_one_line(monkeypatch):
    class Device:
        def memory_stats(self):
            return {"bytes_limit": 2**30, "bytes_in_use": 2**30}

    monkeypatch.setattr(jax, "local_devices", lambda: [Device()])
    with pytest.raises(InputError) as caught:
        lockstep.run([work(1), work(2)], UPDATE, BACKBONE)
    assert "a step of 2 seeds takes " in str(caught.value)
    assert "\n" not in str(caught.value)
