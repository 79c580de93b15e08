"""Data that TFDS prepared, as array_record and as TFRecord: order, what is kept, and damage."""

import json
import os
import shutil

import google_crc32c
import numpy as np
import pytest
import tensorflow_datasets as tfds
from array_record.python.array_record_data_source import ArrayRecordDataSource
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

    def call(path="flowers/2.1.1", file_format="array_record", label="label", encoded=encode):
        folder = tmp_path / "data" / path
        folder.mkdir(parents=True)
        features = {
            "image": tfds.features.Image(shape=(None, None, 3)),
            "label": tfds.features.ClassLabel(names=list(CLASSES)),
            "file_name": tfds.features.Text(),
        }
        examples = []
        for seed in range(10):
            image = encoded(photo(8, 9, seed))
            # As strings the tenth name comes before the second.
            name = f"{seed % 3}/{12 - seed}.png"
            values = image, seed % 3, name
            examples.append(dict(zip(features, values, strict=True)))
        version = tfds.core.Version("2.1.1")
        identity = tfds.core.dataset_info.DatasetIdentity("flowers", version, str(folder), "")
        info = tfds.core.DatasetInfo(
            builder=identity,
            features=tfds.features.FeaturesDict(features),
            supervised_keys=("image", label),
            disable_shuffling=True,
        )
        writer = tfds.core.SequentialWriter(info, 4, file_format="array_record")
        writer.initialize_splits(["train", "validation"])
        writer.add_examples({"train": examples[:6], "validation": examples[6:]})
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
    "file_format, path", [("array_record", "flowers/2.1.1"), ("tfrecord", "flowers/small/2.1.1")]
)
def test_data_are_read_where_they_lie_and_sorted_by_class(prepare, opened, file_format, path):
    folder, examples = prepare(path, file_format)
    before = sorted(folder.iterdir())
    train, test = opened()
    assert train.class_names == CLASSES
    assert (train.name, train.partition, train.upright) == ("flowers", "tfds", True)
    assert train.ids == ("0/12.png", "0/9.png", "1/11.png", "1/8.png", "2/10.png", "2/7.png")
    by_name = {example["file_name"]: example for example in examples}
    for split in (train, test):
        for index, name in enumerate(split.ids):
            assert split.read(index) == by_name[name]["image"]
            assert split.labels[index] == by_name[name]["label"]
            hashed = images.pixels_sha256(np.asarray(split.image(index)))
            assert split.pixel_hashes()[index] == hashed
    assert sorted(folder.iterdir()) == before


def test_records_are_decoded_once_until_the_data_change(tmp_path, prepare, opened, monkeypatch):
    folder, _ = prepare()
    examined, examine = [], images.examine
    monkeypatch.setattr(images, "examine", lambda *given: examined.append(1) or examine(*given))

    def count():
        examined.clear()
        return [split.checksum for split in opened()], len(examined)

    checksums, _ = first = count()
    assert first == (checksums, 10) and count() == (checksums, 0)
    next((tmp_path / "cache" / "data").glob("flowers-train-*.npz")).write_bytes(b"damaged")
    assert count() == (checksums, 6)
    for shard in folder.glob("*-train.array_record*"):
        os.utime(shard, ns=(1, 1))
    assert count() == (checksums, 6)
    (folder / "label.labels.txt").write_text("rose\ntulip\nlily\n")
    others, decoded = count()
    assert decoded == 0 and others != checksums


def test_swapped_shards_of_equal_size_are_noticed(prepare, opened, encode):
    def bitmap(image):
        return encode(image, "BMP")

    def flipped(image):
        return bitmap(ImageOps.flip(image))

    first, _ = prepare("flowers/1.0.0", encoded=bitmap)
    second, _ = prepare("others/1.0.0", encoded=flipped)
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
    prepare("named/1.0.0", label="file_name")
    message = r"expected images and their classes, found .* file_name, image, label$"
    with input_error(message):
        opened("named")


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
    edit(folder / "dataset_info.json", moduleName=EVIL)
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
        "file_name": ("text_feature.Text", {}),
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


def flip(content, position):
    return content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :]


