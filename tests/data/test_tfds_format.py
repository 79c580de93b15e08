"""Data that TFDS prepared, as array_record and as TFRecord: order, what is kept, and damage."""

import os
import shutil

import numpy as np
import pytest
import tensorflow_datasets as tfds

from fdc_jax.data import images, sources
from fdc_jax.errors import InputError

CLASSES = ("tulip", "rose", "lily")


def write_array_records(info, by_split):
    writer = tfds.core.SequentialWriter(info, 4, file_format="array_record")
    writer.initialize_splits(list(by_split))
    writer.add_examples(by_split)
    writer.close_all()


def write_tfrecords(info, by_split, folder):
    """Two shards a split; checksums, which are not read, are zero."""
    splits = []
    for split, examples in by_split.items():
        template = tfds.core.ShardedFileTemplate(
            folder, dataset_name="flowers", split=split, filetype_suffix="tfrecord"
        )
        for number, shard in enumerate((examples[:4], examples[4:])):
            content = b""
            for example in shard:
                record = info.features.serialize_example(info.features.encode_example(example))
                content += len(record).to_bytes(8, "little") + bytes(4) + record + bytes(4)
            (folder / f"flowers-{split}.tfrecord-{number:05d}-of-00002").write_bytes(content)
        about = dict(shard_lengths=[4, len(examples) - 4], num_bytes=1, filename_template=template)
        splits.append(tfds.core.SplitInfo(name=split, **about))
    info.set_splits(tfds.core.splits.SplitDict(splits))
    info.set_file_format("tfrecord")
    info.write_to_directory(folder)


@pytest.fixture
def prepare(tmp_path, photo, encode):
    """Returns a function that writes ten images of three classes as TFDS does, in `data/PLACE`."""

    def call(
        place="flowers/2.1.1", file_format="array_record", test="test", label="label", names=False
    ):
        folder = tmp_path / "data" / place
        folder.mkdir(parents=True)
        features = {
            "image": tfds.features.Image(shape=(None, None, 3)),
            "label": tfds.features.ClassLabel(names=list(CLASSES)),
            "bright": tfds.features.Scalar(np.float32),
            **({"file_name": tfds.features.Text()} if names else {}),
        }
        identity = dict(name="flowers", data_dir=str(folder), module_name="")
        info = tfds.core.DatasetInfo(
            builder=tfds.core.dataset_info.DatasetIdentity(
                version=tfds.core.Version("2.1.1"), **identity
            ),
            features=tfds.features.FeaturesDict(features),
            supervised_keys=("image", label),
            disable_shuffling=True,
        )
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
        by_split = {"train": examples[:6], test: examples[6:]}
        if file_format == "array_record":
            write_array_records(info, by_split)
        else:
            write_tfrecords(info, by_split, folder)
        return folder, examples

    return call


@pytest.fixture
def opened(tmp_path):
    """Returns a function that opens a data set below `tmp_path`, with a cache."""

    def call(name="flowers"):
        return sources.open_splits(name, tmp_path / "cache", data_dir=str(tmp_path / "data"))

    return call


@pytest.mark.parametrize(
    ("file_format", "place", "other"),
    [
        ("array_record", "flowers/2.1.1", "validation"),
        ("tfrecord", "flowers/small/2.1.1", "test"),
    ],
)
def test_data_are_read_where_they_lie(prepare, opened, file_format, place, other):
    folder, examples = prepare(place, file_format, other)
    before = sorted(folder.iterdir())
    train, test = opened()
    assert train.class_names == CLASSES
    assert (train.name, train.partition, train.upright) == ("flowers", "tfds", True)
    assert train.labels.tolist() == [0, 0, 1, 1, 2, 2] and test.labels.tolist() == [0, 0, 1, 2]
    expected = [examples[i]["image"] for i in (6, 9, 7, 8)]
    assert [test.read(i) for i in range(4)] == expected
    assert sorted(folder.iterdir()) == before


def test_images_are_sorted_by_class_and_name(prepare, opened):
    _, examples = prepare(names=True)
    train, _ = opened()
    assert train.ids == ("0/12.png", "0/9.png", "1/11.png", "1/8.png", "2/10.png", "2/7.png")
    by_name = {example["file_name"]: example for example in examples}
    assert [train.read(i) for i in range(6)] == [by_name[name]["image"] for name in train.ids]
    assert [train.labels[i] for i in range(6)] == [by_name[name]["label"] for name in train.ids]
    assert train.pixel_hashes() == [
        images.pixels_sha256(np.asarray(train.image(i))) for i in range(6)
    ]


def test_one_look_is_kept_until_the_data_change(tmp_path, prepare, opened, monkeypatch):
    folder, _ = prepare(names=True)
    looked, decode = [], images.decode
    monkeypatch.setattr(images, "decode", lambda *given: looked.append(1) or decode(*given))

    def looks():
        looked.clear()
        train, test = opened()
        found.append((train.ids, train.checksum, test.checksum))
        return len(looked)

    found = []
    assert looks() == 10 and looks() == 0
    for content in (b"damaged", b""):
        next((tmp_path / "cache" / "data").glob("flowers-train-*.npz")).write_bytes(content)
        assert looks() == 6
    for shard in folder.glob("*-train.array_record*"):
        os.utime(shard, ns=(1, 1))
    assert looks() == 6
    assert len(set(found)) == 1
    (folder / "label.labels.txt").write_text("rose\ntulip\nlily\n")
    assert looks() == 0 and found[-1][1] != found[0][1]


def test_which_data_are_refused(tmp_path, prepare, opened):
    prepare("flowers/one/2.1.1")
    shutil.copytree(tmp_path / "data/flowers/one", tmp_path / "data/flowers/two")
    with pytest.raises(InputError, match="flowers: expected one configuration, found one, two"):
        opened()
    prepare("bright/1.0.0", label="bright")
    message = r"expected images and their classes, found .* bright, image, label$"
    with pytest.raises(InputError, match=message):
        opened("bright")


@pytest.mark.ci
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
