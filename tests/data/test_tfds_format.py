import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow_datasets as tfds
from array_record.python.array_record_module import ArrayRecordReader

from fdc_jax.data import benchmarks, dataset, images, task_stream, tfds_format
from fdc_jax.errors import InputError

# As a string "a-b/1.png" comes before "a/9.png", but class "a" before class "a-b".
CLASSES = ["a", "a-b", "c"]
REPOSITORY = Path(__file__).resolve().parents[2]


def write(folder, examples, class_names=CLASSES):
    folder.mkdir(parents=True)
    records = {"train": iter(examples), "test": iter(examples[:2])}
    row = benchmarks.BENCHMARKS["imagenet_a"]
    tfds_format.write(folder, row, class_names, None, records)


@pytest.fixture
def written(tmp_path, encode):
    """Writes a small imagenet_a below tmp_path; returns its folder and its examples."""
    folder = benchmarks.BENCHMARKS["imagenet_a"].folder(tmp_path)
    examples = [
        {
            "image": encode(np.full((5, 4, 3), 10 * number, np.uint8)),
            "label": label,
            "file_name": f"{CLASSES[label]}/{number}.png",
        }
        for number, label in [(3, 1), (10, 0), (9, 0), (1, 1), (7, 2)]
    ]
    write(folder, examples)
    (folder / "metadata.json").write_text('{"partition": "pilot"}')
    return folder, examples


def opened(data_dir, split="train", **options):
    return task_stream.open_dataset("imagenet_a", split, data_dir, **options)


def test_images_are_sorted_by_class_and_name(tmp_path, written):
    _, examples = written
    source = opened(tmp_path)
    assert source.ids == ("a/10.png", "a/9.png", "a-b/1.png", "a-b/3.png", "c/7.png")
    assert source.labels.tolist() == [0, 0, 1, 1, 2]
    by_name = {example["file_name"]: example["image"] for example in examples}
    assert [source.read(i) for i in range(5)] == [by_name[name] for name in source.ids]
    assert (source.partition, source.class_names) == ("pilot", tuple(CLASSES))
    assert source.describe(3) == "imagenet_a, split train, image 3 (a-b/3.png)"


def test_the_index_is_kept_and_made_anew_when_the_data_change(tmp_path, written):
    folder, _ = written
    first = opened(tmp_path)
    path = folder / ".fdc_jax-train-index.npz"
    before = path.read_bytes()
    again = opened(tmp_path)
    assert path.read_bytes() == before
    assert again.ids == first.ids and again.labels.tolist() == first.labels.tolist()
    assert again.read(1) == first.read(1)
    for content in (b"damaged", b""):
        path.write_bytes(content)
        assert opened(tmp_path).ids == first.ids
    wrong = dict(np.load(path))
    wrong["ids"][0] = "changed"
    np.savez(path, **wrong)
    assert opened(tmp_path).ids[0] == "changed"
    os.utime(next(folder.glob("*-train.array_record*")), ns=(1, 1))
    assert opened(tmp_path).ids == first.ids


def test_the_checksum_of_data_prepared_elsewhere_is_computed_once(tmp_path, written):
    folder, examples = written
    source = opened(tmp_path)
    records = [
        (each["file_name"], each["label"], images.pixels_sha256(images.decode(each["image"], "")))
        for each in examples
    ]
    expected = dataset.images_sha256(CLASSES, records)
    assert source.checksum == expected
    path = folder / ".fdc_jax-train-images.npz"
    np.savez(path, **dict(np.load(path)) | {"sha256": np.array("kept")})
    assert source.checksum == "kept"
    os.utime(next(folder.glob("*-train.array_record*")), ns=(1, 1))
    assert opened(tmp_path).checksum == expected


def test_a_folder_closed_to_writing_stays_as_it_is(tmp_path, written):
    folder, _ = written
    before = sorted(folder.iterdir())
    folder.chmod(0o555)
    try:
        for cache_dir in (None, tmp_path / "cache"):
            source = opened(tmp_path, cache_dir=cache_dir)
            assert len(source.checksum) == 64
        assert sorted(folder.iterdir()) == before
        assert len(list((tmp_path / "cache" / "data").iterdir())) == 2
        again = opened(tmp_path, cache_dir=tmp_path / "cache")
        assert (again.ids, again.checksum) == (source.ids, source.checksum)
    finally:
        folder.chmod(0o755)


