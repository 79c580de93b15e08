"""What the seeds of one configuration share, checked before any work."""

import dataclasses
import functools
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from fdc_jax import calibration, configuration, devices, learners, processes
from fdc_jax.configuration import Config
from fdc_jax.data import batches, benchmarks, dataset, task_stream
from fdc_jax.errors import InputError
from fdc_jax.features import Extractor, FeatureCache
from fdc_jax.files import check_writable_folder
from fdc_jax.heads import FunctionHead
from fdc_jax.learners import training
from fdc_jax.model import vit, weights


class Experiment:
    """What the seeds of one configuration share; checked before any work.

    Args:
        config: the configuration.
        quiet: show no download.
        classes_per_task: number of classes of each task, where data need not be at hand.

    Raises:
        InputError: configuration, data or weights are not as expected.
    """

    def __init__(
        self, config: Config, quiet: bool = False, classes_per_task: tuple[int, ...] | None = None
    ):
        configuration.validate(config)
        self.config, encoder = config, config.encoder
        self.learner = learners.find(config.learner.name)
        # What a file of weights says itself stands in the configuration from here on.
        encoder.variant, variant = weights.recognise(encoder.weights, encoder.variant)
        encoder.image_size = size = encoder.image_size or variant.image_size
        configuration.check_rank(config, variant)
        data = config.data
        model = vit.build(variant, size, data.input_range, config.precision, encoder.attention)
        _check_memory(config, variant)
        cache = Path(config.cache_dir).expanduser() if config.cache_dir else weights.cache_folder()
        if config.cache_dir:
            check_writable_folder("config.cache_dir", cache)
        self._cache = cache
        jax.config.update("jax_compilation_cache_dir", str(cache / "compiled"))
        known = classes_per_task is not None
        classes_per_task = classes_per_task or self.tasks.classes_per_task
        wanted = encoder.weights, encoder.variant, cache, not quiet
        # A download is the first process's alone where all share a cache.
        processes.on_first(lambda: str(weights.locate(*wanted)))()
        path = weights.locate(*wanted)
        self.pretrained = weights.load(path, variant, size)
        self.setup = training.Setup(model, classes_per_task, config)
        self.update = self.learner.update(self.setup)
        self.mesh = devices.data_mesh()
        self.backbone = devices.replicate(self.mesh, self.pretrained.params)
        self.extract = Extractor(model, self.mesh)
        self.test_images = batches.ByteCache(int(data.cache_gib * 2**30))
        if not known:
            self._check_calibrator()

    def _check_calibrator(self) -> None:
        """Refuses what FDC would refuse after a training."""
        present = [len(set(self.tasks.train.labels[rows])) for rows in self.tasks.train_indices]
        head = self.heads(self.learner.initial_state(self.setup), 1)[0]
        is_function = isinstance(head, FunctionHead)
        try:
            calibration.check(self.config.fdc.to_dict(), present, is_function)
        except InputError as error:
            raise InputError(f"config.fdc.{error}") from error
        if is_function and self.config.save_features:
            raise InputError(
                f"config.save_features: expected False, as the heads of {self.config.learner.name} "
                "are functions, which no file can hold"
            )

    @functools.cached_property
    def tasks(self) -> task_stream.TaskStream:
        """The images, divided into tasks."""
        config, folder = self.config, dataset.data_folder(self.config.data.dir)
        return task_stream.build(
            benchmarks.find(config.benchmark, folder),
            task_stream.open_dataset(config.benchmark, "train", folder, self._cache),
            task_stream.open_dataset(config.benchmark, "test", folder, self._cache),
            class_order_seed=config.class_order_seed,
            class_order=config.class_order,
            classes_per_task=config.classes_per_task,
            train_per_class=config.data.train_per_class,
            test_per_class=config.data.test_per_class,
        )

    @functools.cached_property
    def pretrained_features(self) -> FeatureCache:
        """Features of E_0, which depend on nothing else than these."""
        settings = {
            field: value
            for field, value in configuration.flatten(self.config).items()
            if field in ("precision", "data.input_range", "evaluation.batch_size")
            or (field.startswith("encoder.") and field != "encoder.weights")
        }
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
            state = self.learner.initial_state(self.setup)
            return self.learner.start(self.setup, backbone, state, 0, jax.random.key(0))

        _, trained = jax.eval_shape(start, self.backbone)
        return sum(leaf.size for leaf in jax.tree.leaves(trained))

    def evaluates_after(self, task: int) -> bool:
        """Tells whether test images are scored after a task."""
        return self.config.evaluation.every_task or task + 1 == self.setup.num_tasks

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

    def start(self, state: Any, task: int, seed: int) -> tuple[Any, Any, Any]:
        """Returns what stays frozen in a task, what is trained, and the optimiser's state."""
        key = jax.random.fold_in(jax.random.key(seed), task)
        started = self.learner.start(self.setup, self.backbone, state, task, key)
        # Every step reads these, so that none of them may stay on the host.
        frozen, trained = devices.replicate(self.mesh, jax.tree.map(jnp.asarray, started))
        return frozen, trained, devices.replicate(self.mesh, self.update.initialise(trained))

    def accept(self, state: Any, new: Any, question: str) -> Any:
        """Returns a learner's new state on the devices, if it is of the form of the old one."""
        learners.check_state(self.config.learner.name, question, state, new)
        return devices.replicate(self.mesh, new)

    def heads(self, state: Any, num_tasks: int) -> list[Any]:
        """Returns the heads of the first tasks as arrays of the host."""
        return devices.to_host(self.learner.heads(self.setup, state, num_tasks))

    def first_state(self) -> Any:
        """Returns the learner's state before the first task, on the devices."""
        return devices.replicate(self.mesh, self.learner.initial_state(self.setup))

    def checkpoint(self, cursor: dict[str, Any], seed: int) -> dict[str, Any]:
        """Returns a tree of the form of the checkpoint that a cursor belongs to."""
        tree = {"state": self.first_state()}
        if cursor["step"]:
            _, tree["trained"], tree["optimizer"] = self.start(
                tree["state"], cursor["tasks_done"], seed
            )
        return tree

    def evaluation_batches(
        self, source, indices, labels=None, **caches: batches.ByteCache
    ) -> batches.EvaluationBatches:
        """Images in evaluation preprocessing, with the labels of the source unless others come."""
        return batches.EvaluationBatches(
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
