"""The set-up that all seeds of a configuration share."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool

from fdc_jax import calibration, learners
from fdc_jax.data import sources, task_stream
from fdc_jax.data.batches import ByteCache
from fdc_jax.errors import InputError
from fdc_jax.features.extraction import Extractor, FeatureCache
from fdc_jax.learners import Learner, training
from fdc_jax.machine import devices, processes
from fdc_jax.machine.checkpoint import Checkpoints
from fdc_jax.machine.devices import Mesh
from fdc_jax.machine.files import check_writable_folder, private_folder, user_cache
from fdc_jax.model import vit, weights
from fdc_jax.run import configuration, schema
from fdc_jax.run.configuration import Config


@dataclasses.dataclass(frozen=True)
class Encoders:
    """Network, learner and pretrained weights, from which all encoders of a run follow."""

    config: Config  # with the sizes that a file of weights states
    learner: Learner  # its `setup` has network, numbers of classes and devices
    pretrained: weights.Weights  # of E_0
    backbone: Any  # the same on the devices
    extract: Extractor
    cache: Path  # folder that runs share


@dataclasses.dataclass(frozen=True)
class Setup(Encoders):
    """Everything that a run needs except its seed."""

    tasks: task_stream.TaskStream
    update: training.Update
    schedule: Callable[[int, int], Any]  # factor on the rates of an epoch, from 0, and their number
    epochs: list[int]  # of each task
    first_steps: list[int]  # training steps of all tasks before each one, and of all
    evaluated: list[bool]  # whether test images are scored after each task
    own_rows: dict[str, Bool[np.ndarray, " n"]]  # of a training or evaluation batch, this process's
    pretrained_features: FeatureCache
    test_images: ByteCache  # memory for decoded ones


def build(
    config: Config, quiet: bool = False, known: task_stream.Known = task_stream.NOTHING
) -> Setup:
    """Returns the set-up of a configuration, after all checks that need data or weights.

    Args:
        config: the configuration, which is valid.
        quiet: show no download.
        known: the classes that a resumed run knows.

    Raises:
        InputError: configuration, data or weights are not as expected.
    """
    _check_rank(config, recognise(config))
    tasks = open_images(config, known, quiet)
    _check_neighbours(config, tasks)
    if not config.train.epochs:
        config.train.epochs = epochs_for(len(tasks.train_indices[0]))
    encoders = build_encoders(config, tasks.planned, quiet)
    train, update = config.train, encoders.learner.update()
    counts = [len(indices) for indices in tasks.train_indices]
    epochs = [train.first_epochs or train.epochs, *[train.epochs] * (len(counts) - 1)]
    steps = [n * -(-count // train.batch_size) for n, count in zip(epochs, counts, strict=True)]
    mesh, every = encoders.learner.setup.mesh, config.evaluation.every
    sizes = {section: config[section].batch_size for section in ("train", "evaluation")}
    return Setup(
        **vars(encoders),
        tasks=tasks,
        update=update,
        schedule=update.schedule
        or functools.partial(training.learning_rate_factor, train.schedule),
        epochs=epochs,
        first_steps=[0, *itertools.accumulate(steps)],
        evaluated=[*(task % every == 0 for task in range(1, len(counts))), True],
        own_rows={name: devices.own_rows(mesh, size) for name, size in sizes.items()},
        pretrained_features=_pretrained_features(encoders, tasks),
        test_images=ByteCache(int(config.data.cache_gib * 2**30)),
    )


def open_images(
    config: Config, known: task_stream.Known = task_stream.NOTHING, quiet: bool = True
) -> task_stream.TaskStream:
    """Returns the images of a configuration, divided into tasks; raises InputError."""
    data = config.data
    splits = sources.open_splits(
        config.benchmark,
        cache_folder(config),
        source=data.source,
        data_dir=data.dir,
        test_share=data.test_share,
        workers=data.workers,
        quiet=quiet,
    )
    fields = ("classes_per_task", "class_order", "class_order_seed", "num_tasks")
    limits = {name: data[name] for name in ("train_per_class", "test_per_class")}
    return task_stream.build(*splits, known, **{name: config[name] for name in fields}, **limits)


def epochs_for(num_images: int) -> int:
    """Returns the number of epochs for tasks of so many images: 20, the paper's, for thousands."""
    return 40 if num_images <= 1000 else 20 if num_images <= 5000 else 10


