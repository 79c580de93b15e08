"""Class Gaussians, which follow the encoder where they can (docs/beyond.md).

Features g are taken at unit length. Of each view are kept the mean mu_c of every class c, the
within-class scatter S of all classes together, and of each class's own covariance the leading
directions, as rows of a factor B_c. Given the features of a task's images by the encoder before
that task, what is kept of earlier classes in the adapted view is carried along by the affine map of
`drift`, and S grows by what that map does not explain. Beyond a thousand classes maps are composed,
and classes are moved when scores need them, so that a task costs the same however many classes
there are. With N images of C classes in width d, a class scores minus half the squared distance

    (g - mu_c)' [ (1 - a) S / N + lambda (tr S / (N d)) I + a B_c' B_c ]^-1 (g - mu_c),

where a = 0.1 and lambda = 0.1 + d / (N - C), which is more while images are few. The pretrained
encoder does not move. Its view counts (1 + m / 20) / 4, where m is the mean of the staleness s of
all classes, and fully where the adapted statistics stayed behind.

A class that was moved has a mean that is off, so that its own images are farther from it. Its score
is raised by log(1 + s / 4). For every map since its task, s grew by the mean of e' M^-1 e over the
new task's classes, each left out once: e is the error of the map on its mean, and M what stands in
brackets, without B_c, of the earlier classes alone, S moved and grown by the map already.

How sure an answer is, is learned from images that are taken away from the fit; see `confidence`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import scipy.linalg

from fdc_jax.calibration import drift, inputs
from fdc_jax.calibration.calibrator import Calibrator, Scores, best_by_task
from fdc_jax.calibration.compiled import in_blocks, jnp, stack
from fdc_jax.calibration.confidence import CLASSES, MEASURED, Confidence, left_out
from fdc_jax.errors import InputError
from fdc_jax.heads import products, unit

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

# Share a of a class's own covariance, directions kept of it, least lambda, how much the pretrained
# view counts beside an adapted view that follows the encoder, and the staleness that doubles that.
OWN_SHARE = 0.1
RANK = 8
LEAST_SHRINKAGE = 0.1
PRETRAINED_SHARE, DOUBLING = 0.25, 20.0
# Classes are moved at once where a composed map would amplify rounding by more.
AMPLIFICATION = 8.0

Move: TypeAlias = "drift.Path | drift.AffineMap"


class ViewClasses(NamedTuple):
    """The classes of one view, task by task."""

    means: list[Float[np.ndarray, "c d"]]  # mu_c, zero for classes without an image
    factors: list[Float[np.ndarray, "c r d"]]  # B_c; rows are as long as deviations along them
    scatter: Float[np.ndarray, "d d"]  # S, summed over all images

    def joined(self, other: ViewClasses) -> ViewClasses:
        """Returns these classes and others."""
        factors = [*self.factors, *other.factors]
        return ViewClasses([*self.means, *other.means], factors, self.scatter + other.scatter)

    def all(self, path: Move | None, kind: type = np.float64) -> tuple[np.ndarray, np.ndarray]:
        """Returns mu_c in float64 and B_c of all classes, moved along a path."""
        means = np.concatenate(self.means, dtype=np.float64)
        factors = np.concatenate(self.factors, dtype=kind)
        if path is None:
            return means, factors
        factors = np.tensordot(factors, path.matrix.astype(kind), 1)  # as one product
        return means @ path.matrix + path.offset, factors

    def moved(self, path: Move) -> ViewClasses:
        """Returns the classes at the end of a path; S, which all share, is not moved."""
        sizes = np.cumsum([len(each) for each in self.means])[:-1]
        moved = self.all(path, np.float32)
        means, factors = (np.split(inputs.float32(each), sizes) for each in moved)
        return ViewClasses(means, factors, self.scatter)


def fit_classes(
    features: Float[np.ndarray, "n d"],
    rows: Int[np.ndarray, " n"],
    num_classes: int,
    held: Bool[np.ndarray, " n"],
) -> list[ViewClasses]:
    """Returns the Gaussians of classes from the features of their images, one class at a time.

    Where some images are held back, those of the rest follow, found by taking away from all.
    """
    width = features.shape[1]
    shapes = (num_classes, width), (num_classes, RANK, width)
    scatter, taken = np.zeros((2, width, width))
    waiting, lost = [], []
    found = [[np.zeros(shape, np.float32) for shape in shapes] for _ in range(1 + held.any())]
    for row in np.unique(rows):
        members, out = at_unit_length(features[rows == row]), held[rows == row]
        mean = members.mean(axis=0, dtype=np.float64).astype(np.float32)
        centred = members - mean
        # The smaller one of X X' and X' X.
        few = len(centred) < width
        gram = centred @ centred.T if few else centred.T @ centred
        if few:
            waiting.append(centred)
            _add_waiting(scatter, waiting, inputs.BLOCK_ROWS)
        else:
            scatter += gram
        parts = [(mean, principal(centred, gram))]
        if len(found) == 2:
            rest = centred[~out]
            shift = rest.mean(axis=0)
            away = np.vstack([centred[out], np.sqrt(len(rest)) * shift])
            if few:
                lost.append(away)
                gram = gram[~out][:, ~out]
                gram = gram - gram.mean(axis=0)
                gram -= gram.mean(axis=1, keepdims=True)
            else:
                taken += (product := away.T @ away)
                gram = gram - product
            parts.append((mean + shift, principal(rest - shift, gram)))
        for (means, factors), (middle, leading) in zip(found, parts, strict=True):
            means[row], factors[row, : len(leading)] = middle, leading
    _add_waiting(scatter, waiting)
    _add_waiting(taken, lost)
    rest = scatter - taken
    if np.trace(rest) < 1e-6 * np.trace(scatter):  # one image of each class is left: rounding
        rest = np.zeros_like(scatter)
    return [
        ViewClasses([means], [factors], total.astype(np.float32))
        for (means, factors), total in zip(found, (scatter, rest), strict=False)
    ]


def _add_waiting(total: Any, waiting: list[Float[np.ndarray, "_ d"]], least: int = 1) -> None:
    """Adds X' X of the rows that wait to a total, where they are so many: one product is faster."""
    if sum(map(len, waiting)) >= least:
        many = np.concatenate(waiting)
        total += many.T @ many
        waiting.clear()


