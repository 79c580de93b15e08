"""Pretrained weights: AugReg `.npz` and timm `.safetensors` files to parameter trees, strictly."""

import base64
import dataclasses
import math
import os
import re
import struct
import urllib.error
import urllib.request
import zipfile
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from safetensors import SafetensorError
from safetensors.numpy import load_file

from fdc_jax.errors import InputError
from fdc_jax.files import sha256, write_atomically
from fdc_jax.model import vit

AUGREG_BUCKET = "https://storage.googleapis.com/vit_models/augreg/"
# The ImageNet-21k checkpoints that timm calls `*_patch16_224.augreg_in21k`.
AUGREG_FILES = {
    "Ti/16": "Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0.npz",
    "S/16": "S_16-i21k-300ep-lr_0.001-aug_light1-wd_0.03-do_0.0-sd_0.0.npz",
    "B/16": "B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0.npz",
    "L/16": "L_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.1-sd_0.1.npz",
}
DIGITS_WEIGHTS = Path(__file__).resolve().parents[1] / "assets" / "digits_vit.npz"

# What the two readers raise on files that are cut short, changed or of another type.
_DAMAGED = (OSError, ValueError, TypeError, EOFError, KeyError, NotImplementedError)
_DAMAGED += (struct.error, zipfile.BadZipFile, zlib.error, SafetensorError)

_POSITIONS = "Transformer/posembed_input/pos_embedding"

# timm's names of layers and AugReg's.
_BLOCK, _ATTENTION = r"Transformer/encoderblock_\1", "MultiHeadDotProductAttention_1"
_TIMM_NAMES = (
    ("cls_token", "cls"),
    ("pos_embed", _POSITIONS),
    (r"patch_embed\.proj", "embedding"),
    (r"blocks\.(\d+)\.norm1", f"{_BLOCK}/LayerNorm_0"),
    (r"blocks\.(\d+)\.attn\.qkv", f"{_BLOCK}/{_ATTENTION}/qkv"),
    (r"blocks\.(\d+)\.attn\.proj", f"{_BLOCK}/{_ATTENTION}/out"),
    (r"blocks\.(\d+)\.norm2", f"{_BLOCK}/LayerNorm_2"),
    (r"blocks\.(\d+)\.mlp\.fc1", f"{_BLOCK}/MlpBlock_3/Dense_0"),
    (r"blocks\.(\d+)\.mlp\.fc2", f"{_BLOCK}/MlpBlock_3/Dense_1"),
    ("norm", "Transformer/encoder_norm"),
    ("head", "head"),
)


@dataclasses.dataclass(frozen=True)
class Weights:
    """A parameter tree and where it came from."""

    params: Any
    path: Path
    sha256: str
    skipped: tuple[str, ...]
    resized_positions: bool


