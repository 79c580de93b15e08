"""FDC with another affinity than the paper's, off by default (docs/beyond.md).

Cosines between features mix what tells classes apart with what varies within each of them. With
the within-class covariance S of all classes so far and the mean m of their means, the cosine is
taken between W (h - m) and W (mu_c - m), where W' W is the inverse of S + lambda (tr S / d) I. Any
such W gives the same cosines; the inverse of the Cholesky factor is the cheapest.

The evidence may also be linear in the standardised affinity instead of its tanh, and belong to
classes instead of tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from fdc_jax.calibration import fdc, inputs
from fdc_jax.calibration.batching import fetch, stack
from fdc_jax.calibration.components import fuse_all
from fdc_jax.calibration.scores import Scores
from fdc_jax.errors import InputError
from fdc_jax.heads import namespace, products, unit

if TYPE_CHECKING:
    from jaxtyping import Float, Int

# Below the first, rounding of the covariance of few images counts; above the second, nothing is
# left of it.
SHRINKAGES = (1e-4, 1e4)
# Least standard deviation of a task's own cosines, as of a task of one image: the evidence, which
# is linear in the standardised cosine, would have no bound otherwise. Usual ones are near 0.1.
DEVIATION_FLOOR = 0.01
# Share of the mean score scale that the unit of a head's scores is at least, class by class.
LEAST_UNIT = 0.1
# By metric, whose moments standardise an affinity.
REFERENCES = {"cosine": ("own", "nearest"), "whitened": ("own", "pooled")}


class Affinity(NamedTuple):
    """How closeness to prototypes becomes evidence. The defaults are the paper's.

    Attributes:
        metric: `cosine` of the features, or `whitened`, in the within-class metric.
        evidence: `tanh` of the standardised affinity, or the affinity itself, `linear`.
        reference: the moments that standardise: the task's `own`; over the candidate tasks of an
            input, `nearest`; or, of the whitened metric, the mean of all tasks' own, `pooled`.
        scope: each `task` gets the affinity of its nearest class, or each `class` gets its own.
    """

    metric: str = "cosine"
    evidence: str = "tanh"
    reference: str = "own"
    scope: str = "task"


PAPER_AFFINITY = Affinity()


@dataclass(frozen=True)
class WhitenedSettings(fdc.Settings):
    """The paper's settings, and how closeness to prototypes becomes evidence; see `Affinity`.

    `affinity_shrinkage` is lambda, share of the mean variance added to the within-class covariance.
    """

    affinity_metric: str = "cosine"
    affinity_evidence: str = "tanh"
    affinity_scope: str = "task"
    affinity_shrinkage: float = 0.05

    REFERENCES: ClassVar[tuple[str, ...]] = ("own", "nearest", "pooled")

    def __post_init__(self):
        fdc.check_word("affinity_metric", self.affinity_metric, tuple(REFERENCES))
        fdc.check_word("affinity_evidence", self.affinity_evidence, ("tanh", "linear"))
        fdc.check_word("affinity_scope", self.affinity_scope, ("task", "class"))
        if self.affinity_reference not in (known := REFERENCES[self.affinity_metric]):
            raise InputError(
                f"affinity_reference: expected one of {', '.join(known)} with affinity_metric "
                f"{self.affinity_metric}, found {self.affinity_reference!r}"
            )
        if self.affinity_scope == "class" and self.affinity_metric != "whitened":
            raise InputError(
                "affinity_scope: expected task with affinity_metric cosine, found class"
            )
        super().__post_init__()
        least, most = SHRINKAGES
        if not least <= self.affinity_shrinkage <= most:
            raise InputError(
                f"affinity_shrinkage: expected {least:g} to {most:g}, found "
                f"{self.affinity_shrinkage:g}"
            )
        if self.affinity_metric == "whitened" and self.neighbours != 1:
            raise InputError(
                f"neighbours: expected 1 with affinity_metric whitened, found {self.neighbours}"
            )

    @property
    def affinity(self) -> Affinity:
        """What these settings say about affinities."""
        return Affinity(
            self.affinity_metric,
            self.affinity_evidence,
            self.affinity_reference,
            self.affinity_scope,
        )

    @property
    def affinity_entry(self) -> str:
        """`whitened` or `linear`, after what differs from the paper's affinity, if anything."""
        paper = PAPER_AFFINITY
        if self.affinity_reference == "nearest":  # Which the paper has, too.
            paper = paper._replace(reference="nearest")
        if self.affinity == paper:
            return ""
        return "whitened" if self.affinity_metric == "whitened" else "linear"

    entry = affinity_entry


