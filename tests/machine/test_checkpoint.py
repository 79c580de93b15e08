"""Checkpoints: types survive, damage is noticed, the one before it is used."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fdc_jax.heads import LinearHead
from fdc_jax.machine.checkpoint import Checkpoints


def make_tree(offset=0.0):
    trained = {"head": LinearHead(jnp.full((2, 3), float(offset)), jnp.zeros(2))}
    return {
        "state": {"A": jnp.arange(4.0) + offset},
        "trained": trained,
        "optimizer": optax.scale_by_adam().init(trained),
    }


def assert_equal_trees(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, one, other)


def newest(checkpoints):
    return next(checkpoints.newest(lambda cursor: make_tree()))


def numbers(checkpoints):
    return [number for number, _, _ in checkpoints.newest(lambda cursor: make_tree())]


@pytest.fixture
def filled(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    for number in range(1, 4):
        checkpoints.save(number, make_tree(number), {"tasks_done": number})
    return checkpoints


def test_round_trip_keeps_types_values_and_cursor(filled):
    number, cursor, restored = newest(filled)
    assert (number, cursor["tasks_done"]) == (3, 3)
    assert_equal_trees(restored, make_tree(3))
    assert isinstance(restored["trained"]["head"], LinearHead)
    assert isinstance(restored["optimizer"], optax.ScaleByAdamState)


def test_numpy_arrays_come_back_as_numpy_arrays(tmp_path):
    """And nothing of their size is put on a device on the way."""
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    large = np.random.default_rng(0).normal(size=(50, 40, 10)).astype(np.float32)
    tree = {"host": large, "device": jnp.arange(3.0), "both": LinearHead(large[0], jnp.ones(40))}
    checkpoints.save(1, tree, {"tasks_done": 1})
    target = tree | {"host": np.zeros_like(large)}
    before = {id(array) for array in jax.live_arrays()}
    ((_, _, restored),) = checkpoints.newest(lambda cursor: target)
    assert_equal_trees(restored, tree)
    assert type(restored["host"]) is type(restored["both"].weight) is np.ndarray
    assert isinstance(restored["device"], jax.Array)
    assert isinstance(restored["both"].bias, jax.Array)
    new = [array.size for array in jax.live_arrays() if id(array) not in before]
    assert max(new) == 40


@pytest.mark.parametrize("kind", ["flipped", "truncated", "emptied", "foreign"])
def test_a_damaged_checkpoint_is_set_aside(filled, tmp_path, caplog, kind):
    path = tmp_path / "checkpoints" / "000000003.npz"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    np.savez(tmp_path / "other.npz", a=np.arange(3))
    foreign = (tmp_path / "other.npz").read_bytes()
    damaged = {"flipped": content, "truncated": content[:40], "emptied": b"", "foreign": foreign}
    path.write_bytes(damaged[kind])
    with caplog.at_level(logging.WARNING):
        number, _, used = newest(filled)
    assert number == 2
    assert_equal_trees(used, make_tree(2))
    assert f"checkpoint {path} is unusable (" in caplog.text
    assert path.with_suffix(".unusable").exists()
    # Its number is free again.
    filled.save(3, make_tree(7), {"tasks_done": 3})
    number, _, used = newest(filled)
    assert number == 3
    assert_equal_trees(used, make_tree(7))


def test_another_form_is_set_aside_and_a_reader_changes_nothing(filled, tmp_path, caplog):
    readers = Checkpoints(tmp_path / "checkpoints", read_only=True)
    wider = {**make_tree(), "state": {"A": jnp.arange(5.0)}}
    assert list(readers.newest(lambda cursor: wider)) == []
    assert "its arrays are not those of this run" in caplog.text
    assert numbers(filled) == [3, 2]


def test_types_that_numpy_lacks_come_back_bit_for_bit(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    tree = {"a": jnp.array([1.5, -0.0, jnp.nan], jnp.bfloat16), "b": np.array(3, np.int8)}
    checkpoints.save(1, tree, {})
    ((_, _, found),) = checkpoints.newest(lambda cursor: tree)
    assert found["a"].dtype == jnp.bfloat16
    for name, leaf in tree.items():
        assert np.asarray(found[name]).tobytes() == np.asarray(leaf).tobytes()


def test_an_interrupted_save_leaves_nothing(filled, tmp_path, monkeypatch):
    """What a killed process was writing goes with the next checkpoint."""
    left = tmp_path / "checkpoints" / ".000000004.npz.0123abcd"
    left.write_bytes(b"half")

    def fail(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", fail)
        with pytest.raises(ValueError, match=r"cannot write .*000000004.npz: No space left"):
            filled.save(4, make_tree(), {"tasks_done": 4})
    assert numbers(filled) == [3, 2]
    filled.save(5, make_tree(), {"tasks_done": 5})
    assert sorted(path.name for path in left.parent.iterdir()) == [
        "000000003.npz",
        "000000005.npz",
    ]
