"""Data that TFDS prepared, as array_record and as TFRecord: order, what is kept, and damage."""

import os
import re
import shutil
import struct

import numpy as np
import pytest
import tensorflow_datasets as tfds

from fdc_jax.data import dataset, images, sources
from fdc_jax.errors import InputError

CLASSES = ("tulip", "rose", "lily")


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
    folder,
    photo,
    encode,
    file_format="array_record",
    splits=("train", "test"),
    label="label",
    names=False,
):
    """Prepares ten images of three classes as TFDS does, of a builder that names images or not."""
    features = tfds.features.FeaturesDict(
        {
            "image": tfds.features.Image(shape=(None, None, 3)),
            "label": tfds.features.ClassLabel(names=["tulip", "rose", "lily"]),
            "bright": tfds.features.Scalar(np.float32),
            **({"file_name": tfds.features.Text()} if names else {}),
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
        {
            "image": encode(photo(8, 9, seed)),
            "label": seed % 3,
            "bright": seed / 10,
            # As strings the tenth comes before the second.
            **({"file_name": f"{seed % 3}/{12 - seed}.png"} if names else {}),
        }
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


@pytest.fixture
def opened(tmp_path):
    """Returns a function that opens a data set below `tmp_path`, with a cache."""

    def call(name="flowers"):
        return sources.open_splits(name, tmp_path / "cache", data_dir=str(tmp_path / "data"))

    return call


@pytest.fixture
def written(tmp_path, photo, encode):
    """Writes data whose images have names; returns their folder and examples."""
    folder = tmp_path / "data/flowers/2.1.1"
    return folder, by_tfds(folder, photo, encode, names=True)


@pytest.mark.parametrize(
    ("file_format", "place"),
    [("array_record", "flowers/2.1.1"), ("tfrecord", "flowers/small/2.1.1")],
)
def test_data_are_read_where_they_lie(tmp_path, photo, encode, opened, file_format, place):
    folder = tmp_path / "data" / place
    examples = by_tfds(folder, photo, encode, file_format)
    before = sorted(folder.iterdir())
    train, test = opened()
    assert train.class_names == CLASSES
    assert (train.name, train.partition, train.upright) == ("flowers", "tfds", True)
    assert train.labels.tolist() == [0, 0, 1, 1, 2, 2] and test.labels.tolist() == [0, 0, 1, 2]
    expected = [examples[i]["image"] for i in (6, 9, 7, 8)]
    assert [test.read(i) for i in range(4)] == expected
    assert len(test.checksum) == 64
    assert sorted(folder.iterdir()) == before


def test_images_are_sorted_by_class_and_name(opened, written):
    train, _ = opened()
    assert train.ids == ("0/12.png", "0/9.png", "1/11.png", "1/8.png", "2/10.png", "2/7.png")
    by_name = {example["file_name"]: example["image"] for example in written[1]}
    assert [train.read(i) for i in range(6)] == [by_name[name] for name in train.ids]
    assert train.describe(3) == "flowers, split train, image 3 (1/8.png)"


def test_what_reading_found_is_kept_until_the_data_change(tmp_path, opened, written):
    folder, examples = written
    first = opened()[0]
    records = [
        (
            each["file_name"],
            each["label"],
            images.pixels_sha256(np.asarray(images.decode(each["image"], ""))),
        )
        for each in examples[:6]
    ]
    assert first.checksum == dataset.images_sha256(CLASSES, records)
    paths = {
        what: next((tmp_path / "cache" / "data").glob(f"*-train-*-{what}.npz"))
        for what in ("index", "images")
    }
    for content in (b"damaged", b""):
        for path in paths.values():
            path.write_bytes(content)
        assert (opened()[0].ids, opened()[0].checksum) == (first.ids, first.checksum)
    for what, array in (("index", "ids"), ("images", "sha256")):
        wrong = dict(np.load(paths[what]))
        wrong[array][0] = wrong[array][1]
        np.savez(paths[what], **wrong)
    again = opened()[0]
    assert again.ids[0] == first.ids[1]
    assert again.pixel_hashes()[0] == first.pixel_hashes()[1]
    for shard in folder.glob("*-train.array_record*"):
        os.utime(shard, ns=(1, 1))
    assert (opened()[0].ids, opened()[0].checksum) == (first.ids, first.checksum)


def test_validation_stands_for_a_test_that_is_missing(tmp_path, photo, encode, opened):
    folder = tmp_path / "data/flowers/2.1.1"
    by_tfds(folder, photo, encode, splits=("train", "validation"))
    assert [len(each) for each in opened()] == [6, 4]


def test_the_newest_version_is_taken(tmp_path, photo, encode, opened, written):
    folder, _ = written
    by_tfds(folder.with_name("10.0.0"), photo, encode)
    assert opened()[0].ids[0].startswith("0000")


@pytest.mark.parametrize("name", ["dataset_info.json", "features.json"])
def test_damaged_descriptions(opened, written, name):
    folder, _ = written
    (folder / name).write_text("{")
    with pytest.raises(InputError, match=re.escape(str(folder))) as caught:
        opened()
    assert "\n" not in str(caught.value)


def test_damaged_shards(opened, written):
    folder, _ = written
    shard = sorted(folder.glob("*-train.array_record*"))[0]
    content = shard.read_bytes()
    shard.write_bytes(content[:1000])
    with pytest.raises(InputError, match=re.escape(str(folder))):
        opened()
    shard.write_bytes(content)
    opened()
    source = opened()[0]
    shard.unlink()
    with pytest.raises(InputError, match=r"flowers, split train, image \d \(\d/\d+\.png\): cannot"):
        [source.read(row) for row in range(6)]
    with pytest.raises(InputError, match=f"expected the files {re.escape(shard.name)}"):
        opened()


def test_tfrecords_that_were_cut(tmp_path, photo, encode, opened):
    by_tfds(tmp_path / "data/flowers/2.1.1", photo, encode, "tfrecord")
    (path,) = (tmp_path / "data/flowers/2.1.1").glob("*train*-00001-*")
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(InputError, match=r"split train: .*00001-of-00002: expected whole records"):
        opened()


def test_which_data_are_refused(tmp_path, photo, encode, opened):
    by_tfds(tmp_path / "data/flowers/one/2.1.1", photo, encode)
    shutil.copytree(tmp_path / "data/flowers/one", tmp_path / "data/flowers/two")
    with pytest.raises(InputError, match="flowers: expected one configuration, found one, two"):
        opened()
    by_tfds(tmp_path / "data/bright/1.0.0", photo, encode, label="bright")
    with pytest.raises(
        InputError, match=r"expected images and their classes, found .* bright, image, label$"
    ):
        opened("bright")


def test_real_cifar100(shared_asset, tmp_path):
    data_dir = shared_asset("tensorflow_datasets")
    _, source = sources.open_splits("cifar100", tmp_path, data_dir=str(data_dir))
    assert np.bincount(source.labels).tolist() == [100] * 100
    assert list(source.ids) == [f"test_{i:05d}" for i in range(10000)]
    assert source.class_names[:2] == ("apple", "aquarium_fish")
    assert list(source.class_names) == sorted(source.class_names)
    # Whoever prepared the data, and with whichever library: features are kept under this checksum.
    expected = "beaaaff1966cf75815e7e762ed265b9d29a696482d02555c22da913f0891f369"
    assert source.checksum == expected
    reference = tfds.data_source("cifar100", split="test", data_dir=data_dir)
    for i in (0, 1234, 9999):
        example = reference[i]
        index = source.ids.index(example["id"].decode())
        assert source.labels[index] == example["label"]
        np.testing.assert_array_equal(source.image(index), example["image"])


def test_the_checksum_is_of_names_labels_and_pixels_in_any_order():
    records = [("a/1", 0, b"x"), ("b/1", 1, b"y")]
    others = [
        ("ab", [("a/0", 0, b"x"), ("b/1", 1, b"y")]),
        ("ab", [("a/1", 1, b"x"), ("b/1", 1, b"y")]),
        ("ab", [("a/1", 0, b"z"), ("b/1", 1, b"y")]),
        ("ac", records),
        ("ab", records[:1]),
    ]
    found = {dataset.images_sha256(names, each) for names, each in [("ab", records), *others]}
    assert len(found) == 6
    assert dataset.images_sha256("ab", records[::-1]) == dataset.images_sha256("ab", records)
