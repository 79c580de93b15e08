"""Probabilities of the answers of class Gaussians (docs/predict.md).

While the images of a task are at hand, its classes are also fitted without every fifth image. The
scores of an image are divided by its distance to one Gaussian of all images, since scores of far
images differ by more, and by the temperature under which the held-out images are most likely.
Probabilities are the softmax of the quotients. A tenth of the share of wrong held-out answers is
spread over all classes, since the encoder was trained on these images and changes after them. Only
sums over held-out images are kept.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.special import log_softmax, softmax

# Without held-out images the first temperature applies.
TEMPERATURES = np.geomspace(64.0, 0.25, 65)
# Share of the held-out error that is spread over all classes.
SPREAD_OUT = 0.1
# Every fifth image of a class is held out, and at most 256 images of a task are measured; none if
# there are more than 1,000 classes.
EVERY, MEASURED, CLASSES = 5, 256, 1000


class Confidence(NamedTuple):
    """Sums over held-out images."""

    losses: Float[np.ndarray, " temperatures"] = np.zeros(len(TEMPERATURES))
    answers: Float[np.ndarray, " 2"] = np.zeros(2)  # wrong, all

    def with_task(
        self,
        columns: Int[np.ndarray, " n"],
        scores: Float[np.ndarray, "n classes"],
        spread: Float[np.ndarray, " n"],
    ) -> Confidence:
        """Returns the sums with held-out images of a further task; `columns` are their classes."""
        true, scaled = (np.arange(len(columns)), columns), _scaled(scores, spread)
        losses = [-log_softmax(scaled / t, axis=1)[true].sum() for t in TEMPERATURES]
        wrong = np.count_nonzero(scores.argmax(axis=1) != columns)
        return Confidence(self.losses + losses, self.answers + np.array([wrong, len(columns)]))

    def probabilities(
        self, scores: Float[np.ndarray, "n classes"], spread: Float[np.ndarray, " n"]
    ) -> Float[np.ndarray, "n classes"]:
        """Returns the probability of every class; in each row they sum to 1."""
        temperature = TEMPERATURES[np.argmin(self.losses)]
        wrong, measured = self.answers
        # Laplace's rule, above 0 if no held-out answer was wrong.
        spread_out = SPREAD_OUT * (wrong + 1.0) / (measured + 2.0)
        likely = softmax(_scaled(scores, spread) / temperature, axis=1)
        fitted = np.isfinite(scores)  # False for classes without an image
        return (1.0 - spread_out) * likely + spread_out * fitted / fitted.sum(axis=1, keepdims=True)


def _scaled(
    scores: Float[np.ndarray, "n classes"], spread: Float[np.ndarray, " n"]
) -> Float[np.ndarray, "n classes"]:
    return scores.astype(np.float64) / np.maximum(spread, 1e-6)[:, None]


def held_out(rows: Int[np.ndarray, " n"]) -> Bool[np.ndarray, " n"]:
    """Returns True for the first image of every class, the sixth, and so on.

    Of a class with a single image none is held out.
    """
    counts = np.bincount(rows)
    index = np.empty(len(rows), int)
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    index[np.argsort(rows, kind="stable")] = np.arange(len(rows)) - starts
    return (index % EVERY == 0) & (counts[rows] > 1)
