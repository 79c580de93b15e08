"""Folders of images: layouts, division, one look at every image, and what is refused."""

import hashlib
import itertools
import json
import os
import shutil
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from PIL import ExifTags, Image

from fdc_jax.data import folder, images
from fdc_jax.data.dataset import class_checksums
from fdc_jax.errors import InputError

CLASSES = {"ant": 5, "Bee": 4, "cat 10": 7}


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
    for name, count in CLASSES.items():
        root = write("photos", *(f"{name}/{number}.jpg" for number in range(count)))
    return root


@pytest.fixture
def divided(write):
    """The same in train/CLASS and test/CLASS: the first two of a class are for testing."""
    for name, count in CLASSES.items():
        for number in range(count):
            root = write("divided", f"{'train' if number > 1 else 'test'}/{name}/{number}.jpg")
    return root


@pytest.fixture
def opened(tmp_path):
    """Returns a function that opens a folder with a cache."""

    def call(root, share=0.2, name="mine", **options):
        return folder.open_folder(root, name, tmp_path / "cache", test_share=share, **options)

    return call


def counts(dataset):
    return np.bincount(dataset.labels).tolist()


@pytest.mark.parametrize(("other", "depth"), [("test", ""), ("val", "a"), ("validation", "a/b")])
def test_folder_with_train_and_test_is_read_as_given(tmp_path, divided, opened, other, depth):
    (divided / "test").rename(divided / other)
    if depth:
        (tmp_path / "around" / depth).mkdir(parents=True)
        divided = divided.rename(tmp_path / "around" / depth / "divided")
    train, test = opened(tmp_path / "around" if depth == "a" else divided)
    assert train.class_names == test.class_names == ("Bee", "ant", "cat 10")
    assert (counts(train), counts(test)) == ([2, 3, 5], [2, 2, 2])
    assert train.partition == test.partition == "given"
    for split, dataset in (("train", train), (other, test)):
        assert sorted(dataset.ids, key=lambda name: name.split("/")) == list(dataset.ids)
        for index, name in enumerate(dataset.ids):
            assert dataset.read(index) == (divided / split / name).read_bytes()
            assert dataset.class_names[dataset.labels[index]] == name.partition("/")[0]


def test_undivided_folder_is_split_per_class_by_hashed_names(photos, opened):
    train, test = opened(photos, 0.3)
    assert train.partition == "0.3 of each class"
    for name, count in CLASSES.items():
        ids = [f"{name}/{number}.jpg" for number in range(count)]
        ids.sort(key=lambda image_id: hashlib.sha256(image_id.encode()).hexdigest())
        actual = {image_id for image_id in test.ids if image_id.startswith(name)}
        assert actual == set(ids[: round(0.3 * count)])
    assert {*train.ids, *test.ids} == {
        path.relative_to(photos).as_posix() for path in photos.rglob("*.jpg")
    }
    shutil.copytree(photos / "ant", photos / "aardvark")
    _, again = opened(photos, 0.3, allow_overlap=True)
    assert {*again.ids} > {*test.ids}


@pytest.mark.parametrize("share", [0.01, 0.99])
def test_no_class_is_without_images_for_training_or_testing(photos, opened, share):
    splits = opened(photos, share)
    small, large = splits if share > 0.5 else splits[::-1]
    assert (counts(small), counts(large)) == ([1, 1, 1], [3, 4, 6])


def test_hidden_files_and_system_folders_are_skipped(divided, opened, write):
    for hidden in (".hidden.png", "._0.jpg"):
        (divided / "train" / "ant" / hidden).write_text("")
    systems = (".thumbnails", "__MACOSX", "@eaDir", "$RECYCLE.BIN", "lost+found")
    for name in systems:
        shutil.copytree(divided / "train" / "ant", divided / "train" / name)
    write("divided", "train/ant/deep/9.jpg")
    train, test = opened(divided)
    assert (len(train), len(test), train.class_names) == (11, 6, ("Bee", "ant", "cat 10"))
    assert "ant/deep/9.jpg" in train.ids
    assert train.skipped.paths == {
        "hidden files and folders of systems": [
            *sorted(f"train/{name}" for name in systems),
            "train/ant/._0.jpg",
            "train/ant/.hidden.png",
        ],
        "images of a class in folders below it": ["train/ant/deep/9.jpg"],
    }


