"""Checkpoints of a run: numbered files, each of a pytree and of what says where it belongs.

What a run keeps is the same on all devices. It is written as arrays of the host by process 0 and
handed to the others when it is read, so that a checkpoint fits any number of devices and processes,
and its folder need not be shared between hosts. A file is whole or absent, and every array in it
has a checksum.
"""

import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fdc_jax.errors import InputError, line
from fdc_jax.machine import devices, processes
from fdc_jax.machine.files import read_npz, write_npz

_log = logging.getLogger(__name__)


class Checkpoints:
    """A folder of numbered checkpoints, each a pytree and a small JSON cursor.

    Args:
        folder: where they lie; made when missing.
        keep: how many of the newest stay.
        read_only: change nothing, pass over what is damaged.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 2, read_only: bool = False):
        self._folder, self._keep, self._read_only = Path(folder), keep, read_only

    def save(self, number: int, tree: Any, cursor: dict[str, Any]) -> None:
        """Writes a checkpoint; it exists as a whole when this returns, or not at all.

        Args:
            number: larger than every number before.
            tree: arrays.
            cursor: what says where in the run the tree belongs; JSON values.

        Raises:
            InputError: the disk refuses the write.
        """
        self._write(number, jax.tree.leaves(devices.to_host(tree)), cursor)

    @processes.on_first
    def _write(self, number: int, leaves: list[Any], cursor: dict[str, Any]) -> None:
        arrays = {f"leaf_{index}": leaf for index, leaf in enumerate(leaves)}
        arrays["cursor"] = np.frombuffer(json.dumps(cursor).encode(), np.uint8)
        write_npz(self._file(number), arrays)
        # Also what a killed process was writing.
        for path in (*self._folder.glob(".*.npz.*"), *map(self._file, self._numbers[self._keep :])):
            path.unlink(missing_ok=True)

    def newest(
        self, target: Callable[[dict[str, Any]], Any]
    ) -> Iterator[tuple[int, dict[str, Any], Any]]:
        """Yields number, cursor and tree of every usable checkpoint, newest first.

        A damaged one is set aside, with a warning.

        Args:
            target: returns for a cursor a tree of the wanted structure, shapes and types; leaves
                that are JAX arrays come back in their placement, others as arrays of the host.
        """
        for number in processes.on_first(lambda: self._numbers)():
            found = processes.from_first(lambda n=number: self._read(n))
            if found is None:
                continue
            *arrays, cursor = found.values()
            cursor = json.loads(cursor.tobytes())
            leaves, structure = jax.tree.flatten(target(cursor))
            expected = [(np.shape(leaf), leaf.dtype.itemsize) for leaf in leaves]
            if expected != [(array.shape, array.itemsize) for array in arrays]:
                self.set_aside(number, "its arrays are not those of this run")
                continue
            # Types that NumPy lacks, such as bfloat16, are read as bytes.
            typed = [array.view(leaf.dtype) for array, leaf in zip(arrays, leaves, strict=True)]
            placed = [
                devices.put(array, leaf.sharding) if isinstance(leaf, jax.Array) else array
                for array, leaf in zip(typed, leaves, strict=True)
            ]
            yield number, cursor, jax.tree.unflatten(structure, placed)

    def _file(self, number: int) -> Path:
        return self._folder / f"{number:09d}.npz"

    @property
    def _numbers(self) -> list[int]:
        return sorted((int(path.stem) for path in self._folder.glob("[0-9]*.npz")), reverse=True)

    def _read(self, number: int) -> dict[str, np.ndarray] | None:
        try:
            found = read_npz(self._file(number))
            json.loads(found["cursor"].tobytes())
        except (InputError, KeyError, ValueError) as error:
            return self._move_aside(number, line(error))
        return found

    @processes.on_first
    def set_aside(self, number: int, reason: str) -> None:
        """Renames an unusable checkpoint, with a warning; its number is free."""
        self._move_aside(number, reason)

    def _move_aside(self, number: int, reason: str) -> None:
        path = self._file(number)
        _log.warning("checkpoint %s is unusable (%s); trying the one before it", path, reason)
        if not self._read_only:
            os.replace(path, path.with_suffix(".unusable"))
