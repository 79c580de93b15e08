"""Class Gaussians with drift compensation (docs/beyond.md).

Features g are taken at unit length. Each view keeps the mean mu_c of every class c, the sum S of
the scatters of all classes, and the leading principal directions of each class's own covariance, as
rows of a factor B_c. If the features of a task's images by the encoder before that task are given,
the affine map of `drift` moves the earlier classes in the adapted view, and S grows by the error of
the map. With N images of C classes in width d, the score of a class is minus half the squared
distance

    (g - mu_c)' [ (1 - a) S / N + lambda (tr S / (N d)) I + a B_c' B_c ]^-1 (g - mu_c),

where a = 0.1 and lambda = 0.1 + d / (N - C), which is larger while images are few. The pretrained
encoder does not move. The scores in its view have the weight (1 + m / 20) / 4, where m is the mean
of the staleness s of all classes; without drift compensation they have the weight 1.

The mean of a moved class is in error, and images of the class are farther from it. Its score is
raised by log(1 + s / 4). Each map since the class's task adds to s the mean of e' M^-1 e over the
new task's classes: e is the error of the map on the mean of a held-out class, and M is the matrix
in brackets, without B_c, of the earlier classes after the map.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np
import scipy.linalg
from jaxtyping import Bool, Float, Int

from fdc_jax.calibration import checks, confidence, drift, familiarity, inputs
from fdc_jax.calibration.calibrator import Calibrator, Scores, best_by_task
from fdc_jax.calibration.familiarity import OWN_SHARE, shared_precision
from fdc_jax.calibration.shapes import padded, padded_size
from fdc_jax.errors import InputError
from fdc_jax.heads import products, unit

_LOGGER = logging.getLogger("fdc_jax.calibration")

WITHOUT = (
    "class Gaussians without drift compensation, as features by the encoder before each task "
    "(previous) were not given"
)
# Directions kept of a class's own covariance.
RANK = 8
# Weight of the pretrained view with drift compensation, and the staleness that doubles it.
PRETRAINED_SHARE, DOUBLING = 0.25, 20.0


class ViewClasses(NamedTuple):
    """Statistics of classes in one view."""

    means: Float[np.ndarray, "c d"]  # mu_c, zero if a class has no image
    factors: Float[np.ndarray, "c r d"]  # B_c, rows as long as standard deviations along them
    scatter: Float[np.ndarray, "d d"]  # S

    def merge(self, other: ViewClasses) -> ViewClasses:
        """Returns the statistics of these classes and of others."""
        means, factors = map(np.concatenate, zip(self[:2], other[:2], strict=True))
        return ViewClasses(means, factors, self.scatter + other.scatter)

    def move(self, by: drift.AffineMap, images: int) -> ViewClasses:
        """Returns the statistics after a map, whose error adds to the scatter of each image."""
        means = by.move(self.means.astype(np.float64))
        matrix = inputs.float32(by.matrix)
        factors = np.tensordot(self.factors, matrix, 1)  # as one product
        scatter = matrix.T @ self.scatter @ matrix + images * by.residual
        return ViewClasses(inputs.float32(means), factors, inputs.float32(scatter))


def fit_classes(
    features: Float[np.ndarray, "n d"],
    rows: Int[np.ndarray, " n"],
    num_classes: int,
    held: Bool[np.ndarray, " n"],
) -> tuple[ViewClasses, ViewClasses]:
    """Returns the statistics of a task's images without those held out, and of all its images."""
    width = features.shape[1]
    shapes = (num_classes, width), (num_classes, RANK, width), (width, width)
    kept = ViewClasses(*(np.zeros(shape, np.float32) for shape in shapes))
    full = copy.deepcopy(kept)
    for row in np.unique(rows):
        members = at_unit_length(features[rows == row])
        out = held[rows == row]
        for statistics, images in ((kept, members[~out]), (full, members)):
            statistics.means[row] = images.mean(axis=0, dtype=np.float64)
            leading = leading_directions(images - statistics.means[row])
            statistics.factors[row, : len(leading)] = leading
    scatter, added = np.zeros((2, width, width))
    for index, block in inputs.blocks(features):
        block = at_unit_length(block)
        of_block = rows[index]
        out = held[index]
        centred = block - kept.means[of_block]
        scatter += centred[~out].T @ centred[~out]
        # Held-out images add the sum of (g - mean of kept images) (g - mean of all images)'.
        added += centred[out].T @ (block[out] - full.means[of_block[out]])
    kept = kept._replace(scatter=inputs.float32(scatter))
    return kept, full._replace(scatter=inputs.float32(scatter + added))


