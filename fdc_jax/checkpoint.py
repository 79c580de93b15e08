"""Checkpoints of a run. The only file that knows Orbax.

What a run keeps is the same on all devices. It is written as arrays of the host by process 0 and
handed to the others when it is read, so that a checkpoint fits any number of devices and processes,
and its folder need not be shared between hosts.
"""

import json
import logging
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from fdc_jax import devices, processes
from fdc_jax.errors import InputError
from fdc_jax.files import sha256, write_json

_log = logging.getLogger(__name__)

_FIRST_ALONE = ocp.options.MultiprocessingOptions(primary_host=0, active_processes={0})

# Orbax reports every step of every save, and asyncio every file of a save that failed; errors
# that matter are raised.
for _name in ("absl", "asyncio"):
    logging.getLogger(_name).addFilter(lambda record: record.levelno >= logging.CRITICAL)


class Checkpoints:
    """A folder of numbered checkpoints, each a pytree and a small JSON cursor.

    Args:
        folder: where they lie; made when missing.
        keep: how many of the newest stay.
        read_only: change nothing, pass over what is damaged.

    Raises:
        InputError: the folder cannot be made; or, to be read only, is missing.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 2, read_only: bool = False):
        self._folder = Path(folder).absolute()
        self._options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            enable_async_checkpointing=False,
            cleanup_tmp_directories=not read_only,
            create=False,
            read_only=read_only,
            multiprocessing_options=_FIRST_ALONE,
        )
        self._make()

    @processes.on_first
    def _make(self) -> None:
        if self._options.read_only and not self._folder.is_dir():
            raise InputError(f"{self._folder}: expected the checkpoints of a run, found no folder")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"cannot make {self._folder}: {error.strerror}") from error
        self._manager = ocp.CheckpointManager(self._folder, options=self._options)

    def save(self, number: int, tree: Any, cursor: dict[str, Any]) -> None:
        """Writes a checkpoint; it exists as a whole when this returns, or not at all.

        Args:
            number: larger than every number before.
            tree: arrays.
            cursor: what says where in the run the tree belongs; JSON values.

        Raises:
            InputError: the disk refuses the write.
        """
        self._write(number, jax.tree.map(np.asarray, devices.to_host(tree)), cursor)

    @processes.on_first
    def _write(self, number: int, tree: Any, cursor: dict[str, Any]) -> None:
        items = ocp.args.Composite(
            tree=ocp.args.StandardSave(tree), cursor=ocp.args.JsonSave(cursor)
        )
        try:
            _require_space(self._folder, sum(leaf.nbytes for leaf in jax.tree.leaves(tree)))
            self._manager.save(number, args=items, force=True)
            self._manager.wait_until_finished()
        except (OSError, ValueError) as error:
            raise InputError(
                f"cannot write a checkpoint in {self._folder}: {_reason(error)}"
            ) from error
        # Orbax fails in many ways on damaged files; with their checksums it need not read them.
        write_json(self._manifest(number), _checksums(self._folder / str(number)))
        for path in self._manifest(number).parent.glob("*.json"):
            if not (self._folder / path.stem).exists():
                path.unlink(missing_ok=True)

    def _manifest(self, number: int) -> Path:
        return self._folder.with_name(f"{self._folder.name}_manifests") / f"{number}.json"

    def _is_whole(self, number: int) -> bool:
        """Compares the files with their checksums; a process may have died before writing those."""
        try:
            expected = json.loads(self._manifest(number).read_text())
        except (OSError, ValueError):
            return True
        return expected == _checksums(self._folder / str(number))

    @processes.on_first
    def cursors(self) -> list[tuple[int, dict[str, Any]]]:
        """Returns number and cursor of every readable checkpoint, newest first."""
        found = []
        for number in sorted(self._manager.all_steps(), reverse=True):
            if not self._is_whole(number):
                if found and not self._options.read_only:
                    # It was being deleted for the newer one when the process died.
                    shutil.rmtree(self._folder / str(number), ignore_errors=True)
                    self._reopen()
                else:
                    self._move_aside(number, "its files are damaged")
                continue
            try:
                items = self._manager.restore(
                    number, args=ocp.args.Composite(cursor=ocp.args.JsonRestore())
                )
                found.append((number, dict(items["cursor"])))
            except Exception as error:  # whatever a damaged file makes Orbax raise
                self._move_aside(number, _reason(error))
        return found

    def restore(self, number: int, target: Any) -> Any | None:
        """Reads the tree of a checkpoint.

        Args:
            number: from `cursors`.
            target: a tree of the wanted structure, shapes and types; its leaves that are JAX arrays
                come back in their placement, and others as arrays of the host.

        Returns:
            The tree; None, after a warning, when the checkpoint is damaged and was set aside.
        """
        leaves, structure = jax.tree.flatten(target)

        def read() -> dict[str, np.ndarray] | None:
            abstract = jax.tree.map(
                lambda leaf: np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape), target
            )
            try:
                items = self._manager.restore(
                    number, args=ocp.args.Composite(tree=ocp.args.StandardRestore(abstract))
                )
            except Exception as error:  # whatever a damaged file makes Orbax raise
                self._move_aside(number, _reason(error))
                return None
            return {str(i): leaf for i, leaf in enumerate(jax.tree.leaves(items["tree"]))}

        found = processes.from_first(read)
        if found is None:
            return None
        placed = [
            devices.put(array, leaf.sharding) if isinstance(leaf, jax.Array) else array
            for leaf, array in zip(leaves, found.values(), strict=True)
        ]
        return jax.tree.unflatten(structure, placed)

    @processes.on_first
    def set_aside(self, number: int, reason: str) -> None:
        """Moves an unusable checkpoint beside the folder, with a warning; its number is free."""
        self._move_aside(number, reason)

    def _move_aside(self, number: int, reason: str) -> None:
        place = self._folder / str(number)
        if self._options.read_only:
            _log.warning("checkpoint %s is unusable (%s)", place, reason)
            return
        aside = self._folder.with_name(f"{self._folder.name}_unusable_{number}")
        while aside.exists():
            aside = aside.with_name(f"{aside.name}_again")
        _log.warning(
            "checkpoint %s is unusable (%s); moved to %s, going back to the one before it",
            place,
            reason,
            aside.name,
        )
        os.replace(place, aside)
        self._reopen()

    def _reopen(self) -> None:
        self._manager.close()
        self._manager = ocp.CheckpointManager(self._folder, options=self._options)

    def close(self) -> None:
        """Waits for everything to be written."""
        if processes.is_first():
            self._manager.close()


def _checksums(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): sha256(path) for path in files}


def _require_space(folder: Path, size: int) -> None:
    """Raises OSError when the disk has no room; half-written checkpoints fail less legibly."""
    with tempfile.TemporaryFile(dir=folder) as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, max(size, 1))
        else:
            file.truncate(size)


def _reason(error: Exception) -> str:
    """Returns what the operating system said, or the start of a long message."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    said = re.search(r"\[OS error [^:\]]*: ?([^\]]*)\]", text)
    return said.group(1) if said else text[:200]
