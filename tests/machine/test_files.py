"""Files are whole or absent, damage is noticed, locks keep others out."""

import contextlib
import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import tracemalloc
import zipfile
from pathlib import Path

import filelock
import numpy as np
import pandas as pd
import pytest

from fdc_jax.data import folder
from fdc_jax.errors import InputError
from fdc_jax.features import feature_files
from fdc_jax.machine.files import (
    InUse,
    check_writable_folder,
    csv_text,
    holder,
    locked,
    read_json,
    read_npy,
    read_npz,
    read_safetensors,
    sha256,
    user_cache,
    write_atomically,
    write_folder_atomically,
    write_npy,
    write_npz,
    write_safetensors,
)
from tests import small_runs
from tests.errors import input_error


def test_the_file_appears_when_the_block_ends(tmp_path):
    path = tmp_path / "folder" / "file"
    with write_atomically(path) as file:
        file.write(b"new")
        assert not path.exists()
    assert path.stat().st_mode & 0o444 == 0o444
    with pytest.raises(RuntimeError), write_atomically(path) as file:
        file.write(b"half")
        raise RuntimeError
    assert path.read_bytes() == b"new"
    assert [file.name for file in path.parent.iterdir()] == ["file"]


KILLED = """
import os, signal, sys
from fdc_jax.machine.files import write_atomically, write_folder_atomically
with write_atomically(sys.argv[1] + "/a.csv"), write_folder_atomically(sys.argv[1] + "/out") as out:
    (out / "part").touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_only_leftovers_of_killed_processes_are_removed(tmp_path):
    small_runs.python("-c", KILLED, tmp_path, expected=-signal.SIGKILL)
    assert len([*tmp_path.iterdir()]) == 2
    (tmp_path / ".a.csv.else-1").touch()
    with (
        write_atomically(tmp_path / "a.csv") as file,
        write_atomically(tmp_path / "a.csv") as other,
    ):
        assert len([*tmp_path.glob(".a.csv.*")]) == 3
        file.write(b"one")
        other.write(b"two")
    with write_folder_atomically(tmp_path / "out") as folder:
        assert len([*tmp_path.glob(".out.*")]) == 1 and not [*folder.iterdir()]
    assert sorted(it.name for it in tmp_path.iterdir()) == [".a.csv.else-1", "a.csv", "out"]


def test_two_writers_of_a_folder_keep_each_others_files(tmp_path):
    out = tmp_path / "out"
    with (
        input_error(r"cannot write .*out: "),
        write_folder_atomically(out) as first,
    ):
        (first / "first").touch()
        with write_folder_atomically(out) as second:
            (second / "second").touch()
        assert (first / "first").exists()
    names = [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))]
    assert names == ["out", "out/second"]


@pytest.mark.parametrize(
    "write, read",
    [
        (lambda path, a: write_npy(path, a["a"]), read_npy),
        (write_npz, read_npz),
        (write_safetensors, read_safetensors),
    ],
    ids=["npy", "npz", "safetensors"],
)
def test_truncated_or_foreign_archive_is_one_line(tmp_path, write, read):
    path = tmp_path / "x"
    write(path, {"a": np.arange(300.0)})
    read(path)
    content = path.read_bytes()
    for other in (content[: len(content) - 90], b"", b"PK\3\4", content[:-8] + b"\0" * 900):
        path.write_bytes(other)
        with input_error(f"^{path}.*: not a readable [^\n]*$"):
            read(path)


@pytest.mark.parametrize("change", ["lost", "twice"])
def test_lost_or_repeated_array_is_noticed(tmp_path, change):
    path = tmp_path / "a.npz"
    np.savez(path, a=np.zeros(2), b=np.ones(2))
    if change == "lost":  # One bit makes the entry of b the comment of the entry of a.
        content = bytearray(path.read_bytes())
        content[content.index(b"PK\1\2") + 32] = 51
        path.write_bytes(content)
    else:
        with zipfile.ZipFile(path, "a") as packed:
            packed.writestr("b", packed.read("a.npy"))
    with input_error(r"a.npz: .*: expected \d different names, found "):
        read_npz(path)


def test_arrays_far_larger_than_their_file_are_not_read(tmp_path, monkeypatch):
    """As an attack on memory: 30 MiB of zeros in a file of 0.03 MiB."""
    monkeypatch.setattr("fdc_jax.machine.files.ALWAYS_ALLOWED", 2**20)
    path = tmp_path / "x.npz"
    np.savez_compressed(path, zeros=np.zeros(30 * 2**20, np.uint8))
    tracemalloc.start()
    with input_error(f"^{path}: .*far more than the file$"):
        read_npz(path)
    assert tracemalloc.get_traced_memory()[1] < 20 * 2**20
    tracemalloc.stop()


@pytest.fixture
def flipped(tmp_path):
    """An archive of two arrays, in the second of which a bit is wrong."""
    path = tmp_path / "x.npz"
    array = np.full(3, 1.0)
    write_npz(path, {"a": np.arange(4), "unknown": array})
    content = bytearray(path.read_bytes())
    content[content.index(array.tobytes())] ^= 1
    path.write_bytes(content)
    return path


def test_names_are_checked_before_arrays_are_read(flipped):
    def check(arrays):
        assert [*arrays] == ["a", "unknown"] and arrays["a"][3] == 3
        raise InputError("unknown: unknown array")

    with input_error(f"^{flipped}: unknown: unknown array$"):
        read_npz(flipped, check)
    with input_error(f"^{flipped}: a: unknown array"):
        feature_files.load(flipped)


def test_one_flipped_bit_in_an_archive_is_noticed(flipped):
    with input_error(r"x.npz: unknown: not a readable .npz file: it is damag"):
        read_npz(flipped)


@pytest.mark.parametrize(
    "cell, written",
    [
        ("=HYPERLINK(1).png", "'=HYPERLINK(1).png"),
        ("+x", "'+x"),
        ("-1+cmd|' /C calc'!A0", "'-1+cmd|' /C calc'!A0"),
        ("@SUM(1)", "'@SUM(1)"),
        ("\tx", "'\\tx"),
        ("\r=x", "'\\r=x"),
        ("a\x1b[31m\n", "a\\x1b[31m\\n"),
        ("+0.21 ± 0.10", "+0.21 ± 0.10"),
    ],
)
def test_a_cell_of_a_table_is_never_a_formula(cell, written):
    frame = pd.DataFrame({"name": [cell], cell: [-1.5]}, index=pd.Index([cell], name="row"))
    assert csv_text(frame) == f"row,name,{written}\n{written},{written},-1.5\n"


# Locks --------------------------------------------------------------------------------------------


def test_without_locks_of_the_file_system_a_warning_is_logged(tmp_path, monkeypatch, caplog):
    def acquire(lock, blocking):
        raise OSError(errno.ENOLCK, "No locks available")

    (tmp_path / ".lock").write_text("of somebody")
    monkeypatch.setattr(filelock.FileLock, "acquire", acquire)
    with locked(tmp_path / ".lock"):
        pass
    assert (tmp_path / ".lock").read_text() == "of somebody"
    assert "the file system has no locks" in caplog.text


HOLDS = """
import pathlib, sys, time
from fdc_jax.machine.files import locked
with locked(pathlib.Path(sys.argv[1])):
    print("holds", flush=True)
    time.sleep(600)