def cache_folder() -> Path:
    """Returns `$FDC_JAX_CACHE`, or `fdc_jax` in the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("FDC_JAX_CACHE") or Path(home) / "fdc_jax")


def locate(
    weights: str, variant: str, folder: str | os.PathLike[str], show_progress: bool = True
) -> Path:
    """Returns the file of pretrained weights that a configuration asks for.

    Args:
        weights: a file; or `augreg` for the public ImageNet-21k checkpoint of the variant, which
            is looked up in the cache folder and downloaded when missing; or `digits` for the small
            encoder that comes with the package.
        variant: name of the encoder.
        folder: where downloads are kept.
        show_progress: draw a bar while downloading.

    Raises:
        InputError: there is no such file, or it could not be downloaded.
    """
    if weights == "digits":
        return DIGITS_WEIGHTS
    if weights != "augreg":
        path = Path(weights).expanduser()
        if not path.is_file():
            raise InputError(
                f"encoder.weights: expected 'augreg', 'digits' or a file, found no file {path}"
            )
        return path
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


def load(path: str | os.PathLike[str], variant: str, image_size: int) -> Weights:
    """Reads a checkpoint into the parameter tree of an encoder.

    Every array of the file is used or named in `skipped` (the classification head); position
    embeddings are resized only when the patch grid differs.

    Args:
        path: AugReg `.npz` (keys with or without `opt/target/`) or timm `.safetensors`.
        variant: name of the encoder.
        image_size: side of the images in pixels.

    Raises:
        InputError: the file is unreadable, an array is missing, unknown or of another shape.
    """
    path = Path(path)
    shapes = vit.parameter_shapes(vit.build(variant, image_size), image_size)
    expected: dict[str, Any] = dict(traverse_util.flatten_dict(shapes, sep="/"))
    arrays = _read(path)
    if path.suffix == ".safetensors":
        arrays = _from_timm(arrays, path, vit.VARIANTS[variant])
    skipped = tuple(sorted(name for name in arrays if name.startswith("head/")))
    arrays = {name: array for name, array in arrays.items() if name not in skipped}

    given = arrays.get(_POSITIONS)
    if given is not None and given.ndim == 3:
        arrays[_POSITIONS] = resize_positions(given, expected[_POSITIONS].shape[1], path)
    resized = given is not arrays.get(_POSITIONS)
    missing, unknown = sorted({*expected} - {*arrays}), sorted({*arrays} - {*expected})
    another = f"{path}: not the weights of encoder.variant {variant}:"
    if missing or unknown:
        raise InputError(
            f"{another} {len(missing)} arrays missing{_first(missing)}, "
            f"{len(unknown)} unknown{_first(unknown)}"
        )
    for name, spec in expected.items():
        if arrays[name].shape != spec.shape:
            raise InputError(
                f"{another} {name} has shape {arrays[name].shape}, expected {spec.shape}"
            )
        if not jnp.issubdtype(arrays[name].dtype, jnp.floating):
            raise InputError(
                f"{path}: {name} holds {arrays[name].dtype}, expected floating-point numbers"
            )
        if not np.all(np.isfinite(arrays[name])):
            raise InputError(f"{path}: {name} holds values that are not finite numbers")
    params = traverse_util.unflatten_dict(
        {name: jnp.asarray(array, jnp.float32) for name, array in arrays.items()}, sep="/"
    )
    return Weights(params, path, sha256(path), skipped, resized)


def _first(names: list[str]) -> str:
    return f" (first: {names[0]})" if names else ""


def _read(path: Path) -> dict[str, np.ndarray]:
    if not path.is_file():
        raise InputError(f"encoder.weights: no file {path}")
    if path.suffix not in (".npz", ".safetensors"):
        raise InputError(f"{path}: expected a .npz or .safetensors file, found {path.suffix!r}")
    try:
        with open(path, "rb") as stream:
            start = stream.read(16)
            # Of another type; numpy would say to trust it and to load it unsafely. A safetensors
            # file begins with eight bytes for a length that no more than seven can need.
            whole = start.startswith(b"PK") if path.suffix == ".npz" else b"\0" in start[:8]
            if start and not whole:
                raise InputError(
                    f"{path}: no weights file: expected a {path.suffix} archive, found a file that "
                    f"begins with {start!r}; is it a web page, saved in place of the weights?"
                )
            if path.suffix == ".safetensors":
                return load_file(path)
            # From the open file, since numpy leaves a damaged archive open.
            stream.seek(0)
            with np.load(stream, allow_pickle=False) as file:
                return {name.removeprefix("opt/target/"): file[name] for name in file.files}
    except InputError:
        raise
    except _DAMAGED as error:
        raise InputError(f"{path}: unreadable weights ({error})") from error


def resize_positions(embedding: np.ndarray, length: int, path: Path) -> np.ndarray:
    """Resizes position embeddings [1, 1 + g*g, d] to `length` positions, as timm does.

    The class token's embedding stays; the grid is resized by antialiased bicubic interpolation.
    The same array comes back when the length is right already.

    Raises:
        InputError: the number of patch positions is not a square.
    """
    if embedding.shape[1] == length:
        return embedding
    old, new = (math.isqrt(max(n - 1, 0)) for n in (embedding.shape[1], length))
    if old < 1 or old**2 != embedding.shape[1] - 1:
        raise InputError(
            f"{path}: {_POSITIONS} has {embedding.shape[1]} positions, "
            f"expected one plus a square number"
        )
    grid = embedding[:, 1:].reshape(1, old, old, -1).astype(np.float32)
    grid = jax.image.resize(grid, (1, new, new, grid.shape[-1]), "cubic", antialias=True)
    return np.concatenate([embedding[:, :1], np.asarray(grid).reshape(1, new * new, -1)], axis=1)


def _from_timm(
    arrays: dict[str, np.ndarray], path: Path, variant: vit.Variant
) -> dict[str, np.ndarray]:
    """Renames and reshapes the arrays of a timm Vision Transformer to AugReg's keys."""
    split = (variant.heads, variant.width // variant.heads)
    renamed: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        stem, _, kind = name.rpartition(".")
        known = [(re.fullmatch(old, stem or name), new) for old, new in _TIMM_NAMES]
        target = next((match.expand(new) for match, new in known if match), None)
        try:
            if target is None or (stem and kind not in ("weight", "bias")):
                renamed[name] = array
            elif not stem:
                renamed[target] = array
            elif target.endswith("qkv"):
                for part, rows in zip(("query", "key", "value"), np.split(array, 3), strict=True):
                    prefix = target.removesuffix("qkv") + part
                    if kind == "bias":
                        renamed[f"{prefix}/bias"] = rows.reshape(split)
                    else:
                        renamed[f"{prefix}/kernel"] = rows.T.reshape(-1, *split)
            elif kind == "bias":
                renamed[f"{target}/bias"] = array
            elif "norm" in target.lower():
                renamed[f"{target}/scale"] = array
            elif target == "embedding":
                renamed["embedding/kernel"] = array.transpose(2, 3, 1, 0)
            elif target.endswith("out"):
                renamed[f"{target}/kernel"] = array.T.reshape(*split, -1)
            else:
                renamed[f"{target}/kernel"] = array.T
        except ValueError as error:
            raise InputError(f"{path}: {name} has the unexpected shape {array.shape}") from error
    return renamed


def save(params: Any, path: str | os.PathLike[str]) -> None:
    """Writes a parameter tree as an AugReg `.npz` that `load` reads back bit for bit."""
    arrays: dict[str, Any] = {
        name: np.asarray(array)
        for name, array in traverse_util.flatten_dict(params, sep="/").items()
    }
    with write_atomically(path) as file:
        np.savez(file, **arrays)