def at_unit_length(features: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n d"]:
    """Returns features as the Gaussians are of, in float32."""
    return unit(inputs.float32(features))


def principal(
    centred: Float[np.ndarray, "n d"], gram: Float[np.ndarray, "k k"]
) -> Float[np.ndarray, "r d"]:
    """Returns the leading directions of a class, as long as standard deviations along them.

    `gram` is the smaller one of X X' and X' X. With X X' v = s v, X' v is as long as the square
    root of s and points along the class's principal direction.
    """
    (count, width), last = centred.shape, len(gram) - 1
    if not (kept := min(RANK, count - 1, width)):
        return centred[:0]
    found, vectors = scipy.linalg.eigh(gram, subset_by_index=[last - kept + 1, last])
    lengths = np.sqrt(np.maximum(found, 0.0))
    leading = vectors.T @ centred if len(gram) < width else vectors.T * lengths[:, None]
    return leading[::-1] / np.sqrt(count)


class Metric(NamedTuple):
    """The classes of one view; the inverse covariance of class c is A_c = P - F_c' F_c."""

    origin: Float[Any, " d"]  # the mean of the class means
    inverse: Float[Any, "d d"]  # P, of what all classes share
    middle: Float[Any, " d"]  # the mean of all images
    one: Float[Any, "d d"]  # P of all images as those of one class
    rows: Float[Any, "c d"]  # A_c mu
    constants: Float[Any, " c"]  # mu' A_c mu / 2
    factors: list[Float[Any, "c d"]]  # of each class the first row of F_c, the second, and so on


def metric(
    known: ViewClasses,
    counts: Int[np.ndarray, " c"],
    path: drift.Path | None,
    raised: Float[np.ndarray, " c"] | float,
    plain: bool,
) -> Metric:
    """Returns what scoring needs of the classes of one view and their images, found in float64.

    Scores are `raised` by so much. If `plain`, for a single use, in float32; see `compiled.stack`.
    """
    kind = np.float32 if plain else np.float64
    all_means, all_factors = known.all(path, kind)
    present, scatter, images = counts > 0, known.scatter.astype(kind), int(counts.sum())
    inverse = _inverse(scatter, images, int(present.sum()))
    origin = all_means[present].mean(axis=0).astype(np.float32)
    means, own = (all_means - origin).astype(kind), kind(np.sqrt(OWN_SHARE)) * all_factors
    # Woodbury: (P^-1 + B' B)^-1 = P - P B' (I + B P B')^-1 B P.
    factors = np.tensordot(own, inverse, 1)
    inner = np.eye(RANK, dtype=kind) + factors @ own.swapaxes(1, 2)
    factors = np.linalg.inv(np.linalg.cholesky(inner)) @ factors
    along = factors @ means[:, :, None]
    rows = means @ inverse - (along * factors).sum(axis=1)
    columns = rows, (rows * means).sum(axis=1) / 2 - raised, *factors.swapaxes(0, 1)
    put = [stack([each], 8, plain=plain, turned=False)[0] for each in columns]
    middle = np.average(all_means, axis=0, weights=counts)
    about = ((all_means - middle) * np.sqrt(counts)[:, None]).astype(kind)
    one = _inverse(scatter + about.T @ about, images, 1)
    inverse, middle, one = (each.astype(np.float32) for each in (inverse, middle, one))
    return Metric(origin, inverse, middle, one, put[0], put[1], put[2:])


def _inverse(
    scatter: Float[np.ndarray, "d d"], images: int, classes: int
) -> Float[np.ndarray, "d d"]:
    """Returns the inverse of the covariance that classes share."""
    width, kind = len(scatter), scatter.dtype.type
    covariance = scatter / kind(images)
    variance = np.trace(covariance) / width
    shrinkage = LEAST_SHRINKAGE + width / max(images - classes, 1)
    covariance *= kind(1 - OWN_SHARE)
    covariance.flat[:: width + 1] += kind(shrinkage * variance if variance > 0 else 1.0)
    lower = scipy.linalg.cholesky(covariance, lower=True, check_finite=False)
    (potri,) = scipy.linalg.get_lapack_funcs(["potri"], [lower])
    half = potri(lower, lower=1)[0]
    return half + np.tril(half, -1).T


def class_distances(
    metrics: Sequence[Metric], *views: Float[Any, "n d"], lengths: bool
) -> dict[str, Float[Any, "n _"]]:
    """Returns by view minus half the squared distance to every class, padded classes too.

    The term of the feature alone, which all classes share, is left out. With `lengths` it is
    `NAME_lengths`, beside half the squared distance to all images as one class.
    """
    found = {}
    for name, known, features in zip(inputs.VIEWS, metrics, views, strict=False):
        features = unit(features)
        near = features - known.origin
        found[name] = products(near, known.rows) - known.constants
        for factor in known.factors:
            found[name] = found[name] + products(near, factor) ** 2 / 2
        if lengths:
            far = features - known.middle
            ways = (near, known.inverse), (far, known.one)
            squares = [(products(each, inverse) * each).sum(axis=-1) for each, inverse in ways]
            found[f"{name}_lengths"] = jnp.stack(squares, axis=-1) / 2
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
        # s of the classes of each task.
        self.staleness = np.zeros(0)
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
                by = drift.fit_map(before, given.views[0], at_unit_length, given.rows)
        carried, first, count = copy.copy(self), sum(map(len, self.classes)), len(given.classes)
        held = left_out(given.rows) & (first + count <= CLASSES)
        carried._carry(by)
        fits = (fit_classes(each, given.rows, count, held) for each in given.views)
        views, *rest = map(list, zip(*fits, strict=True))
        if rest:
            some = np.flatnonzero(held)
            some = some[np.linspace(0, len(some) - 1, min(len(some), MEASURED)).astype(int)]
            without = copy.copy(carried)
            left = given.counts - np.bincount(given.rows[held], minlength=count)
            without._take(given._replace(counts=left), by, follows, rest[0])
            without._plain = True  # Many sizes occur once.
            scores, *more = without._scores(*(each[some] for each in given.views))
            carried.confidence = self.confidence.with_task(scores, first + given.rows[some], *more)
        carried._take(given, by, follows, views)
        vars(self).update(vars(carried))

    def _take(
        self,
        given: inputs.TaskInput,
        by: drift.AffineMap | None,
        follows: bool | None,
        views: list[ViewClasses],
    ) -> None:
        """Takes the classes of a task."""
        self._add(by, views)
        self.follows, self.staleness = follows, np.append(self.staleness, 0.0)
        self._append(given)

    def join(self, other: Any) -> None:
        """See `Calibrator.join`."""
        self._check_follows(other.follows, f"previous features of task {other.first}")
        super().join(other)
        self._carry(other.entry)
        self._add(other.entry, other.views)
        self.follows = other.follows
        self.staleness = np.append(self.staleness, other.staleness)
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
        if len(by.class_errors):
            present = sum(int((counts > 0).sum()) for counts in before)
            errors, inverse = by.class_errors, _inverse(scatter, images, present)
            self.staleness = self.staleness + (errors @ inverse * errors).sum(axis=1).mean()
        # Few are moved at once: `confidence` scores all of them at every task.
        few = self.path is None and sum(map(len, before)) <= CLASSES
        path = None if few else drift.path(self.path, by)
        if path is None or not path.amplification <= AMPLIFICATION:
            known, path = known.moved(path or by), None
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
        found = self._by_view(adapted, pretrained, lengths=True).values()
        # A mean over views, since their weights differ between tasks.
        total = sum(weight for weight, *_ in found)
        scores = self._summed([*found]) / total
        own, one = np.sum([weight * lengths for weight, _, lengths in found], axis=0).T / total
        one = np.maximum(one, 0.0)  # but for rounding
        return scores, np.sqrt(one / sum(self.widths)), scores.max(axis=1) - own + one

    def _by_view(
        self, adapted: Any, pretrained: Any, lengths: bool = False
    ) -> dict[str, tuple[Any, ...]]:
        """Returns by view its weight, scores of all classes [n, c], and, if asked, lengths."""
        if not self.views:
            raise InputError("call fit_task for every task first")
        views = inputs.score_views(adapted, pretrained, self.widths, True)
        counts = np.concatenate(self.counts)
        stale = np.repeat(self.staleness, [*map(len, self.classes)])
        if self._metrics is None:
            ways = zip(self.views, (self.path, None), (np.log1p(stale / 4), 0.0), strict=False)
            self._metrics = [
                metric(known, counts, path, raised, self._plain) for known, path, raised in ways
            ]
        found = in_blocks(
            class_distances, self._metrics, *views, plain=self._plain, lengths=lengths
        )
        share = PRETRAINED_SHARE * (1 + stale.mean() / DOUBLING)
        weights = 1.0, 1.0 if self.follows is False else share
        return {
            name: (np.float32(weight), found[name][:, : len(counts)], found.get(f"{name}_lengths"))
            for name, weight, _ in zip(inputs.VIEWS, weights, views, strict=False)
        }

    def _summed(self, views: Sequence[tuple[Any, ...]]) -> Float[np.ndarray, "n classes"]:
        """Returns the scores of some views of `_by_view` together."""
        total = sum(weight * scores for weight, scores, _ in views)
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
        numbers += len(self.staleness) + sum(each.size for each in self.confidence)
        for known in self.views:
            width = len(known.scatter)
            numbers += sum(each.size for each in (*known.means, *known.factors))
            numbers += width * (width + 1) // 2
        return 4 * numbers

    def _forget(self) -> None:
        self._metrics: list[Metric] | None = None
        self._plain = False
