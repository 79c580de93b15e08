"""Classifier alignment: heads re-trained on features drawn from one Gaussian per class.

A Gaussian is fitted to the head-input features of each class when its task ends. Later, whenever
heads are to be made comparable, features of every class seen are drawn anew and all heads are
trained on them together, without any image.

Covariances are by far the largest thing that is kept of a class. They stay in the memory of the
host, and drawing moves those of one task at a time to the device.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Float64, Int

from fdc_jax.data.batches import Batch
from fdc_jax.errors import TrainingError
from fdc_jax.machine import devices
from fdc_jax.model import vit
from fdc_jax.model.vit import Replaced, VisionTransformer

# The authors' of both learners that draw features: of a class in an epoch, and of a step.
SAMPLES, BATCH_SIZE = 256, 256
# Factor on the means of the oldest task as the stream grows.
OLDEST_MEAN_SCALE = 0.9


class ClassGaussians(NamedTuple):
    """One Gaussian per class, in slots [task, class of the task], zero where none is fitted yet."""

    means: Float[Array, "t c d"]  # of the features
    # Lower triangular, factor @ factor.T = covariance + ridge * I; on the host. 708 MB for 300
    # classes of 768 features.
    factors: Float[np.ndarray, "t c d d"]


def empty(num_tasks: int, classes: int, width: int) -> ClassGaussians:
    """Returns slots for `classes` classes in each task."""
    return ClassGaussians(
        means=jnp.zeros((num_tasks, classes, width)),
        factors=np.zeros((num_tasks, classes, width, width), np.float32),
    )


def class_features(
    model: VisionTransformer, backbone: Any, replaced: Replaced, batches: Iterable[Batch]
) -> tuple[Float[np.ndarray, "n d"], Int[np.ndarray, " n"]]:
    """Returns features and labels of all images, those of weight 0 left out."""
    features, labels = [], []
    for batch in batches:
        encoded = _encode(model, backbone, batch.images, replaced)
        encoded, shown, weights = devices.to_host((encoded, batch.labels, batch.weights))
        features.append(encoded[weights > 0])
        labels.append(shown[weights > 0])
    return np.concatenate(features), np.concatenate(labels)


@partial(jax.jit, static_argnums=0)
def _encode(model, backbone, images, replaced):
    return vit.encode(model, backbone, images, replaced)


def fit(
    features: Float[np.ndarray, "n d"], ridge: float
) -> tuple[Float64[np.ndarray, " d"], Float64[np.ndarray, "d d"]]:
    """Returns mean and factor of the Gaussian of one class, in float64.

    The covariance is unbiased, zero for a single feature, plus `ridge` on its diagonal; its factor
    comes from a QR decomposition of the centred features, so that no class is too small.
    """
    features = np.asarray(features, np.float64)
    n, width = features.shape
    mean = features.mean(axis=0)
    centred = (features - mean) / np.sqrt(max(n - 1, 1))
    rows = np.concatenate([centred, np.sqrt(ridge) * np.eye(width)])
    upper: Any = np.linalg.qr(rows, mode="r")
    return mean, upper.T


def fit_task(
    gaussians: ClassGaussians,
    task: int,
    features: Float[np.ndarray, "n d"],
    labels: Int[np.ndarray, " n"],
    num_classes: int,
    ridge: float,
) -> ClassGaussians:
    """Returns the Gaussians with those of one task fitted; the ones given stay as they are.

    Raises:
        TrainingError: a class has no image, or a feature that is not finite.
    """
    means = np.zeros(gaussians.means.shape[1:], np.float32)
    factors = np.array(gaussians.factors)
    factors[task] = 0.0
    for label in range(num_classes):
        own = features[labels == label]
        where = f"class {label} of task {task + 1}"
        if not len(own):
            raise TrainingError(f"{where} has no training image to fit its Gaussian to")
        if not np.isfinite(own).all():
            raise TrainingError(f"{where} has features that are not finite: the encoder diverged")
        means[label], factors[task, label] = fit(own, ridge)
    return ClassGaussians(gaussians.means.at[task].set(means), factors)


def mean_scales(tasks: int, tasks_done: int) -> Float[np.ndarray, " t"]:
    """Returns the factor on the means of each task's classes, 1 for the newest."""
    age = (np.arange(tasks) + 1) / tasks_done
    return (OLDEST_MEAN_SCALE + (1.0 - OLDEST_MEAN_SCALE) * age).astype(np.float32)


def draw(
    key: Array,
    gaussians: ClassGaussians,
    scales: Float[Array, " t"] | Float[np.ndarray, " t"],
    samples: int,
    tasks_done: int,
) -> Float[Array, "t c s d"]:
    """Returns `samples` features of each class, zero for tasks to come.

    `scales` are factors on the means of each task. The device holds these features and the factors
    of a single task, never those of all.
    """
    tasks, classes, width = gaussians.means.shape
    scales = np.asarray(scales, np.float32)
    features = jnp.zeros((tasks, classes, samples, width))
    for task in range(tasks_done):
        factors = np.asarray(gaussians.factors[task])
        features = _draw_task(key, features, np.int32(task), gaussians.means, scales, factors)
        # Factors would pile up on the device if their transfers ran ahead of the draws.
        features.block_until_ready()
    return features


@partial(jax.jit, donate_argnums=1)
def _draw_task(key, features, task, means, scales, factors) -> Float[Array, "t c s d"]:
    """Returns the features with the slot of one task drawn."""
    normal = jax.random.normal(jax.random.fold_in(key, task), features.shape[1:])
    spread = jnp.einsum("csd,ced->cse", normal, factors, precision=jax.lax.Precision.HIGHEST)
    return features.at[task].set(spread + scales[task] * means[task][:, None])


