"""Extraction of features by encoders E_t, and a cache on disk for those by E_0."""

import collections
import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from fdc_jax.data.batches import Batch
from fdc_jax.errors import InputError
from fdc_jax.machine import devices, files, processes
from fdc_jax.machine.devices import Mesh
from fdc_jax.model import operations, vit
from fdc_jax.model.vit import VisionTransformer

# Batches whose features are computed at a time.
_IN_FLIGHT = 2


class Extraction(NamedTuple):
    """Features, and the seconds of decoding and encoding, without compilation."""

    features: Float[np.ndarray, "n d"]
    seconds: float
    from_cache: bool = False


class Extractor:
    """Runs encoders over batches of images; compiled once per batch shape.

    Args:
        model: the encoder.
        mesh: devices that share each batch.
    """

    def __init__(self, model: VisionTransformer, mesh: Mesh):
        self._mesh, self._width = mesh, model.variant.width

        def encode(backbone, images, replaced):
            count, side = images.shape[:2]
            size = operations.images_together(mesh, count, side, model.variant.patch)
            if size == count:
                return vit.encode(model, backbone, images, replaced)
            portions = images.reshape(-1, size, *images.shape[1:])
            features = jax.lax.map(lambda part: encode(backbone, part, replaced), portions)
            return features.reshape(count, -1)

        self.encode = jax.jit(encode, out_shardings=devices.rows(mesh))

    def __call__(
        self,
        backbone: Any,
        views: Sequence[Any],
        batches: Iterable[Batch],
        poll: Callable[[], None] = lambda: None,
    ) -> list[Extraction]:
        """Returns float32 features of all images by several encoders, on the host.

        Every image is read, decoded and transferred once, and the encoders share the seconds
        equally. The features are bit for bit those of separate passes.

        Args:
            backbone: pretrained parameters.
            views: for every encoder the parameters that replace those of E_0.
            batches: images in evaluation preprocessing.
            poll: called before every batch; raises to stop.
        """
        watch = devices.Stopwatch()
        none = [np.zeros((0, self._width), np.float32) for _ in views]
        parts = [none, *self.stream(backbone, views, batches, poll)]
        by_view = [np.concatenate(rows) for rows in zip(*parts, strict=True)]
        seconds = watch.read().seconds / len(views)
        return [Extraction(features, seconds) for features in by_view]

    def stream(
        self,
        backbone: Any,
        views: Sequence[Any],
        batches: Iterable[Batch],
        poll: Callable[[], None] = lambda: None,
    ) -> Iterator[list[Float[np.ndarray, "n d"]]]:
        """Yields for every batch the features by every encoder; see `__call__`.

        Features move to the host while further batches are computed.
        """
        pending: collections.deque = collections.deque()

        def finish() -> list[Any]:
            features, count = pending.popleft()
            return [np.asarray(rows)[:count] for rows in features]

        for batch in batches:
            poll()
            images = devices.split(self._mesh, batch.images)
            features = [self.encode(backbone, images, replaced) for replaced in views]
            for rows in features:
                rows.copy_to_host_async()
            pending.append((features, int(batch.weights.sum())))
            if len(pending) > _IN_FLIGHT:
                yield finish()
        while pending:
            yield finish()


class FeatureCache:
    """Features of the pretrained encoder on disk.

    Args:
        folder: the folder of all cached features.
        key: JSON values of everything but the images that determines the features.
    """

    def __init__(self, folder: str | os.PathLike[str], key: dict[str, Any]):
        self._folder = Path(folder) / _digest(json.dumps(key, sort_keys=True).encode())

    def find(self, name: str, indices: np.ndarray) -> Extraction | None:
        """Returns cached features of images by index; None unless all processes have them."""
        extraction = None
        # Features of damaged files are computed again.
        with contextlib.suppress(InputError, KeyError):
            arrays = files.read_npz(self._path(name, indices))
            extraction = Extraction(arrays["features"], float(arrays["seconds"]), from_cache=True)
        return extraction if all(processes.all_values(lambda: extraction is not None)) else None

    def keep(self, name: str, indices: np.ndarray, extraction: Extraction) -> None:
        """Writes features of images to the cache if it can be written."""
        with contextlib.suppress(InputError):
            arrays = {"features": extraction.features, "seconds": np.array(extraction.seconds)}
            files.write_npz(self._path(name, indices), arrays)

    def _path(self, name: str, indices: np.ndarray) -> Path:
        return self._folder / f"{name}_{_digest(np.ascontiguousarray(indices, np.int64))}.npz"


def _digest(content: Any) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
