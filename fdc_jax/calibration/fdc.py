"""Feature Distribution Calibration (FDC): Algorithm 1 of the paper.

Lines 5 to 11 are `FDC.fit_task` (7: `foreign.residuals`, 9: `side_by_side`), 13 is `FDC.finalize`
(`foreign.Residuals.reference`), 16 and 17 are `measure` and `FDC.terms`, 18 is `Terms.fuse`, 20 is
`Scores.task`. Equations are functions of `equations`. A view is an encoder: "adapted" (E_t while
learning, E_T at the end) or "pretrained" (E_0). Features are rows [n, d].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fdc_jax.calibration import equations as eq
from fdc_jax.calibration import foreign, inputs
from fdc_jax.calibration.calibrator import Calibrator, Scores, warn_of_equal_residuals
from fdc_jax.calibration.compiled import in_blocks, over_tasks, stack
from fdc_jax.errors import InputError
from fdc_jax.heads import products, unit

if TYPE_CHECKING:
    from jaxtyping import Float, Int

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
            if not (real and abs(value) < 1e300 and kind(value) == value >= least):
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
    # Until known, with these defaults, `measure` gives rho_t for u_t and A_t - 1 for q_t.
    residual: tuple[float, float] = (0.0, 1.0)  # moments of its own rho_t
    affinity: tuple[float, float] = (1.0, 1.0)  # of its own A_t


class Task(NamedTuple):
    """What is kept of a task: its views, adapted first, and sigma_t without and with TSF."""

    views: list[View]
    raw_scale: float
    filtered_scale: float


# Features against all tasks (lines 6, 10, 16 and 17) ---------------------------------------------


class Frame(NamedTuple):
    """One view's statistics of all tasks, about a point amid them: float32 squares would cancel."""

    origin: Float[Any, " d"]  # mean of the m_t
    direction: Float[Any, " d"]  # mean of the tasks' mean prototypes, each of unit length
    tasks: tuple[Any, ...]  # m_t - origin, U_t, p_{t,c} - direction, absent, moments (rho, 1 - A)


def side_by_side(
    views: Sequence[Sequence[View]],
    counts: Sequence[Int[np.ndarray, " c"]],
    heads: Sequence[Any],
    gamma: float,
    plain: bool = False,
) -> tuple[list[Frame], tuple[Any, ...]]:
    """Returns what `measure` takes: a frame of each view, and W_t, W~_t and b_t of all heads.

    W~_t is W_t with TSF folded in (Eq. osp, line 9). See `compiled.stack` for `plain`.
    """
    put = partial(stack, plain=plain)
    absent = put([np.where(count > 0, 0.0, np.inf) for count in counts], 4, np.inf)
    frames = []
    for each in views:
        origin = np.mean([view.mean for view in each], axis=0)
        direction = np.mean([unit(view.prototypes.sum(axis=0)) for view in each], axis=0)
        moments = [(*view.residual, 1.0 - view.affinity[0], view.affinity[1]) for view in each]
        columns = (
            put([view.mean - origin for view in each]),
            put([view.basis for view in each], 8),
            put([view.prototypes - direction for view in each], 4),
            absent,
            put(moments),
        )
        frames.append(Frame(origin, direction, columns))
    forms = [head.affine for head in heads]
    filtered = [eq.filtered(f.rows, v.basis, gamma) for f, v in zip(forms, views[0], strict=True)]
    biases = [np.broadcast_to(form.bias, len(form.rows)) for form in forms]
    weights = put([form.rows for form in forms], 4), put(filtered, 4), put(biases, 4, -np.inf)
    return frames, weights


