"""Feature Distribution Calibration (FDC): Algorithm 1 of the paper and its equations.

    1      FDC.__init__
    2-4    the caller: trains task t, extracts features
    5-8    FDC._fit: 6 subspaces (PCA: compiled.principal), moments, affinity_moments;
           7 foreign_residuals
    9      statistics.packed_task: W_t U_t; filtered: the logits of W~_t, without W~_t itself
    10-12  FDC._fit: moments; FDC.add
    13     FDC.finalize: fit_foreign
    14     the caller: extracts features
    15-19  FDC.score, for all tasks at once: measure; 16 filtered; 17 evidence, fuse; 18 fuse
    20     calibrator.Scores: task, label

`settings` has the settings and the components. `statistics` has the types of a task's statistics
(`Task`, `View`), also padded for compiled programs (`PackedTasks`, `pack`). A view is an encoder:
the adapted view (A, index 0) is E_t while learning and E_T at the end, the pretrained view (0,
index 1) is E_0. Features g = h are rows [n, d]; `basis` [r, d] is U_t^T. JAX computes in float32,
with products of the highest precision; moments are float64 on the host. `measure` reads no setting
and `fuse` no feature, so that a sweep of settings measures once.
"""

import math
from collections.abc import Sequence
from functools import cached_property, partial
from itertools import starmap
from operator import attrgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fdc_jax.calibration import checks, compiled, inputs, storage
from fdc_jax.calibration.calibrator import Calibrator, Scores
from fdc_jax.calibration.compiled import Blocks
from fdc_jax.calibration.settings import Settings, Switches, on_device
from fdc_jax.calibration.shapes import (
    groups_of,
    mean_of_smallest,
    over_tasks,
    padded_size,
    squared_norm,
)
from fdc_jax.calibration.statistics import Foreign, PackedTasks, Task, View, by_view, pack, stacked
from fdc_jax.errors import InputError
from fdc_jax.heads import NORM_FLOOR, products, unit
from fdc_jax.machine.conversion import convert

# Floors of the paper, "Test-Time Calibration".
SCALE_FLOOR = 1e-6
ENERGY_FLOOR = 1e-12
# Smaller residual ratios, and distances as a share of their terms, are rounding errors of float32.
RATIO_ROUNDING = 2.0**-18
ROUNDING = 2.0**-21


# Statistics of a task (lines 6 and 10) ------------------------------------------------------------


def subspaces(
    blocks: Sequence[Blocks], given: inputs.TaskInput, shares: Sequence[float]
) -> list[Sequence[View]]:
    """Returns m_t, U_t (Eq. task-pca) and p_{t,c} by view, for each share of the variance."""
    rows = Blocks(given.rows[:, None] + 1, blocks[0].shards)  # counted from 1, as padding has 0
    centres = means_and_prototypes(rows, blocks, given)
    bases = compiled.principal(blocks, rows, [mean for mean, _ in centres], shares)
    views = []
    for (mean, prototypes), by_share in zip(centres, bases, strict=True):
        views.append([View(mean, basis, prototypes) for basis in by_share])
    return [*zip(*views, strict=True)]


def means_and_prototypes(
    rows: Blocks, views: Sequence[Blocks], given: inputs.TaskInput
) -> list[tuple[Float[np.ndarray, " d"], Float[np.ndarray, "c d"]]]:
    """Returns by view m_t, and p_{t,c} (Eq. proto) by row of the head.

    Prototypes of classes without samples are zero. Raises InputError if a feature is not finite.
    """
    counts = given.counts
    classes = padded_size(len(counts), 8)
    sums = []
    for view in views:
        total = partial(_sums, first=next(iter(view)), classes=classes)
        sums.append(compiled.map_blocks(total, view, rows))
    results = []
    for parts in jax.device_get(sums):
        totals, class_totals, origins, finite = zip(*parts, strict=True)
        if not all(finite):
            given.check_finite()
        origin = origins[0].astype(float)
        mean = origin + np.sum(totals, axis=0, dtype=float) / counts.sum()
        class_sums = np.sum(class_totals, axis=0, dtype=float)[: len(counts)]
        class_sums += counts[:, None] * unit(origin)
        results.append((mean.astype(np.float32), unit(class_sums).astype(np.float32)))
    return results


