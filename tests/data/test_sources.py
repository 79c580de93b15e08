"""Which source a configuration names, and the benchmarks as folders and archives."""

import dataclasses
import shutil
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from configs import omnibench
from fdc_jax.data import benchmarks, sources
from fdc_jax.data.dataset import Skipped, noted
from fdc_jax.errors import InputError
from fdc_jax.run import configuration
from fdc_jax.run import setup as setups

# As strings "10" and "100" come before "4"; one class has a single training image.
TRAIN = {"10": 3, "100": 1, "4": 2, "44": 2}
TEST = {"10": 1, "100": 2, "4": 1, "44": 1}
ORDERED = ["10", "100", "4", "44"]


@pytest.fixture
def pilot(tmp_path, encode, tiny_benchmark):
    """A small folder in PILOT's layout, and omnibench shrunk to it."""
    root = tmp_path / "raw" / "omnibenchmark"
    for split, counts in [("train", TRAIN), ("test", TEST)]:
        for label, name in enumerate(ORDERED):
            (root / split / name).mkdir(parents=True)
            for number in range(counts[name]):
                pixels = np.full((7, 5, 3), (40 * label, number + 50 * (split == "test"), 200))
                suffix = ("JPEG", "png")[number % 2]
                content = encode(pixels.astype(np.uint8), suffix.upper())
                (root / split / name / f"{number}.{suffix}").write_bytes(content)
    order = benchmarks.class_order(4, 1993)
    counts = tuple(sum(TEST[ORDERED[c]] for c in order[i : i + 2]) for i in (0, 2))
    tiny_benchmark("omnibench", classes_per_task=2, num_train=8, task_test_counts=counts)
    return root


def pack_zip(root, path):
    with zipfile.ZipFile(path, "w") as packed:
        for file in sorted(root.rglob("*")):
            packed.write(file, f"top/{root.name}/{file.relative_to(root)}")
        packed.writestr(f"__MACOSX/{root.name}/train/4/._0.JPEG", b"resource fork")


@pytest.mark.parametrize(
    ("pack", "name"),
    [(None, "raw/omnibenchmark"), (pack_zip, "omnibenchmark.zip")],
    ids=["folder", "zip"],
)
def test_benchmark_is_read_from_a_folder_or_an_archive(tmp_path, pilot, pack, name):
    if pack is not None:
        pack(pilot, tmp_path / name)
    config = omnibench.get_config()
    config.cache_dir = str(tmp_path / "cache")
    config.data.source = str(tmp_path / name)
    config = configuration.typed(config)
    stream = setups.open_images(config)
    assert (stream.train.name, stream.train.partition) == ("omnibench", "pilot")
    assert not stream.train.upright and stream.train.class_names == tuple(ORDERED)
    assert stream.order.tolist() == np.random.RandomState(1993).permutation(4).tolist()
    assert stream.planned == (2, 2)
    for split, counts in ((stream.train, TRAIN), (stream.test, TEST)):
        assert np.bincount(split.labels).tolist() == [counts[c] for c in ORDERED]
        for index, image_id in enumerate(split.ids):
            assert split.read(index) == (pilot / split.split / image_id).read_bytes()
    shutil.move(pilot / "train/10/0.JPEG", pilot / "test/10/9.JPEG")
    config = configuration.changed(config, data={"source": str(pilot)})
    with pytest.raises(InputError, match=r"omnibench: expected 8 training images, found 7"):
        setups.open_images(config)
    config = structs.replace(config, benchmark="another", classes_per_task=2)
    assert setups.open_images(config).train.upright


