"""Archives: unpacked once, and never outside of their folder."""

import gzip
import os
import re
import shutil
import tarfile
import tracemalloc
import zipfile

import pytest

from fdc_jax.data import archive
from fdc_jax.errors import Interrupted
from tests.errors import input_error


@pytest.fixture
def unpack(tmp_path):
    """Returns a function that unpacks an archive into the cache."""
    return lambda path: archive.unpack(path, tmp_path / "cache")


@pytest.fixture
def assert_refused(tmp_path, unpack):
    """Returns a function that asserts an error in one line, after which nothing is in the cache."""

    def check(path, message):
        with input_error(message) as caught:
            unpack(path)
        text = str(caught.value)
        assert text.startswith(f"{path}: ") and text.isprintable()
        assert str(tmp_path / "cache") not in text
        assert not os.listdir(tmp_path / "cache")

    return check


def pack_zip(path, files, **options):
    """Writes a zip; the keys of `files` are names or `ZipInfo`."""
    with zipfile.ZipFile(path, "w", **options) as packed:
        for name, content in files.items():
            packed.writestr(name, content)
    return path


def pack_tar(path, files):
    path.write_bytes(gzip.compress(pack_plain_tar(path, files).read_bytes(), 0))
    return path


def pack_plain_tar(path, files):
    return pack_members(path, [regular(*item) for item in files.items()])


@pytest.mark.parametrize("pack, name", [(pack_zip, "o.zip"), (pack_tar, "o")])
def test_archive_is_unpacked_again_only_after_a_change(tmp_path, unpack, pack, name):
    first = os.urandom(300)
    path = pack(tmp_path / name, {"top/a/1.txt": first})
    folder = unpack(path)
    file = folder / "top/a/1.txt"
    assert folder.name.startswith("o-") and file.read_bytes() == first
    file.write_text("kept")
    assert unpack(path) == folder
    assert file.read_text() == "kept"
    other = pack(tmp_path / "other", {"top/a/1.txt": first[::-1]})
    shutil.copystat(path, other)  # Size and date are equal.
    assert path.stat().st_size == other.stat().st_size
    other.rename(path)
    assert (unpack(path) / "top/a/1.txt").read_bytes() == first[::-1]


def cut(content):
    return content[:1000]


def without_second_entry(content):
    start = content.index(b"PK\1\2") + 32
    return content[:start] + bytes([46 + len("b")]) + content[start + 1 :]  # a comment of the first


def with_damaged_header(content):
    return content[:2048] + bytes([content[2048] ^ 1]) + content[2049:]


