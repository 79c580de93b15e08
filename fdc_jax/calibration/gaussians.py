"""Class Gaussians, which follow the encoder where they can (docs/beyond.md).

Of each view are kept the mean mu_c of every class c, the within-class scatter S of all classes
together, and of each class's own covariance the leading directions, as rows of a factor B_c. Given
the features of a task's images by the encoder before that task, what is kept of earlier classes in
the adapted view is carried along by the affine map of `drift`, and S grows by what that map does
not explain. With N images of C classes in width d, a class scores minus half the squared distance

    (g - mu_c)' [ (1 - a) S / N + lambda (tr S / (N d)) I + a B_c' B_c ]^-1 (g - mu_c),

where a = 0.1 and lambda = 0.1 + d / (N - C), which is more while images are few. The pretrained
encoder does not move. Its view counts half, and fully where the adapted statistics stayed behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import scipy.linalg

from fdc_jax.calibration import drift, inputs
from fdc_jax.calibration.calibrator import Calibrator, Scores, best_by_task
from fdc_jax.calibration.compiled import in_blocks, stack
from fdc_jax.calibration.equations import energy
from fdc_jax.errors import InputError
from fdc_jax.heads import products

if TYPE_CHECKING:
    from jaxtyping import Float, Int

# Share a of a class's own covariance, directions kept of it, least lambda, and how much the
# pretrained view counts beside an adapted view that follows the encoder.
OWN_SHARE = 0.1
RANK = 8
LEAST_SHRINKAGE = 0.1
PRETRAINED_SHARE = 0.5


class ViewClasses(NamedTuple):
    """The classes of one view, those of all tasks in a row."""

    means: Float[np.ndarray, "c d"]  # mu_c; zero for classes without an image
    factors: Float[np.ndarray, "c r d"]  # B_c; rows are as long as standard deviations along them
    scatter: Float[np.ndarray, "d d"]  # S, summed over all images

    def moved(self, by: drift.AffineMap, images: int) -> ViewClasses:
        """Returns the classes, of so many images, as a newer encoder has them.

        What the map leaves unexplained varies within classes from then on.
        """
        by = by._replace(matrix=by.matrix.astype(np.float32))
        return ViewClasses(
            by.move(self.means).astype(np.float32),
            self.factors @ by.matrix,
            (by.move_scatter(self.scatter) + images * by.residual).astype(np.float32),
        )

    def joined(self, other: ViewClasses) -> ViewClasses:
        """Returns these classes and others."""
        return ViewClasses(
            np.concatenate([self.means, other.means]),
            np.concatenate([self.factors, other.factors]),
            self.scatter + other.scatter,
        )


def fit_classes(
    features: Float[np.ndarray, "n d"], rows: Int[np.ndarray, " n"], num_classes: int
) -> ViewClasses:
    """Returns the Gaussians of classes from the features of their images, one class at a time."""
    width = features.shape[1]
    means = np.zeros((num_classes, width), np.float32)
    factors = np.zeros((num_classes, RANK, width), np.float32)
    scatter = np.zeros((width, width))
    for row in np.unique(rows):
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
    return ViewClasses(means, factors, scatter.astype(np.float32))


class Metric(NamedTuple):
    """The classes of one view in coordinates W (g - m), in which all share the covariance I."""

    origin: Float[Any, " d"]  # m, the mean of the class means
    whitener: Float[Any, "d d"]  # W
    means: Float[Any, "c d"]
    factors: Float[Any, "c r d"]  # F_c; the inverse covariance of class c is I - F_c' F_c


def metric(known: ViewClasses, counts: Int[np.ndarray, " c"]) -> Metric:
    """Returns what scoring needs of the classes of one view and their images, found in float64."""
    width, present = len(known.scatter), counts > 0
    images, classes = int(counts.sum()), int(present.sum())
    covariance = known.scatter.astype(np.float64) / images
    variance = np.trace(covariance) / width
    shrinkage = LEAST_SHRINKAGE + width / max(images - classes, 1)
    level = shrinkage * variance if variance > 0 else 1.0
    shared = (1 - OWN_SHARE) * covariance + level * np.eye(width)
    whitener = np.linalg.inv(np.linalg.cholesky(shared))
    origin = known.means[present].mean(axis=0, dtype=np.float64).astype(np.float32)
    own = np.sqrt(OWN_SHARE) * known.factors.astype(np.float64) @ whitener.T
    # Woodbury: (I + B' B)^-1 = I - B' (I + B B')^-1 B.
    inner = np.eye(own.shape[1]) + own @ own.swapaxes(1, 2)
    factors = np.linalg.solve(np.linalg.cholesky(inner), own)
    means = (known.means.astype(np.float64) - origin) @ whitener.T
    columns = (stack([each], 8, turned=False)[0] for each in (means, factors))
    return Metric(origin, whitener.astype(np.float32), *columns)


def class_distances(
    metrics: Sequence[Metric], *views: Float[Any, "n d"]
) -> dict[str, Float[Any, "n c"]]:
    """Returns by view minus half the squared distance to every class, padded classes too.

    The term of the feature alone, which all classes share, is left out.
    """
    found = {}
    for name, known, features in zip(inputs.VIEWS, metrics, views, strict=False):
        classes, rank, width = known.factors.shape
        near = products(features - known.origin, known.whitener)
        linear = products(near, known.means) - energy(known.means) / 2
        own = products(near, known.factors.reshape(-1, width)).reshape(-1, classes, rank)
        centre = (known.factors * known.means[:, None]).sum(axis=-1)
        found[name] = linear + energy(own - centre) / 2
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
        self._forget()

    def fit_task(self, adapted, labels, head=None, pretrained=None, classes=None, previous=None):
        """See `Calibrator.fit_task`."""
        given = self._task(adapted, labels, head, pretrained, classes)
        follows, earlier = self.follows, self.views
        if given.task:
            name = f"previous features of task {given.task}"
            if follows not in (None, previous is not None):
                raise InputError(
                    f"{name}: expected features by the encoder before each task from the second "
                    f"one on, or of none, as its statistics follow the encoder or stay"
                )
            if follows := previous is not None:
                before = inputs.feature_array(previous, name, self.widths[0])
                inputs.same_length(before, given.views[0], name)
                by = drift.fit_map(before, given.views[0])
                images = sum(int(counts.sum()) for counts in self.counts)
                earlier = [self.views[0].moved(by, images), *self.views[1:]]
        new = [fit_classes(each, given.rows, len(given.classes)) for each in given.views]
        pairs = zip(earlier, new, strict=True) if earlier else ()
        self.views = [known.joined(other) for known, other in pairs] or new
        self.follows = follows
        self._append(given)

    def components(self, adapted: Any, pretrained: Any = None) -> dict[str, Scores]:
        """Returns the scores by all views and, where there are two, by each alone."""
        found = self._by_view(adapted, pretrained)
        single = {f"{name}_view": best_by_task(each, self.classes) for name, each in found.items()}
        full = {"full": best_by_task(np.sum([*found.values()], axis=0), self.classes)}
        return full | (single if len(single) == 2 else {})

    def class_scores(self, adapted: Any, pretrained: Any = None) -> Float[np.ndarray, "n classes"]:
        """See `Calibrator.class_scores`; minus infinity for classes without an image."""
        return np.sum([*self._by_view(adapted, pretrained).values()], axis=0)

    def _by_view(self, adapted: Any, pretrained: Any) -> dict[str, Any]:
        """Returns by view the weighted scores of all classes, [n, classes]."""
        if not self.views:
            raise InputError("call fit_task for every task first")
        views = inputs.score_views(adapted, pretrained, self.widths, True)
        counts = np.concatenate(self.counts)
        if self._metrics is None:
            self._metrics = [metric(known, counts) for known in self.views]
        found = in_blocks(class_distances, self._metrics, *views)
        if self.follows is not False and "pretrained" in found:
            found["pretrained"] *= np.float32(PRETRAINED_SHARE)
        absent = np.where(counts > 0, np.float32(0.0), np.float32(-np.inf))
        return {name: each[:, : len(counts)] + absent for name, each in found.items()}

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
        """See `Calibrator.storage_bytes`; of a symmetric scatter, half counts."""
        numbers = sum(len(each) for each in self.classes)  # Images of each class.
        for known in self.views:
            width = len(known.scatter)
            numbers += known.means.size + known.factors.size + width * (width + 1) // 2
        return 4 * numbers

    def _forget(self) -> None:
        self._metrics: list[Metric] | None = None
