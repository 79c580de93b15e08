"""The images of one run: batches to train on, features to fit and to score."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from jaxtyping import Float

from fdc_jax import devices
from fdc_jax.data.batches import Batch, EvaluationBatches, TrainBatches
from fdc_jax.features import Extraction
from fdc_jax.learners import training
from fdc_jax.model import vit
from fdc_jax.preparation import Experiment


class RunImages:
    """The images of one run: batches to train on, features in both views to fit and to score.

    Args:
        experiment: images, encoder, devices.
        seed: of augmentations and their order.
        poll: called before each batch that is not a training step's; raises to stop.
    """

    def __init__(self, experiment: Experiment, seed: int, poll: Callable[[], None]):
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

    def previous_features(self, task: int, kernels: Any) -> Extraction:
        """Returns features of a task's training images by the encoder before the task.

        Where memory allows, the images stay decoded for the task.
        """
        e, indices = self._experiment, self._experiment.tasks.train_indices[task]
        batches = e.evaluation_batches(e.tasks.train, indices, decoded=self._decoded)
        return e.extract(e.backbone, [kernels], batches, self._poll)[0]

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
