"""What is copied to the devices and what stays on the host."""

import jax
import jax.numpy as jnp
import numpy as np

from fdc_jax import devices
from fdc_jax.heads import LinearHead


def test_replicate_leaves_numpy_arrays_on_the_host():
    mesh = devices.data_mesh()
    host = np.arange(4.0)
    tree = {"host": host, "head": LinearHead(jnp.ones((2, 3)), np.zeros(2)), "number": 2.0}
    found = devices.replicate(mesh, tree)
    assert found["host"] is host
    assert type(found["head"].bias) is np.ndarray
    for leaf in (found["head"].weight, found["number"]):
        assert isinstance(leaf, jax.Array)
        assert leaf.sharding.mesh == mesh
        assert leaf.is_fully_replicated
