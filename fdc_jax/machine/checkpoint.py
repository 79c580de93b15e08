"""Checkpoints of a run: numbered archives of arrays, each with a small JSON cursor.

What a run keeps is the same on all devices. It is written as arrays of the host by process 0 and
handed to the others when it is read, so that a checkpoint fits any number of devices and processes,
and its folder need not be shared between hosts.
"""

import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fdc_jax.errors import InputError
from fdc_jax.machine import devices, processes
from fdc_jax.machine.files import read_npz, write_npz

_log = logging.getLogger(__name__)


class Checkpoints:
    """A folder of numbered checkpoints, each a pytree and a cursor.

    Args:
        folder: where they lie; made when something is written.
        keep: how many of the newest stay.
        read_only: change nothing, pass over what is damaged.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 2, read_only: bool = False):
        self._folder, self._keep, self._read_only = Path(folder), keep, read_only
        self._arrays: dict[str, np.ndarray] = {}  # of the checkpoint whose cursor was read last
        if processes.is_first() and not read_only:
            for left in self._folder.glob(".*.npz.*"):  # by a process that was killed
                left.unlink()

    def _file(self, number: int) -> Path:
        return self._folder / f"{number}.npz"

    def save(self, number: int, tree: Any, cursor: dict[str, Any]) -> None:
        """Writes a checkpoint; it exists as a whole when this returns, or not at all.

        Args:
            number: larger than every number before.
            tree: arrays.
            cursor: what says where in the run the tree belongs; JSON values.

        Raises:
            InputError: the disk refuses the write.
        """
        self._write(number, _named(devices.to_host(tree)), cursor)

    @processes.on_first
    def _write(self, number: int, arrays: dict[str, Any], cursor: dict[str, Any]) -> None:
        write_npz(self._file(number), arrays | {"cursor": np.array(json.dumps(cursor))})
        for earlier in self._numbers()[self._keep :]:
            self._file(earlier).unlink()

    def newest(
        self, target: Callable[[dict[str, Any]], Any]
    ) -> Iterator[tuple[int, dict[str, Any], Any]]:
        """Yields number, cursor and tree of every usable checkpoint, newest first.

        A damaged one is set aside, with a warning.

        Args:
            target: returns for a cursor a tree of the wanted structure, shapes and types; leaves
                that are JAX arrays come back in their placement, others as arrays of the host.
        """
        for number in processes.on_first(self._numbers)():
            if (cursor := self._cursor(number)) is None:
                continue
            wanted = target(cursor)
            leaves, structure = jax.tree.flatten(wanted)
            found = processes.from_first(lambda n=number, w=wanted: self._fitting(n, w))
            if found is not None:
                placed = [
                    devices.put(array, leaf.sharding) if isinstance(leaf, jax.Array) else array
                    for leaf, array in zip(leaves, found.values(), strict=True)
                ]
                yield number, cursor, jax.tree.unflatten(structure, placed)

    def _numbers(self) -> list[int]:
        return sorted((int(path.stem) for path in self._folder.glob("*.npz")), reverse=True)

    @processes.on_first
    def _cursor(self, number: int) -> dict[str, Any] | None:
        try:
            self._arrays = read_npz(self._file(number))
            return json.loads(self._arrays.pop("cursor").item())
        except (InputError, KeyError) as error:
            return self._move_aside(number, str(error).rpartition("file: ")[2])

    def _fitting(self, number: int, wanted: Any) -> dict[str, np.ndarray] | None:
        """Returns the arrays in the order of the leaves of a tree, if they are of its form."""
        arrays, self._arrays, found = self._arrays, {}, {}
        for name, leaf in _named(wanted).items():
            each = arrays.get(name, np.zeros(0))
            if each.dtype == np.dtype(f"V{leaf.dtype.itemsize}"):  # as NumPy keeps bfloat16
                each = each.view(leaf.dtype)
            if (each.shape, each.dtype) != (leaf.shape, leaf.dtype):
                return self._move_aside(number, f"expected {leaf.dtype}{[*leaf.shape]} at {name}")
            found[name] = each
        return found

    @processes.on_first
    def set_aside(self, number: int, reason: str) -> None:
        """Moves an unusable checkpoint beside the folder, with a warning; its number is free."""
        self._move_aside(number, reason)

    def _move_aside(self, number: int, reason: str) -> None:
        place = self._file(number)
        if self._read_only:
            _log.warning("checkpoint %s is unusable (%s)", place, reason)
            return
        aside = self._folder.with_name(f"{self._folder.name}_unusable_{number}.npz")
        _log.warning(
            "checkpoint %s is unusable (%s); moved to %s, going back to the one before it",
            *(place, reason, aside.name),
        )
        os.replace(place, aside)


def _named(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a tree by their places in it."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
