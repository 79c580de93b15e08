"""A tiny encoder, batches of noise and short trainings, for the tests of learners."""

import contextlib
import functools
import re
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import pytest
import scipy.special

from configs import digits
from fdc_jax.data.batches import Batch
from fdc_jax.learners import gaussian_alignment, loda, training
from fdc_jax.learners.second_moments import attention_input_moments
from fdc_jax.machine import devices
from fdc_jax.model import vit
from fdc_jax.run import configuration
from fdc_jax.run import setup as setups
from tests.model import reference
from tests.model.reference import (
    PARTS,
    SIDE,
    TINY,
    float64,
    products,
    random_images,
    random_params,
)
from tests.model.reference import (
    random_like as random_like,
)

MODEL = vit.VisionTransformer(TINY)
RANK = 2
CLASSES = (2, 3, 2)
TWO_IMAGES = 20  # tokens

# Options of learners, no two with the same value.
OPTIONS = {
    "inflora": dict(lamb=0.9998),
    "splitlora": dict(alpha=0.05),
    "ewc_lora": dict(strength=3.0),
    "lora_subtraction": dict(triplet_weight=0.7, margin=1.5),
    "loda": dict(margin=0.15),
    "slca": dict(encoder_rate=0.03, head_rate=0.2, logit_temperature=0.4),
    "e2_lora": dict(encoder_rate=0.03, head_rate=0.02, distillation_weight=0.6),
    "rsiat": dict(scale=4.0, margin=0.3, steering_weight=0.7, projector_width=7)
    | dict(separation_weight=1.5, separation_threshold=0.2)
    | dict(alignment_weight=0.9, repulsion_weight=2.0),
}
# Factors on the learning rates that make a few steps visible.
RATES = dict(rsiat=(100.0, 1.0), inflora_ca=10.0, splitlora=400.0, slca=10.0)
RATE = 100.0


def make_learner(name="cumulative_lora", classes_per_task=CLASSES, **fields):
    """Returns a learner; `fields` are configuration fields with `__` for dots."""
    config = digits.get_config()
    config.learner.name = name
    config.train.rank = RANK
    config.encoder.image_size = SIDE
    config.update_from_flattened_dict(
        {f"learner.{name}.{field}": value for field, value in OPTIONS.get(name, {}).items()}
        | {field.replace("__", "."): value for field, value in fields.items()}
    )
    typed = configuration.typed(config)
    return setups.make_learner(typed, MODEL, classes_per_task, devices.data_mesh())


@functools.cache
def make_backbone():
    """Returns pretrained parameters of which none is constant."""
    return random_params(11)


def make_batch(seed=0, size=4, classes=2, padding=0):
    """Returns images of noise, with `padding` black rows of weight zero at the end."""
    real = np.arange(size) < size - padding
    images = random_images(seed, size) * real[:, None, None, None]
    labels = np.arange(size) % classes * real
    return Batch(images, labels.astype(np.int32), real.astype(np.float32))


def points(seed):
    """Returns Gaussians of all classes without spread."""
    gaussians = gaussian_alignment.empty(3, 3, TINY.width)
    return gaussians._replace(means=random_like(gaussians.means, seed, 1.0))


def shown(batches):
    """Returns images and labels of all batches, those of weight zero left out."""
    images, labels, weights = (np.concatenate(part) for part in zip(*batches, strict=True))
    return images[weights > 0], labels[weights > 0]


def placed(tree):
    """Returns a copy of every leaf, placed as in a run, so that no step is compiled again."""
    sharding = devices.everywhere(devices.data_mesh())
    return jax.tree.map(lambda leaf: devices.put(np.array(leaf), sharding), tree)


def assert_equal(actual, expected):
    """Compares two trees bit for bit."""
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def assert_near(actual, expected, tolerance):
    """Compares two trees: bit for bit, or up to a share of the largest number of a leaf."""

    def compare(one, other):
        scale = max(float(np.abs(other).max(initial=0.0)), 1e-6)
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * scale)

    jax.tree.map(compare, actual, expected)


class Step(NamedTuple):
    """A task of a trajectory; `started` and `trained` are the trained leaves before and after."""

    before: Any
    designed: Any
    frozen: Any
    started: Any
    trained: Any
    images: training.TaskImages
    after: Any


class Reached(Exception):
    """The arguments of the encoder, which a loss has reached."""


