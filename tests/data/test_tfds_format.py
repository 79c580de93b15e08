"""Data that TFDS prepared, as array_record and as TFRecord: order, what is kept, and damage."""

import json
import os
import shutil

import google_crc32c
import numpy as np
import pytest
import tensorflow_datasets as tfds
from array_record.python.array_record_data_source import ArrayRecordDataSource
from numpy.testing import assert_array_equal
from PIL import Image, ImageOps

from fdc_jax.data import images, sources
from tests.errors import input_error

CLASSES = ("tulip", "rose", "lily")


def checked(content):
    """Returns bytes with TFRecord's checksum."""
    crc = google_crc32c.value(content)
    return content + ((((crc >> 15) | (crc << 17)) + 0xA282EAD8) % 2**32).to_bytes(4, "little")


def convert_to_tfrecord(folder):
    """Writes every shard in the other format."""
    for path in [*folder.glob("*.array_record*")]:
        source = ArrayRecordDataSource([str(path)])
        content = b""
        for index in range(len(source)):
            record = source[index]
            content += checked(len(record).to_bytes(8, "little")) + checked(record)
        path.with_name(path.name.replace("array_record", "tfrecord")).write_bytes(content)
        path.unlink()
    edit(folder / "dataset_info.json", fileFormat="tfrecord")


@pytest.fixture
def prepare(tmp_path, photo, encode):
    """Returns a function that writes ten images of three classes as TFDS does, in `data/PATH`."""

    def call(
        path="flowers/2.1.1",
        file_format="array_record",
        test="test",
        label="label",
        names=False,
        encoded=encode,
    ):
        folder = tmp_path / "data" / path
        folder.mkdir(parents=True)
        features = {
            "image": tfds.features.Image(shape=(None, None, 3)),
            "label": tfds.features.ClassLabel(names=list(CLASSES)),
            "bright": tfds.features.Scalar(np.float32),
        }
        examples = [
            {"image": encoded(photo(8, 9, seed)), "label": seed % 3, "bright": seed / 10}
            for seed in range(10)
        ]
        if names:
            features["file_name"] = tfds.features.Text()
            for seed, example in enumerate(examples):
                # As strings the tenth comes before the second.
                example["file_name"] = f"{seed % 3}/{12 - seed}.png"
        version = tfds.core.Version("2.1.1")
        identity = tfds.core.dataset_info.DatasetIdentity("flowers", version, str(folder), "")
        info = tfds.core.DatasetInfo(
            builder=identity,
            features=tfds.features.FeaturesDict(features),
            supervised_keys=("image", label),
            disable_shuffling=True,
        )
        writer = tfds.core.SequentialWriter(info, 4, file_format="array_record")
        writer.initialize_splits(["train", test])
        writer.add_examples({"train": examples[:6], test: examples[6:]})
        writer.close_all()
        if file_format == "tfrecord":
            convert_to_tfrecord(folder)
        return folder, examples

    return call


@pytest.fixture
def opened(tmp_path):
    """Returns a function that opens a data set below `tmp_path`, with a cache."""

    def call(name="flowers"):
        return sources.open_splits(name, tmp_path / "cache", data_dir=str(tmp_path / "data"))

    return call


@pytest.mark.parametrize(
    "file_format, path, other",
    [
        ("array_record", "flowers/2.1.1", "validation"),
        ("tfrecord", "flowers/small/2.1.1", "test"),
    ],
)
def test_data_are_read_where_they_lie(prepare, opened, file_format, path, other):
    folder, examples = prepare(path, file_format, other)
    before = sorted(folder.iterdir())
    train, test = opened()
    assert train.class_names == CLASSES
    assert (train.name, train.partition, train.upright) == ("flowers", "tfds", True)
    assert train.labels.tolist() == [0, 0, 1, 1, 2, 2] and test.labels.tolist() == [0, 0, 1, 2]
    for index, row in enumerate((6, 9, 7, 8)):
        assert test.read(index) == examples[row]["image"]
    assert sorted(folder.iterdir()) == before


