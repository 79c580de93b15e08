"""Folders of images: layouts, division, one look at every image, and what is refused."""

import hashlib
import itertools
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image

from fdc_jax.data import folder, images
from tests.errors import input_error, stale

CLASSES = {"ant": 5, "Bee": 4, "cat 10": 7}
IMAGES = [f"{name}/{number}.jpg" for name, count in CLASSES.items() for number in range(count)]


@pytest.fixture
def write(tmp_path, photo):
    """Returns a function that writes a different photograph at every path below a folder."""
    seeds = itertools.count()

    def call(root, *names):
        for name in names:
            path = tmp_path / root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            photo(9, 12, next(seeds)).save(path)
        return tmp_path / root

    return call


@pytest.fixture
def photos(write):
    """A folder of classes, not divided."""
    return write("photos", *IMAGES)


@pytest.fixture
def divided(write):
    """The same in train/CLASS and test/CLASS: the first two of a class are for testing."""
    return write("divided", *(f"{'train' if n[-5] > '1' else 'test'}/{n}" for n in IMAGES))


@pytest.fixture
def opened(tmp_path):
    """Returns a function that opens a folder with a cache."""

    def call(root, share=0.2, name="mine", **options):
        return folder.open_folder(root, name, tmp_path / "cache", test_share=share, **options)

    return call


def counts(dataset):
    return np.bincount(dataset.labels).tolist()


@pytest.mark.parametrize("other, depth", [("test", ""), ("val", "a"), ("validation", "a/b")])
def test_folder_with_train_and_test_is_read_as_given(tmp_path, divided, opened, other, depth):
    (divided / "test").rename(divided / other)
    around = tmp_path / "around"
    (around / depth).mkdir(parents=True)
    root = divided.rename(around / depth / "divided")
    splits = opened(root if other == "validation" else around)
    for split, dataset, numbers in zip(
        ("train", other), splits, ([2, 3, 5], [2, 2, 2]), strict=True
    ):
        assert (dataset.partition, dataset.class_names) == ("given", ("Bee", "ant", "cat 10"))
        assert counts(dataset) == numbers
        for index, name in enumerate(dataset.ids):
            assert dataset.read(index) == (root / split / name).read_bytes()
            assert dataset.class_names[dataset.labels[index]] == name.partition("/")[0]


def test_undivided_folder_is_split_per_class_by_hashed_names(photos, opened):
    train, test = opened(photos, 0.3)
    assert train.partition == "0.3 of each class"
    for name, count in CLASSES.items():
        ids = [f"{name}/{number}.jpg" for number in range(count)]
        ids.sort(key=lambda image_id: hashlib.sha256(image_id.encode()).hexdigest())
        held_out = round(0.3 * count)
        assert {*test.ids} & {*ids} == {*ids[:held_out]}
        assert {*train.ids} & {*ids} == {*ids[held_out:]}


# Texts about what is skipped.
SKIPPED = (
    "images outside of train and test: 11 (loose.jpg, val/Bee/2.jpg, ",
    "images outside of class folders: 2 (test/loose.jpg, train/loose.jpg)",
    "image: 46 (40 without any, 3 .heic, 3 .gif",
    "met elsewhere: 3 (train/dog, test/cat 10/again, train/ant/loop)",
    "no regular files: 1 (train/ant/fifo.png)",
    "classes without test images: 1 (ant)",
    "hidden files and folders of systems: 3 (train/$RECYCLE.BIN, train/@eaDir, ",
    "images of a class in folders below it: 1 (train/ant/deep/frames.tif)",
    "files with 2 frames after the first in train: 1 (ant/deep/frames.tif has 3)",
)


def test_every_skipped_path_is_counted_and_named(divided, opened, photo):
    before = opened(divided)
    ant = divided / "train/ant"
    shutil.copytree(divided / "train", divided / "val")
    for name in ("$RECYCLE.BIN", "@eaDir"):
        (divided / "train" / name).mkdir()
    for split in ("", "train", "test"):
        shutil.copy(ant / "2.jpg", divided / split / "loose.jpg")
    names = [f"file{number}" for number in range(40)]
    names += [f"{number}.{suffix}" for suffix in ("gif", "HEIC") for number in range(3)]
    for name in (*names, ".hidden.png"):
        (ant / name).touch()
    (ant / "deep").mkdir()
    others = [photo(8, 6, 1), photo(8, 6, 2)]
    photo(8, 6, 0).save(ant / "deep/frames.tif", save_all=True, append_images=others)
    (ant / "loop").symlink_to("..")
    (divided / "train/dog").symlink_to("ant")
    (divided / "test/cat 10/again").symlink_to(divided)
    os.mkfifo(ant / "fifo.png")
    shutil.rmtree(divided / "test/ant")
    for _ in range(2):  # The second time, no image is decoded.
        train, test = opened(divided, grey_bits=12)
        assert train.grey_bits == 0  # No image has grey of 16 bits.
        assert {*train.ids} == {*before[0].ids, "ant/deep/frames.tif"}
        assert len(test) == len(before[1]) - 2
        assert train.skipped is test.skipped
        assert not [text for text in SKIPPED if text not in train.skipped.text()]


