"""CIFAR-100's archive, in a small copy of its layout, from a file and from a server."""

import hashlib
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
import tensorflow_datasets as tfds

from fdc_jax.data import benchmarks, cifar100, images, sources
from fdc_jax.errors import InputError

FINE = sorted(f"class_{i:03d}" for i in range(100))


def archive_bytes(labels):
    """Packs a synthetic archive in the official layout; returns its bytes and its pixels."""
    generator = np.random.default_rng(0)
    files = {
        "fine_label_names.txt": "\n".join(FINE).encode() + b"\n",
    }
    pixels = {}
    for split, split_labels in labels.items():
        planes = generator.integers(0, 256, (len(split_labels), 3, 32, 32), dtype=np.uint8)
        pixels[split] = planes
        files[f"{split}.bin"] = b"".join(
            bytes([label // 5, label]) + plane.tobytes()
            for label, plane in zip(split_labels, planes, strict=True)
        )
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as packed:
        for name, content in files.items():
            member = tarfile.TarInfo(f"cifar-100-binary/{name}")
            member.size = len(content)
            packed.addfile(member, io.BytesIO(content))
    return buffer.getvalue(), pixels


LABELS = {"train": [*range(100), 7, 3], "test": [*range(99, -1, -1)]}


@pytest.fixture
def cifar(served, tiny_benchmark, monkeypatch):
    """Pixels of a synthetic archive that is served, and cifar100's row shrunk to it."""
    content, pixels = archive_bytes(LABELS)
    archive = served.folder / cifar100.ARCHIVE_NAME
    archive.write_bytes(content)
    tiny_benchmark("cifar100", num_train=102, task_test_counts=(5,) * 20)
    monkeypatch.setattr(cifar100, "SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(cifar100, "URL", f"{served.address}/{archive.name}")
    return pixels


def assert_is_cifar(splits, pixels):
    for split in splits:
        name = split.split
        assert list(split.ids) == [f"{name}_{i:05d}" for i in range(len(LABELS[name]))]
        assert split.labels.tolist() == LABELS[name]
        assert split.class_names == tuple(FINE)
        for index, planes in enumerate(pixels[name]):
            np.testing.assert_array_equal(split.image(index), planes.transpose(1, 2, 0))
        hashes = [
            images.pixels_sha256(np.asarray(split.image(index))) for index in range(len(split))
        ]
        assert split.pixel_hashes() == hashes
        benchmarks.verify("cifar100", *(each.labels for each in splits), FINE)


def test_published_checksum_is_the_one_of_tfds():
    path = Path(tfds.__file__).parent / "url_checksums" / "cifar100.txt"
    expected = [cifar100.URL, "168513733", cifar100.SHA256, cifar100.ARCHIVE_NAME]
    assert path.read_text().split() == expected


def test_it_is_downloaded_at_the_first_start(tmp_path, cifar, served, monkeypatch):
    pixels = cifar

    def opened(cache):
        return sources.open_splits("cifar100", tmp_path / cache, data_dir=str(tmp_path))

    assert_is_cifar(opened("a"), pixels)
    assert (tmp_path / "a" / "data" / cifar100.ARCHIVE_NAME).is_file()
    asked = [*served.requests]
    assert_is_cifar(opened("a"), pixels)
    assert served.requests == asked
    monkeypatch.setattr(cifar100, "SHA256", "0" * 64)
    address = served.address
    with pytest.raises(InputError, match=f"cannot download {address}.* config.data.source$"):
        opened("b")