# The metric --------------------------------------------------------------------------------------


class TaskAffinity(NamedTuple):
    """What is kept of a task in one view.

    Attributes:
        class_means: mean feature of each class; zero rows for classes without an image.
        mean: of the task's own largest cosines, in the metric of the time when it was learned.
        std: their population standard deviation, at least `DEVIATION_FLOOR`.
    """

    class_means: Float[np.ndarray, "c d"]
    mean: float
    std: float


class Prototypes(NamedTuple):
    """An origin m, the map W, and the unit prototypes of tasks in that metric, padded."""

    origin: Float[Any, " d"]
    whitener: Float[Any, "d d"]
    directions: Float[Any, "tasks c d"]
    present: Float[Any, "tasks c"]


def within_scatter(
    sums: fdc.Sums, means: Float[np.ndarray, "c d"], counts: Int[np.ndarray, " c"]
) -> Float[np.ndarray, "d d"]:
    """Returns the sum over a task's images of the outer product of feature minus class mean.

    In float32, as files keep it, and exactly symmetric, since they keep half of it.
    """
    offsets = (means - sums.origin) * np.sqrt(counts)[:, None]
    upper = np.triu(sums.scatter - offsets.T @ offsets).astype(np.float32)
    np.fill_diagonal(upper, np.maximum(upper.diagonal(), 0.0))
    return upper + np.triu(upper, 1).T


def prototypes(
    scatter: Float[np.ndarray, "d d"],
    class_means: Sequence[Float[np.ndarray, "c d"]],
    counts: Sequence[Int[np.ndarray, " c"]],
    shrinkage: float,
    xp: Any = np,
    tasks: slice = slice(None),
) -> Prototypes:
    """Returns the metric of all tasks so far, computed in float64, and prototypes in it.

    Args:
        scatter: within-class scatter of all tasks.
        class_means: of each task.
        counts: images of each class; those without any do not count.
        shrinkage: lambda, above 0; all there is where no class varies.
        xp: `numpy` or `jax.numpy`.
        tasks: whose prototypes.
    """
    width, images = len(scatter), sum(int(each.sum()) for each in counts)
    covariance = scatter.astype(np.float64) / images
    variance = np.trace(covariance) / width
    scaled = covariance / (variance if variance > 0 else 1.0)
    whitener = np.linalg.inv(np.linalg.cholesky(scaled + shrinkage * np.eye(width)))
    present = [each > 0 for each in counts]
    known = np.concatenate([m[p] for m, p in zip(class_means, present, strict=True)])
    # One class alone would be the origin, and be left without a direction.
    origin = known.mean(axis=0, dtype=np.float64) * (len(known) > 1)
    directions = [unit((means - origin) @ whitener.T) for means in class_means[tasks]]
    return Prototypes(
        xp.asarray(origin, np.float32),
        xp.asarray(whitener, np.float32),
        stack(directions, 4, xp=xp),
        stack(present[tasks], 4, xp=xp),
    )


def cosines(prototypes: Prototypes, features: Float[Any, "n d"]) -> Float[Any, "n tasks c"]:
    """Returns cosines to every class, minus infinity where there is none, zero at the origin."""
    xp = namespace(features, prototypes.origin)
    tasks, classes, width = prototypes.directions.shape
    whitened = unit(products(features - prototypes.origin, prototypes.whitener))
    found = products(whitened, prototypes.directions.reshape(tasks * classes, width))
    return xp.where(prototypes.present > 0, found.reshape(-1, tasks, classes), -xp.inf)


# Scores ------------------------------------------------------------------------------------------


class WhitenedView(NamedTuple):
    """Cosines of one view in the within-class metric (minus infinity where there is no class), and
    mean and standard deviation of each task's own largest ones.
    """

    cosines: Float[np.ndarray, "n tasks c"]
    mean: Float[np.ndarray, " tasks"]
    std: Float[np.ndarray, " tasks"]

    def affinity(self, reference: str, scope: str) -> Float[np.ndarray, "n tasks c"]:
        """Returns standardised affinities; with scope `task`, one per task, in a last axis of 1."""
        mean, std = self.mean, self.std
        if reference == "pooled":
            mean, std = np.mean(mean, keepdims=True), np.mean(std, keepdims=True)
        found = self.cosines if scope == "class" else self.cosines.max(axis=2, keepdims=True)
        return (found - mean[:, None]) / std[:, None]


