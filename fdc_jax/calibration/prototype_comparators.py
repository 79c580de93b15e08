"""Nearest class mean: each class is one vector, and the nearest one decides task and class.

Means are taken in float64 on the host and stored in float32; distances are one float32 matrix
product at the highest precision under `jax.jit`. A class without samples is never predicted.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fdc_jax.calibration.accounting import BYTES
from fdc_jax.calibration.scores import Scores
from fdc_jax.calibration.seen_tasks import SeenTasks, TaskSamples, class_means
from fdc_jax.errors import InputError
from fdc_jax.heads import NORM_FLOOR, Head, unit


class NearestClassMean:
    """Score of class c: closeness of the feature g to the mean of the class's raw features m_c.

    Metrics:

    - "cosine": g.m_c / (|g| |m_c|). With the pretrained view this is SimpleCIL (Zhou et al.,
      "Revisiting Class-Incremental Learning with Pre-Trained Models", 2023), as PILOT runs it.
    - "euclidean": -|g - m_c|^2, the textbook nearest centroid.

    Args:
        view: "adapted" compares E_T(x) with means of E_t(D_t); "pretrained" uses E_0 for both.
        metric: one of the two above.

    Raises:
        InputError: an unknown view or metric.
    """

    name = "ncm"

    def __init__(self, view: str = "adapted", metric: str = "cosine"):
        if metric not in ("cosine", "euclidean"):
            raise InputError(f"{self.name}: metric: expected cosine or euclidean, found {metric!r}")
        self.metric = metric
        self._seen = SeenTasks(self.name, view)
        self._prototypes: list[Float[np.ndarray, "c d"]] = []
        self._stacked: Float[Array, "classes d"] | None = None

    def fit_task(
        self,
        adapted: object,
        labels: object,
        head: Head | None = None,
        pretrained: object = None,
        classes: object = None,
    ) -> None:
        """Takes the class means of one more task.

        Args:
            adapted: features [n, d] of the task's training images by the encoder of that time.
            labels: [n] integers.
            head: not needed.
            pretrained: features [n, d'] by the pretrained encoder, read with that view.
            classes: the task's classes in order; ascending distinct labels when None.

        Raises:
            InputError: see `SeenTasks.check`; nothing has changed then.
        """
        samples = self._seen.check(adapted, labels, head, pretrained, classes)
        self._prototypes.append(self._task_prototypes(samples).astype(np.float32))
        self._stacked = None
        self._seen.remember(samples, head)

    def _task_prototypes(self, samples: TaskSamples) -> Float[np.ndarray, "c d"]:
        """One row per class, NaN for a class without samples."""
        return class_means(samples)

    def finalize(self) -> None:
        """Moves the prototypes to the device."""
        if self._stacked is None and self._prototypes:
            self._stacked = jnp.asarray(np.concatenate(self._prototypes))

    def score(self, adapted: object, pretrained: object = None) -> Scores:
        """Scores a batch [n, d] of the method's view."""
        features = self._seen.view_features(adapted, pretrained)
        self.finalize()
        assert self._stacked is not None
        scores = np.asarray(_closeness(jnp.asarray(features), self._stacked, self.metric))
        return self._seen.scores(scores)

    @property
    def storage_bytes(self) -> int:
        """One float32 vector per class."""
        return BYTES * self._seen.num_classes * self._seen.width


class NearestMeanOfExemplars(NearestClassMean):
    """Score of class c: -|g/|g| - p_c|^2 with p_c the normalised mean of normalised features.

    The classifier of iCaRL (Rebuffi et al., 2017) with all training images as exemplars; the same
    ranking as the class-level affinity of PAC (paper, Eq. par) without its standardisation.

    Args:
        view: "adapted" or "pretrained".
    """

    name = "nme"

    def __init__(self, view: str = "adapted"):
        super().__init__(view, "cosine")

    def _task_prototypes(self, samples: TaskSamples) -> Float[np.ndarray, "c d"]:
        wide = samples.features.astype(np.float64)
        norms = np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), NORM_FLOOR)
        means = class_means(samples._replace(features=wide / norms))
        return means / np.maximum(np.linalg.norm(means, axis=1, keepdims=True), NORM_FLOOR)

    def score(self, adapted: object, pretrained: object = None) -> Scores:
        """Scores a batch [n, d] of the method's view."""
        scores = super().score(adapted, pretrained)
        # |a - b|^2 = 2 - 2 cos(a, b) for unit vectors.
        return Scores(2.0 * scores.task_scores - 2.0, scores.local_class, scores.classes)


@partial(jax.jit, static_argnames="metric")
def _closeness(
    features: Float[Array, "n d"], prototypes: Float[Array, "classes d"], metric: str
) -> Float[Array, "n classes"]:
    highest = jax.lax.Precision.HIGHEST
    if metric == "cosine":
        closeness = jnp.matmul(unit(features), unit(prototypes).T, precision=highest)
    else:
        # Distances relative to a point amid the prototypes, so that squares cancel little.
        centre = jnp.nanmean(prototypes, axis=0)
        near, rows = features - centre, prototypes - centre
        cross = jnp.matmul(near, rows.T, precision=highest)
        squares = jnp.sum(near * near, axis=1)[:, None] + jnp.sum(rows * rows, axis=1)
        closeness = 2.0 * cross - squares
    return jnp.where(jnp.isnan(prototypes[:, 0]), -jnp.inf, closeness)
