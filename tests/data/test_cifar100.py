"""CIFAR-100's archive, in a small copy of its layout, from a file and from a server."""

import hashlib
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
import tensorflow_datasets as tfds
from numpy.testing import assert_array_equal

from fdc_jax.data import cifar100, images, sources
from tests.errors import input_error

FINE = sorted(f"class_{i:03d}" for i in range(100))


LABELS = {"train": [*range(100), 7, 3], "test": [*range(99, -1, -1)]}


@pytest.fixture
def pixels(served, tiny_benchmark, monkeypatch):
    """Pixels of a synthetic archive that is served, and cifar100's row shrunk to it."""
    generator, pixels = np.random.default_rng(0), {}
    files = {"fine_label_names.txt": "\n".join(FINE).encode() + b"\n"}
    for split, labels in LABELS.items():
        pixels[split] = generator.integers(0, 256, (len(labels), 3, 32, 32), dtype=np.uint8)
        files[f"{split}.bin"] = b"".join(
            bytes([label // 5, label]) + planes.tobytes()
            for label, planes in zip(labels, pixels[split], strict=True)
        )
    archive = served.folder / cifar100.ARCHIVE_NAME
    with tarfile.open(archive, "w:gz") as packed:
        for name, content in files.items():
            member = tarfile.TarInfo(f"cifar-100-binary/{name}")
            member.size = len(content)
            packed.addfile(member, io.BytesIO(content))
    tiny_benchmark("cifar100", num_train=102, task_test_counts=(5,) * 20)
    checksum = hashlib.sha256(archive.read_bytes()).hexdigest()
    monkeypatch.setattr(cifar100, "SHA256", checksum)
    monkeypatch.setattr(cifar100, "URL", f"{served.address}/{archive.name}")
    return pixels


def assert_is_cifar(splits, pixels):
    for split in splits:
        name = split.split
        assert list(split.ids) == [f"{name}_{i:05d}" for i in range(len(LABELS[name]))]
        assert split.labels.tolist() == LABELS[name]
        assert split.class_names == tuple(FINE)
        shown = [np.asarray(split.image(index)) for index in range(len(split))]
        assert_array_equal(shown, pixels[name].transpose(0, 2, 3, 1))
        assert split.pixel_hashes() == [*map(images.pixels_sha256, shown)]


def test_published_checksum_is_the_one_of_tfds():
    path = Path(tfds.__file__).parent / "url_checksums" / "cifar100.txt"
    expected = [cifar100.URL, "168513733", cifar100.SHA256, cifar100.ARCHIVE_NAME]
    assert path.read_text().split() == expected


def test_cifar100_is_downloaded_at_the_first_start(tmp_path, pixels, served, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))

    def opened(cache):
        return sources.open_splits("cifar100", tmp_path / cache)

    assert_is_cifar(opened("a"), pixels)
    assert (tmp_path / "a" / "data" / cifar100.ARCHIVE_NAME).is_file()
    asked = [*served.requests]
    assert_is_cifar(opened("a"), pixels)
    assert served.requests == asked
    monkeypatch.setattr(cifar100, "SHA256", "0" * 64)
    address = served.address
    with input_error(f"cannot download {address}.* --data of fdc paper$"):
        opened("b")
