"""First-pass statistics of all tasks of a feature file, which depend on no setting of FDC."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from fdc_jax.calibration import inputs, moments
from fdc_jax.feature_files import FeatureSet, TaskFeatures


class ViewSpectrum(NamedTuple):
    """First-pass statistics of a task in one view, before any subspace is chosen.

    Attributes:
        mean: mean feature.
        energies: eigenvalues of the centred covariance, descending.
        directions: its eigenvectors as rows.
        prototypes: unit class prototypes (Eq. proto), zero for classes without an image.
    """

    mean: Float[np.ndarray, " d"]
    energies: Float[np.ndarray, " d"]
    directions: Float[np.ndarray, "d d"]
    prototypes: Float[np.ndarray, "c d"]


class TaskSpectrum(NamedTuple):
    """First-pass statistics of a task: adapted view first, then the pretrained one if there is."""

    views: tuple[ViewSpectrum, ...]
    class_counts: Int[np.ndarray, " c"]


def spectra(features: FeatureSet) -> list[TaskSpectrum]:
    """Returns what every task is made of, whatever the settings (Algorithm 1, line 6)."""
    most = max(len(task.classes) for task in features.tasks)
    return [_spectrum(task, number, most) for number, task in enumerate(features.tasks)]


def _spectrum(task: TaskFeatures, number: int, most_classes: int) -> TaskSpectrum:
    order = np.argsort(task.classes)
    counts = np.zeros(len(task.classes), np.int64)
    running: list[moments.Moments] = []
    for block in _task_blocks(task, number):
        rows = order[np.searchsorted(task.classes, block.labels, sorter=order)]
        counts += np.bincount(rows, minlength=len(counts))
        index = np.full(inputs.BLOCK_ROWS, -1, np.int32)
        index[: block.rows] = rows
        views = [block.adapted] + ([] if block.pretrained is None else [block.pretrained])
        if not running:
            running = [moments.first_moments(view, index, most_classes) for view in views]
        else:
            running = [
                moments.add_moments(before, view, index)
                for before, view in zip(running, views, strict=True)
            ]
    size = jnp.float32(counts.sum())
    fitted = []
    for view in running:
        mean, energies, directions = jax.device_get(moments.principal_components(view, size))
        totals = np.asarray(view.class_totals)[: len(counts)]
        fitted.append(ViewSpectrum(mean, energies, directions, moments.prototypes(totals, counts)))
    return TaskSpectrum(tuple(fitted), counts)


def _task_blocks(task: TaskFeatures, number: int) -> Iterator[inputs.Block]:
    source = inputs.task_source(task.adapted, task.labels, task.pretrained, number)
    return inputs.blocks(source, number)


def feasible_neighbours(tasks: Sequence[TaskSpectrum]) -> int:
    """Returns the largest K for which every task has that many classes with images."""
    return min(int((task.class_counts > 0).sum()) for task in tasks)
