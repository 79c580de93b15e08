"""Pretrained weights: `.npz` and `.safetensors` files to parameter trees, strictly."""

import base64
import dataclasses
import math
import os
import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from fdc_jax.errors import InputError
from fdc_jax.machine.files import read_npz, read_safetensors, sha256, write_npz
from fdc_jax.model import layouts, vit

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


@dataclasses.dataclass(frozen=True)
class Weights:
    """A parameter tree and where it came from."""

    params: Any
    path: Path
    sha256: str
    skipped: tuple[str, ...]
    resized_positions: bool


def locate(
    weights: str, variant: str, folder: str | os.PathLike[str], show_progress: bool = True
) -> Path:
    """Returns the file of pretrained weights that a configuration asks for.

    Args:
        weights: a file; or `augreg` for the public ImageNet-21k checkpoint of the variant, which
            is looked up in `folder` and downloaded there when missing; or `digits` for the small
            encoder that comes with the package.
        variant: name of the encoder.
        folder: where downloads are kept.
        show_progress: draw a bar while downloading.

    Raises:
        InputError: there is no such file, or it could not be downloaded.
    """
    if weights == "digits":
        return DIGITS_WEIGHTS
    if weights not in NAMED:
        return _file(weights)
    if variant not in AUGREG_FILES:
        raise InputError(
            f"encoder.weights: 'augreg' has no file for encoder.variant {variant!r}, "
            f"only for {', '.join(AUGREG_FILES)}"
        )
    name = AUGREG_FILES[variant]
    path = Path(folder) / name
    if not path.is_file():
        download(AUGREG_BUCKET + name, path, show_progress)
    return path


def recognise(weights: str, variant: str, heads: int = 0) -> tuple[str, vit.Variant]:
    """Returns the name and the architecture of the encoder that a configuration asks for.

    Args:
        weights: as in `locate`.
        variant: name of the architecture, which a file says itself.
        heads: as in `layouts.describe`.

    Raises:
        InputError: there is no such name or file, or it holds no encoder that is known.
    """
    if weights not in NAMED:
        path = _file(weights)
        return layouts.describe(_read(path), path, heads)
    if variant not in vit.VARIANTS:
        raise InputError(
            f"encoder.variant: expected one of {', '.join(vit.VARIANTS)}, found {variant!r}"
        )
    return variant, vit.VARIANTS[variant]


def _file(weights: str) -> Path:
    path = Path(weights).expanduser()
    if not path.is_file():
        raise InputError(
            f"encoder.weights: expected 'augreg', 'digits' or a file, found no file {path}"
        )
    return path


def download(url: str, path: Path, show_progress: bool = True) -> None:
    """Downloads a file of a storage bucket and checks it against the bucket's own MD5.

    Raises:
        InputError: no connection, or a checksum that differs; says which file to put where.
    """
    import pooch

    by_hand = f"put the file from {url} at {path}, or set encoder.weights to its path"
    try:
        request = urllib.request.Request(url, method="HEAD")
        with urllib.request.urlopen(request, timeout=30) as response:
            hashes = ",".join(response.headers.get_all("x-goog-hash") or [])
        found = re.search(r"md5=([A-Za-z0-9+/=]+)", hashes)
        if found is None:
            raise ValueError(f"{url} sends no MD5")
        path.parent.mkdir(parents=True, exist_ok=True)
        # pooch writes to a temporary file and moves it once the checksum agrees.
        pooch.retrieve(
            url,
            known_hash="md5:" + base64.b64decode(found.group(1)).hex(),
            path=path.parent,
            fname=path.name,
            progressbar=show_progress,
        )
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise InputError(f"cannot download weights ({reason}): {by_hand}") from error