def build_encoders(config: Config, classes_per_task: Sequence[int], quiet: bool = True) -> Encoders:
    """Returns the parts of a set-up that need no image.

    Args:
        config: the configuration.
        classes_per_task: number of classes of each task, also of those that follow later.
        quiet: show no download.

    Raises:
        InputError: configuration or weights are not as expected.
    """
    encoder, mesh, variant = config.encoder, devices.data_mesh(), recognise(config)
    kind = (config.data.input_range, config.precision, encoder.attention)
    model = vit.build(variant, encoder.image_size, *kind, cudnn=devices.have_cudnn(mesh))
    cache = cache_folder(config)
    devices.keep_programs(cache)
    wanted = encoder.weights, encoder.variant, cache, not quiet
    # A download is the first process's alone where all share a cache.
    processes.on_first(lambda: str(weights.locate(*wanted)))()
    pretrained = weights.load(weights.locate(*wanted), variant, encoder.image_size)
    return Encoders(
        config=config,
        learner=make_learner(config, model, classes_per_task, mesh),
        pretrained=pretrained,
        backbone=devices.replicate(mesh, pretrained.params),
        extract=Extractor(model, mesh),
        cache=cache,
    )


def make_learner(
    config: Config, model: vit.VisionTransformer, classes_per_task: Sequence[int], mesh: Mesh
) -> Learner:
    """Returns the learner of a configuration.

    Raises:
        InputError: the learner does not exist, or its options contradict each other.
    """
    train, chosen = config.train, config.learner
    setup = training.LearnerSetup(
        model=model,
        image_size=config.encoder.image_size,
        classes_per_task=tuple(classes_per_task),
        benchmark=config.benchmark,
        native=chosen.preset == "native",
        rank=train.rank,
        epochs=train.epochs,
        increment_learning_rate=train.increment_learning_rate,
        head_learning_rate=train.head_learning_rate,
        schedule=train.schedule,
        mesh=mesh,
    )
    return learners.make(chosen.name, setup, chosen.get(learners.section(chosen.name)))


def recognise(config: Config) -> vit.Variant:
    """Returns the architecture, and puts the sizes that a file states into the configuration."""
    encoder = config.encoder
    encoder.variant, variant = weights.recognise(encoder.weights, encoder.variant, encoder.heads)
    encoder.image_size = encoder.image_size or variant.image_size
    return variant


def cache_folder(config: Config) -> Path:
    """Returns the folder of downloads, compiled programs and features of E_0."""
    if not config.cache_dir:
        return user_cache()
    cache = Path(config.cache_dir).expanduser()
    check_writable_folder("config.cache_dir", cache)
    return private_folder(cache)


def _pretrained_features(encoders: Encoders, tasks: task_stream.TaskStream) -> FeatureCache:
    """Returns the cache of E_0's features, with everything that they depend on as its key."""
    fields = configuration.flatten(encoders.config)
    named = ("precision", "data.input_range", "evaluation.batch_size")
    of_encoder = {name for name in fields if name.startswith("encoder.")} - {"encoder.weights"}
    settings = {name: fields[name] for name in (*named, *of_encoder)}
    settings["encoder.attention"] = encoders.learner.setup.model.attention
    computed = {"devices": devices.describe(), "jax": jax.__version__}
    described = {"architecture": architecture(encoders)}
    depend_on = checksums(encoders, tasks) | settings | computed | described
    return FeatureCache(encoders.cache / "features", depend_on)


# Checks before any work ---------------------------------------------------------------------------


def _check_neighbours(config: Config, tasks: task_stream.TaskStream) -> None:
    """Raises InputError if FDC would raise it after a training."""
    fewest = min(len(set(tasks.train.labels[rows])) for rows in tasks.train_indices)
    known = (calibration.METHODS[name].settings for name in configuration.calibrators(config))
    if config.fdc.neighbours > fewest and any("neighbours" in settings for settings in known):
        raise InputError(
            f"config.fdc.neighbours: expected at most {fewest}, the classes with images of the "
            f"smallest task, found {config.fdc.neighbours}"
        )


