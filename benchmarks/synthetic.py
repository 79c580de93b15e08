"""Random encoders, images and labels, the same in every process that asks for them."""

import argparse
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks import measure
from fdc_jax import learners
from fdc_jax.heads import LinearHead
from fdc_jax.learners import training
from fdc_jax.machine import devices
from fdc_jax.model import increments, vit
from fdc_jax.run import base

RANK = 10
CLASSES = 5


class Problem(NamedTuple):
    """What contenders work on: NumPy arrays, so that none of them has them on its device yet."""

    model: vit.VisionTransformer
    parameters: Any
    pretrained: vit.KeyValueKernels
    kernels: vit.KeyValueKernels
    increment: vit.Increment
    head: LinearHead
    images: np.ndarray
    labels: np.ndarray


def learning(
    name: str, model: vit.VisionTransformer, classes_per_task: tuple[int, ...], mesh: Any = None
) -> tuple[learners.Learner, training.Update, Any]:
    """Returns a learner in the paper's settings, its update, and its first rates."""
    config: Any = base.get_config()
    config.learner.name = name
    setup = training.Setup(model, classes_per_task, config, mesh or devices.data_mesh())
    learner = learners.make(setup)
    update = learner.update()
    rate = update.schedule(0, config.train.epochs) if update.schedule else 1.0
    return learner, update, rate


def problem(options: argparse.Namespace) -> Problem:
    """Returns an encoder with random weights, an increment, a head, and a batch with labels."""
    model, image_size = measure.encoder(options), options.image_size
    rng, first = np.random.default_rng(0), vit.initialise(model, image_size, jax.random.key(0))
    parameters = jax.tree.map(np.asarray, first)
    pretrained: Any = jax.tree.map(np.asarray, vit.pretrained_kernels(parameters))
    fresh = jax.eval_shape(lambda: increments.initialise(jax.random.key(0), model.variant, RANK))
    noise = jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape, np.float32), fresh)
    scale = {"A": model.variant.width**-0.5, "B": 0.05}
    increment: Any = {
        part: {name: np.float32(scale[name]) * leaf for name, leaf in factors.items()}
        for part, factors in noise.items()
    }
    kernels: Any = {
        part: pretrained[part] + increment[part]["A"] @ increment[part]["B"] for part in increment
    }
    width = model.variant.width
    weight: Any = 0.05 * rng.standard_normal((CLASSES, width), np.float32)
    bias: Any = np.zeros(CLASSES, np.float32)
    return Problem(
        model,
        parameters,
        pretrained,
        kernels,
        increment,
        LinearHead(weight, bias),
        rng.integers(0, 256, (options.batch_size, image_size, image_size, 3), np.uint8),
        rng.integers(0, CLASSES, options.batch_size).astype(np.int32),
    )
