"""Statistics of tasks as FDC keeps and saves them, and packed as compiled programs read them."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from fdc_jax.calibration.shapes import stack
from fdc_jax.heads import products, unit


class View(NamedTuple):
    """Statistics of a task in one view; moments are population mean and standard deviation."""

    mean: Float[np.ndarray, " d"]  # m_t
    basis: Float[np.ndarray, "r d"]  # U_t; no rows if the features are equal
    prototypes: Float[np.ndarray, "c d"]  # p_{t,c}; zero for classes without an image
    residual: tuple[float, float] = (0.0, 1.0)  # moments of rho_t on the task's samples
    affinity: tuple[float, float] = (0.0, 1.0)  # moments of A_t on the task's samples


class Task(NamedTuple):
    """Statistics of a task: its views, adapted first, and sigma_t without and with TSF."""

    views: Sequence[View]
    raw_scale: float = 1.0
    filtered_scale: float = 1.0


def by_view(tasks: Sequence[Task]) -> list[tuple[View, ...]]:
    """Returns the views of tasks, by view."""
    return [*zip(*(task.views for task in tasks), strict=True)]


class Foreign(NamedTuple):
    """The reference p_F = N(mean, variance) and tau of a view; with one task p_F is p_O."""

    mean: float = 0.0  # mu_F
    variance: float = 1.0  # V_F
    scale: float = 1.0  # tau


class PackedTasks(NamedTuple):
    """Statistics of tasks in one view, padded; line 7 of Algorithm 1 reads mean and basis alone.

    m^ = m / |m|. The first direction is m^ itself, which has no distance: its offset is infinite,
    as that of classes without a sample.
    """

    mean: Float[Any, "t d"] = None
    basis: Float[Any, "t r d"] = None
    leading: Float[Any, "t r"] = None  # in a sweep of eta, 1 for its directions
    length: Float[Any, " t"] = None  # |m|
    directions: Float[Any, "t c d"] = None  # m^, then p - m^ of each class
    offset: Float[Any, "t c"] = None  # |m| - m.p
    residual_mean: Float[Any, " t"] = None  # moments of rho_t
    residual_deviation: Float[Any, " t"] = None
    distance_mean: Float[Any, " t"] = None  # moments of 1 - A_t
    distance_deviation: Float[Any, " t"] = None
    raw_scale: Float[Any, " t"] = None  # sigma_t without TSF; 0 for padding tasks
    filtered_scale: Float[Any, " t"] = None  # sigma_t with TSF
    weight: Float[Any, "t k d"] = None  # W_t, and line 9, in the adapted view
    inside: Float[Any, "t k r"] = None  # W_t U_t
    centre: Float[Any, "t r"] = None  # m_t U_t
    bias: Float[Any, "t k"] = None  # b_t
    normalised: Float[Any, " t"] = None  # 1 if heads divide h by |h|


# Padding by field: least sizes of the leading axes of a task, by default [8], and the value.
_LEAST = {"mean": [], "basis": [16], "centre": [16], "inside": [8, 16]}
_FILL = {"offset": np.inf, "bias": -np.inf, "residual_deviation": 1.0, "distance_deviation": 1.0}


def stacked(tasks: Iterable[PackedTasks], count: int) -> PackedTasks:
    """Returns statistics of single tasks as those of `count` tasks, padded to few sizes."""
    fields = {}
    for name, *arrays in zip(PackedTasks._fields, *tasks, strict=True):
        if arrays[0] is not None:
            fields[name] = stack(arrays, count, _LEAST.get(name, [8]), _FILL.get(name, 0.0))
    return PackedTasks(**fields)


def pack(
    tasks: Sequence[Task], counts: Sequence[Any], heads: Sequence[Any], count: int
) -> list[PackedTasks]:
    """Returns `stacked` of tasks by view; `counts` are samples of each class, by task."""
    packed = []
    for index in range(len(tasks[0].views)):
        by_task = map(partial(packed_task, index), tasks, counts, heads)
        packed.append(stacked(by_task, count))
    return packed


def packed_task(index: int, task: Task, counts: Any, head: Any) -> PackedTasks:
    """Returns the statistics of one task in a view, of index 0 with its head."""
    view = task.views[index]
    # In float64: the differences are small.
    mean = view.mean.astype(float)
    length = np.linalg.norm(mean)
    direction = unit(mean)[None]
    prototypes = unit(view.prototypes.astype(float))
    offset = np.where(counts > 0, length - prototypes @ mean, np.inf)
    packed = PackedTasks(
        view.mean,
        view.basis,
        length=length,
        directions=np.concatenate([direction, prototypes - direction]),
        offset=np.append(np.inf, offset),
        **packed_moments(index, task),
    )
    if index > 0:
        return packed
    rows, bias, normalised = head.affine
    return packed._replace(
        weight=rows,
        inside=products(rows, view.basis),
        centre=view.basis @ view.mean,
        bias=np.broadcast_to(bias, len(rows)),
        normalised=normalised,
    )


def packed_moments(index: int, task: Task) -> dict[str, float]:
    """Returns the fields of `PackedTasks` that depend on gamma and K."""
    view = task.views[index]
    return {
        "residual_mean": view.residual[0],
        "residual_deviation": view.residual[1],
        "distance_mean": 1.0 - view.affinity[0],
        "distance_deviation": view.affinity[1],
        "raw_scale": task.raw_scale,
        "filtered_scale": task.filtered_scale,
    }
