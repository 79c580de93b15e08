"""Devices: the mesh, what is copied to every device and what is split between them."""

import os
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


def data_mesh() -> Mesh:
    """Returns all devices along one axis, over which batches are split."""
    return jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))


def replicate(mesh: Mesh, tree: Any) -> Any:
    """Copies a pytree to every device, but for its NumPy arrays, which stay on the host."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(
        lambda leaf: leaf if isinstance(leaf, np.ndarray) else jax.device_put(leaf, everywhere),
        tree,
    )


def split(mesh: Mesh, tree: Any) -> Any:
    """Splits the leading axis of every leaf between the devices.

    A leading axis that the number of devices does not divide is extended by zeros; a batch's
    weights are zero there, so that losses stay what they were.
    """

    def place(leaf):
        leaf = np.asarray(leaf)
        extra = -len(leaf) % mesh.size
        if extra:
            leaf = np.concatenate([leaf, np.zeros((extra, *leaf.shape[1:]), leaf.dtype)])
        return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec("data")))

    return jax.tree.map(place, tree)


def use_compilation_cache(folder: str | os.PathLike[str]) -> None:
    """Keeps compiled programs in a folder, so that the next start skips compilation."""
    jax.config.update("jax_compilation_cache_dir", os.fspath(folder))


def peak_memory() -> int | None:
    """Returns the most bytes that were in use on the fullest device so far, None on a CPU."""
    statistics = [device.memory_stats() for device in jax.local_devices()]
    peaks = [each["peak_bytes_in_use"] for each in statistics if each]
    return max(peaks) if peaks else None


def describe() -> str:
    """Returns the number and kind of the devices, such as `1 x cpu`."""
    return f"{jax.device_count()} x {jax.devices()[0].device_kind}"
