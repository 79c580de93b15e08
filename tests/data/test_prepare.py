import fcntl
import hashlib
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import tensorflow_datasets as tfds
from PIL import Image

from fdc_jax.data import benchmarks, cifar100, dataset, folders, prepare
from fdc_jax.errors import InputError

# As strings "10" and "100" come before "4"; one class has a single training image.
TRAIN = {"10": 3, "100": 1, "4": 2, "44": 2}
TEST = {"10": 1, "100": 2, "4": 1, "44": 1}
ORDERED = ["10", "100", "4", "44"]


def image_of(label, number):
    return np.full((7, 5, 3), (40 * label, number, 200), np.uint8)


@pytest.fixture
def pilot(tmp_path, encode, tiny_benchmark):
    """A small folder in PILOT's layout, and omnibench shrunk to it."""
    root = tmp_path / "raw" / "omnibenchmark"
    for split, counts in [("train", TRAIN), ("test", TEST)]:
        for name, count in counts.items():
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                suffix, file_format = [("JPEG", "JPEG"), ("png", "PNG")][number % 2]
                content = encode(
                    image_of(ORDERED.index(name), number + 50 * (split == "test")), file_format
                )
                (folder / f"{number}.{suffix}").write_bytes(content)
    order = benchmarks.class_order(4, 1993)
    counts = tuple(sum(TEST[ORDERED[c]] for c in order[i : i + 2]) for i in (0, 2))
    tiny_benchmark(
        "omnibench",
        num_classes=4,
        classes_per_task=2,
        num_train=8,
        num_test=5,
        task_test_counts=counts,
    )
    tiny_benchmark("omnibench_other", num_classes=4, classes_per_task=2)
    return root


def assert_reads_back(root, data_dir, name="omnibench"):
    for split, counts in [("train", TRAIN), ("test", TEST)]:
        source = dataset.open_dataset(name, split, data_dir)
        expected = sorted(
            (path.parent.name, path.name) for path in (root / split).rglob("*.*") if path.is_file()
        )
        assert list(source.ids) == ["/".join(names) for names in expected]
        assert source.class_names == tuple(ORDERED)
        for index, (class_name, file_name) in enumerate(expected):
            assert source.labels[index] == ORDERED.index(class_name)
            assert source.read(index) == (root / split / class_name / file_name).read_bytes()
        assert np.bincount(source.labels).tolist() == [counts[c] for c in ORDERED]


def left_over(data_dir):
    """Everything in the data folder but locks."""
    return sorted(path.name for path in Path(data_dir).iterdir() if path.suffix != ".lock")


def pack_zip(root, path):
    with zipfile.ZipFile(path, "w") as packed:
        for file in sorted(root.rglob("*")):
            packed.write(file, f"top/{root.name}/{file.relative_to(root)}")
        packed.writestr(f"__MACOSX/{root.name}/train/4/._0.JPEG", b"resource fork")
        packed.writestr(f"top/{root.name}/train/4/._0.JPEG", b"resource fork")
        packed.writestr(f"top/{root.name}/train/4/.DS_Store", b"finder")


def pack_tar(root, path):
    with tarfile.open(path, "w:gz") as packed:
        packed.add(root, root.name)


@pytest.mark.parametrize(
    ("pack", "name"),
    [(None, "raw/omnibenchmark"), (pack_zip, "o.zip"), (pack_tar, "o.tar.gz")],
    ids=["folder", "zip", "tar"],
)
def test_end_to_end(tmp_path, pilot, pack, name):
    if pack is not None:
        pack(pilot, tmp_path / name)
    data_dir = tmp_path / "data"
    folder = prepare.prepare("omnibench", tmp_path / name, data_dir, workers=3)
    assert folder == data_dir / "pilot_omnibench" / "1.0.0"
    assert left_over(data_dir) == ["pilot_omnibench"]
    assert_reads_back(pilot, data_dir)
    assert dataset.open_dataset("omnibench", "train", data_dir).partition == "pilot"
    builder = tfds.builder_from_directory(str(folder))
    assert builder.info.supervised_keys == ("image", "label")
    examples = builder.as_data_source(split="test")
    assert [int(example["label"]) for example in examples] == [0, 1, 1, 2, 3]


# What the data are


def checksums(data_dir, name="omnibench"):
    return [dataset.open_dataset(name, split, data_dir).checksum for split in ("train", "test")]


