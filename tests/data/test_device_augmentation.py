"""The transform on the device against Pillow, pixel for pixel."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from PIL import Image

from fdc_jax.data import device_augmentation, images, stream, tfds_source
from fdc_jax.data.source import ByteCache
from fdc_jax.errors import InputError


def both(source, size, number=None, augment=None, **options):
    """Returns the batches of the host, and those of the device fetched."""
    number = number or len(source)
    options = dict(image_size=size, **options)
    arguments = (source, np.arange(number), None, 16, 3, 1)
    host = stream.TrainBatches(*arguments, **options)
    small = device_augmentation.SmallTrainBatches(*arguments, **options)
    augment = augment or device_augmentation.augmentation(small.image_size, size)
    return list(host), [augment(batch) for batch in small]


def assert_same(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        for left, right in zip(one, other, strict=True):
            np.testing.assert_array_equal(np.asarray(left), right)
            assert left.dtype == right.dtype


@pytest.fixture
def noise_source(plain_source, encode):
    def make(side, number=40, seed=0):
        rng = np.random.default_rng(seed)
        pixels = rng.integers(0, 256, (number, side, side, 3), dtype=np.uint8)
        # Extreme contrast, where a rounding error would show.
        pixels[1::3] = np.where(pixels[1::3] < 128, 0, 255)
        return plain_source(number, read=[encode(each) for each in pixels].__getitem__)

    return make


@pytest.mark.parametrize(("side", "size"), [(32, 224), (32, 32), (8, 30), (33, 50), (64, 70)])
@pytest.mark.parametrize("flip", [True, False])
def test_noise_is_equal_in_every_pixel(noise_source, side, size, flip):
    host, device = both(noise_source(side), size, epochs=2, flip=flip)
    assert_same(device, host)


def test_photos_of_cifar_100_are_equal_in_every_pixel(shared_asset):
    folder = shared_asset("tensorflow_datasets")
    source = tfds_source.open_source("cifar100", "train", folder)
    for size in (128, 224):
        host, device = both(source, size, number=200)
        assert_same(device, host)


def test_digits_are_equal_in_every_pixel():
    source = tfds_source.open_source("digits", "train", "")
    host, device = both(source, 32, number=100, crop_scale=(0.6, 1.0), flip=False)
    assert_same(device, host)


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
@hypothesis.given(st.integers(1, 64), st.integers(1, 80), st.integers(0, 1000))
def test_one_pass_is_pillows(length, size, seed):
    row = np.random.default_rng(seed).integers(0, 256, (1, length, 3), dtype=np.uint8)
    expected = Image.fromarray(row).resize((size, 1), Image.Resampling.BILINEAR)
    weights = device_augmentation.bilinear_weights(length, size)
    found = (weights @ row[0].astype(np.int64) + (1 << 21)) >> 22
    np.testing.assert_array_equal(found, np.asarray(expected)[0])


def test_split_weights_are_whole_and_small():
    table = device_augmentation.weight_table(32, 224)
    weights = 2048 * table[:, :224].astype(np.int64) + table[:, 224:].astype(np.int64)
    np.testing.assert_array_equal(
        weights[20, :, :20], device_augmentation.bilinear_weights(20, 224)
    )
    assert not weights[20, :, 20:].any()
    # Sums of products with levels are exact in float32.
    assert 255 * table.sum(axis=-1).max() < 1 << 24


def test_batches_resume_and_cache_like_those_of_the_host(noise_source):
    source, decoded = noise_source(16), ByteCache(1 << 20)
    options = dict(epochs=3, start_step=4, workers=2, decoded=decoded)
    augment = device_augmentation.augmentation(16, 20)
    host, device = both(source, 20, augment=augment, **options)
    assert_same(device, host)
    assert len(decoded) == 40


def test_padding_is_black(noise_source):
    device = both(noise_source(16), 20, number=3)[1]
    assert not np.asarray(device[0].images)[3:].any()
    assert np.asarray(device[0].images)[:3].any(axis=(1, 2, 3)).all()


@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        ([(65, 65)], "at most 64 pixels a side: expected 64 x 64, found 65 x 65"),
        ([(20, 16)], "expected 20 x 20, found 20 x 16"),
        ([(16, 16), (20, 20)], "expected 16 x 16, found 20 x 20"),
    ],
)
def test_other_images_are_refused(plain_source, photo, encode, sizes, found):
    encoded = [encode(photo(*size)) for size in sizes]
    source = plain_source(len(sizes), read=encoded.__getitem__)
    with pytest.raises(InputError, match=f"image_.*: images augmented on the device.*{found}"):
        list(
            device_augmentation.SmallTrainBatches(
                source, np.arange(len(sizes)), None, 4, 0, 0, image_size=96
            )
        )


def test_images_are_not_shrunk(noise_source):
    with pytest.raises(InputError, match="at most 8 pixels a side: expected 8 x 8, found 16 x 16"):
        both(noise_source(16), 8)


def test_the_transform_is_the_definition(noise_source):
    source = noise_source(16, number=4)
    device = both(source, 24)[1][0]
    order = stream.epoch_permutation(4, 3, 1, 0)
    uniforms = stream.epoch_uniforms(4, 3, 1, 0)
    for slot, row in enumerate(order):
        image = images.decode(source.read(row), "")
        expected = images.train_transform(image, 24, uniforms[row])
        np.testing.assert_array_equal(np.asarray(device.images)[slot], expected)
