import io
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tensorflow_datasets as tfds
from array_record.python.array_record_module import ArrayRecordReader
from PIL import Image

from fdc_jax.data import benchmarks, dataset, images, tfds_format
from fdc_jax.errors import InputError

# As a string "a-b/1.png" comes before "a/9.png", but class "a" before class "a-b".
CLASSES = ["a", "a-b", "c"]
REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def written(tmp_path, encode):
    """Writes a small imagenet_a below tmp_path; returns its folder and its examples."""
    row = benchmarks.BENCHMARKS["imagenet_a"]
    folder = tfds_format.dataset_folder(row, tmp_path)
    folder.mkdir(parents=True)
    examples = [
        {
            "image": encode(np.full((5, 4, 3), 10 * number, np.uint8)),
            "label": label,
            "file_name": f"{CLASSES[label]}/{number}.png",
        }
        for number, label in [(3, 1), (10, 0), (9, 0), (1, 1), (7, 2)]
    ]
    records = {"train": iter(examples), "test": iter(examples[:2])}
    tfds_format.write(folder, row, CLASSES, None, records)
    (folder / "metadata.json").write_text('{"partition": "pilot"}')
    return folder, examples


def test_source_is_sorted_by_class_and_name(tmp_path, written):
    _, examples = written
    source = dataset.open_dataset("imagenet_a", "train", tmp_path)
    assert source.ids == ("a/10.png", "a/9.png", "a-b/1.png", "a-b/3.png", "c/7.png")
    assert source.labels.tolist() == [0, 0, 1, 1, 2]
    by_name = {example["file_name"]: example["image"] for example in examples}
    assert [source.read(i) for i in range(5)] == [by_name[name] for name in source.ids]
    assert (source.partition, source.class_names, source.num_classes) == (
        "pilot",
        tuple(CLASSES),
        3,
    )
    assert source.describe(3) == "imagenet_a, split train, image 3 (a-b/3.png)"


def test_index_is_kept_and_made_anew_when_the_data_change(tmp_path, written):
    folder, _ = written
    first = dataset.open_dataset("imagenet_a", "train", tmp_path)
    path = folder / ".fdc_jax-train-index.npz"
    before = path.read_bytes()
    again = dataset.open_dataset("imagenet_a", "train", tmp_path)
    assert path.read_bytes() == before
    assert again.ids == first.ids
    np.testing.assert_array_equal(again.labels, first.labels)
    assert again.read(1) == first.read(1)
    for content in (b"damaged", b""):
        path.write_bytes(content)
        assert dataset.open_dataset("imagenet_a", "train", tmp_path).ids == first.ids
    wrong = dict(np.load(io.BytesIO(before)))
    wrong["ids"][0] = "changed"
    np.savez(path, **wrong)
    assert dataset.open_dataset("imagenet_a", "train", tmp_path).ids[0] == "changed"
    shard = next(folder.glob("*-train.array_record*"))
    os.utime(shard, ns=(1, 1))
    assert dataset.open_dataset("imagenet_a", "train", tmp_path).ids == first.ids


def test_the_checksum_of_data_prepared_elsewhere_is_computed_once(tmp_path, written):
    folder, examples = written
    source = dataset.open_dataset("imagenet_a", "train", tmp_path)
    records = [
        (each["file_name"], each["label"], images.pixels_sha256(images.decode(each["image"], "")))
        for each in examples
    ]
    expected = dataset.images_sha256(CLASSES, records)
    assert source.checksum == expected
    path = folder / ".fdc_jax-train-images.npz"
    kept = dict(np.load(path))
    np.savez(path, **kept | {"sha256": np.array("kept")})
    assert source.checksum == "kept"
    os.utime(next(folder.glob("*-train.array_record*")), ns=(1, 1))
    assert dataset.open_dataset("imagenet_a", "train", tmp_path).checksum == expected


def test_a_folder_closed_to_writing_stays_as_it_is(tmp_path, written):
    folder, _ = written
    before = sorted(folder.iterdir())
    folder.chmod(0o555)
    try:
        for cache_dir in (None, tmp_path / "cache"):
            source = dataset.open_dataset("imagenet_a", "train", tmp_path, cache_dir)
            assert len(source.checksum) == 64
        assert sorted(folder.iterdir()) == before
        assert len(list((tmp_path / "cache" / "data").iterdir())) == 2
        again = dataset.open_dataset("imagenet_a", "train", tmp_path, tmp_path / "cache")
        assert (again.ids, again.checksum) == (source.ids, source.checksum)
    finally:
        folder.chmod(0o755)


