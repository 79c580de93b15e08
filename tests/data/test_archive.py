"""Archives: unpacked once, and never outside of their folder."""

import io
import os
import shutil
import tarfile
import zipfile

import pytest

from fdc_jax.data import archive
from fdc_jax.errors import InputError


def pack_zip(path, content):
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr("top/a/1.txt", content)


def pack_tar(path, content):
    with tarfile.open(path, "w:gz") as packed:
        member = tarfile.TarInfo("top/a/1.txt")
        member.size = len(content)
        packed.addfile(member, io.BytesIO(content))


PACKED = pytest.mark.parametrize(
    ("pack", "name"), [(pack_zip, "o.zip"), (pack_tar, "o.tar.gz"), (pack_tar, "o")]
)


@PACKED
def test_an_archive_is_unpacked_once_until_it_changes(tmp_path, pack, name):
    path = tmp_path / name
    pack(path, b"content")
    folder = archive.unpack(path, tmp_path / "cache")
    assert folder.name.startswith("o-")
    assert (folder / "top/a/1.txt").read_bytes() == b"content"
    (folder / "top/a/1.txt").write_text("kept")
    assert archive.unpack(path, tmp_path / "cache") == folder
    assert (folder / "top/a/1.txt").read_text() == "kept"
    pack(path, b"another content")
    folder = archive.unpack(path, tmp_path / "cache")
    assert (folder / "top/a/1.txt").read_bytes() == b"another content"


def test_archives_of_one_size_and_date_are_told_apart(tmp_path):
    path, other = tmp_path / "o.zip", tmp_path / "other"
    pack_zip(path, b"one" * 100)
    pack_zip(other, b"two" * 100)
    shutil.copystat(path, other)
    assert path.stat().st_size == other.stat().st_size
    first = archive.unpack(path, tmp_path / "cache")
    other.rename(path)
    second = archive.unpack(path, tmp_path / "cache")
    assert (first / "top/a/1.txt").read_bytes() == b"one" * 100
    assert (second / "top/a/1.txt").read_bytes() == b"two" * 100


@PACKED
def test_damaged_archives(tmp_path, pack, name):
    pack(tmp_path / name, os.urandom(5000))
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[:2500])
    with pytest.raises(InputError, match=f"{name}: cannot unpack: .*"):
        archive.unpack(tmp_path / name, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize(
    ("name", "link"), [("../../escaped.png", None), ("link.png", "/etc/passwd")]
)
def test_archives_cannot_write_or_read_outside(tmp_path, name, link):
    path = tmp_path / "o.tar"
    with tarfile.open(path, "w") as packed:
        member = tarfile.TarInfo(name)
        if link:
            member.type, member.linkname = tarfile.SYMTYPE, link
        packed.addfile(member, io.BytesIO())
    message = rf"o.tar: cannot unpack: {name} is no file, or outside of the archive's folder$"
    with pytest.raises(InputError, match=message):
        archive.unpack(path, tmp_path / "cache")
    assert not list(tmp_path.rglob("escaped.png"))


def test_a_lost_entry_of_a_zip_is_noticed(tmp_path):
    with zipfile.ZipFile(tmp_path / "o.zip", "w") as packed:
        for name in "abc":
            packed.writestr(f"{name}.png", b"content")
    content = bytearray((tmp_path / "o.zip").read_bytes())
    content[content.index(b"PK\1\2") + 32] = 46 + len("b.png")  # b's entry is a's comment.
    (tmp_path / "o.zip").write_bytes(content)
    with pytest.raises(
        InputError, match=r"o.zip: cannot unpack: expected 3 different names, found"
    ):
        archive.unpack(tmp_path / "o.zip", tmp_path / "cache")


def test_paths_of_windows_programs_are_folders(tmp_path):
    with zipfile.ZipFile(tmp_path / "o.zip", "w") as packed:
        member = zipfile.ZipInfo("x")
        member.filename = "top\\ant\\..\\..\\..\\1.png"
        packed.writestr(member, b"content")
    folder = archive.unpack(tmp_path / "o.zip", tmp_path / "cache")
    assert (folder / "top/ant/1.png").read_bytes() == b"content"


@pytest.mark.parametrize(("pack", "name"), [(pack_zip, "o.zip"), (pack_tar, "o.tar.gz")])
@pytest.mark.parametrize(("free", "limit"), [(2**40, "1,000"), (900, "the 900 that are free")])
def test_an_archive_that_grows_beyond_measure_is_refused(
    tmp_path, monkeypatch, pack, name, free, limit
):
    monkeypatch.setattr(archive, "_ALWAYS_ALLOWED", 1000)
    monkeypatch.setattr(archive, "_LARGEST_RATIO", 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(free, 0, free))
    pack(tmp_path / name, bytes(890))
    archive.unpack(tmp_path / name, tmp_path / "cache")
    pack(tmp_path / name, bytes(1001))
    with pytest.raises(InputError, match=f"{name}: expected at most {limit} bytes when unpacked"):
        archive.unpack(tmp_path / name, tmp_path / "cache")
    assert len([*(tmp_path / "cache").iterdir()]) == 1