BOTH = {
    "empty": lambda content: b"",
    "missing": lambda content: None,
    "cut in a record": lambda content: content[:-40],
    "a bit of a record": lambda content: flip(content, content.index(b"\x89PNG") + 70),
}
DAMAGED = BOTH | {
    "cut after a record": lambda content: content[: 16 + int.from_bytes(content[:8], "little")],
    "a bit of a length": lambda content: flip(content, 0),
}
CASES = [("array_record", name) for name in BOTH] + [("tfrecord", name) for name in DAMAGED]


@pytest.mark.parametrize("file_format, damage", CASES)
def test_a_damaged_shard_is_named(prepare, opened, file_format, damage):
    folder, _ = prepare(file_format=file_format)
    opened()
    shard = max(folder.glob("*-train.*"), key=os.path.getsize)
    content = DAMAGED[damage](shard.read_bytes())
    shard.unlink()
    if content is not None:
        shard.write_bytes(content)
    with input_error(rf"{shard.name}(, record \d+)?: cannot read: "):
        opened()


LENGTHS, TEMPLATE = "splits__0__shardLengths", "splits__0__filepathTemplate"


@pytest.mark.parametrize(
    "fields, message",
    [
        ({LENGTHS: ["5", "1"]}, "expected 5 records, found 4"),
        ({LENGTHS: []}, "split train: expected records, found none"),
        ({LENGTHS: ["many"]}, r"dataset_info.json: cannot read: "),
        ({TEMPLATE: "../../../{SPLIT}"}, "expected files in its folder, found"),
        ({TEMPLATE: "", "name": "../../../outside"}, "expected files in its folder, found"),
    ],
)
def test_shards_are_as_stated_and_in_their_folder(prepare, opened, fields, message):
    folder, _ = prepare()
    edit(folder / "dataset_info.json", **fields)
    with input_error(message):
        opened()


def test_a_damaged_image_is_named_by_its_record(prepare, opened, encode):
    prepare(encoded=lambda image: encode(image)[:-30])
    with input_error(r"train.array_record-00000, record \d: cannot decode"):
        opened()


def test_grey_and_frames_of_records_are_named(prepare, opened, encode):
    def stack(image):
        grey = Image.fromarray(4096 + np.asarray(image, np.uint16)[..., 0])
        return encode(grey, "TIFF", save_all=True, append_images=[grey])

    prepare(encoded=stack)
    train, test = opened()
    assert train.grey_bits == test.grey_bits == 13
    assert [len(paths) for paths in train.skipped.paths.values()] == [6, 10, 4]


def test_versions_are_compared_as_numbers(prepare, opened, caplog):
    folder, _ = prepare("flowers/9.0.0")
    newest, _ = prepare("flowers/10.0.0")
    for name in ("10.0.0.incomplete185N4P", "11.0.0_old", "12"):
        shutil.copytree(folder, folder.parent / name)
    (newest / "label.labels.txt").write_text("a\nb\nc\n")
    assert opened()[0].class_names == ("a", "b", "c")
    assert "10.0.0.incomplete185N4P, 11.0.0_old, 12" in caplog.text


@pytest.mark.ci
def test_real_cifar100_of_tfds_is_read(shared_asset, tmp_path):
    prepared = shared_asset("tensorflow_datasets") / "cifar100/3.0.2"
    folder = tmp_path / "cifar100/3.0.2"
    shutil.copytree(prepared, folder, ignore=shutil.ignore_patterns("*_record-*"))
    # A quarter of the test images serves as both splits: less to decode.
    shard = prepared / "cifar100-test.array_record-00000-of-00004"
    for number, split in enumerate(("train", "test")):
        shutil.copy(shard, folder / f"cifar100-{split}.array_record-00000-of-00001")
        edit(folder / "dataset_info.json", **{f"splits__{number}__shardLengths": ["2500"]})
    _, source = sources.open_splits("cifar100", tmp_path, data_dir=str(tmp_path))
    # Whoever prepared the data, and with whichever library: features are kept under this checksum
    # of names, labels and pixels.
    assert source.checksum.startswith("d7bd0a1a79aeacaa")
