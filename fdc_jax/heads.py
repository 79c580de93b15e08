"""Classification heads as plain pytrees: features in, one logit per class of the task out.

A head is what a learner leaves behind for one task. FDC keeps every head as it is and, with TSF,
feeds it a filtered feature (paper, "Test-Time Calibration").
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# Safeguard of every feature normalisation (paper, "Test-Time Calibration").
NORM_FLOOR = 1e-12


class Head(Protocol):
    """What every head offers."""

    def logits(self, features: Float[Array, "n d"]) -> Float[Array, "n c"]:
        """Returns the scores of the task's classes, before any calibration."""
        ...


def unit(vectors: Float[Array, "... d"]) -> Float[Array, "... d"]:
    """Divides vectors by their Euclidean norm, floored at 1e-12."""
    norm = jnp.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / jnp.maximum(norm, NORM_FLOOR)


def _products(features: Float[Array, "n d"], rows: Float[Array, "c d"]) -> Float[Array, "n c"]:
    return jnp.matmul(features, rows.T, precision=jax.lax.Precision.HIGHEST)


class LinearHead(NamedTuple):
    """Logits W h + b (paper, Eq. raw)."""

    weight: Float[Array, "c d"]
    bias: Float[Array, " c"]

    def logits(self, features: Float[Array, "n d"]) -> Float[Array, "n c"]:
        """Returns W h + b for each row h."""
        return _products(features, self.weight) + self.bias


class NormalisedLinearHead(NamedTuple):
    """Logits W h/|h| + b: linear on the feature's direction, rows of any length."""

    weight: Float[Array, "c d"]
    bias: Float[Array, " c"]

    def logits(self, features: Float[Array, "n d"]) -> Float[Array, "n c"]:
        """Returns W h/|h| + b for each row h."""
        return _products(unit(features), self.weight) + self.bias


class CosineHead(NamedTuple):
    """Logits scale * cos(h, row of W)."""

    weight: Float[Array, "c d"]
    scale: float | Float[Array, ""] = 1.0

    def logits(self, features: Float[Array, "n d"]) -> Float[Array, "n c"]:
        """Returns the scaled cosine of each feature to each class row."""
        return self.scale * _products(unit(features), unit(self.weight))


class NearestMeanHead(NamedTuple):
    """Logits -|h/|h| - p/|p||^2 = 2 cos(h, p) - 2 for class means p."""

    means: Float[Array, "c d"]

    def logits(self, features: Float[Array, "n d"]) -> Float[Array, "n c"]:
        """Returns minus the squared distance between unit features and unit class means."""
        return 2.0 * _products(unit(features), unit(self.means)) - 2.0


class FunctionHead(NamedTuple):
    """A user's own head: `function(parameters, features) -> logits`."""

    function: Callable[[Any, Float[Array, "n d"]], Float[Array, "n c"]]
    parameters: Any = None

    def logits(self, features: Float[Array, "n d"]) -> Float[Array, "n c"]:
        """Returns whatever the user's function returns."""
        return self.function(self.parameters, features)
