"""Checkpoints of a run. The only file that imports Orbax.

The state of a run is the same on all devices. Process 0 writes it as arrays of the host, reads it,
and sends it to the others: a checkpoint fits any number of devices and processes, and its folder
need not be shared between hosts.
"""

import contextlib
import dataclasses
import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
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
        if self._checkpoint_metadata_store is not None:  # Another thread writes Orbax's metadata.
            self._checkpoint_metadata_store.wait_until_finished()
        if self.get_final().name.isdigit():  # a checkpoint, and not an item within it
            write_manifest(Path(self.get()))
        os.replace(self.get(), self.get_final())


class _Files(ocp.CheckpointHandler):
    """The files of a checkpoint, each by its name with the function that writes it."""

    def save(self, directory: Any, args: Any) -> None:
        for name, write in args.files.items():
            write(Path(directory, name))

    def restore(self, directory: Any, args: Any) -> Path:
        return Path(directory)


@ocp.args.register_with_handler(_Files, for_save=True, for_restore=True)
@dataclasses.dataclass
class _FilesArgs(ocp.args.CheckpointArgs):
    files: Mapping[str, Callable[[Path], None]]


class Checkpoints:
    """A folder of numbered checkpoints, each whole or absent; the newest are kept.

    With `read_only` the folder must exist (else InputError), and damaged checkpoints stay in it.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 2, read_only: bool = False):
        self.folder, self._read_only = Path(folder).absolute(), read_only
        self._manager: Any = None
        self._open(keep)

    @processes.on_first
    def _open(self, keep: int) -> None:
        if self._read_only and not self.folder.is_dir():
            raise InputError(f"{self.folder}: expected a checkpoint of the run, found no folder")
        self.folder.mkdir(parents=True, exist_ok=True)
        first_alone = ocp.options.MultiprocessingOptions(primary_host=0, active_processes={0})
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            cleanup_tmp_directories=not self._read_only,
            create=False,
            lightweight_initialize=True,  # does not read metadata, which may be damaged
            read_only=self._read_only,
            multiprocessing_options=first_alone,
            temporary_path_class=_Step,
        )
        try:
            self._manager = ocp.CheckpointManager(self.folder, options=options)
        except Exception as error:  # of many types
            raise InputError(f"{self.folder}: unreadable checkpoints ({_reason(error)})") from error

    def save(
        self,
        number: int,
        cursor: dict[str, Any],
        tree: Any,
        calibrators: Mapping[str, Callable[[Path], None]],
    ) -> None:
        """Writes a checkpoint in the background, whole or not at all.

        Args:
            number: its name, larger than those before.
            cursor: JSON values.
            tree: arrays, the same on all processes.
            calibrators: functions by the name of the file that they write.

        Raises:
            InputError: this checkpoint or the one before it cannot be written.
        """
        tree = jax.tree.map(np.asarray, devices.to_host(tree))
        items = {
            "tree": ocp.args.StandardSave(tree),
            "calibrators": _FilesArgs(calibrators),
            "cursor": ocp.args.JsonSave(cursor),
        }
        self._write(number, items, sum(leaf.nbytes for leaf in jax.tree.leaves(tree)))

    @processes.on_first
    def _write(self, number: int, items: dict[str, Any], size: int) -> None:
        self.close()
        with self._writing():
            # Reserves the space once, since Orbax's errors on a full disk are hard to read.
            with tempfile.TemporaryFile(dir=self.folder) as file:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, max(size, 1))
            self._manager.save(number, args=ocp.args.Composite(**items), force=True)

    @processes.on_first
    def wait(self) -> None:
        """Waits until the last checkpoint is written; raises InputError if it cannot be."""
        self.close()

    def close(self) -> None:
        """Waits like `wait`, without other processes, which may have failed."""
        if self._manager is not None:
            with self._writing():
                self._manager.wait_until_finished()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            text = f"cannot write a checkpoint in {self.folder}: {_reason(error)}"
            raise InputError(text) from error

    @processes.on_first
    def newest(self) -> tuple[int, dict[str, Any]] | None:
        """Returns number and cursor of the newest usable checkpoint, None without any.

        A checkpoint whose bytes are not those of its manifest is set aside, with a warning.

        Raises:
            InputError: a checkpoint cannot be read, which says nothing about its bytes.
        """
        for number in sorted(self._manager.all_steps(), reverse=True):
            try:
                check_manifest(self.folder / str(number), "")
            except Damaged:
                self._set_aside(self.folder / str(number))
                continue
            return number, self._restore(number, "cursor", ocp.args.JsonRestore())
        return None

    def read(self, number: int, wanted: Any) -> Any:
        """Returns the tree of a checkpoint.

        Args:
            number: of the checkpoint.
            wanted: a tree of the same structure, shapes and types. Where it has a JAX array, the
                leaf gets its placement; other leaves are arrays of the host.

        Raises:
            InputError: the checkpoint cannot be read, or has another tree.
        """
        leaves, structure = jax.tree.flatten(wanted)
        arrays = processes.from_first(lambda: self._leaves(number, wanted)) or {}
        placed = [
            devices.put(array, leaf.sharding) if isinstance(leaf, jax.Array) else array
            for leaf, array in zip(leaves, arrays.values(), strict=True)
        ]
        return jax.tree.unflatten(structure, placed)

    def _leaves(self, number: int, wanted: Any) -> dict[str, np.ndarray]:
        abstract = jax.tree.map(  # takes no memory
            lambda leaf: np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape), wanted
        )
        arrays = jax.tree.leaves(self._restore(number, "tree", ocp.args.StandardRestore(abstract)))
        for array, leaf in zip(arrays, jax.tree.leaves(abstract), strict=True):
            if array.shape != leaf.shape:  # Orbax returns arrays of any shape.
                raise self._unreadable(number, f"expected {leaf.shape}, found {array.shape}")
        return {str(index): array for index, array in enumerate(arrays)}

    def _restore(self, number: int, item: str, options: Any) -> Any:
        try:
            items = ocp.args.Composite(**{item: options})
            return self._manager.restore(number, args=items)[item]
        except Exception as error:  # of many types
            raise self._unreadable(number, _reason(error)) from error

    def _unreadable(self, number: int, reason: str) -> InputError:
        path = self.folder / str(number)
        return InputError(f"cannot read checkpoint {path}, whose files are whole: {reason}")

    def _set_aside(self, path: Path) -> None:
        text = f"checkpoint {path} is unusable (its files are damaged)"
        if self._read_only:
            _log.warning("%s", text)
            return
        aside = self.folder.with_name(f"{self.folder.name}_unusable_{path.name}")
        while aside.exists():
            aside = aside.with_name(f"{aside.name}_again")
        _log.warning("%s; moved to %s; the checkpoint before it is used", text, aside.name)
        os.replace(path, aside)
        self._manager.reload()


def _reason(error: Exception) -> str:
    """Returns the message of the operating system, or else the start of the error's message."""
    match = re.search(r"\[OS error [^:\]]*: ?([^\]]*)\]", str(error))
    return match[1] if match else line(error)
