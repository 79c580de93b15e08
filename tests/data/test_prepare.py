import fcntl
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import tensorflow_datasets as tfds
from PIL import Image

from fdc_jax.data import benchmarks, folders, prepare, task_stream
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
        for label, name in enumerate(ORDERED):
            (root / split / name).mkdir(parents=True)
            for number in range(counts[name]):
                suffix = ("JPEG", "png")[number % 2]
                pixels = image_of(label, number + 50 * (split == "test"))
                path = root / split / name / f"{number}.{suffix}"
                path.write_bytes(encode(pixels, suffix.upper()))
    order = benchmarks.class_order(4, 1993)
    counts = tuple(sum(TEST[ORDERED[c]] for c in order[i : i + 2]) for i in (0, 2))
    shrunk = dict(num_classes=4, classes_per_task=2)
    tiny_benchmark("omnibench", num_train=8, num_test=5, task_test_counts=counts, **shrunk)
    return root


def refused(source, tmp_path, message, name="omnibench"):
    """Expects a refusal that leaves nothing behind; returns what it says."""
    with pytest.raises(InputError, match=message) as caught:
        prepare.prepare(name, source, tmp_path / "data", quiet=True, workers=2)
    assert left_over(tmp_path / "data") == []
    return str(caught.value)


def assert_reads_back(root, data_dir, name="omnibench"):
    for split, counts in [("train", TRAIN), ("test", TEST)]:
        source = task_stream.open_dataset(name, split, data_dir)
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
    builder = tfds.builder_from_directory(str(folder))
    assert builder.info.supervised_keys == ("image", "label")
    examples = builder.as_data_source(split="test")
    assert [int(example["label"]) for example in examples] == [0, 1, 1, 2, 3]


# What the data are


def checksums(data_dir, name="omnibench"):
    return [task_stream.open_dataset(name, split, data_dir).checksum for split in ("train", "test")]


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
    # TFDS keeps none.
    (tmp_path / "a" / "pilot_omnibench" / "1.0.0" / "metadata.json").write_text("{}")
    assert checksums(tmp_path / "a") == found


def test_prepared_data_are_compared_with_their_source(tmp_path, pilot, encode, capsys):
    pack_tar(pilot, tmp_path / "o.tgz")
    folder = prepare.prepare("omnibench", pilot, tmp_path, quiet=True)
    for source in (None, pilot, tmp_path / "o.tgz"):
        assert prepare.prepare("omnibench", source, tmp_path) == folder
        assert "omnibench is already prepared" in capsys.readouterr().err
    (pilot / "test/4/0.JPEG").write_bytes(encode(image_of(1, 1), "JPEG"))
    with pytest.raises(InputError, match=r"pilot_omnibench.* such as 4/0.JPEG of test; choose"):
        prepare.prepare("omnibench", pilot, tmp_path, quiet=True)
    assert prepare.main(["omnibench", f"--source={pilot}", f"--data_dir={tmp_path}"]) == 2
    # After the bar, on a line of its own.
    assert capsys.readouterr().err.splitlines()[-1].startswith("fdc_jax.data.prepare: ")
    with pytest.raises(InputError, match="nowhere: expected a folder or an archive, found no"):
        prepare.prepare("omnibench", tmp_path / "nowhere", tmp_path, quiet=True)


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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (os.mkfifo, "found a pipe, socket or device"),
        (lambda path: path.symlink_to("gone.png"), "cannot read: No such file"),
    ],
    ids=["pipe", "broken link"],
)
def test_what_is_no_file_is_never_opened(tmp_path, pilot, make, message):
    make(pilot / "train" / "10" / "z.png")
    refused(pilot, tmp_path, f"train/10/z.png: .*{message}")


def test_skipped_suffixes_are_named(tmp_path, pilot, capsys):
    (pilot / "train" / "10" / "list.txt").write_text("1.png")
    (pilot / "train" / "10" / ".hidden.png").write_text("")
    (pilot / "train" / "10" / ".thumbnails").mkdir()
    (pilot / "train" / "10" / ".thumbnails" / "1.png").write_text("")
    (pilot / "train" / "README.md").write_text("about")
    prepare.prepare("omnibench", pilot, tmp_path)
    assert "skipped, as no images by their suffix: 1 .txt\n" in capsys.readouterr().err
    for path in (pilot / "train" / "44").iterdir():
        path.rename(path.with_suffix(".GIF"))
    refused(pilot, tmp_path, r"train/44: expected images.* by their suffix: 2 \.gif$")


