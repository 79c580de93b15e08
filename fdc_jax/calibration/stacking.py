"""Statistics and heads of all tasks as padded arrays on the device."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from fdc_jax.calibration import measures, whitening
from fdc_jax.calibration.head_rows import HeadRows
from fdc_jax.calibration.statistics import ViewStatistics

# Smaller sizes are padded to these, where padding costs less than another compilation.
LEAST_TASKS = 4
LEAST_RANK = 8
LEAST_CLASSES = 4


class ViewArrays(NamedTuple):
    """Statistics of all tasks in one view, padded to one rank and one class count."""

    mean: Float[Array, "tasks d"]
    basis: Float[Array, "tasks r d"]
    centre: Float[Array, "tasks d"]
    offsets: Float[Array, "tasks c d"]
    constants: Float[Array, "tasks c"]
    residual_mean: Float[Array, " tasks"]
    residual_std: Float[Array, " tasks"]
    distance_mean: Float[Array, " tasks"]
    distance_std: Float[Array, " tasks"]
    valid: Bool[Array, " tasks"]


class HeadArrays(NamedTuple):
    """Heads of all tasks, plain and with TSF folded in; padded classes have bias -inf."""

    rows: Float[Array, "tasks c d"]
    folded: Float[Array, "tasks c d"]
    bias: Float[Array, "tasks c"]


def padded_size(size: int, least: int = 1) -> int:
    """Returns a size not below `size` and `least`, one of four per doubling, so that shapes recur.

    At most a quarter above `least` is padding, and the number of different shapes, each of which
    compiles anew, grows with the logarithm of the largest size.
    """
    size = max(size, least)
    step = max(1, 2 ** (size.bit_length() - 3))
    return -(-size // step) * step


def padded_tasks(tasks: int) -> int:
    """Returns the task axis for this many tasks; a task alone stays alone."""
    return padded_size(tasks, LEAST_TASKS) if tasks > 1 else 1


def padded_classes(classes: int) -> int:
    """Returns the class axis for tasks of at most this many classes."""
    return padded_size(classes, LEAST_CLASSES)


def stack_view(tasks: Sequence[ViewStatistics]) -> ViewArrays:
    """Pads and stacks the statistics of tasks in one view."""
    capacity = padded_tasks(len(tasks))
    rank = padded_size(max(len(task.basis) for task in tasks), LEAST_RANK)
    classes = padded_classes(max(len(task.prototypes) for task in tasks))
    width = len(tasks[0].mean)
    arrays = dict(
        mean=np.zeros((capacity, width), np.float32),
        basis=np.zeros((capacity, rank, width), np.float32),
        centre=np.zeros((capacity, width), np.float32),
        offsets=np.zeros((capacity, classes, width), np.float32),
        constants=np.zeros((capacity, classes), np.float32),
        residual_mean=np.zeros(capacity, np.float32),
        residual_std=np.ones(capacity, np.float32),
        distance_mean=np.zeros(capacity, np.float32),
        distance_std=np.ones(capacity, np.float32),
        valid=np.arange(capacity) < len(tasks),
    )
    for index, task in enumerate(tasks):
        arrays["mean"][index] = task.mean
        arrays["basis"][index, : len(task.basis)] = task.basis
        frame = prototype_frame(task.prototypes, task.class_counts > 0)
        arrays["centre"][index] = frame.centre
        arrays["offsets"][index, : len(frame.offsets)] = frame.offsets
        arrays["constants"][index] = np.inf
        arrays["constants"][index, : len(frame.constants)] = frame.constants
        arrays["residual_mean"][index] = task.residual_mean
        arrays["residual_std"][index] = task.residual_std
        arrays["distance_mean"][index] = task.distance_mean
        arrays["distance_std"][index] = task.distance_std
    return ViewArrays(**{name: jnp.asarray(array) for name, array in arrays.items()})


def stack_heads(
    heads: Sequence[HeadRows], bases: Float[Array, "tasks r d"], attenuation: float
) -> HeadArrays:
    """Pads and stacks heads and folds TSF into them (Algorithm 1, line 9)."""
    capacity, _, width = bases.shape
    classes = padded_classes(max(len(head.rows) for head in heads))
    rows = np.zeros((capacity, classes, width), np.float32)
    bias = np.full((capacity, classes), -np.inf, np.float32)
    for index, head in enumerate(heads):
        rows[index, : len(head.rows)] = head.rows
        bias[index, : len(head.bias)] = head.bias
    folded = _fold(jnp.asarray(rows), bases, jnp.float32(attenuation))
    return HeadArrays(jnp.asarray(rows), folded, jnp.asarray(bias))


_fold = jax.jit(jax.vmap(measures.filter_features, in_axes=(0, 0, None)))


def stack_prototypes(
    metric: whitening.Metric,
    class_means: Sequence[Float[np.ndarray, "c d"]],
    counts: Sequence[Int[np.ndarray, " c"]],
) -> whitening.Prototypes:
    """Pads and stacks the class means of tasks as prototypes in a within-class metric.

    Args:
        metric: the metric.
        class_means: of each task.
        counts: images of each class.
    """
    tasks, classes = padded_tasks(len(class_means)), padded_classes(max(map(len, class_means)))
    means = np.zeros((tasks, classes, class_means[0].shape[1]), np.float32)
    present = np.zeros((tasks, classes), bool)
    for task, (each, number) in enumerate(zip(class_means, counts, strict=True)):
        means[task, : len(each)] = each
        present[task, : len(each)] = number > 0
    return whitening.Prototypes(
        metric, _directions(metric, jnp.asarray(means)), jnp.asarray(present)
    )


_directions = jax.jit(whitening.directions)


class PrototypeFrame(NamedTuple):
    """Prototypes relative to a point amid them; see `measures.prototype_distance`."""

    centre: Float[np.ndarray, " d"]
    offsets: Float[np.ndarray, "c d"]
    constants: Float[np.ndarray, " c"]


def prototype_frame(
    prototypes: Float[np.ndarray, "c d"], present: Bool[np.ndarray, " c"]
) -> PrototypeFrame:
    """Returns prototypes as offsets from their mean; absent ones at infinite distance."""
    wide = prototypes.astype(np.float64)
    centre = wide[present].mean(axis=0).astype(np.float32)
    offsets = np.where(present[:, None], wide - centre, 0.0)
    # A class whose unit features cancel has no direction: its cosine is 0, its distance 1.
    missing = 0.5 * (1.0 - wide.any(axis=1))
    constants = np.where(present, 0.5 * np.sum(offsets**2, axis=1) + missing, np.inf)
    return PrototypeFrame(centre, offsets.astype(np.float32), constants.astype(np.float32))
