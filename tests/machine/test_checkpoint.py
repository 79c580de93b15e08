"""Checkpoints: types survive, damage is noticed, the one before it is used."""

import shutil
import signal
import time

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
from tests.errors import input_error, stale


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
    """Returns number and tree of the newest usable checkpoint."""
    number, cursor = checkpoints.newest()
    assert cursor == {"tasks_done": number}
    return number, checkpoints.read(number, make_tree())


def save(checkpoints, number, tree):
    files = {"numbers.npz": lambda path: np.savez(path, number=number)}
    checkpoints.save(number, {"tasks_done": number}, tree, files)
    checkpoints.wait()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder in which three checkpoints were saved, and two kept."""
    folder = tmp_path_factory.mktemp("written") / "checkpoints"
    checkpoints = Checkpoints(folder, keep=2)
    for number in range(1, 4):
        save(checkpoints, number, make_tree(number))
    return folder


@pytest.fixture
def filled(written, tmp_path):
    return Checkpoints(shutil.copytree(written, tmp_path / "checkpoints"), keep=2)


def test_round_trip_keeps_types_values_and_files(filled):
    number, restored = newest(filled)
    assert number == 3
    assert_equal_trees(restored, make_tree(3))
    assert isinstance(restored["trained"]["head"], LinearHead)
    assert isinstance(restored["optimizer"], optax.ScaleByAdamState)
    for number in (2, 3):
        path = filled.folder / str(number) / "calibrators" / "numbers.npz"
        assert np.load(path)["number"] == number


def full_disk(*arguments, **options):
    raise InputError("cannot write x: No space left on device")


@pytest.mark.parametrize(
    "name",
    [
        "numpy.savez",
        "orbax.checkpoint.CheckpointManager.save",
        "fdc_jax.machine.checkpoint.write_manifest",
    ],
)
def test_full_disk_is_one_line_and_earlier_checkpoints_stay(filled, monkeypatch, name):
    """The failed save says so, or else the next one, or the end of the run."""
    calibrators = {"numbers.npz": lambda path: np.savez(path, number=4)}
    for ask in (filled.wait, lambda: filled.save(5, {}, make_tree(), {}), filled.close):
        with monkeypatch.context() as patch:
            patch.setattr(name, full_disk)
            with input_error(r"cannot write a checkpoint in .*No space left"):
                filled.save(4, {}, make_tree(), calibrators)
                ask()
        assert newest(filled)[0] == 3


def test_numpy_arrays_come_back_as_numpy_arrays(tmp_path):
    """And nothing of their size is put on a device on the way."""
    checkpoints, large = Checkpoints(tmp_path / "checkpoints"), np.ones((50, 400), np.float32)
    tree = {"host": large, "both": LinearHead(large[0], jnp.ones(40))}
    save(checkpoints, 1, tree)
    before = {id(array) for array in jax.live_arrays()}
    restored = checkpoints.read(1, tree | {"host": np.zeros_like(large)})
    assert_equal_trees(restored, tree)
    assert jax.tree.map(type, restored) == jax.tree.map(type, tree)
    new = [array.size for array in jax.live_arrays() if id(array) not in before]
    assert max(new) == 40


# The files of a checkpoint, and how their bytes change; None deletes them.
DAMAGES = {
    "truncated": ("tree/**/d/*", lambda content: content[:40]),
    "flipped": ("tree/**/d/*", lambda content: content[:-1] + bytes([content[-1] ^ 1])),
    "deleted": ("tree", None),
    "no manifest": ("manifest.json", None),
    "empty metadata": ("_CHECKPOINT_METADATA", lambda content: b""),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_is_set_aside(filled, tmp_path, caplog, kind):
    pattern, change = DAMAGES[kind]
    paths = [*(filled.folder / "3").glob(pattern)]
    assert paths
    for path in paths:
        if change:
            path.write_bytes(change(path.read_bytes()))
        else:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert newest(Checkpoints(filled.folder, read_only=True))[0] == 2
    assert (filled.folder / "3").exists()
    again = Checkpoints(filled.folder)
    number, tree = newest(again)
    assert number == 2
    assert_equal_trees(tree, make_tree(2))
    assert f"checkpoint {filled.folder / '3'} is unusable" in caplog.text
    assert (tmp_path / "checkpoints_unusable_3").is_dir()
    # Its number is free again.
    save(again, 3, make_tree(7))
    number, tree = newest(again)
    assert number == 3
    assert_equal_trees(tree, make_tree(7))


def test_half_deleted_checkpoint_is_not_reported(filled, tmp_path, caplog):
    shutil.rmtree(filled.folder / "2" / "tree")
    again = Checkpoints(filled.folder, keep=2)
    assert newest(again)[0] == 3
    save(again, 4, make_tree(4))
    assert newest(again)[0] == 4 and not caplog.text
    assert {path.name for path in filled.folder.iterdir()} == {"3", "4"}
    assert [*tmp_path.iterdir()] == [filled.folder]


# Places in which a network disk may fail while the bytes of a checkpoint are right.
READS = ["fdc_jax.machine.files.sha256", "fdc_jax.machine.files.open_regular", "json.loads"]
READS += ["orbax.checkpoint.StandardCheckpointHandler.restore", "pathlib.Path.iterdir"]


@pytest.mark.parametrize("name", READS)
def test_intact_checkpoint_stays_when_a_read_fails(filled, tmp_path, monkeypatch, name):
    again = Checkpoints(filled.folder)
    before = small_runs.contents(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(name, stale)
        with input_error(r"cannot read .*Stale file handle|unreadable JSON"):
            newest(again)
    assert small_runs.contents(tmp_path) == before
    assert newest(again)[0] == 3


def test_intact_checkpoint_with_other_shapes_stays(filled, tmp_path):
    """As after a change of the code of a learner."""
    target = make_tree() | {"state": {"A": jnp.arange(5.0)}}
    with input_error(r"cannot read checkpoint .*3, .*expected \(5,\)"):
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


@pytest.mark.ci
def test_every_finished_checkpoint_has_its_manifest(tmp_path):
    """Nothing is left to write when a checkpoint gets its name."""
    folder = tmp_path / "checkpoints"
    small_runs.python("-c", KILLED_AT_THE_RENAME, folder, expected=-signal.SIGKILL)
    (unfinished,) = folder.glob("2.*")
    files.check_manifest(unfinished, "")
    kept = Checkpoints(folder)
    assert kept.newest() == (1, {})
    kept.save(2, {}, {"A": np.zeros(3)}, {})
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
    save(checkpoints, 1, make_tree(1))
    files.check_manifest(checkpoints.folder / "1", "")
    assert newest(checkpoints)[0] == 1


def test_checkpoint_has_the_values_at_its_save(filled):
    """Though the arrays change while it is written."""
    tree = {"A": np.zeros(1000, np.float32)}
    filled.save(4, {}, tree, {})
    tree["A"][:] = 1
    filled.wait()
    assert_array_equal(filled.read(4, tree)["A"], np.zeros(1000))
