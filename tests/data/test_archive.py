"""Archives: unpacked once, and never outside of their folder."""

import gzip
import io
import os
import re
import shutil
import tarfile
import tracemalloc
import zipfile

import pytest

from fdc_jax.data import archive
from fdc_jax.errors import InputError, Interrupted


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
def test_archive_is_unpacked_again_only_after_a_change(tmp_path, pack, name):
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


def test_archives_of_equal_size_and_date_are_different(tmp_path):
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
def test_damaged_archive_is_named_and_leaves_no_folder(tmp_path, pack, name):
    pack(tmp_path / name, os.urandom(5000))
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[:2500])
    with pytest.raises(InputError, match=f"{name}: cannot unpack: .*"):
        archive.unpack(tmp_path / name, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def regular(name, content=b"content", **fields):
    return name, content, fields


def special(name, kind, target="", **fields):
    return name, b"", {"type": kind, "linkname": target, **fields}


def pack_members(path, members):
    """Writes a tar archive of members; fields are those of its headers, whatever they are."""
    with open(path, "wb") as file:
        for name, content, fields in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            for field, value in fields.items():
                setattr(member, field, value)
            file.write(member.tobuf(tarfile.GNU_FORMAT) + content + bytes(-len(content) % 512))
        file.write(bytes(1024))


def long_chain(outside):
    """Returns members as of CVE-2025-4517: links whose resolved path is longer than PATH_MAX."""
    long, letters, members, folder = "d" * 247, "abcdefghijklmnop", [], ""
    for letter in letters:
        members.append(special(f"{folder}{long}", tarfile.DIRTYPE))
        members.append(special(f"{folder}{letter}", tarfile.SYMTYPE, long))
        folder += f"{long}/"
    chain = "/".join(letters) + "/" + "l" * 254
    members.append(special(chain, tarfile.SYMTYPE, "../" * len(letters)))
    up = "../" * 12 + str(outside)[1:]
    members.append(special("escape", tarfile.SYMTYPE, f"{chain}/{up}"))
    return [*members, regular("escape/new")]


LINK, HARD, FOLDER = tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE
# Members, and the files that they give or the line that names the archive.
HOSTILE = {
    "parent": ([regular("a/../../new")], "a/../../new is outside of the archive's folder"),
    "absolute": ([regular("{outside}/new")], ["{outside}/new"]),
    "link": ([special("a", LINK, "{outside}"), regular("a/new")], ["a/new"]),
    "link to a file": ([special("a", LINK, "{outside}/old"), regular("a")], ["a"]),
    "hard link": ([special("a", HARD, "{outside}/old"), regular("a")], ["a"]),
    "chain": (
        [special("a", LINK, "."), special("a/b", LINK, ".."), regular("a/b/new")],
        ["a/b/new"],
    ),
    "dots": ([special("./", FOLDER), regular("././/a")], ["a"]),
    "backslashes": ([regular("..\\new")], ["..\\new"]),
    "drive": ([regular("C:/a/b")], ["a/b"]),
    "devices": (
        [special("a", tarfile.CHRTYPE), special("b", tarfile.FIFOTYPE), regular("c")],
        ["c"],
    ),
    "sparse": ([special("a", tarfile.GNUTYPE_SPARSE), regular("c")], ["c"]),
    "twice": ([regular("a/b"), regular("a/./b")], "a/./b occurs twice"),
    "file then folder": ([regular("a"), regular("a/b")], "a/b is in a folder that is a file, too"),
    "folder then file": ([regular("a/b"), regular("a")], "a occurs twice"),
    "long name": ([regular("a" * 256)], "cannot unpack: File name too long"),
    "long path": ([regular("a/" * 30 + "/".join(["b" * 200] * 20))], "is too long, or in too many"),
    "deep": ([regular("a/" * 200 + "b")], "is too long, or in too many folders"),
    "no name": ([regular("./")], "found a file without a name"),
    "negative": ([regular("a", b"", size=-512)], "expected a size of at least 0"),
    "short": ([regular("a", b"x" * 600, size=5000)], "cannot unpack: "),
}


@pytest.mark.parametrize("name", [*HOSTILE, "CVE-2025-4517"])
def test_a_tar_writes_nothing_outside_its_folder(tmp_path, name):
    outside, cache, path = tmp_path / "outside", tmp_path / "cache", tmp_path / "o.tar"
    outside.mkdir()
    (outside / "old").write_text("old")
    members, expected = HOSTILE.get(name, (long_chain(outside), "is too long, or in too many"))

    def filled(text):
        return text.replace("{outside}", str(outside))

    members = [
        (filled(name), content, {k: filled(v) if k == "linkname" else v for k, v in fields.items()})
        for name, content, fields in members
    ]
    pack_members(path, members)
    if isinstance(expected, str):
        with pytest.raises(InputError) as error:
            archive.unpack(path, cache)
        assert str(error.value).startswith(f"{path}: ")
        assert expected in str(error.value) and str(cache) not in str(error.value)
        assert not [*cache.iterdir()]
    else:
        folder = archive.unpack(path, cache)
        files = {file for file in folder.rglob("*") if not file.is_dir()}
        assert files == {folder / filled(file).lstrip("/") for file in expected}
        assert all(file.is_file() and not file.is_symlink() for file in files)
        assert all(file.read_bytes() == b"content" for file in files)
        kinds = [fields.get("type", FOLDER) for _, _, fields in members]
        special_kinds = {kind in (LINK, HARD) for kind in kinds if kind != FOLDER}
        assert len(archive.skipped(folder).paths) == len(special_kinds)
    assert [*outside.iterdir()] == [outside / "old"]
    assert (outside / "old").read_text() == "old"


def test_links_and_special_files_are_counted(tmp_path):
    members = [
        *(special(f"ant/{n}.png", LINK, "1.png") for n in range(4)),
        special("ant/hard.png", HARD, "ant/1.png"),
        special("pipe", tarfile.FIFOTYPE),
        regular("ant/1.jpg"),
    ]
    pack_members(tmp_path / "o.tar", members)
    text = "links in the archive: 5 (ant/0.png, ant/1.png, ant/2.png, ...); special files: 1 (pipe)"
    for _ in range(2):  # when it is unpacked, and from then on
        folder = archive.unpack(tmp_path / "o.tar", tmp_path / "cache")
        assert archive.skipped(folder).text() == text
    archive.remove(folder)
    assert not [*(tmp_path / "cache").iterdir()]


@pytest.mark.parametrize(
    ("mode", "reason"),
    [(0o120777, "links in the archive"), (0o020666, "special files"), (0o010666, "special files")],
)
def test_links_and_devices_of_a_zip_are_counted(tmp_path, mode, reason):
    with zipfile.ZipFile(tmp_path / "o.zip", "w") as packed:
        member = zipfile.ZipInfo("ant/1.png")
        member.external_attr = mode << 16
        packed.writestr(member, "/etc/passwd")
        packed.writestr("ant/2.png", b"content")
    folder = archive.unpack(tmp_path / "o.zip", tmp_path / "cache")
    assert [path.name for path in folder.rglob("*.png")] == ["2.png"]
    assert archive.skipped(folder).paths == {reason: ["ant/1.png"]}


def test_large_headers_are_refused_before_they_are_read(tmp_path):
    """A name of 300 MB takes 300 kB in the archive."""
    header = tarfile.TarInfo("././@LongLink")
    header.size, header.type = 300 * 2**20, tarfile.GNUTYPE_LONGNAME
    extended = tarfile.TarInfo("pax")
    extended.size, extended.type = 300 * 2**20, tarfile.XHDTYPE
    for member in (header, extended):
        with gzip.open(tmp_path / "o.tar.gz", "wb", compresslevel=1) as file:
            file.write(member.tobuf(tarfile.GNU_FORMAT))
            for _ in range(300):
                file.write(b"a" * 2**20)
            file.write(bytes(1024))
        tracemalloc.start()
        with pytest.raises(InputError, match=r"o\.tar\.gz: expected names and headers below"):
            archive.unpack(tmp_path / "o.tar.gz", tmp_path / "cache")
        assert tracemalloc.get_traced_memory()[1] < 20 * 2**20
        tracemalloc.stop()


def test_a_zip_that_is_longer_than_it_says_is_damaged(tmp_path):
    with zipfile.ZipFile(tmp_path / "o.zip", "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("a.png", bytes(2**20))
    content = (tmp_path / "o.zip").read_bytes()
    size = (2**20).to_bytes(4, "little")
    assert content.count(size) == 2
    (tmp_path / "o.zip").write_bytes(content.replace(size, (100).to_bytes(4, "little")))
    with pytest.raises(InputError, match=r"o\.zip: cannot unpack: .*CRC"):
        archive.unpack(tmp_path / "o.zip", tmp_path / "cache")


@pytest.mark.parametrize("cut", ["between members", "in a header"])
def test_truncated_tar_is_damaged(tmp_path, cut):
    pack_members(tmp_path / "o.tar", [regular("a"), regular("b"), regular("c")])
    content = bytearray((tmp_path / "o.tar").read_bytes())
    if cut == "between members":
        del content[2048:]
    else:
        content[2048] ^= 1
    (tmp_path / "o.tar").write_bytes(content)
    with pytest.raises(InputError, match=r"o\.tar: cannot unpack: a header is damaged"):
        archive.unpack(tmp_path / "o.tar", tmp_path / "cache")
    assert not [*(tmp_path / "cache").iterdir()]


GBK = "苹果/1.png".encode("gbk")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Äpfel/1.png".encode(), "Äpfel/1.png"),  # UTF-8 without the mark
        ("Äpfel/1.png".encode("cp437"), "Äpfel/1.png"),
        (GBK, None),
        ("りんご/1.png".encode("shift_jis"), None),
        ("Äpfel/1.png".encode("latin-1"), None),
    ],
)
def test_zip_names_in_an_unknown_encoding_are_refused(tmp_path, name, expected):
    with zipfile.ZipFile(tmp_path / "o.zip", "w") as packed:
        packed.writestr("x" * len(name), b"content")
    content = (tmp_path / "o.zip").read_bytes().replace(b"x" * len(name), name)
    (tmp_path / "o.zip").write_bytes(content)
    if expected:
        folder = archive.unpack(tmp_path / "o.zip", tmp_path / "cache")
        assert (folder / expected).exists()
        return
    with pytest.raises(InputError, match="expected names in UTF-8, found ") as error:
        archive.unpack(tmp_path / "o.zip", tmp_path / "cache")
    assert str(tmp_path / "o.zip") in str(error.value) and repr(name) in str(error.value)


