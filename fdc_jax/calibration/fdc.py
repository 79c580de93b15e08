"""Feature Distribution Calibration (FDC): Algorithm 1 of the paper and its equations.

    1-4,14 the caller: trains the task, extracts features
    5-11   FDC._fit: 6 means_and_prototypes, principal; 6, 10 moments; 7 foreign_residuals; 9 pack
    12, 13 FDC.finalize: fit_foreign
    15-20  FDC.score: 15-17 measure; 17, 18 fuse; 20 calibrator.Scores

A view is an encoder: the adapted view (A, index 0) is E_t while learning and E_T at the end, the
pretrained view (0, index 1) is E_0. Features are rows [n, d], and U_t is rows [r, d]. JAX computes
in float32, with products of the highest precision; moments are float64 on the host. `measure` reads
no setting and `fuse` no feature, so that a sweep of settings measures once.
"""

import logging
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jaxtyping import Array, Float, Int
from msgspec import Meta

from fdc_jax.calibration import compiled, inputs
from fdc_jax.calibration.calibrator import Calibrator, Scores
from fdc_jax.calibration.compiled import Blocks
from fdc_jax.calibration.shapes import (
    in_groups,
    mean_of_smallest,
    over_tasks,
    padded_size,
    register_tree,
    squared_norm,
    stack,
    to_device,
)
from fdc_jax.calibration.statistics import Foreign, Task, View
from fdc_jax.errors import InputError
from fdc_jax.heads import NORM_FLOOR, products, unit
from fdc_jax.machine.conversion import convert

_LOGGER = logging.getLogger("fdc_jax.calibration")
# Floors of the paper, "Test-Time Calibration".
SCALE_FLOOR = 1e-6
ENERGY_FLOOR = 1e-12
# Smaller residual ratios are rounding errors of float32.
RATIO_ROUNDING = 2.0**-18


# Settings -----------------------------------------------------------------------------------------


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of FDC, which checks them; the defaults are the paper's."""

    retained_energy: Annotated[
        float, Meta(gt=0, le=1, description="eta, share of the variance in the task subspace")
    ] = 0.75
    attenuation: Annotated[
        float, Meta(ge=0, le=1, description="gamma, share that TSF removes outside the subspace")
    ] = 0.5
    rlc_weight: Annotated[float, Meta(ge=0, le=1e6, description="alpha, weight of RLC")] = 1.0
    pac_weight: Annotated[float, Meta(ge=0, le=1e6, description="beta, weight of PAC")] = 1.0
    adapted_view_weight: Annotated[
        float, Meta(ge=0, le=1e6, description="w_T, weight of the adapted view")
    ] = 1.0
    pretrained_view_weight: Annotated[
        float,
        Meta(ge=0, le=1e6, description="w_0, weight of the pretrained view; 0 needs no such view"),
    ] = 1.0
    neighbours: Annotated[
        int, Meta(ge=1, le=2**31 - 1, description="K, class prototypes whose cosines PAC averages")
    ] = 1


register_tree(Settings)  # for compiled functions


class Switches(NamedTuple):
    """Components of FDC that are on, and whether affinities are standardised in another way.

    `nearest` takes the moments of the affinities of an input over the tasks ("PAC Neighborhood
    Size").
    """

    tsf: bool = True
    rlc: bool = True
    pac: bool = True
    adapted_view: bool = True
    pretrained_view: bool = True
    nearest: bool = False


# Rows of Table current-ablation, then of Table plugin with one view: fields of `Switches`.
COMPONENTS = {
    "raw": {"tsf": False, "rlc": False, "pac": False},
    "tsf": {"rlc": False, "pac": False},
    "pac": {"tsf": False, "rlc": False},
    "rlc": {"tsf": False, "pac": False},
    "tsf+pac": {"rlc": False},
    "tsf+rlc": {"pac": False},
    "pac+rlc": {"tsf": False},
    "full": {},
    "adapted_view": {"pretrained_view": False},
    "pretrained_view": {"adapted_view": False},
    "pac+rlc_adapted_view": {"tsf": False, "pretrained_view": False},
    "pac+rlc_pretrained_view": {"tsf": False, "adapted_view": False},
}


# Statistics of a task (line 6) --------------------------------------------------------------------