def test_two_preparations_of_the_same_images_agree(tmp_path, pilot, encode):
    pack_tar(pilot, tmp_path / "o.tgz")
    prepare.prepare("omnibench", tmp_path / "o.tgz", tmp_path / "a", quiet=True, workers=1)
    # The same pixels in other files, touched at another time.
    for path in pilot.rglob("*.png"):
        path.write_bytes(encode(Image.open(path), compress_level=1))
        os.utime(path, (1, 1))
    prepare.prepare("omnibench", pilot, tmp_path / "b", quiet=True, workers=4)
    shards = [
        b"".join(path.read_bytes() for path in sorted((tmp_path / each).rglob("*array_record*")))
        for each in "ab"
    ]
    assert shards[0] != shards[1]
    found = checksums(tmp_path / "a")
    assert found == checksums(tmp_path / "b")
    assert found[0] != found[1] and all(re.fullmatch("[0-9a-f]{64}", each) for each in found)
    # Earlier versions kept one checksum of the files of both splits, and TFDS keeps none.
    metadata = tmp_path / "a" / "pilot_omnibench" / "1.0.0" / "metadata.json"
    for content in ({"partition": "pilot", "images_sha256": "0" * 64}, {}):
        metadata.write_text(json.dumps(content))
        assert checksums(tmp_path / "a") == found


@pytest.mark.parametrize(
    "change",
    [
        lambda train, encode: (train / "10/1.png").write_bytes(encode(image_of(0, 99))),
        lambda train, encode: (train / "10/1.png").rename(train / "10/5.png"),
        lambda train, encode: (train / "10/1.png").rename(train / "4/9.png"),
        lambda train, encode: (train / "44").rename(train / "45"),
    ],
    ids=["pixels", "name", "label", "class"],
)
def test_other_images_have_another_checksum(tmp_path, pilot, tiny_benchmark, encode, change):
    prepare.prepare("omnibench_other", pilot, tmp_path / "a", quiet=True)
    change(pilot / "train", encode)
    if not (pilot / "train/44").exists():
        (pilot / "test/44").rename(pilot / "test/45")
    prepare.prepare("omnibench_other", pilot, tmp_path / "b", quiet=True)
    found, other = (checksums(tmp_path / each, "omnibench_other") for each in "ab")
    assert found[0] != other[0]
    assert (found[1] == other[1]) == (pilot / "train/44").exists()
    # Under the same name they are no second preparation.
    with pytest.raises(InputError, match=r"holds other images than .*omnibenchmark, such as"):
        prepare.prepare("omnibench_other", pilot, tmp_path / "a", quiet=True)


def test_prepared_data_are_compared_with_their_source(tmp_path, pilot, encode, capsys):
    pack_tar(pilot, tmp_path / "o.tgz")
    folder = prepare.prepare("omnibench", pilot, tmp_path, quiet=True)
    for source in (None, pilot, tmp_path / "o.tgz"):
        assert prepare.prepare("omnibench", source, tmp_path) == folder
        assert "omnibench is already prepared" in capsys.readouterr().err
    (pilot / "test/4/0.JPEG").write_bytes(encode(image_of(1, 1), "JPEG"))
    with pytest.raises(InputError, match=r"pilot_omnibench.* such as 4/0.JPEG of test; remove"):
        prepare.prepare("omnibench", pilot, tmp_path, quiet=True)
    for name in ("omnibench", "cifar100", "digits"):
        with pytest.raises(InputError, match="nowhere: expected a folder or an archive, found no"):
            prepare.prepare(name, tmp_path / "nowhere", tmp_path, quiet=True)
    os.mkfifo(tmp_path / "pipe.zip")
    with pytest.raises(InputError, match="expected a folder or an archive, found neither"):
        prepare.prepare("omnibench", tmp_path / "pipe.zip", tmp_path, quiet=True)


def test_the_checksum_of_an_archive_is_a_note(tmp_path, pilot, tiny_benchmark, capsys):
    archive = tmp_path / "o.tgz"
    pack_tar(pilot, archive)
    prepare.prepare("omnibench", archive, tmp_path / "a")
    found = hashlib.md5(archive.read_bytes()).hexdigest()
    published = "f1c30808a707f9197c6c811ea52e5cbb"
    assert f"MD5 {found} of {archive} differs from {published}" in capsys.readouterr().err
    tiny_benchmark("omnibench", checksums={"md5": found})
    prepare.prepare("omnibench", archive, tmp_path / "b")
    assert f"MD5 {found} of {archive} is that published" in capsys.readouterr().err


