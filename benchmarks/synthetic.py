"""Random encoders, images and labels, equal in every process and on every device."""

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks import measure
from fdc_jax import learners
from fdc_jax.data.batches import Batch
from fdc_jax.heads import LinearHead
from fdc_jax.learners import training
from fdc_jax.machine import devices
from fdc_jax.model import increments, vit
from fdc_jax.run import base, configuration
from fdc_jax.run import setup as setups

RANK = 10
CLASSES = 5


class Problem(NamedTuple):
    """An encoder, a head and a batch as NumPy arrays, which are on no program's device yet."""

    model: vit.VisionTransformer
    parameters: Any
    pretrained: vit.KeyValueKernels
    kernels: vit.KeyValueKernels  # pretrained + increment
    increment: vit.Increment
    head: LinearHead
    batch: Batch


def encoder(
    options: Any, precision: str, attention: str = "auto", mesh: Any = None
) -> vit.VisionTransformer:
    """Returns the encoder of --variant and --image_size for the devices of a mesh."""
    kind: Any = {"precision": precision, "attention": attention}
    kind |= {"cudnn": devices.have_cudnn(mesh or devices.data_mesh())}
    model = vit.build(options.variant, options.image_size, **kind)
    # Programs read the size of their images from the variant.
    changes = {"image_size": options.image_size}
    changes |= {"depth": 2} if measure.is_trial(options) else {}  # compiles twice as fast
    return model.clone(variant=dataclasses.replace(model.variant, **changes))


def noise(size: int, side: int, classes: int, seed: int) -> Batch:
    """Returns a batch of random images [size, side, side, 3] with labels and weights of one."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size, side, side, 3), np.uint8)
    labels = (np.arange(size) % classes).astype(np.int32)
    return Batch(pixels, labels, np.ones(size, np.float32))


def parameters(model: vit.VisionTransformer, image_size: int) -> Any:
    """Returns random parameters at the scale of initialisation; no leaf is constant."""
    rng, width = np.random.default_rng(0), model.variant.width
    shapes: Any = vit.parameter_shapes(model, image_size)  # pyright: ignore[reportArgumentType]
    scales = {"kernel": (width**-0.5, 0.0), "scale": (0.1, 1.0)}

    def draw(path, leaf):
        scale, centre = scales.get(path[-1].key, (0.02, 0.0))
        return np.float32(scale) * rng.standard_normal(leaf.shape, np.float32) + np.float32(centre)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def learning(
    name: str, model: vit.VisionTransformer, classes_per_task: tuple[int, ...], mesh: Any = None
) -> tuple[learners.Learner, training.Update, Any]:
    """Returns a learner with the paper's settings, its update, and its first learning rates."""
    chosen: Any = base.get_config(learner=name)
    chosen.encoder.image_size = model.variant.image_size
    config = configuration.typed(chosen)
    learner = setups.make_learner(config, model, classes_per_task, mesh or devices.data_mesh())
    update = learner.update()
    rate = update.schedule(0, config.train.epochs) if update.schedule else 1.0
    return learner, update, rate


def problem(model: vit.VisionTransformer, image_size: int, batch_size: int) -> Problem:
    """Returns an encoder with random weights, an increment, a head, and a batch with labels."""
    tree, width, rng = parameters(model, image_size), model.variant.width, np.random.default_rng(1)
    pretrained: Any = jax.tree.map(np.asarray, vit.pretrained_kernels(tree))
    shapes = jax.eval_shape(lambda: increments.initialise(jax.random.key(0), model.variant, RANK))
    drawn = jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape, np.float32), shapes)
    scale = {"A": np.float32(width**-0.5), "B": np.float32(0.05)}
    increment: Any = {
        part: {name: scale[name] * leaf for name, leaf in factors.items()}
        for part, factors in drawn.items()
    }
    kernels: Any = {
        part: pretrained[part] + increment[part]["A"] @ increment[part]["B"] for part in increment
    }
    weight: Any = 0.05 * rng.standard_normal((CLASSES, width), np.float32)
    head = LinearHead(weight, np.zeros(CLASSES, np.float32))  # pyright: ignore[reportArgumentType]
    batch = noise(batch_size, image_size, CLASSES, seed=2)
    return Problem(model, tree, pretrained, kernels, increment, head, batch)
