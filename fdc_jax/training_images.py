"""The training images of a run on the devices: augmented for its steps, plain for its moments."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from fdc_jax import devices
from fdc_jax.data.batches import ByteCache, EvaluationBatches, TrainBatches
from fdc_jax.learners import training
from fdc_jax.preparation import Experiment


class TrainingImages:
    """Batches of each task's images.

    Args:
        experiment: images and devices.
        seed: of augmentations and their order.
        decoded: where the decoded images of the current task are kept.
        poll: called before each batch that a learner asks for; raises to stop.
    """

    def __init__(
        self, experiment: Experiment, seed: int, decoded: ByteCache, poll: Callable[[], None]
    ):
        self._experiment, self._seed, self._decoded, self._poll = experiment, seed, decoded, poll

    def batches(self, task: int, **options: Any) -> TrainBatches:
        """Returns augmented batches of a task, from 0, before they are placed.

        Args:
            task: from 0.
            options: `epochs` and `start_step` of `TrainBatches`.
        """
        e, config = self._experiment, self._experiment.config
        return TrainBatches(
            e.tasks.train,
            e.tasks.train_indices[task],
            self._labels(task),
            config.train.batch_size,
            self._seed,
            task,
            image_size=config.encoder.image_size,
            crop_scale=tuple(config.data.crop_scale),
            flip=config.data.flip,
            workers=e.workers,
            own_rows=devices.own_rows(e.mesh, config.train.batch_size),
            decoded=self._decoded,
            **options,
        )

    def of_task(self, task: int) -> training.TaskImages:
        """Returns what a learner may look at before and after the steps of a task."""
        e = self._experiment

        def plain() -> EvaluationBatches:
            return e.evaluation_batches(
                e.tasks.train,
                e.tasks.train_indices[task],
                labels=self._labels(task),
                decoded=self._decoded,
            )

        return training.TaskImages(
            augmented=lambda: self._placed(self.batches(task)),
            plain=lambda: self._placed(plain()),
        )

    def place(self, batch: Any) -> Any:
        """Puts a batch on the devices."""
        return devices.split(self._experiment.mesh, batch)

    def _placed(self, batches: Iterable[Any]) -> Iterator[Any]:
        for batch in batches:
            self._poll()
            yield self.place(batch)

    def _labels(self, task: int) -> Any:
        tasks = self._experiment.tasks
        return tasks.train_labels(task) - tasks.first_position[task]