def means_and_prototypes(
    views: Sequence[Blocks], rows: Sequence[Array], counts: Int[np.ndarray, " c"]
) -> list[tuple[Float[np.ndarray, " d"], Float[np.ndarray, "c d"]]]:
    """Returns by view m_t, and p_{t,c} (Eq. proto) by row of the head.

    Prototypes of classes without samples are zero.
    """
    classes, sums = padded_size(len(counts), 8), []
    for view in views:
        total = partial(_sums, first=next(iter(view)), classes=classes)
        sums.append(compiled.map_blocks(total, view, rows))
    results = []
    for parts in jax.device_get(sums):
        totals, class_totals, origins = zip(*parts, strict=True)
        origin = origins[0].astype(float)
        mean = origin + np.sum(totals, axis=0, dtype=float) / counts.sum()
        class_sums = np.sum(class_totals, axis=0, dtype=float)[: len(counts)]
        class_sums += counts[:, None] * unit(origin)
        results.append((mean.astype(np.float32), unit(class_sums).astype(np.float32)))
    return results


@partial(jax.jit, static_argnames="classes")
def _sums(features: Any, rows: Any, first: Any, classes: int) -> tuple[Array, Array, Array]:
    origin = first[0]  # Less the origin, features far from zero keep their digits in float32.
    members = (rows[None] == jnp.arange(classes)[:, None]).astype(jnp.float32)
    class_sums = products(members, (unit(features) - unit(origin)[None]).T)
    return compiled.centred(features, rows, origin).sum(axis=0), class_sums, origin


def moments(values: Float[np.ndarray, "..."]) -> tuple[float, float]:
    """Returns the mean and the population standard deviation, at least 1e-6."""
    wide = values.astype(float)
    return float(wide.mean()), max(float(wide.std()), SCALE_FLOOR)


# Features against tasks (lines 6, 7, 9, 10 and 16) ------------------------------------------------


class PackedTasks(NamedTuple):
    """Statistics of tasks in one view, padded, on the device; line 7 reads mean and basis alone."""

    mean: Float[Array, "t d"]
    basis: Float[Array, "t r d"]
    leading: Float[Array, "t r"] | Any = None  # in a sweep of eta, 1 for its directions
    length: Float[Array, " t"] | Any = None  # |m|
    directions: Float[Array, "t c+1 d"] | Any = None  # p - m^ of each class, then m^ = m / |m|
    offset: Float[Array, "t c"] | Any = None  # |m| - m.p, infinite for a class without samples
    residual: Float[Array, "t 2"] | Any = None  # moments of rho_t
    distance: Float[Array, "t 2"] | Any = None  # moments of 1 - A_t
    scales: Float[Array, "t 2"] | Any = None  # sigma_t without and with TSF; 0 for padding tasks
    weight: Float[Array, "t c d"] | Any = None  # W_t, and line 9, in the adapted view
    inside: Float[Array, "t c r"] | Any = None  # W_t U_t
    centre: Float[Array, "t r"] | Any = None  # m_t U_t
    bias: Float[Array, "t c"] | Any = None  # b_t, minus infinity for padding rows
    normalised: Float[Array, " t"] | Any = None  # 1 if heads divide h by |h|


def subspaces(views: Sequence[View], size: int) -> PackedTasks:
    """Returns m_t and U_t of tasks in one view, padded to `size` tasks."""
    bases = stack([view.basis for view in views], padded_rank(views))
    return PackedTasks(to_device(size, [view.mean for view in views]), to_device(size, bases))


def padded_rank(views: Sequence[View]) -> int:
    """Returns the number of directions that all tasks have with padding."""
    return padded_size(max(len(view.basis) for view in views), 16)


def pack(
    tasks: Sequence[Task], counts: Sequence[Any], heads: Sequence[Any], pad: bool = True
) -> list[PackedTasks]:
    """Returns the statistics of tasks by view; `counts` are samples of each class, by task.

    `pad` pads the number of tasks.
    """
    size = padded_size(len(tasks), 8) if pad else len(tasks)
    put = partial(to_device, size)
    classes = padded_size(max(map(len, counts)) + 1, 8) - 1  # A multiple of 8 with the row of m^.
    packed = []
    for index in range(len(tasks[0].views)):
        views = [task.views[index] for task in tasks]
        # In float64: the differences are small.
        means = np.array([view.mean for view in views], float)
        prototypes = unit(stack([view.prototypes for view in views], classes).astype(float))
        lengths = np.linalg.norm(means, axis=1)
        unit_means = unit(means)[:, None]
        offset = lengths[:, None] - np.einsum("tcd,td->tc", prototypes, means)
        offset[stack(counts, classes) == 0] = np.inf
        statistics = subspaces(views, size)._replace(
            length=put(lengths),
            directions=put(np.concatenate([prototypes - unit_means, unit_means], axis=1)),
            offset=put(offset),
            **packed_moments(tasks, index, size),
        )
        packed.append(statistics if packed else with_heads(statistics, heads, views, put))
    return packed