def test_name_of_data_is_that_of_folder_or_archive(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for source, name in {
        **{"photos": "photos", "photos/": "photos", "a/My photos.2024": "My photos.2024"},
        **{"a/birds.tar.gz": "birds", "birds.ZIP": "birds", "../données": "données"},
        ".": tmp_path.name,
    }.items():
        assert sources.name_of("", source) == name
        assert sources.name_of("trees", source) == "trees"


# Benchmark, source, and the line of the error.
REFUSED = [
    ("", "", "config.data.source: expected a folder or an archive of images, .*; found none$"),
    ("", "/", "config.data.source: expected a name for the data, found ''$"),
    ("", "a\x1bb", r"config.data.source: expected a name for the data, found 'a\\x1bb'$"),
    ("../x", "", "config.benchmark: expected a name for the data, found '../x'$"),
    (".x", "", "config.benchmark: expected a name for the data, found '.x'$"),
    (
        "omnibench",
        "",
        "data.source: expected PILOT's archive omnibenchmark .https://.*, found none$",
    ),
    ("mine", "", "data.dir: /.*: expected the folder mine that TFDS prepared, found other$"),
    (
        "cifar100",
        "",
        "data.dir: /.*: expected the folder cifar100 that TFDS prepared, found other$",
    ),
    ("mine", "nowhere", "data.source: nowhere: expected a folder .*, found nothing$"),
    ("mine", "file", "file: expected a folder, or a zip or tar archive of one$"),
    (
        "cifar100",
        "file",
        "file: expected cifar-100-binary.* of SHA-256 58a81ae.*, of e3b0c[0-9a-f]+$",
    ),
    ("digits", "file", "data.source: expected none, digits are embedded: file$"),
]


@pytest.mark.parametrize(("benchmark", "source", "message"), REFUSED)
def test_wrong_sources_are_refused(tmp_path, monkeypatch, benchmark, source, message):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("other").mkdir()
    with pytest.raises(InputError, match=message):
        name = sources.name_of(benchmark, source)
        sources.open_splits(name, tmp_path / "cache", source=source, data_dir=str(tmp_path))


CONTENTS = {
    "flat": ({"a.png": b"", "b.png": b""}, "; 2 images outside of folders; found no folder$"),
    "zip in a zip": (
        {"photos.zip": b"PK"},
        r"found no folder; .* image: 1 \(1 .zip\)$",
    ),
    "unreadable": (
        {f"{split}/ant/{n}.png": b"no image" for n, split in enumerate(("train", "test"))},
        "2 of 2 images cannot be read: .*/mine.zip/test/ant/1.png: cannot decode",
    ),
}


@pytest.mark.parametrize(("files", "message"), CONTENTS.values(), ids=CONTENTS)
def test_failed_archive_is_named_and_its_folder_removed(tmp_path, files, message, monkeypatch):
    with zipfile.ZipFile(tmp_path / "mine.zip", "w") as packed:
        for name, content in files.items():
            packed.writestr(name, content)
    monkeypatch.chdir(tmp_path)
    for cache in (tmp_path / "cache", Path("relative_cache")):
        with pytest.raises(InputError, match=message) as caught:
            sources.open_splits("mine", cache, source=str(tmp_path / "mine.zip"))
        assert "cache" not in str(caught.value) and str(tmp_path / "mine.zip") in str(caught.value)
        assert not [path for path in (cache / "data").iterdir() if path.is_dir()]


def test_links_of_an_archive_are_counted_at_every_opening(tmp_path, pilot):
    with tarfile.open(tmp_path / "mine.tar", "w") as packed:
        packed.add(pilot, "mine")
        link = tarfile.TarInfo("mine/train/10/link.png")
        link.type, link.linkname = tarfile.SYMTYPE, "0.JPEG"
        packed.addfile(link)
    for _ in range(2):
        source = str(tmp_path / "mine.tar")
        train, _ = sources.open_splits("mine", tmp_path / "cache", source=source)
        assert train.skipped.paths["links in the archive"] == ["mine/train/10/link.png"]


def test_an_unpacked_archive_that_another_run_reads_stays(tmp_path, pilot):
    with zipfile.ZipFile(tmp_path / "mine.zip", "w") as packed:
        for file in (pilot / "train").rglob("*.*"):
            packed.write(file, file.relative_to(pilot / "train"))
        packed.write(pilot / "train/10/0.JPEG", "100/1.JPEG")

    def opened(**options):
        source = str(tmp_path / "mine.zip")
        return sources.open_splits("mine", tmp_path / "cache", source=source, **options)

    train, _ = opened(test_share=0.5, allow_overlap=True)
    with pytest.raises(InputError, match=r"mine.zip: expected train/CLASS/IMAGE"):
        opened()
    assert train.image(0).size == (5, 7)


def test_notes_on_both_splits_are_kept_together(plain_source):
    train = dataclasses.replace(plain_source(4), pixel_hashes=lambda: [b"a", b"a", b"b", b"c"])
    test = dataclasses.replace(train, split="test", skipped=Skipped())
    noted(train, test, {})
    reasons = [reason.partition(" (")[0] for reason in train.skipped.paths]
    assert sorted(reasons) == [
        "test images that are in train, too",
        "the same picture in two classes of test",
        "the same picture in two classes of train",
    ]
