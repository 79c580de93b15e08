"""A feature file measured against its tasks at several settings of FDC at once.

FDC fits a task in two passes, and so does this, sharing what settings have in common: means,
eigenvectors and prototypes depend on none of them; all retained energies take their residual ratios
from one set of coordinates, all attenuations their logits from two products, and all numbers of
neighbours their affinities from one sorted list of distances.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fdc_jax.calibration import Settings, inputs, measures, moments, stacking
from fdc_jax.calibration.foreign import ForeignReference, fit_foreign_reference
from fdc_jax.calibration.head_rows import head_rows
from fdc_jax.calibration.scoring import Logits
from fdc_jax.calibration.statistics import population_moments
from fdc_jax.feature_files import FeatureSet
from fdc_jax.heads import NORM_FLOOR
from fdc_jax.report.spectra import TaskSpectrum, ViewSpectrum, spectra

# The kernel ---------------------------------------------------------------------------------------


class TaskArrays(NamedTuple):
    """A task in one view on the device, padded to the rank and class count of the largest."""

    mean: Float[Array, " d"]
    basis: Float[Array, "r d"]
    # One row per retained energy: 1 for the directions that it keeps.
    kept: Float[Array, "shares r"]
    centre: Float[Array, " d"]
    offsets: Float[Array, "c d"]
    constants: Float[Array, " c"]


class HeadArrays(NamedTuple):
    """A head on the device; padded classes have bias -inf. `inside` is W U."""

    rows: Float[Array, "c d"]
    bias: Float[Array, " c"]
    inside: Float[Array, "c r"]


class Filters(NamedTuple):
    """Settings of TSF: which retained energy, and the attenuation."""

    share: Int[Array, " filters"]
    attenuation: Float[Array, " filters"]


class Measures(NamedTuple):
    """Images against tasks; the distances for 1, 2, ... neighbours; logits where heads were given.

    Host arrays carry the tasks as their first axis.
    """

    ratio: Float[Array | np.ndarray, "*tasks n shares"]
    distance: Float[Array | np.ndarray, "*tasks n neighbours"] | None
    raw: Logits | None
    filtered: Logits | None


@partial(jax.jit, static_argnames=("neighbours", "normalised"))
def _measure(
    task: TaskArrays,
    head: HeadArrays | None,
    features: Float[Array, "n d"],
    filters: Filters,
    neighbours: int,
    normalised: bool,
) -> Measures:
    centred = features - task.mean
    coordinates = measures.products(centred, task.basis)
    total = measures.energy(centred)[:, None]
    outside = jnp.maximum(total - measures.products(jnp.square(coordinates), task.kept), 0.0)
    ratio = outside / jnp.maximum(total, measures.ENERGY_FLOOR)
    distance = _distances(task, features, neighbours) if neighbours else None
    if head is None:
        return Measures(ratio, distance, None, None)
    plain = measures.products(features, head.rows)
    # TSF filters the uncentred feature.
    uncentred = coordinates + measures.products(task.mean[None], task.basis)
    energies = measures.energy(features)

    def logits(values: Float[Array, "n c"], energies: Float[Array, " n"]) -> Logits:
        if normalised:
            values = values / jnp.maximum(jnp.sqrt(energies), NORM_FLOOR)[:, None]
        values = values + head.bias
        return Logits(jnp.max(values, axis=1), jnp.argmax(values, axis=1))

    def filtered(share: Int[Array, ""], attenuation: Float[Array, ""]) -> Logits:
        inside = uncentred * task.kept[share]
        values = (1.0 - attenuation) * plain + attenuation * measures.products(inside, head.inside)
        return logits(values, measures.filtered_energy(energies, inside, attenuation))

    every = jax.vmap(filtered, out_axes=1)(*filters)
    return Measures(ratio, distance, logits(plain, energies), every)


def _distances(
    task: TaskArrays, features: Float[Array, "n d"], neighbours: int
) -> Float[Array, "n neighbours"]:
    """Returns one minus the affinity A_{t,K} for K = 1 .. `neighbours`."""
    unit, directed = measures.directions(features)
    centred = unit - task.centre
    distances = (
        0.5 * measures.energy(centred)[:, None]
        + task.constants
        - measures.products(centred, task.offsets)
    )
    nearest = -jax.lax.top_k(-distances, neighbours)[0]
    means = jnp.cumsum(nearest, axis=1) / jnp.arange(1, neighbours + 1)
    return jnp.where(directed[:, None], means, 1.0)


# Fitting ------------------------------------------------------------------------------------------


class ViewFit(NamedTuple):
    """Statistics of all tasks in one view.

    Attributes:
        tasks: their arrays.
        residual_mean: means of the tasks' own residual ratios, per retained energy.
        residual_std: their population standard deviations, floored as everywhere in FDC.
        distance_mean: one minus the means of their own affinities, per number of neighbours.
        distance_std: their population standard deviations.
        references: foreign reference of RLC per retained energy.
    """

    tasks: list[TaskArrays]
    residual_mean: Float[np.ndarray, "tasks shares"]
    residual_std: Float[np.ndarray, "tasks shares"]
    distance_mean: Float[np.ndarray, "tasks neighbours"]
    distance_std: Float[np.ndarray, "tasks neighbours"]
    references: list[ForeignReference | None]

    def residuals(
        self, ratio: Float[np.ndarray, "tasks n shares"], share: int
    ) -> Float[np.ndarray, "tasks n"]:
        """Returns u of Eq. residual for residual ratios against all tasks, by their own moments."""
        wide = ratio[:, :, share].astype(np.float64)
        return (wide - self.residual_mean[:, share, None]) / self.residual_std[:, share, None]

    def affinities(
        self, distance: Float[np.ndarray, "tasks n neighbours"], neighbours: int
    ) -> Float[np.ndarray, "tasks n"]:
        """Returns q of Eq. par for distances against all tasks, by their own moments."""
        place = neighbours - 1
        gain = self.distance_mean[:, place, None] - distance[:, :, place].astype(np.float64)
        return gain / self.distance_std[:, place, None]


class Plan(NamedTuple):
    """What the kernel is asked for.

    Attributes:
        filters: for TSF, a place in the retained energies and an attenuation each.
        neighbours: the largest K.
        normalised: whether the heads divide their input by its norm.
    """

    filters: list[tuple[int, float]]
    neighbours: int
    normalised: bool


class Fit(NamedTuple):
    """Statistics of all tasks at several settings.

    Attributes:
        shares: the different retained energies.
        plan: what is measured of images.
        views: adapted view first.
        heads: those to predict with.
        raw_scale: population standard deviations of the largest own logits.
        filtered_scale: the same with TSF, per filter.
    """

    shares: list[float]
    plan: Plan
    views: list[ViewFit]
    heads: list[HeadArrays]
    raw_scale: Float[np.ndarray, " tasks"]
    filtered_scale: Float[np.ndarray, "tasks filters"]

    def measure(
        self, view: int, features: Float[np.ndarray, "n d"], with_heads: bool = False
    ) -> Measures:
        """Measures images against all tasks in one view."""
        heads = self.heads if with_heads else None
        return _measure_all(self.views[view].tasks, heads, features, self.plan)


def fit(
    features: FeatureSet, settings: Sequence[Settings], tasks: Sequence[TaskSpectrum] | None = None
) -> Fit:
    """Fits statistics and score scales at all settings by the causal protocol of Algorithm 1.

    Args:
        features: of a whole stream.
        settings: checked; their numbers of neighbours must be feasible.
        tasks: `spectra(features)`, where the caller has them.
    """
    tasks = spectra(features) if tasks is None else tasks
    shares = list(dict.fromkeys(each.retained_energy for each in settings))
    filters = list(
        dict.fromkeys((shares.index(each.retained_energy), each.attenuation) for each in settings)
    )
    neighbours = max(each.neighbours for each in settings)
    views = [
        _task_arrays([task.views[view] for task in tasks], tasks, shares)
        for view in range(len(tasks[0].views))
    ]
    first_heads, normalised = _head_arrays([task.head for task in features.tasks], views[0])
    final = features.final_heads
    heads = first_heads if final is None else _head_arrays(final, views[0])[0]
    plan = Plan(filters, neighbours, normalised)
    adapted, scales = _fit_view(
        [task.adapted for task in features.tasks], views[0], first_heads, plan
    )
    fits = [adapted]
    if len(views) == 2:
        pretrained = [task.pretrained for task in features.tasks if task.pretrained is not None]
        fits.append(_fit_view(pretrained, views[1], None, plan)[0])
    return Fit(shares, plan, fits, heads, scales[:, 0], scales[:, 1:])


def _fit_view(
    features: Sequence[Float[np.ndarray, "n d"]],
    tasks: list[TaskArrays],
    heads: Sequence[HeadArrays] | None,
    plan: Plan,
) -> tuple[ViewFit, Float[np.ndarray, "tasks filters+1"]]:
    """Returns the statistics of one view, and the score scales without TSF and per filter."""
    residual, distance, scales, earlier = [], [], [], []
    for t, values in enumerate(features):
        own = _measure_all(tasks[t : t + 1], heads and heads[t : t + 1], values, plan)
        assert own.distance is not None
        residual.append(_moments(np.asarray(own.ratio[0])))
        distance.append(_moments(np.asarray(own.distance[0])))
        if own.raw is not None and own.filtered is not None:
            logits = np.concatenate([own.raw.logit[0][:, None], own.filtered.logit[0]], axis=1)
            scales.append(_moments(logits)[1])
        if t:
            earlier.append(_measure_all(tasks[:t], None, values, plan._replace(neighbours=0)).ratio)
    means, stds = (np.stack(part) for part in zip(*residual, strict=True))
    distance_moments = np.stack(distance, axis=1)
    fitted = ViewFit(
        tasks,
        means,
        stds,
        distance_moments[0],
        distance_moments[1],
        [
            _foreign_reference(earlier, means[:, share], stds[:, share], share)
            for share in range(means.shape[1])
        ],
    )
    return fitted, np.array(scales)


def _task_arrays(
    views: Sequence[ViewSpectrum], tasks: Sequence[TaskSpectrum], shares: Sequence[float]
) -> list[TaskArrays]:
    ranks = np.array(
        [
            [
                moments.retained_rank(view.energies, share, int(task.class_counts.sum()))
                for share in shares
            ]
            for view, task in zip(views, tasks, strict=True)
        ]
    )
    width = len(views[0].mean)
    most = min(stacking.padded_size(int(ranks.max()), stacking.LEAST_RANK), width)
    most_classes = stacking.padded_size(max(len(task.class_counts) for task in tasks))
    arrays = []
    for view, task, rank in zip(views, tasks, ranks, strict=True):
        frame = stacking.prototype_frame(view.prototypes, task.class_counts > 0)
        offsets = np.zeros((most_classes, width), np.float32)
        offsets[: len(frame.offsets)] = frame.offsets
        constants = np.full(most_classes, np.inf, np.float32)
        constants[: len(frame.constants)] = frame.constants
        kept = np.arange(most) < rank[:, None]
        parts = (view.mean, view.directions[:most], kept, frame.centre, offsets, constants)
        arrays.append(TaskArrays(*(jnp.asarray(part, jnp.float32) for part in parts)))
    return arrays


def _head_arrays(heads: Sequence, tasks: Sequence[TaskArrays]) -> tuple[list[HeadArrays], bool]:
    width = tasks[0].basis.shape[1]
    built_in = [head_rows(head, f"head of task {t}", width) for t, head in enumerate(heads)]
    most = stacking.padded_size(max(len(head.rows) for head in built_in))
    arrays = []
    for head, task in zip(built_in, tasks, strict=True):
        rows = np.zeros((most, width), np.float32)
        rows[: len(head.rows)] = head.rows
        bias = np.full(most, -np.inf, np.float32)
        bias[: len(head.bias)] = head.bias
        inside = measures.products(jnp.asarray(rows), task.basis)
        arrays.append(HeadArrays(jnp.asarray(rows), jnp.asarray(bias), inside))
    return arrays, built_in[0].normalised


def _measure_all(
    tasks: Sequence[TaskArrays],
    heads: Sequence[HeadArrays] | None,
    features: Float[np.ndarray, "n d"],
    plan: Plan,
) -> Measures:
    """Returns [tasks, n, ...] of images against at least one task."""
    shares, attenuations = zip(*plan.filters, strict=True)
    filters = Filters(jnp.array(shares), jnp.array(attenuations, jnp.float32))
    pieces = []
    for start in range(0, len(features), inputs.BLOCK_ROWS):
        rows = np.asarray(features[start : start + inputs.BLOCK_ROWS])
        block = inputs.padded_rows(rows, inputs.BLOCK_ROWS)
        pieces.append(
            [
                _measure(task, head, block, filters, plan.neighbours, plan.normalised)
                for task, head in zip(tasks, heads or [None] * len(tasks), strict=True)
            ]
        )
    joined = [
        jax.tree.map(lambda *parts: np.concatenate(parts)[: len(features)], *blocks)
        for blocks in zip(*jax.device_get(pieces), strict=True)
    ]
    return jax.tree.map(lambda *parts: np.stack(parts), *joined)


def _moments(values: Float[np.ndarray, "n k"]) -> tuple[np.ndarray, np.ndarray]:
    mean, std = zip(*(population_moments(column) for column in values.T), strict=True)
    return np.array(mean), np.array(std)


def _foreign_reference(
    earlier: Sequence[Float[np.ndarray, "earlier n shares"]],
    mean: Float[np.ndarray, " tasks"],
    std: Float[np.ndarray, " tasks"],
    share: int,
) -> ForeignReference | None:
    """Fits p_F from the residual ratios of tasks 1, 2, ... against the tasks before each."""
    residuals = []
    for ratio in earlier:
        count = len(ratio)
        wide = ratio[:, :, share].astype(np.float64)
        residuals.append((wide - mean[:count, None]) / std[:count, None])
    return fit_foreign_reference(residuals)
