"""Class Gaussians that follow the encoder, off by default (docs/beyond.md).

Of each view are kept the mean mu_c of every class c, the within-class scatter S of all classes
together, and of each class's own covariance the leading directions, as rows of a factor B_c. When a
task is learned, what is kept of earlier ones in the adapted view is carried along by the affine map
of `drift`, and S grows by what that map does not explain; the pretrained encoder does not move.
With N images of C classes in width d, a class
scores minus half the squared distance

    (g - mu_c)' [ (1 - a) S / N + lambda (tr S / (N d)) I + a B_c' B_c ]^-1 (g - mu_c),

where a = 0.1 and lambda = 0.1 + d / (N - C), which is more while images are few. The pretrained
view counts half. No head is needed: the nearest class decides on the task, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fdc_jax.calibration import drift, fdc, inputs
from fdc_jax.calibration.batching import stack
from fdc_jax.calibration.scores import Scores
from fdc_jax.calibration.whitened import WhitenedFDC, WhitenedSettings, WhitenedTerms
from fdc_jax.errors import InputError
from fdc_jax.heads import namespace, products

if TYPE_CHECKING:
    from jaxtyping import Float, Int

# Share a of a class's own covariance, directions kept of it, least lambda, and how much the
# pretrained view counts.
OWN_SHARE = 0.1
RANK = 8
LEAST_SHRINKAGE = 0.1
PRETRAINED_SHARE = 0.5


@dataclass(frozen=True)
class TransportedSettings(WhitenedSettings):
    """The paper's settings and those of the affinity, and whether statistics follow the encoder.

    Of the paper's, the weights of the two views count for the Gaussians, too.
    """

    transport: bool = False

    @property
    def entry(self) -> str:
        """See `fdc.Settings.entry`."""
        return "transported" if self.transport else super().entry

    def __post_init__(self):
        super().__post_init__()
        if not isinstance(self.transport, bool):
            raise InputError(f"transport: expected True or False, found {self.transport!r}")


class Gaussians(NamedTuple):
    """The classes of one view, those of all tasks in a row.

    Attributes:
        means: zero for classes without an image.
        factors: B_c, whose rows are principal directions of the class, each as long as its standard
            deviation along it.
        scatter: S, summed over all images.
    """

    means: Float[np.ndarray, "c d"]
    factors: Float[np.ndarray, "c r d"]
    scatter: Float[np.ndarray, "d d"]

    def moved(self, by: drift.AffineMap, images: int) -> Gaussians:
        """Returns the classes, of so many images, as a newer encoder has them.

        What the map leaves unexplained varies within classes from then on.
        """
        return Gaussians(
            by.move(self.means).astype(np.float32),
            (self.factors @ by.matrix).astype(np.float32),
            (by.move_scatter(self.scatter) + images * by.residual).astype(np.float32),
        )

    def joined(self, other: Gaussians) -> Gaussians:
        """Returns these classes and others."""
        return Gaussians(
            np.concatenate([self.means, other.means]),
            np.concatenate([self.factors, other.factors]),
            self.scatter + other.scatter,
        )


def gaussians(classes: Sequence[fdc.Sums | None], width: int) -> Gaussians:
    """Returns the Gaussians of classes from the sums over their images, None where there is none.

    Float64 sums; the `RANK` leading directions are those of the centred scatter.
    """
    means, factors = np.zeros((len(classes), width)), np.zeros((len(classes), RANK, width))
    scatter = np.zeros((width, width))
    for row, sums in enumerate(classes):
        if sums is None:
            continue
        means[row] = sums.mean
        offset = means[row] - sums.origin
        scatter += sums.scatter - sums.count * np.outer(offset, offset)
        energies, directions = sums.decomposed()
        kept = min(RANK, fdc.retained_rank(energies, 1.0, sums.count))
        factors[row, :kept] = directions(kept) * np.sqrt(energies[:kept])[:, None]
    return Gaussians(*(part.astype(np.float32) for part in (means, factors, scatter)))


class Metric(NamedTuple):
    """The Gaussians of one view as `class_scores` takes them.

    In coordinates W (g - m), in which the covariance that all classes share is the identity.

    Attributes:
        origin: m, the mean of the class means.
        whitener: W.
        means: of each class in these coordinates.
        factors: F_c such that the inverse covariance of class c is I - F_c' F_c.
        present: 0 for classes without an image.
    """

    origin: Float[Any, " d"]
    whitener: Float[Any, "d d"]
    means: Float[Any, "tasks c d"]
    factors: Float[Any, "tasks c r d"]
    present: Float[Any, "tasks c"]


def metric(known: Gaussians, counts: Sequence[Int[np.ndarray, " c"]], xp: Any = np) -> Metric:
    """Returns what scoring needs of the Gaussians, computed in float64.

    Args:
        known: of one view.
        counts: images of each class, task by task.
        xp: `numpy` or `jax.numpy`.
    """
    width, present = len(known.scatter), np.concatenate(counts) > 0
    images, classes = int(sum(each.sum() for each in counts)), int(present.sum())
    covariance = known.scatter.astype(np.float64) / images
    variance = np.trace(covariance) / width
    shrinkage = LEAST_SHRINKAGE + width / max(images - classes, 1)
    level = shrinkage * variance if variance > 0 else 1.0
    shared = (1 - OWN_SHARE) * covariance + level * np.eye(width)
    whitener = np.linalg.inv(np.linalg.cholesky(shared))
    origin = known.means[present].mean(axis=0, dtype=np.float64)
    own = np.sqrt(OWN_SHARE) * known.factors.astype(np.float64) @ whitener.T
    # Woodbury: (I + B' B)^-1 = I - B' (I + B B')^-1 B.
    inner = np.eye(own.shape[1]) + own @ own.swapaxes(1, 2)
    factors = np.linalg.solve(np.linalg.cholesky(inner), own)
    ends = np.cumsum([len(each) for each in counts])[:-1]
    means = np.split((known.means - origin) @ whitener.T, ends)
    return Metric(
        xp.asarray(origin, np.float32),
        xp.asarray(whitener, np.float32),
        stack(means, 4, xp=xp),
        stack(np.split(factors, ends), 4, xp=xp),
        stack([each > 0 for each in counts], 4, xp=xp),
    )


def class_scores(found: Metric, features: Float[Any, "n d"]) -> Float[Any, "n tasks c"]:
    """Returns minus half the squared distance to every class, minus infinity where there is none.

    What all classes share is the term of the feature alone, which is left out.
    """
    xp = namespace(features, found.origin)
    tasks, classes, rank, width = found.factors.shape
    means = found.means.reshape(tasks * classes, width)
    factors = found.factors.reshape(tasks * classes, rank, width)
    near = products(features - found.origin, found.whitener)
    linear = products(near, means) - fdc.energy(means) / 2
    own = products(near, factors.reshape(-1, width)).reshape(-1, tasks * classes, rank)
    centre = (factors * means[:, None]).sum(axis=-1)
    scores = (linear + fdc.energy(own - centre) / 2).reshape(-1, tasks, classes)
    return xp.where(found.present > 0, scores, -xp.inf)


@dataclass(frozen=True)
class TransportedTerms(WhitenedTerms):
    """The paper's terms, and of each view in use its weight and the scores of all classes."""

    class_scores: list[tuple[float, Float[np.ndarray, "n tasks c"]]]

    def by_class(
        self, adapted_view: bool = True, pretrained_view: bool = True
    ) -> Float[np.ndarray, "n tasks c"]:
        """Returns the scores of all classes by the views switched on; all zero by none."""
        on = zip((adapted_view, pretrained_view), self.class_scores, strict=False)
        used = [np.float32(weight) * found for use, (weight, found) in on if use and weight]
        total: Any = sum(used) if used else np.zeros_like(self.class_scores[0][1])
        return total

    def scores(self, adapted_view: bool = True, pretrained_view: bool = True) -> Scores:
        """Returns the scores by the distances to the classes; those of no view are all zero."""
        total = self.by_class(adapted_view, pretrained_view)
        return Scores(total.max(axis=2), total.argmax(axis=2).astype(np.int32), self.classes)

    def beyond(self) -> dict[str, dict[str, Scores]]:
        """See `fdc.Terms.beyond`; by both views and by each, beside Raw."""
        found = {"raw": self.raw(), "full": self.scores()}
        if len(self.class_scores) == 2:
            found["adapted_view"] = self.scores(pretrained_view=False)
            found["pretrained_view"] = self.scores(adapted_view=False)
        return super().beyond() | {"transported": found}


