"""Files are whole or absent."""

import numpy as np
import pytest

from fdc_jax.errors import InputError
from fdc_jax.machine.files import read_npz, write_atomically, write_npz


def test_the_file_appears_when_the_block_ends(tmp_path):
    path = tmp_path / "folder" / "file"
    with write_atomically(path) as file:
        file.write(b"new")
        assert not path.exists()
    assert path.read_bytes() == b"new"
    assert [each.name for each in path.parent.iterdir()] == ["file"]
    assert path.stat().st_mode & 0o444 == 0o444


def test_an_error_keeps_the_old_file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(RuntimeError), write_atomically(path) as file:
        file.write(b"half")
        raise RuntimeError
    assert path.read_bytes() == b"old"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_archives_are_whole_or_absent(tmp_path):
    path = tmp_path / "out" / "x.npz"
    write_npz(path, {"a": [1, 2]})
    with pytest.raises(ValueError, match=r"pickle|Object"):
        write_npz(path, {"a": np.array([object()])})
    np.testing.assert_array_equal(read_npz(path)["a"], [1, 2])


def test_a_path_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    path = tmp_path / "file" / "below"
    with pytest.raises(InputError, match=f"cannot write {path}: "), write_atomically(path):
        pass
