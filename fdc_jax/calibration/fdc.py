"""Feature Distribution Calibration (FDC): Algorithm 1 of the paper, from top to bottom.

Lines are those of the algorithm; its equations are functions of `equations`. A view is an encoder:
"adapted" (E_t while learning, E_T at the end) or "pretrained" (E_0). Features are rows [n, d].
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fdc_jax.calibration import equations as eq
from fdc_jax.calibration import inputs
from fdc_jax.calibration.calibrator import Calibrator, Scores
from fdc_jax.calibration.compiled import in_blocks, over_tasks, stack
from fdc_jax.errors import InputError
from fdc_jax.heads import products, unit

if TYPE_CHECKING:
    from jaxtyping import Float, Int

_LOGGER = logging.getLogger("fdc_jax.calibration")

# Table current-ablation, and the views of Table plugin without TSF, as arguments of `Terms.fuse`.
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


@dataclass(frozen=True)
class Settings:
    """Settings of FDC; the defaults are the paper's. InputError when one is outside its range."""

    retained_energy: float = 0.75  # eta, share of a task's variance in its subspace, in (0, 1]
    attenuation: float = 0.5  # gamma, how much TSF removes outside the subspace, in [0, 1]
    rlc_weight: float = 1.0  # alpha
    pac_weight: float = 1.0  # beta
    adapted_view_weight: float = 1.0  # w_T
    pretrained_view_weight: float = 1.0  # w_0; with 0 no pretrained features are needed to score
    neighbours: int = 1  # K, class prototypes whose cosines PAC averages

    def __post_init__(self):
        for field in fields(self):
            value, kind = getattr(self, field.name), type(field.default)
            least, what = (1, "count") if kind is int else (0, "finite number")
            real = issubclass(type(value), Real) and not isinstance(value, bool)
            if not (real and math.isfinite(value) and kind(value) == value >= least):
                raise InputError(f"{field.name}: expected a {what} from {least}, found {value!r}")
            object.__setattr__(self, field.name, kind(value))
        if not 0.0 < self.retained_energy <= 1.0:
            raise InputError(f"retained_energy: expected 0 < x <= 1, found {self.retained_energy}")
        if self.attenuation > 1.0:
            raise InputError(f"attenuation: expected 0 <= x <= 1, found {self.attenuation}")


class View(NamedTuple):
    """What is kept of a task in one view; moments are population mean and standard deviation."""

    mean: Float[np.ndarray, " d"]  # m_t
    basis: Float[np.ndarray, "r d"]  # U_t; no row where nothing varies
    prototypes: Float[np.ndarray, "c d"]  # p_{t,c}; zero for classes without an image
    residual: tuple[float, float] = (0.0, 1.0)  # moments of the task's own rho_t
    affinity: tuple[float, float] = (0.0, 1.0)  # of its own A_t


class Task(NamedTuple):
    """What is kept of a task: its views, adapted first, and sigma_t without and with TSF."""

    views: list[View]
    raw_scale: float
    filtered_scale: float


# Features against all tasks (lines 6, 10, 16 and 17) ---------------------------------------------


class Frame(NamedTuple):
    """The tasks' statistics in one view side by side, relative to a point amid their means."""

    origin: Float[Any, " d"]
    tasks: tuple[Any, ...]  # m_t - origin, U_t, prototypes, `absent`, moments of rho_t and A_t


def framed(
    views: Sequence[View], counts: Sequence[Int[np.ndarray, " c"]], plain: bool = False
) -> Frame:
    """Returns the statistics of tasks for `measure`; see `compiled.stack` for `plain`."""
    origin = np.mean([view.mean for view in views], axis=0)
    absent = [np.where(count > 0, 0.0, -np.inf) for count in counts]
    columns = (
        stack([view.mean - origin for view in views], plain=plain),
        stack([view.basis for view in views], 8, plain=plain),
        stack([view.prototypes for view in views], 4, plain=plain),
        stack(absent, 4, -np.inf, plain=plain),
        stack([np.array(view.residual + view.affinity) for view in views], plain=plain),
    )
    return Frame(origin, columns)


