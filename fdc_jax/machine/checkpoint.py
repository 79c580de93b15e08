"""Checkpoints of a run. The only file that imports Orbax.

The state of a run is the same on all devices. Process 0 writes it as arrays of the host, reads it,
and sends it to the others: a checkpoint fits any number of devices and processes, and its folder
need not be shared between hosts.
"""

import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from fdc_jax.errors import InputError, line
from fdc_jax.machine import devices, processes
from fdc_jax.machine.files import Damaged, check_manifest, write_manifest

_log = logging.getLogger(__name__)

# Orbax reports every step of every save, and asyncio every file of a save that failed; errors
# that matter are raised.
for _name in ("absl", "asyncio"):
    logging.getLogger(_name).addFilter(lambda record: record.levelno >= logging.CRITICAL)


class _Step(ocp.path.atomicity.AtomicRenameTemporaryPath):
    """A temporary folder whose manifest is written before it gets its final name."""

    async def finalize(self) -> None:
        if self.get_final().name.isdigit():  # a checkpoint, and not an item within it
            write_manifest(Path(self.get()))
        os.replace(self.get(), self.get_final())


class Checkpoints:
    """A folder of numbered checkpoints, each a pytree and a small JSON cursor; the newest are kept.

    With `read_only` the folder must exist (else InputError), and damaged checkpoints stay in it.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 2, read_only: bool = False):
        self._folder, self._read_only = Path(folder).absolute(), read_only
        self._manager: Any = None
        self._open(keep)

    @processes.on_first
    def _open(self, keep: int) -> None:
        if self._read_only and not self._folder.is_dir():
            raise InputError(f"{self._folder}: expected a checkpoint of the run, found no folder")
        self._folder.mkdir(parents=True, exist_ok=True)
        first_alone = ocp.options.MultiprocessingOptions(primary_host=0, active_processes={0})
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            enable_async_checkpointing=False,
            cleanup_tmp_directories=not self._read_only,
            create=False,
            lightweight_initialize=True,  # does not read metadata, which may be damaged
            read_only=self._read_only,
            multiprocessing_options=first_alone,
            temporary_path_class=_Step,
        )
        try:
            self._manager = ocp.CheckpointManager(self._folder, options=options)
        except Exception as error:  # Orbax raises many types for damaged files.
            raise InputError(
                f"{self._folder}: unreadable checkpoints ({_reason(error)})"
            ) from error

    def save(self, number: int, tree: Any, cursor: dict[str, Any]) -> None:
        """Writes arrays and JSON values under a number that is larger than those before.

        The checkpoint is whole or absent. Raises InputError if it cannot be written.
        """
        self._write(number, jax.tree.map(np.asarray, devices.to_host(tree)), cursor)

    @processes.on_first
    def _write(self, number: int, tree: Any, cursor: dict[str, Any]) -> None:
        items = ocp.args.Composite(
            tree=ocp.args.StandardSave(tree), cursor=ocp.args.JsonSave(cursor)
        )
        try:
            # Reserves the space once, since Orbax's errors on a full disk are hard to read.
            size = sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
            with tempfile.TemporaryFile(dir=self._folder) as file:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, max(size, 1))
            self._manager.save(number, args=items, force=True)
            self._manager.wait_until_finished()
        except (OSError, ValueError) as error:
            text = f"cannot write a checkpoint in {self._folder}: {_reason(error)}"
            raise InputError(text) from error

    def newest(
        self, target: Callable[[dict[str, Any]], Any]
    ) -> Iterator[tuple[int, dict[str, Any], Any]]:
        """Yields number, cursor and tree of every usable checkpoint, newest first.

        A checkpoint whose bytes are not those of its manifest is set aside, with a warning.
        `target` maps a cursor to a tree of the wanted structure, shapes and types. If the tree has
        a JAX array, the leaf gets its placement; other leaves are arrays of the host.

        Raises:
            InputError: a checkpoint cannot be read, although its bytes may be right; or `target`
                raises it.
        """
        for number in self._numbers():
            cursor = self._cursor(number)
            if cursor is None:
                continue
            try:
                wanted = target(cursor)
            except InputError as error:
                raise InputError(f"{self._folder / str(number)}: cursor: {error}") from error
            leaves, structure = jax.tree.flatten(wanted)
            arrays = processes.from_first(lambda n=number, w=wanted: self._leaves(n, w))
            placed = [
                devices.put(array, leaf.sharding) if isinstance(leaf, jax.Array) else array
                for leaf, array in zip(leaves, (arrays or {}).values(), strict=True)
            ]
            yield number, cursor, jax.tree.unflatten(structure, placed)

    @processes.on_first
    def _numbers(self) -> list[int]:
        return sorted(self._manager.all_steps(), reverse=True)

    @processes.on_first
    def _cursor(self, number: int) -> dict[str, Any] | None:
        try:
            check_manifest(self._folder / str(number), "")
        except Damaged:
            return self._move_aside(number, "its files are damaged")
        return self._read(number, "cursor", ocp.args.JsonRestore())

    def _leaves(self, number: int, target: Any) -> dict[str, np.ndarray]:
        abstract = jax.tree.map(  # takes no memory
            lambda leaf: np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape), target
        )
        tree = self._read(number, "tree", ocp.args.StandardRestore(abstract))
        arrays = jax.tree.leaves(tree)
        for array, wanted in zip(arrays, jax.tree.leaves(abstract), strict=True):
            if array.shape != wanted.shape:  # Orbax returns arrays of any shape.
                raise self._unreadable(number, f"expected {wanted.shape}, found {array.shape}")
        return {str(i): array for i, array in enumerate(arrays)}

    def _read(self, number: int, item: str, restore: Any) -> Any:
        try:
            return self._manager.restore(number, args=ocp.args.Composite(**{item: restore}))[item]
        except Exception as error:  # of many types
            raise self._unreadable(number, _reason(error)) from error

    def _unreadable(self, number: int, reason: str) -> InputError:
        path = self._folder / str(number)
        return InputError(f"cannot read checkpoint {path}, whose files are whole: {reason}")

    @processes.on_first
    def set_aside(self, number: int, reason: str) -> None:
        """Moves an unusable checkpoint beside the folder, with a warning; frees its number."""
        self._move_aside(number, reason)

    def _move_aside(self, number: int, reason: str) -> None:
        path = self._folder / str(number)
        if self._read_only:
            _log.warning("checkpoint %s is unusable (%s)", path, reason)
            return
        aside = self._folder.with_name(f"{self._folder.name}_unusable_{number}")
        while aside.exists():
            aside = aside.with_name(f"{aside.name}_again")
        text = "checkpoint %s is unusable (%s); moved to %s; the checkpoint before it is used"
        _log.warning(text, path, reason, aside.name)
        os.replace(path, aside)
        if self._manager:
            self._manager.reload()


def _reason(error: Exception) -> str:
    """Returns the message of the operating system, or else the start of the error's message."""
    match = re.search(r"\[OS error [^:\]]*: ?([^\]]*)\]", str(error))
    return match[1] if match else line(error)
