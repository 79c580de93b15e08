"""The base of comparators.

A method implements `_collect`, which returns a task's statistics, and `_class_scores` or, for
routers that keep the heads' classes, `_adjust` and `_task_score`. Moments are float64 on the host;
products over samples are float32.
"""

import copy
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int

from fdc_jax.calibration import inputs
from fdc_jax.calibration.calibrator import Calibrator
from fdc_jax.calibration.shapes import row_slices
from fdc_jax.errors import InputError
from fdc_jax.heads import LinearHead


class Comparator(Calibrator):
    """A calibrator that reads one view, "adapted" or "pretrained"; other names raise InputError.

    Attributes:
        statistics: results of `_collect`, by task.
        total: a sum over all tasks. The numbers of both count as storage.
    """

    needs_linear: bool = False  # heads are `LinearHead`s

    def __init__(self, view: str = "adapted"):
        super().__init__()
        if view not in inputs.VIEWS:
            expected = " or ".join(inputs.VIEWS)
            raise InputError(f"{self.name}: view: expected {expected}, found {view!r}")
        self.view = view
        self.statistics: list[Any] = []
        self.total: Any = None

    def __copy__(self) -> Any:
        # Fitting adds to totals in place.
        return copy.deepcopy(self)

    def _fit(self, given: inputs.TaskInput) -> None:
        index = inputs.VIEWS.index(self.view)
        if index >= len(given.views):
            raise inputs.missing("pretrained features", given.task, self.name)
        features = inputs.float32(given.views[index])
        # Rows of `_collect` number the classes that have samples.
        _, rows = np.unique(given.rows, return_inverse=True)
        self.statistics = [*self.statistics, self._collect(features, rows, given.head)]
        self._append(given)

    def finalize(self, release: bool = False) -> None:
        """See `Calibrator.finalize`."""
        if self.classes:
            _ = self._solved

    def class_scores(self, adapted: Any, pretrained: Any = None) -> Float[np.ndarray, "n classes"]:
        """See `Calibrator.class_scores`; minus infinity for classes without a sample."""
        by_class = self._class_scores(self._features(adapted, pretrained))
        scores = np.full((len(by_class), sum(map(len, self.classes))), -np.inf, by_class.dtype)
        scores[:, np.concatenate(self.counts) > 0] = by_class
        return scores

    @property
    def storage_bytes(self) -> int:
        """Returns the bytes of the statistics, all in float32, without encoder and heads."""
        return 4 * sum(np.size(part) for part in jax.tree.leaves((self.statistics, self.total)))

    def _collect(
        self, features: Float[np.ndarray, "n d"], rows: Int[np.ndarray, " n"], head: Any
    ) -> Any:
        """Returns a task's statistics; `rows` number the classes that have samples."""

    @cached_property
    def _solved(self) -> Any:
        """Returns the statistics of all tasks for scoring."""

    def _class_scores(self, features: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n classes"]:
        """Returns a score for each class that has samples, tasks in order."""
        raise NotImplementedError

    def _features(self, adapted: Any, pretrained: Any) -> Float[np.ndarray, "n d"]:
        """Returns the features of the method's view."""
        if not self.classes:
            raise InputError(f"{self.name}: expected at least one fitted task before scoring")
        index = inputs.VIEWS.index(self.view)
        value = (adapted, pretrained)[index]
        name = f"{self.view} features"
        if value is None:
            raise InputError(f"{self.name}: {name}: expected, as the method reads them")
        return inputs.float32(inputs.feature_array(value, name, self.widths[index]))

    def _head(self, head: Any, task: int, width: int, first: Any = None) -> Any:
        checked = super()._head(head, task, width, first)
        if self.needs_linear and not isinstance(checked, LinearHead):
            name = inputs.input_name("head", task)
            kind = f"found a {type(head).__name__}"
            raise inputs.NotApplicable(f"{name}: {self.name} needs linear heads, {kind}")
        return checked


def within_classes(
    features: Float[np.ndarray, "n d"], rows: Int[np.ndarray, " n"]
) -> tuple[Float[np.ndarray, "c d"], Float[np.ndarray, "d d"]]:
    """Returns means of classes and the scatter about them, in float64."""
    means = class_means(features, rows)
    scatter = np.zeros((features.shape[1],) * 2)
    for block in row_slices(len(rows), inputs.BLOCK_ROWS):
        deviations = features[block] - means.astype(features.dtype)[rows[block]]
        scatter += deviations.T @ deviations
    return means, scatter


def class_means(
    features: Float[np.ndarray, "n d"], rows: Int[np.ndarray, " n"]
) -> Float[np.ndarray, "c d"]:
    """Returns means of classes in float64."""
    counts = np.bincount(rows)
    totals = [features[rows == c].sum(axis=0, dtype=np.float64) for c in range(len(counts))]
    return np.stack(totals) / counts[:, None]
