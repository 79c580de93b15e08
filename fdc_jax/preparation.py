"""Before any work: checks configuration, data and weights, and builds what all seeds share."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax

from fdc_jax import configuration, devices, learners, processes
from fdc_jax.configuration import Config
from fdc_jax.data import batches, benchmarks, dataset, task_stream
from fdc_jax.extraction import Extractor, FeatureCache
from fdc_jax.files import check_writable_folder
from fdc_jax.learners import training
from fdc_jax.model import vit, weights


@dataclasses.dataclass(frozen=True)
class Experiment:
    """What the seeds of one configuration share."""

    config: Config
    setup: training.Setup
    learner: Any
    update: training.Update
    mesh: Any
    backbone: Any
    pretrained: weights.Weights
    tasks: task_stream.TaskStream
    extract: Extractor
    test_images: batches.ByteCache
    pretrained_features: FeatureCache

    @property
    def trained_parameters(self) -> int:
        """Number of parameters that the largest task trains."""
        _, trained = jax.eval_shape(
            lambda backbone: self.learner.start(
                self.setup,
                backbone,
                self.learner.initial_state(self.setup),
                0,
                jax.random.key(0),
            ),
            self.backbone,
        )
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(trained))

    @property
    def workers(self) -> int | None:
        """Decoding threads."""
        return self.config.data.workers or None

    def steps(self, task: int) -> int:
        """Training steps of one task."""
        images = len(self.tasks.train_indices[task])
        return self.epochs(task) * -(-images // self.config.train.batch_size)

    def epochs(self, task: int) -> int:
        """Passes over the images of one task."""
        train = self.config.train
        return train.first_epochs if task == 0 and train.first_epochs else train.epochs

    def evaluation_batches(
        self, source, indices, cache=None, labels=None, decoded=None
    ) -> batches.EvaluationBatches:
        """Images in evaluation preprocessing, with the labels of the source unless others come."""
        return batches.EvaluationBatches(
            source,
            indices,
            labels,
            self.config.evaluation.batch_size,
            image_size=self.config.encoder.image_size,
            workers=self.workers,
            cache=cache,
            own_rows=devices.own_rows(self.mesh, self.config.evaluation.batch_size),
            decoded=decoded,
        )


def prepare(config: Config, quiet: bool = False) -> Experiment:
    """Checks the configuration, the data and the weights, and builds what all seeds share.

    Raises:
        InputError: something is not as expected; no work has been done then.
    """
    configuration.validate(config)
    benchmark = benchmarks.find(config.benchmark)
    learner = learners.find(config.learner.name)
    model = vit.build(
        config.encoder.variant,
        config.encoder.image_size,
        config.data.input_range,
        config.precision,
        config.encoder.attention,
    )
    cache_folder = (
        Path(config.cache_dir).expanduser() if config.cache_dir else weights.cache_folder()
    )
    if config.cache_dir:
        check_writable_folder("config.cache_dir", cache_folder)
    devices.use_compilation_cache(cache_folder / "compiled")
    data_dir = dataset.data_folder(config.data.dir)
    tasks = task_stream.build(
        benchmark,
        dataset.open_dataset(config.benchmark, "train", data_dir, cache_folder),
        dataset.open_dataset(config.benchmark, "test", data_dir, cache_folder),
        config.class_order_seed,
        config.classes_per_task,
        config.data.train_per_class,
        config.data.test_per_class,
    )

    def locate() -> Path:
        return weights.locate(
            config.encoder.weights, config.encoder.variant, cache_folder, not quiet
        )

    # A download is the first process's alone where all share a cache.
    processes.on_first(lambda: str(locate()))
    path = locate()
    pretrained = weights.load(path, config.encoder.variant, config.encoder.image_size)
    setup = training.Setup(model, tasks.classes_per_task, config)
    mesh = devices.data_mesh()
    features_depend_on = {
        "weights": pretrained.sha256,
        "train": tasks.train.checksum,
        "test": tasks.test.checksum,
        "variant": config.encoder.variant,
        "image_size": config.encoder.image_size,
        "input_range": config.data.input_range,
        "precision": config.precision,
        "attention": config.encoder.attention,
        "batch_size": config.evaluation.batch_size,
        "devices": devices.describe(),
        "jax": jax.__version__,
    }
    return Experiment(
        config=config,
        setup=setup,
        learner=learner,
        update=learner.update(setup),
        mesh=mesh,
        backbone=devices.replicate(mesh, pretrained.params),
        pretrained=pretrained,
        tasks=tasks,
        extract=Extractor(model, mesh),
        test_images=batches.ByteCache(int(config.data.cache_gib * 2**30)),
        pretrained_features=FeatureCache(cache_folder / "features", features_depend_on),
    )
