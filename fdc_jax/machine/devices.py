"""Devices: the mesh, arrays that are copied to every device or split between them, and memory."""

import ctypes
import importlib.metadata
import importlib.util
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Bool

# Numbers and values for glibc's mallopt: one arena for all threads, since only the first one holds
# blocks of this size; no block mapped on its own; no memory given back; growth by 256 MiB.
_MALLOPT = ((-8, 1), (-4, 0), (-1, -1), (-2, 2**28))


def data_mesh() -> Mesh:
    """Returns all devices along one axis, over which batches are split."""
    return jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))


def have_cudnn(mesh: Mesh) -> bool:
    """Returns True if the devices run cuDNN's fused attention: NVIDIA's from Ampere on.

    The mesh decides, not the devices of this process: it may describe another machine.
    """
    device = mesh.devices.flat[0]
    # AMD's devices have names instead of numbers, such as gfx90a.
    major = str(getattr(device, "compute_capability", "")).partition(".")[0]
    return device.platform == "gpu" and major.isdigit() and int(major) >= 8


def everywhere(mesh: Mesh) -> NamedSharding:
    """Returns the placement of arrays that every device has a copy of."""
    return NamedSharding(mesh, PartitionSpec())


def rows(mesh: Mesh) -> NamedSharding:
    """Returns the placement of results: devices share the rows; several processes have copies."""
    return everywhere(mesh) if mesh.is_multi_process else _split(mesh)


def replicate(mesh: Mesh, tree: Any) -> Any:
    """Copies a pytree to every device; its NumPy arrays stay on the host.

    With several processes, every process must pass the same values.
    """

    def place(leaf):
        if isinstance(leaf, np.ndarray):
            return leaf
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            return jax.device_put(leaf, everywhere(mesh))
        return put(leaf, everywhere(mesh))

    return jax.tree.map(place, tree)


def put(leaf: Any, sharding: Sharding) -> jax.Array:
    """Places values, which every process must have, on the devices of a sharding."""
    if sharding.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    # `device_put` would compare the values of all processes.
    leaf = np.asarray(leaf)
    return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])


def split(mesh: Mesh, tree: Any) -> Any:
    """Splits the leading axis of every leaf between the devices.

    A leading axis that the number of devices does not divide is padded with zeros; a batch's
    weights are zero there, so that losses do not change. Each of several processes needs to give
    only the rows of `own_rows`.
    """

    def place(leaf):
        leaf = np.asarray(leaf)
        if missing := -len(leaf) % mesh.size:
            leaf = np.concatenate([leaf, np.zeros((missing, *leaf.shape[1:]), leaf.dtype)])
        return jax.make_array_from_callback(leaf.shape, _split(mesh), lambda index: leaf[index])

    return jax.tree.map(place, tree)


def _split(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec("data"))


def own_rows(mesh: Mesh, rows: int) -> Bool[np.ndarray, " n"]:
    """Marks the rows of a batch that `split` puts on devices of this process."""
    padded = rows + -rows % mesh.size
    own = np.zeros(padded, bool)
    for index in _split(mesh).addressable_devices_indices_map((padded,)).values():
        own[index] = True
    return own[:rows]


def to_host(tree: Any) -> Any:
    """Returns a pytree with NumPy arrays for its arrays, on every process."""

    def fetch(leaf):
        if not isinstance(leaf, jax.Array):
            return leaf
        if leaf.is_fully_addressable or leaf.is_fully_replicated:
            return np.asarray(leaf)
        return multihost_utils.process_allgather(leaf, tiled=True)

    return jax.tree.map(fetch, tree)


def keep_programs(folder: Path) -> None:
    """Keeps compiled programs of any size in a cache, for further processes.

    If JAX has a folder for them, as by `JAX_COMPILATION_CACHE_DIR`, they are kept there.
    """
    if not getattr(jax.config, "jax_compilation_cache_dir", None):
        jax.config.update("jax_compilation_cache_dir", str(folder / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    # A cache on a full disk, or a damaged one, is no reason to warn: programs are compiled again.
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache entry")


def total_memory() -> int:
    """Returns the bytes of memory of all devices; on CPUs, of the machines."""
    limits = [(device.memory_stats() or {}).get("bytes_limit", 0) for device in jax.local_devices()]
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return jax.process_count() * (sum(limits) or machine)


def peak_memory() -> int | None:
    """Returns the most bytes that were in use on the fullest device so far, None on a CPU."""
    statistics = [device.memory_stats() for device in jax.local_devices()]
    peaks = [counters["peak_bytes_in_use"] for counters in statistics if counters]
    return max(peaks) if peaks else None


def peak_rise(before: int | None) -> int | None:
    """Returns the bytes by which the peak has risen since `peak_memory`, None on a CPU."""
    now = peak_memory()
    return None if before is None or now is None else now - before


_compilation = {"seconds": 0.0}  # of this process


def _count(event: str, duration_secs: float, **_: Any) -> None:
    """Adds up the seconds of JAX's events about tracing, lowering and compiling."""
    if event.startswith("/jax/core/compile/"):
        _compilation["seconds"] += duration_secs


jax.monitoring.register_event_duration_secs_listener(_count)


class Elapsed(NamedTuple):
    """Seconds of work; those of the compilation of its programs stand apart."""

    seconds: float
    compile_seconds: float


class Stopwatch:
    """Measures the time since it was made."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._compiled = _compilation["seconds"]

    def read(self) -> Elapsed:
        """Returns the seconds so far, without and of compilation."""
        compiled = _compilation["seconds"] - self._compiled
        return Elapsed(max(time.perf_counter() - self._start - compiled, 0.0), compiled)


def description() -> str:
    """Returns the number and kind of the devices, such as `1 x cpu`."""
    return f"{jax.device_count()} x {jax.devices()[0].device_kind}"


def keep_freed_memory() -> None:
    """Makes glibc keep freed memory without an accelerator; call it before any thread starts.

    XLA frees its buffers after every step, glibc gives blocks of that size back to the system, and
    the next step takes them again page by page: a quarter of the time of a training step.
    """
    accelerated = importlib.metadata.entry_points(group="jax_plugins")
    if accelerated or importlib.util.find_spec("libtpu") or not sys.platform.startswith("linux"):
        return
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        for option in _MALLOPT:
            mallopt(*option)