def test_linked_folder_is_searched_once_by_its_own_path(divided, opened):
    (divided / "train/ant").rename(divided.parent / "elsewhere")
    (divided / "train/ant").symlink_to("../../elsewhere")
    (divided / "train/0").symlink_to("cat 10")  # Comes before it.
    train, _ = opened(divided)
    assert counts(train) == [2, 3, 5]
    assert train.skipped.text() == "links to folders that are met elsewhere: 1 (train/0)"


@pytest.fixture
def decoded(monkeypatch):
    """The list of files that were decoded."""
    names = []

    def watched(encoded, description, upright=False, examine=images.examine):
        names.append(Path(description))
        return examine(encoded, description, upright)

    monkeypatch.setattr(images, "examine", watched)
    return names


def test_only_new_or_changed_images_are_decoded(divided, opened, decoded, tmp_path):
    first = opened(divided)
    assert len(decoded) == 16
    shown = map(np.asarray, map(first[0].image, range(len(first[0]))))
    assert first[0].pixel_hashes() == [*map(images.pixels_sha256, shown)]
    decoded.clear()
    assert [split.checksum for split in opened(divided)] == [split.checksum for split in first]
    assert decoded == []
    shutil.copy(divided / "test/ant/0.jpg", divided / "test/ant/new.jpg")
    os.utime(divided / "train/ant/2.jpg", ns=(1, 1))
    train, test = opened(divided)
    assert sorted(decoded) == [divided / "test/ant/new.jpg", divided / "train/ant/2.jpg"]
    assert train.checksum == first[0].checksum and test.checksum != first[1].checksum
    (kept,) = (tmp_path / "cache").glob("*.json")
    assert len(json.loads(kept.read_text())) == 17


def test_swapped_images_of_equal_size_and_date_are_noticed(write, opened):
    names = ("train/ant/0.bmp", "train/bee/0.bmp", "test/ant/1.bmp", "test/bee/1.bmp")
    root = write("bitmaps", *names)
    paths = [root / name for name in names[:2]]
    contents = [path.read_bytes() for path in paths]

    def with_equal_dates(contents):
        for path, content in zip(paths, contents, strict=True):
            path.write_bytes(content)
            os.utime(path, ns=(10**18, 10**18))
        return opened(root)[0].pixel_hashes()

    before = with_equal_dates(contents)
    assert with_equal_dates(contents[::-1]) == before[::-1] != before


def test_an_image_that_changes_during_a_run_is_refused(divided, opened):
    train, _ = opened(divided)
    path = divided / "train/Bee/2.jpg"
    os.utime(path, ns=(1, 1))
    assert train.read(0) == path.read_bytes()  # Another date alone is no change.
    path.write_bytes((divided / "train/Bee/3.jpg").read_bytes())
    with input_error(r"Bee/2.jpg: expected the image of the start, found an"):
        train.image(0)


def test_orientation_is_applied_to_own_images(divided, opened, photo):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    photo(30, 10).save(divided / "test/Bee/0.jpg", exif=exif)
    for upright, size in ((True, (10, 30)), (False, (30, 10))):
        _, test = opened(divided, name=str(upright), upright=upright)
        assert test.image(0).size == size


def test_unreadable_images_are_named_and_others_kept(divided, opened, decoded):
    broken = divided / "train/Bee/2.jpg"
    good = broken.read_bytes()
    for content in (b"no image", good[:-30]):
        broken.write_bytes(content)
        with input_error(f"^mine: 1 of 16 images cannot be read: {broken}: cannot decode"):
            opened(divided)
    broken.write_bytes(good)
    decoded.clear()
    opened(divided)
    assert decoded == [broken]


