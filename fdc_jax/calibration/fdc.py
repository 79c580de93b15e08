"""Feature Distribution Calibration (FDC): Algorithm 1 of the paper and its equations.

    1-4,14 the caller: trains the task, extracts features
    5-11   FDC._fit: 6 mean_and_prototypes, pca; 6, 10 moments; 7 foreign_residuals; 9 filtered
    12, 13 FDC.finalize: fit_foreign
    15-20  FDC.score: 15-17 measure; 17, 18 fuse; 20 calibrator.Scores

A view is an encoder: the adapted view (A, index 0) is E_t while learning and E_T at the end, the
pretrained view (0, index 1) is E_0. Features are rows [n, d], and U_t is rows [r, d]. JAX computes
in float32, with products of the highest precision; moments are float64 on the host.
"""

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jaxtyping import Array, Float, Int
from msgspec import Meta

from fdc_jax.calibration import compiled, inputs, statistics
from fdc_jax.calibration.calibrator import Calibrator, Scores
from fdc_jax.calibration.compiled import Blocks, padded_size, squared_norm
from fdc_jax.calibration.statistics import COMPONENTS, Foreign, PackedTasks, Task, View
from fdc_jax.errors import InputError
from fdc_jax.heads import NORM_FLOOR, products, unit

_LOGGER = logging.getLogger("fdc_jax.calibration")
# Floors of the paper, "Test-Time Calibration".
SCALE_FLOOR = 1e-6
ENERGY_FLOOR = 1e-12
# A share of the variance this close to eta differs from it by rounding alone.
VARIANCE_TOLERANCE = 1e-6
# Tasks at once: two fit into the caches of a CPU; line 7 compiles once for any number of tasks.
TASKS_AT_ONCE = 2


# Settings -----------------------------------------------------------------------------------------


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of FDC; the defaults are the paper's. `checked_settings` makes and checks them."""

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

    def check_neighbours(self, task: int, counts: Int[np.ndarray, " c"]) -> None:
        """Raises InputError if a task has fewer classes with samples than there are neighbours."""
        if (present := int((counts > 0).sum())) < self.neighbours:
            expected = f"{self.neighbours} neighbours need as many classes with samples"
            raise InputError(f"{inputs.name_of('labels', task)}: {expected}, found {present}")


def checked_settings(values: Mapping[str, Any]) -> Settings:
    """Returns settings as plain numbers; raises InputError that names the first wrong one."""
    plain = {
        name: value.item() if isinstance(value, np.number) else value
        for name, value in values.items()
    }
    try:
        return msgspec.convert(plain, Settings)
    except msgspec.ValidationError as error:
        reason, _, name = str(error).replace("`", "").partition(" - at $.")
    if name:
        expected = f"{reason[0].lower()}{reason[1:]}".partition(", got")[0]
        raise InputError(f"{name}: {expected}, found {values[name]!r}")
    raise InputError(f"settings of FDC: {reason}")


# Statistics of a task (line 6) --------------------------------------------------------------------


def mean_and_prototypes(
    view: Blocks, rows: Int[np.ndarray, " n"], classes: int
) -> tuple[Float[np.ndarray, " d"], Float[np.ndarray, "c d"]]:
    """Returns m_t, and p_{t,c} (Eq. proto) by row of the head, zero for a class without samples."""
    class_rows = np.arange(padded_size(classes, 8), dtype=np.int32)
    first = next(iter(view))
    sums = compiled.map_blocks(partial(_sums, class_rows, first), view, view.split_like(rows))
    *parts, (origin, *_) = zip(*jax.device_get(sums), strict=True)
    total, class_sums = (np.sum(part, axis=0, dtype=float) for part in parts)
    present = np.bincount(rows, minlength=classes)[:, None]
    class_sums = class_sums[:classes] + present * unit(origin.astype(float))
    return (origin + total / len(rows)).astype(np.float32), unit(class_sums).astype(np.float32)


@jax.jit
def _sums(class_rows: Any, first: Any, features: Any, rows: Any) -> tuple[Array, Array, Array]:
    origin = first[0]  # Less the origin, features far from zero keep their digits in float32.
    members, shifted = (rows == class_rows[:, None]).astype(jnp.float32), unit(features)
    class_sums = products(members, (shifted - unit(origin)).T)
    return compiled.centred(features, rows, origin).sum(axis=0), class_sums, origin


