import io
import math

import hypothesis
import hypothesis.strategies as st
import numpy as np
import PIL
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from PIL import ExifTags, Image, ImageOps

from fdc_jax.data import images
from tests.errors import input_error

SIZES = [(500, 400), (32, 32), (17, 90), (600, 257)]


def evaluation_reference(image, image_size):
    """PILOT's test transform from the description: scale, convert to an array, slice."""
    target = [int(image_size * 256 / 224 + 0.5)] * 2
    longest = int(np.argmax(image.size))
    target[longest] = int(target[0] * max(image.size) / min(image.size))
    pixels = np.array(image.resize(tuple(target), resample=3))
    down = round((pixels.shape[0] - image_size) / 2.0)
    right = round((pixels.shape[1] - image_size) / 2.0)
    return pixels[down : down + image_size, right : right + image_size]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("image_size", [224, 97])
def test_evaluation_transform_is_pilots(photo, size, image_size):
    image = photo(*size)
    actual = images.evaluation_transform(image, image_size)
    assert actual.shape == (image_size, image_size, 3)
    assert actual.dtype == np.uint8
    assert_array_equal(actual, evaluation_reference(image, image_size))


def test_only_the_middle_of_a_very_long_image_is_enlarged():
    """As a whole it would need gigabytes."""
    pixels = np.random.default_rng(0).integers(0, 256, (1_200_000, 1, 3), np.uint8)
    middle = images.evaluation_transform(Image.fromarray(pixels[599_950:600_050]), 32)
    assert_array_equal(images.evaluation_transform(Image.fromarray(pixels), 32), middle)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("last", [0.0, 0.4999, 0.5, 0.9])
def test_train_transform_crops_then_resizes_then_mirrors(photo, size, last):
    image = photo(*size)
    uniforms = np.append(np.random.default_rng(5).random(images.NUM_UNIFORMS - 1), last)
    left, top, right, bottom = images.random_crop_box(*size, uniforms)
    part = Image.fromarray(np.asarray(image)[top:bottom, left:right])
    straight = np.asarray(part.resize((64, 64), resample=2))
    expected = straight[:, ::-1] if last < 0.5 else straight
    assert_array_equal(images.train_transform(image, 64, uniforms), expected)


def crop_reference(width, height, uniforms, scale):
    """RandomResizedCrop with these uniform numbers, as torchvision documents it."""
    x, y = uniforms[20:22]
    for share, tilt in uniforms[:20].reshape(10, 2):
        area = width * height * (scale[0] * (1 - share) + scale[1] * share)
        ratio = 0.75 * (16 / 9) ** tilt
        w = round((area * ratio) ** 0.5)
        h = round((area / ratio) ** 0.5)
        if 1 <= w <= width and 1 <= h <= height:
            left = int(x * (width - w + 1))
            top = int(y * (height - h + 1))
            return left, top, left + w, top + h
    w = min(width, round(height * 4 / 3))
    h = min(height, round(width * 4 / 3))
    left = (width - w) // 2
    top = (height - h) // 2
    return left, top, left + w, top + h


@hypothesis.settings(deadline=None, max_examples=300, derandomize=True)
@hypothesis.given(
    st.integers(1, 400),
    st.integers(1, 400),
    st.integers(0, 2**32 - 1),
    st.sampled_from([(0.05, 1.0), (0.6, 1.0)]),
    st.booleans(),
)
def test_crop_boxes_are_torchvisions_and_lie_inside(width, height, seed, scale, extreme):
    uniforms = np.random.default_rng(seed).random(images.NUM_UNIFORMS)
    if extreme:
        uniforms = np.where(uniforms < 0.5, 0.0, math.nextafter(1.0, 0.0))
    box = images.random_crop_box(width, height, uniforms, scale)
    left, top, right, bottom = box
    assert 0 <= left < right <= width and 0 <= top < bottom <= height
    assert extreme or box == crop_reference(width, height, uniforms, scale)


def grey_to_rgb(pixels):
    return np.repeat(np.asarray(pixels)[..., None], 3, axis=-1)