def _check_rank(config: Config, variant: vit.Variant) -> None:
    """Raises InputError if increments are wider than the encoder."""
    if config.train.rank > variant.width:
        raise InputError(
            f"config.train.rank: expected at most {variant.width}, the width of encoder "
            f"{config.encoder.variant}, found {config.train.rank}"
        )


# Properties of a set-up ---------------------------------------------------------------------------


def architecture(encoders: Encoders) -> dict[str, Any]:
    """Returns the architecture of the encoder as JSON values."""
    fields = dataclasses.asdict(encoders.learner.setup.variant)
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()
    }


def checksums(encoders: Encoders, tasks: task_stream.TaskStream) -> dict[str, str]:
    """Returns the checksums of weights and images, by name."""
    return {
        "weights sha256": encoders.pretrained.sha256,
        "training images sha256": tasks.train.checksum,
        "test images sha256": tasks.test.checksum,
    }


def trained_parameters(encoders: Encoders) -> int:
    """Returns the number of parameters that a task trains."""
    learner = encoders.learner

    def start(backbone):
        return learner.start_task(backbone, learner.initial_state(), 0, jax.random.key(0))

    _, trained = jax.eval_shape(start, encoders.backbone)
    return sum(leaf.size for leaf in jax.tree.leaves(trained))


# The learner's state on the devices ---------------------------------------------------------------


def first_state(learner: Learner) -> Any:
    """Returns the state before the first task."""
    return devices.replicate(learner.setup.mesh, learner.initial_state())


def start_task(
    learner: Learner, update: training.Update, backbone: Any, state: Any, task: int, seed: int
) -> tuple[Any, Any, Any]:
    """Returns the frozen and the trained arrays of a task, and the optimiser's state."""
    key = jax.random.fold_in(jax.random.key(seed), task)
    started = learner.start_task(backbone, state, task, key)
    # Every step reads these, so that none of them may stay on the host.
    mesh = learner.setup.mesh
    frozen, trained = devices.replicate(mesh, jax.tree.map(jnp.asarray, started))
    return frozen, trained, devices.replicate(mesh, update.initialise(trained))


def accept(learner: Learner, state: Any, new: Any, question: str) -> Any:
    """Returns a learner's new state on the devices; checks that its form is the old one."""
    learners.check_state(learner.section(), question, state, new)
    return devices.replicate(learner.setup.mesh, new)


def heads(learner: Learner, state: Any, num_tasks: int) -> list[Any]:
    """Returns the heads of the first tasks as arrays of the host."""
    return devices.to_host(learner.heads(state, num_tasks)) if num_tasks else []


def checkpoints(
    encoders: Encoders, folder: Checkpoints, seed: int
) -> Iterator[tuple[int, dict[str, Any], dict[str, Any]]]:
    """Yields number, cursor and tree of every usable checkpoint, newest first.

    Trees of a run that knew of fewer tasks have slots for those of now.
    """
    learner, backbone = encoders.learner, encoders.backbone

    def form(cursor: dict[str, Any], of: Learner) -> dict[str, Any]:
        tree = {"state": first_state(of)}
        if cursor["step"]:
            given = backbone, tree["state"], cursor["tasks_done"], seed
            _, tree["trained"], tree["optimizer"] = start_task(of, of.update(), *given)
        return tree

    def planned(cursor: dict[str, Any]) -> Learner:
        known = tuple(cursor["classes_per_task"])
        of_then = dataclasses.replace(learner.setup, classes_per_task=known)
        return dataclasses.replace(learner, setup=of_then)

    def target(cursor: dict[str, Any]) -> dict[str, Any]:
        schema.check(cursor, schema.Cursor)
        if cursor["tasks_done"] + bool(cursor["step"]) > len(cursor["classes_per_task"]):
            raise InputError("tasks_done: expected no more than the tasks")
        return form(cursor, planned(cursor))

    for number, cursor, tree in folder.newest(target):
        if planned(cursor).setup.classes_per_task != learner.setup.classes_per_task:
            grown = training.in_slots(tree, form(cursor, learner))
            tree = devices.replicate(learner.setup.mesh, grown)
        yield number, cursor, tree