def folded(
    heads: Sequence[Any], bases: Sequence[Float[np.ndarray, "r d"]], gamma: float, plain=False
) -> tuple[Any, Any, Any]:
    """Returns the rows of heads, these with TSF folded in (line 9), and their biases."""
    forms = [head.affine for head in heads]
    bent = [eq.filtered(form.rows, basis, gamma) for form, basis in zip(forms, bases, strict=True)]
    biases = [np.broadcast_to(form.bias, len(form.rows)) for form in forms]
    rows = stack([form.rows for form in forms], 4, plain=plain)
    return rows, stack(bent, 4, plain=plain), stack(biases, 4, -np.inf, plain=plain)


def against_task(
    features: Float[Any, "n d"],
    origin: Float[Any, " d"],
    gamma: float,
    neighbours: int,
    normalised: bool,
    all_rows: bool = False,
) -> Callable[..., tuple[Any, ...]]:
    """Returns the function of one task, and of its head where it takes part, that measures rows."""
    near, units = features - origin, unit(features)  # once for all tasks
    squares, lengths = eq.energy(near), eq.energy(features) if normalised else None

    def one_task(mean, basis, prototypes, absent, own, *head):
        ratio, coordinates = eq.residual_ratio(near, squares, mean, basis)
        closeness = eq.affinity(units, prototypes, absent, neighbours)
        measured = (ratio - own[0]) / own[1], (closeness - own[2]) / own[3]
        if not head:
            return measured
        rows, bent, bias = head
        bent_lengths = None
        if normalised:
            # Of (1 - gamma) h + gamma (h U) U^T, with h U = (h - m_t) U + m_t U.
            inside = eq.energy(coordinates + products((mean + origin)[None], basis))
            bent_lengths = (1 - gamma) ** 2 * (lengths - inside) + inside
        raw = eq.head_logits(features, rows, bias, lengths)
        bent = eq.head_logits(features, bent, bias, bent_lengths)
        largest = [each for z in (raw, bent) for each in (z.max(axis=-1), z.argmax(axis=-1))]
        return *measured, *largest, *((bent,) if all_rows else ())

    return one_task


def measure(
    fitted: tuple[Sequence[Frame], tuple[Any, ...]], *views: Float[Any, "n _"], **static: Any
) -> dict[str, Any]:
    """Measures a batch against all tasks; `static` are the last arguments of `against_task`.

    Returns:
        [n, tasks] by name: `adapted_residual` u_t, `adapted_affinity` q_t, the same of
        `pretrained`; the largest logits `raw` and, with TSF, `filtered`, with their `raw_row` and
        `filtered_row`; with `all_rows` also all `filtered_rows` [n, tasks, c].
    """
    found: dict[str, Any] = {}
    frames, heads = fitted
    for name, frame, features in zip(inputs.VIEWS, frames, views, strict=False):
        given = *frame.tasks, *(heads if name == "adapted" else ())
        columns = over_tasks(against_task(features, frame.origin, **static), *given)
        logits = "raw", "raw_row", "filtered", "filtered_row", "filtered_rows"
        found |= dict(zip((f"{name}_residual", f"{name}_affinity", *logits), columns, strict=False))
    return found


@dataclass(frozen=True)
class Terms:
    """Everything that the scores of a batch are made of, so that any combination costs no pass."""

    measured: dict[str, Float[np.ndarray, "n tasks"]]  # what `measure` returns
    views: list[tuple[float, Any, Any, Any]]  # each one's weight, RLC evidence, q_t, A_t's moments
    raw_scale: Float[np.ndarray, " tasks"]  # sigma_t without TSF
    filtered_scale: Float[np.ndarray, " tasks"]  # sigma_t
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
        """Returns the scores with the named components switched on (lines 18 and 19).

        Without TSF both the logits and the score scales are the raw ones; with everything switched
        off the scores are the raw logits. With `nearest`, affinities are standardised over the
        candidate tasks of each input (paper, "PAC Neighborhood Size").
        """
        views = []
        switches = adapted_view, pretrained_view
        for on, (weight, evidence, q, (mean, std)) in zip(switches, self.views, strict=False):
            if nearest:
                closeness = q * std + mean
                spread = np.maximum(closeness.std(axis=1, keepdims=True), eq.SCALE_FLOOR)
                q = (closeness - closeness.mean(axis=1, keepdims=True)) / spread
            if on:
                views.append((weight, evidence, np.tanh(q)))
        kind, scale = ("filtered", self.filtered_scale) if tsf else ("raw", self.raw_scale)
        weights = rlc * self.settings.rlc_weight, pac * self.settings.pac_weight
        scores = eq.fused(self.measured[kind], scale, views, *weights)
        return Scores(scores, self.measured[f"{kind}_row"], self.classes)


