"""The set-up that all seeds of a configuration share."""

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from msgspec import structs

from fdc_jax import calibration, learners
from fdc_jax.data import sources
from fdc_jax.data.batches import ByteCache
from fdc_jax.data.task_stream import NONE_LEARNED, LearnedClasses, TaskStream
from fdc_jax.data.task_stream import build as build_tasks
from fdc_jax.errors import InputError
from fdc_jax.features.extraction import Extractor, FeatureCache
from fdc_jax.learners import Learner, training
from fdc_jax.machine import devices, processes
from fdc_jax.machine.conversion import convert
from fdc_jax.machine.devices import Mesh
from fdc_jax.machine.files import check_writable_folder, named_path, private_folder, user_cache
from fdc_jax.model import vit, weights
from fdc_jax.run import configuration
from fdc_jax.run.config import Config
from fdc_jax.run.configuration import CLASSES, PLANNED, Content


@dataclasses.dataclass(frozen=True)
class Encoders:
    """Network, learner and pretrained weights, from which all encoders of a run follow."""

    config: Config  # with the sizes that the weights file states
    learner: Learner  # its `setup` has network, numbers of classes and devices
    pretrained: weights.Weights  # of E_0
    backbone: Any  # parameters of E_0, on the devices
    extract: Extractor
    cache: Path  # folder shared by all runs


@dataclasses.dataclass(frozen=True)
class Setup(Encoders):
    """Everything that a run needs except its seed."""

    tasks: TaskStream
    update: training.Update
    schedule: Callable[[int, int], Any]  # (epoch from 0, epochs) -> factor on learning rates
    epochs: int  # of every task
    first_steps: list[int]  # number of steps before each task; at the end, of all tasks
    evaluated: list[bool]  # True for tasks after which test images are scored
    train_batches: dict[str, Any]  # arguments of `TrainBatches`
    evaluation_batches: dict[str, Any]  # arguments of `EvaluationBatches`
    pretrained_view: bool  # True if features of E_0 are needed
    pretrained_features: FeatureCache
    test_images: ByteCache  # decoded test images


def build(config: Config, quiet: bool = False, known: LearnedClasses = NONE_LEARNED) -> Setup:
    """Returns the set-up of a valid configuration, after all checks that need data or weights.

    `known` are the classes that a resumed run knows.

    Raises:
        InputError: configuration, data or weights are not as expected.
    """
    config, variant = recognise(config)
    _check_sizes(config, variant)  # before images are read, which may take long
    tasks = open_images(config, known, quiet)
    _check_sizes(config, variant, tasks)
    config = configuration.changed(config, data={"grey_bits": tasks.train.grey_bits})
    if not config.train.epochs:
        # The paper trains for 20 epochs, on thousands of images a task.
        count = len(tasks.train_indices[0])
        epochs = 40 if count <= 1000 else 20 if count <= 5000 else 10
        config = configuration.changed(config, train={"epochs": epochs})
    return _complete(build_encoders(config, tasks.planned, quiet), tasks)


def untrained(setup: Setup) -> Setup:
    """Returns the set-up of class Gaussians on the frozen encoder, for the same images."""
    base, names = setup.learner.setup, setup.config.calibrator_names
    names = [name for name in names if calibration.METHODS[name].gives_confidence]
    config = structs.replace(
        configuration.changed(setup.config, learner={"name": "frozen"}),
        calibrators=",".join(names),
        log="",
        untrained=False,
        save_features=False,
    )
    learner = make_learner(config, base.model, base.classes_per_task, base.mesh)
    parts = {field.name: getattr(setup, field.name) for field in dataclasses.fields(Encoders)}
    encoders = Encoders(**parts | {"config": config, "learner": learner})
    return dataclasses.replace(_complete(encoders, setup.tasks), test_images=setup.test_images)


