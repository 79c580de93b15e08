"""Folders of images: layouts, division, one look at every image, and what is refused."""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image

from fdc_jax.data import archive, folder, images
from fdc_jax.errors import InputError

CLASSES = {"ant": 5, "Bee": 4, "cat 10": 7}


@pytest.fixture
def photos(tmp_path, photo):
    """A folder of classes of photographs, not divided."""
    root = tmp_path / "photos"
    for seed, (name, count) in enumerate(CLASSES.items()):
        (root / name).mkdir(parents=True)
        for number in range(count):
            photo(9 + number, 12, 100 * seed + number).save(root / name / f"{number}.jpg")
    return root


@pytest.fixture
def divided(photos, tmp_path):
    """The same in train/CLASS and test/CLASS: the first two of each class are for testing."""
    for path in sorted(photos.rglob("*.jpg")):
        split = "test" if int(path.stem) < 2 else "train"
        place = tmp_path / "divided" / split / path.parent.name
        place.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, place)
    return tmp_path / "divided"


@pytest.fixture
def opened(tmp_path):
    """Returns a function that opens a folder with a cache."""

    def call(root, share=0.2, name="mine", **options):
        return folder.open_folder(root, name, tmp_path / "cache", test_share=share, **options)

    return call


@pytest.mark.parametrize(("other", "depth"), [("test", ""), ("val", "a"), ("validation", "a/b")])
def test_a_divided_folder(tmp_path, divided, opened, other, depth):
    (divided / "test").rename(divided / other)
    if depth:
        (tmp_path / "around" / depth).mkdir(parents=True)
        divided = divided.rename(tmp_path / "around" / depth / "divided")
    root = tmp_path / "around" if depth == "a" else divided
    train, test = opened(root)
    assert train.class_names == test.class_names == ("Bee", "ant", "cat 10")
    assert np.bincount(train.labels).tolist() == [2, 3, 5]
    assert np.bincount(test.labels).tolist() == [2, 2, 2]
    assert train.partition == test.partition == "given"
    for split, each in (("train", train), (other, test)):
        assert sorted(each.ids, key=lambda name: name.split("/")) == list(each.ids)
        for index, name in enumerate(each.ids):
            assert each.read(index) == (divided / split / name).read_bytes()
            assert each.class_names[each.labels[index]] == name.partition("/")[0]


def test_an_undivided_folder_is_divided_within_each_class_by_names(photos, opened):
    train, test = opened(photos, 0.3)
    assert train.partition == "0.3 of each class"
    for name, count in CLASSES.items():
        every = [f"{name}/{number}.jpg" for number in range(count)]
        drawn = sorted(every, key=lambda each: hashlib.sha256(each.encode()).hexdigest())
        found = {each for each in test.ids if each.startswith(name)}
        assert found == set(drawn[: round(0.3 * count)])
    assert sorted((*train.ids, *test.ids)) == sorted(
        path.relative_to(photos).as_posix() for path in photos.rglob("*.jpg")
    )
    shutil.copytree(photos / "ant", photos / "aardvark")
    again = opened(photos, 0.3)[1]
    assert tuple(each for each in again.ids if not each.startswith("aardvark")) == test.ids


@pytest.mark.parametrize("names", [("training", "testing"), ("Train", "Test"), ("a", "b")])
def test_no_folder_of_classes_is_left_out_silently(photos, opened, names):
    root = photos.parent / "around"
    for name in names:
        shutil.copytree(photos, root / name)
    with pytest.raises(InputError, match=f"found {', '.join(sorted(names))}; name"):
        opened(root)


@pytest.mark.parametrize("share", [0.01, 0.99])
def test_no_class_is_without_images_for_training_or_testing(photos, opened, share):
    expected = [[3, 4, 6], [1, 1, 1]]
    found = [np.bincount(each.labels).tolist() for each in opened(photos, share)]
    assert found == (expected if share < 0.5 else expected[::-1])


def test_what_is_no_image_is_skipped_and_said_once(divided, opened, caplog):
    shutil.copytree(divided / "test" / "ant", divided / "val" / "dog")  # Beside test, it is none.
    (divided / "train" / "ant" / "list.txt").write_text("1.png")
    for hidden in (".hidden.png", "._0.jpg"):
        (divided / "train" / "ant" / hidden).write_text("")
    for name in (".thumbnails", "__MACOSX"):
        shutil.copytree(divided / "train" / "ant", divided / "train" / name)
    (divided / "train" / "ant" / "deep" / "er").mkdir(parents=True)
    shutil.move(divided / "train" / "ant" / "3.jpg", divided / "train" / "ant" / "deep" / "er")
    train, test = opened(divided)
    assert (len(train), len(test), train.class_names) == (10, 6, ("Bee", "ant", "cat 10"))
    assert "ant/deep/er/3.jpg" in train.ids
    assert "skipped, as no images by their suffix: 1 .txt" in caplog.text
    caplog.clear()
    opened(divided)
    assert not caplog.text


