"""Features of any encoder E_t; those of E_0, of images and weights alone, are kept on disk."""

import collections
import contextlib
import hashlib
import json
import os
import time
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

# Batches whose features may be on the device before the oldest is fetched.
_IN_FLIGHT = 2


class Extraction(NamedTuple):
    """Features and what they cost."""

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
            cut = images.reshape(-1, size, *images.shape[1:])
            found = jax.lax.map(lambda part: encode(backbone, part, replaced), cut)
            return found.reshape(count, -1)

        # Each of several processes gets the features of all.
        self.encode = jax.jit(encode, out_shardings=devices.everywhere(mesh))

    def __call__(
        self,
        backbone: Any,
        views: Sequence[Any],
        batches: Iterable[Batch],
        poll: Callable[[], None] = lambda: None,
    ) -> list[Extraction]:
        """Returns float32 features by several encoders, one row per image, padding removed.

        Each image is read, decoded and placed once; the features are bit for bit those of separate
        passes.

        Args:
            backbone: pretrained parameters.
            views: what each encoder, E_0 to E_T, has in the place of parameters of E_0.
            batches: images in evaluation preprocessing.
            poll: called before each batch; raises to stop.
        """
        start = time.perf_counter()
        found = [[np.zeros((0, self._width), np.float32)] for _ in views]
        for features in self.stream(backbone, views, batches, poll):
            for rows, of_view in zip(found, features, strict=True):
                rows.append(of_view)
        # The views' shares of one pass.
        seconds = (time.perf_counter() - start) / len(views)
        return [Extraction(np.concatenate(rows), seconds) for rows in found]

    def stream(
        self,
        backbone: Any,
        views: Sequence[Any],
        batches: Iterable[Batch],
        poll: Callable[[], None] = lambda: None,
    ) -> Iterator[list[Float[np.ndarray, "n d"]]]:
        """Yields the features of batch after batch, by each encoder; arguments as of a call."""
        pending: collections.deque = collections.deque()

        def fetch() -> list[np.ndarray]:
            features, count = pending.popleft()
            return [np.asarray(of_view)[:count] for of_view in features]

        for batch in batches:
            poll()
            images = devices.split(self._mesh, batch.images)
            features = [self.encode(backbone, images, replaced) for replaced in views]
            pending.append((features, int(batch.weights.sum())))
            if len(pending) > _IN_FLIGHT:
                yield fetch()
        while pending:
            yield fetch()


class FeatureCache:
    """Features of the pretrained encoder on disk.

    Args:
        folder: where the files lie.
        key: everything that the features depend on; JSON values.
    """

    def __init__(self, folder: str | os.PathLike[str], key: dict[str, Any]):
        self._folder = Path(folder) / _digest(json.dumps(key, sort_keys=True).encode())

    def find(self, name: str, indices: np.ndarray) -> Extraction | None:
        """Returns cached features of these images, or None unless every process finds them."""
        start, found = time.perf_counter(), None
        # Damaged ones are made again.
        with contextlib.suppress(InputError, KeyError):
            found = files.read_npz(self._path(name, indices))["features"]
        if not processes.agreed(found is not None) or found is None:
            return None
        return Extraction(found, time.perf_counter() - start, from_cache=True)

    def keep(self, name: str, indices: np.ndarray, extraction: Extraction) -> None:
        """Writes features of these images to the cache."""
        # A cache that cannot be written costs time, not results.
        with contextlib.suppress(InputError):
            files.write_npz(self._path(name, indices), {"features": extraction.features})

    def _path(self, name: str, indices: np.ndarray) -> Path:
        return self._folder / f"{name}_{_digest(np.ascontiguousarray(indices, np.int64))}.npz"


def _digest(content: Any) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
