"""How sure an answer is, and how like what was learned an image is (docs/predict.md).

While the images of a task are at hand, its classes are described once more without a fifth of each
one's images. Of these are kept minus their log probability, summed, at some temperatures, and
quantiles of their familiarity: how much likelier the nearest class is than one Gaussian of
everything, as a log. Scores are divided by the distance of the image to that Gaussian, as squared
distances of far images differ by more, right or wrong; and by the temperature with the least sum.
Probabilities are their softmax, but for a tenth of the share of left-out images that were answered
wrong, which all classes share alike: the encoder learned these images, and moves on after them, so
that new ones are wrong more often where they seem sure. The typicality of an image is the share of
left-out images, itself among them, that are no more familiar than it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from scipy.special import log_softmax, softmax

from fdc_jax.calibration import inputs
from fdc_jax.heads import products, unit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from jaxtyping import Bool, Float, Int

# The first one, the least sure, is taken where no image could be left out.
TEMPERATURES = np.geomspace(64.0, 0.25, 65)
# Of the share of left-out images answered wrong, so much is spread over all classes.
SPREAD_OUT = 0.1
# Every so manieth image of a class is left out, and so many of a task are measured at most, while
# there are no more classes.
EVERY, MEASURED, CLASSES = 5, 256, 1000
# Of their familiarity so many quantiles are kept, and no number of an image.
QUANTILES = 64
# Images that are less typical are unlike anything learned.
UNTYPICAL = 0.05


class Confidence(NamedTuple):
    """What is kept of images that were left out; q is a multiple of `QUANTILES`."""

    losses: Float[np.ndarray, " temperatures"] = np.zeros(len(TEMPERATURES))
    familiarity: Float[np.ndarray, " q"] = np.zeros(0, np.float32)
    answers: Float[np.ndarray, " 2"] = np.zeros(2)  # how many were wrong, and how many there were

    def with_task(
        self,
        columns: Int[np.ndarray, " n"],
        scores: Float[np.ndarray, "n classes"],
        spread: Float[np.ndarray, " n"],
        familiarity: Float[np.ndarray, " n"],
    ) -> Confidence:
        """Returns this with the left-out images of one more task, of the classes of `columns`."""
        true = np.arange(len(columns)), columns
        scaled = _scaled(scores, spread)
        losses = [-log_softmax(scaled / each, axis=1)[true].sum() for each in TEMPERATURES]
        kept = np.quantile(familiarity, (np.arange(QUANTILES) + 0.5) / QUANTILES)
        every = np.sort(np.append(self.familiarity, kept.astype(np.float32)))
        wrong = np.count_nonzero(scores.argmax(axis=1) != columns)
        answers = self.answers + np.array([wrong, len(columns)])
        return Confidence(self.losses + losses, every, answers)

    def probabilities(
        self, scores: Float[np.ndarray, "n classes"], spread: Float[np.ndarray, " n"]
    ) -> Float[np.ndarray, "n classes"]:
        """Returns the probability of every class; in each row they sum to 1."""
        temperature = TEMPERATURES[np.argmin(self.losses)]
        wrong, measured = self.answers
        # Where no left-out answer was wrong, the next one may be: Laplace's rule.
        spread_out = SPREAD_OUT * (wrong + 1.0) / (measured + 2.0)
        found = softmax(_scaled(scores, spread) / temperature, axis=1)
        known = np.isfinite(scores)  # not of a class without an image
        return (1.0 - spread_out) * found + spread_out * known / known.sum(axis=1, keepdims=True)

    def typicality(self, familiarity: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """Returns the share of left-out images, in (0, 1], that are no more familiar."""
        below = np.searchsorted(self.familiarity, familiarity, side="right")
        return (1.0 + below) / (1.0 + len(self.familiarity))


def _scaled(
    scores: Float[np.ndarray, "n classes"], spread: Float[np.ndarray, " n"]
) -> Float[np.ndarray, "n classes"]:
    return scores.astype(np.float64) / np.maximum(spread, 1e-6)[:, None]


def held_out(rows: Int[np.ndarray, " n"]) -> Bool[np.ndarray, " n"]:
    """Tells which images are left out: the first of every class, the sixth, and so on.

    None is of a class of one image.
    """
    counts = np.bincount(rows)
    place = np.empty(len(rows), int)
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    place[np.argsort(rows, kind="stable")] = np.arange(len(rows)) - starts
    return (place % EVERY == 0) & (counts[rows] > 1)


def measured(held: Bool[np.ndarray, " n"]) -> Int[np.ndarray, " m"]:
    """Returns the indices of the held-out images that are measured, evenly spaced."""
    rows = np.flatnonzero(held)
    return rows[np.linspace(0, len(rows) - 1, min(len(rows), MEASURED)).astype(int)]


def shared_terms(metrics: Sequence[Any], *views: Float[Any, "n d"]) -> dict[str, Any]:
    """Returns by view of the class Gaussians what the distances to all classes share.

    That is g' P g / 2, about the origin of the metric; and under "VIEW, whole" half the squared
    distance to one Gaussian of all images.
    """
    terms = {}
    for name, known, features in zip(inputs.VIEWS, metrics, views, strict=False):
        near, far = unit(features) - known.origin, unit(features) - known.middle
        terms[name] = (products(near, known.precision) * near).sum(axis=-1) / 2
        terms[f"{name}, whole"] = (products(far, known.whole) * far).sum(axis=-1) / 2
    return terms


def evidence(
    scores: Float[np.ndarray, "n classes"],
    shared: Mapping[str, Float[np.ndarray, " n"]],
    weights: Mapping[str, Any],
    width: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns scores of classes, the distance that they are divided by, and the familiarity.

    `scores` are weighted sums over views, of so many features together. Means are taken instead,
    since weights differ between tasks.
    """
    total = sum(weights.values())
    own = sum(weight * shared[name] for name, weight in weights.items()) / total
    whole = sum(weight * shared[f"{name}, whole"] for name, weight in weights.items()) / total
    whole, scores = np.maximum(whole, 0.0), scores / total  # negative by rounding
    return scores, np.sqrt(whole / width), scores.max(axis=1) - own + whole


def of_labels(
    probabilities: Float[np.ndarray, "n classes"],
    classes: Sequence[Int[np.ndarray, " c"]],
    labels: Int[np.ndarray, " n"],
) -> Float[np.ndarray, " n"]:
    """Returns the probability of one label of each row, whoever predicted it."""
    known = np.concatenate(classes)
    order = np.argsort(known)
    columns = order[np.searchsorted(known, labels, sorter=order)]
    return probabilities[np.arange(len(labels)), columns]
