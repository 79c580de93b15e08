"""What goes into a run: what the seeds of a configuration share, and the images of one seed."""

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from fdc_jax import calibration, learners
from fdc_jax.data import task_stream
from fdc_jax.data.batches import Batch, ByteCache, EvaluationBatches, TrainBatches
from fdc_jax.errors import InputError
from fdc_jax.features.extraction import Extraction, Extractor, FeatureCache
from fdc_jax.learners import training
from fdc_jax.machine import devices, processes
from fdc_jax.machine.checkpoint import Checkpoints
from fdc_jax.machine.files import check_writable_folder
from fdc_jax.model import vit, weights
from fdc_jax.run import configuration
from fdc_jax.run.configuration import Config


class Experiment:
    """What the seeds of one configuration share; checked before any work.

    Args:
        config: the configuration.
        quiet: show no download.
        classes_per_task: number of classes of each task, also of those that follow later, where
            data need not be at hand.
        known: what a run that goes on knows of its classes.

    Raises:
        InputError: configuration, data or weights are not as expected.
    """

    def __init__(
        self,
        config: Config,
        quiet: bool = False,
        classes_per_task: tuple[int, ...] | None = None,
        known: task_stream.Known = task_stream.NOTHING,
    ):
        configuration.validate(config)
        self.config, encoder = config, config.encoder
        # What a file of weights says itself stands in the configuration from here on.
        encoder.variant, variant = weights.recognise(encoder.weights, encoder.variant)
        encoder.image_size = size = encoder.image_size or variant.image_size
        configuration.check_rank(config, variant)
        data = config.data
        self.mesh = devices.data_mesh()
        kind = (data.input_range, config.precision, encoder.attention)
        model = vit.build(variant, size, *kind, cudnn=devices.have_cudnn(self.mesh))
        _check_memory(config, variant)
        cache = Path(config.cache_dir).expanduser() if config.cache_dir else weights.cache_folder()
        if config.cache_dir:
            check_writable_folder("config.cache_dir", cache)
        self._cache, self._known, self._quiet = cache, known, quiet
        jax.config.update("jax_compilation_cache_dir", str(cache / "compiled"))
        is_opened = classes_per_task is not None
        classes_per_task = classes_per_task or self.tasks.planned
        self.num_tasks = config.num_tasks or len(classes_per_task)
        wanted = encoder.weights, encoder.variant, cache, not quiet
        # A download is the first process's alone where all share a cache.
        processes.on_first(lambda: str(weights.locate(*wanted)))()
        path = weights.locate(*wanted)
        self.pretrained = weights.load(path, variant, size)
        self.setup = training.Setup(model, classes_per_task, config, self.mesh)
        self.learner = learners.make(self.setup)
        self.update = self.learner.update()
        self.backbone = devices.replicate(self.mesh, self.pretrained.params)
        self.extract = Extractor(model, self.mesh)
        self.test_images = ByteCache(int(data.cache_gib * 2**30))
        if not is_opened:
            self._check_calibrator()

    def _check_calibrator(self) -> None:
        """Refuses what FDC would refuse after a training."""
        present = [len(set(self.tasks.train.labels[rows])) for rows in self.tasks.train_indices]
        try:
            calibration.check(self.config.fdc.to_dict(), present)
        except InputError as error:
            raise InputError(f"config.fdc.{error}") from error

    @functools.cached_property
    def tasks(self) -> task_stream.TaskStream:
        """The images, divided into tasks."""
        return task_stream.open_stream(self.config, self._cache, self._known, self._quiet)

    @functools.cached_property
    def pretrained_features(self) -> FeatureCache:
        """Features of E_0, which depend on nothing else than these."""
        settings = {
            field: value
            for field, value in self.fields.items()
            if field in ("precision", "data.input_range", "evaluation.batch_size")
            or (field.startswith("encoder.") and field != "encoder.weights")
        }
        settings["encoder.attention"] = self.setup.model.attention
        computed = {"devices": devices.describe(), "jax": jax.__version__}
        depend_on = self.checksums | settings | computed | {"architecture": self.architecture}
        return FeatureCache(self._cache / "features", depend_on)

    @property
    def architecture(self) -> dict[str, Any]:
        """What the weights alone do not say of the encoder; JSON values."""
        fields = dataclasses.asdict(self.setup.variant)
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in fields.items()
        }

    @property
    def fields(self) -> dict[str, Any]:
        """The configuration by field, such as `train.rank`."""
        return configuration.flatten(self.config)

    @property
    def selected(self) -> str:
        """The components that the paper enables for the learner."""
        return learners.selected(self.config.learner.name)

    @property
    def checksums(self) -> dict[str, str]:
        """What a run depends on besides its configuration, by name."""
        return {
            "weights sha256": self.pretrained.sha256,
            "training images sha256": self.tasks.train.checksum,
            "test images sha256": self.tasks.test.checksum,
        }

    @property
    def uses_pretrained(self) -> bool:
        """Whether FDC has a pretrained view."""
        return self.config.fdc.pretrained_view_weight > 0

    @property
    def trained_parameters(self) -> int:
        """Number of parameters that a task trains."""

        def start(backbone):
            state = self.learner.initial_state()
            return self.learner.start_task(backbone, state, 0, jax.random.key(0))

        _, trained = jax.eval_shape(start, self.backbone)
        return sum(leaf.size for leaf in jax.tree.leaves(trained))

    def evaluates_after(self, task: int) -> bool:
        """Tells whether test images are scored after a task."""
        return self.config.evaluation.every_task or task + 1 == self.num_tasks

    def epochs(self, task: int) -> int:
        """Passes over the images of one task."""
        train = self.config.train
        return train.first_epochs if task == 0 and train.first_epochs else train.epochs

    def steps_before(self, task: int) -> int:
        """Training steps of all tasks before one."""
        size = self.config.train.batch_size
        counts = [len(indices) for indices in self.tasks.train_indices[:task]]
        return sum(self.epochs(t) * -(-count // size) for t, count in enumerate(counts))

    def place(self, tasks_done: int, step: int) -> int:
        """Returns the number of a checkpoint after whole tasks and steps of the next one."""
        return self.steps_before(tasks_done) + step + tasks_done

    def rate(self, epoch: int, epochs: int) -> Any:
        """Returns the factor on the learning rates in an epoch, counted from 0."""
        if self.update.schedule is not None:
            return self.update.schedule(epoch, epochs)
        return training.learning_rate_factor(self.config.train.schedule, epoch, epochs)

    def start(
        self, state: Any, task: int, seed: int, learner: learners.Learner | None = None
    ) -> tuple[Any, Any, Any]:
        """Returns what stays frozen in a task, what is trained, and the optimiser's state."""
        key = jax.random.fold_in(jax.random.key(seed), task)
        started = (learner or self.learner).start_task(self.backbone, state, task, key)
        # Every step reads these, so that none of them may stay on the host.
        frozen, trained = devices.replicate(self.mesh, jax.tree.map(jnp.asarray, started))
        return frozen, trained, devices.replicate(self.mesh, self.update.initialise(trained))

    def accept(self, state: Any, new: Any, question: str) -> Any:
        """Returns a learner's new state on the devices, if it is of the form of the old one."""
        learners.check_state(self.config.learner.name, question, state, new)
        return devices.replicate(self.mesh, new)

    def heads(self, state: Any, num_tasks: int) -> list[Any]:
        """Returns the heads of the first tasks as arrays of the host."""
        heads = self.learner.heads(state, num_tasks) if num_tasks else []
        return devices.to_host(heads)

    def first_state(self, learner: learners.Learner | None = None) -> Any:
        """Returns the learner's state before the first task, on the devices."""
        return devices.replicate(self.mesh, (learner or self.learner).initial_state())

    def checkpoints(
        self, folder: Checkpoints, seed: int
    ) -> Iterator[tuple[int, dict[str, Any], dict[str, Any]]]:
        """Yields number, cursor and tree of every usable checkpoint, newest first.

        Trees of a run that knew of fewer tasks have slots for those of now.
        """

        def form(cursor: dict[str, Any], learner: learners.Learner) -> dict[str, Any]:
            tree = {"state": self.first_state(learner)}
            if cursor["step"]:
                _, tree["trained"], tree["optimizer"] = self.start(
                    tree["state"], cursor["tasks_done"], seed, learner
                )
            return tree

        def learner_of(cursor: dict[str, Any]) -> learners.Learner:
            planned = tuple(cursor.get("classes_per_task", self.setup.classes_per_task))
            setup = dataclasses.replace(self.setup, classes_per_task=planned)
            return dataclasses.replace(self.learner, setup=setup)

        found = folder.newest(lambda cursor: form(cursor, learner_of(cursor)))
        for number, cursor, tree in found:
            if learner_of(cursor).setup.classes_per_task != self.setup.classes_per_task:
                grown = training.in_slots(tree, form(cursor, self.learner))
                tree = devices.replicate(self.mesh, grown)
            yield number, cursor, tree

    def evaluation_batches(
        self, source, indices, labels=None, **caches: ByteCache
    ) -> EvaluationBatches:
        """Images in evaluation preprocessing, with the labels of the source unless others come."""
        return EvaluationBatches(
            source,
            indices,
            labels,
            self.config.evaluation.batch_size,
            image_size=self.config.encoder.image_size,
            workers=self.config.data.workers or None,
            own_rows=devices.own_rows(self.mesh, self.config.evaluation.batch_size),
            **caches,
        )


def _check_memory(config: Config, variant: vit.Variant) -> None:
    """Refuses batches whose pixels and tokens, in training of every block, exceed the memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    side = config.encoder.image_size
    tokens = (side // variant.patch) ** 2 * variant.width
    for section, copies in (("train", variant.depth), ("evaluation", 1)):
        size = config[section].batch_size
        needed = size * (3 * side**2 + 4 * tokens * copies)
        if needed > memory:
            raise InputError(
                f"config.{section}.batch_size: expected batches that fit into memory, found "
                f"{size:,} images, which take {needed / 2**30:,.0f} GiB with "
                f"{memory / 2**30:.0f} GiB here"
            )


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
