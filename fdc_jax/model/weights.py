"""Pretrained weights: strict reading of `.npz` and `.safetensors` files into parameter trees."""

import base64
import contextlib
import logging
import math
import os
import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from fdc_jax.errors import InputError
from fdc_jax.machine import files
from fdc_jax.machine.files import named_path, read_npz, read_safetensors, sha256
from fdc_jax.model import layouts, vit

_log = logging.getLogger(__name__)

AUGREG_BUCKET = "https://storage.googleapis.com/vit_models/augreg/"
# The ImageNet-21k checkpoints that timm calls `*_patch16_224.augreg_in21k`.
AUGREG_FILES = {
    "Ti/16": "Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0.npz",
    "S/32": "S_32-i21k-300ep-lr_0.001-aug_light1-wd_0.03-do_0.0-sd_0.0.npz",
    "S/16": "S_16-i21k-300ep-lr_0.001-aug_light1-wd_0.03-do_0.0-sd_0.0.npz",
    "B/32": "B_32-i21k-300ep-lr_0.001-aug_medium1-wd_0.03-do_0.0-sd_0.0.npz",
    "B/16": "B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0.npz",
    "B/8": "B_8-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0.npz",
    "L/16": "L_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.1-sd_0.1.npz",
}
NAMED = ("augreg", "digits")
DIGITS_WEIGHTS = Path(__file__).resolve().parents[1] / "assets" / "digits_vit.npz"


class Weights(NamedTuple):
    """A parameter tree and its file."""

    params: Any
    path: Path
    sha256: str
    skipped: tuple[str, ...]  # names of the arrays that are not parameters
    resized_positions: bool


def locate(
    weights: str, variant: str, folder: str | os.PathLike[str], show_progress: bool = True
) -> Path:
    """Returns the path of pretrained weights: a file itself, or the file of a name in `NAMED`.

    `augreg` is the public ImageNet-21k checkpoint of the variant, downloaded to the folder unless
    it is there; `digits` is the package's small encoder.

    Raises:
        InputError: the file does not exist, or the download fails.
    """
    if weights == "digits":
        return DIGITS_WEIGHTS
    if weights not in NAMED:
        return _existing(weights)
    if variant not in AUGREG_FILES:
        raise InputError(
            f"config.encoder.weights: augreg expects config.encoder.variant to be one of "
            f"{', '.join(AUGREG_FILES)}, found {variant!r}"
        )
    name = AUGREG_FILES[variant]
    path = Path(folder) / name
    if not path.is_file():
        download(AUGREG_BUCKET + name, path, show_progress)
    return path


def is_to_download(weights: str, variant: str, folder: str | os.PathLike[str]) -> bool:
    """Returns True if `locate` would download weights."""
    return weights == "augreg" and not Path(folder, AUGREG_FILES.get(variant, "")).is_file()


def by_checksum(digest: str, variant: str, folder: Path) -> str:
    """Returns the name or path, for `locate`, of the weights with a SHA-256; "" if unknown."""
    if sha256(DIGITS_WEIGHTS) == digest:
        return "digits"
    path = folder / AUGREG_FILES.get(variant, "")
    if path.is_file() and sha256(path) == digest:
        return "augreg"
    with contextlib.suppress(InputError, OSError):
        path = str(files.read_json(folder / "weights" / f"{digest}.json"))
        return path if sha256(path) == digest else ""
    return ""


def remember(weights: Weights, folder: Path) -> None:
    """Writes the path of a run's weights into a cache folder for `by_checksum`, if possible."""
    with contextlib.suppress(InputError):
        path = folder / "weights" / f"{weights.sha256}.json"
        files.write_json(path, str(weights.path.absolute()))


def recognise(weights: str, variant: str, heads: int = 0) -> tuple[str, vit.Variant]:
    """Returns the name and the architecture of an encoder; a file is read by `layouts.encoder_of`.

    Raises:
        InputError: the name or the file does not exist, or the file holds no supported encoder.
    """
    if weights not in NAMED:
        path = _existing(weights)
        return layouts.encoder_of(_read(path)[0], path, heads)
    if variant not in vit.VARIANTS:
        raise InputError(
            f"config.encoder.variant: expected one of {', '.join(vit.VARIANTS)}, found "
            f"{variant!r:.100}"
        )
    return variant, vit.VARIANTS[variant]


def _existing(weights: str) -> Path:
    path = named_path("config.encoder.weights", weights)
    if not path.is_file():
        raise InputError(
            f"config.encoder.weights: expected 'augreg', 'digits' or a file, found no file {path}"
        )
    return path


def download(url: str, path: Path, show_progress: bool = True) -> None:
    """Downloads a file of a storage bucket and checks it against the bucket's MD5.

    Raises:
        InputError: the connection fails or the checksum differs; tells where to put the file.
    """
    import pooch

    by_hand = f"put the file from {url} at {path}, or set config.encoder.weights to its path"
    try:
        request = urllib.request.Request(url, method="HEAD")
        with urllib.request.urlopen(request, timeout=30) as response:
            hashes = ",".join(response.headers.get_all("x-goog-hash") or [])
        md5 = re.search(r"md5=([A-Za-z0-9+/=]+)", hashes)
        if md5 is None:
            raise ValueError(f"{url} sends no MD5")
        path.parent.mkdir(parents=True, exist_ok=True)
        checksum = "md5:" + base64.b64decode(md5[1]).hex()
        # pooch writes to a temporary file and moves it if the checksum agrees.
        pooch.retrieve(url, checksum, path.name, path.parent, progressbar=show_progress)
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise InputError(f"cannot download weights ({reason}): {by_hand}") from error


