"""What FDC, the class Gaussians and every comparator have in common: their interface and scores."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from fdc_jax.calibration import inputs, storage
from fdc_jax.errors import InputError

if TYPE_CHECKING:
    from jaxtyping import Float, Int


_LOGGER = logging.getLogger("fdc_jax.calibration")

# Samples of a task that tell whether its head knows them.
SAMPLES = 1000


@dataclass(frozen=True)
class Scores:
    """Scores of one batch; the best task decides, its local argmax names the class."""

    task_scores: Float[np.ndarray, "n tasks"]  # comparable across tasks
    local_class: Int[np.ndarray, "n tasks"]  # row of each task's head that it would predict
    classes: Sequence[Int[np.ndarray, " c"]]  # labels of each task's head rows, in row order

    @property
    def task(self) -> Int[np.ndarray, " n"]:
        """Returns the chosen task of each sample, counted from 0 (Algorithm 1, line 20)."""
        return np.argmax(self.task_scores, axis=1)

    @property
    def label(self) -> Int[np.ndarray, " n"]:
        """Returns the predicted label of each sample, as the labels were given."""
        return self.label_in_task(self.task)

    def label_in_task(self, task: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        """Returns the label that the given task of each sample predicts (Given Task ID)."""
        task = np.asarray(task)
        first = np.cumsum([0] + [len(rows) for rows in self.classes])
        local = self.local_class[np.arange(len(task)), task]
        return np.concatenate(self.classes)[first[task] + local]


def best_by_task(
    scores: Float[np.ndarray, "n classes"], classes: Sequence[Int[np.ndarray, " c"]]
) -> Scores:
    """Returns scores of tasks from those of all classes, task by task: the best class decides."""
    parts = np.split(scores, np.cumsum([len(rows) for rows in classes])[:-1], axis=1)
    return Scores(
        np.stack([part.max(axis=1) for part in parts], axis=1),
        np.stack([part.argmax(axis=1) for part in parts], axis=1).astype(np.int32),
        classes,
    )


class Calibrator:
    """Decides on the task of an input after training, from statistics of each task's features.

    Call `fit_task` after each task is learned, then `finalize`, then `score`; more tasks may follow
    with `fit_task` and `finalize` again. Calibrators can be copied, pickled and saved between any
    two calls, and go on as if they had not been.

    Cached properties have names with a leading underscore, and are derived again when needed.

    Attributes:
        classes: labels of each task's head rows, in row order.
        counts: training samples of each of these classes.
        heads: the heads to predict with, None if none was given.
        widths: feature width of each view that was given, adapted first; empty before any task.
        warned: whether a head that knows next to nothing of its task was named.
    """

    name: ClassVar[str]
    # Whether tasks need a head, and whether features by the encoder before each are of use.
    needs_heads: ClassVar[bool] = False
    reads_previous: ClassVar[bool] = False

    def __init__(self) -> None:
        self.classes: list[Int[np.ndarray, " c"]] = []
        self.counts: list[Int[np.ndarray, " c"]] = []
        self.heads: list[Any] = []
        self.widths: list[int] = []
        self.warned = False

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
            head: the task's head (`fdc_jax.heads`), of the same kind for all tasks; calibrators
                that read no head need none.
            pretrained: features E_0(D_t), [n, e]; given for all tasks or for none.
            classes: label of each head row. By default the distinct labels in ascending order. Only
                when named may a class have no sample; it is then never predicted from statistics.
            previous: features of the same samples by the encoder before the task, E_{t-1}(D_t),
                [n, d]; the class Gaussians alone read them, from the second task on.

        Raises:
            InputError: input that is malformed or unlike earlier tasks; nothing has changed then.
        """
        raise NotImplementedError

    def finalize(self, release: bool = False) -> None:
        """Computes what scoring needs of all tasks together. May be called again.

        Args:
            release: drop what only further tasks would need; none can be fitted then.
        """

    def score(self, adapted: Any, pretrained: Any = None) -> Scores:
        """Returns calibrated scores of a batch of any size; by default the best class decides.

        Args:
            adapted: final features E_T(x), [n, d].
            pretrained: features E_0(x), [n, e].

        Raises:
            InputError: nothing was fitted or finalized, or features of another shape than then.
        """
        return best_by_task(self.class_scores(adapted, pretrained), self.classes)

    def components(self, adapted: Any, pretrained: Any = None) -> dict[str, Scores]:
        """Returns the scores of every combination of components by name, `full` being `score`."""
        return {"full": self.score(adapted, pretrained)}

    def class_scores(self, adapted: Any, pretrained: Any = None) -> Float[np.ndarray, "n classes"]:
        """Returns a score of every class, tasks one after the other; the largest one decides.

        Column i is of label `np.concatenate(classes)[i]`; arguments and errors as of `score`.
        """
        raise NotImplementedError

    def replace_heads(self, heads: Sequence[Any]) -> None:
        """Predicts with other heads from now on, for learners that rewrite old heads.

        All statistics stay those collected when each task was learned.

        Raises:
            InputError: not one head per task, or heads that `fit_task` refuses.
        """
        heads = list(heads)
        if len(heads) != self.num_tasks:
            raise InputError(f"heads: expected one per task, {self.num_tasks}, found {len(heads)}")
        checked = [self._head(head, t, self.widths[0], heads[0]) for t, head in enumerate(heads)]
        for task, (head, classes) in enumerate(zip(checked, self.classes, strict=True)):
            if head is not None and (rows := len(head.affine.rows)) != len(classes):
                raise InputError(
                    f"head of task {task}: expected {len(classes)} classes, found {rows}"
                )
        self.heads = checked
        self._forget()

    @property
    def storage_bytes(self) -> int:
        """Returns the bytes of the statistics that `score` uses, beyond encoder and heads."""
        raise NotImplementedError

    @property
    def note(self) -> str:
        """One line that a user should know of the result, or ""."""
        return ""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the calibrator to one `.npz` file, whole or not at all; see `calibration.load`."""
        storage.write(path, self)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def _forget(self) -> None:
        """Drops the values of cached properties."""
        for name in [name for name in vars(self) if name.startswith("_")]:
            delattr(self, name)

    def _head(self, head: Any, task: int, width: int, first: Any = None) -> Any:
        """Returns a head with float32 arrays, checked; None if none is given nor needed."""
        if head is None and not self.needs_heads:
            return None
        known = [other for other in (first, *self.heads, head) if other is not None]
        return inputs.checked_head(head, f"head of task {task}", width, (known or [head])[0])

    def _task(
        self, adapted: Any, labels: Any, head: Any, pretrained: Any, classes: Any
    ) -> inputs.TaskInput:
        """Returns the input of `fit_task`, checked."""
        task = self.num_tasks
        views, labels = inputs.task_views(adapted, labels, pretrained, task, self.widths)
        head = self._head(head, task, views[0].shape[1])
        rows = None if head is None else len(head.affine.rows)
        named = inputs.task_classes(labels, task, rows, classes, self.classes)
        return inputs.TaskInput(task, views, labels, *named, head)

    def _append(
        self, given: inputs.TaskInput, guessed: Int[np.ndarray, " n"] | None = None
    ) -> None:
        """Adds a task with its statistics; `guessed` are the rows that its head predicts."""
        self.classes = [*self.classes, given.classes]
        self.counts = [*self.counts, given.counts]
        self.heads = [*self.heads, given.head]
        self.widths = [view.shape[1] for view in given.views]
        self._forget()
        if self.needs_heads and not self.warned and (warning := weak_head(given, guessed)):
            self.warned = True
            _LOGGER.warning(warning)


def weak_head(given: inputs.TaskInput, guessed: Int[np.ndarray, " n"] | None) -> str:
    """Returns a warning if a head knows next to nothing of its task, or "".

    A head of c classes knows next to nothing below an accuracy of 3 / c, three times chance; with
    fewer than five classes below (1 + 1 / c) / 2, half way from chance to certainty.
    """
    count, rows = len(given.classes), given.rows
    if guessed is None:
        some = np.unique(np.linspace(0, len(rows) - 1, min(len(rows), SAMPLES)).astype(int))
        guessed = given.head.logits(inputs.float32(given.views[0][some])).argmax(axis=1)
        rows = rows[some]
    right = float(np.mean(guessed == rows))
    if count == 1 or right >= min(3.0 / count, (1.0 + 1.0 / count) / 2.0):
        return ""
    return (
        f"task {given.task + 1} (from 1): its head is right about {100 * right:.1f}% of its own "
        f"training samples (chance {100 / count:.1f}%). It was hardly trained; or its rows are in "
        "another order than the labels, ascending or as classes names them; or features are of a "
        "loader that shuffles, so that the labels are of other images. Heads of further tasks are "
        "not named"
    )


def warn_of_equal_residuals(given: inputs.TaskInput, index: int) -> None:
    """Warns that u_t has no spread to be measured in, as with one or two samples."""
    _LOGGER.warning(
        f"{inputs.VIEWS[index]} features of task {given.task + 1} (from 1): residual ratios of its "
        f"samples ({len(given.labels)}) do not vary; RLC's foreign reference, which all tasks "
        "share, will be dominated by it"
    )