def loose(root):
    for split in ("", "train", "test"):
        shutil.copy(root / "train/ant/2.jpg", root / split / "loose.jpg")


def other_kinds(root):
    for number in range(40):
        (root / "train/ant" / f"file{number}").touch()
    for suffix in ("gif", "raw", "psd", "svg", "txt", "HEIC"):
        for number in range(3):
            (root / "test/Bee" / f"{number}.{suffix}").touch()


def links(root):
    (root / "train/ant/loop").symlink_to("..")
    (root / "train/dog").symlink_to("ant")
    (root / "test/cat 10/again").symlink_to(root)


def special(root):
    os.mkfifo(root / "train/ant/fifo.png")


def not_in_test(root):
    shutil.rmtree(root / "test/ant")


def beside(root):
    shutil.copytree(root / "train", root / "val")


# A change of a divided folder, and the text about what is skipped.
SKIPPED = [
    (
        loose,
        "images outside of train and test: 1 (loose.jpg); "
        "images outside of class folders: 2 (test/loose.jpg, train/loose.jpg)",
    ),
    (other_kinds, "image: 58 (40 without any, 3 .heic, 3 .gif, 3 .psd, 3 .raw"),
    (links, "met elsewhere: 3 (train/dog, test/cat 10/again, train/ant/loop)"),
    (special, "no regular files: 1 (train/ant/fifo.png)"),
    (not_in_test, "classes without test images: 1 (ant)"),
    (beside, "images outside of train and test: 10 (val/Bee/2.jpg, "),
]


@pytest.mark.parametrize(("change", "text"), SKIPPED)
def test_every_skipped_path_is_counted_and_named(divided, opened, change, text):
    before = opened(divided)
    change(divided)
    for _ in range(2):  # The second time, no image is decoded.
        train, test = opened(divided)
        assert train.ids == before[0].ids
        assert len(test) == len(before[1]) - 2 * (change is not_in_test)
        assert train.skipped is test.skipped
        assert text in train.skipped.text()


def test_linked_folder_is_searched_once_by_its_own_path(divided, opened):
    (divided / "train/ant").rename(divided.parent / "elsewhere")
    (divided / "train/ant").symlink_to("../../elsewhere")
    (divided / "train/0").symlink_to("cat 10")  # Comes before it.
    train, _ = opened(divided)
    assert counts(train) == [2, 3, 5]
    assert train.skipped.text() == "links to folders that are met elsewhere: 1 (train/0)"


def test_names_of_classes_are_compared_in_one_unicode_form(divided, opened):
    for split, form in (("train", "NFC"), ("test", "NFD")):
        (divided / split / "ant").rename(divided / split / unicodedata.normalize(form, "café"))
    train, test = opened(divided)
    assert train.class_names == ("Bee", "café", "cat 10") == test.class_names
    assert counts(test) == [2, 2, 2]


def test_file_name_that_is_not_utf8_is_accepted(photos, opened):
    os.rename(photos / "ant/1.jpg", os.fsencode(photos / "ant") + b"/caf\xe9.jpg")
    for train, test in (opened(photos), opened(photos)):
        assert len({train.checksum, test.checksum, *class_checksums(train, test).values()}) == 5


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
    assert first[0].pixel_hashes() == [
        images.pixels_sha256(np.asarray(first[0].image(index))) for index in range(len(first[0]))
    ]
    decoded.clear()
    assert [split.checksum for split in opened(divided)] == [split.checksum for split in first]
    assert decoded == []
    shutil.copy(divided / "test/ant/0.jpg", divided / "test/ant/new.jpg")
    os.utime(divided / "train/ant/2.jpg", ns=(1, 1))
    shutil.copy(divided / "test/Bee/1.jpg", divided / "test/Bee/0.jpg")
    train, test = opened(divided)
    names = ("test/Bee/0.jpg", "test/ant/new.jpg", "train/ant/2.jpg")
    assert sorted(decoded) == [divided / name for name in names]
    assert train.checksum == first[0].checksum and test.checksum != first[1].checksum
    (kept,) = (tmp_path / "cache").glob("*.json")
    assert len(json.loads(kept.read_text())) == 17