def test_decode_gives_rgb_without_transparency(photo, encode):
    image = photo(20, 10)
    grey = image.convert("L")
    clear = image.copy()
    clear.putalpha(0)
    with_alpha = Image.merge("LA", [grey, Image.new("L", grey.size, 9)])
    for stored, expected in [
        (clear, np.asarray(image)),
        (grey, grey_to_rgb(grey)),
        (with_alpha, grey_to_rgb(grey)),
    ]:
        decoded = images.decode(encode(stored), "x")
        assert decoded.mode == "RGB"
        assert_array_equal(np.asarray(decoded), expected)


def test_transparent_pixels_of_photographs_lie_on_white(photo, encode):
    image = photo(20, 10)
    translucent = image.copy()
    translucent.putalpha(128)
    actual = images.decode(encode(translucent), "x", upright=True)
    assert_allclose(actual, np.asarray(image, float) * 128 / 255 + 127, atol=1)


def grey_files(encode, pixels):
    """Returns a PNG, a TIFF and a PGM of grey of 16 bits."""
    header = f"P5 {pixels.shape[1]} {pixels.shape[0]} 65535\n".encode()
    pgm = header + pixels.astype(">u2").tobytes()
    return [encode(pixels, "PNG"), encode(pixels, "TIFF"), pgm]


@hypothesis.settings(
    deadline=None,
    max_examples=40,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(
    st.lists(st.integers(0, 65535), min_size=2, max_size=8),
    st.integers(0, 16),
    st.sampled_from([0, 8, 10, 13, 16]),
)
def test_grey_of_16_bits_keeps_its_upper_bits(encode, values, shift, wanted):
    pixels = np.array([values], np.uint16) >> shift
    bits = max(8, int(pixels.max()).bit_length())
    expected = grey_to_rgb(np.minimum(pixels >> ((wanted or bits) - 8), 255))
    files = grey_files(encode, pixels)
    for content in files:
        assert_array_equal(images.decode(content, "x", grey_bits=wanted), expected)
    facts = {images.examine(content, "x") for content in files}
    assert [fact.grey_bits for fact in facts] == [bits]
    pixels[0, -1] ^= 1
    assert images.examine(encode(pixels), "x").sha256 not in {fact.sha256 for fact in facts}


@pytest.mark.parametrize("file_format", ["TIFF", "PNG", "WEBP", "GIF", "MPO"])
def test_frames_are_counted_and_the_first_is_read(encode, file_format):
    if file_format == "MPO" and PIL.__version__.startswith("11."):
        pytest.skip("Pillow 11 writes MPO files that nothing reads")
    first, *others = (Image.new("RGB", (8, 6), (60 * number, 9, 9)) for number in range(4))
    content = encode(first, file_format, save_all=True, append_images=others)
    # The other pictures of an MPO file are views of the first.
    assert images.examine(content, "x").frames == (1 if file_format == "MPO" else 4)
    assert_allclose(np.asarray(images.decode(content, "x"), int)[0, 0], [0, 9, 9], atol=9)


def test_an_image_of_too_many_pixels_is_named(photo, encode, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    content = encode(photo(50, 50))
    with input_error("^a/b.png: cannot decode this image: .* at most 2,000 pixels, found 2,500"):
        images.examine(content, "a/b.png")


@pytest.mark.parametrize(
    "pixels, kind",
    [(np.float32, "floating-point numbers"), (np.int32, "32-bit integers")],
)
def test_float_and_32_bit_pixels_are_refused(encode, pixels, kind):
    encoded = encode(np.ones((2, 3), pixels), "TIFF")
    with input_error(rf"^a/b.tif: .*8 or 16 bits, .* {kind}$"):
        images.decode(encoded, "a/b.tif")


@pytest.mark.parametrize("file_format", ["PNG", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_applied_on_request(encode, file_format, orientation):
    pixels = np.random.default_rng(0).integers(0, 256, (4, 8, 3), np.uint8)
    image = Image.fromarray(pixels)
    image.getexif()[ExifTags.Base.Orientation] = orientation
    content = encode(image, file_format, exif=image.getexif())
    upright = ImageOps.exif_transpose(image)
    assert_array_equal(images.decode(content, "x", upright=True), upright)
    if file_format == "PNG":  # TIFF is turned by Pillow.
        assert_array_equal(images.decode(content, "x"), pixels)


def test_programs_in_postscript_are_not_run():
    file = io.BytesIO()
    Image.new("RGB", (4, 4)).save(file, "EPS")
    with input_error(r"photo\.jpg: .*not a known image format"):
        images.decode(file.getvalue(), "photo.jpg")