class FDC(Calibrator):
    """Calibrates the competition of task heads from feature statistics (Algorithm 1).

    The order of tasks matters: a task's foreign residuals are measured against earlier tasks only.
    Features are used as they are, never centred or scaled as a whole: TSF and PAC depend on where
    the origin is. When further tasks follow, nothing is refitted but the foreign reference.

    Settings are the fields of `Settings`; InputError when one is outside its range.
    """

    name = "fdc"
    needs_heads = True

    def __init__(self, **settings: Any):
        super().__init__()
        self.settings = Settings(**settings)
        self.tasks: list[Task] = []
        # F^v of each task and view: u_j of its features by every earlier task j.
        self.foreign: list[list[Float[np.ndarray, "earlier n"]]] | None = []
        self.references: list[eq.Foreign] = []  # of each view; none before `finalize`
        self._forget()

    def fit_task(self, adapted, labels, head=None, pretrained=None, classes=None, previous=None):
        """See `Calibrator.fit_task` (lines 5 to 11)."""
        if self.foreign is None:
            raise InputError("the foreign residuals were released: no further task can be fitted")
        given, settings = self._task(adapted, labels, head, pretrained, classes), self.settings
        if (present := int((given.counts > 0).sum())) < settings.neighbours:
            raise InputError(
                f"task {given.task}: {settings.neighbours} neighbours need as many classes with "
                f"samples, found {present}"
            )
        views, foreign = [], []
        for index, features in enumerate(given.views):  # Line 6.
            name, count = given.name(index), len(given.classes)
            mean, prototypes = eq.means(features, given.rows, count, name)
            views.append(View(mean, eq.pca(features, mean, settings.retained_energy), prototypes))
        # Own moments and line 10 need another walk, with the finished subspace and prototypes.
        frames = [framed([view], [given.counts], plain=True) for view in views]
        heads = folded([given.head], [views[0].basis], settings.attenuation, plain=True)
        measured = self._measure((frames, heads), given.views, given.head, plain=True)
        scales = [eq.moments(measured[kind])[1] for kind in ("raw", "filtered")]
        for index, (view, features) in enumerate(zip(views, given.views, strict=True)):
            name = inputs.VIEWS[index]
            own = [eq.moments(measured[f"{name}_{kind}"]) for kind in ("residual", "affinity")]
            views[index] = view._replace(residual=own[0], affinity=own[1])
            earlier = [task.views[index] for task in self.tasks]
            foreign.append(eq.foreign_residuals(features, earlier))  # Line 7.
            if own[0][1] <= eq.SCALE_FLOOR and len(view.basis) < len(view.mean):
                _LOGGER.warning(
                    f"{given.name(index)}: residual ratios of its samples ({len(features)}) do not "
                    "vary; RLC's foreign reference, which all tasks share, will be dominated by it"
                )
        self.tasks = [*self.tasks, Task(views, *scales)]
        self.foreign = [*self.foreign, foreign]
        self.references = []
        self._append(given)

    def finalize(self, release: bool = False) -> None:
        """Fits the foreign reference of RLC, and may discard what it is fitted on (line 13)."""
        if not self.tasks:
            raise InputError("finalize: no task was fitted")
        if self.foreign is not None and not self.references:
            by_view = zip(*self.foreign, strict=True)
            self.references = [eq.foreign_reference(residuals) for residuals in by_view]
        if release:
            self.foreign = None

    def terms(self, adapted: Any, pretrained: Any = None, all_rows: bool = False) -> Terms:
        """Returns what scores are made of; see `score`. With `all_rows`, of classes, too."""
        if not self.references:
            raise InputError("call fit_task for every task, then finalize, first")
        settings, count = self.settings, self.num_tasks
        weights = settings.adapted_view_weight, settings.pretrained_view_weight
        views = inputs.score_views(adapted, pretrained, self.widths, weights[1] > 0.0)
        if self._fitted is None:
            own = [[task.views[index] for task in self.tasks] for index in range(len(self.widths))]
            bases = [view.basis for view in own[0]]
            frames = [framed(each, self.counts) for each in own]
            self._fitted = frames, folded(self.heads, bases, settings.attenuation)
        found = self._measure(self._fitted, views, self.heads[0], all_rows=all_rows)
        found = {name: column[:, :count] for name, column in found.items()}  # no padding
        terms = []
        for index, (mean, variance, tau) in enumerate(self.references[: len(views)]):
            name = inputs.VIEWS[index]
            evidence = np.tanh(eq.log_ratio(found[f"{name}_residual"], mean, variance) / tau)
            of_tasks = np.array([task.views[index].affinity for task in self.tasks], np.float32).T
            terms.append((weights[index], evidence, found[f"{name}_affinity"], of_tasks))
        raw, bent = np.array([task[1:] for task in self.tasks], np.float32).T
        return Terms(found, terms, raw, bent, settings, self.classes)

    def _measure(self, fitted, views, head, plain=False, **more) -> dict[str, np.ndarray]:
        given = dict(zip((f"{name} features" for name in inputs.VIEWS), views, strict=False))
        settings, normalised = self.settings, head.affine.normalised
        static = {"gamma": settings.attenuation, "neighbours": settings.neighbours, **more}
        return in_blocks(measure, fitted, given, plain=plain, normalised=normalised, **static)

    def score(self, adapted: Any, pretrained: Any = None) -> Scores:
        """Returns calibrated scores of a batch of any size (lines 14 to 20)."""
        return self.terms(adapted, pretrained).fuse()

    def components(self, adapted: Any, pretrained: Any = None) -> dict[str, Scores]:
        """Returns the scores of `COMPONENTS`; those of one view only where there are two."""
        terms = self.terms(adapted, pretrained)
        return {
            name: terms.fuse(**switches)
            for name, switches in COMPONENTS.items()
            if len(terms.views) == 2 or not name.endswith("_view")
        }

    def class_scores(self, adapted: Any, pretrained: Any = None) -> Float[np.ndarray, "n classes"]:
        """Returns each class's task score, less what its logit lacks of the task's largest one."""
        terms = self.terms(adapted, pretrained, all_rows=True)
        scores = terms.fuse().task_scores - terms.measured["filtered"]
        rows = terms.measured["filtered_rows"] + scores[..., None]
        return np.concatenate(
            [rows[:, task, : len(own)] for task, own in enumerate(self.classes)], axis=1
        )

    @property
    def storage_bytes(self) -> int:
        """Returns the bytes of the paper's statistics in use, by its accounting, in float32.

        PCA bases count as factors; classifier weights and foreign residuals do not count. A view of
        weight 0 counts no more than what TSF needs: the adapted bases.
        """
        settings, numbers = self.settings, 2 * self.num_tasks  # Scales with and without TSF.
        weights = settings.adapted_view_weight, settings.pretrained_view_weight
        present = sum(int((count > 0).sum()) for count in self.counts)
        for index, weight in enumerate(weights[: len(self.widths)]):
            if weight or (index == 0 and settings.attenuation):
                numbers += sum(task.views[index].basis.size for task in self.tasks)
            if weight:
                numbers += (self.num_tasks + present) * self.widths[index]
                # Four moments of each task; mean, variance and scale of the foreign reference.
                numbers += 4 * self.num_tasks + (3 if self.num_tasks > 1 else 0)
        return 4 * numbers

    def _forget(self) -> None:
        self._fitted: tuple[list[Frame], tuple[Any, ...]] | None = None
