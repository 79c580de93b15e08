"""Classifier alignment: joint training of all heads on features drawn from one Gaussian per class.

A Gaussian is fitted to the head-input features of each class when its task ends. An alignment draws
features of every class seen and trains all heads on them together, without any image, which makes
their logits comparable.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Float64, Int

from fdc_jax.errors import TrainingError
from fdc_jax.learners import training

# Number of features per class and epoch, and per step; the authors' (SLCA and InfLoRA+CA).
SAMPLES, BATCH_SIZE = 256, 256
# Limit of the factor on the means of the first task in long streams.
OLDEST_MEAN_SCALE = 0.9


class ClassGaussians(NamedTuple):
    """One Gaussian per class in slots [task, class of the task]; slots without a fit are zero."""

    means: Float[Array, "t c d"]
    # Lower triangular, factor @ factor.T = covariance + ridge * I; on the host between alignments.
    factors: Float[np.ndarray, "t c d d"]


def empty(num_tasks: int, classes: int, width: int) -> ClassGaussians:
    """Returns slots for `classes` classes in each task."""
    factors = np.zeros((num_tasks, classes, width, width), np.float32)
    return ClassGaussians(jnp.zeros((num_tasks, classes, width)), factors)


def fit(
    features: Float[np.ndarray, "n d"], ridge: float
) -> tuple[Float64[np.ndarray, " d"], Float64[np.ndarray, "d d"]]:
    """Returns mean and factor of the Gaussian of one class, in float64.

    The covariance is unbiased (zero for a single feature) plus `ridge` on its diagonal; its factor
    comes from a QR decomposition of the centred features, which exists for classes of any size.
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
    """Returns the Gaussians with those of one task fitted; the arguments stay unchanged.

    Raises:
        TrainingError: a class has no image, or a feature is not finite.
    """
    means = np.zeros(gaussians.means.shape[1:], np.float32)
    factors = np.array(gaussians.factors)
    factors[task] = 0.0
    for label in range(num_classes):
        members = features[labels == label]
        name = f"class {label} of task {task + 1}"
        if not len(members):
            raise TrainingError(f"{name}: expected training images for its Gaussian, found none")
        if not np.isfinite(members).all():
            raise TrainingError(f"{name}: expected finite features, but the encoder diverged")
        means[label], factors[task, label] = fit(members, ridge)
    return ClassGaussians(gaussians.means.at[task].set(means), factors)


def draw(
    key: Array, gaussians: ClassGaussians, samples: int, tasks_done: int | Int[Array, ""]
) -> Float[Array, "t c s d"]:
    """Returns `samples` features of each class, zero for later tasks.

    The means of task j of t are multiplied by 0.9 + 0.1 j / t.
    """
    means, factors = map(jnp.asarray, gaussians)
    tasks, classes, width = means.shape
    age = jnp.arange(1.0, tasks + 1) / jnp.asarray(tasks_done, jnp.float32)
    scaled = (OLDEST_MEAN_SCALE + (1.0 - OLDEST_MEAN_SCALE) * age)[:, None, None] * means

    def draw_task(task, features):
        normal = jax.random.normal(jax.random.fold_in(key, task), features.shape[1:])
        spread = jnp.einsum("csd,ced->cse", normal, factors[task], precision="highest")
        return features.at[task].set(spread + scaled[task][:, None])

    features = jnp.zeros((tasks, classes, samples, width))
    return jax.lax.fori_loop(0, tasks_done, draw_task, features)


def cosine_rates(epochs: int, first: float) -> Float[np.ndarray, " e"]:
    """Returns the learning rate of every epoch along half a cosine wave from `first`."""
    factors = [training.cosine(epoch, epochs) for epoch in range(epochs)]
    return np.array(factors, np.float32) * np.float32(first)