@partial(jax.jit, static_argnames="classes")
def _sums(features: Any, rows: Any, first: Any, classes: int) -> tuple[Array, ...]:
    origin = first[0]  # Less the origin, features far from zero keep their digits in float32.
    members = (rows.T == jnp.arange(1.0, classes + 1)[:, None]).astype(jnp.float32)
    class_sums = products(members, (unit(features) - unit(origin)[None]).T)
    finite = jnp.isfinite(squared_norm(features)).all()
    return compiled.centred(features, rows, origin).sum(axis=0), class_sums, origin, finite


def moments(values: Float[np.ndarray, "..."]) -> tuple[float, float]:
    """Returns the mean and the population standard deviation, at least 1e-6."""
    wide = values.astype(float)
    return float(wide.mean()), max(float(wide.std()), SCALE_FLOOR)


def affinity_moments(own: "Measured", neighbours: int) -> tuple[float, float]:
    """Returns the moments of A_t on the task's own samples (line 6), which `own` measures."""
    nearest = np.sort(own.distances[:, 0])[:, :neighbours]
    return moments(1.0 - nearest.mean(axis=-1, dtype=float))


# Features against tasks (lines 7, 9, 15 and 16) ---------------------------------------------------


class Measured(NamedTuple):
    """Measurements of features against tasks.

    Distances stand for affinities, since 1 - A_t is small and has more digits in float32.
    """

    residual: Float[Any, "n t"]  # rho_t
    distances: Float[Any, "n t c"] = None  # 1 - cosine to each prototype
    raw: Float[Any, "n t c"] = None  # h W^T; this and the rest in the adapted view alone
    projected: Float[Any, "n t c"] = None  # (h U)(W U)^T
    length: Float[Any, "n t"] = None  # |h|
    kept: Float[Any, "n t"] = None  # |h U|^2


@jax.jit
def measure(features: Float[Array, "n d"], tasks: PackedTasks) -> Measured:
    """Returns what the statistics of tasks in one view say of features."""
    length = jnp.sqrt(squared_norm(features))

    def one_task(task):
        centred = features - task.mean[None]
        within = products(centred, task.basis)
        leading = 1.0 if task.leading is None else task.leading[None]
        residual = residual_ratio(centred, within * leading)
        if task.directions is None:
            return Measured(residual)
        distances = cosine_distances(centred, length, task)
        if task.weight is None:
            return Measured(residual, distances)
        inside = (within + task.centre[None]) * leading  # h U
        inside = jnp.where(length[:, None] > NORM_FLOOR, inside, 0.0)
        return Measured(
            residual,
            distances,
            raw=products(features, task.weight),
            projected=products(inside, task.inside),
            length=length,
            kept=jnp.minimum(squared_norm(inside), length * length),
        )

    return over_tasks(one_task, tasks)


@jax.jit
def measure_views(tasks: Sequence[PackedTasks], *views: Float[Array, "n _"]) -> list[Measured]:
    """Returns `measure` of features by view, in one program."""
    return [*map(measure, views, tasks)]


def residual_ratio(centred: Any, within: Any) -> Float[Array, " n"]:
    """Returns rho_t from g - m_t and (g - m_t) U_t (Eq. residual); rounding errors are zero."""
    total = squared_norm(centred)
    ratio = (total - squared_norm(within)) / jnp.maximum(total, ENERGY_FLOOR)
    return jnp.where(ratio < RATIO_ROUNDING, 0.0, ratio)


def cosine_distances(centred: Any, length: Any, task: PackedTasks) -> Float[Array, "n c"]:
    """Returns 1 - cos(g, p) for every prototype p (Eq. par); the cosines of g = 0 are 0.

    With x = g - m for the task's mean m, |g| (1 - cos(g, p)) is

        |x|^2 / (|g| + |m|) + x.m^ (|m| - |g|) / (|g| + |m|) - x.(p - m^) + (|m| - m.p).

    The terms are as small as their sum. In float32, 1 minus the cosine of features that all point
    nearly the same way has no correct digits. A sum no larger than rounding errors of its terms is
    0.
    """
    both = jnp.maximum(length + task.length, NORM_FLOOR)
    along = products(centred, task.directions)  # m^ first
    total = squared_norm(centred)
    shared = (total + along[:, 0] * (task.length - length)) / both
    scaled = shared[:, None] - along + task.offset[None]
    # scaled < ROUNDING (|x| + offset), without a square root
    excess = scaled / ROUNDING - task.offset[None]
    scaled = jnp.where(excess * jnp.abs(excess) < total[:, None], 0.0, scaled)
    distances = scaled / jnp.maximum(length, NORM_FLOOR)[:, None]
    return jnp.where(length[:, None] > NORM_FLOOR, distances, 1.0)


