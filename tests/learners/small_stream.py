"""A tiny encoder, batches of noise and short trainings, for the tests of learners."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from configs import digits
from fdc_jax.data.batches import Batch
from fdc_jax.learners import training
from fdc_jax.model import vit
from tests.model import reference
from tests.model.reference import SIDE

TINY = vit.Variant(width=24, depth=3, heads=3, patch=4)

RANK = 2


@dataclasses.dataclass(frozen=True)
class TinySetup(training.Setup):
    """A set-up around an encoder of 3 blocks that are 24 wide."""

    @property
    def variant(self) -> vit.Variant:
        """Sizes of the encoder."""
        return TINY


def make_setup(classes_per_task=(2, 3, 2), **fields) -> TinySetup:
    """Returns a set-up; `fields` are configuration fields with `__` for dots."""
    config = digits.get_config()
    config.train.rank = RANK
    config.update_from_flattened_dict(
        {name.replace("__", "."): value for name, value in fields.items()}
    )
    return TinySetup(vit.VisionTransformer(TINY), tuple(classes_per_task), config)


def random_params(seed, variant=TINY, side=SIDE):
    """Returns a parameter tree in which no leaf is constant."""
    return reference.random_params(seed, variant, side)


def make_backbone():
    """Returns pretrained parameters of which none is constant."""
    return random_params(11)


def make_batch(seed=0, size=4, classes=2, padding=0) -> Batch:
    """Returns images of noise, with `padding` black rows of weight zero at the end."""
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (size, SIDE, SIDE, 3)).astype(np.uint8)
    images[size - padding :] = 0
    labels = (np.arange(size) % classes).astype(np.int32)
    labels[size - padding :] = 0
    weights = np.ones(size, np.float32)
    weights[size - padding :] = 0.0
    return Batch(images, labels, weights)


def task_images(*batches: Batch) -> training.TaskImages:
    """Returns the batches as augmented and as plain images."""
    return training.TaskImages(lambda: iter(batches), lambda: iter(batches))


def random_like(tree, seed, scale=0.3):
    """Returns a tree of the same shapes, filled with noise."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(0, scale, x.shape), jnp.float32), tree)


def copy(tree):
    """Returns a copy of every leaf."""
    return jax.tree.map(jnp.copy, tree)


def float64(tree):
    """Returns every leaf as a float64 array of NumPy."""
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)


def train(learner, setup, backbone, state, task, update, steps=2, rate=1.0, seed=0):
    """Trains one task on noise, without ending it.

    Returns:
        The state, the frozen and the trained leaves, and the task's images.
    """
    classes = setup.classes_per_task[task]
    batches = [make_batch(100 * task + step + seed, classes=classes) for step in range(steps)]
    images = task_images(*batches)
    state = learner.before_task(setup, backbone, state, task, images)
    frozen, trained = learner.start(setup, backbone, state, task, jax.random.key(task + seed))
    optimizer = update.initialise(trained)
    for batch in batches:
        trained, optimizer, _ = update.step(backbone, frozen, trained, optimizer, batch, rate)
    return state, frozen, trained, images


def train_whole(learner, setup, backbone, state, task, update, **options):
    """Trains one task on noise and ends it; returns the state."""
    state, frozen, trained, images = train(learner, setup, backbone, state, task, update, **options)
    return learner.after_task(setup, backbone, state, task, frozen, trained, images)


def cost_of_tasks(learner, setup, backbone, update, compiled, tasks=(1, 17)):
    """Trains some tasks of a long stream, each from the state that the one before it left.

    Args:
        learner: of which the encoder is asked for, too.
        setup: the run.
        backbone: pretrained parameters.
        update: of the learner.
        compiled: jitted functions.
        tasks: which to train.

    Returns:
        By task: the bytes that are alive after it, and how often each function was compiled.
    """
    state, alive, compilations = learner.initial_state(setup), {}, {}
    for task in tasks:
        state = train_whole(learner, setup, backbone, state, task, update)
        jax.block_until_ready(learner.encoder(setup, backbone, state, task + 1))
        jax.block_until_ready(state)
        alive[task] = bytes_alive()
        compilations[task] = [function._cache_size() for function in compiled]
    return alive, compilations


def encode(setup, backbone, images, kernels=None, increment=None):
    """Returns features by the compiled encoder."""
    return _apply(setup.model, backbone, images, kernels, increment)


def _apply_uncompiled(model, backbone, images, kernels, increment):
    return model.apply({"params": backbone}, images, kernels, increment)


_apply = jax.jit(_apply_uncompiled, static_argnums=0)


def reference_features(backbone, images, kernels):
    """Returns features in float64 NumPy under other key and value kernels, [l, d, d] each."""
    pretrained = float64(vit.pretrained_kernels(backbone))
    updates = {part: kernels[part] - pretrained[part] for part in ("key", "value")}
    return reference.features(backbone, images, TINY, updates=updates)


def reference_cross_entropy(features, head, labels, classes):
    """Returns the loss of every image over the first `classes` rows of a head, in float64."""
    weight, bias = float64(head.weight)[:classes], float64(head.bias)[:classes]
    logits = features @ weight.T + bias
    peak = logits.max(axis=1, keepdims=True)
    log_sum = peak[:, 0] + np.log(np.exp(logits - peak).sum(axis=1))
    return log_sum - logits[np.arange(len(logits)), labels]


def bytes_alive() -> int:
    """Returns the bytes of all arrays that are alive."""
    return sum(array.nbytes for array in jax.live_arrays())
