"""Trains two tasks of learners on one device and on four, and compares what they leave behind.

XLA_FLAGS=--xla_force_host_platform_device_count=4 python -m tests.learners.several_devices NAME ...
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

from fdc_jax.learners import second_moments
from fdc_jax.machine import devices
from fdc_jax.model import vit
from tests.learners import toy

# Of the largest number of a leaf; processors round differently, and few steps make it larger.
TOLERANCE = 5e-3
# Of the length of all that was added to a kernel. Adam's first steps have the length of the rate
# however small the gradient is, and rounding decides about the direction of the smallest.
TOLERANCE_OF_INCREMENTS = 0.05
# What a learner remembers that has only one right answer; subspaces have directions that may turn.
REMEMBERED = ("importance", "moments", "means")


def run(name, mesh):
    """Returns the state after two tasks, and what it adds to kernels, and offers beside them."""
    # The loss that pairs images of different devices counts in the epoch of this run.
    learner = toy.make_learner(name, (3, 2), mesh, learner__rsiat__warm_up_epochs=1)
    setup = learner.setup
    update = learner.update()
    backbone = devices.replicate(mesh, toy.make_backbone())
    state = devices.replicate(mesh, learner.initial_state())
    for task, classes in enumerate(setup.classes_per_task):
        # Ten rows, which four devices do not share evenly; the last is padding.
        batches = [
            devices.split(mesh, toy.make_batch(10 * task + i, 10, classes, padding=1))
            for i in range(3)
        ]
        images = toy.task_images(*batches)
        state = learner.before_task(backbone, state, task, images)
        started = learner.start_task(backbone, state, task, jax.random.key(task))
        frozen, trained = devices.replicate(mesh, jax.tree.map(jnp.asarray, started))
        progress = devices.replicate(mesh, update.initialise(trained))
        for batch in batches:
            rate = (update.schedule or (lambda epoch, epochs: 1.0))(1, 4)
            trained, progress, _ = update.step(backbone, frozen, trained, progress, batch, rate)
        state = learner.after_task(backbone, state, task, frozen, trained, images)
    pretrained = vit.pretrained_kernels(backbone)
    kernels = dict(learner.encoder(backbone, state, 2))
    if "parameters" in kernels:
        added = jax.tree.map(jnp.subtract, kernels.pop("parameters"), backbone)
    else:
        added = {part: kernels.pop(part) - kernel for part, kernel in pretrained.items()}
    return {"state": state, "added": added, "offered": (kernels, learner.heads(state, 2))}


def compare(name: str) -> None:
    """Asserts that four devices leave what one leaves."""
    four = run(name, devices.data_mesh())
    one = run(name, jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",)))
    leaves = jax.tree_util.tree_leaves_with_path(one)
    for (path, expected), actual in zip(leaves, jax.tree.leaves(four), strict=True):
        expected, actual = np.asarray(expected), np.asarray(actual)
        where = f"{name}{jax.tree_util.keystr(path)}"
        if expected.dtype.kind in "iub":
            np.testing.assert_array_equal(actual, expected, err_msg=where)
        elif "['added']" in where or "['adapter']" in where:
            difference = np.linalg.norm(actual - expected)
            assert difference <= TOLERANCE_OF_INCREMENTS * np.linalg.norm(expected), where
        elif "['offered']" in where or any(name in where for name in REMEMBERED):
            scale = np.abs(expected).max()
            np.testing.assert_allclose(actual, expected, atol=TOLERANCE * scale, err_msg=where)


def check_moments() -> None:
    """Asserts that second moments add up over devices, and that no image goes from one to another.

    The step adds matrices of the encoder's width and one count over the devices.
    """
    mesh, setup = devices.data_mesh(), toy.make_learner().setup
    backbone = devices.replicate(mesh, toy.make_backbone())
    kernels = vit.pretrained_kernels(backbone)
    batch = devices.split(mesh, toy.make_batch(0, 8, 3))
    totals = (jnp.zeros_like(kernels["key"]), jnp.zeros(()))
    model = vit.in_float32(setup.model)
    lowered = second_moments.add_batch.lower(model, 8, backbone, kernels, batch, totals)
    program = lowered.compile().as_text()
    assert "all-reduce(" in program
    for moved in ("all-gather(", "all-to-all(", "collective-permute("):
        assert moved not in program, moved


if __name__ == "__main__":
    assert jax.device_count() == 4
    check_moments()
    for learner in sys.argv[1:]:
        compare(learner)
    print("four devices agree with one")
