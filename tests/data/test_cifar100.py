"""CIFAR-100's archive, in a small copy of its layout, from a file and from a server."""

import contextlib
import functools
import hashlib
import http.server
import io
import tarfile
import threading
from pathlib import Path

import numpy as np
import pytest
import tensorflow_datasets as tfds
from PIL import Image

from fdc_jax.data import benchmarks, cifar100, prepare, task_stream
from fdc_jax.errors import InputError

FINE = sorted(f"class_{i:03d}" for i in range(100))
COARSE = sorted(f"group_{i:02d}" for i in range(20))


def archive_bytes(labels):
    """Packs a synthetic archive in the official layout; returns its bytes and its pixels."""
    generator = np.random.default_rng(0)
    files = {
        "fine_label_names.txt": "\n".join(FINE).encode() + b"\n",
        "coarse_label_names.txt": "\n".join(COARSE).encode() + b"\n",
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
def cifar(tmp_path, tiny_benchmark):
    """A synthetic archive, its pixels, and cifar100's row shrunk to it."""
    content, pixels = archive_bytes(LABELS)
    archive = tmp_path / "raw" / cifar100.ARCHIVE_NAME
    archive.parent.mkdir()
    archive.write_bytes(content)
    tiny_benchmark(
        "cifar100",
        num_train=102,
        num_test=100,
        task_test_counts=(5,) * 20,
        checksums={"sha256": hashlib.sha256(content).hexdigest()},
    )
    return archive, pixels


def assert_is_cifar(data_dir, pixels):
    for split in ("train", "test"):
        source = task_stream.open_dataset("cifar100", split, data_dir)
        assert list(source.ids) == [f"{split}_{i:05d}" for i in range(len(LABELS[split]))]
        assert source.labels.tolist() == LABELS[split]
        assert source.class_names == tuple(FINE)
        for index, planes in enumerate(pixels[split]):
            with Image.open(io.BytesIO(source.read(index))) as image:
                assert image.format == "PNG"
                np.testing.assert_array_equal(np.asarray(image), planes.transpose(1, 2, 0))


@pytest.mark.parametrize("folder", [False, True])
def test_the_archive_becomes_what_tfds_expects(tmp_path, cifar, folder):
    archive, pixels = cifar
    source = archive.parent if folder else archive
    prepared = prepare.prepare("cifar100", source, tmp_path, quiet=True)
    assert_is_cifar(tmp_path, pixels)
    assert prepare.prepare("cifar100", source, tmp_path, quiet=True) == prepared
    examples = tfds.data_source("cifar100", split="test", data_dir=tmp_path)
    assert len(examples) == 100
    example = examples[30]
    assert set(example) == {"id", "image", "label", "coarse_label"}
    assert example["id"] == b"test_00030"
    assert (int(example["label"]), int(example["coarse_label"])) == (69, 13)
    np.testing.assert_array_equal(example["image"], pixels["test"][30].transpose(1, 2, 0))
    builder = tfds.builder("cifar100", data_dir=tmp_path)
    assert builder.info.features["label"].names == FINE
    assert builder.info.splits["train"].num_examples == 102


def test_an_archive_with_another_checksum_is_refused(tmp_path, cifar):
    archive, _ = cifar
    archive.write_bytes(archive.read_bytes() + b"\0")
    with pytest.raises(InputError, match=r"expected SHA-256 [0-9a-f]{64}, found [0-9a-f]{64}"):
        prepare.prepare("cifar100", archive, tmp_path / "data", quiet=True)


def test_published_checksum_is_the_one_of_tfds():
    path = Path(tfds.__file__).parent / "url_checksums" / "cifar100.txt"
    row = benchmarks.BENCHMARKS["cifar100"]
    expected = [row.obtain, "168513733", row.checksums["sha256"], cifar100.ARCHIVE_NAME]
    assert path.read_text().split() == expected


@contextlib.contextmanager
def serving(folder):
    """Serves a folder on this machine; yields its address."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments):
            pass

    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_download(tmp_path, cifar, tiny_benchmark):
    archive, pixels = cifar
    with serving(archive.parent) as address:
        row = tiny_benchmark("cifar100", obtain=f"{address}/{archive.name}")
        prepare.prepare("cifar100", None, tmp_path / "a", quiet=True)
        tiny_benchmark("cifar100", checksums={"sha256": "0" * 64})
        with pytest.raises(InputError, match=f"cannot download {row.obtain}"):
            prepare.prepare("cifar100", None, tmp_path / "b", quiet=True)
    assert_is_cifar(tmp_path / "a", pixels)
    assert (tmp_path / "a" / "downloads" / cifar100.ARCHIVE_NAME).is_file()
    assert list((tmp_path / "b" / "downloads").iterdir()) == []