def packed_moments(tasks: Sequence[Task], index: int, size: int) -> dict[str, Float[Array, "t 2"]]:
    """Returns the fields of `PackedTasks` that depend on gamma and K, in one view."""
    views = [task.views[index] for task in tasks]
    distances = [(1.0 - view.affinity[0], view.affinity[1]) for view in views]
    return {
        "residual": to_device(size, [view.residual for view in views], 1.0),
        "distance": to_device(size, distances, 1.0),
        "scales": to_device(size, [task[1:] for task in tasks]),
    }


def with_heads(
    packed: PackedTasks, heads: Sequence[Any], views: Sequence[View], put: Any
) -> PackedTasks:
    """Returns statistics with the heads of tasks; `put` pads and moves an array."""
    forms = [head.affine for head in heads]
    rows, rank = padded_size(max(len(form.rows) for form in forms), 4), padded_rank(views)
    pairs = zip(forms, views, strict=True)
    inside = [stack(products(form.rows, view.basis), rank) for form, view in pairs]
    biases = [np.broadcast_to(form.bias, len(form.rows)) for form in forms]
    return packed._replace(
        weight=put(stack([form.rows for form in forms], rows)),
        inside=put(stack(inside, rows)),
        centre=put(stack([view.basis @ view.mean for view in views], rank)),
        bias=put(stack(biases, rows, -np.inf)),
        normalised=put([form.normalised for form in forms]),
    )


class Measured(NamedTuple):
    """Measurements of features against tasks; float32 has more digits of 1 - A_t than of A_t."""

    residual: Float[Array, "n t"]  # rho_t
    distances: Float[Array, "n t c"] | Any = None  # 1 - cosine to each prototype
    raw: Float[Array, "n t c"] | Any = None  # h W^T, as what follows in the adapted view
    projected: Float[Array, "n t c"] | Any = None  # (h U)(W U)^T
    length: Float[Array, "n t"] | Any = None  # |h|
    kept: Float[Array, "n t"] | Any = None  # |h U|^2


@jax.jit
def measure(features: Float[Array, "n d"], tasks: PackedTasks) -> Measured:
    """Returns what the statistics of tasks in one view say of features."""
    length = jnp.sqrt(squared_norm(features))

    def one_task(task: PackedTasks) -> Measured:
        centred = features - task.mean[None]
        within = products(centred, task.basis)
        leading = 1.0 if task.leading is None else task.leading[None]
        measured = Measured(residual_ratio(centred, within * leading))
        if task.directions is None:
            return measured
        measured = measured._replace(distances=cosine_distances(centred, length, task))
        if task.weight is None:
            return measured
        inside = (within + task.centre[None]) * leading  # h U
        inside = jnp.where(length[:, None] > NORM_FLOOR, inside, 0.0)
        return measured._replace(
            raw=products(features, task.weight),
            projected=products(inside, task.inside),
            length=length,
            kept=jnp.minimum(squared_norm(inside), length * length),
        )

    return over_tasks(one_task, tasks)