def filtered(measured: Measured, tasks: PackedTasks, gamma: Any) -> Float[Any, "n t c"]:
    """Returns the logits of W~ = (1 - gamma) W + gamma (W U) U^T (Eq. osp), by NumPy or JAX."""
    library = measured.raw.__array_namespace__()
    logits = (1.0 - gamma) * measured.raw + gamma * measured.projected
    outside = measured.length * measured.length - measured.kept
    length = library.sqrt((1.0 - gamma) ** 2 * outside + measured.kept)  # of the filtered feature
    divided = tasks.normalised[None]
    length = divided * library.maximum(length, NORM_FLOOR) + (1.0 - divided)
    return logits / length[..., None] + tasks.bias[None]


def foreign_residuals(
    view: Blocks, groups: Sequence[PackedTasks], mean_std: Any, measured: Any = measure
) -> Float[np.ndarray, "n earlier"]:
    """Returns u_j of features in a view, for earlier tasks j in groups (line 7).

    Args:
        view: the features.
        groups: m_j and U_j.
        mean_std: moments of rho_j [earlier, 2], with an axis before if `measured` has settings.
        measured: `measure`, or a function that measures under several settings.
    """

    def by_group(features):
        return [measured(features, group).residual for group in groups]

    ratios = view.gather(compiled.map_blocks(by_group, view))
    earlier = np.concatenate(ratios, axis=-1)[..., : mean_std.shape[-2]]
    return (earlier - mean_std[..., 0]) / mean_std[..., 1]  # Eq. residual


def packed_subspaces(views: Sequence[View]) -> tuple[list[PackedTasks], Float[np.ndarray, "t 2"]]:
    """Returns m_j and U_j of tasks in one view, in groups on the device, and moments of rho_j."""
    rows, size = groups_of(len(views))
    pairs = [PackedTasks(view.mean, view.basis) for view in views]
    groups = jax.device_put([stacked(pairs[group], size) for group in rows])
    return groups, np.array([view.residual for view in views], np.float32)


# Likelihood and fusion (lines 13, 17 and 18) ------------------------------------------------------


def log_ratio(mean: float, variance: float, tau: float = 1.0) -> tuple[float, ...]:
    """Returns log(p_F(u) / p_O(u)) / tau as coefficients of u^2, u and 1 (Eq. llr).

    The log is -log(V) / 2 - (u - m)^2 / (2 V) + u^2 / 2 for p_F = N(m, V) and p_O = N(0, 1).
    """
    constant = -0.5 * (math.log(variance) + mean * mean / variance)
    return (0.5 - 0.5 / variance) / tau, mean / variance / tau, constant / tau


def fit_foreign(residuals: Sequence[Float[np.ndarray, "earlier n"]]) -> Foreign:
    """Returns mu_F, V_F and tau, fitted to u_j of each task's features (Eq. foreign, line 13).

    All pairs of tasks have the same weight; tau is the median over all residuals. With one task
    p_F is p_O.
    """
    if not residuals:
        return Foreign()
    means = np.concatenate([u.mean(axis=1, dtype=float) for u in residuals])  # mu_jt
    variances = np.concatenate([u.var(axis=1, dtype=float) for u in residuals])  # V_jt
    mean = float(means.mean())
    variance = max(float((variances + (means - mean) ** 2).mean()), SCALE_FLOOR)
    ratio = log_ratio(mean, variance)
    sizes = [np.abs(np.polyval(ratio, u.ravel().astype(float))) for u in residuals]
    tau = np.median(np.concatenate(sizes).astype(np.float32))
    return Foreign(mean, variance, max(float(tau), SCALE_FLOOR))


