"""Calibrators as estimators of scikit-learn.

A task is one call of `partial_fit`, or the samples of one value of `tasks` in `fit`. This is the
only file of the package that imports scikit-learn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets, unique_labels
from sklearn.utils.validation import (
    check_array,
    check_consistent_length,
    check_is_fitted,
    column_or_1d,
    validate_data,
)

from fdc_jax import calibration
from fdc_jax.calibration.comparators import base, random_features
from fdc_jax.errors import InputError, did_you_mean
from fdc_jax.heads import LinearHead, NearestMeanHead

if TYPE_CHECKING:
    from jaxtyping import Float, Int, Shaped

    from fdc_jax.heads import Head

HEADS = ("ridge", "nearest_mean")


class ContinualClassifier(ClassifierMixin, BaseEstimator):
    """Classifies features among the classes of all tasks, with calibrated task heads.

    Features X are rows, [n, d], or two views of the same samples: a tuple (adapted [n, d],
    pretrained [n, e]), or columns of one array that `views` picks.

    Args:
        calibrator: a name of `calibration.METHODS`: `gaussians`, the default; `fdc`, the paper's,
            that of `FDCClassifier`; or a comparator.
        head: of tasks that come without one, where the calibrator needs heads: `ridge`, regression
            to one-hot labels whose penalty is chosen on a fifth of the samples, or `nearest_mean`,
            the cosine to class means.
        views: the columns of X with the adapted and with the pretrained features, such as
            `(slice(0, 768), slice(768, None))`; None for one view, or for two as a tuple.
        settings: of the calibrator, such as `{"pac_weight": 0.5}`; those of FDC are the fields of
            `calibration.Settings`. None for its defaults.

    Attributes:
        classes_: labels of all tasks so far, ascending.
        class_tasks_: the task of each, counted from 0.
        calibrator_: a `Calibrator`, in which a class goes by its place in the order of arrival.
        n_features_in_: columns of X, those of both views together.
        feature_names_in_: where X is a data frame.
    """

    def __init__(
        self,
        calibrator: str = "gaussians",
        head: str = "ridge",
        views: tuple[Any, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
    ):
        self.calibrator = calibrator
        self.head = head
        self.views = views
        self.settings = settings

    def fit(self, X: Any, y: Any, tasks: Any = None) -> ContinualClassifier:
        """Forgets everything and fits features of one encoder.

        Args:
            X: features of the samples of all tasks.
            y: labels [n], numbers or strings.
            tasks: the task of each sample [n], in the order of their values. By default one task
                has all classes; of FDC, TSF alone changes its head then.

        Raises:
            ValueError: as of `partial_fit`.
        """
        X, y = self._validated(True, X, y)
        tasks = np.zeros(len(y), int) if tasks is None else column_or_1d(tasks)
        check_consistent_length(X, y, tasks)
        if tasks.dtype.kind == "O":  # as words in a column of pandas
            tasks = np.array(tasks.tolist())
        if tasks.dtype.kind == "O" or (tasks != tasks).any():
            raise InputError("tasks: expected a number or a word for each sample, found others")
        calibrator, labels = self._new()
        for task in np.unique(tasks):
            rows = tasks == task
            of_task = X[rows]
            # The encoder has not moved since the task before.
            previous = self._split(of_task)[0]
            labels = self._fit_task(calibrator, labels, of_task, y[rows], previous=previous)
        return self._keep(calibrator, labels)

    def partial_fit(
        self, X: Any, y: Any, classes: Any = None, head: Head | None = None, previous: Any = None
    ) -> ContinualClassifier:
        """Fits one more task, whose classes are new. Nothing is fitted again.

        Args:
            X: features of the task's samples, by the encoder after the task.
            y: their labels [n].
            classes: the label of each row of `head`; by default those in y, ascending. Unlike
                elsewhere in scikit-learn, these are the classes of this task alone.
            head: of the task, such as `fdc_jax.heads.LinearHead(weight, bias)`, of one type for all
                tasks; by default one in closed form.
            previous: adapted features of the same samples by the encoder before the task [n, d],
                those of X itself where it does not move; given for all tasks from the second on,
                the class Gaussians follow the encoder.

        Raises:
            ValueError: input that is malformed, unlike that of earlier tasks, or of a class that an
                earlier task has; what was fitted before stays as it was.
        """
        first = not hasattr(self, "calibrator_")
        X, y = self._validated(first, X, y)
        calibrator, labels = self._new() if first else (self.calibrator_, self._labels)
        labels = self._fit_task(calibrator, labels, X, y, classes, head, previous)
        return self._keep(calibrator, labels)

    def predict(self, X: Any) -> Shaped[np.ndarray, " n"]:
        """Returns the label of each sample among all classes [n]."""
        views = self._test_views(X)
        return self._labels[self.calibrator_.score(*views).label]

    def predict_task(self, X: Any) -> Int[np.ndarray, " n"]:
        """Returns the task of the label that `predict` returns, counted from 0 [n]."""
        views = self._test_views(X)
        return self.calibrator_.score(*views).task

    def decision_function(self, X: Any) -> Float[np.ndarray, "n ..."]:
        """Returns calibrated scores of all classes, [n, classes], of which the largest decides.

        Columns are those of `classes_`. Of two classes, as elsewhere in scikit-learn, one number
        per sample [n], above 0 for the second.
        """
        views = self._test_views(X)
        scores = self.calibrator_.class_scores(*views)[:, np.argsort(self._labels)]
        return scores[:, 1] - scores[:, 0] if scores.shape[1] == 2 else scores

    @available_if(lambda self: self.calibrator == "gaussians")
    def predict_proba(self, X: Any) -> Float[np.ndarray, "n classes"]:
        """Returns the probability of every class [n, classes], columns as `classes_`.

        Class Gaussians alone have it, from images that were left out (`calibration.confidence`).
        """
        views = self._test_views(X)
        calibrator: Any = self.calibrator_
        return calibrator.probabilities(*views)[:, np.argsort(self._labels)]

    # Samples -------------------------------------------------------------------------------------

    def _validated(self, reset: bool, X: Any, *y: Any) -> Any:
        """Returns X in float32, two views side by side, and y if there is one."""
        joined: Any = X
        widths = None
        if isinstance(X, tuple) and len(X) == 2 and np.ndim(X[0]) == 2:
            if self.views is not None:
                raise InputError("X: expected one array, of which views picks columns; found two")
            views = [np.asarray(check_array(view, estimator=self)) for view in X]
            check_consistent_length(*views)
            joined, widths = np.hstack(views), [view.shape[1] for view in views]
        with np.errstate(over="ignore"):  # What is too large for float32 is reported.
            checked: Any = validate_data(self, joined, *y, reset=reset, dtype=np.float32)
        if reset:
            self._widths = widths
        elif widths not in (None, self._widths):
            raise InputError(f"X: expected views as when fitted, {self._widths}, found {widths}")
        if y:
            check_classification_targets(checked[1])
        return checked

    def _split(self, X: Float[np.ndarray, "n d"]) -> list[Float[np.ndarray, "n _"]]:
        """Returns the views of X, one or two."""
        if self.views is not None:
            try:
                views = [X[:, columns] for columns in self.views]
                if [each.ndim for each in views] in ([2], [2, 2]):
                    return views
                reason = "they do not pick columns of one or two views"
            except (IndexError, TypeError) as error:
                reason = str(error)
            raise InputError(f"views: expected such as (slice(0, 3), slice(3, 6)): {reason}")
        return [X] if self._widths is None else np.split(X, self._widths[:1], axis=1)

    def _test_views(self, X: Any) -> list[Float[np.ndarray, "n _"]]:
        check_is_fitted(self, "calibrator_")
        return self._split(self._validated(False, X))

    # Tasks ---------------------------------------------------------------------------------------

    def _new(self) -> tuple[calibration.Calibrator, Shaped[np.ndarray, " 0"]]:
        """Returns a calibrator before its first task, and no labels."""
        if self.head not in HEADS:
            raise InputError(did_you_mean("head", self.head, HEADS))
        settings, known = self.settings or {}, calibration.find(self.calibrator).settings
        for name in settings:
            if not known:
                raise InputError(f"settings: {self.calibrator} has none, found {name}")
            if name not in known:
                raise InputError(did_you_mean(f"setting of {self.calibrator}", name, known))
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
        """Fits a task and returns the labels of all classes, in the order of arrival."""
        names = np.unique(y) if classes is None else column_or_1d(classes)
        every = unique_labels(labels, names) if len(labels) else names
        if len(np.unique(names)) < len(names):
            raise InputError(f"classes: expected each label once, found {names.tolist()}")
        if (known := np.isin(names, labels)).any():
            raise InputError(
                f"y: class {names[known].tolist()[0]!r} belongs to an earlier task; a task's "
                "classes must be new, and fit starts anew"
            )
        if not (within := np.isin(y, names)).all():
            raise InputError(f"y: {y[~within].tolist()[0]!r} is none of classes")
        order = np.argsort(names)
        rows = order[np.searchsorted(names[order], y)]
        adapted, *pretrained = self._split(X)
        if head is None and calibrator.needs_heads:
            if len(np.unique(rows)) < len(names):
                raise InputError("classes: each needs a sample where no head is given")
            if len(names) == 1 and self.head == "ridge":
                raise InputError(
                    "head: ridge cannot fit a task of one class; expected nearest_mean"
                )
            head = closed_form_head(self.head, adapted, rows)
        places = np.arange(len(labels), len(labels) + len(names))
        calibrator.fit_task(
            adapted, places[rows], head, *pretrained, classes=places, previous=previous
        )
        return np.concatenate([labels.astype(every.dtype), names.astype(every.dtype)])

    def _keep(
        self, calibrator: calibration.Calibrator, labels: Shaped[np.ndarray, " c"]
    ) -> ContinualClassifier:
        calibrator.finalize()
        order = np.argsort(labels)
        tasks = np.repeat(range(calibrator.num_tasks), [len(each) for each in calibrator.classes])
        self.calibrator_, self._labels = calibrator, labels
        self.classes_, self.class_tasks_ = labels[order], tasks[order]
        return self


class FDCClassifier(ContinualClassifier):
    """The same with the paper's FDC by default."""

    def __init__(
        self,
        calibrator: str = "fdc",
        head: str = "ridge",
        views: tuple[Any, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
    ):
        super().__init__(calibrator, head, views, settings)


def closed_form_head(
    kind: str, features: Float[np.ndarray, "n d"], rows: Int[np.ndarray, " n"]
) -> LinearHead | NearestMeanHead:
    """Returns a head of one of `HEADS`, fitted to features whose samples are of the given rows.

    The penalty of ridge regression is chosen as that of RanPAC, on a fifth of the samples.
    """
    if kind == "nearest_mean":
        return NearestMeanHead(base.class_means(features, rows).astype(np.float32))
    inputs = np.column_stack([features, np.ones(len(features))]).astype(np.float64)
    order, targets = np.random.default_rng(0).permutation(len(rows)), np.eye(rows.max() + 1)[rows]
    penalty = random_features.chosen_ridge(inputs[order], targets[order], 1.0)
    solved = random_features.solve_ridge(inputs.T @ inputs, penalty, inputs.T @ targets)
    weight = solved.T.astype(np.float32)
    return LinearHead(weight[:, :-1], weight[:, -1])