def test_training_image_in_test_is_refused_unless_allowed(divided, opened):
    shutil.copy(divided / "train/ant/3.jpg", divided / "test/Bee/7.jpg")
    message = (
        r"no image of train in test, found 1, such as \S+/test/Bee/7.jpg, which is "
        r"\S+/train/ant/3.jpg, too; config.data.allow_over"
    )
    with input_error(message):
        opened(divided)
    text = "test images that are in train, too: 1 (test/Bee/7.jpg)"
    assert opened(divided, allow_overlap=True)[1].skipped.text() == text


def test_a_picture_in_two_classes_is_named(divided, opened):
    for name, copied in (("train/ant/3", "train/Bee/8"), ("train/ant/3", "train/cat 10/9")):
        shutil.copy(divided / f"{name}.jpg", divided / f"{copied}.jpg")
    shutil.copy(divided / "test/ant/0.jpg", divided / "test/Bee/9.jpg")
    reason = "the same picture in two classes of"
    for _ in range(2):
        train, _ = opened(divided)
        assert train.skipped.paths == {
            f"{reason} train (2 pairs of classes, such as Bee and ant)": [
                "Bee/8.jpg = ant/3.jpg",
                "Bee/8.jpg = cat 10/9.jpg",
            ],
            f"{reason} test (1 pair of classes, such as Bee and ant)": ["Bee/9.jpg = ant/0.jpg"],
        }


GREY = {"train/a/0": 200, "train/a/1": 300, "train/b/0": 3000, "test/a/0": 5000, "test/b/0": 400}


@pytest.mark.parametrize("wanted, bits", [(0, 13), (16, 16), (10, 10)])
def test_grey_of_a_data_set_has_one_scale(tmp_path, write, opened, wanted, bits):
    root = write("grey", *(f"{name}.png" for name in GREY))
    for name, value in GREY.items():
        Image.fromarray(np.full((4, 5), value, np.uint16)).save(root / f"{name}.png")
    train, test = opened(root, grey_bits=wanted)
    assert train.grey_bits == test.grey_bits == bits
    values = [np.asarray(split.image(index)).max() for split in (train, test) for index in (0, -1)]
    assert values == [min(value >> (bits - 8), 255) for value in (200, 3000, 5000, 400)]
    paths = train.skipped.paths
    assert len(paths[f"grey images whose {bits} bits are scaled to 8"]) == 5
    cut = paths.get("grey images with values of more than 10 bits, which are cut", [])
    assert cut == (["train/b/0.png", "test/a/0.png"] if bits == 10 else [])
    others = [opened(root, grey_bits=other)[0].checksum for other in (bits, 9)]
    assert train.checksum == others[0] != others[1]


BEE, CAT = ("Bee/0.jpg", "Bee/1.jpg"), ("cat/0.jpg", "cat/1.jpg")
DEPTHS = ("a/Bee", "a/cat", "b/beach", "c/canyon")
TRAIN = [f"train/{name}" for name in BEE + CAT]
TESTING = [f"testing/{name}" for name in BEE + CAT]
TRAINING = [f"training/{name}" for name in BEE + CAT]
# Photographs, and the line that names the folder.
WRONG = {
    "one class": (BEE, "expected images of at least two classes, found Bee alone"),
    "one image": (
        (*BEE, "ant/0.jpg", "cat/0.jpg"),
        "found classes of one image alone: 2 (ant/0.jpg, cat/0.jpg)",
    ),
    "unequal depth": (
        [f"{name}/0.jpg" for name in DEPTHS] + [f"{name}/1.jpg" for name in DEPTHS],
        "expected all classes beside each other in a, found also b/beach, c/canyon",
    ),
    "flat test": (
        (*TRAIN, "test/0.jpg", "test/1.jpg"),
        "expected images in test/CLASS, found none; images outside of class folders: 2 (test/0.jpg",
    ),
    "flat": (("0.jpg", "1.jpg"), "2 images outside of folders; found no folder"),
    "two folders": (TRAINING + TESTING, "found testing, training; name one of them"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_layouts_are_refused(write, opened, case):
    names, message = WRONG[case]
    root = write("wrong", *names)
    with input_error(f"^{root}: .*{re.escape(message)}"):
        opened(root)


def test_image_file_above_one_gib_is_not_read(tmp_path):
    with open(tmp_path / "big.png", "wb") as file:
        file.truncate(2**30 + 1)
    with input_error(r"/big.png: expected an image of at most 1 GiB, found 1,0"):
        folder.file_bytes(tmp_path / "big.png")


def test_unreadable_folder_is_an_error(divided, opened, monkeypatch):
    monkeypatch.setattr(os, "scandir", stale)
    with pytest.raises(OSError, match="Stale"):
        opened(divided)
