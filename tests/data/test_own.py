"""Data sets of a user's own: every kind of source, and what is refused."""

import csv
import hashlib
import json
import re
import shutil
import signal
import struct
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import tensorflow_datasets as tfds

from fdc_jax.data import benchmarks, dataset, images, prepare, task_stream
from fdc_jax.errors import InputError

CLASSES = {"ant": 5, "Bee": 4, "cat 10": 7}


@pytest.fixture
def photos(tmp_path, photo):
    """A folder of classes of photographs, not divided."""
    root = tmp_path / "photos"
    for seed, (name, count) in enumerate(CLASSES.items()):
        for number in range(count):
            path = root / name / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            photo(9 + number, 12, 100 * seed + number).save(path)
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


def prepared(tmp_path, source, name="mine", **options):
    return prepare.prepare(name, source, tmp_path / "data", quiet=True, **options)


def refused(tmp_path, source, message, name="mine", **options):
    """Expects one line that says what is wrong, and nothing left behind."""
    with pytest.raises(InputError, match=message) as caught:
        prepared(tmp_path, source, name, **options)
    assert "\n" not in str(caught.value)
    assert [path for path in (tmp_path / "data").glob("*") if path.suffix != ".lock"] == []


def opened(tmp_path, name="mine"):
    return [task_stream.open_dataset(name, split, tmp_path / "data") for split in ("train", "test")]


def ids(tmp_path, name="mine"):
    return [list(each.ids) for each in opened(tmp_path, name)]


# Sources ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("other", "packed"), [("test", False), ("val", True)])
def test_a_folder_with_its_own_division(tmp_path, divided, other, packed):
    (divided / "test").rename(divided / other)
    source = divided
    if packed:
        source = Path(shutil.make_archive(str(tmp_path / "packed"), "zip", tmp_path, "divided"))
    folder = prepared(tmp_path, source)
    assert folder == tmp_path / "data" / "mine" / "1.0.0"
    train, test = opened(tmp_path)
    assert train.class_names == test.class_names == ("Bee", "ant", "cat 10")
    assert np.bincount(train.labels).tolist() == [2, 3, 5]
    assert np.bincount(test.labels).tolist() == [2, 2, 2]
    for split, each in (("train", train), (other, test)):
        for index, name in enumerate(each.ids):
            assert each.read(index) == (divided / split / name).read_bytes()
            assert each.class_names[each.labels[index]] == name.partition("/")[0]
    noted = json.loads((folder / "metadata.json").read_text())
    assert noted.pop("images_sha256") == {"train": train.checksum, "test": test.checksum}
    assert noted == {"partition": "given", "num_classes": 3, "num_train": 10, "num_test": 6}
    assert prepared(tmp_path, source) == prepared(tmp_path, None) == folder


def test_a_third_split_is_left_out_and_said(tmp_path, divided, capsys):
    shutil.copytree(divided / "test" / "ant", divided / "val" / "ant")
    shutil.copytree(divided / "test" / "ant", divided / "val" / "dog")
    prepare.prepare("mine", divided, tmp_path / "data")
    assert "left out: 4 images of val\n" in capsys.readouterr().err
    train, test = opened(tmp_path)
    assert (len(train), len(test), len(train.class_names)) == (10, 6, 3)


def test_one_folder_is_divided_within_each_class(tmp_path, photos):
    folder = prepared(tmp_path, photos, test_share=0.3, split_seed=7)
    train, test = ids(tmp_path)
    for name, count in CLASSES.items():
        words = np.frombuffer(hashlib.sha256(f"7 {name}".encode()).digest(), np.uint32)
        chosen = np.random.RandomState(words).permutation(count)[: round(0.3 * count)]
        assert [each for each in test if each.startswith(name)] == [
            f"{name}/{number}.jpg" for number in sorted(chosen)
        ]
    assert len(train) + len(test) == sum(CLASSES.values()) and not set(train) & set(test)
    noted = json.loads((folder / "metadata.json").read_text())
    assert noted["partition"] == opened(tmp_path)[0].partition == "0.3 of each class, seed 7"
    assert prepared(tmp_path, photos, test_share=0.3, split_seed=7) == folder
    with pytest.raises(InputError, match=r"holds other images than .* choose another name"):
        prepared(tmp_path, photos, test_share=0.3, split_seed=8)
    # The division of a class stays when others come.
    shutil.copytree(photos / "ant", photos / "aardvark")
    prepared(tmp_path, photos, "more", test_share=0.3, split_seed=7)
    assert [each for each in ids(tmp_path, "more")[1] if not each.startswith("aardvark")] == test


