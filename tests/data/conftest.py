"""Small images and data sets made on the spot."""

import dataclasses
import io

import numpy as np
import pytest
from PIL import Image

from fdc_jax.data import benchmarks
from fdc_jax.data.dataset import Dataset


@pytest.fixture
def encode():
    """Returns a function from pixels (or a PIL image) to an image file's bytes."""

    def make(pixels, file_format="PNG", **options):
        file = io.BytesIO()
        image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
        image.save(file, file_format, **options)
        return file.getvalue()

    return make


@pytest.fixture
def photo():
    """Returns a function from (width, height, seed) to an RGB image of noise."""

    def make(width, height, seed=0):
        pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
        return Image.fromarray(pixels)

    return make


@pytest.fixture
def plain_source(encode):
    """Returns a function from n to a source whose image i has the one colour (i, 255 - i, 7)."""

    def make(n, read=None, num_classes=5):
        encoded = [encode(Image.new("RGB", (9, 6), (i, 255 - i, 7))) for i in range(n)]
        hashes = [bytes(32) for _ in range(n)]
        labels = np.arange(n, dtype=np.int32) % num_classes
        ids = tuple(f"image_{i}" for i in range(n))
        names = tuple(map(str, range(num_classes)))
        read = read or encoded.__getitem__
        source = Dataset("plain", "train", "embedded", labels, ids, names, read)
        return dataclasses.replace(source, pixel_hashes=lambda: hashes)

    return make


@pytest.fixture
def tiny_benchmark(monkeypatch):
    """Returns a function that replaces a row of the benchmark table for one test."""

    def replace(name, **changes):
        row = dataclasses.replace(benchmarks.BENCHMARKS[name], **changes)
        monkeypatch.setitem(benchmarks.BENCHMARKS, name, row)
        return row

    return replace
