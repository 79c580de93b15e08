"""Features of many images: right rows, right encoder, one compilation, computed once."""

from types import SimpleNamespace

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
    return vit.VisionTransformer(vit.Variant(24, 2, heads=3, patch=8, image_size=32))


@pytest.fixture(scope="module")
def backbone(model):
    return reference.random_params(0, model.variant, side=32)


@pytest.fixture(scope="module")
def apply(model, backbone):
    return jax.jit(lambda *arguments: model.apply({"params": backbone}, *arguments))


def batches(count, size=8):
    return EvaluationBatches(digits.open_digits()[1], np.arange(count), None, size, image_size=32)


def extractor(model):
    return Extractor(model, devices.data_mesh())


@pytest.mark.parametrize("count", [0, 1, 8, 37])
def test_features_have_one_row_per_image_in_order(model, backbone, apply, count):
    kernels = vit.pretrained_kernels(backbone)
    actual = extractor(model)(backbone, [kernels], batches(count))[0].features
    assert actual.shape == (count, model.variant.width)
    assert actual.dtype == np.float32
    for i, batch in enumerate(batches(count, size=1)):
        assert_allclose(actual[i : i + 1], apply(batch.images), atol=2e-5)


def test_kernels_choose_the_encoder_without_compilation(model, backbone, apply):
    extract = extractor(model)
    kernels = vit.pretrained_kernels(backbone)
    other = jax.tree.map(lambda kernel: kernel * 1.5, kernels)
    first = extract(backbone, [kernels], batches(9))[0].features
    second = extract(backbone, [other], batches(12))[0].features
    assert np.abs(first - second[:9]).max() > 1e-3
    assert extract.encode._cache_size() == 1
    again = apply(next(iter(batches(8))).images, other)
    assert_allclose(second[:8], again, atol=2e-5)


@pytest.mark.parametrize("count", [0, 11])
def test_both_views_in_one_pass_and_in_portions(model, backbone, monkeypatch, count):
    kernels = jax.tree.map(lambda kernel: kernel * 1.5, vit.pretrained_kernels(backbone))
    views = (kernels, vit.pretrained_kernels(backbone))
    complete, cut = extractor(model), extractor(model)
    expected = [complete(backbone, [view], batches(count))[0].features for view in views]
    monkeypatch.setitem(operations.PORTION_TOKENS, "cpu", 2 * 17)
    calls, function = [], jax.lax.map
    monkeypatch.setattr(jax.lax, "map", lambda *a: calls.append(a[1].shape) or function(*a))
    together = cut(backbone, views, batches(count))
    assert calls == [(4, 2, 32, 32, 3)] * (1 if count else 0)
    for actual, features, view in zip(together, expected, views, strict=True):
        assert_allclose(actual.features, features, atol=2e-5)
        (alone,) = cut(backbone, [view], batches(count))
        assert_array_equal(actual.features, alone.features)
    assert cut.encode._cache_size() <= 1


def test_encoders_share_the_seconds_of_a_pass(model, backbone, monkeypatch):
    clock = SimpleNamespace(perf_counter=iter([100.0, 106.0]).__next__)
    extract = extractor(model)
    extract(backbone, [vit.pretrained_kernels(backbone)], batches(1))  # compiles
    monkeypatch.setattr(devices, "time", clock)
    kernels = vit.pretrained_kernels(backbone)
    extractions = extract(backbone, [kernels, kernels, kernels], batches(1))
    assert [extraction.seconds for extraction in extractions] == [2.0, 2.0, 2.0]


# Encodes tasks of several sizes on four devices and logs the programs that are compiled.
SIZES = """
import logging, jax, numpy as np
from fdc_jax.machine import devices
from fdc_jax.model import vit
from tests.features.test_extraction import batches, extractor
from tests.model import reference
variant = vit.Variant(16, 2, heads=2, patch=8, image_size=32)
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
    """What a cache holds, or else the value, which is kept."""
    cache = FeatureCache(folder, {"weights": key})
    extraction = cache.find(name, indices)
    if extraction is None:
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


@pytest.mark.parametrize("damage", ["truncated", "flipped"])
def test_a_damaged_cache_file_is_computed_again(tmp_path, damage):
    get(tmp_path, 1.0)
    (path,) = tmp_path.rglob("train_*.npz")
    content = bytearray(path.read_bytes())
    position = content.index(np.full(3, 1.0, np.float32).tobytes())
    if damage == "flipped":
        content[position] ^= 1
    path.write_bytes(content if damage == "flipped" else content[: position + 4])
    for value in (2.0, 3.0):
        assert_array_equal(get(tmp_path, value).features, 2.0)


def test_a_cache_folder_that_cannot_be_made_costs_time_only(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    for value in (1.0, 2.0):
        actual = get(tmp_path / "file" / "below", value)
        assert not actual.from_cache
        assert_array_equal(actual.features, value)