def pca(
    views: Sequence[Blocks], rows: Int[np.ndarray, " n"], centres: Sequence[Any], share: float
) -> list[Float[np.ndarray, "r d"]]:
    """Returns U_t by view, the fewest directions with a share of the variance (Eq. task-pca)."""
    rank = partial(retained_rank, share=share, count=len(rows))
    return compiled.principal(views, rows, centres, rank)


def retained_rank(variances: Float[np.ndarray, " k"], share: float, count: int) -> int:
    """Returns how many of descending variances reach a share; `count` samples span one less."""
    variances = np.clip(variances.astype(float), 0.0, None)
    if count < 2 or not variances.any():
        return 0
    short = np.cumsum(variances) / variances.sum() < share - VARIANCE_TOLERANCE
    return min(int(short.sum()) + 1, count - 1, len(variances))


def moments(values: Float[np.ndarray, "..."]) -> tuple[float, float]:
    """Returns the mean and the population standard deviation, at least 1e-6."""
    wide = values.astype(float)
    return float(wide.mean()), max(float(wide.std()), SCALE_FLOOR)


# Features against tasks (lines 6, 7, 9, 10 and 16) ------------------------------------------------


class Measured(NamedTuple):
    """Measurements of features against tasks; float32 has more digits of 1 - A_t than of A_t."""

    residual: Float[Array, "n t"]  # rho_t
    distance: Float[Array, "n t"]  # 1 - A_t
    raw: Float[Array, "n t c"] | None = None  # logits, in the adapted view
    filtered: Float[Array, "n t c"] | None = None  # logits with TSF


@partial(jax.jit, static_argnames=("neighbours", "normalised"))
def measure(
    features: Any, tasks: PackedTasks, gamma: float, neighbours: int, normalised: bool
) -> Measured:
    """Returns measurements of features [n, d] in a view; `normalised` heads divide h by |h|."""
    lengths = jnp.sqrt(squared_norm(features))

    def one_task(task: Any) -> Measured:
        centred = features - task.mean
        ratio, inside = residual_ratio(centred, task.basis)
        distance = cosine_distance(centred, lengths, task, neighbours)
        if task.heads is None:
            return Measured(ratio, distance)
        weights, bias = task.heads
        raw, filtered_logits = jnp.split(products(features, weights), 2, axis=-1)
        if normalised:
            inside = inside + products(task.mean[None], task.basis)  # h U
            filtered_length = jnp.maximum(filtered_lengths(lengths, inside, gamma), NORM_FLOOR)
            raw = raw / jnp.maximum(lengths, NORM_FLOOR)[:, None]
            filtered_logits = filtered_logits / filtered_length[:, None]
        return Measured(ratio, distance, raw + bias, filtered_logits + bias)

    return _over_tasks(one_task, tasks)


def _over_tasks(function: Any, tasks: Any) -> Any:
    """Returns results [n, t, ...] of a function of one task, by `vmap` over a few at a time."""
    if len(jax.tree.leaves(tasks)[0]) <= TASKS_AT_ONCE:
        return jax.vmap(function, out_axes=1)(tasks)
    by_task = jax.lax.map(function, tasks, batch_size=TASKS_AT_ONCE)
    return jax.tree.map(lambda values: jnp.moveaxis(values, 0, 1), by_task)


@jax.jit
def residual_ratios(features: Any, means: Any, bases: Any) -> Float[Array, "n t"]:
    """Returns rho_t of features in one view for several tasks (line 7)."""
    return _over_tasks(lambda task: residual_ratio(features - task[0], task[1])[0], (means, bases))


def residual_ratio(centred: Any, basis: Any) -> tuple[Float[Array, " n"], Float[Array, "n r"]]:
    """Returns rho_t of g - m_t (Eq. residual), and (g - m_t) U_t."""
    total, inside = squared_norm(centred), products(centred, basis)
    outside = jnp.maximum(total - squared_norm(inside), 0.0)
    return outside / jnp.maximum(total, ENERGY_FLOOR), inside


def cosine_distance(centred: Any, lengths: Any, task: PackedTasks, k: int) -> Float[Array, " n"]:
    """Returns 1 - A_{t,K}, where A_{t,K} is the mean of the K largest cosines (Eq. par).

    With x = g - m for the task's mean m, |g| (1 - cos(g, p)) is

        |x|^2 / (|g| + |m|) + x.m^ (|m| - |g|) / (|g| + |m|) - x.(p - m^) + (|m| - m.p).

    The terms are as small as their sum. In float32, 1 minus the cosine of features that all point
    nearly the same way has no correct digits. The cosines of g = 0 are 0.
    """
    both = jnp.maximum(lengths + task.length, NORM_FLOOR)
    along = products(centred, task.directions)
    shared = (squared_norm(centred) + along[:, -1] * (task.length - lengths)) / both
    scaled = shared[:, None] - along[:, :-1] + task.offset  # |g| (1 - cos(g, p)) by class
    nearest = scaled.min(axis=-1) if k == 1 else jnp.sort(scaled, axis=-1)[:, :k].mean(axis=-1)
    return jnp.where(lengths > NORM_FLOOR, nearest / jnp.maximum(lengths, NORM_FLOOR), 1.0)


