"""Class order, task split, label map, and batches as a pure function of their coordinates.

Everything random is drawn from (seed, task, epoch) with a counter-based generator, so that
step `s` of a run is the same batch however many threads decode it and wherever a run resumed.
"""

from __future__ import annotations

import collections
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Float32, Int, Int32, UInt8
from PIL import Image

from fdc_jax.data import images
from fdc_jax.data.source import ByteCache, Source
from fdc_jax.errors import InputError

_PERMUTATION, _AUGMENTATION = 0, 1


def class_order(num_classes: int, seed: int) -> Int[np.ndarray, " c"]:
    """Returns the class labels in the order in which they arrive (PILOT: seed 1993).

    Equal to `numpy.random.seed(seed)` followed by `numpy.random.permutation(num_classes)`.
    """
    return np.random.RandomState(seed).permutation(num_classes)


def class_positions(order: Int[np.ndarray, " c"]) -> Int[np.ndarray, " c"]:
    """Returns the map from a class label to its position in the class order."""
    positions = np.empty_like(order)
    positions[order] = np.arange(len(order))
    return positions


def task_classes(order: Int[np.ndarray, " c"], classes_per_task: int) -> list[np.ndarray]:
    """Cuts the class order into consecutive tasks; a remainder becomes a shorter last task.

    Returns:
        Per task, its class labels in class order.
    """
    if classes_per_task < 1:
        raise InputError(f"classes_per_task must be at least 1, found {classes_per_task}")
    return [order[i : i + classes_per_task] for i in range(0, len(order), classes_per_task)]


def task_indices(
    labels: Int[np.ndarray, " n"], classes: Sequence[int] | Int[np.ndarray, " k"]
) -> Int[np.ndarray, " m"]:
    """Returns the indices of the images of `classes`, class after class in the order given."""
    if len(classes) == 0:
        return np.zeros(0, np.int64)
    return np.concatenate([np.flatnonzero(labels == label) for label in classes])


def select_per_class(labels: Int[np.ndarray, " n"], per_class: int) -> Int[np.ndarray, " m"]:
    """Returns, ascending, the indices of the first `per_class` images of every class.

    Args:
        labels: in the fixed order of a `Source`, that is by record identifier within a class.
        per_class: how many to keep of each class; 0 keeps all.
    """
    if per_class < 0:
        raise InputError(f"images per class must be 0 (all) or more, found {per_class}")
    if per_class == 0:
        return np.arange(len(labels))
    order = np.argsort(labels, kind="stable")
    ordered = labels[order]
    rank = np.arange(len(labels)) - np.searchsorted(ordered, ordered, side="left")
    return np.sort(order[rank < per_class])


def _generator(*coordinates: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(coordinates)))


def epoch_permutation(n: int, seed: int, task: int, epoch: int) -> Int[np.ndarray, " n"]:
    """Returns the order in which an epoch visits a task's `n` training images."""
    # NumPy keeps `random` the same between releases, but not `permutation`.
    return np.argsort(_generator(seed, task, epoch, _PERMUTATION).random(n), kind="stable")


def epoch_uniforms(n: int, seed: int, task: int, epoch: int) -> Float[np.ndarray, "n k"]:
    """Returns the numbers in [0, 1) that decide the augmentation of each of `n` images."""
    return _generator(seed, task, epoch, _AUGMENTATION).random((n, images.NUM_UNIFORMS))


class Batch(NamedTuple):
    """A batch of fixed size; rows of weight 0 are padding (black image, label 0)."""

    images: UInt8[np.ndarray, "b s s 3"]
    labels: Int32[np.ndarray, " b"]
    weights: Float32[np.ndarray, " b"]


