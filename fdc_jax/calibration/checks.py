"""Warnings of features in another order than their labels, of swapped views, and of no residual.

The first two compare numbers that mistakes change by far, on a few hundred rows, so that they cost
no measurable share of a fit. Features without a relation to classes, or views that hardly differ,
give no warning. Features on a device stay there, unchecked.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int

from fdc_jax.calibration import inputs
from fdc_jax.heads import unit

_LOGGER = logging.getLogger("fdc_jax.calibration")
# Classes and rows per class that are compared, and orders of labels drawn at random.
CLASSES, OF_CLASS, ORDERS = 16, 32, 24
# Deviations from random orders that classes explain for certain, and those that are chance.
CERTAIN, CHANCE = 12.0, 3.0
# Rows of a batch that are compared, the fewest, and the share that betrays swapped views.
ROWS, FEWEST, SWAPPED = 64, 32, 0.85


class Explained(NamedTuple):
    """The share of the variance that is between classes (Anderson, PERMANOVA, 2001)."""

    share: float
    expected: float  # mean share in random orders of the labels
    deviations: float  # difference of both, in standard deviations of random orders


def compared_rows(labels: Int[np.ndarray, " n"]) -> Int[np.ndarray, " m"]:
    """Returns the indices of at most 32 rows of each of at most 16 classes, evenly spaced."""
    names, counts = np.unique(labels, return_counts=True)
    rows = [np.zeros(0, int)]
    for name in inputs.evenly_spaced(names[counts > 1], CLASSES):
        rows.append(inputs.evenly_spaced(np.flatnonzero(labels == name), OF_CLASS))
    return np.concatenate(rows)


def explained(features: Float[np.ndarray, "m d"], labels: Int[np.ndarray, " m"]) -> Explained:
    """Returns the share of the variance of features that lies between the classes."""
    centred = features - features.mean(axis=0, dtype=np.float64)
    centred = inputs.float32(centred / max(np.linalg.norm(centred), 1e-300))
    _, columns, counts = np.unique(labels, return_inverse=True, return_counts=True)
    members = (columns == np.arange(len(counts))[:, None]) / np.sqrt(counts)[:, None]
    members = inputs.float32(members)
    random = np.random.default_rng(0)
    orders = [np.arange(len(columns))]
    orders += [np.argsort(random.permutation(len(columns))) for _ in range(ORDERS)]
    means = np.concatenate([members[:, order] for order in orders]) @ centred
    share, *random_shares = np.square(means).reshape(len(orders), -1).sum(axis=1)
    expected = float(np.mean(random_shares))
    deviation = max(float(np.std(random_shares)), 1e-9)
    return Explained(share, expected, (share - expected) / deviation)


def is_on_device(arrays: Iterable[Any]) -> bool:
    """Returns True if an array is one of JAX."""
    return any(isinstance(array, jax.Array) for array in arrays)


def warn_of_rows(named: Mapping[str, Any], labels: Int[np.ndarray, " n"]) -> None:
    """Warns of features without any relation to the labels, if others of the same images have one.

    Args:
        named: features [n, d] of the same images, by their names in messages.
        labels: class of each image.
    """
    rows = compared_rows(labels)
    if len(named) < 2 or is_on_device(named.values()) or len(np.unique(labels[rows])) < 2:
        return
    relations = {
        name: explained(inputs.float32(inputs.host_array(features, name)[rows]), labels[rows])
        for name, features in named.items()
    }
    best = max(relations, key=lambda name: relations[name].deviations)
    if relations[best].deviations < CERTAIN:
        return
    for name, of in relations.items():
        if of.deviations < CHANCE:
            _LOGGER.warning(
                f"{name}: classes explain {of.share:.1%} of the variance, as in any order of the "
                f"rows ({of.expected:.1%}), but {relations[best].share:.1%} of that of the {best}; "
                "the rows are probably in another order than the labels"
            )


def swapped_share(
    views: Sequence[Float[np.ndarray, "n d"]], means: Sequence[Float[np.ndarray, "c d"]]
) -> float:
    """Returns the share of rows whose views differ in the opposite direction of their class's.

    `means` are those of classes at unit length, by view. The class of a row is the one with the
    nearest sum of both views, which swapping does not change.
    """
    adapted, pretrained = map(unit, views)
    both = means[0] + means[1]
    squares = np.square(both).sum(axis=1)
    nearest = (squares - 2.0 * (adapted + pretrained) @ both.T).argmin(axis=1)
    along = ((adapted - pretrained) * (means[0] - means[1])[nearest]).sum(axis=1)
    return float(np.mean(along < 0))


def warn_of_swapped(views: Sequence[Any], unit_means: Callable[[], Sequence[np.ndarray]]) -> bool:
    """Warns if the views of a batch are swapped; returns True if it has warned.

    `unit_means` returns means of classes at unit length, by view.
    """
    if len(views) < 2 or len(views[0]) < FEWEST or is_on_device(views):
        return False
    means = unit_means()
    if len(means) < 2 or means[0].shape != means[1].shape:
        return False
    rows = inputs.evenly_spaced(np.arange(len(views[0])), ROWS)
    some = [inputs.float32(inputs.host_array(view, "features")[rows]) for view in views]
    share = swapped_share(some, means)
    if share >= SWAPPED:
        _LOGGER.warning(
            f"adapted and pretrained features: {share:.0%} of {len(rows)} rows differ between the "
            "views in the opposite direction of their class in the fit, less than half are "
            "expected; the views are probably swapped"
        )
    return share >= SWAPPED


def warn_without_residual(views: Sequence[Any], given: inputs.TaskInput) -> None:
    """Warns of a task of FDC whose samples have no residual; `views` are `statistics.View`."""
    for name, view in zip(inputs.VIEWS, views, strict=False):
        if view.residual[0] == 0.0:
            name = inputs.input_name(f"{name} features", given.task)
            reason = f"{len(view.basis)} directions hold all variance of {len(given.rows)} samples"
            _LOGGER.warning(f"{name}: {reason}: RLC cannot judge inputs within them")