def test_missing_data_tell_how_to_prepare_them(tmp_path):
    with pytest.raises(InputError) as caught:
        task_stream.open_dataset("imagenet_r", "test", tmp_path)
    message = str(caught.value)
    assert str(tmp_path / "pilot_imagenet_r" / "1.0.0") in message
    assert f"python -m fdc_jax.data.prepare imagenet_r --data_dir={tmp_path}" in message
    assert "\n" not in message


@pytest.mark.parametrize("name", ["dataset_info.json", "features.json", "metadata.json"])
def test_damaged_descriptions(tmp_path, written, name):
    folder, _ = written
    (folder / name).write_text("{")
    with pytest.raises(InputError, match=re.escape(str(folder))) as caught:
        opened(tmp_path)
    assert "\n" not in str(caught.value)


def test_another_partition_is_refused(tmp_path, written):
    folder, _ = written
    (folder / "metadata.json").write_text('{"partition": "random80"}')
    with pytest.raises(InputError, match="expected partition pilot for imagenet_a, found random80"):
        opened(tmp_path)


def test_damaged_shards(tmp_path, written):
    folder, _ = written
    (shard,) = folder.glob("*-train.array_record*")
    content = shard.read_bytes()
    shard.write_bytes(content[:1000])
    with pytest.raises(InputError, match=re.escape(str(folder))):
        opened(tmp_path)
    shard.write_bytes(content)
    opened(tmp_path)
    source = opened(tmp_path)
    shard.unlink()
    with pytest.raises(InputError, match=r"imagenet_a, split train, image 2 \(a-b/1\.png\)"):
        source.read(2)
    with pytest.raises(InputError, match=f"expected the files {re.escape(shard.name)}"):
        opened(tmp_path)


def test_large_splits_have_several_files_of_single_records(tmp_path, monkeypatch):
    monkeypatch.setattr(tfds_format, "_IMAGES_PER_FILE", 3)
    folder = benchmarks.BENCHMARKS["imagenet_a"].folder(tmp_path)
    examples = [{"image": bytes([i]), "label": 0, "file_name": f"a/{i:02d}"} for i in range(11)]
    write(folder, examples, ["a"])
    shards = list(folder.glob("*-train.array_record-0000?"))
    assert len(shards) == 4
    source = opened(tmp_path)
    assert [source.read(i) for i in range(11)] == [bytes([i]) for i in range(11)]
    for shard in shards:
        # Groups of records would have to be decompressed whole to read one image.
        reader = ArrayRecordReader(str(shard))
        assert "group_size:1," in reader.writer_options_string()
        reader.close()


def test_tensorflow_is_never_imported(tmp_path, encode):
    for name in ("train/a/1.png", "train/b/1.png", "test/a/1.png"):
        (tmp_path / "raw" / name).parent.mkdir(parents=True)
        (tmp_path / "raw" / name).write_bytes(encode(np.zeros((4, 4, 3), np.uint8)))
    for name in ("tensorflow", "torch"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise AssertionError('{name} imported')")
    program = f"""
from fdc_jax.data import prepare, task_stream
from fdc_jax.data.batches import TrainBatches
prepare.prepare("mine", {str(tmp_path / "raw")!r}, {str(tmp_path)!r}, quiet=True)
source = task_stream.open_dataset("mine", "train", {str(tmp_path)!r})
assert next(iter(TrainBatches(source, [0, 1], None, 4, 0, 0, image_size=8))).weights.sum() == 2
"""
    subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{REPOSITORY}"},
        check=True,
        timeout=120,
    )


def test_real_cifar100(shared_asset, tmp_path):
    data_dir = shared_asset("tensorflow_datasets")
    source = task_stream.open_dataset("cifar100", "test", data_dir, tmp_path)
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
        decoded = images.decode(source.read(index), "x")
        np.testing.assert_array_equal(np.asarray(decoded), example["image"])


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
