"""Keeps freed memory in the process, for programs that run on the CPU.

XLA frees its buffers after every step, glibc gives blocks of that size back to the system, and the
next step takes them again page by page: a quarter of the time of a training step.
"""

import ctypes
import importlib.metadata
import importlib.util
import sys

# Options of glibc's mallopt: one arena for all threads, since only the first one holds blocks of
# this size; no block mapped on its own; no memory given back; growth in steps of 256 MiB.
_OPTIONS = {
    "M_ARENA_MAX": (-8, 1),
    "M_MMAP_MAX": (-4, 0),
    "M_TRIM_THRESHOLD": (-1, -1),
    "M_TOP_PAD": (-2, 2**28),
}


def keep_freed_memory() -> bool:
    """Tells the allocator to keep what is freed; must run before any thread starts.

    Returns:
        Whether it did: not beside an accelerator, and not on a system without glibc.
    """
    if importlib.metadata.entry_points(group="jax_plugins") or importlib.util.find_spec("libtpu"):
        return False
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all([mallopt(*option) for option in _OPTIONS.values()])
