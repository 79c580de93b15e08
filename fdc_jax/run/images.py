"""The images of one run: batches for training, and features of all views for calibrators."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from jaxtyping import Int

from fdc_jax.data.batches import Batch, EvaluationBatches, TrainBatches
from fdc_jax.features.extraction import Extraction
from fdc_jax.learners.training import TaskImages
from fdc_jax.machine import devices
from fdc_jax.model import vit
from fdc_jax.run.setup import Setup

# Features of the same images by E_t and by E_0; those of E_0 are None if not needed.
Views = tuple[Extraction, Extraction | None]


class RunImages:
    """The images of one run.

    Args:
        setup: images, encoder and devices.
        seed: seed of the augmentations and of the order of the images.
        poll: called before every batch outside training steps; raises if a stop is requested.
    """

    def __init__(self, setup: Setup, seed: int, poll: Callable[[], None]):
        self._setup, self._seed, self._poll = setup, seed, poll
        # Decoded training images of the current task share the cache with the test images.
        self._decoded = setup.test_images

    def batches(self, task: int, epochs: int = 1, start_step: int = 0) -> TrainBatches:
        """Returns the augmented batches of a task from a training step on, as NumPy arrays."""
        return TrainBatches(
            *self._labelled(task),
            seed=self._seed,
            task=task,
            epochs=epochs,
            start_step=start_step,
            decoded=self._decoded,
            **self._setup.train_batches,
        )

    def task_images(self, task: int) -> TaskImages:
        """Returns the images that a learner may use before and after the steps of a task."""
        mesh = self._setup.learner.setup.mesh

        def placed(batches: Iterable[Batch]) -> Iterator[Batch]:
            for batch in batches:
                self._poll()
                yield devices.split(mesh, batch)

        labels = self._labelled(task)[2]

        def features(encoder: Any) -> tuple[np.ndarray, np.ndarray]:
            return self.previous_features(task, encoder).features, labels

        def pretrained() -> tuple[np.ndarray, np.ndarray]:
            return self._with_pretrained(task)[0].features, labels

        return TaskImages(
            augmented=lambda: placed(self.batches(task)),
            plain=lambda: placed(self._plain(task)),
            features=features,
            pretrained=pretrained,
        )

    def previous_features(self, task: int, encoder: Any) -> Extraction:
        """Returns E_{t-1}(D_t) of a task; if memory allows, its images stay decoded."""
        return self._extract([encoder], self._plain(task))[0]

    def train_features(self, task: int, encoder: Any) -> Views:
        """Returns features of a task's training images (Algorithm 1, line 4).

        Features of E_0 are cached for other seeds and learners; decoded images leave the memory.
        """
        pretrained = None
        if not self._setup.learner.trains:
            (adapted,) = self._with_pretrained(task)
        elif self._setup.pretrained_view:
            adapted, pretrained = self._with_pretrained(task, encoder)
        else:
            adapted = self.previous_features(task, encoder)
        self._decoded.forget("decoded")
        return adapted, pretrained

    def _with_pretrained(self, task: int, *encoders: Any) -> list[Extraction]:
        """Returns features of a task's training images by encoders, and by E_0 from the cache."""
        setup, cache = self._setup, self._setup.pretrained_features
        key = f"train_{task:03d}", setup.tasks.train_indices[task]
        pretrained = cache.find(*key)
        if pretrained is None:
            both = [*encoders, vit.pretrained_kernels(setup.backbone)]
            *adapted, pretrained = self._extract(both, self._plain(task))
            cache.keep(*key, pretrained)
        else:
            adapted = [self.previous_features(task, encoder) for encoder in encoders]
        return [*adapted, pretrained]

    def test_features(self, count: int, encoder: Any) -> Views:
        """Returns features of the first `count` test images (line 14)."""
        setup, indices = self._setup, self._setup.tasks.test_indices

        def extract(encoder: Any, indices: Int[np.ndarray, " n"]) -> Extraction:
            options = {"cache": setup.test_images, **setup.evaluation_batches}
            batches = EvaluationBatches(setup.tasks.test, indices, None, **options)
            return self._extract([encoder], batches)[0]

        adapted = extract(encoder, indices[:count]) if setup.learner.trains else None
        if adapted and not setup.pretrained_view:
            return adapted, None
        pretrained = setup.pretrained_features.find("test", indices)
        if pretrained is None:
            pretrained = extract(vit.pretrained_kernels(setup.backbone), indices)
            setup.pretrained_features.keep("test", indices, pretrained)
        pretrained = pretrained._replace(features=pretrained.features[:count])
        return (adapted, pretrained) if adapted else (pretrained, None)

    def validation_features(self, encoder: Any) -> Views:
        """Returns features of all validation images, which calibrators do not see."""
        setup, encoders = self._setup, [encoder]
        if setup.pretrained_view:
            encoders.append(vit.pretrained_kernels(setup.backbone))
        images = setup.tasks.train, setup.tasks.validation_indices
        batches = EvaluationBatches(*images, None, **setup.evaluation_batches)
        adapted, *pretrained = self._extract(encoders, batches)
        return adapted, pretrained[0] if pretrained else None

    def _labelled(self, task: int) -> tuple[Any, ...]:
        """Returns a task's training images, their indices, and labels within the task."""
        tasks = self._setup.tasks
        labels = tasks.train_labels(task) - tasks.first_position[task]
        return tasks.train, tasks.train_indices[task], labels

    def _plain(self, task: int) -> EvaluationBatches:
        """Returns a task's training images in evaluation preprocessing."""
        options = {"decoded": self._decoded, **self._setup.evaluation_batches}
        return EvaluationBatches(*self._labelled(task), **options)

    def _extract(self, encoders: list[Any], batches: EvaluationBatches) -> list[Extraction]:
        return self._setup.extract(self._setup.backbone, encoders, batches, self._poll)
