"""Which source a configuration names, and the benchmarks as folders and archives."""

import itertools
import shutil
import stat
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fdc_jax.data import sources
from tests.errors import input_error

# As strings "10" and "100" come before "4"; one class has a single training image.
TRAIN = {"10": 3, "100": 1, "4": 2, "44": 2}
TEST = {"10": 1, "100": 2, "4": 1, "44": 1}
ORDERED = ["10", "100", "4", "44"]


@pytest.fixture
def pilot(tmp_path, tiny_benchmark):
    """A small folder in PILOT's layout, and omnibench shrunk to it."""
    root = tmp_path / "raw" / "omnibenchmark"
    colours = itertools.count()
    for split, counts in (("train", TRAIN), ("test", TEST)):
        for name, count in counts.items():
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                image = Image.new("RGB", (5, 7), (next(colours), 9, 200))
                image.save(root / split / name / f"{number}.{('JPEG', 'png')[number % 2]}")
    tiny_benchmark("omnibench", classes_per_task=2, num_train=8, task_test_counts=(2, 3))
    return root


def pack_zip(root, path):
    with zipfile.ZipFile(path, "w") as packed:
        for file in sorted(root.rglob("*")):
            packed.write(file, f"top/{root.name}/{file.relative_to(root)}")
        packed.writestr(f"__MACOSX/{root.name}/train/4/._0.JPEG", b"resource fork")
        link = zipfile.ZipInfo("link.png")
        link.external_attr = stat.S_IFLNK << 16
        packed.writestr(link, "0.JPEG")


def test_benchmark_is_read_from_a_folder_or_an_archive(tmp_path, pilot):
    archive = tmp_path / "omnibenchmark.zip"
    pack_zip(pilot, archive)

    def opened(benchmark, path):
        return sources.open_splits(benchmark, tmp_path / "cache", source=str(path))

    for path in (pilot, archive, archive):  # unpacked, and from then on
        splits = opened("omnibench", path)
        for split, counts in zip(splits, (TRAIN, TEST), strict=True):
            assert (split.name, split.partition, split.upright) == ("omnibench", "pilot", False)
            assert split.class_names == tuple(ORDERED)
            assert np.bincount(split.labels).tolist() == [counts[name] for name in ORDERED]
            for index, image_id in enumerate(split.ids):
                assert split.read(index) == (pilot / split.split / image_id).read_bytes()
        links = splits[0].skipped.paths.get("links in the archive", [])
        assert links == (["link.png"] if path == archive else [])
    shutil.move(pilot / "train/10/0.JPEG", pilot / "test/10/9.JPEG")
    with input_error(r"omnibench: expected 8 training images, found 7"):
        opened("omnibench", pilot)
    assert opened("another", pilot)[0].upright


# Benchmark, source, and the line of the error.
REFUSED = [
    ("", "", "config.data.source: expected a folder or an archive of images, .*; found none$"),
    ("", "a\x1bb", r"config.data.source: expected a name for the data, found 'a\\x1bb'$"),
    ("../x", "", "config.benchmark: expected a name for the data, found '../x'$"),
    (
        "omnibench",
        "",
        "data.source: expected PILOT's archive omnibenchmark .https://.*, found none$",
    ),
    ("mine", "", "data.dir: /.*: expected the folder mine that TFDS prepared, found other$"),
    ("mine", "nowhere", "data.source: nowhere: expected a folder .*, found nothing$"),
    ("mine", "file", "file: expected a folder, or a zip or tar archive of one$"),
    (
        "cifar100",
        "file",
        "file: expected cifar-100-binary.* of SHA-256 58a81ae.*, of e3b0c[0-9a-f]+$",
    ),
    ("digits", "file", "data.source: expected none, digits are embedded: file$"),
]


@pytest.mark.parametrize("benchmark, source, message", REFUSED)
def test_wrong_sources_are_refused(tmp_path, monkeypatch, benchmark, source, message):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("other").mkdir()
    with input_error(message):
        name = sources.name_of(benchmark, source)
        sources.open_splits(name, tmp_path / "cache", source=source, data_dir=str(tmp_path))


def test_failed_archive_is_named_and_its_folder_removed(tmp_path, monkeypatch):
    path = tmp_path / "mine.zip"
    with zipfile.ZipFile(path, "w") as packed:
        for name in ("train/ant/0.png", "test/ant/1.png"):
            packed.writestr(name, b"no image")
    monkeypatch.chdir(tmp_path)
    cache = Path("relative_cache")
    message = "2 of 2 images cannot be read: .*/mine.zip/test/ant/1.png: cannot decode"
    with input_error(message) as caught:
        sources.open_splits("mine", cache, source=str(path))
    assert "cache" not in str(caught.value)
    assert not [*(cache / "data").glob("*/")]


def test_an_unpacked_archive_that_another_run_reads_stays(tmp_path, pilot):
    packed = shutil.make_archive(str(tmp_path / "mine"), "zip", pilot)
    train, _ = sources.open_splits("mine", tmp_path / "cache", source=packed)
    with input_error("^cub200: expected 200 classes"):
        sources.open_splits("cub200", tmp_path / "cache", source=packed)
    assert train.image(0).size == (5, 7)