class TransportedFDC(WhitenedFDC):
    """FDC, and beside it class Gaussians that follow the encoder; `terms` gives both.

    From the second task on, `fit_task` needs `previous`. Settings are the fields of
    `TransportedSettings`; InputError when they do not go together.
    """

    settings_type = TransportedSettings
    follows_encoder = True

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self.settings: TransportedSettings
        # Of each view.
        self.gaussians: list[Gaussians] = []
        self._metrics: list[Metric] = []

    def fit_task(
        self,
        adapted: Any,
        labels: Any,
        head: Any,
        pretrained: Any = None,
        classes: Any = None,
        previous: Any = None,
    ) -> None:
        """See `fdc.FDC.fit_task`.

        Args:
            adapted: as there.
            labels: as there.
            head: as there.
            pretrained: as there.
            classes: as there.
            previous: features of the same samples in the same order by the encoder before the task,
                E_{t-1}(D_t), [n, d]; needed but for the first task, of which they are ignored.

        Raises:
            InputError: as there, or `previous` is missing or not of the form of `adapted`.
        """
        self._before = self._check_previous(previous) if self.tasks else None
        self._after: list[Float[np.ndarray, "n d"]] = []
        self._by: drift.AffineMap | None = None
        self._of_class: list[dict[int, fdc.Sums]] = [{}, {}]
        self._learned: list[Gaussians] = []
        super().fit_task(adapted, labels, head, pretrained, classes)
        earlier = self.gaussians
        if self._by is not None:
            images = sum(task.samples for task in self.tasks[:-1])
            earlier = [earlier[0].moved(self._by, images), *earlier[1:]]
        pairs = zip(earlier, self._learned, strict=True) if earlier else ()
        self.gaussians = [known.joined(new) for known, new in pairs] or self._learned
        del self._before, self._after, self._by, self._of_class, self._learned

    def _check_previous(self, previous: Any) -> Float[np.ndarray, "n d"]:
        task, name = self.num_tasks, f"previous features of task {self.num_tasks}"
        if previous is None:
            raise InputError(
                f"{name}: expected, since what is kept of earlier tasks follows the encoder; give "
                f"features of the task's samples by the encoder before it (previous=, or "
                f"train_previous_{task} in a feature file)"
            )
        return inputs.finite_features(previous, name, self.widths[0])

    def _first_walk(
        self, view: int, features: Float[np.ndarray, "n d"], labels: Int[np.ndarray, " n"]
    ) -> None:
        super()._first_walk(view, features, labels)
        if view == 0 and self._before is not None:
            self._after.append(features)
        for label in np.unique(labels).tolist():
            sums = self._of_class[view].setdefault(label, fdc.Sums(features.shape[1]))
            members = features[labels == label]
            sums.add(members, np.full(len(members), label))

    def _between_walks(
        self, sums: list[fdc.Sums], classes: Int[np.ndarray, " c"], counts: Int[np.ndarray, " c"]
    ) -> None:
        super()._between_walks(sums, classes, counts)
        if self._before is not None:
            count = sums[0].count
            if len(self._before) != count:
                raise InputError(
                    f"previous features of task {self.num_tasks}: expected {count} rows like the "
                    f"adapted features, found {len(self._before)}"
                )
            self._by = drift.fit_map(self._before, np.concatenate(self._after))
        for each, of_class in zip(sums, self._of_class, strict=False):
            members = [of_class.get(label) for label in classes.tolist()]
            self._learned.append(gaussians(members, each.width))

    @property
    def arrays(self) -> fdc.Arrays:
        """See `fdc.FDC.arrays`; the metrics of the views in use are placed with them."""
        if self._arrays is None:
            counts = [task.views[0].class_counts for task in self.tasks]
            self._metrics = [metric(known, counts, self._xp) for known in self.gaussians]
        return super().arrays

    def _measure_batch(self, views: Sequence[Any], all_rows: bool) -> dict[str, Any]:
        found = super()._measure_batch(views, all_rows)
        return found | self._by_view("classes", class_scores, self._metrics, views)

    def _terms(self, found: dict[str, np.ndarray]) -> TransportedTerms:
        settings = self.settings
        weights = settings.adapted_view_weight, PRETRAINED_SHARE * settings.pretrained_view_weight
        return TransportedTerms(
            **vars(super()._terms(found)),
            class_scores=[
                (weight, found[f"{name}_classes"][:, : self.num_tasks])
                for weight, name in zip(weights, inputs.VIEWS, strict=True)
                if f"{name}_classes" in found
            ],
        )

    @property
    def beyond_storage_bytes(self) -> dict[str, int]:
        """See `fdc.FDC.beyond_storage_bytes`; of a symmetric scatter, half counts."""
        weights = (self.settings.adapted_view_weight, self.settings.pretrained_view_weight)
        numbers = sum(len(task.classes) for task in self.tasks)  # Images of each class.
        for known, weight in zip(self.gaussians, weights, strict=False):
            if weight:
                width = len(known.scatter)
                numbers += known.means.size + known.factors.size + width * (width + 1) // 2
        return super().beyond_storage_bytes | {"transported": 4 * numbers}


