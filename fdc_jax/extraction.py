"""Head-input features of many images, from any encoder E_t."""

import collections
import contextlib
import hashlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float

from fdc_jax import devices, files, processes
from fdc_jax.data.batches import Batch, EvaluationBatches
from fdc_jax.errors import InputError
from fdc_jax.model import vit
from fdc_jax.model.vit import VisionTransformer

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
        (extraction,) = self.stream(backbone, (kernels,), batches, poll).whole()
        return extraction

    def stream(
        self,
        backbone: Any,
        views: Sequence[Any],
        batches: EvaluationBatches,
        poll: Callable[[], None] = lambda: None,
    ) -> "FeatureStream":
        """Returns the features of several encoders while they are made, in one pass.

        Each image is read, decoded and placed once; the features are bit for bit those of separate
        passes. What E_0 and another encoder could share beyond that, up to the queries of block
        one, is 3 % of ViT-Ti/16 and less of a larger encoder.

        Args:
            backbone: pretrained parameters.
            views: key and value kernels, one pair per encoder.
            batches: images in evaluation preprocessing.
            poll: called before each batch; raises to stop.
        """
        rows = self._rows(backbone, views, batches, poll)
        widths = [kernels["key"].shape[-1] for kernels in views]
        return FeatureStream(rows, widths, lambda: batches.input_wait_seconds)

    def _rows(
        self,
        backbone: Any,
        views: Sequence[Any],
        batches: Iterable[Batch],
        poll: Callable[[], None],
    ) -> Iterator[tuple[np.ndarray, ...]]:
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


class FeatureStream:
    """Features of several views, made as they are first read and kept for the next reading.

    Args:
        rows: features of consecutive images, one array per view.
        widths: of the features, per view.
        input_wait_seconds: what `rows` have waited for images so far.
    """

    def __init__(
        self,
        rows: Iterator[tuple[np.ndarray, ...]],
        widths: Sequence[int],
        input_wait_seconds: Callable[[], float] = lambda: 0.0,
    ):
        self._rows, self._widths = rows, widths
        self._input_wait_seconds = input_wait_seconds
        self._made: list[tuple[np.ndarray, ...]] = []
        self.seconds = 0.0

    def __iter__(self) -> Iterator[tuple[np.ndarray, ...]]:
        """Walks over the features from the first image on, one array per view."""
        for number in itertools.count():
            if number == len(self._made) and not self._make():
                return
            yield self._made[number]

    def _make(self) -> bool:
        start = time.perf_counter()
        rows = next(self._rows, None)
        self.seconds += time.perf_counter() - start
        if rows is not None:
            self._made.append(rows)
        return rows is not None

    def whole(self) -> list[Extraction]:
        """Returns all features per view; seconds are the views' shares of one pass."""
        rows = list(self)
        of_view = zip(*rows, strict=True) if rows else [()] * len(self._widths)
        share = 1.0 / len(self._widths)
        return [
            Extraction(
                np.concatenate([np.zeros((0, width), np.float32), *features]),
                share * self.seconds,
                share * self._input_wait_seconds(),
            )
            for width, features in zip(self._widths, of_view, strict=True)
        ]


def _in_portions(encode: Callable[..., Any], patch: int) -> Callable[..., Any]:
    """Returns the encoder `(backbone, images, kernels) -> features`, in portions on a processor."""

    def encode_all(backbone, images, kernels):
        count, side = images.shape[:2]
        size = vit.images_together(count, side, patch)
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
            with (
                contextlib.suppress(InputError),
                files.write_atomically(self._folder / "key.json") as f,
            ):
                f.write(text.encode())

    def get(self, name: str, indices: np.ndarray, compute: Callable[[], Extraction]) -> Extraction:
        """Returns cached features, or computes and keeps them; see `find` and `keep`."""
        found = self.find(name, indices)
        if found is None:
            found = compute()
            self.keep(name, indices, found)
        return found

    def find(self, name: str, indices: np.ndarray) -> Extraction | None:
        """Returns cached features, or None on all processes.

        Only process 0 reads the cache; on others, what is cached comes back empty.

        Args:
            name: file name, without its ending.
            indices: which images, in which order; a file made from others does not count.
        """
        start = time.perf_counter()
        found = None
        if processes.is_first():
            found = _read(self._path(name, indices), len(indices))
        if not processes.on_first(lambda: found is not None):
            return None
        features = np.zeros((0, 0), np.float32) if found is None else found
        return Extraction(features, time.perf_counter() - start, 0.0, from_cache=True)

    def keep(self, name: str, indices: np.ndarray, extraction: Extraction) -> None:
        """Writes features of these images to the cache, on process 0."""
        if processes.is_first():
            arrays = {"features": extraction.features, "sha256": _digest(extraction.features)}
            with contextlib.suppress(InputError):
                files.write_npz(self._path(name, indices), arrays)

    def _path(self, name: str, indices: np.ndarray) -> Path:
        digest = hashlib.sha256(np.ascontiguousarray(indices, np.int64).tobytes()).hexdigest()
        return self._folder / f"{name}_{digest[:16]}.npz"


def _read(path: Path, rows: int) -> Float[np.ndarray, "n d"] | None:
    """Returns cached features; None where there are none, or damaged ones to be made again."""
    with contextlib.suppress(InputError, KeyError):
        arrays = files.read_npz(path)
        features, expected = arrays["features"], str(arrays["sha256"])
        if _digest(features) == expected and len(features) == rows:
            return features
    return None


def _digest(features: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(features).tobytes()).hexdigest()