def swap_by_name(first, second):
    first.rename(first.parent / "aside")
    second.rename(first)
    (first.parent / "aside").rename(second)


def swap_contents(first, second):
    for path in first.iterdir():
        other = second / path.name
        contents, states = (path.read_bytes(), other.read_bytes()), (path.stat(), other.stat())
        for file, content, state in zip((other, path), contents, reversed(states), strict=True):
            file.write_bytes(content)
            os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))


def swap_by_copy(first, second):
    shutil.copytree(first, first.parent / "copy")
    shutil.rmtree(first)
    shutil.copytree(second, first)
    shutil.rmtree(second)
    (first.parent / "copy").rename(second)


@pytest.mark.parametrize("swap", [swap_by_name, swap_contents, swap_by_copy])
@pytest.mark.parametrize("same_dates", [False, True])
def test_swapped_images_of_equal_size_are_noticed(write, opened, swap, same_dates):
    for name in ("ant", "bee"):
        root = write("bitmaps", f"train/{name}/0.bmp", f"train/{name}/1.bmp", f"test/{name}/2.bmp")
    for path in root.rglob("*.bmp"):
        if same_dates:
            os.utime(path, ns=(10**18, 10**18))
    before = class_checksums(*opened(root))
    hashes = [split.pixel_hashes() for split in opened(root)]
    swap(root / "train/ant", root / "train/bee")
    train, test = opened(root)
    assert train.pixel_hashes() == hashes[0][2:] + hashes[0][:2]
    assert test.pixel_hashes() == hashes[1]
    after = class_checksums(train, test)
    assert all(after[name] != before[name] for name in ("ant", "bee"))


def test_an_image_that_changes_during_a_run_is_refused(divided, opened):
    train, _ = opened(divided)
    path, other = divided / "train/ant/2.jpg", divided / "train/ant/3.jpg"
    index, expected = train.ids.index("ant/2.jpg"), path.read_bytes()
    os.utime(path, ns=(1, 1))
    assert train.read(index) == expected  # Another date alone is no change.
    status = path.stat()
    path.write_bytes(other.read_bytes())
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(InputError, match=r"ant/2.jpg: expected the image of the start, found an"):
        train.image(index)


def test_orientation_is_applied_to_own_images(divided, opened, photo):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    photo(30, 10).save(divided / "test" / "ant" / "0.jpg", exif=exif)
    _, turned = opened(divided, name="turned", upright=True)
    _, stored = opened(divided, name="stored", upright=False)
    index = turned.ids.index("ant/0.jpg")
    assert (turned.image(index).size, stored.image(index).size) == ((10, 30), (30, 10))
    assert turned.checksum != stored.checksum


def test_unreadable_images_are_named_and_others_kept(divided, opened, decoded):
    broken = [divided / name for name in ("train/Bee/2.jpg", "test/ant/0.jpg", "train/ant/2.jpg")]
    good = [path.read_bytes() for path in broken]
    for path, content in zip(broken, (b"", b"no image", good[2][:-30]), strict=True):
        path.write_bytes(content)
    with pytest.raises(InputError, match=r"^mine: 3 of 16 images cannot be read: ") as caught:
        opened(divided)
    assert all(str(path) in str(caught.value) for path in broken)
    assert "\n" not in str(caught.value)
    for path, content in zip(broken, good, strict=True):
        path.write_bytes(content)
    decoded.clear()
    opened(divided)
    assert sorted(decoded) == sorted(broken)