def test_images_that_occur_twice_are_listed(tmp_path, pilot, capsys):
    folder = prepare.prepare("omnibench", pilot, tmp_path / "a")
    assert "more than once" not in capsys.readouterr().err
    assert not (folder / "duplicates.csv").exists()
    for copy, of in [
        ("train/10/2.JPEG", "train/10/0.JPEG"),
        ("test/44/0.JPEG", "train/4/0.JPEG"),
        ("test/4/0.JPEG", "train/4/0.JPEG"),
        ("test/100/1.png", "test/100/0.JPEG"),
    ]:
        shutil.copy(pilot / of, pilot / copy)
    folder = prepare.prepare("omnibench", pilot, tmp_path / "b")
    said = capsys.readouterr().err
    assert "3 images occur more than once (3 within a split, 1 in train and test, 1 in se" in said
    assert str(folder / "duplicates.csv") in said
    lines = (folder / "duplicates.csv").read_text().splitlines()
    assert lines == [
        "group,split,class,image",
        *("0,train,10,10/0.JPEG", "0,train,10,10/2.JPEG"),
        *("1,train,4,4/0.JPEG", "1,test,4,4/0.JPEG", "1,test,44,44/0.JPEG"),
        *("2,test,100,100/0.JPEG", "2,test,100,100/1.png"),
    ]


# What lies in folders


def test_links_that_lead_back_are_not_followed(tmp_path, pilot):
    train = pilot / "train"
    (train / "loop").symlink_to(train)
    (train / "10" / "self").symlink_to(train / "10")
    (train / "10" / "up").symlink_to(pilot)
    (train / "4" / "more").mkdir()
    (train / "4" / "more" / "back").symlink_to(train / "4")
    (tmp_path / "elsewhere").mkdir()
    (train / "44" / "0.JPEG").rename(tmp_path / "elsewhere" / "0.JPEG")
    (train / "44" / "linked").symlink_to(tmp_path / "elsewhere")
    found, others = folders.list_images(train)
    assert [image.name for image in found] == [
        *("10/0.JPEG", "10/1.png", "10/2.JPEG", "100/0.JPEG", "4/0.JPEG", "4/1.png"),
        *("44/1.png", "44/linked/0.JPEG"),
    ]
    assert others == []


def bind_socket(path, monkeypatch):
    # The whole path is too long for a socket.
    monkeypatch.chdir(path.parent)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(path.name)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path, _: os.mkfifo(path), "expected an image file, found a named pipe"),
        (bind_socket, "expected an image file, found a socket"),
        (lambda path, _: path.symlink_to("/dev/zero"), "expected .* found a character device"),
        (lambda path, _: path.symlink_to("gone.png"), "cannot read: No such file"),
    ],
    ids=["pipe", "socket", "device", "broken link"],
)
def test_what_is_no_file_is_never_opened(tmp_path, pilot, make, message, monkeypatch):
    make(pilot / "train" / "10" / "z.png", monkeypatch)
    with pytest.raises(InputError, match=f"train/10/z.png: {message}"):
        prepare.prepare("omnibench", pilot, tmp_path / "data", quiet=True)


def test_names_that_are_not_utf_8_are_refused(tmp_path, pilot, encode):
    with open(os.fsencode(pilot / "train" / "10") + b"/\xe9.png", "wb") as file:
        file.write(encode(image_of(0, 5)))
    with pytest.raises(InputError, match=r"file names in UTF-8, found b'10/\\xe9.png'$"):
        prepare.prepare("omnibench", pilot, tmp_path / "data", quiet=True)


def test_skipped_suffixes_are_named(tmp_path, pilot):
    for path in (pilot / "train" / "44").iterdir():
        path.rename(path.with_suffix(".GIF"))
    with pytest.raises(InputError, match=r"train/44: expected images.* by their suffix: 2 \.gif$"):
        prepare.prepare("omnibench", pilot, tmp_path / "data", quiet=True)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        (
            ["train/a/1.gif", "train/a/b/README", "test/a/1.png"],
            "none; .*: 1 .gif, 1 README$",
        ),
        (["a/1.png"], "expected the folders train and test, found a$"),
        (["train/a/1.png", "test/a/1.png"], "expected 4 classes, found 1"),
    ],
)
def test_errors_about_an_archive_name_it(tmp_path, pilot, members, message):
    archive = tmp_path / "o.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        for name in members:
            packed.writestr(name, b"content")
    with pytest.raises(InputError, match=message) as caught:
        prepare.prepare("omnibench", archive, tmp_path / "data", quiet=True)
    assert "incomplete" not in str(caught.value)
    if "classes" not in message:
        assert str(caught.value).startswith(f"{archive}")