def _complete(encoders: Encoders, tasks: TaskStream) -> Setup:
    config, learner = encoders.config, encoders.learner
    train, data, update = config.train, config.data, learner.update()
    epochs = train.epochs if learner.trains else 0
    steps = [epochs * -(-len(indices) // train.batch_size) for indices in tasks.train_indices]

    def batches(size: int, **options: Any) -> dict[str, Any]:
        options |= {"image_size": config.encoder.image_size, "workers": data.workers}
        own_rows = devices.own_rows(learner.setup.mesh, size)
        return options | {"batch_size": size, "own_rows": own_rows}

    return Setup(
        **vars(encoders),
        tasks=tasks,
        update=update,
        schedule=update.schedule or training.SCHEDULES[train.schedule],
        epochs=epochs,
        first_steps=[0, *itertools.accumulate(steps)],
        evaluated=[*(n % config.evaluation.every == 0 for n in range(1, len(steps))), True],
        train_batches=batches(train.batch_size, crop_scale=data.crop_scale, flip=data.flip),
        evaluation_batches=batches(config.evaluation.batch_size),
        pretrained_view=learner.trains and config.fdc.pretrained_view_weight > 0,
        pretrained_features=_pretrained_features(encoders, tasks),
        test_images=ByteCache(int(data.cache_gib * 2**30)),
    )


def open_images(
    config: Config, known: LearnedClasses = NONE_LEARNED, quiet: bool = True
) -> TaskStream:
    """Returns the images of a configuration, divided into tasks; raises InputError."""
    data = config.data
    splits = sources.open_splits(
        config.benchmark,
        cache_folder(config),
        source=data.source,
        data_dir=data.dir,
        test_share=data.test_share,
        allow_overlap=data.allow_overlap,
        grey_bits=data.grey_bits,
        workers=data.workers,
        quiet=quiet,
    )
    sizes = config.classes_per_task
    if learners.find(config.learner.name).joint:
        sizes = (len(splits[0].class_names),)
    return build_tasks(
        *splits,
        known,
        classes_per_task=sizes,
        class_order=config.class_order,
        class_order_seed=config.class_order_seed,
        num_tasks=config.num_tasks,
        train_per_class=data.train_per_class,
        test_per_class=data.test_per_class,
        validation_share=data.validation_share,
    )


def build_encoders(config: Config, classes_per_task: Sequence[int], quiet: bool = True) -> Encoders:
    """Returns the parts of a set-up that need no image; raises InputError.

    `classes_per_task` has the number of classes of every task, planned tasks included.
    """
    config, variant = recognise(config)
    mesh, cache, encoder = devices.data_mesh(), cache_folder(config), config.encoder
    devices.keep_programs(cache)
    location = encoder.weights, encoder.variant, cache, not quiet
    # If processes share a cache, only the first one downloads.
    processes.on_first(lambda: str(weights.locate(*location)))()
    pretrained = weights.load(weights.locate(*location), variant, encoder.image_size)
    model = build_model(config, mesh)
    return Encoders(
        config=config,
        learner=make_learner(config, model, classes_per_task, mesh),
        pretrained=pretrained,
        backbone=devices.replicate(mesh, pretrained.params),
        extract=Extractor(model, mesh),
        cache=cache,
    )


def build_model(config: Config, mesh: Mesh) -> vit.VisionTransformer:
    """Returns the encoder of a configuration, without weights."""
    config, variant = recognise(config)
    encoder = config.encoder
    settings = config.data.input_range, config.precision, encoder.attention
    return vit.build(variant, encoder.image_size, *settings, cudnn=devices.have_cudnn(mesh))


def make_learner(
    config: Config, model: vit.VisionTransformer, classes_per_task: Sequence[int], mesh: Mesh
) -> Learner:
    """Returns the learner of a configuration; raises InputError."""
    train, name = config.train, config.learner.name
    native = config.learner.preset == "native"
    sizes = tuple(classes_per_task)
    setup = training.LearnerSetup(
        model=model,
        image_size=config.encoder.image_size,
        classes_per_task=sizes,
        benchmark=config.benchmark,
        native=native,
        rank=train.rank,
        epochs=train.epochs,
        increment_learning_rate=train.increment_learning_rate,
        head_learning_rate=train.head_learning_rate,
        schedule=train.schedule,
        mesh=mesh,
    )
    options = getattr(config.learner, learners.section(name), None)  # None without options
    return learners.find(name)(setup, **structs.asdict(options) if options else {})


def recognise(config: Config) -> tuple[Config, vit.Variant]:
    """Returns `config` with the sizes that the weights file states, and the architecture."""
    encoder = config.encoder
    name, variant = weights.recognise(encoder.weights, encoder.variant, encoder.heads)
    sizes = {"variant": name, "image_size": encoder.image_size or variant.image_size}
    return configuration.changed(config, encoder=sizes), variant


def cache_folder(config: Config) -> Path:
    """Returns the folder of downloads, compiled programs and features of E_0."""
    if not config.cache_dir:
        return user_cache()
    cache = named_path("config.cache_dir", config.cache_dir)
    check_writable_folder("config.cache_dir", cache)
    return private_folder(cache)


def _pretrained_features(encoders: Encoders, tasks: TaskStream) -> FeatureCache:
    """Returns the cache of E_0's features, with everything that they depend on as its key."""
    fields = configuration.flatten(encoders.config)
    settings = {name: value for name, value in fields.items() if name.startswith("encoder.")}
    del settings["encoder.weights"]
    for name in ("precision", "data.input_range", "evaluation.batch_size"):
        settings[name] = fields[name]
    settings |= {"devices": devices.description(), "jax": jax.__version__}
    settings["encoder.attention"] = encoders.learner.setup.model.attention
    settings["architecture"] = architecture(encoders)
    return FeatureCache(encoders.cache / "features", checksums(encoders, tasks) | settings)


def _check_sizes(config: Config, variant: vit.Variant, tasks: TaskStream | None = None) -> None:
    """Raises InputError if a number exceeds the encoder, the memory or a task."""
    options = (calibration.METHODS[name].settings for name in config.calibrator_names)
    limits = [("train.rank", variant.width, f"the width of encoder {config.encoder.variant}")]
    # Of every image a step keeps at least its pixels and, in 16 bits, the inputs of the blocks.
    memory, side = devices.total_memory(), config.encoder.image_size
    tokens = (side // variant.patch) ** 2
    for field, blocks in (("train.batch_size", variant.depth), ("evaluation.batch_size", 1)):
        most = memory // (3 * side**2 + 2 * blocks * tokens * variant.width)
        limits.append((field, most, f"as {memory / 2**30:,.1f} GiB of memory hold no more"))
    if tasks and any("neighbours" in settings for settings in options):
        fewest = min(len({*tasks.train.labels[rows]}) for rows in tasks.train_indices)
        limits += [("fdc.neighbours", fewest, "the classes with images of the smallest task")]
    for field, limit, reason in limits:
        if (value := configuration.flatten(config)[field]) > limit:
            raise InputError(f"config.{field}: expected at most {limit}, {reason}, found {value}")


# Properties of a set-up ---------------------------------------------------------------------------


def architecture(encoders: Encoders) -> dict[str, Any]:
    """Returns the architecture of the encoder as JSON values."""
    return json.loads(json.dumps(dataclasses.asdict(encoders.learner.setup.variant)))


def checksums(encoders: Encoders, tasks: TaskStream) -> dict[str, str]:
    """Returns the checksums of weights and images, by name."""
    return {
        "weights sha256": encoders.pretrained.sha256,
        "training images sha256": tasks.train.checksum,
        "test images sha256": tasks.test.checksum,
    }


def run_content(setup: Setup) -> Content:
    """Returns the weights, images and classes of a set-up."""
    classes = {CLASSES: setup.tasks.class_checksums, PLANNED: setup.tasks.planned}
    return convert(checksums(setup, setup.tasks) | classes, Content)


def trained_parameters(encoders: Encoders) -> int:
    """Returns the number of parameters that a task trains."""
    learner = encoders.learner
    if not learner.trains:
        return 0

    def start_task(backbone):
        return learner.start_task(backbone, learner.initial_state(), 0, jax.random.key(0))

    with learners.noted(type(learner), "start_task"):
        _, trained = jax.eval_shape(start_task, encoders.backbone)
    return sum(leaf.size for leaf in jax.tree.leaves(trained))


# The learner's state on the devices ---------------------------------------------------------------


def first_state(learner: Learner) -> Any:
    """Returns the state before the first task."""
    return devices.replicate(learner.setup.mesh, learner.initial_state())


def start_task(
    learner: Learner, update: training.Update, backbone: Any, state: Any, task: int, seed: int
) -> tuple[Any, Any, Any]:
    """Returns the frozen and the trained arrays of a task, and the optimiser's state.

    Raises:
        InputError: `after_task` will return a state of another form, as far as no image tells.
    """
    key = jax.random.fold_in(jax.random.key(seed), task)
    mesh = learner.setup.mesh
    with learners.noted(type(learner), "start_task"):
        started = learner.start_task(backbone, state, task, key)
        # Every step reads these, so that none of them may stay on the host.
        frozen, trained = devices.replicate(mesh, jax.tree.map(jnp.asarray, started))

    def after_task(backbone, state, frozen, trained, images: Any = None):
        return learner.after_task(backbone, state, task, frozen, trained, images)

    new = state
    with contextlib.suppress(Exception):  # It reads images, or computes on the host: checked later.
        new = jax.eval_shape(after_task, backbone, state, frozen, trained)
    learners.check_state(learner.section(), "after_task", state, new)
    return frozen, trained, devices.replicate(mesh, update.initialise(trained))


def checked_state(learner: Learner, state: Any, new: Any, method: str) -> Any:
    """Returns a learner's new state on the devices; raises InputError if its form has changed."""
    learners.check_state(learner.section(), method, state, new)
    return devices.replicate(learner.setup.mesh, new)


def heads(learner: Learner, state: Any, num_tasks: int) -> list[Any]:
    """Returns the heads of the first tasks as arrays of the host."""
    return devices.to_host(learner.heads(state, num_tasks)) if num_tasks else []