def filtered(weights: Any, basis: Float[Array, "r d"], gamma: float) -> Float[Array, "c d"]:
    """Returns W~ = (1 - gamma) W + gamma (W U) U^T (Eq. osp, line 9)."""
    return (1.0 - gamma) * weights + gamma * products(products(weights, basis), basis.T)


def filtered_lengths(lengths: Any, inside: Float[Array, "n r"], gamma: float) -> Float[Array, " n"]:
    """Returns the lengths of features after Eq. osp, from |h| and h U."""
    kept = squared_norm(inside)
    return jnp.sqrt((1.0 - gamma) ** 2 * jnp.maximum(lengths * lengths - kept, 0.0) + kept)


@jax.jit
def with_filtered(weights: Any, basis: Any, gamma: float) -> Float[Array, "t 2c d"]:
    """Returns W_t stacked on W~_t, by task."""
    every = jax.vmap(filtered, (0, 0, None))(weights, basis, gamma)
    return jnp.concatenate([weights, every], axis=1)


def pack(tasks: Any, counts: Any, heads: Any, gamma: float, pad: bool = True) -> list[PackedTasks]:
    """Returns the statistics of tasks for `measure` and `fuse`, by view, with W~_t (line 9)."""
    views: list[Any] = statistics.pack(tasks, counts, heads, pad)
    weights, bias = views[0].heads
    views[0] = views[0]._replace(heads=(with_filtered(weights, views[0].basis, gamma), bias))
    return views


def standardised(values: Any, mean_std: Any) -> Any:
    """Returns u_t of rho_t, or -q_t of 1 - A_t, from their moments (Eq. residual, Eq. par)."""
    return (values - mean_std[..., 0]) / mean_std[..., 1]


def foreign_residuals(view: Blocks, earlier: Sequence[View]) -> Float[np.ndarray, "earlier n"]:
    """Returns u_j of features for every earlier task j (line 7)."""
    groups = []
    for first in range(0, len(earlier), TASKS_AT_ONCE):
        group = earlier[first : first + TASKS_AT_ONCE]
        means, bases = statistics.subspaces(group, TASKS_AT_ONCE)
        kernel = partial(residual_ratios, means=means, bases=bases)
        ratios = view.gather(compiled.map_blocks(kernel, view))[:, : len(group)]
        mean_std = np.array([task.residual for task in group], np.float32)
        groups.append(standardised(ratios, mean_std).T)
    return np.concatenate(groups)


# Likelihood and fusion (lines 13, 17 and 18) ------------------------------------------------------


def log_ratio(mean: float, variance: float, tau: float = 1.0) -> Float[np.ndarray, " 3"]:
    """Returns log(p_F(u) / p_O(u)) / tau as coefficients of u^2, u and 1 (Eq. llr).

    The log is -log(V) / 2 - (u - m)^2 / (2 V) + u^2 / 2 for p_F = N(m, V) and p_O = N(0, 1).
    """
    constant = -0.5 * (np.log(variance) + mean * mean / variance)
    return np.array([0.5 - 0.5 / variance, mean / variance, constant]) / tau


def fit_foreign(residuals: Sequence[Float[np.ndarray, "earlier n"]]) -> Foreign:
    """Returns mu_F, V_F and tau, fitted to u_j of each task's features (Eq. foreign, line 13).

    All pairs of tasks have the same weight; tau is the median over all residuals. With one task
    p_F is p_O.
    """
    if not residuals:
        return Foreign()
    pairs = [(u.mean(axis=1, dtype=float), u.var(axis=1, dtype=float)) for u in residuals]
    means, variances = np.concatenate(pairs, axis=1)  # mu_jt and V_jt
    mean = float(means.mean())
    variance = max(float((variances + (means - mean) ** 2).mean()), SCALE_FLOOR)
    wide, ratio = (u.ravel().astype(float) for u in residuals), log_ratio(mean, variance)
    sizes = np.concatenate([np.abs(np.polyval(ratio, u)).astype(np.float32) for u in wide])
    return Foreign(mean, variance, max(float(np.median(sizes)), SCALE_FLOOR))


