"""Trains a learner on four devices, and saves what it leaves behind.

XLA_FLAGS=--xla_force_host_platform_device_count=4 python -m tests.learners.several_devices NAME OUT
"""

import sys

import jax
import numpy as np

from tests.learners import toy


def left_behind(name):
    """Returns features by the last encoder, the last heads, and sums over a task's images."""
    run = toy.trajectory(name)
    state = run.steps[-1].after
    features = toy.encode(toy.random_images(77), run.learner.encoder(toy.make_backbone(), state, 3))
    sums = [getattr(state, field, 0.0) for field in ("importance", "moments", "gaussians")]
    return jax.tree.leaves((features, run.learner.heads(state, 3), sums))


if __name__ == "__main__":
    assert jax.device_count() == 4
    np.savez(sys.argv[2], *left_behind(sys.argv[1]))