def test_missing_data_tell_how_to_prepare_them(tmp_path):
    with pytest.raises(InputError) as caught:
        dataset.open_dataset("imagenet_r", "test", tmp_path)
    message = str(caught.value)
    assert str(tmp_path / "pilot_imagenet_r" / "1.0.0") in message
    assert f"python -m fdc_jax.data.prepare imagenet_r --data_dir={tmp_path}" in message
    assert "\n" not in message


def test_unknown_split(tmp_path):
    with pytest.raises(InputError, match="train or test, found 'val'"):
        dataset.open_dataset("cifar100", "val", tmp_path)


@pytest.mark.parametrize("name", ["dataset_info.json", "features.json", "metadata.json"])
@pytest.mark.parametrize("content", ["{", "[]", "{}"])
def test_damaged_descriptions(tmp_path, written, name, content):
    folder, _ = written
    (folder / name).write_text(content)
    if (name, content) == ("metadata.json", "{}"):
        assert len(dataset.open_dataset("imagenet_a", "train", tmp_path)) == 5
        return
    with pytest.raises(InputError, match=re.escape(str(folder))) as caught:
        dataset.open_dataset("imagenet_a", "train", tmp_path)
    assert "\n" not in str(caught.value)


def test_missing_features(tmp_path, written):
    folder, _ = written
    (folder / "features.json").unlink()
    with pytest.raises(InputError, match=re.escape(str(folder))):
        dataset.open_dataset("imagenet_a", "train", tmp_path)


def test_missing_shard(tmp_path, written):
    folder, _ = written
    shard = next(folder.glob("*-train.array_record*"))
    shard.unlink()
    with pytest.raises(InputError, match=f"expected the files {re.escape(shard.name)}"):
        dataset.open_dataset("imagenet_a", "train", tmp_path)


def test_truncated_shard(tmp_path, written):
    folder, _ = written
    shard = next(folder.glob("*-train.array_record*"))
    shard.write_bytes(shard.read_bytes()[:1000])
    with pytest.raises(InputError, match=re.escape(str(folder))):
        dataset.open_dataset("imagenet_a", "train", tmp_path)


def test_shard_that_breaks_while_open(tmp_path, written):
    folder, _ = written
    dataset.open_dataset("imagenet_a", "train", tmp_path)
    source = dataset.open_dataset("imagenet_a", "train", tmp_path)
    next(folder.glob("*-train.array_record*")).unlink()
    with pytest.raises(InputError, match=r"imagenet_a, split train, image 2 \(a-b/1\.png\)"):
        source.read(2)


def test_another_partition_is_refused(tmp_path, written):
    folder, _ = written
    (folder / "metadata.json").write_text('{"partition": "random80"}')
    with pytest.raises(InputError, match="expected partition pilot for imagenet_a, found random80"):
        dataset.open_dataset("imagenet_a", "train", tmp_path)


def test_large_splits_have_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr(tfds_format, "_IMAGES_PER_FILE", 3)
    row = benchmarks.BENCHMARKS["imagenet_a"]
    folder = tfds_format.dataset_folder(row, tmp_path)
    folder.mkdir(parents=True)
    records = [{"image": bytes([i]), "label": 0, "file_name": f"a/{i:02d}"} for i in range(11)]
    tfds_format.write(folder, row, ["a"], None, {s: iter(records) for s in ("train", "test")})
    assert len(list(folder.glob("*-train.array_record-0000?"))) == 4
    source = dataset.open_dataset("imagenet_a", "train", tmp_path)
    assert [source.read(i) for i in range(11)] == [bytes([i]) for i in range(11)]


def test_records_are_stored_one_by_one(written):
    # Groups of records would have to be decompressed whole to read one image.
    folder, _ = written
    for shard in folder.glob("*.array_record*"):
        reader = ArrayRecordReader(str(shard))
        assert "group_size:1," in reader.writer_options_string()
        reader.close()


def test_only_one_module_imports_tfds():
    importing = re.compile(r"^\s*(import|from) (tensorflow|array_record)", re.MULTILINE)
    found = [
        path.name
        for path in (REPOSITORY / "fdc_jax").rglob("*.py")
        if importing.search(path.read_text())
    ]
    assert found == ["tfds_format.py"]


