"""Decoding, and PILOT's two transforms, with Pillow on the host: uint8 RGB arrays out.

The device converts to floating point and applies the input range. The user's own photographs are
turned upright by their EXIF orientation, with transparent pixels on white; benchmarks keep pixels
as they are stored, as PILOT does. Grey of 9 to 16 bits is scaled to 8 bits, by one scale for a data
set.
"""

import contextlib
import hashlib
import io
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Integer, UInt8
from PIL import ExifTags, Image, ImageOps

from fdc_jax.errors import InputError, line
from fdc_jax.machine.files import failed_download

with contextlib.suppress(ImportError):
    import pillow_heif  # pyright: ignore[reportMissingImports]

    pillow_heif.register_heif_opener()  # reads .heic, already upright

# Pillow loads its rarer formats at the first file that needs them, which is not safe in threads.
Image.init()
# Its warning names no file; its error, at twice as many pixels, becomes a line that does.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
# Programs in PostScript would be run by Ghostscript.
_FORMATS = sorted(set(Image.OPEN) - {"EPS"})
HEIC = "HEIF" in Image.OPEN

_LONGEST = 100  # times the short side
CROP_SCALE = (0.05, 1.0)  # of the image's area
_CROP_RATIO = (3 / 4, 4 / 3)  # of width to height
_TRIES = 10
# Uniform numbers that one training image consumes: area and ratio per try, position, flip.
NUM_UNIFORMS = 2 * _TRIES + 3

# Modes and formats of grey of 16 bits that Pillow holds in 32, and modes without a known white.
_SIXTEEN_BITS = (("I", "PNG"), ("I", "PPM"))
_REFUSED = {"F": "floating-point numbers", "I": "32-bit integers"}


class Facts(NamedTuple):
    """Facts of an image file."""

    sha256: bytes  # of size and pixels, 32 bytes
    grey_bits: int  # bits of the largest value of grey of 16 bits, at least 8; 0 for other images
    frames: int  # frames or pages; only the first is read


def decode(
    encoded: bytes | Image.Image, description: str, upright: bool = False, grey_bits: int = 0
) -> Image.Image:
    """Returns the image in mode RGB, all pixels read; of a file, `info["frames"]` is their number.

    Args:
        encoded: content of a file, or an image of Pillow, which is not changed.
        description: name of the image in the error message.
        upright: whether to apply the EXIF orientation, and to put transparent pixels on white.
        grey_bits: bits of the values of grey of 16 bits; larger values become white. 0: those of
            the image's largest value.

    Raises:
        InputError: Pillow cannot read the whole image, or its pixels have neither 8 nor 16 bits.
    """

    def upper_bits(values: Integer[np.ndarray, "h w"]) -> UInt8[np.ndarray, "h w"]:
        bits = grey_bits or _bits(values)
        return np.minimum(values >> (bits - 8), 255).astype(np.uint8)

    with _opened(encoded, description) as image:
        pixels = _rgb(image, upright, upper_bits)
        if isinstance(encoded, bytes):
            pixels.info["frames"] = _frames(image)
        return pixels


def examine(encoded: bytes, description: str, upright: bool = False) -> Facts:
    """Returns facts of an image file; arguments and errors are those of `decode`."""

    def both_bytes(values: Integer[np.ndarray, "h w"]) -> UInt8[np.ndarray, "h w 3"]:
        return np.stack([values >> 8, values & 255, 0 * values], axis=-1).astype(np.uint8)

    with _opened(encoded, description) as image:
        pixels = np.asarray(_rgb(image, upright, both_bytes))
        bits = _bits(np.asarray(image)) if _is_sixteen_bits(image) else 0
        return Facts(pixels_sha256(pixels), bits, _frames(image))


def _frames(image: Image.Image) -> int:
    """Returns the number of frames or pages; damage after the first is of no importance."""
    with contextlib.suppress(Exception):
        # The second image of an MPO file, which cameras write, is another view of the first.
        if image.format != "MPO":
            return getattr(image, "n_frames", 1)
    return 1


def grey_scale(wanted: int, facts: Iterable[Facts]) -> int:
    """Returns the wanted `grey_bits` of a data set, by default (0) those of its largest value.

    Without grey of 16 bits they are 0.
    """
    largest = max((fact.grey_bits for fact in facts), default=0)
    return wanted if wanted and largest else largest


@contextlib.contextmanager
def _opened(encoded: bytes | Image.Image, description: str) -> Iterator[Image.Image]:
    """Yields an image of Pillow; raises InputError for any error of the block."""
    try:
        image = encoded
        if isinstance(image, bytes):
            image = Image.open(io.BytesIO(image), formats=_FORMATS)
        if image.mode in _REFUSED and (image.mode, image.format) not in _SIXTEEN_BITS:
            raise ValueError(f"expected pixels of 8 or 16 bits, found {_REFUSED[image.mode]}")
        if 0 in image.size:
            raise ValueError("expected pixels, found none")
        yield image
    except Exception as error:  # Pillow's parsers raise a dozen types on damaged files.
        reason = line(error)
        if isinstance(error, Image.UnidentifiedImageError) and isinstance(encoded, bytes):
            reason = failed_download(encoded[:1024]) or "not a known image format"
            if encoded[4:11] == b"ftyphei" and not HEIC:
                reason = "HEIC needs a package: pip install pillow-heif"
        if isinstance(error, Image.DecompressionBombError):
            pixels, limit = (int(number) for number in re.findall(r"\d+", reason)[:2])
            reason = f"expected at most {limit:,} pixels, found {pixels:,}"
        raise InputError(f"{description}: cannot decode this image: {reason}") from error


