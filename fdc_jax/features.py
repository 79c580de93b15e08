"""Head-input features of many images, from any encoder E_t."""

import collections
import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float

from fdc_jax import array_files, devices, processes
from fdc_jax.data.stream import Batch, EvaluationBatches
from fdc_jax.errors import InputError
from fdc_jax.files import write_atomically
from fdc_jax.model import portions
from fdc_jax.model.vit import VisionTransformer, pretrained_kernels

# Batches whose features may be on the device before the oldest is fetched.
_IN_FLIGHT = 2


class Extraction(NamedTuple):
    """Features and what they cost."""

    features: Float[np.ndarray, "n d"]
    seconds: float
    input_wait_seconds: float
    from_cache: bool = False


class Extractor:
    """Runs one encoder over batches of images; compiled once per batch shape.

    Args:
        model: the encoder.
        mesh: devices that share each batch.
    """

    def __init__(self, model: VisionTransformer, mesh: Mesh):
        self._mesh = mesh

        def encode(backbone, images, kernels):
            return model.apply({"params": backbone}, images, kernels)

        # Where there are several processes, each one gets the features of all.
        self._encode = jax.jit(
            _in_portions(encode, model.variant.patch), out_shardings=devices.everywhere(mesh)
        )

    def __call__(
        self,
        backbone: Any,
        kernels: Any,
        batches: EvaluationBatches,
        poll: Callable[[], None] = lambda: None,
    ) -> Extraction:
        """Returns float32 features, one row per image of `batches`, padding removed.

        Args:
            backbone: pretrained parameters.
            kernels: key and value kernels of the encoder wanted, E_0 to E_T.
            batches: images in evaluation preprocessing.
            poll: called before each batch; raises to stop.
        """
        (extraction,) = self._views(backbone, (kernels,), batches, poll)
        return extraction

    def both(
        self,
        backbone: Any,
        kernels: Any,
        batches: EvaluationBatches,
        poll: Callable[[], None] = lambda: None,
    ) -> tuple[Extraction, Extraction]:
        """Returns the features of an encoder and those of the pretrained one, in one pass.

        Each image is read, decoded and placed once; the features are bit for bit those of two
        passes. What the views could share beyond that, up to the queries of block one, is 3 % of
        ViT-Ti/16 and less of a larger encoder. Seconds are those of the pass, halved.

        Args:
            backbone: pretrained parameters.
            kernels: key and value kernels of the adapted view.
            batches: images in evaluation preprocessing.
            poll: called before each batch; raises to stop.
        """
        views = (kernels, pretrained_kernels(backbone))
        adapted, pretrained = self._views(backbone, views, batches, poll)
        return adapted, pretrained

    def _views(
        self,
        backbone: Any,
        views: tuple[Any, ...],
        batches: EvaluationBatches,
        poll: Callable[[], None],
    ) -> list[Extraction]:
        start, waited = time.perf_counter(), batches.input_wait_seconds
        rows = list(self._rows(backbone, views, batches, poll))
        share = 1.0 / len(views)
        seconds = share * (time.perf_counter() - start)
        waited = share * (batches.input_wait_seconds - waited)
        nothing = np.zeros((0, views[0]["key"].shape[-1]), np.float32)
        of_view = zip(*rows, strict=True) if rows else [(nothing,)] * len(views)
        return [Extraction(np.concatenate(features), seconds, waited) for features in of_view]

    def _rows(
        self,
        backbone: Any,
        views: tuple[Any, ...],
        batches: Iterable[Batch],
        poll: Callable[[], None],
    ):
        pending: collections.deque = collections.deque()
        for batch in batches:
            poll()
            images = devices.split(self._mesh, batch.images)
            found = [self._encode(backbone, images, kernels) for kernels in views]
            pending.append((found, int(batch.weights.sum())))
            if len(pending) > _IN_FLIGHT:
                yield _fetch(*pending.popleft())
        while pending:
            yield _fetch(*pending.popleft())


def _in_portions(encode: Callable[..., Any], patch: int) -> Callable[..., Any]:
    """Returns the encoder `(backbone, images, kernels) -> features`, in portions on a processor."""

    def encode_all(backbone, images, kernels):
        count, side = images.shape[:2]
        size = portions.images_together(count, side, patch)
        if size == count:
            return encode(backbone, images, kernels)
        cut = images.reshape(-1, size, *images.shape[1:])
        found = jax.lax.map(lambda portion: encode(backbone, portion, kernels), cut)
        return found.reshape(count, -1)

    return encode_all


def _fetch(views: list[jax.Array], count: int) -> tuple[np.ndarray, ...]:
    return tuple(np.asarray(features)[:count] for features in views)


class FeatureCache:
    """Features of the pretrained encoder on disk; they depend on images and weights alone.

    Args:
        folder: where the files lie.
        key: everything that the features depend on; JSON values.
    """

    def __init__(self, folder: str | os.PathLike[str], key: dict[str, Any]):
        text = json.dumps(key, sort_keys=True)
        self._folder = Path(folder) / hashlib.sha256(text.encode()).hexdigest()[:16]
        if processes.is_first() and not (self._folder / "key.json").exists():
            # A cache that cannot be written costs time, not results.
            with contextlib.suppress(InputError), write_atomically(self._folder / "key.json") as f:
                f.write(text.encode())

    def get(self, name: str, indices: np.ndarray, compute: Callable[[], Extraction]) -> Extraction:
        """Returns cached features, or computes and keeps them.

        Only process 0 reads and writes the cache; on others, what is cached comes back empty.

        Args:
            name: file name, without its ending.
            indices: which images, in which order; a file made from others is replaced.
            compute: makes the features when they are not there.
        """
        digest = hashlib.sha256(np.ascontiguousarray(indices, np.int64).tobytes()).hexdigest()
        path = self._folder / f"{name}_{digest[:16]}.npz"
        start = time.perf_counter()
        found = _read(path, len(indices)) if processes.is_first() else None
        if processes.on_first(lambda: found is not None):
            features = np.zeros((0, 0), np.float32) if found is None else found
            return Extraction(features, time.perf_counter() - start, 0.0, from_cache=True)
        extraction = compute()
        features = extraction.features
        if processes.is_first():
            with contextlib.suppress(InputError):
                array_files.write_npz(path, {"features": features, "sha256": _digest(features)})
        return extraction


def _read(path: Path, rows: int) -> Float[np.ndarray, "n d"] | None:
    """Returns cached features; None where there are none, or damaged ones to be made again."""
    with contextlib.suppress(InputError, KeyError):
        arrays = array_files.read_npz(path)
        features, expected = arrays["features"], str(arrays["sha256"])
        if _digest(features) == expected and len(features) == rows:
            return features
    return None


def _digest(features: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(features).tobytes()).hexdigest()
