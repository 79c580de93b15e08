"""What FDC measures of a feature against one task: residual ratio, prototype distance, logits.

Pure functions of one task's arrays; `jax.vmap` runs them over tasks. Ranks and class counts are
padded: a zero basis row and a prototype at infinite distance change nothing.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fdc_jax.heads import NORM_FLOOR

# Floors of the paper, "Test-Time Calibration".
SCALE_FLOOR = 1e-6
ENERGY_FLOOR = 1e-12


def products(left: Float[Array, "n d"], rows: Float[Array, "c d"]) -> Float[Array, "n c"]:
    """Returns all inner products of two sets of rows in full float32."""
    return jnp.matmul(left, rows.T, precision=jax.lax.Precision.HIGHEST)


def energy(vectors: Float[Array, "... d"]) -> Float[Array, "..."]:
    """Returns squared Euclidean norms."""
    return jnp.sum(jnp.square(vectors), axis=-1)


def residual_ratio(
    features: Float[Array, "n d"], mean: Float[Array, " d"], basis: Float[Array, "r d"]
) -> tuple[Float[Array, " n"], Float[Array, "n r"]]:
    """Returns the share of centred energy outside the subspace (Eq. residual), and coordinates.

    Centring before any square keeps the ratio exact to float32 however far the mean is from zero.
    """
    centred = features - mean
    coordinates = products(centred, basis)
    total = energy(centred)
    outside = jnp.maximum(total - energy(coordinates), 0.0)
    return outside / jnp.maximum(total, ENERGY_FLOOR), coordinates


def prototype_distance(
    unit_features: Float[Array, "n d"],
    directed: Bool[Array, " n"],
    centre: Float[Array, " d"],
    offsets: Float[Array, "c d"],
    constants: Float[Array, " c"],
    neighbours: int,
) -> Float[Array, " n"]:
    """Returns one minus the affinity A_{t,K} of Eq. par: the mean of the K least cosine distances.

    The cosine distance of unit vectors is half their squared distance. Expanding that square
    around a point amid the prototypes keeps the digits that 1 - cos would cancel where all
    features point nearly the same way.

    Args:
        unit_features: features divided by their norm.
        directed: false for zero features, whose cosine to everything is 0.
        centre: a point amid the task's prototypes.
        offsets: prototypes minus `centre`.
        constants: half the squared length of `offsets`; infinite where there is no prototype.
        neighbours: K.
    """
    centred = unit_features - centre
    distances = 0.5 * energy(centred)[:, None] + constants - products(centred, offsets)
    if neighbours == 1:
        nearest = jnp.min(distances, axis=-1)
    else:
        nearest = -jnp.mean(jax.lax.top_k(-distances, neighbours)[0], axis=-1)
    return jnp.where(directed, nearest, 1.0)


def directions(features: Float[Array, "n d"]) -> tuple[Float[Array, "n d"], Bool[Array, " n"]]:
    """Returns features over their norm (floored at 1e-12), and which of them reach that floor."""
    norm = jnp.sqrt(energy(features))
    return features / jnp.maximum(norm, NORM_FLOOR)[:, None], norm >= NORM_FLOOR


def filter_features(
    features: Float[Array, "n d"], basis: Float[Array, "r d"], attenuation: Float[Array, ""]
) -> Float[Array, "n d"]:
    """Returns (1 - gamma) h + gamma (h U) U^T (Eq. osp), the linear map of TSF on rows h.

    The map is symmetric: applied to weight rows it folds TSF into a linear head.
    """
    inside = jnp.matmul(products(features, basis), basis, precision=jax.lax.Precision.HIGHEST)
    return (1.0 - attenuation) * features + attenuation * inside


def filtered_energy(
    energies: Float[Array, " n"],
    coordinates: Float[Array, "n r"],
    attenuation: Float[Array, ""],
) -> Float[Array, " n"]:
    """Returns the squared norm of filtered features from |h|^2 and their coordinates h U."""
    kept = jnp.square(1.0 - attenuation)
    return kept * energies + (1.0 - kept) * energy(coordinates)


def row_logits(
    features: Float[Array, "n d"],
    rows: Float[Array, "c d"],
    bias: Float[Array, " c"],
    energies: Float[Array, " n"] | None,
) -> Float[Array, "n c"]:
    """Returns h.w + b, with h of length one where its energy is given (cosine scoring)."""
    logits = products(features, rows)
    if energies is not None:
        logits = logits / jnp.maximum(jnp.sqrt(energies), NORM_FLOOR)[:, None]
    return logits + bias
