"""Trains two tasks of a learner on one device and on four, and compares what it leaves behind.

XLA_FLAGS=--xla_force_host_platform_device_count=4 python -m tests.learners.several_devices LEARNER
"""

import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from fdc_jax import devices, learners
from fdc_jax.learners import second_moments, training
from fdc_jax.model import vit
from tests.learners import small_stream

# Of the largest number of a leaf.
TOLERANCE = 2e-3
# Of the length of all that was added to a kernel. Adam's first steps have the length of the rate
# however small the gradient is, and rounding decides about the direction of the smallest.
TOLERANCE_OF_INCREMENTS = 0.05
# What a learner remembers that has only one right answer; subspaces have directions that may turn.
REMEMBERED = ("importance", "moments", "means")


def run(learner, mesh, asked=None):
    """Returns the state after two tasks, and what it adds to kernels, and offers beside them.

    Args:
        learner: which.
        mesh: devices.
        asked: a set that gets the kinds of images that the learner looks at beside its training.
    """
    asked = set() if asked is None else asked
    setup = small_stream.make_setup(
        (3, 2),
        # The loss that pairs images of different devices counts in the epoch of this run.
        learner__rsiat__warm_up_epochs=1,
        learner__rsiat__separation_threshold=0.2,
    )
    update = learner.update(setup)
    backbone = devices.replicate(mesh, small_stream.make_backbone())
    state = devices.replicate(mesh, learner.initial_state(setup))
    for task, classes in enumerate(setup.classes_per_task):
        # Ten rows, which four devices do not share evenly; the last is padding.
        batches = [
            devices.split(mesh, small_stream.make_batch(10 * task + i, 10, classes, padding=1))
            for i in range(3)
        ]

        def given(kind, each=batches):
            asked.add(kind)
            return iter(each)

        images = training.TaskImages(partial(given, "augmented"), partial(given, "plain"))
        name, before = learner.__name__, state
        state = learner.before_task(setup, backbone, state, task, images)
        learners.check_state(name, "before_task", before, state)
        started = learner.start(setup, backbone, state, task, jax.random.key(task))
        frozen, trained = devices.replicate(mesh, jax.tree.map(jnp.asarray, started))
        optimizer = devices.replicate(mesh, update.initialise(trained))
        for batch in batches:
            rate = (update.schedule or (lambda epoch, epochs: 1.0))(1, 4)
            trained, optimizer, _ = update.step(backbone, frozen, trained, optimizer, batch, rate)
        state = learner.after_task(setup, backbone, state, task, frozen, trained, images)
        learners.check_state(name, "after_task", before, state)
    pretrained = vit.pretrained_kernels(backbone)
    kernels = dict(learner.encoder(setup, backbone, state, 2))
    added = {name: kernels.pop(name) - kernel for name, kernel in pretrained.items()}
    return {
        "state": state,
        "added": added,
        "offered": (kernels, learner.heads(setup, state, 2)),
    }


def main(name: str) -> None:
    assert jax.device_count() == 4
    learner = learners.find(name)
    four = run(learner, devices.data_mesh())
    # Learners may choose another way of computing where there is one device.
    jax.device_count = lambda: 1
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    one = run(learner, mesh)
    compared = 0
    for (path, expected), found in zip(
        jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(four), strict=True
    ):
        expected, found = np.asarray(expected), np.asarray(found)
        where = jax.tree_util.keystr(path)
        if expected.dtype.kind in "iub":
            np.testing.assert_array_equal(found, expected, err_msg=where)
        elif "['added']" in where:
            difference = np.linalg.norm(found - expected)
            assert difference <= TOLERANCE_OF_INCREMENTS * np.linalg.norm(expected), where
        elif "['offered']" in where or any(name in where for name in REMEMBERED):
            scale = np.abs(expected).max()
            np.testing.assert_allclose(found, expected, atol=TOLERANCE * scale, err_msg=where)
        compared += 1
    print(f"{compared} arrays agree")


def check_moments() -> None:
    """Asserts that second moments add up over devices, and that no image goes from one to another.

    The step adds matrices of the encoder's width and one count over the devices.
    """
    mesh = devices.data_mesh()
    setup = small_stream.make_setup((3, 2))
    backbone = devices.replicate(mesh, small_stream.make_backbone())
    kernels = vit.pretrained_kernels(backbone)
    depth, width = kernels["key"].shape[0], kernels["key"].shape[-1]
    batch = devices.split(mesh, small_stream.make_batch(0, 8, 3))
    program = (
        second_moments._accumulate.lower(
            setup.model, backbone, kernels, batch, jnp.zeros((depth, width, width)), jnp.zeros(())
        )
        .compile()
        .as_text()
    )
    assert "all-reduce(" in program
    for moved in ("all-gather(", "all-to-all(", "collective-permute("):
        assert moved not in program, moved
    print("moments agree")


if __name__ == "__main__":
    check_moments() if sys.argv[1] == "second_moments" else main(sys.argv[1])