def test_only_what_is_new_or_changed_is_looked_at(divided, opened, monkeypatch, tmp_path):
    looked = []

    def watched(encoded, description, upright=False, decode=images.decode):
        if description.startswith(str(divided)):
            looked.append(Path(description).relative_to(divided).as_posix())
        return decode(encoded, description, upright)

    monkeypatch.setattr(images, "decode", watched)
    first = opened(divided)
    assert len(looked) == 16
    assert first[0].pixel_hashes() == [
        images.pixels_sha256(np.asarray(first[0].image(index))) for index in range(len(first[0]))
    ]
    looked.clear()
    assert [each.checksum for each in opened(divided)] == [each.checksum for each in first]
    assert looked == []
    shutil.copy(divided / "test/ant/0.jpg", divided / "test/ant/new.jpg")
    os.utime(divided / "train/ant/2.jpg", ns=(1, 1))
    shutil.copy(divided / "test/Bee/1.jpg", divided / "test/Bee/0.jpg")
    again = opened(divided)
    assert sorted(looked) == ["test/Bee/0.jpg", "test/ant/new.jpg", "train/ant/2.jpg"]
    assert again[0].checksum == first[0].checksum and again[1].checksum != first[1].checksum
    (kept,) = (tmp_path / "cache").glob("*.json")
    assert len(json.loads(kept.read_text())) == 17


def test_orientation_is_applied_to_images_of_ones_own(divided, opened, photo):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    photo(30, 10).save(divided / "test" / "ant" / "0.jpg", exif=exif)
    sizes, checksums = [], []
    for upright in (True, False):
        test = opened(divided, name=f"upright {upright}", upright=upright)[1]
        sizes.append(test.image(test.ids.index("ant/0.jpg")).size)
        checksums.append(test.checksum)
    assert sizes == [(10, 30), (30, 10)] and checksums[0] != checksums[1]


def test_every_unreadable_image_is_named_and_the_others_are_not_looked_at_again(
    divided, opened, monkeypatch
):
    good = (divided / "train/ant/2.jpg").read_bytes()
    (divided / "train/Bee/2.jpg").write_bytes(b"")
    (divided / "test/ant/0.jpg").write_text("not an image")
    (divided / "train/ant/2.jpg").write_bytes(good[:-30])
    with pytest.raises(InputError, match=r"^mine: 3 of 16 images cannot be read: ") as caught:
        opened(divided)
    for name in ("train/Bee/2.jpg", "test/ant/0.jpg", "train/ant/2.jpg"):
        assert str(divided / name) in str(caught.value)
    assert "\n" not in str(caught.value)
    hashed = []
    monkeypatch.setattr(images, "decode", lambda *_: Image.new("RGB", (2, 2)))
    monkeypatch.setattr(images, "pixels_sha256", lambda image: hashed.append(image) or bytes(32))
    opened(divided)
    assert len(hashed) == 3


def test_images_of_train_in_test_are_counted(divided, opened, caplog):
    shutil.copy(divided / "train/ant/3.jpg", divided / "test/Bee/7.jpg")
    opened(divided)
    assert re.search(r"1 test image also in train, such as \S+test/Bee/7.jpg", caplog.text)


def empty(root):
    for path in (root / "ant").iterdir():
        path.rename(path.with_suffix(".GIF"))


def single(root):
    for path in sorted((root / "ant").iterdir())[1:]:
        path.unlink()


REFUSED = {
    "folder named as an image": (lambda root: (root / "z.png").mkdir(), 0.2, "z.png: .* none$"),
    "no image": (empty, 0.2, r"/ant: expected images in this class folder.* suffix: 5 \.gif$"),
    "single image": (single, 0.2, "class ant: expected two images or more to divide, found .*/ant"),
    "no division": (id, 0.0, "photos: expected .* config.data.test_share above 0; found Bee, ant,"),
}


@pytest.mark.parametrize(("change", "share", "message"), REFUSED.values(), ids=REFUSED)
def test_folders_that_are_refused(photos, opened, change, share, message):
    change(photos)
    with pytest.raises(InputError, match=message):
        opened(photos, share)


def test_a_folder_that_cannot_be_read_is_not_passed_over(divided, opened, monkeypatch):
    def closed(path, scan=os.scandir):
        if str(path).endswith("ant"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", closed)
    with pytest.raises(PermissionError, match="train/ant"):
        opened(divided)
    with pytest.raises(PermissionError, match="train/ant"):
        folder.find_images(divided / "train" / "ant")


@pytest.mark.parametrize("name", ["a\x1b[31mb", "a\nb", "a\tb", "a\u202eb"])
def test_class_names_have_no_control_characters(tmp_path, name):
    for split in ("train", "test"):
        (tmp_path / split / name).mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(tmp_path / split / name / "0.png")
    with pytest.raises(InputError, match=r"expected class names without control .* 'a\\") as raised:
        folder.open_folder(tmp_path, "mine", tmp_path / "cache")
    assert str(raised.value).isprintable()


def test_a_benchmark_is_counted_before_an_image_is_decoded(tmp_path):
    """By the names of its files, also in an archive."""
    for split in ("train", "test"):
        (tmp_path / "omni" / split / "one").mkdir(parents=True)
        (tmp_path / "omni" / split / "one" / "1.png").write_text("no image")
    message = "^omnibench: expected 300 classes, found 1;"
    with pytest.raises(InputError, match=message):
        folder.open_folder(tmp_path / "omni", "omnibench", tmp_path / "cache")
    listed = archive.names(tmp_path)
    with pytest.raises(InputError, match=message):
        folder.verify_names("omnibench", listed)
    packed = shutil.make_archive(str(tmp_path / "omni"), "gztar", tmp_path, "omni")
    assert {*filter(folder._is_image, archive.names(Path(packed)))} == {
        *filter(folder._is_image, listed)
    }
