"""Statistics of several FDC tasks as arrays of few shapes, which compiled functions take."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Float

from fdc_jax.calibration import compiled
from fdc_jax.calibration.compiled import padded_size, stack
from fdc_jax.calibration.statistics import Task, View
from fdc_jax.heads import unit


class PackedTasks(NamedTuple):
    """Statistics of several tasks in one view, as padded arrays on the device."""

    mean: Float[Array, "t d"]
    basis: Float[Array, "t r d"]
    length: Float[Array, " t"]  # |m|
    directions: Float[Array, "t c+1 d"]  # p - m^ of each class, then m^ = m / |m|
    offset: Float[Array, "t c"]  # |m| - m.p, infinite for a class without samples
    residual: Float[Array, "t 2"]  # moments of rho_t
    distance: Float[Array, "t 2"]  # moments of 1 - A_t
    scales: Float[Array, "t 2"]  # sigma_t without and with TSF; 0 for padding tasks
    heads: tuple[Array, Array] | None  # W_t (line 9: and W~_t), b_t; None in the pretrained view


def subspaces(views: Sequence[View], size: int) -> tuple[Array, Array]:
    """Returns m_t and U_t of tasks in one view on the device, padded to a number of tasks."""
    bases = stack([view.basis for view in views], padded_size(max(len(v.basis) for v in views), 16))
    return compiled.placed(size, [view.mean for view in views]), compiled.placed(size, bases)


def pack(tasks: Sequence[Task], counts: Sequence[Any], heads: Any, pad: bool) -> list[PackedTasks]:
    """Returns the statistics of tasks by view; `pad` pads their number.

    Args:
        tasks: statistics of each task.
        counts: samples of each class, by task.
        heads: head of each task, which the adapted view receives.
        pad: whether the number of tasks is padded.
    """
    size, packed = padded_size(len(tasks), 8) if pad else len(tasks), []
    most, put = max(map(len, counts)), partial(compiled.placed, size)
    classes = padded_size(most + 1, 8) - 1  # With m^ a multiple of 8: products are fast.
    for views in zip(*(task.views for task in tasks), strict=True):
        mean, basis = subspaces(views, size)
        # In float64: the differences are small.
        means = np.array([view.mean for view in views], float)
        prototypes = unit(stack([view.prototypes for view in views], classes).astype(float))
        lengths, unit_means = np.linalg.norm(means, axis=1), unit(means)[:, None]
        offset = lengths[:, None] - np.einsum("tcd,td->tc", prototypes, means)
        offset[stack(counts, classes) == 0] = np.inf
        affine = None
        if not packed:
            forms, rows = [head.affine for head in heads], padded_size(most, 4)
            weights = put(stack([form.rows for form in forms], rows))
            biases = [np.broadcast_to(form.bias, len(form.rows)) for form in forms]
            affine = weights, put(stack(biases, rows, -np.inf))
        packed.append(
            PackedTasks(
                mean,
                basis,
                length=put(lengths),
                directions=put(np.concatenate([prototypes - unit_means, unit_means], axis=1)),
                offset=put(offset),
                residual=put([view.residual for view in views]),
                distance=put([(1.0 - view.affinity[0], view.affinity[1]) for view in views]),
                scales=put([(task.raw_scale, task.filtered_scale) for task in tasks]),
                heads=affine,
            )
        )
    return packed