@dataclass(frozen=True)
class WhitenedTerms(fdc.Terms):
    """The paper's terms, and those of other affinities.

    `whitened` has one entry a view, none with the cosine alone.
    """

    settings: WhitenedSettings
    whitened: list[WhitenedView]

    def scores(self, **switches: bool) -> Scores:
        """Returns the scores that the calibrator is set to give."""
        return self.fuse_affinity(**switches)

    def beyond(self) -> dict[str, dict[str, Scores]]:
        """Returns the scores by the affinity that is set, if any, under `whitened` or `linear`."""
        entry = self.settings.affinity_entry
        return {entry: fuse_all(self, self.fuse_affinity)} if entry else {}

    def fuse_affinity(
        self,
        tsf: bool = True,
        rlc: bool = True,
        pac: bool = True,
        adapted_view: bool = True,
        pretrained_view: bool = True,
    ) -> Scores:
        """Returns the scores by the affinity that is set; else as `fuse`."""
        base = self.fuse(tsf, rlc, False, adapted_view, pretrained_view)
        if not pac or not self.used_views(adapted_view, pretrained_view):
            return base
        closeness = self._closeness(adapted_view, pretrained_view)
        if self.settings.affinity_scope == "class":
            each = self._by_class(base, closeness, tsf)
            return Scores(each.max(axis=2), each.argmax(axis=2).astype(np.int32), self.classes)
        scale = self.filtered_scale if tsf else self.raw_scale
        size = (*base.task_scores.shape, 1)
        scores = base.task_scores + scale * np.broadcast_to(closeness, size)[..., 0]
        return Scores(scores, base.local_class, self.classes)

    def by_class(self) -> Float[np.ndarray, "n tasks c"]:
        """See `fdc.Terms.by_class`; with scope `class` the scores that decide."""
        if self.settings.affinity_scope == "task":
            return super().by_class()
        return self._by_class(self.fuse(pac=False), self._closeness(True, True), True)

    def _closeness(self, adapted_view: bool, pretrained_view: bool) -> Any:
        """Returns the evidence of the affinity in all views, [n, tasks, c] or [n, tasks, 1]."""
        affinity, closeness = self.settings.affinity, np.float32(0.0)
        for view, weight, evidence in self.used_views(adapted_view, pretrained_view):
            if weight * self.settings.pac_weight:
                found = evidence.affinity[..., None]
                if affinity.metric == "whitened":
                    found = self.whitened[view].affinity(affinity.reference, affinity.scope)
                found = np.tanh(found) if affinity.evidence == "tanh" else found
                closeness = closeness + np.float32(weight * self.settings.pac_weight) * found
        return closeness

    def _by_class(self, base: Scores, closeness: Any, tsf: bool) -> Float[np.ndarray, "n tasks c"]:
        """Returns the scores of all classes, each by its own affinity."""
        scale = self.filtered_scale if tsf else self.raw_scale
        rows = self.filtered_rows if tsf else self.raw_rows
        logits = (self.filtered_logits if tsf else self.raw_logits).logit
        assert rows is not None
        # In units of the score scale, so that no head counts more; but a head that says the same of
        # all its images, as of a single one, must not count without end.
        units = np.maximum(scale, np.float32(LEAST_UNIT) * scale.mean())[:, None]
        return (rows + (base.task_scores - logits)[..., None]) / units + closeness


# The calibrator ----------------------------------------------------------------------------------