def test_training_image_in_test_is_refused_unless_allowed(divided, opened):
    shutil.copy(divided / "train/ant/3.jpg", divided / "test/Bee/7.jpg")
    message = (
        r"no image of train in test, found 1, such as \S+/test/Bee/7.jpg, which is "
        r"\S+/train/ant/3.jpg, too; config.data.allow_over"
    )
    for _ in range(2):
        with pytest.raises(InputError, match=message):
            opened(divided)
    text = "test images that are in train, too: 1 (test/Bee/7.jpg)"
    assert opened(divided, allow_overlap=True)[1].skipped.text() == text


def test_a_picture_in_two_classes_is_named(divided, opened):
    for source, *copies in (
        ("train/ant/3", "train/Bee/8", "train/cat 10/9"),
        ("train/cat 10/2", "train/Bee/10", "train/cat 10/11"),
        ("test/ant/0", "test/Bee/9"),
    ):
        for name in copies:
            shutil.copy(divided / f"{source}.jpg", divided / f"{name}.jpg")
    reason = "the same picture in two classes of"
    for _ in range(2):
        train, _ = opened(divided)
        assert train.skipped.paths == {
            f"{reason} train (2 pairs of classes, such as Bee and cat 10)": [
                "Bee/8.jpg = ant/3.jpg",
                "Bee/10.jpg = cat 10/11.jpg",
                "Bee/10.jpg = cat 10/2.jpg",
                "Bee/8.jpg = cat 10/9.jpg",
            ],
            f"{reason} test (1 pair of classes, such as Bee and ant)": ["Bee/9.jpg = ant/0.jpg"],
        }


GREY = {"train/a/0": 200, "train/a/1": 300, "train/b/0": 3000, "train/b/1": 1000}
GREY |= {"test/a/0": 5000, "test/b/0": 400}


@pytest.fixture
def grey(tmp_path):
    """A folder of grey images of 16 bits, of one value each, and an image of 8 bits."""
    for number, (name, value) in enumerate(GREY.items()):
        path = tmp_path / "grey" / f"{name}.{('png', 'tif')[number % 2]}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((4, 5), value, np.uint16)).save(path)
    Image.new("L", (5, 4), 77).save(tmp_path / "grey/train/a/2.png")
    return tmp_path / "grey"


def values_of(*splits):
    return {
        f"{split.split}/{os.path.splitext(name)[0]}": int(np.asarray(split.image(index)).max())
        for split in splits
        for index, name in enumerate(split.ids)
    }


@pytest.mark.parametrize(("wanted", "bits"), [(0, 13), (16, 16), (10, 10)])
def test_grey_of_a_data_set_has_one_scale(grey, opened, wanted, bits):
    train, test = opened(grey, grey_bits=wanted)
    assert train.grey_bits == test.grey_bits == bits
    expected = {name: min(value >> (bits - 8), 255) for name, value in GREY.items()}
    assert values_of(train, test) == expected | {"train/a/2": 77}
    reason = f"grey images whose {bits} bits are scaled to 8"
    assert [name.split(".")[0] for name in train.skipped.paths[reason]] == list(GREY)
    cut = train.skipped.paths.get("grey images with values of more than 10 bits, which are cut", [])
    assert cut == (["train/b/0.png", "test/a/0.png"] if bits == 10 else [])


def test_the_scale_of_grey_is_part_of_the_checksum(grey, opened):
    checksums = {opened(grey, grey_bits=bits)[0].checksum for bits in (0, 12, 13, 14)}
    assert len(checksums) == 3
    Image.fromarray(np.full((4, 5), 5001, np.uint16)).save(grey / "test/a/0.png")
    train, test = opened(grey)
    assert train.checksum in checksums and test.checksum != opened(grey, grey_bits=14)[1].checksum


def test_images_of_8_bits_have_no_scale_of_grey(divided, opened):
    assert [split.grey_bits for split in opened(divided, grey_bits=12)] == [0, 0]