@pytest.mark.parametrize("damage", ["text", "cut zip", "cut tar"])
def test_damaged_archives(tmp_path, pilot, damage):
    archive = tmp_path / "o.archive"
    if damage == "text":
        archive.write_text("<html>quota exceeded</html>")
    else:
        (pack_zip if damage == "cut zip" else pack_tar)(pilot, archive)
        content = archive.read_bytes()
        archive.write_bytes(content[: len(content) // 2])
    with pytest.raises(InputError, match=re.escape(str(archive))):
        prepare.prepare("omnibench", archive, tmp_path / "data", quiet=True)
    assert left_over(tmp_path / "data") == []


@pytest.mark.parametrize(
    ("name", "link"), [("../../escaped.png", None), ("link.png", "/etc/passwd")]
)
def test_archives_cannot_write_or_read_outside(tmp_path, pilot, name, link):
    archive = tmp_path / "o.tar"
    with tarfile.open(archive, "w") as packed:
        member = tarfile.TarInfo(name)
        if link:
            member.type, member.linkname = tarfile.SYMTYPE, link
        packed.addfile(member, io.BytesIO())
    with pytest.raises(InputError, match=r"o.tar: cannot unpack"):
        prepare.prepare("omnibench", archive, tmp_path / "data", quiet=True)
    assert not list(tmp_path.rglob("escaped.png"))


def test_a_disk_that_is_full(tmp_path, pilot):
    noise = np.random.default_rng(0).integers(0, 256, (300, 300, 3), dtype=np.uint8)
    for number in range(3):
        Image.fromarray(noise).save(
            pilot / "train" / "10" / f"{number}.{['JPEG', 'png'][number % 2]}"
        )
    command = [sys.executable, "-c", LIMITED + CHILD, str(pilot), str(tmp_path / "data")]
    command.append(repr(benchmarks.BENCHMARKS["omnibench"]))
    child = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert child.returncode == 1
    last = child.stderr.strip().splitlines()[-1]
    assert last.startswith("fdc_jax.errors.InputError: ")
    assert str(tmp_path / "data") in last
    assert left_over(tmp_path / "data") == []


# Files of more than 100 kB cannot be written, as on a full disk.
LIMITED = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
"""


def test_a_prepared_data_folder_may_be_closed(tmp_path, pilot, monkeypatch):
    folder = prepare.prepare("omnibench", pilot, tmp_path, quiet=True)

    monkeypatch.setattr(prepare.fcntl, "flock", lambda *_: pytest.fail("locking means writing"))
    for source in (None, pilot):
        assert prepare.prepare("omnibench", source, tmp_path, quiet=True) == folder


def test_rerun_changes_nothing(tmp_path, pilot, capsys):
    prepare.prepare("omnibench", pilot, tmp_path)
    assert "8 train images, 5 test images, partition pilot" in capsys.readouterr().err
    folder = tmp_path / "pilot_omnibench" / "1.0.0"
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert prepare.prepare("omnibench", pilot, tmp_path) == folder
    assert "omnibench is already prepared" in capsys.readouterr().err
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_and_quiet(tmp_path, pilot, capsys, monkeypatch, terminal):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    prepare.prepare("omnibench", pilot, tmp_path / "a")
    said = capsys.readouterr().err
    assert "omnibench train: 100%" in said and "5/5" in said
    prepare.prepare("omnibench", pilot, tmp_path / "b", quiet=True)
    assert capsys.readouterr() == ("", "")


def test_every_unreadable_image_is_listed(tmp_path, pilot):
    (pilot / "train" / "10" / "1.png").write_bytes(b"")
    (pilot / "test" / "44" / "0.JPEG").write_text("not an image")
    good = (pilot / "train" / "4" / "0.JPEG").read_bytes()
    (pilot / "train" / "4" / "0.JPEG").write_bytes(good[:-30])
    with pytest.raises(InputError, match="3 of 13 images cannot be read") as caught:
        prepare.prepare("omnibench", pilot, tmp_path / "data", quiet=True, workers=2)
    for name in ("train/10/1.png", "test/44/0.JPEG", "train/4/0.JPEG"):
        assert name in str(caught.value)
    assert left_over(tmp_path / "data") == []


def test_files_that_are_no_images_are_left_out_and_named(tmp_path, pilot, capsys):
    (pilot / "train" / "10" / "list.txt").write_text("1.png")
    (pilot / "train" / "10" / ".hidden.png").write_text("")
    (pilot / "train" / "10" / ".thumbnails").mkdir()
    (pilot / "train" / "10" / ".thumbnails" / "1.png").write_text("")
    (pilot / "train" / "README.md").write_text("about")
    prepare.prepare("omnibench", pilot, tmp_path)
    assert "1 files are no images by their suffix and are left out: 10/list.txt" in (
        capsys.readouterr().err
    )


def move(pilot, old, new):
    (pilot / new).parent.mkdir(parents=True, exist_ok=True)
    (pilot / old).rename(pilot / new)


@pytest.mark.parametrize(
    ("moves", "message"),
    [
        ([("train/10/0.JPEG", "test/10/9.JPEG")], "expected 8 training images, found 7"),
        ([("train/44", "train/45")], "expected 4 classes, found 5|found none of 44"),
        ([("test/44/0.JPEG", "test/10/9.JPEG")], "expected images in this class folder"),
    ],
)
def test_another_split_is_refused(tmp_path, pilot, moves, message):
    for old, new in moves:
        move(pilot, old, new)
    with pytest.raises(InputError, match=message):
        prepare.prepare("omnibench", pilot, tmp_path / "data", quiet=True)
    assert left_over(tmp_path / "data") == []


def test_another_split_of_the_same_size_is_refused(tmp_path, pilot):
    order = [ORDERED[label] for label in benchmarks.class_order(4, 1993)]
    tasks = [set(order[:2]), set(order[2:])]
    (other,) = (task for task in tasks if "100" not in task)
    move(pilot, "test/100/1.png", f"test/{min(other)}/9.png")
    with pytest.raises(InputError, match="test images in the tasks of class order 1993, found"):
        prepare.prepare("omnibench", pilot, tmp_path, quiet=True)


def test_another_split_can_be_prepared_under_its_own_name(tmp_path, pilot, capsys):
    move(pilot, "train/10/0.JPEG", "test/10/9.JPEG")
    with pytest.raises(InputError, match=r"--allow_other_split prepares it as .*omnibench_other"):
        prepare.prepare("omnibench", pilot, tmp_path, quiet=True)
    folder = prepare.prepare("omnibench", pilot, tmp_path, allow_other_split=True)
    assert folder == tmp_path / "omnibench_other" / "1.0.0"
    assert "expected 8 training images, found 7; preparing it as" in capsys.readouterr().err
    source = dataset.open_dataset("omnibench_other", "test", tmp_path)
    assert (source.name, source.partition, len(source)) == ("omnibench_other", "other", 6)
    with pytest.raises(InputError, match="omnibench is not prepared"):
        dataset.open_dataset("omnibench", "test", tmp_path)
    assert prepare.prepare("omnibench", pilot, tmp_path, allow_other_split=True) == folder
    assert "omnibench_other is already prepared" in capsys.readouterr().err


def test_the_right_split_keeps_its_name_whatever_is_allowed(tmp_path, pilot):
    folder = prepare.prepare("omnibench", pilot, tmp_path, allow_other_split=True, quiet=True)
    assert folder == tmp_path / "pilot_omnibench" / "1.0.0"


def test_classes_must_have_training_images(tmp_path, pilot):
    move(pilot, "train/44", "elsewhere/44")
    with pytest.raises(InputError, match="training images of every class, found none of 44"):
        prepare.prepare("omnibench_other", pilot, tmp_path, quiet=True)


@pytest.mark.parametrize("make", [None, "train", "folder"])
def test_folders_that_are_not_there(tmp_path, pilot, make):
    source = tmp_path / "source"
    if make:
        (source / make).mkdir(parents=True)
    expected = "found nothing" if make is None else "expected the folders train and test"
    with pytest.raises(InputError, match=f"{re.escape(str(source))}.*{expected}"):
        prepare.prepare("omnibench", source, tmp_path / "data", quiet=True)


def test_a_folder_in_the_way_is_not_touched(tmp_path, pilot):
    place = tmp_path / "pilot_omnibench" / "1.0.0"
    place.mkdir(parents=True)
    (place / "mine").write_text("")
    with pytest.raises(InputError, match=r"without dataset_info.json; remove it"):
        prepare.prepare("omnibench", pilot, tmp_path, quiet=True)
    assert (place / "mine").exists()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("nothing", {}, "benchmark must be one of"),
        ("imagenet_r", {}, "needs --source=PATH, where PATH is the ImageNet-R archive behind"),
        ("cifar100", {"allow_other_split": True}, "has one split only"),
        ("cifar100", {"workers": 0}, "workers must be at least 1, found 0"),
    ],
)
def test_bad_requests(tmp_path, name, options, message):
    with pytest.raises(InputError, match=message):
        prepare.prepare(name, None, tmp_path, quiet=True, **options)


def test_digits_need_no_preparation(tmp_path, capsys):
    assert prepare.prepare("digits", None, tmp_path / "data") is None
    assert "digits is embedded" in capsys.readouterr().err
    assert not (tmp_path / "data").exists()


def test_command_line(tmp_path, pilot, capsys):
    assert prepare.main(["omnibench", f"--source={pilot}", f"--data_dir={tmp_path}"]) == 0
    capsys.readouterr()
    assert prepare.main(["omnibench_other", f"--data_dir={tmp_path}", "--quiet"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: omnibench_other needs --source")
    assert error.count("\n") == 1


def test_the_data_folder_may_be_closed(tmp_path, pilot):
    (tmp_path / "data").write_text("a file, not a folder")
    with pytest.raises(InputError, match="cannot prepare omnibench"):
        prepare.prepare("omnibench", pilot, tmp_path / "data", quiet=True)


# Substitute splits


@pytest.fixture
def release(tmp_path, encode, tiny_benchmark):
    """A small folder in the layout of the public CUB release."""
    for name, count in [("001.B", 9), ("002.A", 6)]:
        folder = tmp_path / "raw" / "CUB_200_2011" / "images" / name
        folder.mkdir(parents=True)
        for number in range(count):
            (folder / f"{number}.jpg").write_bytes(encode(image_of(1, number), "JPEG"))
    (tmp_path / "raw" / "CUB_200_2011" / "images.txt").write_text("1 001.B/0.jpg")
    (tmp_path / "raw" / "CUB_200_2011" / "parts").mkdir()
    (tmp_path / "raw" / "CUB_200_2011" / "parts" / "overview.png").write_text("")
    tiny_benchmark("cub200_random80", num_classes=2, classes_per_task=1, num_train=12, num_test=3)
    return tmp_path / "raw"


def test_substitute_split_follows_its_rule(tmp_path, release):
    prepare.prepare("cub200_random80", release, tmp_path / "data", quiet=True)
    names = sorted([f"001.B/{i}.jpg" for i in range(9)] + [f"002.A/{i}.jpg" for i in range(6)])
    order = np.random.RandomState(1993).permutation(15)
    for split, chosen in [("train", order[:12]), ("test", order[12:])]:
        source = dataset.open_dataset("cub200_random80", split, tmp_path / "data")
        assert list(source.ids) == sorted(names[i] for i in chosen)
        assert (source.name, source.partition) == ("cub200_random80", "random80")


def test_substitute_split_checks_the_counts(tmp_path, release):
    (release / "CUB_200_2011" / "images" / "002.A" / "5.jpg").unlink()
    with pytest.raises(
        InputError, match=r"cub200_random80: expected 12 training images, found 11$"
    ):
        prepare.prepare("cub200_random80", release, tmp_path / "data", quiet=True)


def test_substitute_counts_of_the_public_releases():
    found = {
        name: (row.num_train, row.num_test)
        for name, row in benchmarks.BENCHMARKS.items()
        if row.partition == "random80"
    }
    assert found == {
        "imagenet_r_random80": (24000, 6000),
        "imagenet_a_random80": (6000, 1500),
        "cub200_random80": (9430, 2358),
    }


def test_no_class_folders(tmp_path, release):
    with pytest.raises(InputError, match="one folder of images per class"):
        prepare.prepare(
            "cub200_random80", release / "CUB_200_2011" / "parts", tmp_path / "d", quiet=True
        )


# CIFAR-100

FINE = sorted(f"class_{i:03d}" for i in range(100))
COARSE = sorted(f"group_{i:02d}" for i in range(20))


def archive_bytes(labels):
    """Packs a synthetic archive in the official layout; returns its bytes and its pixels."""
    generator = np.random.default_rng(0)
    files = {
        "fine_label_names.txt": "\n".join(FINE).encode() + b"\n",
        "coarse_label_names.txt": "\n".join(COARSE).encode() + b"\n",
    }
    pixels = {}
    for split, split_labels in labels.items():
        planes = generator.integers(0, 256, (len(split_labels), 3, 32, 32), dtype=np.uint8)
        pixels[split] = planes
        files[f"{split}.bin"] = b"".join(
            bytes([label // 5, label]) + plane.tobytes()
            for label, plane in zip(split_labels, planes, strict=True)
        )
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as packed:
        for name, content in files.items():
            member = tarfile.TarInfo(f"cifar-100-binary/{name}")
            member.size = len(content)
            packed.addfile(member, io.BytesIO(content))
    return buffer.getvalue(), pixels


LABELS = {"train": [*range(100), 7, 3], "test": [*range(99, -1, -1)]}


@pytest.fixture
def cifar(tmp_path, tiny_benchmark):
    """A synthetic archive, its pixels, and cifar100's row shrunk to it."""
    content, pixels = archive_bytes(LABELS)
    archive = tmp_path / "raw" / cifar100.ARCHIVE_NAME
    archive.parent.mkdir()
    archive.write_bytes(content)
    tiny_benchmark(
        "cifar100",
        num_train=102,
        num_test=100,
        task_test_counts=(5,) * 20,
        checksums={"sha256": hashlib.sha256(content).hexdigest()},
    )
    return archive, pixels


def assert_is_cifar(data_dir, pixels):
    for split in ("train", "test"):
        source = dataset.open_dataset("cifar100", split, data_dir)
        assert list(source.ids) == [f"{split}_{i:05d}" for i in range(len(LABELS[split]))]
        assert source.labels.tolist() == LABELS[split]
        assert source.class_names == tuple(FINE)
        for index, planes in enumerate(pixels[split]):
            with Image.open(io.BytesIO(source.read(index))) as image:
                assert image.format == "PNG"
                np.testing.assert_array_equal(np.asarray(image), planes.transpose(1, 2, 0))


@pytest.mark.parametrize("folder", [False, True])
def test_cifar_from_the_binary_archive(tmp_path, cifar, folder):
    archive, pixels = cifar
    source = archive.parent if folder else archive
    prepare.prepare("cifar100", source, tmp_path / "data", quiet=True)
    assert left_over(tmp_path / "data") == ["cifar100"]
    assert_is_cifar(tmp_path / "data", pixels)


def test_cifar_is_what_tfds_itself_expects(tmp_path, cifar):
    archive, pixels = cifar
    prepare.prepare("cifar100", archive, tmp_path, quiet=True)
    examples = tfds.data_source("cifar100", split="test", data_dir=tmp_path)
    assert len(examples) == 100
    example = examples[30]
    assert set(example) == {"id", "image", "label", "coarse_label"}
    assert example["id"] == b"test_00030"
    assert (int(example["label"]), int(example["coarse_label"])) == (69, 13)
    np.testing.assert_array_equal(example["image"], pixels["test"][30].transpose(1, 2, 0))
    builder = tfds.builder("cifar100", data_dir=tmp_path)
    assert builder.info.features["label"].names == FINE
    assert builder.info.splits["train"].num_examples == 102


def test_cifar_archive_with_another_checksum(tmp_path, cifar):
    archive, _ = cifar
    archive.write_bytes(archive.read_bytes() + b"\0")
    with pytest.raises(InputError, match=r"expected SHA-256 [0-9a-f]{64}, found [0-9a-f]{64}"):
        prepare.prepare("cifar100", archive, tmp_path / "data", quiet=True)
    with pytest.raises(InputError, match=r"expected the archive cifar-100-binary.tar.gz"):
        prepare.prepare("cifar100", tmp_path, tmp_path / "data", quiet=True)


def test_published_checksum_is_the_one_of_tfds():
    path = Path(tfds.__file__).parent / "url_checksums" / "cifar100.txt"
    row = benchmarks.BENCHMARKS["cifar100"]
    assert path.read_text().split() == [
        row.obtain,
        "168513733",
        row.checksums["sha256"],
        cifar100.ARCHIVE_NAME,
    ]


@pytest.fixture
def served(cifar, tmp_path):
    """Serves the archive's folder on this machine; returns its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"],
        cwd=tmp_path / "raw",
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    server.stdout.readline()
    yield f"http://127.0.0.1:{port}/{cifar100.ARCHIVE_NAME}"
    server.terminate()
    server.wait()
    server.stdout.close()


def test_cifar_can_be_downloaded(tmp_path, cifar, served, tiny_benchmark):
    _, pixels = cifar
    tiny_benchmark("cifar100", obtain=served)
    prepare.prepare("cifar100", None, tmp_path / "data", quiet=True)
    assert_is_cifar(tmp_path / "data", pixels)
    assert (tmp_path / "data" / "downloads" / cifar100.ARCHIVE_NAME).is_file()


def test_download_with_another_checksum(tmp_path, served, tiny_benchmark):
    tiny_benchmark("cifar100", obtain=served, checksums={"sha256": "0" * 64})
    with pytest.raises(InputError, match=r"cannot download http.*cifar-100-binary.tar.gz"):
        prepare.prepare("cifar100", None, tmp_path / "data", quiet=True)
    assert left_over(tmp_path / "data" / "downloads") == []


def test_no_network_names_the_file_to_get(tmp_path, cifar, tiny_benchmark):
    tiny_benchmark("cifar100", obtain="http://127.0.0.1:9/cifar-100-binary.tar.gz")
    with pytest.raises(InputError) as caught:
        prepare.prepare("cifar100", None, tmp_path / "data", quiet=True)
    message = str(caught.value)
    assert str(tmp_path / "data" / "downloads" / cifar100.ARCHIVE_NAME) in message
    assert "--source" in message
    assert "\n" not in message


# Several processes, and processes that die


def test_a_second_process_waits_for_the_first(tmp_path, pilot):
    data_dir = tmp_path / "data"
    data_dir.mkdir()
    command = [sys.executable, "-c", CHILD, str(pilot), str(data_dir)]
    command.append(repr(benchmarks.BENCHMARKS["omnibench"]))
    with open(data_dir / ".pilot_omnibench.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert "waiting for another process" in child.stderr.readline()
        assert left_over(data_dir) == []
    assert "8 train images" in child.communicate(timeout=120)[1]
    assert child.returncode == 0


def test_processes_take_turns(tmp_path, pilot):
    command = [
        sys.executable,
        "-c",
        CHILD,
        str(pilot),
        str(tmp_path / "data"),
        repr(benchmarks.BENCHMARKS["omnibench"]),
    ]
    children = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    errors = [child.communicate(timeout=120)[1] for child in children]
    assert [child.returncode for child in children] == [0, 0, 0], errors
    assert sum("8 train images" in error for error in errors) == 1
    assert sum("already prepared" in error for error in errors) == 2
    assert left_over(tmp_path / "data") == ["pilot_omnibench"]
    assert_reads_back(pilot, tmp_path / "data")


CHILD = """
import sys
from fdc_jax.data import benchmarks, prepare, tfds_format
from fdc_jax.data.benchmarks import Benchmark
benchmarks.BENCHMARKS["omnibench"] = eval(sys.argv[3])
if len(sys.argv) > 4:
    import os, signal
    def die(*arguments):
        os.kill(os.getpid(), signal.SIGKILL)
    setattr({"write": tfds_format, "rename": os}[sys.argv[4]], sys.argv[4], die)
prepare.prepare("omnibench", sys.argv[1], sys.argv[2])
"""


@pytest.mark.parametrize("moment", ["write", "rename"])
def test_a_killed_process_leaves_nothing_that_is_accepted(tmp_path, pilot, moment):
    data_dir = tmp_path / "data"
    command = [sys.executable, "-c", CHILD, str(pilot), str(data_dir)]
    command += [repr(benchmarks.BENCHMARKS["omnibench"]), moment]
    child = subprocess.run(command, stderr=subprocess.PIPE, timeout=120, check=False)
    assert child.returncode == -signal.SIGKILL, child.stderr.decode()
    assert any("incomplete" in name for name in left_over(data_dir))
    with pytest.raises(InputError, match="is not prepared"):
        dataset.open_dataset("omnibench", "train", data_dir)
    prepare.prepare("omnibench", pilot, data_dir, quiet=True)
    assert left_over(data_dir) == ["pilot_omnibench"]
    assert_reads_back(pilot, data_dir)