@pytest.mark.parametrize("share", [0.01, 0.99])
def test_no_class_is_without_images_for_training_or_testing(tmp_path, photos, share):
    prepared(tmp_path, photos, test_share=share)
    for each, counts in zip(opened(tmp_path), ([3, 4, 6], [1, 1, 1]), strict=True):
        expected = counts if share < 0.5 else [[1, 1, 1], [3, 4, 6]][each.split == "test"]
        assert np.bincount(each.labels).tolist() == expected


def write_list(path, rows, columns=("file", "label", "split")):
    with open(path, "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(columns)
        table.writerows(rows)
    return path


def test_a_list_of_files(tmp_path, photos):
    rows = [
        *(("cat 10/0.jpg", "Große Katze", "train"), ("ant/1.jpg", "ant", "val")),
        *(("ant/0.jpg", "ant", "train"), (photos / "Bee/0.jpg", "Große Katze", "val")),
    ]
    prepared(tmp_path, write_list(photos / "list.csv", rows))
    train, test = opened(tmp_path)
    # In the order of their first lines.
    assert train.class_names == ("Große Katze", "ant")
    assert train.ids == ("cat 10/0.jpg", "ant/0.jpg")
    assert test.ids == (str(photos / "Bee/0.jpg"), "ant/1.jpg")
    assert test.read(0) == (photos / "Bee/0.jpg").read_bytes()
    assert test.labels.tolist() == [0, 1]


def test_a_list_that_is_not_divided(tmp_path, photos):
    rows = [(path.relative_to(photos), path.parent.name) for path in photos.rglob("*.jpg")]
    write_list(photos / "list.csv", sorted(rows, reverse=True), ("file", "label"))
    prepared(tmp_path, photos, test_share=0.25)
    prepared(tmp_path, photos / "list.csv", "listed", test_share=0.25)
    found = [sorted(each) for each in ids(tmp_path, "listed")]
    assert found == [sorted(each) for each in ids(tmp_path)]
    assert opened(tmp_path, "listed")[0].class_names == ("cat 10", "ant", "Bee")


# What is refused ----------------------------------------------------------------------------------


def test_what_cannot_be_divided(tmp_path, photos, divided):
    refused(tmp_path, divided, "expected folders of classes to divide, found train", test_share=0.5)
    shutil.move(divided / "train" / "ant", tmp_path)
    refused(tmp_path, divided, "mine: expected training images of every class, found none of ant")
    refused(tmp_path, photos, "expected the folders train and test, found Bee, ant, cat 10$")
    for path in list((photos / "ant").iterdir())[1:]:
        path.unlink()
    refused(tmp_path, photos, "class ant: expected two images or more", test_share=0.5)


@pytest.mark.parametrize(
    ("rows", "columns", "message"),
    [
        ([("ant/0.jpg", "a", "tset")], None, "line 2: expected a split of train, test.* 'tset'$"),
        ([("ant/0.jpg", "", "train")], None, "line 2: expected a file and its label, found ant/0"),
        ([("ant/0.jpg", "a", "train")] * 2, None, "line 3: ant/0.jpg is in line 2, too"),
        ([("ant/99.jpg", "a", "train")], None, "ant/99.jpg: cannot read: No such file"),
        ([("ant/0.jpg", "a")], ("file", "label"), "columns file, label, split; found file, label$"),
        ([("ant/0.jpg", "a", "train")], None, "expected images for test, found none"),
        ([("ant/0.jpg", "a", "train"), ("ant/1.jpg", "b", "test")], None, "found none of b$"),
    ],
)
def test_lists_that_are_refused(tmp_path, photos, rows, columns, message):
    path = write_list(photos / "list.csv", rows, columns or ("file", "label", "split"))
    refused(tmp_path, path, message)


def test_a_list_that_has_a_division_is_not_divided_anew(tmp_path, photos):
    path = write_list(photos / "list.csv", [("ant/0.jpg", "a", "train")])
    refused(tmp_path, path, "no split, which is to be drawn; found file", test_share=0.5)
    (photos / "list.csv").write_bytes(b'file,label,split\n"ant/0.jpg')
    refused(tmp_path, path, "list.csv: cannot read this list: ")


def test_space_for_what_an_archive_holds_is_looked_for_before(tmp_path):
    archive = tmp_path / "packed.tar"
    member = tarfile.TarInfo("train/ant/1.jpg")
    member.size = shutil.disk_usage(tmp_path).free // 2 + 2**29
    with open(archive, "wb") as file:
        file.write(member.tobuf())
        file.truncate(2**20 * (member.size // 2**20 + 1))
    refused(
        tmp_path, archive, r"packed.tar/?: expected \d+\.\d+ GiB of free space, found \d+\.\d+$"
    )


# What is there ------------------------------------------------------------------------------------


def test_list_and_remove(tmp_path, divided, capsys):
    where = f"--data_dir={tmp_path / 'data'}"
    assert prepare.main(["--list", where]) == 0
    assert capsys.readouterr().out == "nothing is prepared\n"
    folder = prepared(tmp_path, divided)
    prepared(tmp_path, divided, "other")
    assert prepare.main(["--list", where]) == 0
    line = "mine: 3 classes, 10 train and 6 test images, partition given, in "
    assert capsys.readouterr().out.splitlines()[0] == f"{line}{folder}"
    assert prepare.main(["mine", "--remove", where]) == 0
    assert f"removed {folder}" in capsys.readouterr().err
    assert not folder.parent.exists()
    assert [path.name for path in (tmp_path / "data").iterdir() if path.is_dir()] == ["other"]
    for arguments, message in (
        (["cub200", "--remove", where], "cub200 is not prepared in "),
        ([where], "expected the NAME of a data set, or --list"),
    ):
        assert prepare.main(arguments) == 2
        assert re.fullmatch(f"fdc_jax.data.prepare: {message}.*\n", capsys.readouterr().err)
    prepared(tmp_path, divided)


# Classes that come later --------------------------------------------------------------------------


@pytest.fixture
def later(tmp_path, photo):
    """A divided folder of two classes more, whose names come before some of the others."""
    for seed, (name, split) in enumerate((n, s) for n in ("bat", "Ape") for s in ("train", "val")):
        for number in range(2):
            path = tmp_path / "later" / split / name / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            photo(9 + number, 12, 7000 + 10 * seed + number).save(path)
    return tmp_path / "later"


def versions(tmp_path):
    return sorted(path.name for path in (tmp_path / "data" / "mine").iterdir())


def sha256_of(opened):
    """The hash over names, labels and pixels, from the images themselves."""
    pixels = [images.decode(opened.read(index), "it") for index in range(len(opened))]
    hashes = map(images.pixels_sha256, pixels)
    facts = zip(opened.ids, opened.labels.tolist(), hashes, strict=True)
    return dataset.images_sha256(opened.class_names, facts)


def test_appended_classes_come_after_the_others(tmp_path, divided, later, capsys):
    prepared(tmp_path, divided)
    before = opened(tmp_path)
    read = [[each.read(index) for index in range(len(each))] for each in before]
    arguments = ["mine", f"--source={later}", f"--data_dir={tmp_path / 'data'}", "--append"]
    assert prepare.main([*arguments, "--workers=2"]) == 0
    assert "mine: 14 train images, 10 test images, partition given, in " in capsys.readouterr().err
    assert versions(tmp_path) == ["1.1.0"]
    for old, kept, new in zip(before, read, opened(tmp_path), strict=True):
        assert new.class_names == ("Bee", "ant", "cat 10", "Ape", "bat")
        assert new.ids == (*old.ids, "Ape/0.jpg", "Ape/1.jpg", "bat/0.jpg", "bat/1.jpg")
        assert new.labels.tolist() == [*old.labels.tolist(), 3, 3, 4, 4]
        assert [new.read(index) for index in range(len(old))] == kept
        assert new.earlier_checksums == (old.checksum,)
        assert new.checksum == sha256_of(new)
    # Both commands may be repeated; neither does anything.
    assert prepared(tmp_path, divided) == prepared(tmp_path, later, append=True)
    (later / "val" / "bat" / "0.jpg").write_bytes((later / "val" / "Ape" / "0.jpg").read_bytes())
    with pytest.raises(InputError, match=r"mine/1.1.0 holds other images .* bat/0.jpg of test"):
        prepared(tmp_path, later, append=True)
    # A third time, divided by chance; the lot of seeds leaves every part where it is.
    for path in sorted(later.rglob("*.jpg")):
        path.rename(later / f"{path.parent.name}_2_{path.parts[-3]}_{path.name}")
    for name in ("Ape", "bat"):
        (later / "third" / f"{name} 2").mkdir(parents=True)
        for path in later.glob(f"{name}_2_*"):
            path.rename(later / "third" / f"{name} 2" / path.name)
    prepared(tmp_path, later / "third", append=True, test_share=0.5)
    train, test = opened(tmp_path)
    assert train.class_names == ("Bee", "ant", "cat 10", "Ape", "bat", "Ape 2", "bat 2")
    assert train.partition == test.partition == "given + 0.5 of each class, seed 0"
    assert (len(train.earlier_checksums), versions(tmp_path)) == (2, ["1.2.0"])
    entry = benchmarks.find("mine", tmp_path / "data")
    assert (entry.num_classes, entry.earlier_classes) == (7, (3, 5))
    order = task_stream.build(entry, train, test, 4, 7).order
    parts = [np.random.RandomState(4).permutation(size) for size in (3, 2, 2)]
    assert order.tolist() == [*parts[0], *(3 + parts[1]), *(5 + parts[2])]
    assert task_stream.build(entry, train, test, -1, 7).order.tolist() == list(range(7))
    prepare.remove("mine", tmp_path / "data", quiet=True)
    assert not (tmp_path / "data" / "mine").exists()


def test_a_single_class_can_be_appended(tmp_path, divided, later):
    prepared(tmp_path, divided)
    alone = tmp_path / "alone"
    shutil.copytree(later / "train" / "bat", alone / "bat")
    prepared(tmp_path, alone, append=True, test_share=0.5)
    assert opened(tmp_path)[1].class_names == ("Bee", "ant", "cat 10", "bat")
    # A new data set of one class is no folder of classes.
    with pytest.raises(InputError, match="alone: expected one folder of images per class"):
        prepared(tmp_path, alone, "new", test_share=0.5)


def test_what_cannot_be_appended(tmp_path, divided, later, photos):
    def refuse(message, source=later, name="mine", **options):
        with pytest.raises(InputError, match=message):
            prepared(tmp_path, source, name, append=True, **options)

    nothing = "expected prepared images of your own to append to, found none"
    refuse(f"mine: {nothing}")
    prepared(tmp_path, divided)
    refuse(f"digits: {nothing}", name="digits")
    refuse("mine needs --source=PATH", source=None)
    shutil.copytree(photos / "ant", later / "train" / "ant")
    refuse("expected classes that mine does not have, found ant")
    shutil.rmtree(later / "train" / "ant")
    rows = [
        (later / "train" / "bat" / f"{n}.jpg", "bat", s) for n, s in enumerate(("train", "val"))
    ]
    listed = write_list(later / "list.csv", [*rows, ("ant/0.jpg", "bat", "val")])
    (later / "ant").mkdir()
    shutil.copy(photos / "ant" / "0.jpg", later / "ant")
    refuse("expected the name of an image that mine does not have, found ant/0.jpg", source=listed)
    (later / "train" / "bat" / "0.jpg").write_bytes(b"none")
    refuse(r"mine: 1 of 24 images cannot be read: .*train/bat/0.jpg")
    assert versions(tmp_path) == ["1.0.0"]
    noted = tmp_path / "data" / "mine" / "1.0.0" / "metadata.json"
    noted.write_text(noted.read_text().replace(opened(tmp_path)[0].checksum, "0" * 64))
    shutil.copy(photos / "ant" / "1.jpg", later / "train" / "bat" / "0.jpg")
    refuse("mine: expected the prepared images with SHA-256 .* changed or damaged")


@pytest.mark.parametrize("times", [1, 2], ids=["before", "after"])
def test_a_killed_append_leaves_the_old_or_the_new(tmp_path, divided, later, times):
    """Killed as the new data take their place, and as the old ones go."""
    prepared(tmp_path, divided)
    program = f"""
import os, signal
from fdc_jax.data import prepare
rename, calls = os.rename, []
def die(*places):
    calls.append(places)
    os.kill(os.getpid(), signal.SIGKILL) if len(calls) == {times} else rename(*places)
os.rename = die
prepare.prepare("mine", {str(later)!r}, {str(tmp_path / "data")!r}, append=True, quiet=True)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=600)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert len(opened(tmp_path)[0].class_names) == (3, 5)[times - 1]
    assert prepared(tmp_path, later, append=True).name == "1.1.0"
    assert len(opened(tmp_path)[0].class_names) == 5
    assert versions(tmp_path) == ["1.1.0"]
    assert [path.name for path in (tmp_path / "data").iterdir() if path.is_dir()] == ["mine"]


# Data that TFDS prepared --------------------------------------------------------------------------


def crc32c(content):
    """The checksum of TFRecord files, bit by bit."""
    value = 0xFFFFFFFF
    for byte in content:
        value ^= byte
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
    value ^= 0xFFFFFFFF
    return struct.pack("<I", ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def by_tfds(
    folder, photo, encode, file_format="array_record", splits=("train", "test"), label="label"
):
    """Prepares ten images of three classes as TFDS does, of a builder that names no images."""
    features = tfds.features.FeaturesDict(
        {
            "image": tfds.features.Image(shape=(None, None, 3)),
            "label": tfds.features.ClassLabel(names=["tulip", "rose", "lily"]),
            "bright": tfds.features.Scalar(np.float32),
        }
    )
    info = tfds.core.DatasetInfo(
        builder=tfds.core.dataset_info.DatasetIdentity(
            name="flowers", version=tfds.core.Version("2.1.1"), data_dir=str(folder), module_name=""
        ),
        features=features,
        supervised_keys=("image", label),
        disable_shuffling=True,
    )
    folder.mkdir(parents=True)
    examples = [
        {"image": encode(photo(8, 9, seed)), "label": seed % 3, "bright": seed / 10}
        for seed in range(10)
    ]
    by_split = dict(zip(splits, (examples[:6], examples[6:]), strict=True))
    if file_format == "array_record":
        writer = tfds.core.SequentialWriter(info, 4, file_format=file_format)
        writer.initialize_splits(list(by_split))
        writer.add_examples(by_split)
        writer.close_all()
        return examples
    found = []
    for split, of_split in by_split.items():
        template = tfds.core.ShardedFileTemplate(
            folder, dataset_name="flowers", split=split, filetype_suffix="tfrecord"
        )
        shards = [of_split[:4], of_split[4:]]
        for number, shard in enumerate(shards):
            content = b""
            for example in shard:
                record = features.serialize_example(features.encode_example(example))
                length = struct.pack("<Q", len(record))
                content += length + crc32c(length) + record + crc32c(record)
            name = f"flowers-{split}.tfrecord-{number:05d}-of-00002"
            (folder / name).write_bytes(content)
        found.append(
            tfds.core.SplitInfo(
                name=split,
                shard_lengths=[len(shard) for shard in shards],
                num_bytes=1,
                filename_template=template,
            )
        )
    info.set_splits(tfds.core.splits.SplitDict(found))
    info.set_file_format("tfrecord")
    info.write_to_directory(folder)
    return examples


@pytest.mark.parametrize(
    ("file_format", "place"),
    [("array_record", "flowers/2.1.1"), ("tfrecord", "flowers/small/2.1.1")],
)
def test_data_of_tfds_are_read_where_they_lie(tmp_path, photo, encode, capsys, file_format, place):
    folder = tmp_path / "data" / place
    examples = by_tfds(folder, photo, encode, file_format)
    train, test = opened(tmp_path, "flowers")
    assert train.class_names == ("tulip", "rose", "lily")
    assert (train.name, train.partition) == ("flowers", "tfds")
    assert train.labels.tolist() == [0, 0, 1, 1, 2, 2] and test.labels.tolist() == [0, 0, 1, 2]
    expected = [examples[i]["image"] for i in (6, 9, 7, 8)]
    assert [test.read(i) for i in range(4)] == expected
    assert len(test.checksum) == 64
    assert prepare.main(["flowers", f"--data_dir={tmp_path / 'data'}"]) == 0
    assert "flowers is already prepared" in capsys.readouterr().err
    assert prepare.main(["--list", f"--data_dir={tmp_path / 'data'}"]) == 0
    assert f"partition tfds, in {folder}" in capsys.readouterr().out
    assert prepare.main(["flowers", "--remove", f"--data_dir={tmp_path / 'data'}"]) == 2
    assert "prepared by another program; remove it by hand" in capsys.readouterr().err
    assert folder.exists()


def test_tfrecords_that_were_cut(tmp_path, photo, encode):
    by_tfds(tmp_path / "data/flowers/2.1.1", photo, encode, "tfrecord")
    (path,) = (tmp_path / "data/flowers/2.1.1").glob("*train*-00001-*")
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(InputError, match=r"split train: .*00001-of-00002: expected whole records"):
        opened(tmp_path, "flowers")


def test_validation_stands_for_a_test_that_is_missing(tmp_path, photo, encode):
    folder = tmp_path / "data/flowers/2.1.1"
    by_tfds(folder, photo, encode, splits=("train", "validation"))
    assert [len(each) for each in opened(tmp_path, "flowers")] == [6, 4]


def test_which_data_of_tfds_are_refused(tmp_path, photo, encode):
    by_tfds(tmp_path / "data/flowers/one/2.1.1", photo, encode)
    shutil.copytree(tmp_path / "data/flowers/one", tmp_path / "data/flowers/two")
    with pytest.raises(InputError, match="flowers: expected one configuration, found one, two"):
        prepared(tmp_path, None, "flowers")
    by_tfds(tmp_path / "data/bright/1.0.0", photo, encode, label="bright")
    with pytest.raises(
        InputError, match=r"expected images and their classes, found .* bright, image, label$"
    ):
        prepared(tmp_path, None, "bright")