@pytest.mark.parametrize("suffix", ["tif", "png", "webp"])
def test_further_frames_are_counted_and_named(divided, opened, photo, suffix):
    pictures = [photo(8, 6, seed) for seed in range(4)]
    options = {"save_all": True, **({"lossless": True} if suffix == "webp" else {})}
    pictures[0].save(divided / f"train/ant/a.{suffix}", append_images=pictures[1:], **options)
    pictures[1].save(divided / f"train/Bee/b.{suffix}", append_images=pictures[:1], **options)
    pictures[2].save(divided / f"test/ant/c.{suffix}", **options)
    reason = "files with 4 frames after the first in train"
    for _ in range(2):
        train, _ = opened(divided)
        names = [f"Bee/b.{suffix} has 2", f"ant/a.{suffix} has 4"]
        assert train.skipped.paths == {reason: names}
        index = train.ids.index(f"ant/a.{suffix}")
        assert_array_equal(train.image(index), pictures[0])


BEE, CAT = ("Bee/0.jpg", "Bee/1.jpg"), ("cat/0.jpg", "cat/1.jpg")
# Photographs, and the line that names the folder.
WRONG = {
    "one class": (BEE, "expected images of at least two classes, found Bee alone"),
    "one image": (
        (*BEE, "ant/0.jpg", "cat/0.jpg"),
        "found classes of one image alone: 2 (ant/0.jpg, cat/0.jpg)",
    ),
    "unequal depth": (
        [f"{name}/{n}.jpg" for name in ("a/Bee", "a/cat", "b/beach", "c/canyon") for n in (0, 1)],
        "expected all classes beside each other in a, found also b/beach, c/canyon",
    ),
    "flat test": (
        (*(f"train/{name}" for name in (*BEE, *CAT)), "test/0.jpg", "test/1.jpg"),
        "expected images in test/CLASS, found none; images outside of class folders: 2 (test/0.jpg",
    ),
    "flat": (("0.jpg", "1.jpg"), "2 images outside of folders; found no folder"),
    "two folders": (
        [f"{split}/{name}" for split in ("training", "testing") for name in (*BEE, *CAT)],
        "found testing, training; name one of them",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_layouts_are_refused(write, opened, case):
    names, message = WRONG[case]
    root = write("wrong", *names)
    with pytest.raises(InputError) as caught:
        opened(root)
    assert str(caught.value).startswith(f"{root}: ") and message in str(caught.value)


def test_undivided_folder_needs_a_share_for_testing(photos, opened):
    with pytest.raises(InputError, match="test_share above 0; found classes without train and"):
        opened(photos, share=0.0)


def test_dead_links_and_classes_without_images_are_refused(photos, opened):
    (photos / "ant/gone.jpg").symlink_to("nowhere")
    (photos / "ant/self.jpg").symlink_to("self.jpg")
    (photos / "z.png").mkdir()
    message = r"class folders without images: 1 .z.png.; dead links: 2 .ant/gone.jpg, ant/self.jpg"
    with pytest.raises(InputError, match=message):
        opened(photos)


def test_image_file_above_one_gib_is_not_read(tmp_path):
    with open(tmp_path / "big.png", "wb") as file:
        file.truncate(2**30 + 1)
    with pytest.raises(
        InputError, match=r"/big.png: expected an image of at most 1 GiB, found 1,0"
    ):
        folder.content(tmp_path / "big.png")


def test_unreadable_folder_is_an_error(divided, opened, monkeypatch):
    def closed(path, scan=os.scandir):
        if str(path).endswith("ant"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", closed)
    with pytest.raises(PermissionError, match="/ant"):
        opened(divided)
    with pytest.raises(PermissionError, match="train/ant"):
        folder.find_images(divided / "train" / "ant")


@pytest.mark.parametrize("name", ["a\x1b[31mb", "a\nb", "a\tb", "a\u202eb"])
def test_class_names_have_no_control_characters(write, opened, name):
    root = write("photos", *(f"{split}/{name}/0.png" for split in ("train", "test")))
    with pytest.raises(InputError, match=r"expected class names without control .* a\\") as caught:
        opened(root)
    assert str(caught.value).isprintable()


def test_benchmark_is_counted_before_any_image_is_decoded(write, opened, decoded):
    root = write("omni", "train/one/1.png", "test/one/1.png")
    with pytest.raises(InputError, match=r"^omnibench: expected 300 classes, found 1;"):
        opened(root, name="omnibench")
    assert decoded == []
