"""Class Gaussians, which follow the encoder where they can (docs/beyond.md).

Of each view are kept the mean mu_c of every class c, the within-class scatter S of all classes
together, and of each class's own covariance the leading directions, as rows of a factor B_c. Given
the features of a task's images by the encoder before that task, what is kept of earlier classes in
the adapted view is carried along by the affine map of `drift`, and S grows by what that map does
not explain. Maps are composed, and classes are moved when scores need them, so that a task costs
the same however many classes there are. With N images of C classes in width d, a class scores minus
half the squared distance

    (g - mu_c)' [ (1 - a) S / N + lambda (tr S / (N d)) I + a B_c' B_c ]^-1 (g - mu_c),

where a = 0.1 and lambda = 0.1 + d / (N - C), which is more while images are few. The pretrained
encoder does not move. Its view counts half, and fully where the adapted statistics stayed behind.

How sure an answer is, is learned from images that are left out of a second fit; see `confidence`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import scipy.linalg

from fdc_jax.calibration import drift, inputs
from fdc_jax.calibration.calibrator import Calibrator, Scores, best_by_task
from fdc_jax.calibration.compiled import in_blocks, jnp, stack
from fdc_jax.calibration.confidence import CLASSES, MEASURED, Confidence, left_out
from fdc_jax.calibration.equations import energy
from fdc_jax.errors import InputError
from fdc_jax.heads import products

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

# Share a of a class's own covariance, directions kept of it, least lambda, and how much the
# pretrained view counts beside an adapted view that follows the encoder.
OWN_SHARE = 0.1
RANK = 8
LEAST_SHRINKAGE = 0.1
PRETRAINED_SHARE = 0.5
# Classes are moved where rounding of what is kept would grow by more on the way.
AMPLIFICATION = 8.0


class ViewClasses(NamedTuple):
    """The classes of one view, task by task."""

    means: list[Float[np.ndarray, "c d"]]  # mu_c; zero for classes without an image
    factors: list[Float[np.ndarray, "c r d"]]  # B_c; rows are as long as deviations along them
    scatter: Float[np.ndarray, "d d"]  # S, summed over all images

    def joined(self, other: ViewClasses) -> ViewClasses:
        """Returns these classes and others."""
        factors = [*self.factors, *other.factors]
        return ViewClasses([*self.means, *other.means], factors, self.scatter + other.scatter)

    def all(self, path: drift.Path | None) -> tuple[np.ndarray, np.ndarray]:
        """Returns mu_c and B_c of all classes, moved along a path, in float64."""
        means, factors = (np.concatenate(each, dtype=np.float64) for each in self[:2])
        if path is None:
            return means, factors
        return means @ path.matrix + path.offset, factors @ path.matrix

    def moved(self, path: drift.Path) -> ViewClasses:
        """Returns the classes at the end of a path; S, which all share, is not moved."""
        sizes = np.cumsum([len(each) for each in self.means])[:-1]
        means, factors = (np.split(inputs.float32(each), sizes) for each in self.all(path))
        return ViewClasses(means, factors, self.scatter)

    def as_one(self, counts: Int[np.ndarray, " c"], path: drift.Path | None) -> ViewClasses:
        """Returns all images, moved along a path, as those of one class."""
        means, factors = self.all(path)
        mean = np.average(means, axis=0, weights=counts)
        about = (means - mean) * np.sqrt(counts)[:, None]
        scatter = self.scatter + about.T @ about
        return ViewClasses([mean[None]], [0.0 * factors[:1]], scatter)


def fit_classes(
    features: Float[np.ndarray, "n d"], rows: Int[np.ndarray, " n"], num_classes: int
) -> ViewClasses:
    """Returns the Gaussians of classes from the features of their images, one class at a time.

    Images of row -1 are passed over.
    """
    width = features.shape[1]
    means = np.zeros((num_classes, width), np.float32)
    factors = np.zeros((num_classes, RANK, width), np.float32)
    scatter = np.zeros((width, width))
    for row in np.unique(rows[rows >= 0]):
        members = inputs.float32(features[rows == row])
        means[row] = members.mean(axis=0, dtype=np.float64)
        centred = members - means[row]
        count, kept = len(members), min(RANK, len(members) - 1, width)
        own = centred.T @ centred
        scatter += own
        if kept == 0:
            continue
        # With X X' v = s v, which is smaller for few images, X' v is as long as the square root of
        # s and points along the class's principal direction.
        few = count < width
        matrix = centred @ centred.T if few else own
        last = len(matrix) - 1
        found, vectors = scipy.linalg.eigh(matrix, subset_by_index=[last - kept + 1, last])
        lengths = np.sqrt(np.maximum(found, 0.0))
        leading = (vectors.T @ centred) if few else vectors.T * lengths[:, None]
        factors[row, :kept] = leading[::-1] / np.sqrt(count)
    return ViewClasses([means], [factors], scatter.astype(np.float32))


class Metric(NamedTuple):
    """The classes of one view in coordinates W (g - m), in which all share the covariance I."""

    origin: Float[Any, " d"]  # m, the mean of the class means
    whitener: Float[Any, "d d"]  # W
    rows: Float[Any, "c d"]  # A_c mu, where A_c = I - F_c' F_c is the inverse covariance of class c
    constants: Float[Any, " c"]  # mu' A_c mu / 2
    factors: list[Float[Any, "c d"]]  # of each class the first row of F_c, the second, and so on


def metric(
    known: ViewClasses, counts: Int[np.ndarray, " c"], path: drift.Path | None, plain: bool
) -> Metric:
    """Returns what scoring needs of the classes of one view and their images, found in float64.

    See `compiled.stack` for `plain`.
    """
    all_means, all_factors = known.all(path)
    width, present = len(known.scatter), counts > 0
    images, classes = int(counts.sum()), int(present.sum())
    covariance = known.scatter.astype(np.float64) / images
    variance = np.trace(covariance) / width
    shrinkage = LEAST_SHRINKAGE + width / max(images - classes, 1)
    level = shrinkage * variance if variance > 0 else 1.0
    shared = (1 - OWN_SHARE) * covariance + level * np.eye(width)
    whitener = scipy.linalg.solve_triangular(np.linalg.cholesky(shared), np.eye(width), lower=True)
    origin = all_means[present].mean(axis=0).astype(np.float32)
    own = all_factors @ (np.sqrt(OWN_SHARE) * whitener.T)
    # Woodbury: (I + B' B)^-1 = I - B' (I + B B')^-1 B.
    inner = np.eye(own.shape[1]) + own @ own.swapaxes(1, 2)
    factors = np.linalg.solve(np.linalg.cholesky(inner), own)
    means = (all_means - origin) @ whitener.T
    along = factors @ means[:, :, None]
    rows, constants = means - (along * factors).sum(axis=1), energy(means) - energy(along[..., 0])
    columns = rows, constants / 2, *factors.swapaxes(0, 1)
    put = [stack([each], 8, plain=plain, turned=False)[0] for each in columns]
    return Metric(origin, whitener.astype(np.float32), put[0], put[1], put[2:])


def class_distances(
    metrics: Sequence[Metric], *views: Float[Any, "n d"]
) -> dict[str, Float[Any, "n _"]]:
    """Returns by view minus half the squared distance to every class, padded classes too.

    The term of the feature alone, which all classes share, is left out.
    """
    found = {}
    for name, known, features in zip(inputs.VIEWS, metrics, views, strict=False):
        near = products(features - known.origin, known.whitener)
        found[name] = products(near, known.rows) - known.constants
        for factor in known.factors:
            found[name] = found[name] + products(near, factor) ** 2 / 2
    return found


def lengths(
    metrics: Sequence[tuple[Metric, Metric]], *views: Float[Any, "n d"]
) -> dict[str, Float[Any, "n 2"]]:
    """Returns by view what `class_distances` leaves out, and the same of all images as one class.

    Both are half a squared distance, to the middle of the classes and of the images.
    """
    found = {}
    for name, pair, features in zip(inputs.VIEWS, metrics, views, strict=False):
        columns = [energy(products(features - each.origin, each.whitener)) for each in pair]
        found[name] = jnp.stack(columns, axis=-1) / 2
    return found


class Gaussians(Calibrator):
    """Class Gaussians of one or two views; the nearest class decides on the task, too.

    `fit_task` takes `previous` from the second task on, for all tasks or for none: with it the
    classes follow the encoder, without it they stay as they were. No head is needed.
    """

    name = "gaussians"
    reads_previous = True

    def __init__(self):
        super().__init__()
        self.views: list[ViewClasses] = []
        # Whether the statistics follow the encoder; None while there is one task.
        self.follows: bool | None = None
        # The way of the adapted view's classes from where they are kept, None where they are, and
        # the map into the first task where others come before it.
        self.path: drift.Path | None = None
        self.entry: drift.AffineMap | None = None
        self.confidence = Confidence()
        self._forget()

    def fit_task(self, adapted, labels, head=None, pretrained=None, classes=None, previous=None):
        """See `Calibrator.fit_task`."""
        given = self._task(adapted, labels, head, pretrained, classes)
        follows, by = self.follows, None
        if given.task:
            name = f"previous features of task {given.task}"
            self._check_follows(previous is not None, name)
            if follows := previous is not None:
                before = inputs.feature_array(previous, name, given.views[0].shape[1])
                inputs.same_length(before, given.views[0], name)
                by = drift.fit_map(before, given.views[0])
        carried, held, first = copy.copy(self), left_out(given.rows), sum(map(len, self.classes))
        carried._carry(by)
        if held.any() and first + len(given.classes) <= CLASSES:
            some = np.flatnonzero(held)
            some = some[np.linspace(0, len(some) - 1, min(len(some), MEASURED)).astype(int)]
            rest = copy.copy(carried)
            rest._fit(given, by, follows, held)
            rest._plain = True  # Many sizes occur once.
            scores, *more = rest._scores(*(each[some] for each in given.views))
            carried.confidence = self.confidence.with_task(scores, first + given.rows[some], *more)
        carried._fit(given, by, follows)
        vars(self).update(vars(carried))

    def _fit(
        self,
        given: inputs.TaskInput,
        by: drift.AffineMap | None,
        follows: bool | None,
        without: Bool[np.ndarray, " n"] | bool = False,
    ) -> None:
        """Takes a task without some of its images."""
        rows, count = np.where(without, -1, given.rows), len(given.classes)
        self._add(by, [fit_classes(each, rows, count) for each in given.views])
        self.follows = follows
        self._append(given._replace(counts=np.bincount(rows[rows >= 0], minlength=count)))

    def join(self, other: Any) -> None:
        """See `Calibrator.join`."""
        self._check_follows(other.follows, f"previous features of task {other.first}")
        super().join(other)
        self._carry(other.entry)
        self._add(other.entry, other.views)
        self.follows = other.follows
        # Its images were not measured beside the classes of others.
        self.confidence = Confidence()

    def _check_follows(self, follows: bool, name: str) -> None:
        if self.follows not in (None, follows):
            raise InputError(
                f"{name}: expected features by the encoder before each task from the second "
                f"one on, or of none, as its statistics follow the encoder or stay"
            )

    def _carry(self, by: drift.AffineMap | None) -> None:
        """Moves the classes so far."""
        if by is None or not self.views:
            return
        before = self.counts[: len(self.views[0].means)]
        images = sum(int(counts.sum()) for counts in before)
        known, narrow = self.views[0], by._replace(matrix=by.matrix.astype(np.float32))
        # What the map leaves unexplained varies within classes from then on.
        scatter = narrow.move_scatter(known.scatter) + images * by.residual
        known = known._replace(scatter=scatter.astype(np.float32))
        path = drift.path(self.path, by)
        if not path.amplification <= AMPLIFICATION:
            known, path = known.moved(path), None
        self.path, self.views = path, [known, *self.views[1:]]

    def _add(self, by: drift.AffineMap | None, new: list[ViewClasses]) -> None:
        """Takes the classes of a task, where the map has moved all others before."""
        if not self.views:
            self.entry, self.views = by, new
            return
        if self.path:
            new = [new[0].moved(self.path.reversed), *new[1:]]
        self.views = [known.joined(other) for known, other in zip(self.views, new, strict=True)]

    def components(self, adapted: Any, pretrained: Any = None) -> dict[str, Scores]:
        """Returns the scores by all views and, where there are two, by each alone."""
        found = self._by_view(adapted, pretrained)
        together = {"full": [*found]}
        if len(found) == 2:
            together |= {f"{name}_view": [name] for name in found}
        return {
            name: best_by_task(self._summed([found[view] for view in views]), self.classes)
            for name, views in together.items()
        }

    def class_scores(self, adapted: Any, pretrained: Any = None) -> Float[np.ndarray, "n classes"]:
        """See `Calibrator.class_scores`; minus infinity for classes without an image."""
        return self._summed([*self._by_view(adapted, pretrained).values()])

    def assess(
        self, adapted: Any, pretrained: Any = None
    ) -> tuple[Float[np.ndarray, "n classes"], Float[np.ndarray, " n"]]:
        """Returns `probabilities` and `typicality` from one scoring."""
        scores, spread, familiarity = self._scores(adapted, pretrained)
        kept = self.confidence
        return kept.probabilities(scores, spread), kept.typicality(familiarity)

    def probabilities(self, adapted: Any, pretrained: Any = None) -> Float[np.ndarray, "n classes"]:
        """Returns the probability of every class; arguments and errors as of `score`."""
        return self.assess(adapted, pretrained)[0]

    def typicality(self, adapted: Any, pretrained: Any = None) -> Float[np.ndarray, " n"]:
        """Returns the share of left-out training images that are no more familiar, in (0, 1]."""
        return self.assess(adapted, pretrained)[1]

    def _scores(self, adapted: Any, pretrained: Any = None) -> tuple[np.ndarray, ...]:
        """Returns scores of classes, their spread and the familiarity; see `confidence`."""
        found, plain = self._by_view(adapted, pretrained), self._plain
        scores = self._summed([*found.values()])
        if self._pairs is None:
            counts = np.concatenate(self.counts)
            every = counts.sum(keepdims=True)
            ones = [
                metric(known.as_one(counts, path), every, None, plain)
                for known, path in zip(self.views, (self.path, None), strict=False)
            ]
            self._pairs = [*zip((each[2] for each in found.values()), ones, strict=True)]
        views = inputs.score_views(adapted, pretrained, self.widths, True)
        of_views = in_blocks(lengths, self._pairs, *views, plain=plain)
        weighted = [np.float32(found[name][0]) * each for name, each in of_views.items()]
        own, one = np.sum(weighted, axis=0).T
        return scores, np.sqrt(one / sum(self.widths)), scores.max(axis=1) - own + one

    def _by_view(self, adapted: Any, pretrained: Any) -> dict[str, tuple[Any, ...]]:
        """Returns by view its weight, the scores of all classes [n, c], and their metric."""
        if not self.views:
            raise InputError("call fit_task for every task first")
        views = inputs.score_views(adapted, pretrained, self.widths, True)
        counts = np.concatenate(self.counts)
        if self._metrics is None:
            paths = self.path, None
            pairs = zip(self.views, paths, strict=False)
            self._metrics = [metric(known, counts, path, self._plain) for known, path in pairs]
        found = in_blocks(class_distances, self._metrics, *views, plain=self._plain)
        weights = 1.0, 1.0 if self.follows is False else PRETRAINED_SHARE
        return {
            name: (weight, found[name][:, : len(counts)], known)
            for name, weight, known in zip(inputs.VIEWS, weights, self._metrics, strict=False)
        }

    def _summed(self, views: Sequence[tuple[Any, ...]]) -> Float[np.ndarray, "n classes"]:
        """Returns the scores of some views of `_by_view` together."""
        total = sum(np.float32(weight) * scores for weight, scores, _ in views)
        return np.where(np.concatenate(self.counts) > 0, total, np.float32(-np.inf))

    @property
    def note(self) -> str:
        """Which of the two it was, once there are two tasks."""
        return {
            None: "",
            True: "class Gaussians follow the encoder",
            False: "class Gaussians stay as they were fitted, since features by the encoder before "
            "each task were not given; the pretrained view counts fully",
        }[self.follows]

    @property
    def storage_bytes(self) -> int:
        """See `Calibrator.storage_bytes`; half of a symmetric scatter counts, no path."""
        numbers = sum(len(each) for each in self.classes)  # Images of each class.
        numbers += sum(each.size for each in self.confidence)
        for known in self.views:
            width = len(known.scatter)
            numbers += sum(each.size for each in (*known.means, *known.factors))
            numbers += width * (width + 1) // 2
        return 4 * numbers

    def _forget(self) -> None:
        self._metrics: list[Metric] | None = None
        self._pairs: list[tuple[Metric, Metric]] | None = None
        self._plain = False