@pytest.mark.parametrize("pack", [pack_zip, pack_tar])
def test_damaged_archives(tmp_path, pilot, pack):
    archive = tmp_path / "o.archive"
    pack(pilot, archive)
    content = archive.read_bytes()
    archive.write_bytes(content[: len(content) // 2])
    refused(archive, tmp_path, re.escape(str(archive)))


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
    refused(archive, tmp_path, r"o.tar: cannot unpack")
    assert not list(tmp_path.rglob("escaped.png"))


def test_every_unreadable_image_is_listed(tmp_path, pilot):
    (pilot / "train" / "10" / "1.png").write_bytes(b"")
    (pilot / "test" / "44" / "0.JPEG").write_text("not an image")
    good = (pilot / "train" / "4" / "0.JPEG").read_bytes()
    (pilot / "train" / "4" / "0.JPEG").write_bytes(good[:-30])
    said = refused(pilot, tmp_path, "3 of 13 images cannot be read")
    for name in ("train/10/1.png", "test/44/0.JPEG", "train/4/0.JPEG"):
        assert name in said


def move(pilot, old, new):
    (pilot / new).parent.mkdir(parents=True, exist_ok=True)
    (pilot / old).rename(pilot / new)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("train/10/0.JPEG", "test/10/9.JPEG", "expected 8 training images, found 7"),
        ("test/44/0.JPEG", "test/10/9.JPEG", "expected images in this class folder"),
    ],
)
def test_another_split_is_refused(tmp_path, pilot, old, new, message):
    move(pilot, old, new)
    refused(pilot, tmp_path, message)


def test_another_split_can_be_prepared_under_its_own_name(tmp_path, pilot):
    move(pilot, "train/10/0.JPEG", "test/10/9.JPEG")
    with pytest.raises(InputError, match=r"under another name, such as my_set, any division"):
        prepare.prepare("omnibench", pilot, tmp_path, quiet=True)
    prepare.prepare("mine", pilot, tmp_path, quiet=True)
    source = task_stream.open_dataset("mine", "test", tmp_path)
    assert (source.name, source.partition, len(source)) == ("mine", "given", 6)


def test_data_of_another_split_that_an_earlier_version_prepared(tmp_path, pilot):
    folder = prepare.prepare("omnibench_other", pilot, tmp_path, quiet=True)
    noted = json.loads((folder / "metadata.json").read_text())
    earlier = {"partition": "other", "images_sha256": noted["images_sha256"]}
    (folder / "metadata.json").write_text(json.dumps(earlier))
    source = task_stream.open_dataset("omnibench_other", "test", tmp_path)
    assert (source.name, source.partition, len(source)) == ("omnibench_other", "other", 5)
    assert benchmarks.task_sizes("omnibench_other", 4) == (2, 2)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("imagenet_r", {}, "needs --source=PATH, where PATH is the ImageNet-R archive behind"),
        ("cifar100", {"test_share": 0.2}, "has a division of its own: test_share does not apply"),
        ("mine", {"source": ".", "test_share": 1.0}, "a test_share between 0 and 1"),
        ("my-set", {"source": "."}, "name of letters, digits and _ .* found 'my-set'"),
        ("pilot_cub200", {"source": "."}, "the name pilot_cub200 is taken by benchmark cub200"),
        ("cifar100", {"source": "."}, "expected the archive cifar-100-binary.tar.gz"),
        ("cub200_random80", {"source": "."}, r"^\.: expected one folder of images per class"),
        ("cub200", {"source": "."}, "found a folder without dataset_info.json; remove it"),
        ("omnibench", {"source": ".", "data_dir": "file"}, "cannot prepare omnibench: .*file"),
    ],
)
def test_bad_requests(tmp_path, monkeypatch, name, options, message):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    (tmp_path / "pilot_cub200" / "1.0.0").mkdir(parents=True)
    (tmp_path / "file").write_text("")
    options = {**options, "data_dir": tmp_path / options.get("data_dir", "")}
    with pytest.raises(InputError, match=message):
        prepare.prepare(name, quiet=True, **options)


