"""From images to features: batches on the devices, and features of any encoder E_t.

What depends on the images and the pretrained weights alone, the features of E_0, is kept on disk.
"""

import collections
import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float

from fdc_jax import devices, files, processes
from fdc_jax.data.batches import Batch, EvaluationBatches, TrainBatches
from fdc_jax.errors import InputError
from fdc_jax.learners import training
from fdc_jax.model import vit
from fdc_jax.model.vit import VisionTransformer

if TYPE_CHECKING:
    from fdc_jax.experiment import Experiment

# Batches whose features may be on the device before the oldest is fetched.
_IN_FLIGHT = 2


class Extraction(NamedTuple):
    """Features and what they cost."""

    features: Float[np.ndarray, "n d"]
    seconds: float
    input_wait_seconds: float
    from_cache: bool = False


class Extractor:
    """Runs encoders over batches of images; compiled once per batch shape.

    Args:
        model: the encoder.
        mesh: devices that share each batch.
    """

    def __init__(self, model: VisionTransformer, mesh: Mesh):
        self._mesh = mesh

        def encode(backbone, images, kernels):
            count, side = images.shape[:2]
            size = vit.images_together(count, side, model.variant.patch)
            if size == count:
                return model.apply({"params": backbone}, images, kernels)
            # In portions, on a processor.
            cut = images.reshape(-1, size, *images.shape[1:])
            return jax.lax.map(lambda part: encode(backbone, part, kernels), cut).reshape(count, -1)

        # Each of several processes gets the features of all.
        self._encode = jax.jit(encode, out_shardings=devices.everywhere(mesh))

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
            views: key and value kernels, one pair per encoder, E_0 to E_T.
            batches: images in evaluation preprocessing.
            poll: called before each batch; raises to stop.
        """
        start = time.perf_counter()
        found = [[np.zeros((0, kernels["key"].shape[-1]), np.float32)] for kernels in views]
        pending: collections.deque = collections.deque()

        def fetch() -> None:
            features, count = pending.popleft()
            for rows, of_view in zip(found, features, strict=True):
                rows.append(np.asarray(of_view)[:count])

        for batch in batches:
            poll()
            images = devices.split(self._mesh, batch.images)
            features = [self._encode(backbone, images, kernels) for kernels in views]
            pending.append((features, int(batch.weights.sum())))
            if len(pending) > _IN_FLIGHT:
                fetch()
        while pending:
            fetch()
        # The views' shares of one pass.
        seconds = (time.perf_counter() - start) / len(views)
        waited = getattr(batches, "input_wait_seconds", 0.0) / len(views)
        return [Extraction(np.concatenate(rows), seconds, waited) for rows in found]


class FeatureCache:
    """Features of the pretrained encoder on disk; they depend on images and weights alone.

    Args:
        folder: where the files lie.
        key: everything that the features depend on; JSON values.
    """

    def __init__(self, folder: str | os.PathLike[str], key: dict[str, Any]):
        text = json.dumps(key, sort_keys=True)
        self._folder = Path(folder) / hashlib.sha256(text.encode()).hexdigest()[:16]
        if not (self._folder / "key.json").exists():
            # A cache that cannot be written costs time, not results.
            with (
                contextlib.suppress(InputError),
                files.write_atomically(self._folder / "key.json") as f,
            ):
                f.write(text.encode())

    def find(self, name: str, indices: np.ndarray) -> Extraction | None:
        """Returns cached features of these images, or None unless every process finds them."""
        start = time.perf_counter()
        found = _read(self._path(name, indices), len(indices))
        if not processes.agreed(found is not None) or found is None:
            return None
        return Extraction(found, time.perf_counter() - start, 0.0, from_cache=True)

    def keep(self, name: str, indices: np.ndarray, extraction: Extraction) -> None:
        """Writes features of these images to the cache."""
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


class RunImages:
    """The images of one run: batches to train on, features in both views to fit and to score.

    Args:
        experiment: images, encoder, devices.
        seed: of augmentations and their order.
        poll: called before each batch that is not a training step's; raises to stop.
    """

    def __init__(self, experiment: "Experiment", seed: int, poll: Callable[[], None]):
        self._experiment, self._seed, self._poll = experiment, seed, poll
        # Training images of the current task, in the memory that test images leave.
        self._decoded = experiment.test_images.beside()

    def batches(self, task: int, epochs: int = 1, start_step: int = 0) -> TrainBatches:
        """Returns the augmented batches of a task from a step on, before they are placed."""
        e, config = self._experiment, self._experiment.config
        return TrainBatches(
            e.tasks.train,
            e.tasks.train_indices[task],
            e.tasks.train_labels(task) - e.tasks.first_position[task],
            config.train.batch_size,
            self._seed,
            task,
            image_size=config.encoder.image_size,
            epochs=epochs,
            start_step=start_step,
            crop_scale=tuple(config.data.crop_scale),
            flip=config.data.flip,
            workers=config.data.workers or None,
            own_rows=devices.own_rows(e.mesh, config.train.batch_size),
            decoded=self._decoded,
        )

    def of_task(self, task: int) -> training.TaskImages:
        """Returns what a learner may look at before and after the steps of a task."""
        e = self._experiment

        def placed(batches: Iterable[Batch]) -> Iterator[Batch]:
            for batch in batches:
                self._poll()
                yield devices.split(e.mesh, batch)

        def plain() -> EvaluationBatches:
            labels = e.tasks.train_labels(task) - e.tasks.first_position[task]
            indices = e.tasks.train_indices[task]
            return e.evaluation_batches(e.tasks.train, indices, labels, decoded=self._decoded)

        return training.TaskImages(
            augmented=lambda: placed(self.batches(task)), plain=lambda: placed(plain())
        )

    def train_features(self, task: int, kernels: Any) -> tuple[Extraction, Extraction | None]:
        """Returns features of a task's training images (Algorithm 1, line 4) in both views.

        Those of E_0, None where FDC does without, are kept for other seeds and learners; the
        decoded images are forgotten.
        """
        e, name = self._experiment, f"train_{task:03d}"
        indices, views, pretrained = e.tasks.train_indices[task], [kernels], None
        if e.uses_pretrained:
            pretrained = e.pretrained_features.find(name, indices)
            if pretrained is None:
                views.append(vit.pretrained_kernels(e.backbone))
        batches = e.evaluation_batches(e.tasks.train, indices, decoded=self._decoded)
        adapted, *others = e.extract(e.backbone, views, batches, self._poll)
        for pretrained in others:
            e.pretrained_features.keep(name, indices, pretrained)
        self._decoded.clear()
        return adapted, pretrained

    def test_features(
        self, count: int, kernels: Any
    ) -> tuple[Extraction, Float[np.ndarray, "n d"] | None]:
        """Returns features of the first `count` test images (line 14) in both views."""
        e, every = self._experiment, self._experiment.tasks.test_indices

        def extract(kernels: Any, indices: np.ndarray) -> Extraction:
            batches = e.evaluation_batches(e.tasks.test, indices, cache=e.test_images)
            return e.extract(e.backbone, [kernels], batches, self._poll)[0]

        adapted = extract(kernels, every[:count])
        if not e.uses_pretrained:
            return adapted, None
        pretrained = e.pretrained_features.find("test", every)
        if pretrained is None:
            pretrained = extract(vit.pretrained_kernels(e.backbone), every)
            e.pretrained_features.keep("test", every, pretrained)
        return adapted, pretrained.features[:count]
