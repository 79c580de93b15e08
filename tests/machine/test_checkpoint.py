"""Checkpoints: types survive, damage is noticed, the one before it is used."""

import errno
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from etils import epath
from numpy.testing import assert_array_equal

from fdc_jax.errors import InputError
from fdc_jax.heads import LinearHead
from fdc_jax.machine import files
from fdc_jax.machine.checkpoint import Checkpoints
from tests import small_runs


def make_tree(offset=0.0):
    trained = {"head": LinearHead(jnp.full((2, 3), float(offset)), jnp.zeros(2))}
    return {
        "state": {"A": jnp.arange(4.0) + offset},
        "trained": trained,
        "optimizer": optax.scale_by_adam().init(trained),
    }


def assert_equal_trees(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(assert_array_equal, one, other)


def newest(checkpoints):
    """Returns number, cursor and tree of the newest usable checkpoint."""
    number, cursor = checkpoints.newest()
    return number, cursor, checkpoints.read(number, make_tree())


def save(checkpoints, number, tree):
    files = {"numbers.npz": lambda path: np.savez(path, number=number)}
    checkpoints.save(number, {"tasks_done": number}, tree, files)
    checkpoints.wait()


@pytest.fixture
def filled(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    for number in range(1, 4):
        save(checkpoints, number, make_tree(number))
    yield checkpoints


def test_round_trip_keeps_types_values_and_cursor(filled):
    number, cursor, restored = newest(filled)
    assert (number, cursor["tasks_done"]) == (3, 3)
    assert_equal_trees(restored, make_tree(3))
    assert isinstance(restored["trained"]["head"], LinearHead)
    assert isinstance(restored["optimizer"], optax.ScaleByAdamState)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff{}", b'{"init_timestamp_nsecs": {}}'])
def test_damaged_metadata_of_one_checkpoint(filled, tmp_path, caplog, content):
    folder = tmp_path / "checkpoints"
    (folder / "3" / "_CHECKPOINT_METADATA").write_bytes(content)
    assert newest(Checkpoints(folder, read_only=True))[0] == 2
    assert (folder / "3").exists()
    assert newest(Checkpoints(folder))[0] == 2
    assert (tmp_path / "checkpoints_unusable_3").exists()
    assert "checkpoints/3 is unusable" in caplog.text


def test_files_are_part_of_a_checkpoint(filled, tmp_path):
    for number in (2, 3):
        folder = tmp_path / "checkpoints" / str(number) / "calibrators"
        assert np.load(folder / "numbers.npz")["number"] == number


def test_failed_file_fails_the_checkpoint(filled, tmp_path):
    def fail(path):
        raise InputError(f"cannot write {path}: No space left on device")

    with pytest.raises(InputError, match=r"cannot write a checkpoint in .*No space left"):
        filled.save(4, {}, make_tree(), {"numbers.npz": fail})
        filled.wait()
    assert newest(filled)[0] == 3


def test_numpy_arrays_come_back_as_numpy_arrays(tmp_path):
    """And nothing of their size is put on a device on the way."""
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    large = np.random.default_rng(0).normal(size=(50, 40, 10)).astype(np.float32)
    tree = {"host": large, "device": jnp.arange(3.0), "both": LinearHead(large[0], jnp.ones(40))}
    save(checkpoints, 1, tree)
    target = tree | {"host": np.zeros_like(large)}
    before = {id(array) for array in jax.live_arrays()}
    restored = checkpoints.read(1, target)
    assert_equal_trees(restored, tree)
    assert type(restored["host"]) is type(restored["both"].weight) is np.ndarray
    assert isinstance(restored["device"], jax.Array)
    assert isinstance(restored["both"].bias, jax.Array)
    new = [array.size for array in jax.live_arrays() if id(array) not in before]
    assert max(new) == 40


def data_files(folder: Path):
    return [path for path in folder.rglob("*") if path.is_file() and path.parent.name == "d"]


def damage(folder, kind):
    if kind == "deleted":
        shutil.rmtree(folder / "tree")
    if kind == "no manifest":
        (folder / "manifest.json").unlink()
    if kind == "no calibrator":
        (folder / "calibrators" / "numbers.npz").unlink()
    files = []
    if kind == "cursor":
        files = [folder / "cursor" / "metadata"]
    elif kind in ("truncated", "flipped"):
        files = data_files(folder)
    for path in files:
        content = bytearray(path.read_bytes())
        middle = slice(len(content) // 2, len(content) // 2 + 16)
        content[middle] = bytes(byte ^ 0xFF for byte in content[middle])
        path.write_bytes({"flipped": content, "truncated": content[:40]}.get(kind, b"{"))


KINDS = ("truncated", "flipped", "deleted", "cursor", "no manifest", "no calibrator")


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_checkpoint_is_set_aside(filled, tmp_path, caplog, kind):
    newest_folder = tmp_path / "checkpoints" / "3"
    assert data_files(newest_folder)
    damage(newest_folder, kind)
    with caplog.at_level(logging.WARNING):
        number, _, used = newest(filled)
    assert number == 2
    assert_equal_trees(used, make_tree(2))
    assert f"checkpoint {newest_folder} is unusable (its files are damaged)" in caplog.text
    assert (tmp_path / "checkpoints_unusable_3").is_dir()
    # Its number is free again.
    save(filled, 3, make_tree(7))
    number, _, used = newest(filled)
    assert number == 3
    assert_equal_trees(used, make_tree(7))


def test_half_deleted_checkpoint_is_not_reported(filled, tmp_path, caplog):
    shutil.rmtree(tmp_path / "checkpoints" / "2" / "tree")
    with caplog.at_level(logging.WARNING):
        again = Checkpoints(tmp_path / "checkpoints", keep=2)
        number, _, tree = newest(again)
        save(again, 4, make_tree(4))
    assert number == 3 and not caplog.text
    assert not (tmp_path / "checkpoints" / "2").exists()
    assert not list(tmp_path.glob("checkpoints_unusable*"))
    assert_equal_trees(tree, make_tree(3))
    assert newest(again)[0] == 4


def test_an_interrupted_save_leaves_nothing(filled, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("orbax.checkpoint.CheckpointManager.save", fail)
    with pytest.raises(ValueError, match=r"cannot write a checkpoint in .*No space left"):
        save(filled, 4, make_tree())
    assert newest(filled)[0] == 3


def stale(*arguments, **options):
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


# Places in which a network disk may fail while the bytes of a checkpoint are right.
READS = ["fdc_jax.machine.files.sha256", "fdc_jax.machine.files.open_regular", "json.loads"]
READS += ["orbax.checkpoint.StandardCheckpointHandler.restore", "pathlib.Path.iterdir"]


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("name", READS)
def test_intact_checkpoint_stays_when_a_read_fails(filled, tmp_path, monkeypatch, name, read_only):
    again = Checkpoints(tmp_path / "checkpoints", read_only=read_only)
    before = small_runs.contents(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(name, stale)
        with pytest.raises(InputError, match=r"cannot read .*Stale file handle|unreadable JSON"):
            newest(again)
    assert small_runs.contents(tmp_path) == before
    assert newest(again)[0] == 3


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every folder")
def test_intact_checkpoint_stays_when_a_folder_is_closed(filled, tmp_path):
    closed = tmp_path / "checkpoints" / "3" / "tree"
    closed.chmod(0)
    try:
        with pytest.raises(InputError, match=r"cannot read .*tree: Permission denied"):
            newest(filled)
    finally:
        closed.chmod(0o700)
    assert newest(filled)[0] == 3


def test_intact_checkpoint_with_other_shapes_stays(filled, tmp_path):
    """As after a change of the code of a learner."""
    target = make_tree() | {"state": {"A": jnp.arange(5.0)}}
    with pytest.raises(InputError, match=r"cannot read checkpoint .*3, .*expected \(5,\)"):
        filled.read(3, target)
    assert newest(filled)[0] == 3


KILLED_AT_THE_RENAME = """
import os, signal, sys
import numpy as np
from fdc_jax.machine.checkpoint import Checkpoints
checkpoints, rename = Checkpoints(sys.argv[1]), os.rename
def killed(source, target, *arguments, **options):
    if os.path.basename(str(target)) == "2":
        os.kill(os.getpid(), signal.SIGKILL)
    rename(source, target, *arguments, **options)
for number in (1, 2):
    checkpoints.save(number, {}, {"A": np.arange(3.0)}, {})
    checkpoints.wait()
    os.rename = os.replace = killed
"""


def test_every_finished_checkpoint_has_its_manifest(tmp_path):
    """Nothing is left to write when a checkpoint gets its name."""
    folder = tmp_path / "checkpoints"
    command = [sys.executable, "-c", KILLED_AT_THE_RENAME, folder]
    assert subprocess.run(command, cwd=small_runs.REPOSITORY).returncode == -signal.SIGKILL
    assert (folder / "1" / "manifest.json").exists()
    (unfinished,) = folder.glob("2.*")
    files.check_manifest(unfinished, "")
    target = {"A": np.zeros(3)}
    kept = Checkpoints(folder)
    assert kept.newest() == (1, {})
    kept.save(2, {}, target, {})
    kept.wait()
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2"]


def test_metadata_that_are_written_late_are_in_the_manifest(tmp_path, monkeypatch):
    path_type = type(epath.Path(tmp_path))
    write = path_type.write_text

    def write_late(path, text, *arguments, **options):
        if path.name == "_CHECKPOINT_METADATA":
            time.sleep(0.3)
        return write(path, text, *arguments, **options)

    monkeypatch.setattr(path_type, "write_text", write_late)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    for number in (1, 2):
        save(checkpoints, number, make_tree(number))
        files.check_manifest(tmp_path / "checkpoints" / str(number), "")
    assert newest(checkpoints)[0] == 2


def test_full_disk_in_the_background_is_one_line(filled, tmp_path, monkeypatch):
    """The next save says so, or the end of the run; what was saved before stays."""

    def fail(folder):
        raise InputError(f"cannot write {folder}: No space left on device")

    for ask in (filled.wait, lambda: filled.save(5, {}, make_tree(), {}), filled.close):
        with monkeypatch.context() as patch:
            patch.setattr("fdc_jax.machine.checkpoint.write_manifest", fail)
            filled.save(4, {}, make_tree(), {})
            with pytest.raises(InputError, match=r"cannot write a checkpoint in .*No space left"):
                ask()
        assert newest(filled)[0] == 3


def test_checkpoint_has_the_values_at_its_save(filled):
    """Though the arrays change while it is written."""
    tree = {"A": np.zeros(1000, np.float32)}
    filled.save(4, {}, tree, {})
    tree["A"][:] = 1
    filled.wait()
    assert_array_equal(filled.read(4, tree)["A"], np.zeros(1000))