def _is_sixteen_bits(image: Image.Image) -> bool:
    return image.mode.startswith("I;16") or image.mode == "I"


def _bits(values: Integer[np.ndarray, "h w"]) -> int:
    """Returns the number of bits of the largest value, at least 8."""
    return max(8, int(values.max()).bit_length())


def _rgb(
    image: Image.Image, upright: bool, grey: Callable[[np.ndarray], np.ndarray]
) -> Image.Image:
    """Returns an image in mode RGB, see `decode`; `grey` maps values of 16 bits to pixels."""
    exif, orientation = image.getexif, ExifTags.Base.Orientation
    if _is_sixteen_bits(image):
        image = Image.fromarray(grey(np.asarray(image)))
    if upright and image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    if image.mode == "P":
        # Only silences Pillow's advice to convert to RGBA; the RGB pixels are the same.
        image = image.copy()
        image.info.pop("transparency", None)
    pixels = image.convert("RGB")
    if upright:
        with contextlib.suppress(Exception):  # No orientation, or damaged EXIF data.
            pixels.getexif()[orientation] = exif()[orientation]
            ImageOps.exif_transpose(pixels, in_place=True)
    return pixels


def pixels_sha256(pixels: UInt8[np.ndarray, "h w 3"]) -> bytes:
    """Returns the SHA-256 of an image's size and pixels, 32 bytes."""
    height, width, _ = pixels.shape
    return hashlib.sha256(f"({width}, {height})".encode() + pixels.tobytes()).digest()


def evaluation_transform(image: Image.Image, image_size: int) -> UInt8[np.ndarray, "s s 3"]:
    """Returns PILOT's test transform of an RGB image: bicubic resize, then the centre square.

    The short side becomes 256 pixels for an `image_size` of 224, in proportion for other sizes. If
    the long side is over `_LONGEST` times the short side, only the middle of the image is used.
    """
    short = round(image_size * 256 / 224)
    longest = _LONGEST * min(image.size)
    if max(image.size) > longest:
        left, top = ((side - min(side, longest)) // 2 for side in image.size)
        image = image.crop((left, top, image.width - left, image.height - top))
    width, height = image.size
    size = (short, int(short * height / width))
    if width > height:
        size = (int(short * width / height), short)
    image = image.resize(size, Image.Resampling.BICUBIC)
    # Python rounds halves to even here, as torchvision's centre crop does.
    left = round((size[0] - image_size) / 2)
    top = round((size[1] - image_size) / 2)
    return np.asarray(image.crop((left, top, left + image_size, top + image_size)))


def random_crop_box(
    width: int,
    height: int,
    uniforms: Float[np.ndarray, " k"],
    scale: tuple[float, float] = CROP_SCALE,
) -> tuple[int, int, int, int]:
    """Returns the box of torchvision's RandomResizedCrop (left, top, right, bottom), in pixels.

    A share of the image's area, uniform in `scale`, and a log-uniform aspect ratio are tried ten
    times; if no box fits, the largest centred box with a permitted ratio is returned. `uniforms`
    are `NUM_UNIFORMS` numbers in [0, 1); the last one is left to the flip.
    """
    log_low, log_high = map(math.log, _CROP_RATIO)
    for attempt in range(_TRIES):
        area = width * height * (scale[0] + (scale[1] - scale[0]) * uniforms[2 * attempt])
        aspect = math.exp(log_low + (log_high - log_low) * uniforms[2 * attempt + 1])
        crop_width = round(math.sqrt(area * aspect))
        crop_height = round(math.sqrt(area / aspect))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            left = int(uniforms[2 * _TRIES] * (width - crop_width + 1))
            top = int(uniforms[2 * _TRIES + 1] * (height - crop_height + 1))
            return left, top, left + crop_width, top + crop_height
    crop_width, crop_height = width, height
    if width / height < _CROP_RATIO[0]:
        crop_height = round(width / _CROP_RATIO[0])
    elif width / height > _CROP_RATIO[1]:
        crop_width = round(height * _CROP_RATIO[1])
    left = (width - crop_width) // 2
    top = (height - crop_height) // 2
    return left, top, left + crop_width, top + crop_height


def train_transform(
    image: Image.Image,
    image_size: int,
    uniforms: Float[np.ndarray, " k"],
    scale: tuple[float, float] = CROP_SCALE,
    flip: bool = True,
) -> UInt8[np.ndarray, "s s 3"]:
    """Returns PILOT's training transform: random resized crop, bilinear, mirrored half the time.

    `uniforms` are the `NUM_UNIFORMS` random numbers in [0, 1).
    """
    box = random_crop_box(*image.size, uniforms, scale)
    # Cropping first keeps pixels outside the box out of the filter, which resize(box=) would not.
    image = image.crop(box).resize((image_size, image_size), Image.Resampling.BILINEAR)
    if flip and uniforms[-1] < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return np.asarray(image)