def test_tar_names_in_another_encoding_are_refused(tmp_path):
    with tarfile.open(tmp_path / "o.tar", "w", encoding="gbk", format=tarfile.GNU_FORMAT) as packed:
        packed.addfile(tarfile.TarInfo("苹果/1.png"))
    with pytest.raises(InputError, match=re.escape(f"expected names in UTF-8, found {GBK!r}")):
        archive.unpack(tmp_path / "o.tar", tmp_path / "cache")


def test_signal_while_unpacking_is_not_damage(tmp_path, monkeypatch):
    pack_zip(tmp_path / "o.zip", b"content")

    def stop(*_):
        raise Interrupted("stopped by SIGTERM")

    monkeypatch.setattr(archive, "_copy", stop)
    with pytest.raises(Interrupted):
        archive.unpack(tmp_path / "o.zip", tmp_path / "cache")
    assert not [*(tmp_path / "cache").iterdir()]


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
        member.filename = "C:\\top\\ant\\1.png"
        packed.writestr(member, b"content")
    folder = archive.unpack(tmp_path / "o.zip", tmp_path / "cache")
    assert (folder / "top/ant/1.png").read_bytes() == b"content"


@pytest.mark.parametrize(("pack", "name"), [(pack_zip, "o.zip"), (pack_tar, "o.tar.gz")])
@pytest.mark.parametrize(("free", "limit"), [(2**40, "1,000"), (900, "the 900 that are free")])
def test_archive_that_would_fill_the_disk_is_refused(
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