def retraining(
    loss: Callable[..., Float[Array, ""]],
    transformation: optax.GradientTransformation,
    samples: int = SAMPLES,
    batch_size: int = BATCH_SIZE,
) -> Callable[..., Any]:
    """Returns a function that trains the heads of all tasks on drawn features.

    In every epoch it draws `samples` features of each class seen, shuffles them and goes over them
    in batches; the last batch may be smaller. It is compiled once for all tasks. In
    `loss(heads, features, labels, weights, seen)` labels are positions in the flattened slots
    [t * c], rows of weight 0 are padding; `transformation` makes directions of gradients.

    Returns:
        `retrain(heads, gaussians, seen, rates, key) -> heads`, where `heads` is a pytree whose
        leaves lead with [t], `seen` [t, c] marks the classes to draw, and `rates` [epochs] are
        learning rates. It raises TrainingError when a head is not finite afterwards.
    """

    @jax.jit
    def train_epoch(heads, optimizer_state, drawn, seen, rate, key_of_order):
        slots = seen.size
        total = slots * samples
        features = drawn.reshape(total, -1)
        drawn_rows = jnp.sum(seen) * samples
        labels = jnp.repeat(jnp.arange(slots), samples)
        counted = jnp.repeat(seen.reshape(-1), samples)
        padding = jnp.zeros(-total % batch_size, jnp.int32)
        # By the number of the class, which padded slots and tasks to come leave as it is.
        lots = jax.random.uniform(key_of_order, (total,)).reshape(slots, samples)
        lots = lots[jnp.cumsum(seen.reshape(-1)) - 1].reshape(-1)
        # Whatever was not drawn goes behind everything that was.
        order = jnp.argsort(jnp.where(counted, lots, 2.0))
        order = jnp.concatenate([order.astype(jnp.int32), padding])

        def step(number, carry):
            heads, optimizer_state = carry
            first = number * batch_size
            rows = jax.lax.dynamic_slice_in_dim(order, first, batch_size)
            weights = (first + jnp.arange(batch_size) < drawn_rows).astype(jnp.float32)
            gradients = jax.grad(loss)(heads, features[rows], labels[rows], weights, seen)
            directions, optimizer_state = transformation.update(gradients, optimizer_state, heads)
            heads = jax.tree.map(lambda leaf, d: leaf - rate * d, heads, directions)
            return heads, optimizer_state

        steps = -(-drawn_rows // batch_size)
        return jax.lax.fori_loop(0, steps, step, (heads, optimizer_state))

    def retrain(
        heads: Any,
        gaussians: ClassGaussians,
        seen: Bool[Array, "t c"] | Bool[np.ndarray, "t c"],
        rates: Float[Array, " e"] | Float[np.ndarray, " e"],
        key: Array,
    ) -> Any:
        seen, rates = np.asarray(seen), np.asarray(rates, np.float32)
        tasks_done = int(seen.any(axis=1).sum())
        scales = mean_scales(len(seen), tasks_done)
        # Where heads are, what is new must be too, or the second epoch would compile again.
        heads = jax.tree.map(jnp.asarray, heads)
        place = jax.tree.leaves(heads)[0].sharding
        heads, optimizer_state = jax.device_put((heads, transformation.init(heads)), place)
        for rate, key_of_epoch in zip(rates, jax.random.split(key, len(rates)), strict=True):
            key_of_features, key_of_order = jax.random.split(key_of_epoch)
            heads, optimizer_state = train_epoch(
                heads,
                optimizer_state,
                draw(key_of_features, gaussians, scales, samples, tasks_done),
                seen,
                rate,
                key_of_order,
            )
        if not all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(heads)):
            raise TrainingError(f"classifier alignment after task {tasks_done} diverged")
        return heads

    return retrain


def linear_retraining(
    transformation: optax.GradientTransformation, temperature: float
) -> Callable[..., Any]:
    """Returns the `retraining` of linear heads with `cross_entropy_over_all` at a temperature."""

    def loss(heads, features, labels, weights, seen):
        logits = jax.vmap(lambda head: head.logits(features), out_axes=1)(heads)
        return cross_entropy_over_all(logits, labels, weights, seen, temperature)

    return retraining(loss, transformation)


def cross_entropy_over_all(
    logits: Float[Array, "n t c"],
    labels: Int[Array, " n"],
    weights: Float[Array, " n"],
    seen: Bool[Array, "t c"],
    temperature: float = 0.0,
) -> Float[Array, ""]:
    """Returns the mean cross-entropy over the classes of all tasks seen.

    Labels are positions in the flattened slots. Logits are divided by the temperature and by the
    mean norm of one task's logits, unless the temperature is 0.
    """
    if temperature > 0:
        seen_tasks = seen.any(axis=1)
        squares = jnp.sum(jnp.where(seen[None], logits, 0.0) ** 2, axis=2)
        # The square root has no derivative at 0, where a head of zeros is.
        norms = jnp.where(squares > 0, jnp.sqrt(jnp.where(squares > 0, squares, 1.0)), 0.0)
        mean_norm = jnp.sum((norms + 1e-7) * seen_tasks[None], axis=1) / jnp.sum(seen_tasks)
        logits = logits / (temperature * mean_norm[:, None, None])
    flat = jnp.where(seen[None], logits, -jnp.inf).reshape(len(logits), -1)
    losses = optax.softmax_cross_entropy_with_integer_labels(flat, labels)
    return jnp.sum(weights * losses) / jnp.sum(weights)