def at_unit_length(features: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n d"]:
    """Returns features divided by their norm, in float32."""
    return unit(inputs.float32(features))


def leading_directions(centred: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "r d"]:
    """Returns the leading principal directions, as long as standard deviations along them."""
    count, width = centred.shape
    if not (rank := min(RANK, count - 1, width)):
        return centred[:0]
    # The smaller of X X' and X' X. With X X' v = s v, X' v has the length sqrt(s).
    few = count < width
    gram = centred @ centred.T if few else centred.T @ centred
    last = len(gram) - 1
    values, vectors = scipy.linalg.eigh(gram, subset_by_index=[last - rank + 1, last])
    lengths = np.sqrt(np.maximum(values, 0.0))
    leading = vectors.T @ centred if few else vectors.T * lengths[:, None]
    return leading[::-1] / np.sqrt(count)


class Metric(NamedTuple):
    """Distances to all classes in a view, where a class has the precision A_c = P - F_c' F_c."""

    origin: Float[Any, " d"]  # the mean of the class means, subtracted from features
    rows: Float[Any, "c d"]  # A_c mu
    constants: Float[Any, " c"]  # mu' A_c mu / 2, infinite for classes without an image
    factors: list[Float[Any, "c d"]]  # first rows of all F_c, second rows, and so on


def metric(
    known: ViewClasses,
    counts: Int[np.ndarray, " c"],
    raised: Float[np.ndarray, " c"] | float,
    kind: type = np.float64,
) -> Metric:
    """Returns the metric of a view, computed in floats of a kind; `raised` is added to scores."""
    size = padded_size(len(counts), 8)
    present = counts > 0
    classes = int(present.sum())
    precision = shared_precision(known.scatter.astype(kind), int(counts.sum()), classes)
    class_means = known.means.astype(np.float64)
    origin = inputs.float32(class_means[present].mean(axis=0))
    means = (class_means - origin).astype(kind)
    # Woodbury: (P^-1 + B' B)^-1 = P - P B' (I + B P B')^-1 B P.
    scaled = kind(np.sqrt(OWN_SHARE)) * known.factors
    factors = np.tensordot(scaled, precision, 1)
    inner = np.eye(RANK, dtype=kind) + factors @ scaled.swapaxes(1, 2)
    factors = np.linalg.inv(np.linalg.cholesky(inner)) @ factors
    along = factors @ means[:, :, None]
    rows = means @ precision - (along * factors).sum(axis=1)
    constants = np.where(present, (rows * means).sum(axis=1) / 2 - raised, np.inf)
    arrays = origin, padded(rows, size), padded(constants, size, np.inf)
    by_row = [*inputs.float32(padded(factors, size).swapaxes(0, 1))]
    return Metric._make([*map(inputs.float32, arrays), by_row])


def class_scores(metrics: Sequence[Metric], *views: Float[Any, "n d"]) -> dict[str, Any]:
    """Returns minus half the squared distance to every class, up to a shared term, by view."""
    scores = {}
    for name, fitted, features in zip(inputs.VIEWS, metrics, views, strict=False):
        centred = unit(features) - fitted.origin[None]
        scores[name] = products(centred, fitted.rows) - fitted.constants[None]
        for factor in fitted.factors:
            scores[name] = scores[name] + products(centred, factor) ** 2 / 2
    return scores


class Gaussians(Calibrator):
    """Class Gaussians of one or two views; the nearest class also chooses the task.

    From the second task on, `fit_task` takes `previous` for all tasks (drift compensation) or for
    none. No head is needed.

    Attributes:
        view: "pretrained" if that view alone is read, "" if all are.
        views: statistics of all classes, by view.
        compensated: whether drift compensation is on; None before the second task.
        staleness: s of the classes of each task.
        confidence: sums over held-out images, for probabilities.
        familiarity: familiarity of images that the statistics left out.
    """

    name = "gaussians"
    reads_previous = True

    def __init__(self, view: str = ""):
        super().__init__()
        if view not in ("", "pretrained"):
            raise InputError(f"gaussians: view: expected '' or 'pretrained', found {view!r}")
        self.view = view
        self.views: list[ViewClasses] = []
        self.compensated: bool | None = None
        self.staleness = np.zeros(0)
        self.confidence = confidence.Confidence()
        self.familiarity = familiarity.Familiarity()

    def _fit(self, given: inputs.TaskInput) -> None:
        # Copies arrays of other libraries to the host; memory maps stay unread.
        given = given._replace(views=[inputs.host_array(view, "") for view in given.views])
        widths = [view.shape[1] for view in given.views]
        if self.view:  # The encoder before each task is the pretrained one, too.
            if len(widths) < 2:
                raise inputs.missing("pretrained features", given.task, self.name)
            given = given._replace(views=given.views[1:], previous=given.views[1])
        fitted = copy.copy(self)
        if given.task:
            fitted._compensate(given)
        count = len(given.classes)
        all_classes = sum(map(len, self.classes)) + count
        held = confidence.held_out(given.rows) & (all_classes <= confidence.CLASSES)
        fits = (fit_classes(view, given.rows, count, held) for view in given.views)
        kept, full = zip(*fits, strict=True)
        without = copy.copy(fitted)
        fitted._add(given, full)
        if held.any():
            out = np.bincount(given.rows[held], minlength=count)
            without._add(given._replace(counts=given.counts - out), kept)
            fitted._measure(given, held, without)
        self._forget()
        vars(self).update(fitted.__getstate__() | {"widths": widths})

    def _measure(self, given: inputs.TaskInput, held: np.ndarray, without: Gaussians) -> None:
        """Adds a task's images to the confidence and the familiarity.

        Computes with NumPy, since JAX would compile for shapes that occur only once.
        """
        counts = np.concatenate(self.counts)
        columns = given.rows + len(counts) - len(given.classes)
        reference = self._reference_of(np.float32)
        chosen = inputs.evenly_spaced(np.flatnonzero(held), confidence.MEASURED)
        views = [inputs.float32(view[chosen]) for view in given.views]
        scores = without._fuse(class_scores(without._metrics_by_view(np.float32), *views))
        spread = without._spread(familiarity.compare(reference, views[-1])[1])
        self.confidence = self.confidence.with_task(columns[chosen], scores, spread)
        several = np.flatnonzero(given.counts[given.rows] > 1)
        chosen = inputs.evenly_spaced(several, confidence.MEASURED)
        features = inputs.float32(given.views[-1][chosen])
        values, gains = familiarity.left_out(reference, features, columns[chosen], counts)
        self.familiarity = self.familiarity.with_task(reference, values, gains, columns[chosen])

    def _compensate(self, given: inputs.TaskInput) -> None:
        """Moves the adapted view of all earlier classes by the map of a new task."""
        name = inputs.input_name("previous features", given.task)
        previous = given.previous
        if self.compensated is not None and self.compensated != (previous is not None):
            raise InputError(
                f"{name}: expected features by the encoder before each task from the second one on "
                "(drift compensation), or of none"
            )
        if previous is None:
            if self.compensated is None:
                self.compensated = False
                _LOGGER.warning(self.note)
            return
        self.compensated = True
        width = given.views[0].shape[1]
        before = inputs.host_array(inputs.feature_array(previous, name, width), name)
        inputs.same_length(before, given.views[0], name)
        adapted = inputs.input_name("adapted features", given.task)
        checks.warn_of_rows({adapted: given.views[0], name: before}, given.rows)
        affine = drift.fit_map(before, given.views[0], at_unit_length, given.rows)
        counts = np.concatenate(self.counts)
        images = int(counts.sum())
        moved = self.views[0].move(affine, images)
        if len(affine.class_errors):
            present = int((counts > 0).sum())
            precision = shared_precision(moved.scatter.astype(np.float64), images, present)
            added = (affine.class_errors @ precision * affine.class_errors).sum(axis=1).mean()
            self.staleness = self.staleness + added
        self.views = [moved, *self.views[1:]]

    def _add(self, given: inputs.TaskInput, views: Sequence[ViewClasses]) -> None:
        """Adds the statistics of a task's classes."""
        if self.views:
            views = [old.merge(new) for old, new in zip(self.views, views, strict=True)]
        self.views = [*views]
        self.staleness = np.append(self.staleness, 0.0)
        self._append(given)

    def class_scores(self, adapted: Any, pretrained: Any = None) -> Float[np.ndarray, "n classes"]:
        """See `Calibrator.class_scores`; minus infinity for classes without an image."""
        return self._fuse(self._by_view(self._checked(adapted, pretrained)))

    def components(self, adapted: Any, pretrained: Any = None) -> dict[str, Scores]:
        """Returns the scores by all views and, if there are two, by each view alone."""
        by_view = self._by_view(self._checked(adapted, pretrained))
        parts = {"full": by_view}
        if len(by_view) == 2:
            parts |= {f"{name}_view": {name: scores} for name, scores in by_view.items()}
        return {name: best_by_task(self._fuse(part), self.classes) for name, part in parts.items()}

    def assess(
        self, adapted: Any, pretrained: Any = None
    ) -> tuple[Float[np.ndarray, "n classes"], Float[np.ndarray, " n"]]:
        """Returns the probability of every class and the typicality, in (0, 1], of a batch."""
        views = self._checked(adapted, pretrained)
        familiar, half_squares = inputs.in_blocks(familiarity.compare, self._reference, views[-1])
        scores = self._fuse(self._by_view(views))
        probabilities = self.confidence.probabilities(scores, self._spread(half_squares))
        return probabilities, self.familiarity.typicality(self._reference, familiar)

    @property
    def note(self) -> str:
        """A line on drift compensation, from the second task on."""
        if self.view or self.compensated is None:
            return ""
        if self.compensated:
            return "class Gaussians with drift compensation"
        weight = "; the pretrained view has full weight" if len(self.widths) > 1 else ""
        return WITHOUT + weight

    @property
    def storage_bytes(self) -> int:
        """See `Calibrator.storage_bytes`; only half of a symmetric scatter counts."""
        numbers = sum(map(len, self.classes))  # images of each class
        numbers += len(self.staleness) + sum(map(np.size, (*self.confidence, *self.familiarity)))
        for known in self.views:
            width = len(known.scatter)
            numbers += known.means.size + known.factors.size + width * (width + 1) // 2
        return 4 * numbers

    def _checked(self, adapted: Any, pretrained: Any) -> list[Any]:
        """Returns the features of a batch by view."""
        if not self.views:
            raise InputError("call fit_task for every task first")
        views = self._batch(adapted, pretrained, True)
        return views[1:] if self.view else views

    def unit_means(self) -> Sequence[Float[np.ndarray, "c d"]]:
        """See `Calibrator.unit_means`."""
        present = np.concatenate(self.counts) > 0
        return [view.means[present] for view in self.views]

    def _by_view(self, views: Sequence[Any]) -> dict[str, Any]:
        """Returns the scores of all classes by view."""
        return inputs.in_blocks(class_scores, self._metrics, *views)

    @cached_property
    def _metrics(self) -> list[Metric]:
        return jax.device_put(self._metrics_by_view(np.float64))

    def _metrics_by_view(self, kind: type) -> list[Metric]:
        """Returns the metric of each view, computed in floats of a kind."""
        raised = np.log1p(np.repeat(self.staleness, [*map(len, self.classes)]) / 4)
        counts = np.concatenate(self.counts)
        by_view = zip(self.views, (raised, 0.0), strict=False)
        return [metric(view, counts, term, kind) for view, term in by_view]

    @cached_property
    def _reference(self) -> familiarity.Reference:
        return jax.device_put(self._reference_of(np.float64))

    def _reference_of(self, kind: type) -> familiarity.Reference:
        """Returns the reference of the last view, computed in floats of a kind."""
        return familiarity.reference(self.views[-1], np.concatenate(self.counts), kind)

    def _spread(self, half_squares: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """Returns a divisor of scores in proportion to D, from D^2 / 2."""
        total = sum(self._weights().values())
        return total * np.sqrt(np.maximum(half_squares, 0.0) / self.widths[-1])

    def _weights(self) -> dict[str, np.float32]:
        """Returns the weight of each view."""
        stale = np.average(self.staleness, weights=[*map(len, self.classes)])
        share = 1.0 if self.compensated is False else PRETRAINED_SHARE * (1 + stale / DOUBLING)
        weights = map(np.float32, (1.0, share)[: len(self.views)])
        return dict(zip(inputs.VIEWS, weights, strict=False))

    def _fuse(self, by_view: dict[str, np.ndarray]) -> Float[np.ndarray, "n classes"]:
        """Returns the weighted sum of scores by view."""
        weights = self._weights()
        count = sum(map(len, self.classes))
        return np.sum([weights[name] * scores[:, :count] for name, scores in by_view.items()], 0)