@jax.jit
def fuse(
    measured: Any, tasks: Any, log_ratios: Any, weights: Any, switches: tuple[Any, ...]
) -> tuple[Float[Array, "n t"], Int[Array, "n t"]]:
    """Returns S_t and the best row of each head (Eq. score-fusion, Eq. dual-main, lines 17 and 18).

    `measured`, `tasks`, `log_ratios` and the weights w_v have an item by view. The switches are TSF
    (on or off), alpha, beta and `nearest`, which standardises affinities over the tasks of each
    input (paper, "PAC Neighborhood Size").
    """
    tsf, alpha, beta, nearest = switches
    scale = jnp.where(tsf, tasks[0].scales[:, 1], tasks[0].scales[:, 0])
    logits = jnp.where(tsf, measured[0].filtered, measured[0].raw)
    score = logits.max(axis=-1)
    for view, task, ratio, weight in zip(measured, tasks, log_ratios, weights, strict=True):
        over_tasks = {"axis": 1, "where": task.scales[:, 0] > 0, "keepdims": True}
        spread = jnp.maximum(view.distance.std(**over_tasks), SCALE_FLOOR)
        across = jnp.stack([view.distance.mean(**over_tasks), spread], axis=-1)
        q = -standardised(view.distance, jnp.where(nearest, across, task.distance))  # Eq. par
        u = standardised(view.residual, task.residual)  # Eq. residual
        rlc, pac = jnp.tanh(jnp.polyval(ratio, u)), jnp.tanh(q)  # Eq. llr, Eq. pac-correction
        score = score + weight * scale * (beta * pac - alpha * rlc)
    return score, logits.argmax(axis=-1)


class Terms(NamedTuple):
    """Measurements of a batch against all tasks; `fuse` combines them under any switches."""

    blocks: Blocks
    measured: list[list[Measured]]  # by block and view, on the device
    tasks: list[PackedTasks]  # by view
    references: list[Foreign]  # by view
    settings: Settings
    classes: Sequence[Int[np.ndarray, " c"]]

    def fuse(
        self,
        tsf: bool = True,
        rlc: bool = True,
        pac: bool = True,
        adapted_view: bool = True,
        pretrained_view: bool = True,
        nearest: bool = False,
    ) -> Scores:
        """Returns the scores with some components on; without any they are the raw logits."""
        full = self.settings
        views = full.adapted_view_weight, full.pretrained_view_weight
        weights = views[0] * adapted_view, views[1] * pretrained_view
        switches = tsf, rlc * full.rlc_weight, pac * full.pac_weight, nearest
        common = self.tasks, self.log_ratios, weights[: len(self.tasks)], switches
        scores, rows = self.blocks.gather([fuse(block, *common) for block in self.measured])
        return Scores(scores[:, : len(self.classes)], rows[:, : len(self.classes)], self.classes)

    @property
    def log_ratios(self) -> list[Float[np.ndarray, " 3"]]:
        """Returns log(p_F / p_O) / tau by view; see `log_ratio`."""
        return [log_ratio(*reference) for reference in self.references]

    def column(self, name: str, view: int = 0) -> Float[np.ndarray, "n tasks ..."]:
        """Returns a field of `Measured` in one view."""
        column = self.blocks.gather([getattr(block[view], name) for block in self.measured])
        return column[:, : len(self.classes)]

    def standardised(self, view: int) -> tuple[Float[np.ndarray, "n tasks"], ...]:
        """Returns u_t and q_t in one view."""
        tasks, count = jax.device_get(self.tasks[view]), len(self.classes)
        q = -standardised(self.column("distance", view), tasks.distance[:count])
        return standardised(self.column("residual", view), tasks.residual[:count]), q

    def by_class(self) -> Float[np.ndarray, "n classes"]:
        """Returns S_t - (largest filtered logit of t - the class's own); not in the paper."""
        logits = self.column("filtered")
        scores = logits + (self.fuse().task_scores - logits.max(axis=-1))[..., None]
        return np.hstack([scores[:, t, : len(rows)] for t, rows in enumerate(self.classes)])