WITHOUT_TENSORFLOW = """
import importlib.machinery, sys, warnings
warnings.simplefilter("error")
tried = []

class Refuse:
    # Found when looked for, as where TensorFlow is installed; refuses to be imported.
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("tensorflow", "torch"):
            return importlib.machinery.ModuleSpec(name, self)

    def create_module(self, spec):
        tried.append(spec.name)
        raise ImportError(spec.name)

    def exec_module(self, module):
        pass

sys.meta_path.insert(0, Refuse())
from fdc_jax.data import benchmarks, dataset, prepare
from fdc_jax.data.batches import TrainBatches
import dataclasses
row = dataclasses.replace(
    benchmarks.BENCHMARKS["cub200"], num_classes=2, classes_per_task=1, num_train=4, num_test=2,
    task_test_counts=(1, 1),
)
benchmarks.BENCHMARKS["cub200"] = row
prepare.prepare("cub200", sys.argv[1], sys.argv[2], quiet=True)
source = dataset.open_dataset("cub200", "train", sys.argv[2])
batches = list(TrainBatches(source, range(4), None, 4, 0, 0, image_size=8))
assert batches[0].weights.sum() == 4
assert not tried, tried
assert not [name for name in sys.modules if name.partition(".")[0] == "tensorflow"]
"""


def test_tensorflow_is_never_wanted(tmp_path, encode):
    for split, count in [("train", 2), ("test", 1)]:
        for name in ("a", "b"):
            folder = tmp_path / "raw" / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                (folder / f"{i}.png").write_bytes(encode(np.zeros((4, 4, 3), np.uint8)))
    subprocess.run(
        [sys.executable, "-c", WITHOUT_TENSORFLOW, tmp_path / "raw", tmp_path / "data"],
        cwd=REPOSITORY,
        check=True,
        timeout=120,
    )


def test_real_cifar100(shared_asset):
    data_dir = shared_asset("tensorflow_datasets")
    sources = {s: dataset.open_dataset("cifar100", s, data_dir) for s in ("train", "test")}
    row = benchmarks.BENCHMARKS["cifar100"]
    labels = [sources[split].labels for split in ("train", "test")]
    benchmarks.verify(row, *labels, sources["train"].class_names)
    for split, source in sources.items():
        assert list(source.ids) == [f"{split}_{i:05d}" for i in range(len(source))]
        assert source.class_names[:2] == ("apple", "aquarium_fish")
        assert list(source.class_names) == sorted(source.class_names)
    reference = tfds.data_source("cifar100", split="test", data_dir=data_dir)
    for i in (0, 1234, 9999):
        example = reference[i]
        index = sources["test"].ids.index(example["id"].decode())
        assert sources["test"].labels[index] == example["label"]
        decoded = images.decode(sources["test"].read(index), "x")
        np.testing.assert_array_equal(np.asarray(decoded), example["image"])


def test_real_cifar100_has_the_features_that_we_write(shared_asset, tmp_path):
    folder = shared_asset("tensorflow_datasets") / "cifar100" / "3.0.2"
    names = [
        (folder / f"{key}.labels.txt").read_text().split() for key in ("label", "coarse_label")
    ]
    features = tfds_format.features(*names)
    features.save_config(tmp_path)
    for name in ("features.json", "label.labels.txt", "coarse_label.labels.txt"):
        read = json.loads if name.endswith("json") else str.split
        assert read((tmp_path / name).read_text()) == read((folder / name).read_text())


def test_reading_is_safe_from_many_threads(tmp_path, written):
    source = dataset.open_dataset("imagenet_a", "train", tmp_path)
    expected = [source.read(i) for i in range(5)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(source.read, list(range(5)) * 200))
    assert found == expected * 200


def test_a_copy_elsewhere_reads_the_same(tmp_path, written):
    source = dataset.open_dataset("imagenet_a", "train", tmp_path)
    shutil.copytree(tmp_path / "pilot_imagenet_a", tmp_path / "copy" / "pilot_imagenet_a")
    copy = dataset.open_dataset("imagenet_a", "train", tmp_path / "copy")
    assert (copy.ids, copy.checksum) == (source.ids, source.checksum)
    with Image.open(io.BytesIO(copy.read(0))) as image:
        assert image.size == (4, 5)
