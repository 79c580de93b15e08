"""Learners whose loss is a mean over images take a batch in portions, to the same gradients."""

import jax
import numpy as np
import pytest

from fdc_jax.learners import ewc_lora, inflora, sd_lora, splitlora, training
from fdc_jax.model import vit
from tests.learners import small_stream

LEARNERS = {each.__name__.split(".")[-1]: each for each in (ewc_lora, inflora, sd_lora, splitlora)}


@pytest.mark.parametrize("name", LEARNERS)
def test_a_batch_in_portions_makes_the_same_step(backbone, monkeypatch, name):
    """The second task, where penalties and directions are there; padding in the last portion."""
    learner = LEARNERS[name]
    batch = small_stream.make_batch(size=12, classes=2, padding=3)
    setup = small_stream.make_setup((2, 2))
    first = small_stream.make_batch(seed=1, size=12, classes=2)
    images = small_stream.task_images(first)
    state = learner.before_task(setup, backbone, learner.initial_state(setup), 0, images)
    frozen, trained = learner.start(setup, backbone, state, 0, jax.random.key(0))
    # Factors of a fresh increment are zero on one side, which would hide what the task added.
    trained = small_stream.random_like(trained, 3, 0.05)
    state = learner.after_task(setup, backbone, state, 0, frozen, trained, images)
    state = learner.before_task(setup, backbone, state, 1, images)
    frozen, trained = learner.start(setup, backbone, state, 1, jax.random.key(1))
    trained = small_stream.random_like(trained, 4, 0.05)
    trained = jax.tree.map(np.asarray, trained)
    sizes = []
    function = training.mean_over_portions
    monkeypatch.setattr(
        training,
        "mean_over_portions",
        lambda *arguments: sizes.append(arguments[2]) or function(*arguments),
    )
    tokens = (small_stream.SIDE // small_stream.TINY.patch) ** 2 + 1
    found = {}
    for kind, together in (("whole", 12), ("portions", 4)):
        monkeypatch.setattr(vit, "PORTION_TOKENS", together * tokens)
        update = learner.update(setup)
        start = jax.tree.map(jax.numpy.array, trained)
        found[kind] = update.step(backbone, frozen, start, update.initialise(start), batch, 1.0)
    assert sizes == [4]
    for whole, cut in zip(*(jax.tree.leaves(found[kind][1:]) for kind in found), strict=True):
        scale = max(float(np.abs(whole).max()), 1e-6)
        np.testing.assert_allclose(cut / scale, whole / scale, atol=2e-4)
