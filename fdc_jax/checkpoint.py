"""Checkpoints of a run. The only file that knows Orbax.

What a run keeps is the same on all devices. It is written as arrays of the host by process 0 and
handed to the others when it is read, so that a checkpoint fits any number of devices and processes,
and its folder need not be shared between hosts.
"""

import hashlib
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
from fdc_jax.files import sha256, write_atomically

_log = logging.getLogger(__name__)

_FIRST_ALONE = ocp.options.MultiprocessingOptions(primary_host=0, active_processes={0})

# Orbax reports every step of every save, and asyncio every file of a save that failed; errors
# that matter are raised.
logging.getLogger("absl").addFilter(lambda record: record.levelno >= logging.CRITICAL)
logging.getLogger("asyncio").addFilter(lambda record: record.levelno >= logging.CRITICAL)


def _digest(tree: Any) -> str:
    """Returns the SHA-256 over names, types, shapes and bytes of all leaves."""
    total = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        array = np.asarray(leaf)
        total.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        total.update(np.ascontiguousarray(array).tobytes())
    return total.hexdigest()


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


class Checkpoints:
    """A folder of numbered checkpoints, each a pytree and a small JSON cursor.

    Args:
        folder: where they lie; made when missing.
        keep: how many of the newest stay.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 2):
        self._folder = Path(folder).absolute()
        self._keep = keep
        processes.on_first(self._make)

    def _make(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"cannot make {self._folder}: {error.strerror}") from error
        self._manager = self._open()

    def _open(self) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(
            max_to_keep=self._keep,
            enable_async_checkpointing=False,
            cleanup_tmp_directories=True,
            create=False,
            multiprocessing_options=_FIRST_ALONE,
        )
        return ocp.CheckpointManager(self._folder, options=options)

    def save(self, number: int, tree: Any, cursor: dict[str, Any]) -> None:
        """Writes a checkpoint; it exists as a whole when this returns, or not at all.

        Args:
            number: larger than every number before.
            tree: arrays.
            cursor: what says where in the run the tree belongs; JSON values.

        Raises:
            InputError: the disk refuses the write.
        """
        tree = jax.tree.map(np.asarray, devices.to_host(tree))
        processes.on_first(lambda: self._write(number, tree, cursor))

    def _write(self, number: int, tree: Any, cursor: dict[str, Any]) -> None:
        record = {**cursor, "digest": _digest(tree)}
        items = ocp.args.Composite(
            tree=ocp.args.StandardSave(tree), cursor=ocp.args.JsonSave(record)
        )
        try:
            _require_space(self._folder, sum(leaf.nbytes for leaf in jax.tree.leaves(tree)))
            self._manager.save(number, args=items, force=True)
            self._manager.wait_until_finished()
            self._write_manifest(number)
        except (OSError, ValueError) as error:
            raise InputError(
                f"cannot write a checkpoint in {self._folder}: {_reason(error)}"
            ) from error

    def _manifest(self, number: int) -> Path:
        return self._folder.with_name(f"{self._folder.name}_manifests") / f"{number}.json"

    def _write_manifest(self, number: int) -> None:
        """Keeps the checksum of every file of a checkpoint, and forgets checkpoints that are gone.

        Orbax fails in many ways on damaged files; with their checksums it need not read them.
        """
        with write_atomically(self._manifest(number)) as file:
            file.write(json.dumps(_checksums(self._folder / str(number))).encode())
        for path in self._manifest(number).parent.glob("*.json"):
            if not (self._folder / path.stem).exists():
                path.unlink(missing_ok=True)

    def _is_whole(self, number: int) -> bool:
        """Compares the files with their checksums; a process may have died before writing those."""
        try:
            expected = json.loads(self._manifest(number).read_text())
        except (OSError, ValueError):
            return True
        return expected == _checksums(self._folder / str(number))

    def cursors(self) -> list[tuple[int, dict[str, Any]]]:
        """Returns number and cursor of every readable checkpoint, newest first."""
        return [(number, cursor) for number, cursor in processes.on_first(self._cursors)]

    def _cursors(self) -> list[tuple[int, dict[str, Any]]]:
        found = []
        for number in sorted(self._manager.all_steps(), reverse=True):
            if not self._is_whole(number):
                if found:
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

    def restore(self, number: int, target: Any, cursor: dict[str, Any]) -> Any | None:
        """Reads one checkpoint into the structure of `target`.

        Args:
            number: which checkpoint.
            target: arrays, with the shardings wanted; where it has a NumPy array, one is returned.
            cursor: its cursor, as `cursors` returned it.

        Returns:
            The tree; or None, after a warning, when the checkpoint is damaged. It is then moved
            beside the folder so that its number is free.
        """
        leaves, structure = jax.tree.flatten(target)
        read: list[np.ndarray] = []

        def keep() -> bool:
            tree = self._read(number, target, cursor)
            read.extend(jax.tree.leaves(tree))
            return tree is not None

        if not processes.on_first(keep):
            return None
        everywhere = []
        for place, leaf in enumerate(leaves):
            # Others than process 0 have nothing yet; one leaf after the other, as they are large.
            array = read[place] if read else np.zeros(leaf.shape, leaf.dtype)
            array = processes.broadcast(array)
            sharding = getattr(leaf, "sharding", None)
            everywhere.append(array if sharding is None else devices.put(array, sharding))
        return jax.tree.unflatten(structure, everywhere)

    def _read(self, number: int, target: Any, cursor: dict[str, Any]) -> Any | None:
        abstract = jax.tree.map(
            lambda leaf: np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape), target
        )
        try:
            items = self._manager.restore(
                number, args=ocp.args.Composite(tree=ocp.args.StandardRestore(abstract))
            )
            tree = items["tree"]
            if _digest(tree) != cursor["digest"]:
                raise ValueError("the arrays differ from the digest in the cursor")
        except Exception as error:  # whatever a damaged file makes Orbax raise
            self._move_aside(number, _reason(error))
            return None
        return tree

    def set_aside(self, number: int, reason: str) -> None:
        """Moves an unusable checkpoint beside the folder, with a warning; its number is free."""
        processes.on_first(lambda: self._move_aside(number, reason))

    def _move_aside(self, number: int, reason: str) -> None:
        aside = self._folder.with_name(f"{self._folder.name}_unusable_{number}")
        attempt = 1
        while aside.exists():
            attempt += 1
            aside = self._folder.with_name(f"{self._folder.name}_unusable_{number}_{attempt}")
        _log.warning(
            "checkpoint %s is unusable (%s); moved to %s, going back to the one before it",
            self._folder / str(number),
            reason,
            aside.name,
        )
        os.replace(self._folder / str(number), aside)
        self._reopen()

    def _reopen(self) -> None:
        self._manager.close()
        self._manager = self._open()

    def close(self) -> None:
        """Waits for everything to be written."""
        if processes.is_first():
            self._manager.close()