def test_images_are_sorted_by_class_and_name(prepare, opened):
    _, examples = prepare(names=True)
    train, _ = opened()
    assert train.ids == ("0/12.png", "0/9.png", "1/11.png", "1/8.png", "2/10.png", "2/7.png")
    by_name = {example["file_name"]: example for example in examples}
    hashes = train.pixel_hashes()
    for index, name in enumerate(train.ids):
        assert train.read(index) == by_name[name]["image"]
        assert train.labels[index] == by_name[name]["label"]
        assert hashes[index] == images.pixels_sha256(np.asarray(train.image(index)))


def test_records_are_decoded_once_until_the_data_change(tmp_path, prepare, opened, monkeypatch):
    folder, _ = prepare(names=True)
    examined, states, examine = [], [], images.examine
    monkeypatch.setattr(images, "examine", lambda *given: examined.append(1) or examine(*given))

    def count():
        examined.clear()
        train, test = opened()
        states.append((train.ids, train.checksum, test.checksum))
        return len(examined)

    assert (count(), count()) == (10, 0)
    for content in (b"damaged", b""):
        next((tmp_path / "cache" / "data").glob("flowers-train-*.npz")).write_bytes(content)
        assert count() == 6
    for shard in folder.glob("*-train.array_record*"):
        os.utime(shard, ns=(1, 1))
    assert count() == 6
    assert len(set(states)) == 1
    (folder / "label.labels.txt").write_text("rose\ntulip\nlily\n")
    assert count() == 0 and states[-1][1] != states[0][1]


@pytest.mark.parametrize("file_format", ["tfrecord", "array_record"])
def test_swapped_shards_of_equal_size_are_noticed(prepare, opened, encode, file_format):
    def bitmap(image):
        return encode(image, "BMP")

    def flipped(image):
        return bitmap(ImageOps.flip(image))

    first, _ = prepare("flowers/1.0.0", file_format, encoded=bitmap)
    second, _ = prepare("others/1.0.0", file_format, encoded=flipped)
    before = opened()[0].checksum
    for path in second.glob("flowers-*"):
        assert path.stat().st_size == (first / path.name).stat().st_size
        shutil.copystat(first / path.name, path)
        path.rename(first / path.name)
    train, _ = opened()
    hash_of_first = images.pixels_sha256(np.asarray(train.image(0)))
    assert train.pixel_hashes()[0] == hash_of_first and train.checksum != before


def test_two_configurations_or_no_classes_are_refused(tmp_path, prepare, opened):
    prepare("flowers/one/2.1.1")
    shutil.copytree(tmp_path / "data/flowers/one", tmp_path / "data/flowers/two")
    with input_error("flowers: expected one configuration, found one, two"):
        opened()
    prepare("bright/1.0.0", label="bright")
    message = r"expected images and their classes, found .* bright, image, label$"
    with input_error(message):
        opened("bright")


MODULES = "tensorflow_datasets.core.features."


def edit(path, **fields):
    """Changes fields of a JSON file, whose dots lead into objects and lists."""
    content = json.loads(path.read_text())
    for name, value in fields.items():
        *parents, last = name.split("__")
        part = content
        for key in parents:
            part = part[int(key) if key.isdigit() else key]
        part[last] = value
    path.write_text(json.dumps(content))


EVIL = "evilfeature.Evil"
SEQUENCE = {
    "pythonClassName": f"{MODULES}sequence_feature.Sequence",
    "sequence": {"feature": {"pythonClassName": EVIL, "text": {}}},
}