def against_task(
    features: Float[Any, "n d"],
    frame: Frame,
    gamma: float,
    neighbours: int,
    normalised: bool,
    all_rows: bool = False,
) -> Callable[..., tuple[Any, ...]]:
    """Returns the function of one task, and of its head where it takes part, that measures rows."""
    near, units = features - frame.origin, unit(features)  # Once for all tasks.
    turned, no_length = units - frame.direction, eq.energy(units) < 0.5
    squares, spread = eq.energy(near), eq.energy(turned) + no_length
    lengths = eq.energy(features) if normalised else None

    def one_task(mean, basis, prototypes, absent, moments, *head):
        ratio, coordinates = eq.residual_ratio(near, squares, mean, basis)  # Eq. residual
        distance = eq.cosine_distance(turned, spread, prototypes, absent, neighbours)  # Eq. par
        residual = (ratio - moments[0]) / moments[1]  # u_t
        closeness = (moments[2] - distance) / moments[3]  # q_t
        if not head:
            return residual, closeness
        weight, filtered_weight, bias = head
        filtered_energies = None
        if normalised:
            inside = coordinates + products((mean + frame.origin)[None], basis)  # h U
            filtered_energies = eq.filtered_energy(lengths, inside, gamma)
        raw = eq.head_logits(features, weight, bias, lengths)
        filtered = eq.head_logits(features, filtered_weight, bias, filtered_energies)
        largest = [each for z in (raw, filtered) for each in (z.max(axis=-1), z.argmax(axis=-1))]
        return residual, closeness, *largest, *((filtered,) if all_rows else ())

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
        columns = over_tasks(against_task(features, frame, **static), *given)
        logits = "raw", "raw_row", "filtered", "filtered_row", "filtered_rows"
        found |= dict(zip((f"{name}_residual", f"{name}_affinity", *logits), columns, strict=False))
    return found