def evidence(
    view: Measured, tasks: PackedTasks, neighbours: Any, nearest: Any
) -> tuple[Float[Array, "n t"], Float[Array, "n t"]]:
    """Returns u_t (Eq. residual) and q_t (Eq. par) in a view; `nearest`: see `Switches`."""
    mean = tasks.distance_mean[None]
    deviation = tasks.distance_deviation[None]
    usual = (view.distances.min(axis=-1) - mean) / deviation

    def other(_):
        distance = mean_of_smallest(view.distances, neighbours)
        of_input = {"axis": 1, "where": tasks.raw_scale[None] > 0, "keepdims": True}
        centre = jnp.where(nearest, distance.mean(**of_input), mean)
        spread = jnp.where(nearest, distance.std(**of_input), deviation)
        return (distance - centre) / jnp.maximum(spread, SCALE_FLOOR)

    u = (view.residual - tasks.residual_mean[None]) / tasks.residual_deviation[None]
    is_usual = (neighbours == 1) & ~nearest
    # Within the branch, `usual` would be read from memory a second time.
    result = jax.lax.cond(is_usual, jnp.zeros_like, other, usual)
    return u, -jnp.where(is_usual, usual, result)


@jax.jit
def fuse(
    measured: Sequence[Measured],
    tasks: Sequence[PackedTasks],
    ratios: Sequence[tuple[Any, ...]],
    settings: Settings,
    on: Switches,
) -> tuple[Float[Array, "n t"], Int[Array, "n t"]]:
    """Returns S_t and the best row of each head (Eq. score-fusion, Eq. dual-main, lines 17 and 18).

    `measured`, `tasks` and `ratios` (coefficients of `log_ratio`) have an item by view. RLC is 0 if
    neither the input nor any sample of the task has a residual.
    """
    logits = filtered(measured[0], tasks[0], on.tsf * settings.attenuation)
    score = logits.max(axis=-1)
    scale = jnp.where(on.tsf > 0, tasks[0].filtered_scale, tasks[0].raw_scale)[None]
    alpha = on.rlc * settings.rlc_weight
    beta = on.pac * settings.pac_weight
    weights = (
        on.adapted_view * settings.adapted_view_weight,
        on.pretrained_view * settings.pretrained_view_weight,
    )
    views = zip(measured, tasks, ratios, weights, strict=False)
    for view, task, (square, linear, constant), weight in views:
        u, q = evidence(view, task, settings.neighbours, on.nearest > 0)
        silent = jnp.maximum(view.residual, task.residual_mean[None]) == 0
        rlc = jnp.where(silent, 0.0, jnp.tanh((square * u + linear) * u + constant))  # Eq. llr
        pac = jnp.tanh(q)  # Eq. pac-correction
        score = score + scale * (weight * (beta * pac - alpha * rlc))
    return score, logits.argmax(axis=-1)


@jax.jit
def calibrated(tasks: Any, ratios: Any, settings: Any, on: Any, *views: Any) -> Any:
    """Returns `fuse` of `measure_views`, in one program."""
    return fuse(measure_views(tasks, *views), tasks, ratios, settings, on)