"""


def test_a_lock_names_its_holder_and_is_free_after_a_kill(tmp_path):
    lock = tmp_path / "run" / ".lock"
    command = [sys.executable, "-c", HOLDS, lock]
    with subprocess.Popen(command, cwd=small_runs.REPOSITORY, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"holds\n"
        name = f"process {process.pid} on {socket.gethostname()}"
        assert holder(lock) == name
        with pytest.raises(InUse, match=f"{lock.parent} is in use by {name}; "), locked(lock):
            pass
        process.kill()
    assert holder(lock) == ""
    with locked(lock):
        pass
    assert os.listdir(lock.parent) == [".lock"]


FULL = """
import sys
import numpy as np
from fdc_jax.errors import InputError
from fdc_jax.machine import files
for suffix in ("npy", "npz", "safetensors", "json"):
    path = f"{sys.argv[1]}/a.{suffix}"
    write = getattr(files, f"write_{suffix}")
    array = np.zeros(10**5)
    value = {"npy": array, "json": [0] * 10**5}.get(suffix, {"a": array})
    try:
        write(path, value)
    except InputError as error:
        print(str(error).removeprefix(f"cannot write {path}: "))
"""


def test_a_full_disk_is_named_whatever_is_written(tmp_path):
    """A limit on the size of files stands for a full disk."""
    shell = 'trap "" XFSZ; ulimit -f 100; exec "$@"'
    command = ["bash", "-c", shell, "-", sys.executable, "-c", FULL, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["File too large"] * 4, done.stderr
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["symlink_to", "hardlink_to", "folder"])
def test_foreign_file_at_the_path_of_a_lock_is_unchanged(tmp_path, kind):
    """Nothing is written to a lock, so that a hard link does no harm."""
    target, lock = tmp_path / "target", tmp_path / "run" / ".lock"
    lock.parent.mkdir()
    target.write_text("of somebody")
    if kind == "folder":
        lock.mkdir()
    else:
        getattr(lock, kind)(target)
    refused = input_error(r"\.lock: expected a lock, found ")
    with contextlib.nullcontext() if kind == "hardlink_to" else refused, locked(lock):
        pass
    assert target.read_text() == "of somebody"


def test_second_process_waits_for_a_lock(tmp_path, caplog):
    path = tmp_path / "made" / ".mine.lock"
    with locked(path, wait=True):
        with open(path) as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with locked(path.with_name(".other.lock"), wait=True):
            pass
    other = open(path)
    fcntl.flock(other, fcntl.LOCK_EX)
    threading.Timer(0.2, other.close).start()
    with locked(path, wait=True):
        assert other.closed
    assert "waiting for another process that holds" in caplog.text


def test_unwritable_folder_is_refused_before_any_work(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    check_writable_folder("--output", tmp_path / "new" / "folder")
    with input_error(r"^--output=.*: expected a folder to write in, found "):
        check_writable_folder("--output", tmp_path / "file" / "below")


@pytest.mark.parametrize("kind", ["FIFO", "device", "folder"])
def test_only_regular_files_are_opened(tmp_path, kind):
    paths = {"FIFO": tmp_path / "x", "device": Path("/dev/zero"), "folder": tmp_path}
    os.mkfifo(paths["FIFO"])
    for read in (read_json, read_npy, read_npz, read_safetensors, sha256, folder.file_bytes):
        with input_error(f"^{paths[kind]}: .*regular file"):
            read(paths[kind])


def test_unwritable_cache_is_replaced_by_a_temporary_one(monkeypatch, caplog):
    monkeypatch.setenv("FDC_JAX_CACHE", "/dev/null/cache")
    folder = user_cache()
    (folder / "a").write_text("b")
    assert user_cache() == folder
    (line,) = caplog.messages
    assert line.startswith("cannot write /dev/null/cache: ")
    assert "--config.cache_dir" in line and "$FDC_JAX_CACHE" in line