@pytest.mark.parametrize(
    "fields",
    [
        {"pythonClassName": EVIL},
        {"featuresDict__features__image__pythonClassName": EVIL},
        {"featuresDict__features__bright__pythonClassName": EVIL},
        {"featuresDict__features__more": SEQUENCE},
        {"featuresDict__features__more": {"type": EVIL, "content": {"shape": [], "dtype": "i4"}}},
    ],
    ids=str,
)
def test_prepared_data_import_no_module(tmp_path, prepare, opened, monkeypatch, fields):
    folder, _ = prepare()
    marker = tmp_path / "marker"
    (tmp_path / "evilfeature.py").write_text(f"open({str(marker)!r}, 'w').close()")
    monkeypatch.syspath_prepend(tmp_path)
    others = dict.fromkeys(("moduleName", "configName", "configDescription"), EVIL)
    edit(folder / "dataset_info.json", **others, redistributionInfo={"license": EVIL})
    assert len(opened()[0]) == 6
    edit(folder / "features.json", **fields)
    with input_error(rf"features\.json: expected .*found {EVIL}$"):
        opened()
    assert not marker.exists()


IMAGE = {"shape": [-1, -1, 3], "dtype": "uint8", "encoding_format": ""}


def write_legacy_features(folder, label):
    """Writes features.json as earlier versions of TFDS do, from class and content by name."""
    contents = {
        "image": ("image_feature.Image", IMAGE),
        "label": ("class_label_feature.ClassLabel", label),
        "bright": ("feature.Tensor", {"shape": [], "dtype": "float32"}),
    }
    features = {
        name: {"type": MODULES + kind, "content": content, "proto_cls": ""}
        for name, (kind, content) in contents.items()
    }
    described = {"type": f"{MODULES}features_dict.FeaturesDict", "content": features}
    (folder / "features.json").write_text(json.dumps(described))
    (folder / "label.labels.txt").unlink()


def test_features_of_earlier_versions_are_read(prepare, opened):
    folder, _ = prepare()
    write_legacy_features(folder, {"num_classes": 3})
    train, _ = opened()
    assert train.class_names == ("0", "1", "2") and train.labels.tolist() == [0, 0, 1, 1, 2, 2]


def test_names_of_classes_come_from_no_other_file(prepare, opened):
    folder, _ = prepare()
    write_legacy_features(folder, {"names_file": "/etc/passwd"})
    with input_error(r"features.json: .* found names_file=/etc/passwd$"):
        opened()


def shard_of(folder):
    shards = folder.glob("*-train.*")
    return max(shards, key=lambda path: (path.stat().st_size, path.name))


def records_of(content):
    """Returns the parts of a TFRecord file, one for each record."""
    parts, start = [], 0
    while start < len(content):
        stop = start + 16 + int.from_bytes(content[start : start + 8], "little")
        parts.append(content[start:stop])
        start = stop
    return parts


def flip(content, position):
    return content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :]


DAMAGED = {
    "empty": ("both", lambda content: b""),
    "missing": ("both", lambda content: None),
    "cut in a record": ("both", lambda content: content[:-40]),
    "cut after a record": ("tfrecord", lambda content: b"".join(records_of(content)[:-1])),
    "too long": ("tfrecord", lambda content: content + records_of(content)[0]),
    "a bit of a length": ("tfrecord", lambda content: flip(content, 0)),
    "a bit of the checksum of a length": ("tfrecord", lambda content: flip(content, 9)),
    "a bit of a record": ("both", lambda content: flip(content, content.index(b"\x89PNG") + 70)),
    "a bit at the end": ("tfrecord", lambda content: flip(content, len(content) - 1)),
}


CASES = [("tfrecord", name) for name in DAMAGED]
CASES += [("array_record", name) for name, (formats, _) in DAMAGED.items() if formats == "both"]


@pytest.mark.parametrize("file_format, damage", CASES)
def test_a_damaged_shard_is_named(prepare, opened, file_format, damage):
    _, change = DAMAGED[damage]
    folder, _ = prepare(file_format=file_format)
    opened()
    shard = shard_of(folder)
    content = change(shard.read_bytes())
    shard.unlink()
    if content is not None:
        shard.write_bytes(content)
    with input_error(rf"{shard.name}(, record \d+)?: cannot read: "):
        opened()


