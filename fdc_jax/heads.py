"""Classification heads of tasks as pytrees: features [n, d] in, logits [n, c] out.

FDC leaves heads unchanged; TSF filters the features that they get (paper, "Test-Time
Calibration"). All heads are affine in h or in h/|h|: `head.affine` is that form. Arrays are of
NumPy or JAX, and the results likewise.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
from jaxtyping import Float

# Safeguard of every feature normalisation (paper, "Test-Time Calibration").
NORM_FLOOR = 1e-12


def unit(vectors: Float[Any, "... d"]) -> Float[Any, "... d"]:
    """Returns vectors divided by their Euclidean norm, at least 1e-12."""
    library = vectors.__array_namespace__()
    norm = library.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / library.maximum(norm, NORM_FLOOR)


def products(left: Float[Any, "n d"], rows: Float[Any, "c d"]) -> Float[Any, "n c"]:
    """Returns all inner products of two sets of rows; JAX computes them in full float32."""
    with jax.default_matmul_precision("highest"):
        return left @ rows.T


class Affine(NamedTuple):
    """Logits rows . h + bias; h is divided by its norm first if `normalised`."""

    rows: Float[Any, "c d"]
    bias: Float[Any, " c"] | float
    normalised: bool


def _affine_logits(head: Any, features: Float[Any, "n d"]) -> Float[Any, "n c"]:
    """Returns the logits [n, c] of features [n, d], by the head's affine form."""
    rows, bias, normalised = head.affine
    logits = products(unit(features) if normalised else features, rows)
    # An explicit axis, since tests forbid JAX to promote ranks.
    return logits + (bias if isinstance(bias, float) else bias[None])


class LinearHead(NamedTuple):
    """Logits W h + b (paper, Eq. raw)."""

    weight: Float[Any, "c d"]
    bias: Float[Any, " c"] | float = 0.0

    affine = property(lambda head: Affine(head.weight, head.bias, False))
    logits = _affine_logits


class NormalisedLinearHead(NamedTuple):
    """Logits W h/|h| + b; the rows of W are not normalised."""

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

# Names of the heads in files and messages.
KINDS = {
    LinearHead: "linear",
    NormalisedLinearHead: "normalised_linear",
    CosineHead: "cosine",
    NearestMeanHead: "nearest_mean",
}


def as_head(layer: Any) -> Any:
    """Returns a linear layer of PyTorch or Flax as a `LinearHead`, and other values unchanged.

    PyTorch's layer has `weight` [c, d] and `bias`. Flax's has `kernel` [d, c] and `bias`, as
    attributes (nnx) or as parameters in a mapping (linen).
    """
    if isinstance(layer, Mapping):
        weight = None
        kernel, bias = layer.get("kernel"), layer.get("bias")
    elif hasattr(layer, "in_features"):
        kernel, weight, bias = (getattr(layer, name, None) for name in ("kernel", "weight", "bias"))
    else:
        return layer
    if kernel is not None:
        weight = kernel.T
    bias = 0.0 if bias is None else bias
    return layer if weight is None else LinearHead(weight, bias)