# Archives of three files, a change of their bytes, and the line that names them.
DAMAGED = {
    "cut zip": (pack_zip, cut, ""),
    "cut compressed tar": (pack_tar, cut, ""),
    "lost entry of a zip": (pack_zip, without_second_entry, "expected 3 different names, found"),
    "tar cut between members": (pack_plain_tar, lambda content: content[:2048], "ends early"),
    "header of a tar": (pack_plain_tar, with_damaged_header, "a header is damaged"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_archive_is_named_and_leaves_no_folder(tmp_path, assert_refused, case):
    pack, change, message = DAMAGED[case]
    path = pack(tmp_path / "o", {name: os.urandom(300) for name in "abc"})
    path.write_bytes(change(path.read_bytes()))
    assert_refused(path, f"cannot unpack: .*({message})")


def regular(name, content=b"content", **fields):
    return name, content, fields


def special(name, kind, target=""):
    return name, b"", {"type": kind, "linkname": target}


def pack_members(path, members):
    """Writes a tar of members, with these fields of headers; `OUTSIDE` is a folder beside it."""
    outside = str(path.parent / "outside")
    with open(path, "wb") as file:
        for name, content, fields in members:
            member = tarfile.TarInfo(name.replace(OUTSIDE, outside))
            member.size = len(content)
            for field, value in fields.items():
                setattr(member, field, value)
            member.linkname = member.linkname.replace(OUTSIDE, outside)
            file.write(member.tobuf(tarfile.GNU_FORMAT) + content + bytes(-len(content) % 512))
        file.write(bytes(1024))
    return path


LINK, HARD, FOLDER = tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE


def long_chain():
    """Returns members as of CVE-2025-4517: links whose resolved path is longer than PATH_MAX."""
    long, letters, members, folder = "d" * 247, "abcdefghijklmnop", [], ""
    for letter in letters:
        members.append(special(f"{folder}{long}", FOLDER))
        members.append(special(f"{folder}{letter}", LINK, long))
        folder += f"{long}/"
    chain = "/".join(letters) + "/" + "l" * 254
    members.append(special(chain, LINK, "../" * 16))
    members.append(special("escape", LINK, f"{chain}/{'../' * 12}{OUTSIDE}"))
    return [*members, regular("escape/new")]


OUTSIDE = "{outside}"
# Members and the file that they give.
KEPT = {
    "absolute": ([regular(f"{OUTSIDE}/new")], f"{OUTSIDE}/new"),
    "link": ([special("a", LINK, OUTSIDE), regular("a/new")], "a/new"),
    "hard link": ([special("a", HARD, f"{OUTSIDE}/old"), regular("a")], "a"),
    "chain": ([special("a", LINK, "."), special("a/b", LINK, ".."), regular("a/b/c")], "a/b/c"),
    "dots": ([special("./", FOLDER), regular("././/a")], "a"),
    "sparse": ([special("a", tarfile.GNUTYPE_SPARSE), regular("c")], "c"),
}
# Members and the line that names the archive.
REFUSED = {
    "parent": ([regular("a/../../new")], "a/../../new is outside of the archive's folder"),
    "twice": ([regular("a/b"), regular("a/./b")], "a/./b occurs twice"),
    "file then folder": ([regular("a"), regular("a/b")], "a/b is in a folder that is a file, too"),
    "long path": ([regular("a/" * 30 + "/".join(["b" * 200] * 20))], "is too long, or in too many"),
    "deep": ([regular("a/" * 200 + "b")], "is too long, or in too many folders"),
    "negative": ([regular("a", b"", size=-512)], "expected a size of at least 0"),
    "short": ([regular("a", b"x" * 600, size=5000)], "cannot unpack: "),
    "CVE-2025-4517": (long_chain(), "is too long, or in too many"),
}


@pytest.fixture
def outside(tmp_path):
    """A folder with a file that no archive may change."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "old").write_text("old")
    yield folder
    assert os.listdir(folder) == ["old"]
    assert (folder / "old").read_text() == "old"


@pytest.mark.parametrize("case", KEPT)
def test_a_tar_writes_nothing_outside_its_folder(outside, unpack, case):
    members, expected = KEPT[case]
    folder = unpack(pack_members(outside.parent / "o.tar", members))
    (file,) = (path for path in folder.rglob("*") if not path.is_dir())
    assert file == folder / expected.replace(OUTSIDE, str(outside)).lstrip("/")
    assert file.read_bytes() == b"content" and not file.is_symlink()


@pytest.mark.parametrize("case", REFUSED)
def test_hostile_tar_is_refused(outside, assert_refused, case):
    members, message = REFUSED[case]
    assert_refused(pack_members(outside.parent / "o.tar", members), message)


def test_links_and_special_files_are_counted(tmp_path, unpack):
    members = [special(f"ant/{number}.png", LINK, "1.png") for number in range(4)]
    members += [special("ant/hard.png", HARD, "ant/1.png"), special("pipe", tarfile.FIFOTYPE)]
    path = pack_members(tmp_path / "o.tar", [*members, regular("ant/1.jpg")])
    text = "links in the archive: 5 (ant/0.png, ant/1.png, ant/2.png, ...); special files: 1 (pipe)"
    for _ in range(2):  # when it is unpacked, and from then on
        folder = unpack(path)
        assert archive.skipped(folder).text() == text
    archive.remove(folder)
    assert not os.listdir(tmp_path / "cache")


def test_large_headers_are_refused_before_they_are_read(tmp_path, assert_refused):
    name = b"a" * 2**24
    member = regular("././@LongLink", name, type=tarfile.GNUTYPE_LONGNAME)
    path = pack_members(tmp_path / "o.tar", [member])
    tracemalloc.start()
    assert_refused(path, "expected names and headers below")
    assert tracemalloc.get_traced_memory()[1] < 2**23
    tracemalloc.stop()


@pytest.mark.parametrize(
    "encoding, name", [("utf-8", "苹果"), ("cp437", "Äpfel"), ("gbk", "苹果"), ("latin-1", "Äpfel")]
)
def test_zip_names_are_in_utf8_or_latin_letters_of_cp437(
    tmp_path, unpack, assert_refused, encoding, name
):
    encoded = name.encode(encoding)  # without the mark of UTF-8
    stand_in = "x" * len(encoded)
    path = pack_zip(tmp_path / "o.zip", {stand_in: b"content"})
    path.write_bytes(path.read_bytes().replace(stand_in.encode(), encoded))
    if encoding in ("utf-8", "cp437"):
        assert (unpack(path) / name).exists()
    else:
        assert_refused(path, re.escape(f"expected names in UTF-8, found {encoded!r}"))


def test_signal_while_unpacking_is_not_damage(tmp_path, unpack, monkeypatch):
    path = pack_zip(tmp_path / "o.zip", {"a": b"content"})

    def stop(*_):
        raise Interrupted("stopped by SIGTERM")

    monkeypatch.setattr(zipfile.ZipFile, "open", stop)
    with pytest.raises(Interrupted):
        unpack(path)
    assert not os.listdir(tmp_path / "cache")


@pytest.mark.parametrize(
    "pack, free, limit", [(pack_zip, 2**40, "1,000"), (pack_tar, 890, "the 890 that are free")]
)
def test_archive_that_would_fill_the_disk_is_refused(
    tmp_path, unpack, assert_refused, monkeypatch, pack, free, limit
):
    monkeypatch.setattr(archive, "ALWAYS_ALLOWED", 1000)
    monkeypatch.setattr(archive, "LARGEST_RATIO", 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(free, 0, free))
    archive.remove(unpack(pack(tmp_path / "o", {"a": bytes(890)})))
    path = pack(tmp_path / "o", {"a": bytes(1001)})
    assert_refused(path, f"expected at most {limit} bytes when unpacked")
