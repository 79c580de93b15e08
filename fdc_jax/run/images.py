"""The images of one run: batches to train on, features in all views to fit and to score."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from fdc_jax.data.batches import Batch, ByteCache, EvaluationBatches, TrainBatches
from fdc_jax.features.extraction import Extraction
from fdc_jax.learners import training
from fdc_jax.machine import devices
from fdc_jax.model import vit
from fdc_jax.run.setup import Setup


class Views(NamedTuple):
    """Features of the same images by E_t and by E_0; those of E_0 are None if not needed."""

    adapted: Extraction
    pretrained: Extraction | None

    @property
    def arrays(self) -> tuple[Float[np.ndarray, "n d"], Float[np.ndarray, "n e"] | None]:
        """Returns the features alone."""
        return self.adapted.features, self.pretrained and self.pretrained.features


class RunImages:
    """The images of one run.

    Args:
        setup: images, encoder and devices.
        seed: of augmentations and their order.
        poll: called before each batch that is not a training step's; raises to stop.
    """

    def __init__(self, setup: Setup, seed: int, poll: Callable[[], None]):
        self._setup, self._seed, self._poll = setup, seed, poll
        self._mesh = setup.learner.setup.mesh
        # Training images of the current task, in the memory that test images leave.
        self._decoded = setup.test_images.beside()

    def batches(self, task: int, epochs: int = 1, start_step: int = 0) -> TrainBatches:
        """Returns the augmented batches of a task from a step on, before they are placed."""
        tasks, config = self._setup.tasks, self._setup.config
        return TrainBatches(
            tasks.train,
            tasks.train_indices[task],
            tasks.train_labels(task) - tasks.first_position[task],
            config.train.batch_size,
            self._seed,
            task,
            image_size=config.encoder.image_size,
            epochs=epochs,
            start_step=start_step,
            crop_scale=tuple(config.data.crop_scale),
            flip=config.data.flip,
            workers=config.data.workers,
            own_rows=self._setup.own_rows["train"],
            decoded=self._decoded,
        )

    def of_task(self, task: int) -> training.TaskImages:
        """Returns the images that a learner may use before and after the steps of a task."""
        tasks = self._setup.tasks

        def placed(batches: Iterable[Batch]) -> Iterator[Batch]:
            for batch in batches:
                self._poll()
                yield devices.split(self._mesh, batch)

        def plain() -> EvaluationBatches:
            labels = tasks.train_labels(task) - tasks.first_position[task]
            indices = tasks.train_indices[task]
            return self._evaluation(tasks.train, indices, labels, decoded=self._decoded)

        return training.TaskImages(
            augmented=lambda: placed(self.batches(task)), plain=lambda: placed(plain())
        )

    def previous_features(self, task: int, encoder: Any) -> Extraction:
        """Returns features of a task's training images by the encoder before the task.

        If memory allows, the images stay decoded for the task.
        """
        tasks = self._setup.tasks
        indices = tasks.train_indices[task]
        return self._extract(tasks.train, indices, [encoder], decoded=self._decoded)[0]

    def train_features(self, task: int, encoder: Any) -> Views:
        """Returns features of a task's training images (Algorithm 1, line 4).

        Those of E_0 are kept for other seeds and learners; the decoded images are forgotten.
        """
        setup, name, encoders = self._setup, f"train_{task:03d}", [encoder]
        indices, cache = setup.tasks.train_indices[task], setup.pretrained_features
        wanted = setup.config.fdc.pretrained_view_weight > 0
        pretrained = cache.find(name, indices) if wanted else None
        if wanted and pretrained is None:
            encoders.append(vit.pretrained_kernels(setup.backbone))
        adapted, *new = self._extract(setup.tasks.train, indices, encoders, decoded=self._decoded)
        for pretrained in new:
            cache.keep(name, indices, pretrained)
        self._decoded.clear()
        return Views(adapted, pretrained)

    def test_features(self, count: int, encoder: Any) -> Views:
        """Returns features of the first `count` test images (line 14)."""
        setup, every = self._setup, self._setup.tasks.test_indices

        def extract(encoder: Any, indices: np.ndarray) -> Extraction:
            test = setup.tasks.test
            return self._extract(test, indices, [encoder], cache=setup.test_images)[0]

        adapted = extract(encoder, every[:count])
        if setup.config.fdc.pretrained_view_weight == 0:
            return Views(adapted, None)
        pretrained = setup.pretrained_features.find("test", every)
        if pretrained is None:
            pretrained = extract(vit.pretrained_kernels(setup.backbone), every)
            setup.pretrained_features.keep("test", every, pretrained)
        return Views(adapted, pretrained._replace(features=pretrained.features[:count]))

    def _extract(
        self, source: Any, indices: np.ndarray, encoders: list[Any], **caches: ByteCache
    ) -> list[Extraction]:
        batches = self._evaluation(source, indices, **caches)
        return self._setup.extract(self._setup.backbone, encoders, batches, self._poll)

    def _evaluation(
        self, source: Any, indices: np.ndarray, labels: Any = None, **caches: ByteCache
    ) -> EvaluationBatches:
        """Images in evaluation preprocessing, with the labels of the source unless others come."""
        config = self._setup.config
        return EvaluationBatches(
            source,
            indices,
            labels,
            config.evaluation.batch_size,
            image_size=config.encoder.image_size,
            workers=config.data.workers,
            own_rows=self._setup.own_rows["evaluation"],
            **caches,
        )
