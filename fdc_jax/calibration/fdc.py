"""Feature Distribution Calibration (FDC): Algorithm 1 of the paper and its equations, in its order.

    5-11   FDC.fit_task: 6 means, pca, moments; 7 standardised; 9 filtered; 10 moments
    13     FDC.finalize: fit_foreign, log_ratio
    14-20  FDC.score: 16 measure; 17, 18 fuse; 20 calibrator.Scores

`measure` compares features with tasks in lines 6, 7, 10 and 16.

A view is an encoder: "adapted" (A: E_t while learning, E_T at the end) or "pretrained" (0: E_0).
Features are rows [n, d], and U_t is kept as rows. JAX computes in float32 with exact products;
moments, sums over tasks and the median are float64 on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fdc_jax.calibration import compiled, inputs
from fdc_jax.calibration.calibrator import Calibrator, Scores, warn_of_equal_residuals
from fdc_jax.calibration.compiled import Blocks, energy, padded_size, stack
from fdc_jax.calibration.statistics import COMPONENTS, Foreign, Settings, Task, View
from fdc_jax.errors import InputError
from fdc_jax.heads import NORM_FLOOR, products, unit

# Both floors are of the paper's "Test-Time Calibration".
SCALE_FLOOR = 1e-6
ENERGY_FLOOR = 1e-12
# Shares of energy nearer than this count as equal: a share that rounding alone misses is reached.
ENERGY_TOLERANCE = 1e-6
# Tasks that `vmap` measures at once: two stay in the caches of a CPU, and memory does not grow.
TOGETHER = 2


# Statistics of a task (line 6) --------------------------------------------------------------------


def means(
    view: Blocks, rows: Int[np.ndarray, " n"], classes: int
) -> tuple[Float[np.ndarray, " d"], Float[np.ndarray, "c d"]]:
    """Returns m_t, and p_{t,c} by class, zero for classes without an image (Eq. proto)."""
    numbers = np.arange(padded_size(classes, 8), dtype=np.int32)
    first = next(iter(view))
    sums = compiled.in_order(partial(_sums, numbers, first), view, view.beside(rows))
    *parts, (origin, *_) = zip(*jax.device_get(sums), strict=True)
    total, directions = (np.sum(part, axis=0, dtype=float) for part in parts)
    present = np.bincount(rows, minlength=classes)[:, None]
    directions = directions[:classes] + present * unit(origin.astype(float))
    return (origin + total / len(rows)).astype(np.float32), unit(directions).astype(np.float32)


@jax.jit
def _sums(numbers: Any, first: Any, features: Any, rows: Any) -> tuple[Array, Array, Array]:
    origin = first[0]  # Sums about a feature keep the digits of features far from zero.
    members, ways = (rows == numbers[:, None]).astype(jnp.float32), unit(features) - unit(origin)
    return compiled.centred(features, rows, origin).sum(axis=0), products(members, ways.T), origin


def pca(
    views: Sequence[Blocks], rows: Int[np.ndarray, " n"], centres: Sequence[Any], share: float
) -> list[Float[np.ndarray, "r d"]]:
    """Returns U_t of views, the fewest directions with a share of the variance (Eq. task-pca)."""
    rank = partial(retained_rank, share=share, count=len(rows))
    return compiled.principal(views, rows, centres, rank)


def retained_rank(energies: Float[np.ndarray, " k"], share: float, count: int) -> int:
    """Returns how many of descending energies hold a share; `count` samples span `count` - 1."""
    energies = np.clip(energies.astype(float), 0.0, None)
    if count < 2 or not energies.any():
        return 0
    short = np.cumsum(energies) / energies.sum() < share - ENERGY_TOLERANCE
    return min(int(short.sum()) + 1, count - 1, len(energies))


def moments(values: Float[np.ndarray, ...]) -> tuple[float, float]:
    """Returns mean and population standard deviation, at least 1e-6, computed in float64."""
    wide = values.astype(float)
    return float(wide.mean()), max(float(wide.std()), SCALE_FLOOR)


# Features against tasks (lines 6, 7, 9, 10 and 16) ------------------------------------------------


class Tasks(NamedTuple):
    """Statistics of tasks in one view, padded; `heads` are None in the pretrained view."""

    mean: Float[Array, "t d"]
    basis: Float[Array, "t r d"]
    length: Float[Array, " t"]  # |m|
    prototypes: Float[Array, "t c+1 d"] | None  # p - m^, then m^ = m / |m|; None for rho_t alone
    offset: Float[Array, "t c"]  # |m| - m.p, infinite for classes without an image
    residual: Float[Array, "t 2"]  # moments of rho_t
    distance: Float[Array, "t 2"]  # moments of 1 - A_t
    scales: Float[Array, "t 2"]  # sigma_t without and with TSF; 0 for padding tasks
    heads: tuple[Array, Array] | None  # W_t above W~_t, and b_t
    normalised: Float[Array, " t"] | None  # None unless heads divide h by its length


class Measured(NamedTuple):
    """Features against tasks. A_t has no digits left near 1 in float32, so that 1 - A_t is kept."""

    residual: Float[Array, "n t"]  # rho_t
    distance: Float[Array, "n t"] | None = None  # 1 - A_t
    raw: Float[Array, "n t c"] | None = None  # logits, if there are heads
    filtered: Float[Array, "n t c"] | None = None  # the same with TSF


@partial(jax.jit, static_argnames="neighbours")
def measure(features: Float[Array, "n d"], tasks: Tasks, gamma: float, neighbours: int) -> Measured:
    """Measures features in one view against tasks."""
    lengths = jnp.sqrt(energy(features))

    def one_task(task: Any) -> Measured:
        near = features - task.mean
        ratio, inside = residual_ratio(near, task.basis)
        if task.prototypes is None:
            return Measured(ratio)
        distance = cosine_distance(near, lengths, task, neighbours)
        if task.heads is None:
            return Measured(ratio, distance)
        weights, bias = task.heads
        raw, kept = jnp.split(products(features, weights), 2, axis=-1)
        if task.normalised is not None:
            inside = inside + products(task.mean[None], task.basis)  # h U
            raw = raw / jnp.maximum(lengths, NORM_FLOOR)[:, None]
            kept = kept / jnp.maximum(filtered_lengths(lengths, inside, gamma), NORM_FLOOR)[:, None]
        return Measured(ratio, distance, raw + bias, kept + bias)

    by_task = jax.lax.map(one_task, tasks, batch_size=min(TOGETHER, len(tasks.mean)))  # by `vmap`
    return jax.tree.map(lambda values: jnp.moveaxis(values, 0, 1), by_task)


def residual_ratio(near: Any, basis: Any) -> tuple[Float[Array, " n"], Float[Array, "n r"]]:
    """Returns rho_t of g - m_t (Eq. residual), and (g - m_t) U_t."""
    total, inside = energy(near), products(near, basis)
    outside = jnp.maximum(total - energy(inside), 0.0)
    return outside / jnp.maximum(total, ENERGY_FLOOR), inside


def cosine_distance(near: Any, lengths: Any, task: Tasks, k: int) -> Float[Array, " n"]:
    """Returns 1 - A_{t,K}, where A_{t,K} is the mean of the K largest cosines (Eq. par).

    With h = g - m for the task's mean m, |g| (1 - cos(g, p)) is

        |h|^2 / (|g| + |m|) + h.m^ (|m| - |g|) / (|g| + |m|) - h.(p - m^) + (|m| - m.p),

    whose terms are as small as their sum. In float32 the difference of 1 and the cosine would keep
    no digits of features that all point nearly the same way. The cosines of g = 0 are 0.
    """
    both = jnp.maximum(lengths + task.length, NORM_FLOOR)
    along = products(near, task.prototypes)
    shared = (energy(near) + along[:, -1] * (task.length - lengths)) / both
    scaled = shared[:, None] - along[:, :-1] + task.offset  # |g| (1 - cos(g, p)) of each class
    nearest = scaled.min(axis=-1) if k == 1 else jnp.sort(scaled, axis=-1)[:, :k].mean(axis=-1)
    return jnp.where(lengths > NORM_FLOOR, nearest / jnp.maximum(lengths, NORM_FLOOR), 1.0)


def filtered(rows: Any, basis: Float[Array, "r d"], gamma: float) -> Float[Array, "n d"]:
    """Returns (1 - gamma) W + gamma (W U) U^T of weight rows (Eq. osp, line 9)."""
    return (1.0 - gamma) * rows + gamma * products(products(rows, basis), basis.T)


def filtered_lengths(lengths: Any, inside: Float[Array, "n r"], gamma: float) -> Float[Array, " n"]:
    """Returns the lengths of features h after the map of Eq. osp, of |h| and h U."""
    kept = energy(inside)
    return jnp.sqrt((1.0 - gamma) ** 2 * jnp.maximum(lengths * lengths - kept, 0.0) + kept)


@jax.jit
def _folded(rows: Any, basis: Any, gamma: float) -> Float[Array, "t 2c d"]:
    return jnp.concatenate([rows, jax.vmap(filtered, (0, 0, None))(rows, basis, gamma)], axis=1)


def side_by_side(
    tasks: Sequence[Task], view: int, counts: Sequence[Any], heads: Any, gamma: float, alone: bool
) -> Tasks:
    """Returns the statistics of tasks for `measure` and `fuse`; `counts` are samples per class."""
    views, count = [task.views[view] for task in tasks], 1 if alone else padded_size(len(tasks), 8)
    rank = padded_size(max(len(view.basis) for view in views), 16)
    most, put = max(map(len, counts)), partial(compiled.placed, count)
    classes = padded_size(most + 1, 8) - 1  # With m^ 8 rows, whose products are quick.
    # In float64, since differences are small.
    means = np.array([view.mean for view in views], float)
    own = unit(stack([view.prototypes for view in views], classes).astype(float))
    lengths, ways = np.linalg.norm(means, axis=1), unit(means)
    offsets = lengths[:, None] - np.einsum("tcd,td->tc", own, means)
    offsets[stack(counts, classes) == 0] = np.inf
    basis, folded, normalised = put(stack([view.basis for view in views], rank)), None, None
    if heads is not None:
        forms = [head.affine for head in heads]
        weights = put(stack([form.rows for form in forms], padded_size(most, 4)))
        biases = [np.broadcast_to(form.bias, len(form.rows)) for form in forms]
        folded = _folded(weights, basis, gamma), put(stack(biases, padded_size(most, 4), -np.inf))
        normalised = np.ones(count, np.float32) if forms[0].normalised else None
    residuals = [view.residual for view in views]
    distances = [(1.0 - view.affinity[0], view.affinity[1]) for view in views]
    rows = np.concatenate([own - ways[:, None], ways[:, None]], axis=1)
    arrays = lengths, rows, offsets, residuals, distances, [task[1:] for task in tasks]
    return Tasks._make([put(means), basis, *map(put, arrays), folded, normalised])


def standardised(values: Any, own: Any) -> Any:
    """Returns u_t of rho_t, or -q_t of 1 - A_t, by their moments (Eq. residual, Eq. par)."""
    return (values - own[..., 0]) / own[..., 1]


# Likelihood and fusion (lines 13, 17 and 18) ------------------------------------------------------


def log_ratio(mean: float, variance: float) -> Float[np.ndarray, " 3"]:
    """Returns log p_F(u) / p_O(u) as coefficients of u^2, u and 1 (Eq. llr).

    It is -log(V) / 2 - (u - m)^2 / (2 V) + u^2 / 2 for p_F = N(m, V) and p_O = N(0, 1).
    """
    constant = -0.5 * (np.log(variance) + mean * mean / variance)
    return np.array([0.5 - 0.5 / variance, mean / variance, constant])


def fit_foreign(residuals: Sequence[Float[np.ndarray, "earlier n"]]) -> Foreign:
    """Fits mu_F and V_F to u_j of each task's features, and tau (Eq. foreign, line 13).

    Pairs of tasks weigh the same; tau is the median over all residuals.
    """
    if not residuals:
        return Foreign()
    pairs = [(u.mean(axis=1, dtype=float), u.var(axis=1, dtype=float)) for u in residuals]
    means, variances = np.concatenate(pairs, axis=1)  # mu_jt and V_jt
    mean = float(means.mean())
    variance = max(float((variances + (means - mean) ** 2).mean()), SCALE_FLOOR)
    wide, ratio = (u.ravel().astype(float) for u in residuals), log_ratio(mean, variance)
    ratios = np.concatenate([np.abs(np.polyval(ratio, u)).astype(np.float32) for u in wide])
    return Foreign(mean, variance, max(float(np.median(ratios)), SCALE_FLOOR))


@jax.jit
def fuse(
    measured: Any, tasks: Any, ratios: Any, weights: Any, tsf: Any, alpha: Any, beta: Any, near: Any
) -> tuple[Float[Array, "n t"], Int[Array, "n t"]]:
    """Returns S_t and each head's best row (Eq. score-fusion, Eq. dual-main, lines 17 and 18).

    `measured`, `tasks`, `weights` w_v and `ratios`, log p_F(u) / p_O(u) over tau, are lists by
    view. With `near` affinities are standardised over tasks ("PAC Neighborhood Size": Nearest).
    """
    scale = jnp.where(tsf, tasks[0].scales[:, 1], tasks[0].scales[:, 0])
    logits = jnp.where(tsf, measured[0].filtered, measured[0].raw)
    score = logits.max(axis=-1)
    for view, of, ratio, weight in zip(measured, tasks, ratios, weights, strict=True):
        over = {"axis": 1, "where": of.scales[:, 0] > 0, "keepdims": True}
        spread = jnp.maximum(view.distance.std(**over), SCALE_FLOOR)
        across = jnp.stack([view.distance.mean(**over), spread], axis=-1)
        q = -standardised(view.distance, jnp.where(near, across, of.distance))  # Eq. par
        rlc = jnp.tanh(jnp.polyval(ratio, standardised(view.residual, of.residual)))  # Eq. llr
        score = score + weight * scale * (beta * jnp.tanh(q) - alpha * rlc)  # Eq. pac-correction
    return score, logits.argmax(axis=-1)


class Terms(NamedTuple):
    """A batch measured against all tasks; `fuse` combines it without the features."""

    blocks: Blocks
    measured: list[list[Measured]]  # by block and view, on the device
    tasks: list[Tasks]  # by view
    ratios: list[Float[np.ndarray, " 3"]]
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
        """Returns the scores with the named components switched on: raw logits without any."""
        of = self.settings
        weights = adapted_view * of.adapted_view_weight, pretrained_view * of.pretrained_view_weight
        on = weights[: len(self.tasks)], tsf, rlc * of.rlc_weight, pac * of.pac_weight, nearest
        fused = [fuse(block, self.tasks, self.ratios, *on) for block in self.measured]
        scores, rows = self.blocks.gather(fused)
        return Scores(scores[:, : len(self.classes)], rows[:, : len(self.classes)], self.classes)

    def column(self, name: str, view: int = 0) -> Float[np.ndarray, "n tasks ..."]:
        """Returns a field of `Measured` in one view."""
        column = self.blocks.gather([getattr(block[view], name) for block in self.measured])
        return column[:, : len(self.classes)]

    def standardised(self, name: str, view: int) -> Float[np.ndarray, "n tasks"]:
        """Returns u_t in one view for the name "residual", and -q_t for "distance"."""
        own = jax.device_get(getattr(self.tasks[view], name))[: len(self.classes)]
        return standardised(self.column(name, view), own)

    def by_class(self) -> Float[np.ndarray, "n classes"]:
        """Returns S_t - (largest filtered logit of t - the class's own); not in the paper."""
        logits = self.column("filtered")
        rows = logits + (self.fuse().task_scores - logits.max(axis=-1))[..., None]
        return np.hstack([rows[:, t, : len(own)] for t, own in enumerate(self.classes)])


class FDC(Calibrator):
    """Calibrates the competition of task heads from feature statistics (Algorithm 1).

    The order of tasks matters: a task's foreign residuals are measured against earlier tasks only.
    Features are used as they are: TSF and PAC depend on where the origin is.
    """

    name = "fdc"
    needs_heads = True

    def __init__(self, **settings: Any):
        super().__init__()
        self.settings = Settings(**settings)
        self.tasks: list[Task] = []
        # F^v: of each view u_j of the second task and later ones; None once released.
        self.foreign: list[list[Float[np.ndarray, "earlier n"]]] | None = []
        self.references: list[Foreign] = []  # of each view; none before `finalize`

    def fit_task(self, adapted, labels, head=None, pretrained=None, classes=None, previous=None):
        """See `Calibrator.fit_task` (lines 5 to 11)."""
        if self.foreign is None:
            raise InputError("the foreign residuals were released: no further task can be fitted")
        given = self._task(adapted, labels, head, pretrained, classes)
        self.settings.check_neighbours(given.task, given.counts)
        rows, blocks = given.rows, compiled.blocks_of(given.views)
        own_means = [means(view, rows, len(given.classes)) for view in blocks]  # Line 6.
        bases = pca(blocks, rows, [m for m, _ in own_means], self.settings.retained_energy)
        views = [View(m, basis, p) for (m, p), basis in zip(own_means, bases, strict=True)]
        alone = self._side_by_side([Task(views)], [given.counts], [given.head], alone=True)
        own = blocks[0].gather(self._terms(blocks, alone).measured)
        for index, (view, measured) in enumerate(zip(views, own, strict=True)):
            residual, (mean, std) = moments(measured.residual), moments(measured.distance)
            views[index] = view._replace(residual=residual, affinity=(1.0 - mean, std))
            if residual[1] <= SCALE_FLOOR and len(view.basis) < len(view.mean):
                warn_of_equal_residuals(given, index)
        scales = [moments(z.max(axis=-1))[1] for z in (own[0].raw, own[0].filtered)]  # Line 10.
        foreign = self.foreign or [[] for _ in blocks]
        if self.tasks:  # Line 7.
            earlier = self._side_by_side(self.tasks, self.counts)
            terms = self._terms(blocks, [of._replace(prototypes=None) for of in earlier])
            foreign = [
                [*us, terms.standardised("residual", v).T.copy()] for v, us in enumerate(foreign)
            ]
        self.tasks, self.foreign, self.references = [*self.tasks, Task(views, *scales)], foreign, []
        self._append(given, own[0].raw[:, 0].argmax(axis=1))

    def finalize(self, release: bool = False) -> None:
        """Fits the foreign reference of RLC, and may discard what it is fitted on (line 13)."""
        if not self.tasks:
            raise InputError("finalize: no task was fitted")
        self.references = self.references or [fit_foreign(of) for of in self.foreign or []]
        self.foreign = None if release else self.foreign

    def terms(self, adapted: Any, pretrained: Any = None) -> Terms:
        """Returns the measurements that scores are made of (line 16); see `score`."""
        if not self.references:
            raise InputError("call fit_task for every task, then finalize, first")
        needed = self.settings.pretrained_view_weight > 0.0
        given = inputs.score_views(adapted, pretrained, self.widths, needed)
        return self._terms(compiled.blocks_of(given), self._tasks[: len(given)])

    @cached_property
    def _tasks(self) -> list[Tasks]:
        return self._side_by_side(self.tasks, self.counts, self.heads)

    def _terms(self, blocks: Sequence[Blocks], tasks: list[Tasks]) -> Terms:
        how = self.settings.attenuation, self.settings.neighbours

        def of_block(*views: Array) -> list[Measured]:
            return [measure(view, of, *how) for view, of in zip(views, tasks, strict=True)]

        measured = compiled.in_order(of_block, *blocks)
        ratios = [log_ratio(mean, v) / tau for mean, v, tau in self.references[: len(blocks)]]
        return Terms(blocks[0], measured, tasks, ratios, self.settings, self.classes)

    def _side_by_side(self, tasks, counts, heads=None, alone=False) -> list[Tasks]:
        how, views = (self.settings.attenuation, alone), range(len(tasks[0].views))
        return [side_by_side(tasks, view, counts, None if view else heads, *how) for view in views]

    def score(self, adapted: Any, pretrained: Any = None) -> Scores:
        """Returns calibrated scores of a batch of any size (lines 14 to 20)."""
        return self.terms(adapted, pretrained).fuse()

    def components(self, adapted: Any, pretrained: Any = None) -> dict[str, Scores]:
        """Returns the scores of `COMPONENTS`; those of one view only if there are two."""
        terms = self.terms(adapted, pretrained)
        return {
            name: terms.fuse(**switches)
            for name, switches in COMPONENTS.items()
            if len(terms.tasks) == 2 or not name.endswith("_view")
        }

    def class_scores(self, adapted: Any, pretrained: Any = None) -> Float[np.ndarray, "n classes"]:
        """See `Terms.by_class`."""
        return self.terms(adapted, pretrained).by_class()

    @property
    def storage_bytes(self) -> int:
        """Returns the bytes of statistics in use as the paper counts them, without heads and F^v.

        Of a view of weight 0 the bases that TSF needs count alone.
        """
        settings, count = self.settings, self.num_tasks
        weights = settings.adapted_view_weight, settings.pretrained_view_weight
        rows = count + sum(int((of > 0).sum()) for of in self.counts)  # means and prototypes
        numbers = 2 * count  # sigma_t without and with TSF
        for index, (weight, width) in enumerate(zip(weights, self.widths, strict=False)):
            if weight or (index == 0 and settings.attenuation):
                numbers += sum(task.views[index].basis.size for task in self.tasks)
            if weight:  # Four moments of each task; mu_F, V_F and tau.
                numbers += rows * width + 4 * count + 3 * (count > 1)
        return 4 * numbers