def test_command_line(tmp_path, pilot, capsys, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "default"))
    assert prepare.main(["omnibench", f"--source={pilot}"]) == 0
    assert_reads_back(pilot, "")
    assert left_over(tmp_path / "default") == ["pilot_omnibench"]
    capsys.readouterr()
    assert prepare.main(["cub200", f"--data_dir={tmp_path}", "--quiet"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("fdc_jax.data.prepare: cub200 needs --source")
    assert error.count("\n") == 1
    assert prepare.main(["omnibench", f"--sorce={pilot}"]) == 2
    assert capsys.readouterr().err.endswith("; did you mean --source?\n")


def test_the_substitute_split_follows_its_rule(tmp_path, encode, tiny_benchmark):
    # In the layout of the public CUB release.
    root = tmp_path / "raw" / "CUB_200_2011"
    for name, count in [("001.B", 9), ("002.A", 6)]:
        (root / "images" / name).mkdir(parents=True)
        for number in range(count):
            content = encode(image_of(1, number), "JPEG")
            (root / "images" / name / f"{number}.jpg").write_bytes(content)
    (root / "images.txt").write_text("1 001.B/0.jpg")
    (root / "parts").mkdir()
    (root / "parts" / "overview.png").write_text("")
    tiny_benchmark("cub200_random80", num_classes=2, classes_per_task=1, num_train=12, num_test=3)
    prepare.prepare("cub200_random80", root.parent, tmp_path / "a", quiet=True)
    names = sorted([f"001.B/{i}.jpg" for i in range(9)] + [f"002.A/{i}.jpg" for i in range(6)])
    order = np.random.RandomState(1993).permutation(15)
    for split, chosen in [("train", order[:12]), ("test", order[12:])]:
        source = task_stream.open_dataset("cub200_random80", split, tmp_path / "a")
        assert list(source.ids) == sorted(names[i] for i in chosen)
        assert (source.name, source.partition) == ("cub200_random80", "random80")
    (root / "images" / "002.A" / "5.jpg").unlink()
    refused(root.parent, tmp_path, "expected 12 training images, found 11", "cub200_random80")


# Several processes, and processes that die


DIE_BEFORE_RENAMING = """
import os, signal
os.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
"""


def start(source, data_dir, before=""):
    """Starts a process that prepares the small omnibench."""
    program = f"""{before}
from fdc_jax.data import benchmarks, prepare
from fdc_jax.data.benchmarks import Benchmark
benchmarks.BENCHMARKS["omnibench"] = {benchmarks.BENCHMARKS["omnibench"]!r}
prepare.prepare("omnibench", {str(source)!r}, {str(data_dir)!r})
"""
    return subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)


def test_a_second_process_waits_for_the_first(tmp_path, pilot):
    data_dir = tmp_path / "data"
    data_dir.mkdir()
    with open(data_dir / ".pilot_omnibench.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        child = start(pilot, data_dir)
        assert "waiting for another process" in child.stderr.readline()
        assert left_over(data_dir) == []
        # Meanwhile the first has done it.
        prepare.prepare("omnibench", pilot, tmp_path / "done", quiet=True)
        (tmp_path / "done" / "pilot_omnibench").rename(data_dir / "pilot_omnibench")
    assert "omnibench is already prepared" in child.communicate(timeout=120)[1]
    assert child.returncode == 0
    assert left_over(data_dir) == ["pilot_omnibench"]


def test_a_killed_process_leaves_nothing_that_is_accepted(tmp_path, pilot):
    data_dir = tmp_path / "data"
    child = start(pilot, data_dir, DIE_BEFORE_RENAMING)
    said = child.communicate(timeout=120)[1]
    assert child.returncode == -signal.SIGKILL, said
    assert any("incomplete" in name for name in left_over(data_dir))
    with pytest.raises(InputError, match="is not prepared"):
        task_stream.open_dataset("omnibench", "train", data_dir)
    prepare.prepare("omnibench", pilot, data_dir, quiet=True)
    assert left_over(data_dir) == ["pilot_omnibench"]
    assert_reads_back(pilot, data_dir)