def retraining(
    loss: Callable[..., Float[Array, ""]],
    transformation: optax.GradientTransformation,
    rates: Float[np.ndarray, " e"],
) -> Callable[..., Any]:
    """Returns `retrain(heads, gaussians, seen, key) -> heads`, one program for all tasks.

    Leaves of `heads` lead with [t]; `seen` [t, c] is True for the classes to draw. Every epoch
    draws `SAMPLES` features of each of these classes, and trains on them at the epoch's rate in
    shuffled batches of `BATCH_SIZE`; the last batch may be smaller. `retrain` raises TrainingError
    if a head is not finite afterwards.

    Args:
        loss: `(heads, features, labels, weights, seen) -> loss`; labels are positions in the
            flattened slots [t * c], rows of weight 0 are padding.
        transformation: from gradients to directions.
        rates: learning rate of every epoch.
    """
    samples, batch_size = SAMPLES, BATCH_SIZE

    def train_epoch(gaussians, seen, carry, rate_and_key):
        rate, key = rate_and_key
        key_of_features, key_of_order = jax.random.split(key)
        drawn = draw(key_of_features, gaussians, samples, jnp.sum(seen.any(axis=1)))
        slots = seen.size
        total = slots * samples
        features = drawn.reshape(total, -1)
        num_drawn = jnp.sum(seen) * samples
        labels = jnp.repeat(jnp.arange(slots), samples)
        was_drawn = jnp.repeat(seen.reshape(-1), samples)
        padding = jnp.zeros(-total % batch_size, jnp.int32)
        # The n-th seen class gets row n of the random numbers, whatever the number of empty slots.
        lots = jax.random.uniform(key_of_order, (total,)).reshape(slots, samples)
        lots = lots[jnp.cumsum(seen.reshape(-1)) - 1].reshape(-1)
        # Rows that were not drawn come last.
        order = jnp.argsort(jnp.where(was_drawn, lots, 2.0))
        order = jnp.concatenate([order.astype(jnp.int32), padding])

        def step(number, carry):
            heads, optimizer_state = carry
            first = number * batch_size
            rows = jax.lax.dynamic_slice_in_dim(order, first, batch_size)
            weights = (first + jnp.arange(batch_size) < num_drawn).astype(jnp.float32)
            gradients = jax.grad(loss)(heads, features[rows], labels[rows], weights, seen)
            directions, optimizer_state = training.transformed(
                transformation, gradients, optimizer_state, heads
            )
            heads = jax.tree.map(lambda leaf, d: leaf - rate * d, heads, directions)
            return heads, optimizer_state

        steps = -(-num_drawn // batch_size)
        return jax.lax.fori_loop(0, steps, step, carry), None

    @jax.jit  # one program of all epochs, in which no host waits
    def train(heads, gaussians, seen, key):
        epoch = partial(train_epoch, gaussians, seen)
        epochs = rates, jax.random.split(key, len(rates))
        return jax.lax.scan(epoch, (heads, transformation.init(heads)), epochs)[0][0]

    def retrain(
        heads: Any, gaussians: ClassGaussians, seen: Bool[np.ndarray, "t c"], key: Array
    ) -> Any:
        heads = train(heads, gaussians, jnp.asarray(seen), key)
        if not all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(heads)):
            tasks_done = int(seen.any(axis=1).sum())
            raise TrainingError(
                f"classifier alignment after task {tasks_done}: expected finite heads, found others"
            )
        return heads

    return retrain


def linear_retraining(
    transformation: optax.GradientTransformation, epochs: int, rate: float, temperature: float
) -> Callable[..., Any]:
    """Returns `retraining` of linear heads along a cosine from a rate.

    The loss is `cross_entropy_over_all` with a temperature.
    """

    def loss(heads, features, labels, weights, seen):
        logits = jax.vmap(lambda head: head.logits(features), out_axes=1)(heads)
        return cross_entropy_over_all(logits, labels, weights, seen, temperature)

    return retraining(loss, transformation, cosine_rates(epochs, rate))


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
        seen_tasks = seen.any(axis=1).astype(jnp.float32)
        squares = jnp.sum(jnp.where(seen[None], logits, 0.0) ** 2, axis=2)
        # The square root has no derivative at 0, the logits of a zero head.
        norms = jnp.where(squares > 0, jnp.sqrt(jnp.where(squares > 0, squares, 1.0)), 0.0)
        mean_norm = jnp.sum((norms + 1e-7) * seen_tasks[None], axis=1) / jnp.sum(seen_tasks)
        logits = logits / (temperature * mean_norm[:, None, None])
    flat = jnp.where(seen[None], logits, -jnp.inf).reshape(len(logits), -1)
    losses = optax.softmax_cross_entropy_with_integer_labels(flat, labels)
    return jnp.sum(weights * losses) / jnp.sum(weights)
