"""Estimates of the hours and GiB of a run, by finished runs of its kind or a timed training step.

Work is counted in passes: an image in a training step counts one, an image that is encoded without
gradients counts half. Learners state what their steps and their other passes count.
"""

import dataclasses
import io
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from fdc_jax import learners
from fdc_jax.data import benchmarks
from fdc_jax.data.batches import Batch, TrainBatches
from fdc_jax.learners import Learner
from fdc_jax.machine import devices
from fdc_jax.model import vit
from fdc_jax.run import configuration
from fdc_jax.run import setup as setups
from fdc_jax.run.config import Config
from fdc_jax.run.records import Record, Results
from fdc_jax.run.setup import Setup

_TIMED_SECONDS = 3.0  # duration of the timed training steps, which follow a step that compiles
_PHOTOGRAPH = 500, 375  # pixels of a typical photograph
_LOADED_IMAGES = 64
_FEW_IMAGES = 4  # images of a timed step on a CPU, whose speed depends little on their number
# Parts of a run's time, under their names in `results.json`; those of calibrators are by name.
_PARTS = """
training compile adapted_extraction pretrained_extraction previous_extraction test_extraction
fit score extraction_compile fit_compile
""".split()


class Size(NamedTuple):
    """The numbers of images and tasks of a run."""

    train: int
    test: int
    tasks: int


class Machine(NamedTuple):
    """Facts about this machine, by a process that uses its devices."""

    seconds: float | None  # per pass, loading included; None if it was not timed
    state_bytes: dict[Any, int]  # of a learner's state, by the key of its configuration
    width: int  # of the encoder's features
    device: str  # number and kind of the devices
    platform: str  # cpu, gpu or tpu
    chips: int  # devices that a process can have for itself


def planned_task_sizes(config: Config) -> tuple[int, ...]:
    """Returns the number of classes of each task of a benchmark, also beyond `num_tasks`."""
    benchmark = benchmarks.BENCHMARKS[config.benchmark]
    name, count = benchmark.name, benchmark.num_classes
    return benchmarks.task_sizes(name, count, config.classes_per_task)


def size(config: Config) -> Size:
    """Returns the size of a run on a benchmark, from the table of benchmarks."""
    benchmark = benchmarks.BENCHMARKS[config.benchmark]
    data = config.data
    sizes = planned_task_sizes(config)[: config.num_tasks or None]
    share = sum(sizes) / benchmark.num_classes

    def images(count: int, limit: int) -> int:
        return round(share * min(count, limit * benchmark.num_classes or count))

    learned = 1 - data.validation_share
    train = round(learned * images(benchmark.num_train, data.train_per_class))
    return Size(train, images(sum(benchmark.task_test_counts), data.test_per_class), len(sizes))


def passes(fields: Mapping[str, Any], size: Size) -> float:
    """Returns the number of passes of a run, from its size and the fields of its configuration."""
    learner = learners.imported(fields["learner.name"])
    interval = fields["evaluation.every"]
    evaluated = [n for n in range(1, size.tasks + 1) if n % interval == 0 or n == size.tasks]
    # The calibrators need two views of every training image.
    of_image = (fields["train.epochs"] or 20) * learner.step_passes + learner.extra_passes + 1
    return of_image * size.train + 0.5 * size.test * sum(evaluated) / size.tasks


def seconds_per_pass(results: Results) -> float | None:
    """Returns the seconds of a pass of a finished run; None if its times are unknown."""
    if results.timing is None or results.num_train_images is None:
        return None
    parts = [getattr(results.timing, f"{part}_seconds") for part in _PARTS]
    size = Size(results.num_train_images, results.num_test_images, results.num_tasks)
    return sum(jax.tree.leaves(parts)) / passes(results.config, size)


def disk(config: Config, size: Size, state_bytes: int, width: int) -> int:
    """Returns the approximate bytes of the features, checkpoints and calibrators of a run."""
    features = 4 * width * (3 * size.train + 2 * size.test) if config.save_features else 0
    # Checkpoints and the finished run have calibrators, mostly the scatters of tasks.
    calibrators = (config.checkpoint.keep + 1) * size.tasks * 4 * width**2
    return features + config.checkpoint.keep * state_bytes + calibrators


def kind(config: Config) -> tuple[Any, ...]:
    """Returns the fields that the speed depends on most."""
    return config.encoder.variant, config.encoder.image_size, config.precision


