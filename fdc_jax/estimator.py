"""Calibrators as estimators of scikit-learn.

A task is one call of `partial_fit`, or the samples of one value of `tasks` in `fit`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Shaped
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets, unique_labels
from sklearn.utils.validation import (
    check_consistent_length,
    check_is_fitted,
    column_or_1d,
    validate_data,
)

from fdc_jax import calibration
from fdc_jax.calibration.comparators import base, random_features
from fdc_jax.calibration.inputs import refuse_masked
from fdc_jax.errors import InputError, did_you_mean
from fdc_jax.heads import Head, LinearHead, NearestMeanHead

HEADS = ("ridge", "nearest_mean")


class ContinualClassifier(ClassifierMixin, BaseEstimator):
    """Classifies features among the classes of all tasks with a calibrator.

    Features X are an array [n, d]; if X has two views of the same samples side by side, `views`
    selects their columns.

    Args:
        calibrator: a name of `calibration.METHODS`, such as `gaussians`, `fdc` or a comparator.
        head: kind of head for tasks that come without one, if the calibrator needs heads: `ridge`,
            regression to one-hot labels with a penalty chosen on a fifth of the samples, or
            `nearest_mean`, the cosine to class means.
        views: columns of the adapted and of the pretrained features, such as
            `(slice(0, 768), slice(768, None))`; None for one view.
        settings: settings of the calibrator, such as `{"pac_weight": 0.5}`; None for its defaults.
            FDC's are the fields of `calibration.Settings`.

    Attributes:
        classes_: labels of all tasks so far, ascending.
        class_tasks_: task of every label in `classes_`, counted from 0.
        calibrator_: the `Calibrator`, whose labels number the classes in the order of arrival.
        n_features_in_: number of columns of X, both views together.
        feature_names_in_: names of the columns if X is a data frame.
    """

    def __init__(
        self,
        calibrator: str = calibration.Gaussians.name,
        head: str = "ridge",
        views: tuple[Any, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
    ):
        self.calibrator = calibrator
        self.head = head
        self.views = views
        self.settings = settings

    def fit(self, X: Any, y: Any, tasks: Any = None) -> ContinualClassifier:
        """Fits features of one encoder, task by task; earlier tasks are discarded.

        Args:
            X: features of the samples of all tasks.
            y: labels [n], numbers or strings.
            tasks: task of every sample [n]; tasks come in ascending order. By default all classes
                are one task, in which only TSF of FDC has an effect.
        """
        X, y = self._validated(True, X, y)
        refuse_masked(tasks, "tasks")
        tasks = np.zeros(len(y), int) if tasks is None else np.array(column_or_1d(tasks).tolist())
        check_consistent_length(X, y, tasks)
        if tasks.dtype.kind == "O" or (tasks != tasks).any():
            raise InputError("tasks: expected a number or a text for each sample, found others")
        calibrator, labels = self._new()
        for task in np.unique(tasks):
            rows = tasks == task
            previous = self._split(X[rows])[0]  # The encoder does not move between tasks.
            labels = self._fit_task(calibrator, labels, X[rows], y[rows], previous=previous)
        return self._keep(calibrator, labels)

    def partial_fit(
        self, X: Any, y: Any, classes: Any = None, head: Head | None = None, previous: Any = None
    ) -> ContinualClassifier:
        """Fits one more task, whose classes are new; earlier tasks are not fitted again.

        Args:
            X: features of the task's samples by the encoder after the task.
            y: labels of the task's samples [n].
            classes: label of every row of `head`; by default the labels in y, ascending. In other
                estimators of scikit-learn they are the classes of all tasks.
            head: head of the task, such as `fdc_jax.heads.LinearHead(weight, bias)`, of the same
                type for all tasks; by default a head in closed form.
            previous: adapted features of the same samples by the encoder before the task [n, d],
                for all tasks from the second on (drift compensation of class Gaussians); those of
                X if the encoder does not move.

        Raises:
            ValueError: the input is malformed, unlike earlier tasks, or has a class of an earlier
                task; the estimator has not changed.
        """
        first = not hasattr(self, "calibrator_")
        X, y = self._validated(first, X, y)
        calibrator, labels = self._new() if first else (self.calibrator_, self._labels)
        labels = self._fit_task(calibrator, labels, X, y, classes, head, previous)
        return self._keep(calibrator, labels)

    def predict(self, X: Any) -> Shaped[np.ndarray, " n"]:
        """Returns the label of every sample among all classes [n]."""
        calibrator, views = self._fitted(X)
        return self._labels[calibrator.score(*views).label]

    def predict_task(self, X: Any) -> Int[np.ndarray, " n"]:
        """Returns the task of every predicted label, counted from 0 [n]."""
        calibrator, views = self._fitted(X)
        return calibrator.score(*views).task

    def decision_function(self, X: Any) -> Float[np.ndarray, "n ..."]:
        """Returns calibrated scores, [n, classes] with columns as `classes_`; the largest decides.

        For two classes it returns one number per sample [n], above 0 for the second class.
        """
        calibrator, views = self._fitted(X)
        scores = calibrator.class_scores(*views)[:, np.argsort(self._labels)]
        return scores[:, 1] - scores[:, 0] if scores.shape[1] == 2 else scores

    @available_if(lambda self: calibration.find(self.calibrator).gives_confidence)
    def predict_proba(self, X: Any) -> Float[np.ndarray, "n classes"]:
        """Returns the probability of every class, [n, classes] with columns as `classes_`.

        Only class Gaussians have probabilities, from held-out images (`calibration.confidence`).
        """
        calibrator, views = self._fitted(X)
        return calibrator.assess(*views)[0][:, np.argsort(self._labels)]

    # Samples -------------------------------------------------------------------------------------

    def _validated(self, reset: bool, X: Any, *y: Any) -> Any:
        """Returns X in float32, and y if present."""
        for values, name in zip((X, *y), "Xy", strict=False):
            refuse_masked(values, name)
        with np.errstate(over="ignore"):  # Numbers too large for float32 are an error below.
            checked: Any = validate_data(self, X, *y, reset=reset, dtype=np.float32)
        if y:
            check_classification_targets(checked[1])
        return checked

    def _split(self, X: Float[np.ndarray, "n d"]) -> list[Float[np.ndarray, "n _"]]:
        """Returns one or two views of X."""
        if self.views is None:
            return [X]
        try:
            views = [X[:, columns] for columns in self.views]
            if [view.ndim for view in views] in ([2], [2, 2]):
                return views
            reason = "they do not select columns of one or two views"
        except (IndexError, TypeError) as error:
            reason = str(error)
        raise InputError(f"views: expected such as (slice(0, 3), slice(3, 6)): {reason}")

    def _fitted(self, X: Any) -> tuple[Any, list[Float[np.ndarray, "n _"]]]:
        """Returns the fitted calibrator and the views of X."""
        check_is_fitted(self, "calibrator_")
        return self.calibrator_, self._split(self._validated(False, X))

    # Tasks ---------------------------------------------------------------------------------------

    def _new(self) -> tuple[calibration.Calibrator, Shaped[np.ndarray, " 0"]]:
        """Returns a calibrator before its first task, and no labels."""
        if self.head not in HEADS:
            raise InputError(did_you_mean("head", self.head, HEADS))
        settings, accepted = self.settings or {}, calibration.find(self.calibrator).settings
        for name in settings.keys() - {*accepted}:
            if not accepted:
                raise InputError(f"settings: {self.calibrator} has none, found {name}")
            raise InputError(did_you_mean(f"setting of {self.calibrator}", name, accepted))
        return calibration.make(self.calibrator, **settings), np.array([], int)

    def _fit_task(
        self,
        calibrator: calibration.Calibrator,
        labels: Shaped[np.ndarray, " known"],
        X: Float[np.ndarray, "n d"],
        y: Shaped[np.ndarray, " n"],
        classes: Any = None,
        head: Head | None = None,
        previous: Any = None,
    ) -> Shaped[np.ndarray, " more"]:
        """Fits a task and returns the labels of all classes in the order of arrival."""
        refuse_masked(classes, "classes")
        names = np.unique(y) if classes is None else column_or_1d(classes)
        dtype = (unique_labels(labels, names) if len(labels) else names).dtype
        if len(np.unique(names)) < len(names):
            raise InputError(f"classes: expected each label once, found {names.tolist()}")
        if (repeated := np.isin(names, labels)).any():
            label = names[repeated].tolist()[0]
            raise InputError(
                f"y: class {label!r} belongs to an earlier task, and those of a task must be new; "
                "fit discards earlier tasks"
            )
        if not (has_class := np.isin(y, names)).all():
            raise InputError(f"y: {y[~has_class].tolist()[0]!r} is not in classes")
        order = np.argsort(names)
        rows = order[np.searchsorted(names[order], y)]
        adapted, *pretrained = self._split(X)
        if head is None and calibrator.needs_heads:
            if len(np.unique(rows)) < len(names):
                raise InputError("classes: expected a sample of every class, as no head is given")
            if len(names) == 1 and self.head == "ridge":
                raise InputError(
                    "head: ridge cannot fit a task of one class; expected nearest_mean"
                )
            head = closed_form_head(self.head, adapted, rows)
        ids = np.arange(len(labels), len(labels) + len(names))
        calibrator.fit_task(adapted, ids[rows], head, *pretrained, classes=ids, previous=previous)
        return np.concatenate([labels.astype(dtype), names.astype(dtype)])

    def _keep(
        self, calibrator: calibration.Calibrator, labels: Shaped[np.ndarray, " c"]
    ) -> ContinualClassifier:
        """Returns the estimator, in which a calibrator is finalized and stored."""
        calibrator.finalize()
        order = np.argsort(labels)
        tasks = np.repeat(range(calibrator.num_tasks), [*map(len, calibrator.classes)])
        self.calibrator_ = calibrator
        self._labels = labels
        self.classes_ = labels[order]
        self.class_tasks_ = tasks[order]
        return self


class FDCClassifier(ContinualClassifier):
    """A `ContinualClassifier` with the paper's FDC by default."""

    def __init__(
        self,
        calibrator: str = calibration.FDC.name,
        head: str = "ridge",
        views: tuple[Any, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
    ):
        super().__init__(calibrator, head, views, settings)


def closed_form_head(
    kind: str, features: Float[np.ndarray, "n d"], rows: Int[np.ndarray, " n"]
) -> LinearHead | NearestMeanHead:
    """Returns a head of a kind in `HEADS` from the row of every sample; ridge as in RanPAC."""
    if kind == "nearest_mean":
        return NearestMeanHead(base.class_means(features, rows).astype(np.float32))
    inputs = np.column_stack([features, np.ones(len(features))]).astype(np.float64)
    order = np.random.default_rng(0).permutation(len(rows))
    targets = np.eye(rows.max() + 1)[rows]
    penalty = random_features.chosen_ridge(inputs[order], targets[order], 1.0)
    solved = random_features.solve_ridge(inputs.T @ inputs, penalty, inputs.T @ targets)
    weight = solved.T.astype(np.float32)
    return LinearHead(weight[:, :-1], weight[:, -1])