@jax.jit
def measure_views(views: Sequence[Array], tasks: Sequence[PackedTasks]) -> list[Measured]:
    """Returns `measure` of features by view, in one program."""
    return [measure(*pair) for pair in zip(views, tasks, strict=True)]


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
    nearly the same way has no correct digits.
    """
    both = jnp.maximum(length + task.length, NORM_FLOOR)
    along = products(centred, task.directions)
    shared = (squared_norm(centred) + along[:, -1] * (task.length - length)) / both
    scaled = shared[:, None] - along[:, :-1] + task.offset[None]
    distances = scaled / jnp.maximum(length, NORM_FLOOR)[:, None]
    return jnp.where(length[:, None] > NORM_FLOOR, distances, 1.0)


def filtered(measured: Measured, tasks: PackedTasks, gamma: Any) -> Float[Any, "n t c"]:
    """Returns the logits of W~ = (1 - gamma) W + gamma (W U) U^T (Eq. osp), by NumPy or JAX."""
    library = measured.raw.__array_namespace__()
    logits = (1.0 - gamma) * measured.raw + gamma * measured.projected
    outside = measured.length * measured.length - measured.kept
    length = library.sqrt((1.0 - gamma) ** 2 * outside + measured.kept)  # of the filtered feature
    length = library.where(tasks.normalised[None] > 0, library.maximum(length, NORM_FLOOR), 1.0)
    return logits / length[..., None] + tasks.bias[None]


def standardised(values: Any, mean_std: Any) -> Any:
    """Returns u_t of rho_t, or -q_t of 1 - A_t, from their moments (Eq. residual, Eq. par)."""
    return (values - mean_std[..., 0]) / mean_std[..., 1]


def foreign_residuals(
    blocks: Sequence[Blocks], earlier: Sequence[Task]
) -> list[Float[np.ndarray, "earlier n"]]:
    """Returns u_j of features for every earlier task j, by view (line 7)."""
    views = [*zip(*(task.views for task in earlier), strict=True)]
    groups = [in_groups(of, subspaces) for of in views]

    def ratios_of(*block: Array) -> list[list[Array]]:
        of_views = zip(block, groups, strict=True)
        return [[measure(x, group).residual for group in of] for x, of in of_views]

    ratios, residuals = compiled.map_blocks(ratios_of, *blocks), []
    for of, parts in zip(views, blocks[0].gather(ratios), strict=True):
        mean_std = np.array([view.residual for view in of], np.float32)
        residuals.append(standardised(np.concatenate(parts, axis=1)[:, : len(of)], mean_std).T)
    return residuals


def warn_without_residual(views: Sequence[View], given: inputs.TaskInput) -> None:
    """Warns of a task whose samples have no residual."""
    for name, view in zip(inputs.VIEWS, views, strict=False):
        if view.residual[0] == 0.0:
            name = inputs.name_of(f"{name} features", given.task)
            reason = f"{len(view.basis)} directions hold all variance of {len(given.rows)} samples"
            _LOGGER.warning(f"{name}: {reason}: RLC cannot judge inputs within them")


# Likelihood and fusion (lines 13, 17 and 18) ------------------------------------------------------


def log_ratio(mean: float, variance: float, tau: float = 1.0) -> Float[np.ndarray, " 3"]:
    """Returns log(p_F(u) / p_O(u)) / tau as coefficients of u^2, u and 1 (Eq. llr).

    The log is -log(V) / 2 - (u - m)^2 / (2 V) + u^2 / 2 for p_F = N(m, V) and p_O = N(0, 1).
    """
    constant = -0.5 * (np.log(variance) + mean * mean / variance)
    return np.array([0.5 - 0.5 / variance, mean / variance, constant]) / tau


def packed_ratios(references: Sequence[Foreign]) -> list[Float[Array, " 3"]]:
    """Returns `log_ratio` by view on the device."""
    return jax.device_put([log_ratio(*reference).astype(np.float32) for reference in references])


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
    wide = (u.ravel().astype(float) for u in residuals)
    sizes = np.concatenate([np.abs(np.polyval(ratio, u)).astype(np.float32) for u in wide])
    return Foreign(mean, variance, max(float(np.median(sizes)), SCALE_FLOOR))


def evidence(
    view: Measured, tasks: PackedTasks, neighbours: Any, nearest: Any
) -> tuple[Float[Array, "n t"], Float[Array, "n t"]]:
    """Returns u_t (Eq. residual) and q_t (Eq. par) in a view; `nearest`: see `Switches`."""
    distance = mean_of_smallest(view.distances, neighbours)
    of_input = {"axis": 1, "where": tasks.scales[None, :, 0] > 0, "keepdims": True}
    spread = jnp.maximum(distance.std(**of_input), SCALE_FLOOR)
    across = jnp.stack([distance.mean(**of_input), spread], axis=-1)
    mean_std = jnp.where(nearest, across, tasks.distance[None])
    return standardised(view.residual, tasks.residual[None]), -standardised(distance, mean_std)


@jax.jit
def fuse(
    measured: Sequence[Measured],
    tasks: Sequence[PackedTasks],
    ratios: Sequence[Float[Array, " 3"]],
    settings: Settings,
    on: Switches,
) -> tuple[Float[Array, "n t"], Int[Array, "n t"]]:
    """Returns S_t and the best row of each head (Eq. score-fusion, Eq. dual-main, lines 17 and 18).

    `measured`, `tasks` and `ratios` (`log_ratio`) have an item by view. RLC says nothing if neither
    the input nor any sample of the task has a residual.
    """
    logits = filtered(measured[0], tasks[0], jnp.where(on.tsf, settings.attenuation, 0.0))
    score = logits.max(axis=-1)
    scale = jnp.where(on.tsf, tasks[0].scales[:, 1], tasks[0].scales[:, 0])[None]
    alpha = jnp.where(on.rlc, settings.rlc_weight, 0.0)
    beta = jnp.where(on.pac, settings.pac_weight, 0.0)
    adapted = jnp.where(on.adapted_view, settings.adapted_view_weight, 0.0)
    pretrained = jnp.where(on.pretrained_view, settings.pretrained_view_weight, 0.0)
    views = zip(measured, tasks, ratios, (adapted, pretrained), strict=False)
    for view, task, ratio, weight in views:
        u, q = evidence(view, task, settings.neighbours, on.nearest)
        known = (view.residual > 0) | (task.residual[None, :, 0] > 0)
        rlc = jnp.where(known, jnp.tanh(jnp.polyval(ratio, u)), 0.0)  # Eq. llr
        pac = jnp.tanh(q)  # Eq. pac-correction
        score = score + weight * scale * (beta * pac - alpha * rlc)
    return score, logits.argmax(axis=-1)


@jax.jit
def calibrated(views: Any, tasks: Any, ratios: Any, settings: Any, on: Any) -> Any:
    """Returns `fuse` of `measure_views`, in one program."""
    return fuse(measure_views(views, tasks), tasks, ratios, settings, on)


class FDC(Calibrator):
    """Feature Distribution Calibration of task heads (Algorithm 1).

    The order of tasks matters: the foreign residuals of a task are those against earlier tasks.
    Features are not centred: TSF and PAC depend on their origin.
    """

    name = "fdc"
    needs_heads = True

    def __init__(self, **settings: Any):
        super().__init__()
        self.settings = convert(settings, Settings)
        self.tasks: list[Task] = []
        # F^v by view: u_j of every task from the second on, by earlier task j; None if released.
        self.foreign: list[list[Float[np.ndarray, "earlier n"]]] | None = []
        self.references: list[Foreign] = []  # by view; empty before `finalize`

    def _fit(self, given: inputs.TaskInput) -> None:
        """Computes the statistics of a task (lines 5 to 11)."""
        self.check(given)
        blocks = compiled.blocks_of(given.views)
        rows = blocks[0].place(given.rows)
        views = []  # Line 6.
        centres = means_and_prototypes(blocks, rows, given.counts)
        for index, (view, (mean, prototypes)) in enumerate(zip(blocks, centres, strict=True)):
            expected = len(self.tasks[-1].views[index].basis) if self.tasks else 0
            shares = [self.settings.retained_energy]
            (basis,) = compiled.principal(view, rows, mean, shares, expected)
            views.append(View(mean, basis, prototypes))
        # Lines 6 and 10, the task against itself, and line 9; `measure` reads no moments.
        task = pack([Task(views)], [given.counts], [given.head], pad=False)
        by_block = compiled.map_blocks(lambda *parts: measure_views(parts, task), *blocks)
        own = blocks[0].gather(by_block)
        for index, (view, measured) in enumerate(zip(views, own, strict=True)):
            distances = np.sort(measured.distances[:, 0], axis=-1)[:, : self.settings.neighbours]
            mean, std = moments(distances.mean(axis=-1))
            residual = moments(measured.residual)
            views[index] = view._replace(residual=residual, affinity=(1.0 - mean, std))
        host = jax.device_get(task[0])
        logits = [filtered(own[0], host, gamma) for gamma in (0.0, self.settings.attenuation)]
        scales = [moments(z.max(axis=-1))[1] for z in logits]
        warn_without_residual(views, given)
        foreign = foreign_residuals(blocks, self.tasks) if self.tasks else []  # Line 7.
        self.add(given, Task(views, *scales), foreign, logits[0][:, 0].argmax(axis=1))

    def check(self, given: inputs.TaskInput) -> None:
        """Raises InputError if no further task can be fitted, or this one has too few classes."""
        if self.foreign is None:
            raise InputError("the foreign residuals were released: no further task can be fitted")
        inputs.check_neighbours(self.settings.neighbours, given.task, given.counts)

    def add(self, given: inputs.TaskInput, task: Task, foreign: Any, predicted: Any) -> None:
        """Adds a task's statistics, its u_j by view, and the rows that its head predicts."""
        known = self.foreign or [[] for _ in task.views]
        new = [[u] for u in foreign] or known
        self.foreign = [[*pair[0], *pair[1]] for pair in zip(known, new, strict=True)]
        self.tasks = [*self.tasks, task]
        self.references = []
        self._append(given, predicted)

    def finalize(self, release: bool = False) -> None:
        """Fits the foreign reference of RLC, and with `release` discards F^v, as line 13 does."""
        if not self.tasks:
            raise InputError("finalize: no task was fitted")
        self.references = self.references or [*map(fit_foreign, self.foreign or [])]
        self.foreign = None if release else self.foreign

    def batch(self, adapted: Any, pretrained: Any = None) -> tuple[list[Blocks], list[Any]]:
        """Returns blocks of a batch by view, and packed tasks and log ratios of these views."""
        if not self.references:
            raise InputError("call fit_task for every task, then finalize, first")
        needed = self.settings.pretrained_view_weight > 0.0
        given = self._batch(adapted, pretrained, needed)
        return compiled.blocks_of(given), [part[: len(given)] for part in self._packed]

    @cached_property
    def _unit_means(self) -> list[Float[np.ndarray, "c d"]]:
        present = np.concatenate(self.counts) > 0
        views = zip(*(task.views for task in self.tasks), strict=True)
        return [np.concatenate([task.prototypes for task in view])[present] for view in views]

    @cached_property
    def _packed(self) -> tuple[list[PackedTasks], list[Array]]:
        return pack(self.tasks, self.counts, self.heads), packed_ratios(self.references)

    def score(self, adapted: Any, pretrained: Any = None) -> Scores:
        """Returns calibrated scores of a batch of any size (lines 15 to 20)."""
        blocks, packed = self.batch(adapted, pretrained)
        settings = jax.device_put((self.settings, Switches()))

        def scores_of(*views: Array) -> Any:
            return calibrated(views, *packed, *settings)

        scores, rows = blocks[0].gather(compiled.map_blocks(scores_of, *blocks))
        return Scores(scores[:, : self.num_tasks], rows[:, : self.num_tasks], self.classes)

    def terms(self, adapted: Any, pretrained: Any = None) -> Any:
        """Returns `terms.Terms`, measurements of a batch for scores with any components."""
        from fdc_jax.calibration import terms  # which reads this module

        return terms.of(self, adapted, pretrained)

    def components(self, adapted: Any, pretrained: Any = None) -> dict[str, Scores]:
        """Returns the scores of `COMPONENTS`; those of one view only if there are two."""
        terms = self.terms(adapted, pretrained)
        both = len(terms.tasks) == 2
        parts = {name: on for name, on in COMPONENTS.items() if both or "view" not in name}
        return {name: terms.fuse(**on) for name, on in parts.items()}

    def class_scores(self, adapted: Any, pretrained: Any = None) -> Float[np.ndarray, "n classes"]:
        """See `Terms.by_class`."""
        return self.terms(adapted, pretrained).by_class()

    @property
    def storage_bytes(self) -> int:
        """Returns the bytes of statistics in use, as the paper counts them: no heads, no F^v."""
        settings, count = self.settings, self.num_tasks
        weights = settings.adapted_view_weight, settings.pretrained_view_weight
        rows = count + int((np.concatenate(self.counts) > 0).sum())  # means and prototypes
        numbers = 2 * count  # sigma_t without and with TSF
        for index, (weight, width) in enumerate(zip(weights, self.widths, strict=False)):
            if weight or (index == 0 and settings.attenuation):
                numbers += sum(task.views[index].basis.size for task in self.tasks)
            if weight:  # Four moments of each task; mu_F, V_F and tau.
                numbers += rows * width + 4 * count + 3 * (count > 1)
        return 4 * numbers
