"""Checkpoints: types survive, damage is noticed, the one before it is used."""

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
    yield checkpoints


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


def damage(path, kind):
    content = bytearray(path.read_bytes())
    middle = slice(len(content) // 2, len(content) // 2 + 16)
    content[middle] = bytes(byte ^ 0xFF for byte in content[middle])
    path.write_bytes({"flipped": content, "truncated": content[:40]}.get(kind, b""))


@pytest.mark.parametrize("kind", ["truncated", "flipped", "empty"])
def test_a_damaged_checkpoint_is_set_aside(filled, tmp_path, caplog, kind):
    path = tmp_path / "checkpoints" / "3.npz"
    damage(path, kind)
    passed_over = Checkpoints(tmp_path / "checkpoints", read_only=True)
    assert numbers(passed_over) == [2] and path.exists()
    caplog.clear()
    number, _, used = newest(filled)
    assert number == 2
    assert_equal_trees(used, make_tree(2))
    assert f"checkpoint {path} is unusable (" in caplog.text
    assert (tmp_path / "checkpoints_unusable_3.npz").exists()
    # Its number is free again.
    filled.save(3, make_tree(7), {"tasks_done": 3})
    number, _, used = newest(filled)
    assert number == 3
    assert_equal_trees(used, make_tree(7))


def test_a_checkpoint_of_another_form_is_set_aside(filled, caplog):
    """As after a change of a learner's file."""
    others = filled.newest(lambda cursor: make_tree() | {"state": {"A": jnp.zeros(5)}})
    assert list(others) == []
    assert "unusable (expected float32[5] at ['state']['A'])" in caplog.text


def test_types_that_numpy_does_not_know_survive(tmp_path):
    checkpoints, tree = Checkpoints(tmp_path), {"a": jnp.arange(3, dtype=jnp.bfloat16)}
    checkpoints.save(1, tree, {})
    ((_, _, found),) = checkpoints.newest(lambda cursor: tree)
    assert found["a"].dtype == jnp.bfloat16
    assert_equal_trees(found, tree)


def test_an_interrupted_save_leaves_nothing(filled, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(np, "savez", fail)
        with pytest.raises(ValueError, match=r"cannot write .*4.npz: No space left"):
            filled.save(4, make_tree(), {"tasks_done": 4})
    left = tmp_path / "checkpoints" / ".4.npz.0123abcd"  # of a process that was killed
    left.write_bytes(b"half")
    assert numbers(Checkpoints(tmp_path / "checkpoints")) == [3, 2]
    assert not left.exists()