def default_workers() -> int:
    """Number of processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class _Batches:
    """Decodes ahead in threads, at most `prefetch` batches, and hands batches out in order."""

    def __init__(
        self,
        source: Source,
        indices: Int[np.ndarray, " n"],
        labels: Int[np.ndarray, " n"] | None,
        batch_size: int,
        image_size: int,
        workers: int | None,
        prefetch: int,
        own_rows: Bool[np.ndarray, " b"] | None,
        decoded: ByteCache | None,
    ):
        self.source = source
        self.decoded = decoded
        self.own_rows = own_rows
        self.indices = np.asarray(indices, np.int64)
        self.batch_size = batch_size
        self.image_size = image_size
        self.workers = default_workers() if workers is None else workers
        self.prefetch = prefetch
        self.input_wait_seconds = 0.0
        for name, value in [
            ("batch_size", batch_size),
            ("image_size", image_size),
            ("workers", self.workers),
            ("prefetch", prefetch),
        ]:
            if value < 1:
                raise InputError(f"{name} must be at least 1, found {value}")
        low, high = self.indices.min(initial=0), self.indices.max(initial=-1)
        if self.indices.ndim != 1 or low < 0 or high >= len(source):
            raise InputError(
                f"{source.name}, split {source.split}: expected a vector of image indices between "
                f"0 and {len(source) - 1}, found shape {self.indices.shape}, {low} to {high}"
            )
        chosen = source.labels[self.indices] if labels is None else labels
        self.labels = np.asarray(chosen, np.int32)
        if self.labels.shape != self.indices.shape:
            raise InputError(
                f"expected one label per image index, found {self.labels.shape} labels and "
                f"{self.indices.shape} indices"
            )

    def _image(self, index: int) -> Image.Image:
        """Returns an image as it is stored, decoded now or earlier."""
        key = (self.source.name, self.source.split, index)
        found = None if self.decoded is None else self.decoded.get(key)
        if found is not None:
            return Image.fromarray(found)
        image = images.decode(self.source.read(index), self.source.describe(index))
        size = 3 * image.width * image.height
        if self.decoded is not None and self.decoded.has_room(size):
            self.decoded.put(key, np.asarray(image), size)
        return image

    def _start(
        self,
        pool: ThreadPoolExecutor,
        rows: Int[np.ndarray, " m"],
        transform: Callable[[int], UInt8[np.ndarray, "s s 3"]],
    ) -> tuple[Batch, list[Future[None]]]:
        """Starts filling a batch with `transform(row)` for each row of `self.indices`.

        The images of rows that are not this process's own are left as they come.
        """
        shape = (self.batch_size, self.image_size, self.image_size, 3)
        batch = Batch(
            np.empty(shape, np.uint8),
            np.zeros(self.batch_size, np.int32),
            np.zeros(self.batch_size, np.float32),
        )
        batch.images[len(rows) :] = 0
        batch.labels[: len(rows)] = self.labels[rows]
        batch.weights[: len(rows)] = 1.0

        own = np.arange(len(rows))
        if self.own_rows is not None:
            own = own[self.own_rows[: len(rows)]]

        def fill(slots: Int[np.ndarray, " k"]) -> None:
            for slot in slots:
                batch.images[slot] = transform(int(rows[slot]))

        # A few images a job: small enough to share a batch between threads, large enough to
        # make the cost of a job vanish.
        size = max(1, min(8, -(-len(own) // self.workers)))
        jobs = [own[i : i + size] for i in range(0, len(own), size)]
        return batch, [pool.submit(fill, job) for job in jobs]

    def _run(
        self,
        plan: Iterator[tuple[Int[np.ndarray, " m"], Callable[[int], UInt8[np.ndarray, "s s 3"]]]],
    ) -> Iterator[Batch]:
        pool = ThreadPoolExecutor(self.workers, thread_name_prefix="decode")
        pending: collections.deque[tuple[Batch, list[Future[None]]]] = collections.deque()
        try:
            for rows, transform in plan:
                pending.append(self._start(pool, rows, transform))
                if len(pending) > self.prefetch:
                    yield self._finish(*pending.popleft())
            while pending:
                yield self._finish(*pending.popleft())
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _finish(self, batch: Batch, jobs: list[Future[None]]) -> Batch:
        start = time.perf_counter()
        for job in jobs:
            job.result()
        self.input_wait_seconds += time.perf_counter() - start
        return batch


class TrainBatches(_Batches):
    """The training batches of one task, over all its epochs.

    Iterating yields `Batch` after `Batch` from `start_step`, counted over all epochs, to the end
    of the last epoch. Each epoch visits every image once; its last batch is padded.
    """

    def __init__(
        self,
        source: Source,
        indices: Int[np.ndarray, " n"],
        labels: Int[np.ndarray, " n"] | None,
        batch_size: int,
        seed: int,
        task: int,
        *,
        image_size: int,
        epochs: int = 1,
        start_step: int = 0,
        crop_scale: tuple[float, float] = images.CROP_SCALE,
        flip: bool = True,
        workers: int | None = None,
        prefetch: int = 4,
        own_rows: Bool[np.ndarray, " b"] | None = None,
        decoded: ByteCache | None = None,
    ):
        """Prepares the batches; nothing is read before iteration.

        Args:
            source: where the images are.
            indices: images of the task, as indices into `source`.
            labels: label per entry of `indices`; None takes the labels of `source`.
            batch_size: rows of every batch.
            seed: training seed, 0 or more.
            task: index of the task, from 0.
            image_size: side of the images in pixels.
            epochs: number of passes.
            start_step: steps already taken, over all epochs.
            crop_scale: share of an image's area that a crop may cover.
            flip: whether images are mirrored half the time.
            workers: decoding threads; None for one per core.
            prefetch: batches decoded ahead of the consumer.
            own_rows: the rows of every batch that this process decodes; None for all.
            decoded: keeps decoded images as they are before any transform, for later passes.

        Raises:
            InputError: no image, or an argument out of its range.
        """
        super().__init__(
            source, indices, labels, batch_size, image_size, workers, prefetch, own_rows, decoded
        )
        for name, value in [("seed", seed), ("task", task), ("start_step", start_step)]:
            if value < 0:
                raise InputError(f"{name} must be 0 or more, found {value}")
        if len(self.indices) == 0:
            raise InputError(f"{source.name}, task {task}: no training image")
        self.seed = seed
        self.task = task
        self.epochs = epochs
        self.start_step = start_step
        self.crop_scale = crop_scale
        self.flip = flip

    @property
    def steps_per_epoch(self) -> int:
        """Number of batches of one epoch."""
        return -(-len(self.indices) // self.batch_size)

    @property
    def num_steps(self) -> int:
        """Number of batches of all epochs, whatever `start_step`."""
        return self.epochs * self.steps_per_epoch

    def __len__(self) -> int:
        return max(0, self.num_steps - self.start_step)

    def __iter__(self) -> Iterator[Batch]:
        return self._run(self._plan())

    def _plan(self):
        epoch = -1
        for step in range(self.start_step, self.num_steps):
            if step // self.steps_per_epoch != epoch:
                epoch = step // self.steps_per_epoch
                n = len(self.indices)
                order = epoch_permutation(n, self.seed, self.task, epoch)
                transform = self._transform(epoch_uniforms(n, self.seed, self.task, epoch))
            start = (step % self.steps_per_epoch) * self.batch_size
            yield order[start : start + self.batch_size], transform

    def _transform(self, uniforms: Float[np.ndarray, "n k"]):
        def transform(row: int) -> UInt8[np.ndarray, "s s 3"]:
            index = int(self.indices[row])
            return images.train_transform(
                self._image(index), self.image_size, uniforms[row], self.crop_scale, self.flip
            )

        return transform


class EvaluationBatches(_Batches):
    """Images with the test transform, in the order given, the last batch padded."""

    def __init__(
        self,
        source: Source,
        indices: Int[np.ndarray, " n"],
        labels: Int[np.ndarray, " n"] | None,
        batch_size: int,
        *,
        image_size: int,
        workers: int | None = None,
        prefetch: int = 4,
        cache: ByteCache | None = None,
        own_rows: Bool[np.ndarray, " b"] | None = None,
        decoded: ByteCache | None = None,
    ):
        """Prepares the batches; nothing is read before iteration.

        Args:
            source: where the images are.
            indices: images to show, as indices into `source`.
            labels: label per entry of `indices`; None takes the labels of `source`.
            batch_size: rows of every batch.
            image_size: side of the images in pixels.
            workers: decoding threads; None for one per core.
            prefetch: batches decoded ahead of the consumer.
            cache: keeps transformed images for later passes; may be shared between sources.
            own_rows: the rows of every batch that this process decodes; None for all.
            decoded: keeps decoded images as they are before any transform, for later passes.

        Raises:
            InputError: an argument out of its range.
        """
        super().__init__(
            source, indices, labels, batch_size, image_size, workers, prefetch, own_rows, decoded
        )
        self.cache = cache

    def __len__(self) -> int:
        return -(-len(self.indices) // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        rows = np.arange(len(self.indices))
        starts = range(0, len(rows), self.batch_size)
        return self._run((rows[i : i + self.batch_size], self._transform) for i in starts)

    def _transform(self, row: int) -> UInt8[np.ndarray, "s s 3"]:
        index = int(self.indices[row])
        key = (self.source.name, self.source.split, self.image_size, index)
        found = None if self.cache is None else self.cache.get(key)
        if found is None:
            found = images.evaluation_transform(self._image(index), self.image_size)
            if self.cache is not None:
                self.cache.put(key, found, found.nbytes)
        return found


def evaluation_images(
    source: Source,
    indices: Int[np.ndarray, " n"],
    image_size: int,
    *,
    workers: int | None = None,
    cache: ByteCache | None = None,
) -> UInt8[np.ndarray, "n s s 3"]:
    """Returns all images of `indices` with the test transform, in one array."""
    batches = EvaluationBatches(
        source, indices, None, 64, image_size=image_size, workers=workers, cache=cache
    )
    result = np.empty((len(batches.indices), image_size, image_size, 3), np.uint8)
    for i, batch in enumerate(batches):
        rows = result[i * 64 : (i + 1) * 64]
        rows[:] = batch.images[: len(rows)]
    return result