class WhitenedFDC(fdc.FDC):
    """FDC with the affinity that its settings say; `terms` still gives the paper's scores, too.

    Settings are the fields of `WhitenedSettings`; InputError when they do not go together.
    """

    settings_type = WhitenedSettings

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self.settings: WhitenedSettings
        # Per task and view; and per view the within-class scatter of all tasks. Empty with the
        # cosine.
        self.affinities: list[list[TaskAffinity]] = []
        self.shared: list[Float[np.ndarray, "d d"]] = []
        self.needs_all_rows = self.uses_metric
        self._prototypes: list[Prototypes] = []

    @property
    def uses_metric(self) -> bool:
        """Whether there is anything to collect beside the paper's statistics."""
        return self.settings.affinity_metric == "whitened"

    def fit_task(
        self, adapted: Any, labels: Any, head: Any, pretrained: Any = None, classes: Any = None
    ) -> None:
        """See `fdc.FDC.fit_task`."""
        # Of the two walks: class sums, then scatter, class means and prototypes, then cosines.
        self._sums: list[dict[int, Any]] = [{}, {}]
        self._new: list[tuple[Any, Any, Prototypes]] = []
        self._own: list[list[tuple[Any]]] = [[], []]
        self._sizes: list[int] = []
        super().fit_task(adapted, labels, head, pretrained, classes)
        if self.uses_metric:
            own = []
            for (_, means, _), batches in zip(self._new, self._own, strict=False):
                mean, std = fdc.population_moments(fetch(batches, self._sizes)[0])
                own.append(TaskAffinity(means, mean, max(std, DEVIATION_FLOOR)))
            self.shared = [scatter for scatter, *_ in self._new]
            self.affinities = [*self.affinities, own]
        del self._sums, self._new, self._own, self._sizes

    def _first_walk(self, view: int, features: Any, labels: Any) -> None:
        if self.uses_metric:
            for label, total in fdc.class_sums(features.astype(np.float64), labels).items():
                self._sums[view][label] = self._sums[view].get(label, 0.0) + total

    def _between_walks(
        self, sums: list[fdc.Sums], classes: Int[np.ndarray, " c"], counts: Int[np.ndarray, " c"]
    ) -> None:
        for view, each in enumerate(sums if self.uses_metric else ()):
            none = np.zeros(each.width)
            totals = np.stack([self._sums[view].get(label, none) for label in classes.tolist()])
            means = totals / np.maximum(counts, 1)[:, None]
            scatter = within_scatter(each, means, counts)
            if self.shared:
                scatter = self.shared[view] + scatter
            means = means.astype(np.float32)
            every = [*self._class_means(view), means]
            found = prototypes(
                scatter,
                every,
                [*self._counts(view), counts],
                self.settings.affinity_shrinkage,
                self._xp,
                slice(len(every) - 1, None),
            )
            self._new.append((scatter, means, found))

    def _second_walk(self, view: int, batch: Float[Any, "padded d"], rows: int) -> None:
        if self.uses_metric:
            found = self.run(cosines, self._new[view][2], batch)
            self._own[view].append((found[:, 0].max(axis=-1),))
            if view == 0:
                self._sizes.append(rows)

    def _class_means(self, view: int) -> list[Float[np.ndarray, "c d"]]:
        return [task[view].class_means for task in self.affinities]

    def _counts(self, view: int) -> list[Int[np.ndarray, " c"]]:
        return [task.views[view].class_counts for task in self.tasks]

    @property
    def arrays(self) -> fdc.Arrays:
        """See `fdc.FDC.arrays`; the prototypes in the metric of all tasks are placed with them."""
        if self._arrays is None:
            self._prototypes = [
                prototypes(
                    scatter,
                    self._class_means(view),
                    self._counts(view),
                    self.settings.affinity_shrinkage,
                    self._xp,
                )
                for view, scatter in enumerate(self.shared)
            ]
        return super().arrays

    def _measure_batch(self, views: Sequence[Any], all_rows: bool) -> dict[str, Any]:
        found = super()._measure_batch(views, all_rows)
        return found | self._by_view("cosines", cosines, self._prototypes, views)

    def _by_view(
        self, what: str, kernel: Callable[..., Any], known: Sequence[Any], views: Sequence[Any]
    ) -> dict[str, Any]:
        """Returns `VIEW_what` of each view that is given: a kernel of what is known of it."""
        return {
            f"{name}_{what}": self.run(kernel, own, features)
            for name, own, features in zip(inputs.VIEWS, known, views, strict=False)
        }

    def _terms(self, found: dict[str, np.ndarray]) -> WhitenedTerms:
        count, views = self.num_tasks, []
        for view, name in enumerate(inputs.VIEWS):
            if f"{name}_cosines" in found:
                own = [task[view] for task in self.affinities]
                mean, std = np.array([each[1:] for each in own], np.float32).T
                views.append(WhitenedView(found[f"{name}_cosines"][:, :count], mean, std))
        return WhitenedTerms(**vars(super()._terms(found)), whitened=views)

    @property
    def beyond_storage_bytes(self) -> dict[str, int]:
        """See `fdc.FDC.beyond_storage_bytes`; of the symmetric scatter, half counts.

        Class means stand for prototypes.
        """
        if not (entry := self.settings.affinity_entry):
            return {}
        weights = (self.settings.adapted_view_weight, self.settings.pretrained_view_weight)
        numbers = sum(
            len(scatter) * (len(scatter) + 1) // 2 + 1
            for scatter, weight in zip(self.shared, weights, strict=False)
            if weight
        )
        return {entry: self.paper_storage_bytes + 4 * numbers}
