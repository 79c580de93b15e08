"""Features of many images: right rows, right encoder, one compilation, computed once."""

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from fdc_jax.data import digits
from fdc_jax.data.batches import EvaluationBatches
from fdc_jax.features.extraction import Extraction, Extractor, FeatureCache
from fdc_jax.machine import devices
from fdc_jax.model import operations, vit
from tests import small_runs
from tests.model import reference


@pytest.fixture(scope="module")
def model():
    return vit.VisionTransformer(vit.Variant(24, 1, heads=3, patch=8, image_size=32))


@pytest.fixture(scope="module")
def backbone(model):
    return reference.random_params(0, model.variant, side=32)


@pytest.fixture(scope="module")
def apply(model, backbone):
    return jax.jit(lambda *arguments: model.apply({"params": backbone}, *arguments))


def batches(count, size=8):
    _, test = digits.open_digits()
    return EvaluationBatches(test, np.arange(count), None, size, image_size=32)


def extractor(model):
    return Extractor(model, devices.data_mesh())


@pytest.mark.parametrize("count", [0, 11])
def test_every_encoder_has_a_row_per_image_in_order(model, backbone, apply, monkeypatch, count):
    pretrained = vit.pretrained_kernels(backbone)
    views = [jax.tree.map(lambda kernel: 1.5 * kernel, pretrained), pretrained]
    monkeypatch.setitem(operations.PORTION_TOKENS, "cpu", 2 * 17)
    extract = extractor(model)
    extractions = extract(backbone, views, batches(count))
    for extraction, view in zip(extractions, views, strict=True):
        assert extraction.features.shape == (count, 24)
        assert extraction.features.dtype == np.float32
        for features, batch in zip(extraction.features, batches(count, size=1), strict=True):
            assert_allclose(features[None], apply(batch.images, view), atol=2e-5)


# Encodes tasks of several sizes on four devices and logs the programs that are compiled.
SIZES = """
import logging, jax, numpy as np
from fdc_jax.machine import devices
from fdc_jax.model import vit
from tests.features.test_extraction import batches, extractor
from tests.model import reference
variant = vit.Variant(16, 1, heads=2, patch=8, image_size=32)
model = vit.VisionTransformer(variant)
backbone = reference.random_params(0, variant, side=32)
kernels = vit.pretrained_kernels(backbone)
images = np.concatenate([batch.images for batch in batches(44)])
expected = np.asarray(model.apply({"params": backbone}, images))
placed = [devices.replicate(devices.data_mesh(), tree) for tree in (backbone, kernels)]
jax.block_until_ready(placed)
names, logger = [], logging.getLogger("jax._src.interpreters.pxla")
class Names(logging.Handler):
    def emit(self, record):
        names.append(record.getMessage().split()[1])
logger.addHandler(Names())
logger.propagate = False
extract = extractor(model)
with jax.log_compiles():
    for count in (40, 37, 44, 1):
        actual = extract(placed[0], [placed[1]], batches(count))[0].features
        assert isinstance(actual, np.ndarray)
        np.testing.assert_allclose(actual, expected[:count], atol=2e-5)
assert names == ["jit(encode)"], names
"""


@pytest.mark.ci
def test_tasks_of_any_size_share_one_program():
    small_runs.python("-c", SIZES, env=small_runs.with_devices(4))


INDICES = np.array([4, 5, 6])


def get(folder, value, key="a", name="train", indices=INDICES):
    """Returns what a cache holds, or else the value, which is kept."""
    cache = FeatureCache(folder, {"weights": key})
    if extraction := cache.find(name, indices):
        return extraction
    extraction = Extraction(np.full((3, 2), value, np.float32), 1.0)
    cache.keep(name, indices, extraction)
    return extraction


def test_cache_computes_every_key_once(tmp_path):
    get(tmp_path, 1.0)
    again = get(tmp_path, 2.0)
    assert_array_equal(again.features, 1.0)
    assert again.from_cache and again.seconds == 1.0  # of their computation
    others = ({"key": "b"}, {"name": "test"}, {"indices": INDICES[::-1]})
    for value, changed in enumerate(others, start=2):
        assert_array_equal(get(tmp_path, value, **changed).features, value)


def test_a_damaged_cache_file_is_computed_again(tmp_path):
    get(tmp_path, 1.0)
    (path,) = tmp_path.rglob("train_*.npz")
    values = np.full(3, 1.0, np.float32).tobytes()
    path.write_bytes(path.read_bytes().replace(values, bytes(12)))
    for value in (2.0, 3.0):
        assert_array_equal(get(tmp_path, value).features, 2.0)


def test_a_cache_folder_that_cannot_be_made_costs_time_only(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    for value in (1.0, 2.0):
        actual = get(tmp_path / "file" / "below", value)
        assert not actual.from_cache
        assert_array_equal(actual.features, value)