@pytest.mark.parametrize(
    "lengths, message",
    [
        (["5", "1"], "expected 5 records, found 4"),
        (["4", "2", "0"], "expected a file, found none"),
        ([], "split train: expected records, found none"),
        (["-6"], "expected -6 records, found 4"),
        (["many"], r"dataset_info.json: cannot read: "),
    ],
)
def test_more_or_fewer_records_than_stated_are_refused(prepare, opened, lengths, message):
    folder, _ = prepare()
    edit(folder / "dataset_info.json", splits__0__shardLengths=lengths)
    with input_error(message):
        opened()


@pytest.mark.parametrize(
    "fields",
    [
        {"splits__0__filepathTemplate": "/tmp/{SPLIT}"},
        {"splits__0__filepathTemplate": "../../../{SPLIT}"},
        {"splits__0__filepathTemplate": "", "name": "../../../outside"},
    ],
    ids=str,
)
def test_shards_lie_in_their_folder(prepare, opened, fields):
    folder, _ = prepare()
    edit(folder / "dataset_info.json", **fields)
    with input_error("expected files in its folder, found"):
        opened()


def test_a_damaged_image_is_named_by_its_record(prepare, opened, encode):
    prepare(encoded=lambda image: encode(image)[:-30])
    with input_error(r"train.array_record-00000, record \d: cannot decode"):
        opened()


def test_grey_and_frames_of_records_are_named(prepare, opened, encode):
    def stack(image):
        value = 4096 + int(np.asarray(image, int).sum()) % 4096
        first, second = (Image.fromarray(np.full((9, 8), grey, np.uint16)) for grey in (value, 9))
        return encode(first, "TIFF", save_all=True, append_images=[second])

    prepare(encoded=stack)
    train, test = opened()
    assert train.grey_bits == test.grey_bits == 13
    assert {reason: len(paths) for reason, paths in train.skipped.paths.items()} == {
        "files with 6 frames after the first in train": 6,
        "files with 4 frames after the first in test": 4,
        "grey images whose 13 bits are scaled to 8": 10,
    }


def test_versions_are_compared_as_numbers(prepare, opened, caplog):
    folder, _ = prepare("flowers/9.0.0")
    newest, _ = prepare("flowers/10.0.0")
    for name in ("10.0.0.incomplete185N4P", "11.0.0_old", "12"):
        shutil.copytree(folder, folder.parent / name)
    (newest / "label.labels.txt").write_text("a\nb\nc\n")
    assert opened()[0].class_names == ("a", "b", "c")
    assert "10.0.0.incomplete185N4P, 11.0.0_old, 12" in caplog.text
    shutil.rmtree(newest)
    shutil.rmtree(folder)
    with input_error(r"data.dir: .*: expected the folder flowers that"):
        opened()


@pytest.mark.ci
def test_real_cifar100_of_tfds_is_read(shared_asset, tmp_path):
    data_dir = shared_asset("tensorflow_datasets")
    folder = tmp_path / "cifar100/3.0.2"
    # Test images serve as training images, too: 50,000 images less to decode.
    without_train = shutil.ignore_patterns("*-train.*")
    shutil.copytree(data_dir / "cifar100/3.0.2", folder, ignore=without_train)
    shard_names = "{DATASET}-test.{FILEFORMAT}-{SHARD_X_OF_Y}"
    lengths = ["2500"] * 4
    info = folder / "dataset_info.json"
    edit(info, splits__0__filepathTemplate=shard_names, splits__0__shardLengths=lengths)
    _, source = sources.open_splits("cifar100", tmp_path, data_dir=str(tmp_path))
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
        assert_array_equal(source.image(index), example["image"])