def cost(config: Config) -> int:
    """Returns the approximate cost of an image, for comparison with other encoders and sizes."""
    config, variant = setups.recognise(config)
    return variant.depth * variant.width**2 * (config.encoder.image_size // variant.patch) ** 2


def machine(configs: Mapping[Any, Config], timed: bool) -> Machine:
    """Measures this machine by the first learner with random weights, without data or downloads.

    Takes the memory of the devices, so that it should have its own process. All configurations are
    of one `kind`; their keys may be anything. On processors, steps are timed only if `timed`.
    """
    mesh, built = devices.data_mesh(), {}
    for key, config in configs.items():
        model = setups.build_model(config, mesh)
        built[key] = setups.make_learner(config, model, planned_task_sizes(config), mesh)
    first = mesh.devices.flat[0]
    key, learner = next(iter(built.items()))
    seconds = None
    if timed or first.platform != "cpu":
        seconds = max(_seconds_of_step(configs[key], learner), _seconds_of_loading(configs[key]))
    # Two devices of an older TPU share a chip.
    chips = {getattr(device, "coords", device.id) for device in mesh.local_devices}
    return Machine(
        seconds,
        state_bytes={key: state_bytes(learner) for key, learner in built.items()},
        width=learner.setup.variant.width,
        device=devices.description(),
        platform=first.platform,
        chips=len(chips),
    )


def _seconds_of_step(config: Config, learner: Learner) -> float:
    """Returns the seconds of a pass, from training steps with random weights."""
    rng = np.random.default_rng(0)
    model: Any = learner.setup.model
    backbone = jax.tree.map(
        lambda leaf: jnp.asarray(0.02 * rng.standard_normal(leaf.shape, np.float32)),
        vit.parameter_shapes(model, config.encoder.image_size),
    )
    backbone = devices.replicate(learner.setup.mesh, backbone)
    return seconds_of_pass(config, learner, backbone)


def _seconds_of_loading(config: Config) -> float:
    """Returns the seconds per photograph of the threads that decode and crop in a run."""
    colours = np.random.default_rng(0).integers(0, 256, (15, 20, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(colours).resize(_PHOTOGRAPH).save(file, "JPEG")
    from fdc_jax.data import digits  # The import takes a second.

    train, _ = digits.open_digits()
    photographs = dataclasses.replace(train, read=lambda index: file.getvalue())
    data = config.data
    labels = train.labels[:_LOADED_IMAGES]
    batches = TrainBatches(
        photographs,
        np.arange(_LOADED_IMAGES),
        labels,
        batch_size=_LOADED_IMAGES // 2,
        image_size=config.encoder.image_size,
        workers=data.workers,
        seed=0,
        task=0,
        epochs=1,
        crop_scale=data.crop_scale,
        flip=data.flip,
    )
    clock = time.perf_counter()
    for _ in batches:
        pass
    return (time.perf_counter() - clock) / _LOADED_IMAGES


def state_bytes(learner: Learner) -> int:
    """Returns the bytes of a learner's state, which a checkpoint keeps."""
    leaves = jax.tree.leaves(jax.eval_shape(learner.initial_state))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def seconds_of_pass(config: Config, learner: Learner, backbone: Any) -> float:
    """Returns the seconds of a pass, from training steps of the first task."""
    mesh, update, side = learner.setup.mesh, learner.update(), config.encoder.image_size
    images, rng = config.train.batch_size, np.random.default_rng(0)
    if mesh.devices.flat[0].platform == "cpu":
        images = min(images, _FEW_IMAGES * mesh.size)
    pixels = rng.integers(0, 256, (images, side, side, 3), np.uint8)
    labels = (np.arange(images) % learner.setup.classes_per_task[0]).astype(np.int32)
    batch = devices.split(mesh, Batch(pixels, labels, np.ones(images, np.float32)))
    state = setups.first_state(learner)
    frozen, *carried = setups.start_task(learner, update, backbone, state, 0, seed=0)
    rate = update.schedule(0, config.train.epochs or 20) if update.schedule else 1.0
    clock, steps = 0.0, -1  # The first step compiles.
    while steps < 1 or (time.perf_counter() - clock < _TIMED_SECONDS and steps < 20):
        *carried, loss = update.step(backbone, frozen, *carried, batch, rate)
        loss.block_until_ready()
        steps += 1
        clock = clock or time.perf_counter()
    return (time.perf_counter() - clock) / steps / images / learner.step_passes


def seconds_after(setup: Setup, records: Sequence[Record], tasks_done: int = 0) -> float:
    """Returns the approximate seconds of the remaining tasks, from records of a frozen encoder."""
    batch = setup.config.evaluation.batch_size
    seconds = min(  # per image, padding included; the first task compiles
        (record.timing.adapted_extraction_seconds or 0.0)
        / (-(-len(setup.tasks.train_indices[record.task]) // batch) * batch)
        for record in records
    )
    images = [*map(len, setup.tasks.train_indices)]
    left = sum(images[tasks_done:]) / sum(images)
    return 2 * seconds * left * passes(configuration.flatten(setup.config), _size(setup))


def _size(setup: Setup) -> Size:
    tasks = setup.tasks
    return Size(sum(map(len, tasks.train_indices)), len(tasks.test_indices), len(tasks.tasks))


def time_and_memory(setup: Setup, num_seeds: int) -> str:
    """Returns the line of a set-up with the time and the GiB of a seed."""
    config, learner, size = setup.config, setup.learner, _size(setup)
    image = seconds_of_pass(config, learner, setup.backbone)
    seconds = image * passes(configuration.flatten(config), size)
    gib = disk(config, size, state_bytes(learner), learner.setup.variant.width) / 2**30
    more = f" for each of {num_seeds} seeds" if num_seeds > 1 else ""
    return f"needs      about {duration(seconds)} and {max(gib, 0.01):,.2f} GiB{more}"


def duration(seconds: float) -> str:
    """Returns a time as text in hours, minutes or seconds."""
    if seconds < 60:
        return f"{max(seconds, 1):.0f} s"
    if seconds < 3600:
        return f"{seconds / 60:.1f} min"
    hours = seconds / 3600
    return f"{hours:.1f} h" if hours < 100 else f"{hours:,.0f} h"
