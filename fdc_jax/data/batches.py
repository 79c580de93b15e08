"""Batches of images, decoded ahead in threads, as a pure function of seed, task, epoch and step.

A counter-based generator draws all random numbers from (seed, task, epoch). Neither the number of
threads nor the step at which a run resumes changes a batch.
"""

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Float32, Int, Int32, UInt8
from PIL import Image

from fdc_jax.data import images
from fdc_jax.data.dataset import Dataset, default_workers

_PERMUTATION, _AUGMENTATION = 0, 1
_AHEAD = 4  # batches decoded ahead of the consumer


def _generator(*coordinates: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(coordinates)))


def epoch_permutation(n: int, seed: int, task: int, epoch: int) -> Int[np.ndarray, " n"]:
    """Returns the order of a task's `n` training images in an epoch."""
    # NumPy's releases keep the values of `random`, but not those of `permutation`.
    return np.argsort(_generator(seed, task, epoch, _PERMUTATION).random(n), kind="stable")


def epoch_uniforms(n: int, seed: int, task: int, epoch: int) -> Float[np.ndarray, "n k"]:
    """Returns the numbers in [0, 1) that determine the augmentation of each of `n` images."""
    return _generator(seed, task, epoch, _AUGMENTATION).random((n, images.NUM_UNIFORMS))


class Batch(NamedTuple):
    """A batch of fixed size; rows of weight 0 are padding (black image, label 0)."""

    images: UInt8[np.ndarray, "b s s 3"]
    labels: Int32[np.ndarray, " b"]
    weights: Float32[np.ndarray, " b"]


class ByteCache:
    """A thread-safe cache of pixels with a limit in bytes; keys start with a kind of pixels.

    Pixels are kept if they fit, and never replaced: every epoch reads images in a new order, so
    that old pixels are as useful as new ones.
    """

    def __init__(self, max_bytes: int):
        self.room = max_bytes
        self._pixels: dict[tuple, np.ndarray] = {}
        self._lock = threading.Lock()

    def get(self, key: tuple) -> np.ndarray | None:
        """Returns the pixels under a key, or None."""
        return self._pixels.get(key)

    def put(self, key: tuple, pixels: np.ndarray) -> None:
        """Keeps pixels if they fit and their key is new."""
        with self._lock:
            if key not in self._pixels and pixels.nbytes <= self.room:
                self._pixels[key] = pixels
                self.room -= pixels.nbytes

    def forget(self, kind: str) -> None:
        """Removes all pixels of a kind."""
        with self._lock:
            for key in [key for key in self._pixels if key[0] == kind]:
                self.room += self._pixels.pop(key).nbytes


# Maps a row of `_Batches.indices` to its transformed image.
_Transform = Callable[[int], UInt8[np.ndarray, "s s 3"]]