class FDC(Calibrator):
    """Feature Distribution Calibration of task heads (Algorithm 1).

    The order of tasks matters: the foreign residuals of a task are those against earlier tasks.
    Features are not centred: TSF and PAC depend on their origin.
    """

    name = "fdc"
    needs_heads = True
    checks_finite = True

    def __init__(self, **settings: Any):
        super().__init__()
        self.settings = convert(settings, Settings)
        self.tasks: list[Task] = []
        # F^v by view: u_j [earlier, n] of every task from the second on; None if released.
        self.foreign: list[list[Any]] | None = []
        self.references: list[Foreign] = []  # by view; empty before `finalize`

    def _fit(self, given: inputs.TaskInput) -> None:
        """Computes the statistics of a task (lines 5 to 11)."""
        self.check(given)
        settings = self.settings
        blocks = compiled.blocks_of(given.views)
        (views,) = subspaces(blocks, given, [settings.retained_energy])  # Line 6.
        # Line 9, then the moments of line 6: own samples, measured by m_t, U_t, p_{t,c} and W_t.
        packed = pack([Task(views)], [given.counts], [given.head], 1)
        measure_own = partial(measure_views, jax.device_put(packed))
        own = blocks[0].gather(compiled.map_blocks(measure_own, *blocks))
        complete = [
            view._replace(
                residual=moments(measured.residual),
                affinity=affinity_moments(measured, settings.neighbours),
            )
            for view, measured in zip(views, own, strict=True)
        ]
        logits = [filtered(own[0], packed[0], gamma) for gamma in (0, settings.attenuation)]
        scales = [moments(z.max(axis=-1))[1] for z in logits]  # Line 10.
        checks.warn_without_residual(complete, given)
        foreign = [  # Line 7.
            foreign_residuals(block, *packed_subspaces(earlier)).T
            for block, earlier in zip(blocks, by_view(self.tasks), strict=False)
        ]
        self.add(given, Task(complete, *scales), foreign, logits[0])

    def check(self, given: inputs.TaskInput) -> None:
        """Raises InputError if no further task can be fitted, or this one has too few classes."""
        if self.foreign is None:
            raise InputError("the foreign residuals were released: no further task can be fitted")
        given.check_neighbours(self.settings.neighbours)

    def add(self, given: inputs.TaskInput, task: Task, foreign: Any, logits: Any) -> None:
        """Adds a task's statistics, its u_j by view, and its samples' raw logits [n, 1, c]."""
        known = self.foreign or [[] for _ in task.views]
        if foreign:
            known = [[*earlier, u] for earlier, u in zip(known, foreign, strict=True)]
        self.foreign = known
        self.tasks = [*self.tasks, task]
        self.references = []
        self._append(given, logits[:, 0].argmax(axis=1))

    def finalize(self, release: bool = False) -> None:
        """Fits the foreign reference of RLC (line 13), and with `release` discards F^v."""
        if not self.tasks:
            raise InputError("finalize: no task was fitted")
        self.references = self.references or [*map(fit_foreign, self.foreign or [])]
        if release:
            self.foreign = None

    def batch(
        self, adapted: Any, pretrained: Any = None, *, wait: bool = True
    ) -> tuple[list[Blocks], list[Any]]:
        """Returns blocks of a batch by view, and packed tasks and log ratios of these views.

        `wait`: see `inputs.feature_array`.
        """
        if not self.references:
            raise InputError("call fit_task for every task, then finalize, first")
        given = self._batch(adapted, pretrained, self.settings.pretrained_view_weight > 0.0, wait)
        return compiled.blocks_of(given), [part[: len(given)] for part in self._packed]

    def unit_means(self) -> list[Float[np.ndarray, "c d"]]:
        """See `Calibrator.unit_means`."""
        return [np.vstack([*map(attrgetter("prototypes"), of)]) for of in by_view(self.tasks)]

    @cached_property
    def _packed(self) -> tuple[list[PackedTasks], list[Array]]:
        packed = pack(self.tasks, self.counts, self.heads, padded_size(self.num_tasks, 8))
        return jax.device_put((packed, [*starmap(log_ratio, self.references)]))

    def score(self, adapted: Any, pretrained: Any = None) -> Scores:
        """Returns calibrated scores of a batch of any size (lines 15 to 20)."""
        blocks, packed = self.batch(adapted, pretrained, wait=False)
        score = partial(calibrated, *packed, *on_device(self.settings, Switches()))
        scores, rows = blocks[0].gather(compiled.map_blocks(score, *blocks))
        scores = scores[:, : self.num_tasks]
        if not np.isfinite(scores).all():
            self.batch(adapted, pretrained)  # raises InputError of features that are not finite
        return Scores(scores, rows[:, : self.num_tasks], self.classes)

    def terms(self, adapted: Any, pretrained: Any = None) -> Any:
        """Returns `terms.Terms`, measurements of a batch for scores with any components."""
        from fdc_jax.calibration import terms  # which reads this module

        return terms.of(self, adapted, pretrained)

    def components(self, adapted: Any, pretrained: Any = None) -> dict[str, Scores]:
        """See `Terms.components`."""
        return self.terms(adapted, pretrained).components()

    def class_scores(self, adapted: Any, pretrained: Any = None) -> Float[np.ndarray, "n classes"]:
        """See `Terms.by_class`."""
        return self.terms(adapted, pretrained).by_class()

    @property
    def storage_bytes(self) -> int:
        """See `storage.bytes_of_fdc`."""
        return storage.bytes_of_fdc(self.settings, self.tasks, self.counts)