@dataclass(frozen=True)
class Terms:
    """What the scores of a batch are made of; `fuse` combines it without the features."""

    measured: dict[str, Float[np.ndarray, "n tasks"]]  # what `measure` returns
    views: list[tuple[float, Any, Any]]  # each one's weight, RLC evidence and q_t
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
    ) -> Scores:
        """Returns the scores with the named components switched on (line 18).

        Without TSF both the logits and the score scales are the raw ones; with everything switched
        off the scores are the raw logits.
        """
        chosen = zip((adapted_view, pretrained_view), self.views, strict=False)
        # Eq. pac-correction; RLC's evidence, Eq. llr, is from `FDC.terms`.
        views = [(weight, evidence, np.tanh(q)) for on, (weight, evidence, q) in chosen if on]
        kind, scale = ("filtered", self.filtered_scale) if tsf else ("raw", self.raw_scale)
        weights = rlc * self.settings.rlc_weight, pac * self.settings.pac_weight
        scores = eq.fused(self.measured[kind], scale, views, *weights)
        return Scores(scores, self.measured[f"{kind}_row"], self.classes)

    def by_class(self) -> Float[np.ndarray, "n classes"]:
        """Returns S_t - (largest filtered logit of t - the class's own); not in the paper."""
        scores = self.fuse().task_scores - self.measured["filtered"]
        rows = self.measured["filtered_rows"] + scores[..., None]
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
        self.foreign: list[foreign.Residuals] | None = []  # F^v of each view; None once released
        self.references: list[foreign.Foreign] = []  # of each view; none before `finalize`
        self._forget()

    def fit_task(self, adapted, labels, head=None, pretrained=None, classes=None, previous=None):
        """See `Calibrator.fit_task` (lines 5 to 11)."""
        if self.foreign is None:
            raise InputError("the foreign residuals were released: no further task can be fitted")
        given = self._task(adapted, labels, head, pretrained, classes)
        settings, gamma = self.settings, self.settings.attenuation
        if (present := int((given.counts > 0).sum())) < settings.neighbours:
            wanted = f"{settings.neighbours} neighbours need as many classes with samples"
            raise InputError(f"task {given.task}: {wanted}, found {present}")
        views, residuals = [], []
        for features in given.views:  # Line 6, first half.
            mean, prototypes = eq.means(features, given.rows, len(given.classes))
            views.append(View(mean, eq.pca(features, mean, settings.retained_energy), prototypes))
        alone = side_by_side([[view] for view in views], [given.counts], [given.head], gamma, True)
        measured = self._measure(alone, given.views, given.head, plain=True)
        scales = [eq.moments(measured[kind])[1] for kind in ("raw", "filtered")]  # Line 10.
        for index, (view, features) in enumerate(zip(views, given.views, strict=True)):
            name = inputs.VIEWS[index]
            residual = eq.moments(measured[f"{name}_residual"])
            mean, std = eq.moments(measured[f"{name}_affinity"])  # Line 6, own moments: of A_t - 1.
            views[index] = view._replace(residual=residual, affinity=(1.0 + mean, std))
            warn_of_equal_residuals(given, index, views[index])
            residuals.append(foreign.residuals(features, self.tasks, index))  # Line 7.
        self.tasks = [*self.tasks, Task(views, *scales)]
        self.foreign, self.references = foreign.appended(self.foreign, residuals), []
        self._append(given)

    def finalize(self, release: bool = False) -> None:
        """Fits the foreign reference of RLC, and may discard what it is fitted on (line 13)."""
        if not (self.references or self.foreign):
            raise InputError("finalize: no task was fitted, or joined ones await a second pass")
        self.references = self.references or [each.reference() for each in self.foreign or []]
        self.foreign = None if release else self.foreign

    def join(self, other: Any) -> None:
        """See `Calibrator.join`; residuals against earlier tasks take a pass of their own."""
        super().join(other)
        self.tasks, self.foreign, self.references = [*self.tasks, *other.tasks], None, []

    def terms(self, adapted: Any, pretrained: Any = None, all_rows: bool = False) -> Terms:
        """Returns what scores are made of; see `score`. With `all_rows`, of classes, too."""
        if not self.references:
            raise InputError("call fit_task for every task, then finalize, first")
        settings, count = self.settings, self.num_tasks
        weights = settings.adapted_view_weight, settings.pretrained_view_weight
        views = inputs.score_views(adapted, pretrained, self.widths, weights[1] > 0.0)
        if self._fitted is None:
            of_views = [*zip(*(task.views for task in self.tasks), strict=True)]
            self._fitted = side_by_side(of_views, self.counts, self.heads, settings.attenuation)
        found = self._measure(self._fitted, views, self.heads[0], all_rows=all_rows)
        found, terms = {name: column[:, :count] for name, column in found.items()}, []  # no padding
        # Eq. llr. With a single task p_F = p_O, so that RLC is 0.
        for index, (mean, variance, tau) in enumerate(self.references[: len(views)]):
            name = inputs.VIEWS[index]
            evidence = np.tanh(eq.log_ratio(found[f"{name}_residual"], mean, variance) / tau)
            terms.append((weights[index], evidence, found[f"{name}_affinity"]))
        raw, filtered = np.array([task[1:] for task in self.tasks], np.float32).T
        return Terms(found, terms, raw, filtered, settings, self.classes)

    def _measure(self, fitted, views, head, plain=False, **more) -> dict[str, np.ndarray]:
        settings, normalised = self.settings, head.affine.normalised
        static = {"gamma": settings.attenuation, "neighbours": settings.neighbours, **more}
        return in_blocks(measure, fitted, *views, plain=plain, normalised=normalised, **static)

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
        """See `Terms.by_class`."""
        return self.terms(adapted, pretrained, all_rows=True).by_class()

    @property
    def note(self) -> str:
        """A line for the user where earlier tasks were drawn for the foreign reference."""
        return foreign.NOTE if self.num_tasks > foreign.EARLIER + 1 else ""

    @property
    def storage_bytes(self) -> int:
        """Returns the bytes of the paper's statistics in use, by its accounting, in float32.

        Heads and foreign residuals do not count, of a view of weight 0 only the bases TSF needs.
        """
        settings, numbers = self.settings, 2 * self.num_tasks  # Scales with and without TSF.
        weights = settings.adapted_view_weight, settings.pretrained_view_weight
        present = sum(int((count > 0).sum()) for count in self.counts)
        for index, weight in enumerate(weights[: len(self.widths)]):
            if weight or (index == 0 and settings.attenuation):
                numbers += sum(task.views[index].basis.size for task in self.tasks)
            if weight:  # Four moments of each task; the foreign mean, variance and scale.
                numbers += (self.num_tasks + present) * self.widths[index]
                numbers += 4 * self.num_tasks + (3 if self.num_tasks > 1 else 0)
        return 4 * numbers

    def _forget(self) -> None:
        self._fitted: tuple[list[Frame], tuple[Any, ...]] | None = None
