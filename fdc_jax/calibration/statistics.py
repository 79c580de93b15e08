"""Rows of the paper's ablation, and statistics of tasks as FDC keeps them."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Float

from fdc_jax.calibration.compiled import padded_size, stack, to_device
from fdc_jax.heads import unit

# Rows of Table current-ablation, then of Table plugin with one view: switches of `Terms.fuse`.
COMPONENTS = {
    "raw": {"tsf": False, "rlc": False, "pac": False},
    "tsf": {"rlc": False, "pac": False},
    "pac": {"tsf": False, "rlc": False},
    "rlc": {"tsf": False, "pac": False},
    "tsf+pac": {"rlc": False},
    "tsf+rlc": {"pac": False},
    "pac+rlc": {"tsf": False},
    "full": {},
    "adapted_view": {"pretrained_view": False},
    "pretrained_view": {"adapted_view": False},
    "pac+rlc_adapted_view": {"tsf": False, "pretrained_view": False},
    "pac+rlc_pretrained_view": {"tsf": False, "adapted_view": False},
}


class View(NamedTuple):
    """Statistics of a task in one view; moments are population mean and standard deviation."""

    mean: Float[np.ndarray, " d"]  # m_t
    basis: Float[np.ndarray, "r d"]  # U_t; no rows if the features are equal
    prototypes: Float[np.ndarray, "c d"]  # p_{t,c}; zero for classes without an image
    residual: tuple[float, float] = (0.0, 1.0)  # moments of rho_t on the task's samples
    affinity: tuple[float, float] = (0.0, 1.0)  # moments of A_t on the task's samples


class Task(NamedTuple):
    """Statistics of a task: its views, adapted first, and sigma_t without and with TSF."""

    views: list[View]
    raw_scale: float = 1.0
    filtered_scale: float = 1.0


class Foreign(NamedTuple):
    """The reference p_F = N(mean, variance) and tau of a view; with one task p_F is p_O."""

    mean: float = 0.0  # mu_F
    variance: float = 1.0  # V_F
    scale: float = 1.0  # tau


class PackedTasks(NamedTuple):
    """Statistics of tasks in one view, padded, on the device; see `fdc.cosine_distance`."""

    mean: Float[Array, "t d"]
    basis: Float[Array, "t r d"]
    length: Float[Array, " t"]  # |m|
    directions: Float[Array, "t c+1 d"]  # p - m^ of each class, then m^ = m / |m|
    offset: Float[Array, "t c"]  # |m| - m.p, infinite for a class without samples
    residual: Float[Array, "t 2"]  # moments of rho_t
    distance: Float[Array, "t 2"]  # moments of 1 - A_t
    scales: Float[Array, "t 2"]  # sigma_t without and with TSF; 0 for padding tasks
    heads: tuple[Array, Array] | None  # W_t, b_t in the adapted view; `fdc.pack` appends W~_t


def subspaces(views: Sequence[View], size: int) -> tuple[Array, Array]:
    """Returns m_t and U_t of tasks in one view on the device, padded to `size` tasks."""
    rank = padded_size(max(len(view.basis) for view in views), 16)
    bases = to_device(size, stack([view.basis for view in views], rank))
    return to_device(size, [view.mean for view in views]), bases


def pack(tasks: Sequence[Task], counts: Sequence[Any], heads: Any, pad: bool) -> list[PackedTasks]:
    """Returns the statistics of tasks by view, with the heads in the adapted view.

    `counts` are samples of each class, by task; `pad` pads the number of tasks.
    """
    size = padded_size(len(tasks), 8) if pad else len(tasks)
    put, most = partial(to_device, size), max(map(len, counts))
    forms, rows = [head.affine for head in heads], padded_size(most, 4)
    biases = stack([np.broadcast_to(form.bias, len(form.rows)) for form in forms], rows, -np.inf)
    affine = put(stack([form.rows for form in forms], rows)), put(biases)
    classes = padded_size(most + 1, 8) - 1  # With the row of m^ a multiple of 8, for fast products.
    packed: list[PackedTasks] = []
    for index, views in enumerate(zip(*(task.views for task in tasks), strict=True)):
        mean, basis = subspaces(views, size)
        # In float64: the differences are small.
        means = np.array([view.mean for view in views], float)
        prototypes = unit(stack([view.prototypes for view in views], classes).astype(float))
        lengths, unit_means = np.linalg.norm(means, axis=1), unit(means)[:, None]
        offset = lengths[:, None] - np.einsum("tcd,td->tc", prototypes, means)
        offset[stack(counts, classes) == 0] = np.inf
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
                heads=affine if index == 0 else None,
            )
        )
    return packed