def load(path: str | os.PathLike[str], variant: str | vit.Variant, image_size: int) -> Weights:
    """Reads a checkpoint into the parameter tree of an encoder.

    Every array of the file is used or named in `skipped`; position embeddings are resized only when
    the patch grid differs.

    Args:
        path: `.npz` (keys with or without `opt/target/`) or `.safetensors`, in a known layout.
        variant: the architecture, or its name.
        image_size: side of the images in pixels.

    Raises:
        InputError: the file is unreadable, an array is missing, unknown or of another shape.
    """
    path = Path(path)
    model: Any = vit.build(variant, image_size)
    shapes = vit.parameter_shapes(model, image_size)
    expected: dict[str, Any] = dict(traverse_util.flatten_dict(shapes, sep="/"))
    read = _read(path)
    arrays = layouts.rename(read, path)
    given = arrays.get(layouts.POSITIONS)
    if given is not None and given.ndim == 3 and not model.variant.rotary:
        length, tokens = expected[layouts.POSITIONS].shape[1], model.variant.tokens
        arrays[layouts.POSITIONS] = resize_positions(given, length, path, tokens)
    resized = given is not arrays.get(layouts.POSITIONS)
    missing, unknown = sorted({*expected} - {*arrays}), sorted({*arrays} - {*expected})
    of = variant if isinstance(variant, str) else f"{model.variant.width} wide"
    another = f"{path}: not the weights of encoder.variant {of}:"
    if missing or unknown:
        raise InputError(
            f"{another} {len(missing)} arrays missing{_first(missing)}, "
            f"{len(unknown)} unknown{_first(unknown)}"
        )
    for name, spec in expected.items():
        array, shape = arrays[name], spec.shape
        if array.ndim == len(shape) - 1 and array.size == math.prod(shape):
            array = arrays[name] = array.reshape(shape)  # AugReg's attentions are in heads.
        if array.shape != shape:
            raise InputError(f"{another} {name} has shape {array.shape}, expected {shape}")
        if not (jnp.issubdtype(array.dtype, jnp.floating) and np.isfinite(array).all()):
            raise InputError(f"{path}: {name} holds values that are not finite numbers")
    params = traverse_util.unflatten_dict(
        {name: jnp.asarray(array, jnp.float32) for name, array in arrays.items()}, sep="/"
    )
    return Weights(params, path, sha256(path), layouts.skipped(read), resized)


def used(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Returns the arrays of a checkpoint that `load` makes parameters of, as they lie there."""
    return layouts.used(_read(Path(path)))


def _first(names: list[str]) -> str:
    return f" (first: {names[0]})" if names else ""


def _read(path: Path) -> dict[str, np.ndarray]:
    if path.suffix == ".safetensors":
        return read_safetensors(path)
    if path.suffix in (".pth", ".pt", ".bin", ".ckpt"):
        raise InputError(
            f'{path}: expected a .npz or .safetensors file; PyTorch converts it: python -c "import '
            f"torch, safetensors.torch as s; s.save_file(torch.load('{path.name}', weights_only="
            f"True), '{path.stem}.safetensors')\""
        )
    if path.suffix != ".npz":
        raise InputError(f"{path}: expected a .npz or .safetensors file, found {path.suffix!r}")
    return {name.removeprefix("opt/target/"): array for name, array in read_npz(path).items()}


def resize_positions(embedding: np.ndarray, length: int, path: Path, tokens: int = 1) -> np.ndarray:
    """Resizes position embeddings [1, tokens + g*g, d] to `length` positions, as timm does.

    Those of the learned tokens stay; the grid is resized by antialiased bicubic interpolation. The
    same array comes back when the length is right already.

    Raises:
        InputError: the number of patch positions is not a square.
    """
    if embedding.shape[1] == length:
        return embedding
    old, new = (math.isqrt(max(n - tokens, 0)) for n in (embedding.shape[1], length))
    if old < 1 or old**2 != embedding.shape[1] - tokens:
        raise InputError(
            f"{path}: {layouts.POSITIONS} has {embedding.shape[1]} positions, "
            f"expected {'one' if tokens == 1 else tokens} plus a square number"
        )
    grid = embedding[:, tokens:].reshape(1, old, old, -1).astype(np.float32)
    grid = jax.image.resize(grid, (1, new, new, grid.shape[-1]), "cubic", antialias=True)
    kept = embedding[:, :tokens]
    return np.concatenate([kept, np.asarray(grid).reshape(1, new * new, -1)], axis=1)


def save(params: Any, path: str | os.PathLike[str]) -> None:
    """Writes a parameter tree as an AugReg `.npz` that `load` reads back bit for bit."""
    arrays: Any = traverse_util.flatten_dict(params, sep="/")
    write_npz(path, arrays)