def load(path: str | os.PathLike[str], variant: str | vit.Variant, image_size: int) -> Weights:
    """Returns the parameter tree of a checkpoint, for images of `image_size` pixels a side.

    Every array is used or named in `skipped`. Position embeddings are resized to the patch grid.

    Raises:
        InputError: the file is unreadable, or an array is missing, unknown or of another shape.
    """
    path = Path(path)
    model: Any = vit.build(variant, image_size)
    shapes = vit.parameter_shapes(model, image_size)
    expected: dict[str, Any] = dict(traverse_util.flatten_dict(shapes, sep="/"))
    stored, prefix = _read(path)
    if prefix:
        _log.warning("%s: ignored %r, with which the names of all arrays begin", path, prefix)
    arrays = layouts.rename(stored, path)
    positions, resized = arrays.get(layouts.POSITIONS), False
    if positions is not None and positions.ndim == 3 and not model.variant.rotary:
        length, tokens = expected[layouts.POSITIONS].shape[1], model.variant.tokens
        resized = positions.shape[1] != length
        arrays[layouts.POSITIONS] = resize_positions(positions, length, path, tokens)
    missing, unknown = sorted({*expected} - {*arrays}), sorted({*arrays} - {*expected})
    encoder = variant if isinstance(variant, str) else f"{model.variant.width} wide"
    mismatch = f"{path}: expected the weights of encoder.variant {encoder}, found"
    if missing or unknown:
        raise InputError(
            f"{mismatch} {len(missing)} arrays missing{_first(missing)}, "
            f"{len(unknown)} unknown{_first(unknown)}"
        )
    for name, spec in expected.items():
        array, shape = arrays[name], spec.shape
        if array.ndim == len(shape) - 1 and array.size == math.prod(shape):
            array = arrays[name] = array.reshape(shape)  # Attention is divided into heads.
        if array.shape != shape:
            raise InputError(f"{mismatch} {name} of shape {array.shape}, expected {shape}")
        if not (jnp.issubdtype(array.dtype, jnp.floating) and np.isfinite(array).all()):
            raise InputError(f"{path}: {name}: expected finite numbers, found others")
    flat = {name: jnp.asarray(array, jnp.float32) for name, array in arrays.items()}
    params = traverse_util.unflatten_dict(flat, sep="/")
    return Weights(params, path, sha256(path), layouts.skipped(stored), resized)


def used(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Returns the arrays of a checkpoint that become parameters, under their names in the file."""
    return layouts.used(_read(Path(path))[0])


def _first(names: list[str]) -> str:
    return f" (first: {names[0]})" if names else ""


def _read(path: Path) -> tuple[dict[str, np.ndarray], str]:
    """Returns the arrays of a file, and the prefix that `layouts.without_wrapper` removed."""
    suffix = path.suffix.lower()
    if suffix in (".pth", ".pt", ".bin", ".ckpt"):
        raise InputError(
            f'{path}: expected a .npz or .safetensors file; PyTorch converts it: python -c "import '
            f"torch, safetensors.torch as s; s.save_file(torch.load('{path.name}', weights_only="
            f"True), '{path.stem}.safetensors')\""
        )
    if suffix == ".safetensors":
        arrays = read_safetensors(path)
    elif suffix == ".npz":
        arrays = {name.removeprefix("opt/target/"): a for name, a in read_npz(path).items()}
        # NumPy writes bfloat16 as two bytes without a type.
        arrays = {n: a.view(jnp.bfloat16) if a.dtype == "V2" else a for n, a in arrays.items()}
    else:
        raise InputError(f"{path}: expected a .npz or .safetensors file, found {path.suffix!r}")
    return layouts.without_wrapper(arrays)


def resize_positions(embedding: np.ndarray, length: int, path: Path, tokens: int = 1) -> np.ndarray:
    """Returns position embeddings [1, tokens + g*g, d] resized to `length` positions, as in timm.

    Embeddings of tokens that are no patches stay; the patch grid is resized by antialiased bicubic
    interpolation. If the length fits, the result is the array itself.

    Raises:
        InputError: the number of patch positions is not a square.
    """
    if embedding.shape[1] == length:
        return embedding
    patches = embedding.shape[1] - tokens
    old, new = math.isqrt(max(patches, 0)), math.isqrt(length - tokens)
    if old < 1 or old**2 != patches:
        raise InputError(
            f"{path}: {layouts.POSITIONS} has {embedding.shape[1]} positions, "
            f"expected {'one' if tokens == 1 else tokens} plus a square number"
        )
    grid = embedding[:, tokens:].reshape(1, old, old, -1).astype(np.float32)
    grid = jax.image.resize(grid, (1, new, new, grid.shape[-1]), "cubic", antialias=True)
    kept = embedding[:, :tokens]
    return np.concatenate([kept, np.asarray(grid).reshape(1, new * new, -1)], axis=1)