@dataclasses.dataclass(eq=False)
class _Batches:
    """Batches in order, decoded ahead in threads; nothing is read before iteration."""

    dataset: Dataset
    indices: Int[np.ndarray, " n"]  # into `dataset`
    labels: Any  # label of every index; None: the labels of `dataset`
    batch_size: int
    _: dataclasses.KW_ONLY
    image_size: int  # side in pixels
    workers: int = 0  # number of decoding threads; 0: one per core
    own_rows: Bool[np.ndarray, " b"] | None = None  # rows of this process in a batch; None: all
    # Keeps decoded images, before any transform.
    decoded: ByteCache = dataclasses.field(default_factory=lambda: ByteCache(0))
    input_wait_seconds: float = dataclasses.field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.indices = np.asarray(self.indices, np.int64)
        labels = self.dataset.labels[self.indices] if self.labels is None else self.labels
        self.labels = np.asarray(labels)
        self.workers = self.workers or default_workers()

    @property
    def steps_per_epoch(self) -> int:
        """Number of batches that contain every image once."""
        return -(-len(self.indices) // self.batch_size)

    def _plan(self) -> Iterator[tuple[Int[np.ndarray, " m"], _Transform]]:
        """Yields the rows of `indices` in every batch, and the transform of their images."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Batch]:
        pool = ThreadPoolExecutor(self.workers, thread_name_prefix="decode")
        pending: collections.deque[tuple[Batch, list[Future[None]]]] = collections.deque()
        try:
            for rows, transform in self._plan():
                pending.append(self._start(pool, rows, transform))
                if len(pending) > _AHEAD:
                    yield self._finish(*pending.popleft())
            while pending:
                yield self._finish(*pending.popleft())
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _start(
        self, pool: ThreadPoolExecutor, rows: Int[np.ndarray, " m"], transform: _Transform
    ) -> tuple[Batch, list[Future[None]]]:
        """Returns a batch and the jobs that fill it; rows of other processes stay black."""
        shape = (self.batch_size, self.image_size, self.image_size, 3)
        batch = Batch(
            np.zeros(shape, np.uint8),
            np.zeros(self.batch_size, np.int32),
            np.zeros(self.batch_size, np.float32),
        )
        batch.labels[: len(rows)] = self.labels[rows]
        batch.weights[: len(rows)] = 1.0

        own_slots = np.arange(len(rows))
        if self.own_rows is not None:
            own_slots = own_slots[self.own_rows[: len(rows)]]

        def fill(slots: Int[np.ndarray, " k"]) -> None:
            for slot in slots:
                batch.images[slot] = transform(int(rows[slot]))

        jobs = [own_slots[first :: self.workers] for first in range(self.workers)]
        return batch, [pool.submit(fill, job) for job in jobs]

    def _finish(self, batch: Batch, jobs: list[Future[None]]) -> Batch:
        """Returns a batch when its jobs are done; adds the wait to `input_wait_seconds`."""
        start = time.perf_counter()
        for job in jobs:
            job.result()
        self.input_wait_seconds += time.perf_counter() - start
        return batch

    def _image(self, index: int) -> Image.Image:
        """Returns a decoded image, from `decoded` if it is there."""
        key = ("decoded", self.dataset.name, self.dataset.split, index)
        if (pixels := self.decoded.get(key)) is not None:
            return Image.fromarray(pixels)
        image = self.dataset.image(index)
        if 3 * image.width * image.height <= self.decoded.room:
            self.decoded.put(key, np.asarray(image))
        return image


@dataclasses.dataclass(eq=False)
class TrainBatches(_Batches):
    """The training batches of one task, over all its epochs.

    Iteration starts at `start_step`, counted over all epochs. Each epoch visits every image once;
    its last batch is padded.
    """

    seed: int  # of training
    task: int  # counted from 0
    _: dataclasses.KW_ONLY
    epochs: int = 1  # number of passes
    start_step: int = 0  # steps already taken, over all epochs
    crop_scale: tuple[float, float] = images.CROP_SCALE  # range of a crop's share of the area
    flip: bool = True  # whether to mirror half of the images

    @property
    def num_steps(self) -> int:
        """Number of batches of all epochs, for any `start_step`."""
        return self.epochs * self.steps_per_epoch

    def _plan(self) -> Iterator[tuple[Int[np.ndarray, " m"], _Transform]]:
        for step in range(self.start_step, self.num_steps):
            epoch, position = divmod(step, self.steps_per_epoch)
            if position == 0 or step == self.start_step:
                coordinates = len(self.indices), self.seed, self.task, epoch
                order = epoch_permutation(*coordinates)
                uniforms = epoch_uniforms(*coordinates)
            rows = order[position * self.batch_size :][: self.batch_size]
            yield rows, self._transform(uniforms)

    def _transform(self, uniforms: Float[np.ndarray, "n k"]) -> _Transform:
        size, scale, flip = self.image_size, self.crop_scale, self.flip
        return lambda row: images.train_transform(
            self._image(int(self.indices[row])), size, uniforms[row], scale, flip
        )


@dataclasses.dataclass(eq=False)
class EvaluationBatches(_Batches):
    """Images with the test transform, in the order of the indices; the last batch is padded."""

    # Keeps transformed images.
    cache: ByteCache = dataclasses.field(default_factory=lambda: ByteCache(0))

    def _plan(self) -> Iterator[tuple[Int[np.ndarray, " m"], _Transform]]:
        rows = np.arange(len(self.indices))
        for start in range(0, len(rows), self.batch_size):
            yield rows[start : start + self.batch_size], self._transform

    def _transform(self, row: int) -> UInt8[np.ndarray, "s s 3"]:
        index = int(self.indices[row])
        key = ("transformed", self.dataset.name, self.dataset.split, self.image_size, index)
        if (pixels := self.cache.get(key)) is None:
            pixels = images.evaluation_transform(self._image(index), self.image_size)
            self.cache.put(key, pixels)
        return pixels


def evaluation_images(
    dataset: Dataset, indices: Int[np.ndarray, " n"], image_size: int
) -> UInt8[np.ndarray, "n s s 3"]:
    """Returns all images of `indices` with the test transform, in one array."""
    batches = EvaluationBatches(dataset, indices, None, 64, image_size=image_size)
    empty = np.empty((0, image_size, image_size, 3), np.uint8)
    return np.concatenate([empty, *(batch.images[batch.weights > 0] for batch in batches)])
