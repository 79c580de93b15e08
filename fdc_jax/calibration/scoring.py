"""Test-time evidence of all tasks in one compiled call (Algorithm 1, lines 14 to 18)."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fdc_jax.calibration import measures, whitening
from fdc_jax.calibration.stacking import HeadArrays, ViewArrays
from fdc_jax.calibration.whitening import Prototypes

# Beyond this many tasks the kernel walks over groups of tasks, to bound its memory.
TASK_GROUP = 64


class Evidence(NamedTuple):
    """Evidence of one view before scaling: tanh of the RLC argument, standardised affinity."""

    rlc: Float[Array, "n tasks"]
    affinity: Float[Array, "n tasks"]


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
    adapted_cosines: Float[Array, "n tasks c"] | None = None
    pretrained_cosines: Float[Array, "n tasks c"] | None = None
    raw_rows: Float[Array, "n tasks c"] | None = None
    filtered_rows: Float[Array, "n tasks c"] | None = None


class Measures(NamedTuple):
    """A batch measured against all tasks in one view; logits where heads were given."""

    ratio: Float[Array, "n tasks"]
    distance: Float[Array, "n tasks"]
    raw: Logits | None
    filtered: Logits | None
    raw_rows: Float[Array, "n tasks c"] | None = None
    filtered_rows: Float[Array, "n tasks c"] | None = None


def measure(
    view: ViewArrays,
    heads: HeadArrays | None,
    features: Float[Array, "n d"],
    attenuation: Float[Array, ""],
    normalised: bool,
    neighbours: int,
    all_rows: bool = False,
) -> Measures:
    """Returns residual ratios, prototype distances and largest logits against all tasks.

    Args:
        view: statistics of the tasks.
        heads: built-in heads of the adapted view, or None.
        features: one view's features.
        attenuation: gamma of TSF.
        normalised: whether the heads divide their input by its norm.
        neighbours: K of PAC.
        all_rows: return the logits of all classes, too.
    """
    energies = measures.energy(features)
    unit, directed = measures.directions(features)

    def one_task(arrays: tuple[ViewArrays, HeadArrays | None]) -> Measures:
        task, head = arrays
        ratio, coordinates = measures.residual_ratio(features, task.mean, task.basis)
        distance = measures.prototype_distance(
            unit, directed, task.centre, task.offsets, task.constants, neighbours
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
        largest = Measures(ratio, distance, _largest(raw), _largest(filtered))
        return largest._replace(raw_rows=raw, filtered_rows=filtered) if all_rows else largest

    return _over_tasks(one_task, (view, heads))


@partial(jax.jit, static_argnames=("normalised", "neighbours", "nearest", "all_rows"))
def score_terms(
    heads: HeadArrays | None,
    adapted_view: ViewArrays,
    pretrained_view: ViewArrays | None,
    calibration: Calibration,
    adapted: Float[Array, "n d"],
    pretrained: Float[Array, "n e"] | None,
    prototypes: Sequence[Prototypes] = (),
    *,
    normalised: bool,
    neighbours: int,
    nearest: bool,
    all_rows: bool = False,
) -> BatchTerms:
    """Measures a batch against all tasks and turns the measures into evidence.

    Args:
        heads: built-in heads, or None when the caller scores its heads itself.
        adapted_view: statistics collected from E_t.
        pretrained_view: statistics collected from E_0, or None.
        calibration: foreign references and TSF attenuation.
        adapted: features E_T(x).
        pretrained: features E_0(x), or None.
        prototypes: of the views in the within-class metric; none for the paper's FDC.
        normalised: whether the heads divide their input by its norm.
        neighbours: K of PAC.
        nearest: standardise affinities over the candidate tasks of the input instead of over the
            task's training features.
        all_rows: return the logits of all classes, too.

    Returns:
        Terms of all padded tasks; the caller drops the padding.
    """
    attenuation = calibration.attenuation
    own = measure(adapted_view, heads, adapted, attenuation, normalised, neighbours, all_rows)
    adapted_evidence = _evidence(own, adapted_view, calibration.adapted_foreign, nearest)
    pretrained_evidence = pretrained_energy = pretrained_cosines = None
    adapted_cosines = whitening.cosines(prototypes[0], adapted) if prototypes else None
    if pretrained_view is not None and pretrained is not None:
        frozen = measure(pretrained_view, None, pretrained, attenuation, False, neighbours)
        pretrained_evidence = _evidence(
            frozen, pretrained_view, calibration.pretrained_foreign, nearest
        )
        pretrained_energy = measures.energy(pretrained)
        if prototypes:
            pretrained_cosines = whitening.cosines(prototypes[1], pretrained)
    return BatchTerms(
        own.raw,
        own.filtered,
        adapted_evidence,
        pretrained_evidence,
        measures.energy(adapted),
        pretrained_energy,
        adapted_cosines,
        pretrained_cosines,
        own.raw_rows,
        own.filtered_rows,
    )


def _largest(logits: Float[Array, "n c"]) -> Logits:
    return Logits(jnp.max(logits, axis=-1), jnp.argmax(logits, axis=-1))


def _over_tasks(function: Callable[[Any], Any], arrays: Any) -> Any:
    """Applies a function of one task to all tasks; results are [n, tasks, ...]."""
    tasks = jax.tree.leaves(arrays)[0].shape[0]
    if tasks <= TASK_GROUP:
        results = jax.vmap(function)(arrays)
    else:
        results = jax.lax.map(function, arrays, batch_size=TASK_GROUP)
    return jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), results)


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
    return Evidence(rlc, affinity)