# Any calibrator from one set of settings ----------------------------------------------------------


def check(
    settings: Mapping[str, Any],
    classes_per_task: Sequence[int] | None = None,
) -> TransportedSettings:
    """Returns settings, paper's and others, after all checks that need no features.

    Args:
        settings: some or all fields of `TransportedSettings`, as in `config.fdc`.
        classes_per_task: where they are known, how many classes each task has.
    """
    known = [field.name for field in fields(TransportedSettings)]
    for name in settings:
        fdc.check_word("setting of FDC", name, known)
    found = TransportedSettings(**settings)
    for task, count in enumerate(classes_per_task or ()):
        if count < found.neighbours:
            raise InputError(
                f"neighbours: expected at most {count}, the classes of task {task}, found "
                f"{found.neighbours}"
            )
    return found


def from_settings(settings: Mapping[str, Any]) -> fdc.FDC:
    """Returns the paper's FDC or, where the settings ask for more, one that gives that, too.

    `settings` are some or all fields of `TransportedSettings`, as in `config.fdc`.
    """
    found = check(settings)
    kind: type[fdc.FDC] = fdc.FDC
    if found.transport:
        kind = TransportedFDC
    elif found.affinity_entry:
        kind = WhitenedFDC
    return kind(**{f.name: getattr(found, f.name) for f in fields(kind.settings_type)})
