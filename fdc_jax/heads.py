"""Classification heads as plain pytrees: features in, one logit per class of the task out.

A head is what a learner leaves behind for one task. FDC keeps every head as it is and, with TSF,
feeds it a filtered feature (paper, "Test-Time Calibration"). All are affine in h or in h/|h|:
`head.affine` is that one form. Arrays may be of NumPy or JAX, and so are the results.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import jax

if TYPE_CHECKING:
    from jaxtyping import Float

# Safeguard of every feature normalisation (paper, "Test-Time Calibration").
NORM_FLOOR = 1e-12


def unit(vectors: Float[Any, "... d"]) -> Float[Any, "... d"]:
    """Divides vectors by their Euclidean norm, floored at 1e-12."""
    library = vectors.__array_namespace__()
    norm = library.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / library.maximum(norm, NORM_FLOOR)


def products(left: Float[Any, "n d"], rows: Float[Any, "c d"]) -> Float[Any, "n c"]:
    """Returns all inner products of two sets of rows; JAX computes them in full float32."""
    with jax.default_matmul_precision("highest"):
        return left @ rows.T


class Affine(NamedTuple):
    """Logits rows . h + bias, where h is first divided by its norm when `normalised`."""

    rows: Float[Any, "c d"]
    bias: Float[Any, " c"] | float
    normalised: bool


def _affine_logits(head: Any, features: Float[Any, "n d"]) -> Float[Any, "n c"]:
    """Returns the scores of the task's classes, before any calibration."""
    rows, bias, normalised = head.affine
    scores = products(unit(features) if normalised else features, rows)
    return scores + (bias if isinstance(bias, float) else bias[None])


class LinearHead(NamedTuple):
    """Logits W h + b (paper, Eq. raw); b is zero where none is given."""

    weight: Float[Any, "c d"]
    bias: Float[Any, " c"] | float = 0.0

    affine = property(lambda head: Affine(head.weight, head.bias, False))
    logits = _affine_logits


class NormalisedLinearHead(NamedTuple):
    """Logits W h/|h| + b: linear on the feature's direction, rows of any length; b may be zero."""

    weight: Float[Any, "c d"]
    bias: Float[Any, " c"] | float = 0.0

    affine = property(lambda head: Affine(head.weight, head.bias, True))
    logits = _affine_logits


class CosineHead(NamedTuple):
    """Logits scale * cos(h, row of W)."""

    weight: Float[Any, "c d"]
    scale: float | Float[Any, ""] = 1.0

    affine = property(lambda head: Affine(head.scale * unit(head.weight), 0.0, True))
    logits = _affine_logits


class NearestMeanHead(NamedTuple):
    """Logits -|h/|h| - p/|p||^2 = 2 cos(h, p) - 2 for class means p."""

    means: Float[Any, "c d"]

    affine = property(lambda head: Affine(2.0 * unit(head.means), -2.0, True))
    logits = _affine_logits


Head: TypeAlias = LinearHead | NormalisedLinearHead | CosineHead | NearestMeanHead

# The heads under the names that files and messages use.
KINDS = {
    LinearHead: "linear",
    NormalisedLinearHead: "normalised_linear",
    CosineHead: "cosine",
    NearestMeanHead: "nearest_mean",
}