class Trajectory(NamedTuple):
    """A learner's way through three tasks.

    Attributes:
        name: the learner's.
        update: its step was compiled for all tasks.
        lines: those of all products in the compiled programs.
    """

    name: str
    learner: Any
    setup: training.LearnerSetup
    update: training.Update
    steps: list[Step]
    lines: list[str]

    def features(self, frozen, trained, images):
        """Returns features as the loss sees them."""
        batch = make_batch(size=len(images))._replace(images=images)

        def reach(model, backbone, images, kernels, increment, *dropout):
            raise Reached(kernels, increment)

        with pytest.MonkeyPatch.context() as patch, pytest.raises(Reached) as encoder:
            patch.setattr(vit, "encode", reach)
            self.learner.loss(make_backbone(), frozen, trained, batch)
        return encode(images, *encoder.value.args)


@contextlib.contextmanager
def products_compiled():
    """Fills a list with the lines of all products in programs compiled in its context."""
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        jax.config.update("jax_dump_ir_to", folder)
        try:
            yield lines
        finally:
            jax.config.update("jax_dump_ir_to", "")
        for path in Path(folder).iterdir():
            text = path.read_text().splitlines()
            lines += [line for line in text if re.search("stablehlo.(dot_general|convol)", line)]


def images_of(task, classes):
    """Returns a task's images, augmented and plain ones that differ; the last one is padding."""

    def batches(seed):
        made = [make_batch(seed + i, size=6, classes=classes, padding=i) for i in range(2)]
        return devices.split(devices.data_mesh(), made)

    augmented, plain = batches(10 * task), batches(10 * task + 5)

    def features(encoder):
        images, labels = shown(plain)
        return encode(images, encoder), labels

    return training.TaskImages(lambda: iter(augmented), lambda: iter(plain), features, None)


@functools.cache
def trajectory(name, classes_per_task=CLASSES):
    """Trains a learner on tasks of noise, once for all tests."""
    learner, backbone = make_learner(name, classes_per_task), make_backbone()
    setup = learner.setup
    update, rate = learner.update(), RATES.get(name, RATE)
    put = functools.partial(devices.replicate, setup.mesh)
    state, steps = put(learner.initial_state()), []
    with products_compiled() as lines, pytest.MonkeyPatch.context() as patch:
        # The encoder is compiled for every size; tests/learners/test_loda_half_steps.py has all.
        patch.setattr(loda, "PART_SIZES", (8,))
        for task, classes in enumerate(classes_per_task):
            images = images_of(task, classes)
            # As in a run: arrays on other devices, or free to move, would compile a step again.
            designed = put(learner.before_task(backbone, state, task, images))
            started = learner.start_task(backbone, designed, task, jax.random.key(task))
            frozen, trained = put(started)
            given, started = jax.tree.map(np.array, ((designed, frozen), trained))
            progress = put(update.initialise(trained))
            for batch in images.augmented():
                trained, progress, _ = update.step(backbone, frozen, trained, progress, batch, rate)
            assert_equal((designed, frozen), given)
            after = put(learner.after_task(backbone, designed, task, frozen, trained, images))
            steps.append(Step(state, designed, frozen, started, trained, images, after))
            state = after
    assert update.step._cache_size() == 1  # One compilation serves all tasks.
    return Trajectory(name, learner, setup, update, steps, lines)


def encoder_calls(monkeypatch):
    """Returns a list of arguments and features of every further call of the encoder."""
    calls, encode = [], vit.encode

    def recorded(*arguments):
        calls.append([*arguments, encode(*arguments)])
        return calls[-1][-1]

    monkeypatch.setattr(vit, "encode", recorded)
    return calls


_encode = jax.jit(functools.partial(vit.encode, MODEL))
NO_INCREMENT = {
    part: {"A": np.zeros((2, 24, RANK), np.float32), "B": np.zeros((2, RANK, 24), np.float32)}
    for part in PARTS
}


def encode(images, kernels=None, increment=None):
    """Returns features of at most twelve images, for all of which the encoder is compiled once."""
    padded = np.resize(images, (12, *images.shape[1:]))
    kernels = kernels or vit.pretrained_kernels(make_backbone())
    given = placed((make_backbone(), padded, kernels, increment or NO_INCREMENT))
    return np.asarray(_encode(*given))[: len(images)]


def input_moments(run, kernels, images):
    """Returns second moments of a task's attention inputs under kernels, in float64."""
    single = placed(jax.tree.map(np.float32, kernels))
    moments, _ = attention_input_moments(run.setup, make_backbone(), single, images.augmented())
    return float64(moments)


def reference_features(images, kernels=None, adapter=None):
    """Returns features in float64 NumPy under other key and value kernels, [l, d, d] each."""
    pretrained = float64(vit.pretrained_kernels(make_backbone()))
    kernels = pretrained if kernels is None else float64(kernels)
    updates = {part: kernels[part] - pretrained[part] for part in PARTS}
    return reference.features(make_backbone(), images, updates=updates, adapter=adapter)


