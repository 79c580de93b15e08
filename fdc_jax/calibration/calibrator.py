"""The interface and the scores that FDC, the class Gaussians and all comparators share."""

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float, Int

from fdc_jax.calibration import checks, inputs, storage
from fdc_jax.errors import InputError
from fdc_jax.heads import as_head

_LOGGER = logging.getLogger("fdc_jax.calibration")

# Samples of a task that measure the accuracy of its head, and reasons for features of a user.
SAMPLES = 1000
DOUBTS = (
    "; or its rows are in another order than the labels, ascending or as classes names them; or "
    "features are of a loader that shuffles, so that labels are of other images"
)


@dataclass(frozen=True)
class Scores:
    """Scores of a batch. The task with the largest one predicts by its head."""

    task_scores: Float[np.ndarray, "n tasks"]  # comparable across tasks
    local_class: Int[np.ndarray, "n tasks"]  # row of each task's head that the task predicts
    classes: Sequence[Int[np.ndarray, " c"]]  # labels of each task's head rows, in row order

    @property
    def task(self) -> Int[np.ndarray, " n"]:
        """Returns the chosen task of each sample, counted from 0 (Algorithm 1, line 20)."""
        return np.argmax(self.task_scores, axis=1)

    @property
    def label(self) -> Int[np.ndarray, " n"]:
        """Returns the predicted label of each sample."""
        return self.label_in_task(self.task)

    def label_in_task(self, task: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        """Returns the label of each sample that its true `task` predicts (paper, Given Task ID)."""
        task = np.asarray(task)
        first = np.cumsum([0, *map(len, self.classes)])
        local = self.local_class[np.arange(len(task)), task]
        return np.concatenate(self.classes)[first[task] + local]


def best_by_task(
    scores: Float[np.ndarray, "n classes"], classes: Sequence[Int[np.ndarray, " c"]]
) -> Scores:
    """Returns the largest score within each task as its score, from scores of all classes."""
    parts = np.split(scores, np.cumsum([*map(len, classes)])[:-1], axis=1)
    best = np.stack([part.max(axis=1) for part in parts], axis=1)
    rows = np.stack([part.argmax(axis=1) for part in parts], axis=1)
    return Scores(best, rows.astype(np.int32), classes)


def within_tasks(
    task_scores: Float[np.ndarray, "n tasks"], logits: Sequence[Float[np.ndarray, "n c"]]
) -> Float[np.ndarray, "n classes"]:
    """Returns the score of each task less its largest logit, plus the class's own logit."""
    pairs = zip(task_scores.T, logits, strict=True)
    parts = [z - z.max(axis=1, keepdims=True) + score[:, None] for score, z in pairs]
    return np.concatenate(parts, axis=1)


class Calibrator:
    """A method that chooses the task of an input after training, from statistics of features.

    Call `fit_task` after each task is learned, then `finalize`, then `score`; more tasks may follow
    with `fit_task` and `finalize` again. Calibrators can be copied, pickled and saved between any
    two calls. A method writes `_fit` and either `class_scores` or `score`. Cached properties have
    names with a leading underscore, and are computed again after a change.

    Attributes:
        classes: labels of each task's head rows, in row order.
        counts: training samples of each class, by task.
        heads: the heads that predict, by task, or None.
        widths: feature width of each view, adapted first; empty before the first task.
        doubts: other reasons for a head like chance, in its warning; None once it was given.
    """

    name: ClassVar[str]
    needs_heads: ClassVar[bool] = False  # every task needs a head
    checks_finite: ClassVar[bool] = False  # the method checks features on devices as it computes
    reads_previous: ClassVar[bool] = False  # `fit_task` reads E_{t-1}(D_t)

    def __init__(self) -> None:
        self.classes: list[Int[np.ndarray, " c"]] = []
        self.counts: list[Int[np.ndarray, " c"]] = []
        self.heads: list[Any] = []
        self.widths: list[int] = []
        self.doubts: str | None = DOUBTS

    @property
    def num_tasks(self) -> int:
        """Returns the number of tasks fitted so far."""
        return len(self.classes)

    def fit_task(
        self,
        adapted: Any,
        labels: Any,
        head: Any = None,
        pretrained: Any = None,
        classes: Any = None,
        previous: Any = None,
    ) -> None:
        """Collects the statistics of the next task.

        Args:
            adapted: features E_t(D_t), [n, d], as an array of NumPy, JAX or any library that offers
                `__array__` or `__dlpack__`; memory maps are read block by block.
            labels: integers [n].
            head: the task's head (`fdc_jax.heads`, or a linear layer of PyTorch or Flax), of the
                same kind for all tasks; None for calibrators that need none.
            pretrained: features E_0(D_t), [n, e], for all tasks or for none.
            classes: label of each head row [c]; by default the labels in ascending order. Only
                named classes may have no sample; statistics then never predict them.
            previous: features E_{t-1}(D_t), [n, d], of the same samples in the same order, from
                the second task on. Class Gaussians alone read them.

        Raises:
            InputError: the input is malformed or unlike earlier tasks; nothing has changed.
        """
        task = self.num_tasks
        wait = not self.checks_finite
        views, labels = inputs.task_views(adapted, labels, pretrained, task, self.widths, wait)
        head = self._head(head, task, views[0].shape[1])
        count = None if head is None else len(head.affine.rows)
        named, rows = inputs.task_classes(labels, task, count, classes, self.classes)
        names = [inputs.input_name(f"{view} features", task) for view in inputs.VIEWS]
        checks.warn_of_rows(dict(zip(names, views, strict=False)), rows)
        counts = np.bincount(rows, minlength=len(named))
        self._fit(inputs.TaskInput(task, views, rows, named, counts, head, previous))

    def _fit(self, given: inputs.TaskInput) -> None:
        """Computes the statistics of a task, and calls `_append`; see `fit_task`."""
        raise NotImplementedError

    def finalize(self, release: bool = False) -> None:
        """Computes the statistics over all tasks that scoring needs.

        Args:
            release: discard statistics that only further tasks need; none can be fitted then.
        """

    def score(self, adapted: Any, pretrained: Any = None) -> Scores:
        """Returns the calibrated scores of a batch; by default the best class decides.

        Args:
            adapted: final features E_T(x), [n, d].
            pretrained: features E_0(x), [n, e].

        Raises:
            InputError: no task was fitted or finalized, or the features have other widths.
        """
        return best_by_task(self.class_scores(adapted, pretrained), self.classes)

    def components(self, adapted: Any, pretrained: Any = None) -> dict[str, Scores]:
        """Returns scores by name of a combination of components; `full` is that of `score`."""
        return {"full": self.score(adapted, pretrained)}

    def class_scores(self, adapted: Any, pretrained: Any = None) -> Float[np.ndarray, "n classes"]:
        """Returns a score of every class; the largest one decides. Arguments: see `score`.

        Column i is the class of label `np.concatenate(classes)[i]`.
        """
        raise NotImplementedError

    def replace_heads(self, heads: Sequence[Any]) -> None:
        """Replaces the heads that predict, for learners that rewrite old heads.

        The statistics stay those of the heads given to `fit_task`.

        Raises:
            InputError: not one head per task, or `fit_task` would raise it for a head.
        """
        if not isinstance(heads, Iterable):
            kind = type(heads).__name__
            raise InputError(f"heads: expected one per task, {self.num_tasks}, found {kind}")
        heads = list(heads)
        if len(heads) != self.num_tasks:
            raise InputError(f"heads: expected one per task, {self.num_tasks}, found {len(heads)}")
        checked = [self._head(head, t, self.widths[0], heads[0]) for t, head in enumerate(heads)]
        for task, (head, classes) in enumerate(zip(checked, self.classes, strict=True)):
            if head is not None and (rows := len(head.affine.rows)) != len(classes):
                name = inputs.input_name("final head", task)
                raise InputError(f"{name}: expected {len(classes)} classes, found {rows}")
        self.heads = checked
        self._forget()

    @property
    def storage_bytes(self) -> int:
        """Returns the bytes of the statistics that `score` reads, without encoder and heads."""
        raise NotImplementedError

    @property
    def note(self) -> str:
        """A line for users about the result, or ""."""
        return ""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the calibrator to an `.npz` file, whole or not at all, for `calibration.load`."""
        storage.write(path, self)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def _forget(self) -> None:
        """Drops the values of cached properties."""
        for name in [name for name in vars(self) if name.startswith("_")]:
            delattr(self, name)

    def unit_means(self) -> Sequence[Float[np.ndarray, "c d"]]:
        """Returns means of classes at unit length, by view; empty if the method has none."""
        return ()

    def _batch(
        self, adapted: Any, pretrained: Any, needs_pretrained: bool, wait: bool = True
    ) -> list[Any]:
        """Returns the checked features of a batch by view; warns once if views are swapped.

        The first, second, fourth, eighth ... batches are compared. `wait`: see
        `inputs.feature_array`.
        """
        views = inputs.score_views(adapted, pretrained, self.widths, needs_pretrained, wait)
        self._batches = getattr(self, "_batches", 0) + 1
        compared = self._batches.bit_count() == 1 and "_swapped" not in vars(self)
        if compared and checks.warn_of_swapped(views, self.unit_means):
            self._swapped = True
        return views

    def _head(self, head: Any, task: int, width: int, first: Any = None) -> Any:
        """Returns a checked head with float32 arrays, or None.

        Of several heads that replace others, `first` is the first one.
        """
        head = as_head(head)
        part = "head" if first is None else "final head"
        if head is None:
            if self.needs_heads:
                raise inputs.missing(part, task, self.name)
            return None
        known = [other for other in (as_head(first), *self.heads, head) if other is not None]
        return inputs.checked_head(head, part, task, width, known[0])

    def _append(
        self, given: inputs.TaskInput, predicted: Int[np.ndarray, " n"] | None = None
    ) -> None:
        """Adds a task to the attributes; `predicted` are the rows that its head predicts."""
        self.classes = [*self.classes, given.classes]
        self.counts = [*self.counts, given.counts]
        self.heads = [*self.heads, given.head]
        self.widths = [view.shape[1] for view in given.views]
        self._forget()
        reads = self.needs_heads and self.doubts is not None
        if reads and (warning := weak_head(given, predicted)):
            _LOGGER.warning("%s%s. Heads of further tasks are not named", warning, self.doubts)
            self.doubts = None


def weak_head(given: inputs.TaskInput, predicted: Int[np.ndarray, " n"] | None) -> str:
    """Returns a warning if a head of c classes is right on its own task nearly by chance, or "".

    The least accuracy is 3 / c, three times chance; with fewer than five classes (1 + 1 / c) / 2,
    half way from chance to certainty.
    """
    count = len(given.classes)
    rows = given.rows
    if predicted is None:
        some = inputs.evenly_spaced(np.arange(len(rows)), SAMPLES)
        predicted = given.head.logits(inputs.float32(given.views[0][some])).argmax(axis=1)
        rows = rows[some]
    accuracy = float(np.mean(predicted == rows))
    if count == 1 or accuracy >= min(3.0 / count, (1.0 + 1.0 / count) / 2.0):
        return ""
    name = inputs.input_name("head", given.task)
    text = f"{name}: accuracy {100 * accuracy:.1f}% on the task's own training samples"
    return f"{text} (chance {100 / count:.1f}%). It was hardly trained"
