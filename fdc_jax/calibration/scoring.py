"""Test-time evidence of all tasks in one compiled call (Algorithm 1, lines 14 to 18)."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from fdc_jax.calibration import measures
from fdc_jax.calibration.foreign import ForeignReference
from fdc_jax.calibration.head_rows import HeadRows
from fdc_jax.calibration.statistics import ViewStatistics

# Beyond this many tasks the kernel walks over groups of tasks, to bound its memory.
TASK_GROUP = 64


class ViewArrays(NamedTuple):
    """Statistics of all tasks in one view, padded to one rank and one class count."""

    mean: Float[Array, "tasks d"]
    basis: Float[Array, "tasks r d"]
    centre: Float[Array, "tasks d"]
    offsets: Float[Array, "tasks c d"]
    constants: Float[Array, "tasks c"]
    residual_mean: Float[Array, " tasks"]
    residual_std: Float[Array, " tasks"]
    distance_mean: Float[Array, " tasks"]
    distance_std: Float[Array, " tasks"]
    valid: Bool[Array, " tasks"]


class HeadArrays(NamedTuple):
    """Heads of all tasks, plain and with TSF folded in; padded classes have bias -inf."""

    rows: Float[Array, "tasks c d"]
    folded: Float[Array, "tasks c d"]
    bias: Float[Array, "tasks c"]


class Evidence(NamedTuple):
    """Bounded corrections of one view before scaling: tanh of the RLC and PAC arguments."""

    rlc: Float[Array, "n tasks"]
    pac: Float[Array, "n tasks"]


class Logits(NamedTuple):
    """Largest logit of each head and the head row it came from."""

    logit: Float[Array, "n tasks"]
    row: Int[Array, "n tasks"]


class Calibration(NamedTuple):
    """Numbers of a calibrator that enter the scoring kernel as values, not as shapes."""

    adapted_foreign: Float[Array, " 3"]
    pretrained_foreign: Float[Array, " 3"]
    attenuation: Float[Array, ""]


class BatchTerms(NamedTuple):
    """Everything the fusion needs; `None` for heads or a view that the kernel was not given."""

    raw: Logits | None
    filtered: Logits | None
    adapted: Evidence
    pretrained: Evidence | None
    adapted_energy: Float[Array, " n"]
    pretrained_energy: Float[Array, " n"] | None


def padded_size(size: int) -> int:
    """Returns a size not below `size`, one of four per doubling, so that shapes recur.

    At most a quarter is padding, and the number of different shapes, each of which compiles
    anew, grows with the logarithm of the largest size.
    """
    step = max(1, 2 ** (max(size, 1).bit_length() - 3))
    return -(-max(size, 1) // step) * step


def stack_view(tasks: Sequence[ViewStatistics]) -> ViewArrays:
    """Pads and stacks the statistics of tasks in one view."""
    capacity = padded_size(len(tasks))
    rank = padded_size(max(len(task.basis) for task in tasks))
    classes = padded_size(max(len(task.prototypes) for task in tasks))
    width = len(tasks[0].mean)
    arrays = ViewArrays(
        mean=np.zeros((capacity, width), np.float32),
        basis=np.zeros((capacity, rank, width), np.float32),
        centre=np.zeros((capacity, width), np.float32),
        offsets=np.zeros((capacity, classes, width), np.float32),
        constants=np.zeros((capacity, classes), np.float32),
        residual_mean=np.zeros(capacity, np.float32),
        residual_std=np.ones(capacity, np.float32),
        distance_mean=np.zeros(capacity, np.float32),
        distance_std=np.ones(capacity, np.float32),
        valid=np.arange(capacity) < len(tasks),
    )
    for index, task in enumerate(tasks):
        arrays.mean[index] = task.mean
        arrays.basis[index, : len(task.basis)] = task.basis
        frame = prototype_frame(task.prototypes, task.class_counts > 0)
        arrays.centre[index] = frame.centre
        arrays.offsets[index, : len(frame.offsets)] = frame.offsets
        arrays.constants[index] = np.inf
        arrays.constants[index, : len(frame.constants)] = frame.constants
        arrays.residual_mean[index] = task.residual_mean
        arrays.residual_std[index] = task.residual_std
        arrays.distance_mean[index] = task.distance_mean
        arrays.distance_std[index] = task.distance_std
    return jax.tree.map(jnp.asarray, arrays)


def stack_heads(
    heads: Sequence[HeadRows], bases: Float[Array, "tasks r d"], attenuation: float
) -> HeadArrays:
    """Pads and stacks heads and folds TSF into them (Algorithm 1, line 9)."""
    capacity, _, width = bases.shape
    classes = padded_size(max(len(head.rows) for head in heads))
    rows = np.zeros((capacity, classes, width), np.float32)
    bias = np.full((capacity, classes), -np.inf, np.float32)
    for index, head in enumerate(heads):
        rows[index, : len(head.rows)] = head.rows
        bias[index, : len(head.bias)] = head.bias
    folded = _fold(jnp.asarray(rows), bases, jnp.float32(attenuation))
    return HeadArrays(jnp.asarray(rows), folded, jnp.asarray(bias))


_fold = jax.jit(jax.vmap(measures.filter_features, in_axes=(0, 0, None)))


class PrototypeFrame(NamedTuple):
    """Prototypes relative to a point amid them; see `measures.prototype_distance`."""

    centre: Float[np.ndarray, " d"]
    offsets: Float[np.ndarray, "c d"]
    constants: Float[np.ndarray, " c"]


def prototype_frame(
    prototypes: Float[np.ndarray, "c d"], present: Bool[np.ndarray, " c"]
) -> PrototypeFrame:
    """Returns prototypes as offsets from their mean; absent ones at infinite distance."""
    wide = prototypes.astype(np.float64)
    centre = wide[present].mean(axis=0).astype(np.float32)
    offsets = np.where(present[:, None], wide - centre, 0.0)
    # A class whose unit features cancel has no direction: its cosine is 0, its distance 1.
    missing = 0.5 * (1.0 - wide.any(axis=1))
    constants = np.where(present, 0.5 * np.sum(offsets**2, axis=1) + missing, np.inf)
    return PrototypeFrame(centre, offsets.astype(np.float32), constants.astype(np.float32))


def foreign_coefficients(reference: ForeignReference | None) -> Float[np.ndarray, " 3"]:
    """Returns (a, b, c) such that log(p_F(u) / p_O(u)) / tau = a u^2 + b u + c (Eq. llr).

    Without a foreign reference all are zero, and so is RLC.
    """
    if reference is None:
        return np.zeros(3, np.float32)
    mean, variance, scale = reference
    quadratic = 0.5 - 0.5 / variance
    constant = -0.5 * (np.log(variance) + mean * mean / variance)
    return (np.array([quadratic, mean / variance, constant]) / scale).astype(np.float32)


class Measures(NamedTuple):
    """A batch measured against all tasks in one view; logits where heads were given."""

    ratio: Float[Array, "n tasks"]
    distance: Float[Array, "n tasks"]
    raw: Logits | None
    filtered: Logits | None


def measure(
    view: ViewArrays,
    heads: HeadArrays | None,
    features: Float[Array, "n d"],
    attenuation: Float[Array, ""],
    normalised: bool,
    neighbours: int,
) -> Measures:
    """Returns residual ratios, prototype distances and largest logits against all tasks.

    Args:
        view: statistics of the tasks.
        heads: built-in heads of the adapted view, or None.
        features: one view's features.
        attenuation: gamma of TSF.
        normalised: whether the heads divide their input by its norm.
        neighbours: K of PAC.
    """
    energies = measures.energy(features)
    unit, shortfall = measures.unit_and_shortfall(features)

    def one_task(arrays: tuple[ViewArrays, HeadArrays | None]) -> Measures:
        task, head = arrays
        ratio, coordinates = measures.residual_ratio(features, task.mean, task.basis)
        distance = measures.prototype_distance(
            unit, shortfall, task.centre, task.offsets, task.constants, neighbours
        )
        if head is None:
            return Measures(ratio, distance, None, None)
        raw_energy = filtered_energy = None
        if normalised:
            raw_energy = energies
            # TSF filters the uncentred feature.
            uncentred = coordinates + measures.products(task.mean[None], task.basis)
            filtered_energy = measures.filtered_energy(energies, uncentred, attenuation)
        raw = measures.row_logits(features, head.rows, head.bias, raw_energy)
        filtered = measures.row_logits(features, head.folded, head.bias, filtered_energy)
        return Measures(ratio, distance, _largest(raw), _largest(filtered))

    return _over_tasks(one_task, (view, heads))


@partial(jax.jit, static_argnames=("normalised", "neighbours", "nearest"))
def score_terms(
    heads: HeadArrays | None,
    adapted_view: ViewArrays,
    pretrained_view: ViewArrays | None,
    calibration: Calibration,
    adapted: Float[Array, "n d"],
    pretrained: Float[Array, "n e"] | None,
    *,
    normalised: bool,
    neighbours: int,
    nearest: bool,
) -> BatchTerms:
    """Measures a batch against all tasks and turns the measures into bounded evidence.

    Args:
        heads: built-in heads, or None when the caller scores its heads itself.
        adapted_view: statistics collected from E_t.
        pretrained_view: statistics collected from E_0, or None.
        calibration: foreign references and TSF attenuation.
        adapted: features E_T(x).
        pretrained: features E_0(x), or None.
        normalised: whether the heads divide their input by its norm.
        neighbours: K of PAC.
        nearest: standardise affinities over the candidate tasks of the input instead of over the
            task's training features.

    Returns:
        Terms of all padded tasks; the caller drops the padding.
    """
    attenuation = calibration.attenuation
    own = measure(adapted_view, heads, adapted, attenuation, normalised, neighbours)
    adapted_evidence = _evidence(own, adapted_view, calibration.adapted_foreign, nearest)
    pretrained_evidence = pretrained_energy = None
    if pretrained_view is not None and pretrained is not None:
        frozen = measure(pretrained_view, None, pretrained, attenuation, False, neighbours)
        pretrained_evidence = _evidence(
            frozen, pretrained_view, calibration.pretrained_foreign, nearest
        )
        pretrained_energy = measures.energy(pretrained)
    return BatchTerms(
        own.raw,
        own.filtered,
        adapted_evidence,
        pretrained_evidence,
        measures.energy(adapted),
        pretrained_energy,
    )


def _largest(logits: Float[Array, "n c"]) -> Logits:
    return Logits(jnp.max(logits, axis=-1), jnp.argmax(logits, axis=-1))


def _over_tasks(function: Callable[[Any], Any], arrays: Any) -> Any:
    """Applies a function of one task to all tasks; results are [n, tasks]."""
    tasks = jax.tree.leaves(arrays)[0].shape[0]
    if tasks <= TASK_GROUP:
        results = jax.vmap(function)(arrays)
    else:
        results = jax.lax.map(function, arrays, batch_size=TASK_GROUP)
    return jax.tree.map(jnp.transpose, results)


def _evidence(
    batch: Measures, view: ViewArrays, foreign: Float[Array, " 3"], nearest: bool
) -> Evidence:
    ratio, distance = batch.ratio, batch.distance
    residual = (ratio - view.residual_mean) / view.residual_std
    rlc = jnp.tanh((foreign[0] * residual + foreign[1]) * residual + foreign[2])
    if nearest:
        count = jnp.sum(view.valid)
        mean = jnp.sum(distance * view.valid, axis=1, keepdims=True) / count
        deviation = (mean - distance) * view.valid
        std = jnp.sqrt(jnp.sum(jnp.square(deviation), axis=1, keepdims=True) / count)
        affinity = deviation / jnp.maximum(std, measures.SCALE_FLOOR)
    else:
        affinity = (view.distance_mean - distance) / view.distance_std
    return Evidence(rlc, jnp.tanh(affinity))