class FDC(Calibrator):
    """Feature Distribution Calibration of task heads (Algorithm 1).

    The order of tasks matters: the foreign residuals of a task are those against earlier tasks.
    Features are not centred: TSF and PAC depend on their origin.
    """

    name = "fdc"
    needs_heads = True

    def __init__(self, **settings: Any):
        super().__init__()
        self.settings = checked_settings(settings)
        self.tasks: list[Task] = []
        # F^v by view: u_j of every task from the second on, by earlier task j; None if released.
        self.foreign: list[list[Float[np.ndarray, "earlier n"]]] | None = []
        self.references: list[Foreign] = []  # by view; empty before `finalize`

    def _fit(self, given: inputs.TaskInput) -> None:
        """Computes the statistics of a task (lines 5 to 11)."""
        if self.foreign is None:
            raise InputError("the foreign residuals were released: no further task can be fitted")
        self.settings.check_neighbours(given.task, given.counts)
        rows, blocks = given.rows, compiled.blocks_of(given.views)
        # Line 6, and line 9 within `pack`.
        pairs = [mean_and_prototypes(view, rows, len(given.classes)) for view in blocks]
        bases = pca(blocks, rows, [mean for mean, _ in pairs], self.settings.retained_energy)
        views = [View(mean, basis, p) for (mean, p), basis in zip(pairs, bases, strict=True)]
        # Lines 6 and 10, the task against itself; `measure` does not read the moments.
        gamma, head = self.settings.attenuation, [given.head]
        alone = pack([Task(views)], [given.counts], head, gamma, pad=False)
        by_view = blocks[0].gather(self._by_block(blocks, alone, head))
        for index, (view, measured) in enumerate(zip(views, by_view, strict=True)):
            residual, (mean, std) = moments(measured.residual), moments(measured.distance)
            views[index] = view._replace(residual=residual, affinity=(1.0 - mean, std))
            if residual[1] <= SCALE_FLOOR and len(view.basis) < len(view.mean):
                name = inputs.name_of(f"{inputs.VIEWS[index]} features", given.task)
                reason = f"residual ratios of its samples ({len(rows)}) do not vary"
                _LOGGER.warning(f"{name}: {reason}, and dominate RLC's foreign reference")
        scales = [moments(z.max(axis=-1))[1] for z in (by_view[0].raw, by_view[0].filtered)]
        foreign = [list(residuals) for residuals in self.foreign or [[] for _ in blocks]]
        for index, block in enumerate(blocks if self.tasks else []):  # Line 7.
            earlier = [task.views[index] for task in self.tasks]
            foreign[index].append(foreign_residuals(block, earlier))
        self.tasks, self.foreign, self.references = [*self.tasks, Task(views, *scales)], foreign, []
        self._append(given, by_view[0].raw[:, 0].argmax(axis=1))

    def finalize(self, release: bool = False) -> None:
        """Fits the foreign reference of RLC, and with `release` discards F^v, as line 13 does."""
        if not self.tasks:
            raise InputError("finalize: no task was fitted")
        self.references = self.references or [*map(fit_foreign, self.foreign or [])]
        self.foreign = None if release else self.foreign

    def terms(self, adapted: Any, pretrained: Any = None) -> Terms:
        """Returns the measurements of a batch against all tasks (lines 15 to 17); see `score`."""
        if not self.references:
            raise InputError("call fit_task for every task, then finalize, first")
        needed = self.settings.pretrained_view_weight > 0.0
        given = self._batch(adapted, pretrained, needed)
        blocks, count = compiled.blocks_of(given), len(given)
        measured = self._by_block(blocks, self._packed[:count], self.heads)
        fitted = self._packed[:count], self.references[:count], self.settings
        return Terms(blocks[0], measured, *fitted, self.classes)

    @cached_property
    def _unit_means(self) -> list[Float[np.ndarray, "c d"]]:
        present = np.concatenate(self.counts) > 0
        views = zip(*(task.views for task in self.tasks), strict=True)
        return [np.concatenate([task.prototypes for task in view])[present] for view in views]

    @cached_property
    def _packed(self) -> list[PackedTasks]:
        return pack(self.tasks, self.counts, self.heads, self.settings.attenuation)

    def measure(self, views: Sequence[Array], tasks: Any, heads: Any) -> list[Measured]:
        """Returns `measure` of a batch by view; other functions may compile it."""
        settings = self.settings.attenuation, self.settings.neighbours, heads[0].affine.normalised
        return [measure(*pair, *settings) for pair in zip(views, tasks, strict=True)]

    def _by_block(self, blocks: Sequence[Blocks], tasks: list[PackedTasks], heads: Any) -> Any:
        """Returns measurements by block and view."""
        return compiled.map_blocks(lambda *views: self.measure(views, tasks, heads), *blocks)

    def score(self, adapted: Any, pretrained: Any = None) -> Scores:
        """Returns calibrated scores of a batch of any size (lines 15 to 20)."""
        return self.terms(adapted, pretrained).fuse()

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
