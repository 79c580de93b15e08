"""Trains a learner on four devices, and saves what it leaves behind.

XLA_FLAGS=--xla_force_host_platform_device_count=4 python -m tests.learners.several_devices NAME OUT
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

from fdc_jax.learners import second_moments
from fdc_jax.machine import devices
from fdc_jax.model import vit
from tests.learners import toy


def left_behind(name, mesh=None):
    """Returns features by the last encoder, the last heads, and sums over a task's images."""
    run = toy.trajectory(name, mesh=mesh)
    state = run.steps[-1].after
    features = toy.encode(toy.random_images(77), run.learner.encoder(toy.make_backbone(), state, 3))
    sums = [getattr(state, field, 0.0) for field in ("importance", "moments", "gaussians")]
    return jax.tree.leaves((features, run.learner.heads(state, 3), sums))


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
    np.savez(sys.argv[2], *left_behind(sys.argv[1], devices.data_mesh()))
