"""Files are whole or absent; pipes and devices are none; locks keep others out."""

import errno
import fcntl
import os

import numpy as np
import pytest

from fdc_jax.errors import InputError
from fdc_jax.machine.files import (
    check_writable_folder,
    locked,
    open_regular,
    read_folder,
    read_json,
    read_npy,
    read_npz,
    read_safetensors,
    sha256,
    write_atomically,
    write_npz,
)


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


def test_a_path_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    path = tmp_path / "file" / "below"
    with pytest.raises(InputError, match=f"cannot write {path}: "), write_atomically(path):
        pass


def test_files_are_for_whom_the_umask_admits_and_it_is_never_changed(tmp_path, monkeypatch):
    """Not even for an instant, in which another thread would make files for everybody."""
    before = os.umask(0o027)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(os, "umask", lambda mask: pytest.fail("changed the umask"))
            write_npz(tmp_path / "x.npz", {"a": [1]})
    finally:
        os.umask(before)
    assert (tmp_path / "x.npz").stat().st_mode & 0o777 == 0o640


# Reading what is no file --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("read", "name"),
    [
        (read_json, "x.json"),
        (read_npy, "x.npy"),
        (read_folder, ""),
        (read_npz, "x.npz"),
        (read_safetensors, "x.safetensors"),
        (sha256, "x"),
    ],
)
def test_no_reader_waits_for_a_pipe(tmp_path, read, name):
    os.mkfifo(tmp_path / (name or "x.npy"))
    with pytest.raises((InputError, OSError), match="expected a regular file, found a pipe"):
        read(tmp_path / name)


@pytest.mark.parametrize("path", ["/dev/zero", "/"])
def test_devices_and_folders_are_no_files(path):
    with pytest.raises(OSError, match="expected a regular file"):
        open_regular(path)


def test_an_archive_whose_directory_lost_a_member_is_damaged(tmp_path):
    """As where one flipped bit makes the last entry of the directory a comment of that before."""
    path = tmp_path / "x.npz"
    write_npz(path, {"a": np.arange(3), "b": np.arange(4)})
    content = bytearray(path.read_bytes())
    last = content.rindex(b"PK\1\2")
    entry = content.rindex(b"PK\1\2", 0, last)
    content[entry + 32 : entry + 34] = (content.rindex(b"PK\5\6") - last).to_bytes(2, "little")
    path.write_bytes(content)
    with np.load(path) as file:
        assert file.files == ["a"]
    with pytest.raises(InputError, match=r"npz: not a readable .*: its directory lacks"):
        read_npz(path)


# Locks --------------------------------------------------------------------------------------------


def test_a_lock_is_no_link(tmp_path):
    victim, folder = tmp_path / "victim", tmp_path / "folder"
    victim.write_text("kept")
    folder.mkdir()
    (folder / ".lock").symlink_to(victim)
    with pytest.raises(InputError, match=r"cannot write .*lock"), locked(folder):
        pytest.fail("locked a link")
    assert victim.read_text() == "kept"


def test_a_file_without_its_lock_is_left_as_it_is(tmp_path, monkeypatch):
    def flock(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    (tmp_path / ".lock").write_text("of somebody")
    monkeypatch.setattr(fcntl, "flock", flock)
    with locked(tmp_path):
        assert (tmp_path / ".lock").read_text() == "of somebody"
    assert (tmp_path / ".lock").read_text() == "of somebody"


# Folders to write in ------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_made_is_refused_before_any_work(tmp_path, monkeypatch):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name, reason in (
        ("x" * 300, "File name too long"),
        ("y/" * 3000, "File name too long"),
        ("loop/out", "Too many levels of symbolic links"),
    ):
        with pytest.raises(InputError, match=f"^--output=.*: {reason}$") as caught:
            check_writable_folder("--output", tmp_path / name)
        assert len(str(caught.value)) < 300
    check_writable_folder("--output", tmp_path / "new" / "folder")
    closed = PermissionError(errno.EACCES, "Permission denied")
    monkeypatch.setattr("pathlib.Path.stat", lambda *_: (_ for _ in ()).throw(closed))
    with pytest.raises(InputError, match=r"^--output=/closed/x: Permission denied$"):
        check_writable_folder("--output", "/closed/x")


def test_what_a_killed_writer_left_is_removed_and_what_another_writes_is_not(tmp_path):
    left = tmp_path / ".x.json.0123abcd"
    left.write_bytes(b"half")
    with write_atomically(tmp_path / "x.json") as first:
        first.write(b"1")
        with write_atomically(tmp_path / "x.json") as second:
            second.write(b"2")
        assert not left.exists()
    assert [each.name for each in tmp_path.iterdir()] == ["x.json"]
    assert (tmp_path / "x.json").read_bytes() == b"1"