def reference_cross_entropy(features, head, labels, classes):
    """Returns the loss of every image over the first `classes` rows of a head, in float64."""
    weight, bias = float64(head)
    logits = features @ weight[:classes].T + bias[:classes]
    return -scipy.special.log_softmax(logits, axis=1)[np.arange(len(logits)), labels]


def slope(function, arrays, number, direction, step=1e-5):
    """Returns the central difference of a function of float64 arrays, one moved in a direction."""
    values = []
    for distance in (step, -step):
        moved = [*arrays]
        moved[number] = arrays[number] + distance * direction
        values.append(function(moved))
    return (values[0] - values[1]) / (2 * step)


def descent(loss, array, optimizer, rates):
    """Returns a float64 array after a step of the optimizer for every rate."""
    units = np.eye(array.size).reshape(-1, *array.shape)
    for rate in rates:
        slopes = [slope(lambda arrays: loss(*arrays), [array], 0, unit) for unit in units]
        array = array - rate * optimizer(np.reshape(slopes, array.shape), array)
    return array


def features_with(kernels, increment, images):
    """Returns features in float64 NumPy under kernels and an increment."""
    changes = products(increment)
    merged = {part: float64(kernels[part]) + changes[part] for part in PARTS}
    return reference_features(images, merged)


def step(run, frozen, trained, batch, backbone=None):
    """Returns trained leaves, the state of the update and the loss after a first step."""
    frozen, leaves = placed((frozen, trained))
    batch = devices.split(run.setup.mesh, batch)
    progress = placed(run.update.initialise(leaves))
    rate = (1.0, 1.0) if run.name == "rsiat" else 1.0
    return run.update.step(backbone or make_backbone(), frozen, leaves, progress, batch, rate)


def check_loss(run, frozen, trained, loss, classes=2, backbone=None, rtol=2e-3, value_rtol=1e-4):
    """Compares the loss of a batch and its gradients with float64.

    `loss` is a function of float64 leaves, images and labels. The gradients come from the moments
    of the first step, which is compiled. Returns gradients and slopes.
    """
    batch = make_batch(2, size=6, classes=classes, padding=2)
    _, progress, value = step(run, frozen, trained, batch, backbone)
    given = shown([batch])
    np.testing.assert_allclose(value, loss(float64(trained), *given), rtol=value_rtol)
    for moment, share in (("mu", 0.1), ("first", 0.1), ("trace", 1.0)):
        sums = optax.tree.get(progress, moment)
        if sums is not None:
            gradients = jax.tree.map(lambda leaf, s=share: leaf / s, float64(sums))
    return gradients, assert_slopes(lambda leaves: loss(leaves, *given), trained, gradients, rtol)


def assert_slopes(loss, trained, gradients, rtol=2e-3):
    """Asserts the gradient of every leaf along a random direction; returns the slopes.

    `loss` is a function of the float64 leaves.
    """
    leaves, structure = jax.tree.flatten(float64(trained))
    rng, slopes = np.random.default_rng(0), []

    def of_leaves(leaves):
        return loss(jax.tree.unflatten(structure, leaves))

    for number, gradient in enumerate(jax.tree.leaves(gradients)):
        direction = rng.normal(size=gradient.shape)
        expected = slope(of_leaves, leaves, number, direction)
        atol = 1e-6 + rtol * np.linalg.norm(gradient)
        np.testing.assert_allclose(np.sum(gradient * direction), expected, atol=atol)
        slopes.append(expected)
    return slopes


class Optimizer:
    """Directions of Adam, AdamW or PyTorch's SGD with momentum 0.9 for an array, in float64.

    A call takes the gradient of a step and the parameters, and returns what the step subtracts,
    but for the rate.
    """

    def __init__(self, kind="adam", decay=0.0):
        self.kind, self.decay, self.steps = kind, decay, 0
        self.first = self.second = 0.0

    def __call__(self, gradient, parameters):
        self.steps += 1
        decay = self.decay * parameters
        if self.kind != "adamw":
            gradient = gradient + decay
        if self.kind == "sgd":
            self.first = 0.9 * self.first + gradient
            return self.first
        self.first = 0.9 * self.first + 0.1 * gradient
        self.second = 0.999 * self.second + 0.001 * gradient**2
        root = np.sqrt(self.second / (1 - 0.999**self.steps))
        direction = self.first / (1 - 0.9**self.steps) / (root + 1e-8)
        return direction + decay if self.kind == "adamw" else direction
