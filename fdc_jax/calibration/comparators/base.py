"""What every comparator does around its own formula: check a task, keep its statistics, score.

A method writes `_collect`, which makes a task's samples into its statistics, and either
`_class_scores` or, for routers that keep the heads' classes, `_score`. Moments are taken in float64
on the host, where they cost nothing; products over samples are float32 at the highest precision.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from fdc_jax.calibration import inputs
from fdc_jax.calibration.scores import Scores
from fdc_jax.errors import InputError
from fdc_jax.heads import Head, LinearHead

# Rows handed to the device at once, so that memory does not grow with the batch.
ROWS = 1024


class Comparator:
    """The interface of FDC, and the tasks seen so far.

    Args:
        view: which features the method reads, "adapted" or "pretrained".
        variant: one of the method's `variants`, the first when None.

    Raises:
        InputError: `view` or `variant` is unknown.
    """

    name = ""
    variants: tuple[str, ...] = ()
    # None, "head" for any head, or "linear" for a `LinearHead`.
    needs: str | None = None

    def __init__(self, view: str = "adapted", variant: str | None = None):
        if view not in inputs.VIEWS:
            raise InputError(
                f"{self.name}: view: expected {' or '.join(inputs.VIEWS)}, found {view!r}"
            )
        if variant is not None and variant not in self.variants:
            raise InputError(
                f"{self.name}: variant: expected {' or '.join(self.variants)}, found {variant!r}"
            )
        self.view, self.variant = view, variant or next(iter(self.variants), None)
        self.classes: list[Int[np.ndarray, " c"]] = []
        self.heads: list[Any] = []
        # Of each task, and one sum over all tasks; numbers for the storage both.
        self.statistics: list[Any] = []
        self.total: Any = None
        self.width = 0
        # Per task, which classes have samples; the others are never predicted from statistics.
        self._present: list[Bool[np.ndarray, " c"]] = []
        self._solved: Any = None

    def fit_task(
        self,
        adapted: Any,
        labels: Any,
        head: Head | None = None,
        pretrained: Any = None,
        classes: Any = None,
    ) -> None:
        """Takes one more task, as `FDC.fit_task` does: features [n, d] and [n, d'], labels [n].

        Methods that read no head need none; of the two views the method's own is read.

        Raises:
            InputError: the view or a head is missing, shapes differ, a value is not finite, a
                label is outside the head's classes, or a class belongs to an earlier task. Nothing
                has changed then.
        """
        task = len(self.classes)
        features = self._features(adapted, pretrained, f" of task {task}", self.width or None)
        labels = inputs.label_array(labels, f"labels of task {task}")
        if not len(labels) or len(labels) != len(features):
            raise InputError(
                f"labels of task {task}: expected at least one, and as many as there are rows of "
                f"features, {len(features)}; found {len(labels)}"
            )
        if classes is not None:
            classes = inputs.class_labels(classes, f"classes of task {task}")
        rows = len(np.unique(labels) if classes is None else classes)
        names, counts = inputs.task_classes(labels, task, rows, classes, self.classes)
        present = counts > 0
        self._check_head(head, len(names), features.shape[1], task)
        order = np.argsort(names[present])
        rows = order[np.searchsorted(names[present], labels, sorter=order)]
        self.statistics.append(self._collect(features, rows, head))
        self.classes.append(names)
        self._present.append(present)
        if head is not None:
            self.heads.append(head)
        self.width, self._solved = features.shape[1], None

    def replace_heads(self, heads: Sequence[Head]) -> None:
        """Predicts with other heads from now on; statistics stay those of fit time.

        Raises:
            InputError: not one head per task, or heads that `fit_task` refuses.
        """
        if len(heads) != len(self.classes):
            raise InputError(
                f"{self.name}: heads: expected one per task, {len(self.classes)}, found "
                f"{len(heads)}"
            )
        for task, (head, rows) in enumerate(zip(heads, self.classes, strict=True)):
            self._check_head(head, len(rows), self.width, task)
        self.heads = list(heads)

    def finalize(self) -> None:
        """Solves for what scoring needs of all tasks; more may follow, then finalize again."""
        if self.classes and self._solved is None:
            self._solved = self._solve()

    def score(self, adapted: Any, pretrained: Any = None) -> Scores:
        """Scores a batch [n, d] of the method's view; the other one may be None.

        Raises:
            InputError: no task was fitted, the view is missing, or values or widths are wrong.
        """
        if not self.classes:
            raise InputError(f"{self.name}: expected at least one fitted task before scoring")
        features = self._features(adapted, pretrained, "", self.width)
        self.finalize()
        return self._score(features)

    @property
    def storage_bytes(self) -> int:
        """Bytes of the statistics, all in float32, beyond encoder and heads."""
        return 4 * sum(np.size(part) for part in jax.tree.leaves((self.statistics, self.total)))

    def _collect(
        self, features: Float[np.ndarray, "n d"], rows: Int[np.ndarray, " n"], head: Any
    ) -> Any:
        """Returns a task's statistics; `rows` number the classes that have samples."""

    def _solve(self) -> Any:
        """Returns what scoring needs of all tasks."""

    def _score(self, features: Float[np.ndarray, "n d"]) -> Scores:
        """The best class of each task decides: its score is the task's, its row the class."""
        found = self._class_scores(features)
        present = np.concatenate(self._present)
        scores = np.full((len(features), len(present)), -np.inf, found.dtype)
        scores[:, present] = found
        bounds = np.cumsum([len(rows) for rows in self.classes])[:-1]
        return best_by_task(np.split(scores, bounds, axis=1), self.classes)

    def _class_scores(self, features: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n classes"]:
        """Returns a score for each class that has samples, tasks in order."""
        raise NotImplementedError

    def _features(
        self, adapted: Any, pretrained: Any, where: str, width: int | None
    ) -> Float[np.ndarray, "n d"]:
        value = adapted if self.view == "adapted" else pretrained
        if value is None:
            raise InputError(
                f"{self.name} (view {self.view}):{where.removeprefix(' of') or ' the input'} has "
                f"no {self.view} features"
            )
        return inputs.finite_features(value, f"{self.view} features{where}", width)

    def _check_head(self, head: Head | None, num_classes: int, width: int, task: int) -> None:
        if self.needs is None:
            return
        if head is None:
            raise InputError(f"{self.name}: task {task} has no head, and the method needs one")
        if self.needs == "linear" and not isinstance(head, LinearHead):
            raise InputError(
                f"{self.name}: needs linear heads, the head of task {task} is a "
                f"{type(head).__name__}"
            )
        name = f"head of task {task}"
        _, found = inputs.read_head(head, name, jnp.zeros((1, width), jnp.float32))
        if found != num_classes:
            raise InputError(f"{name}: expected {num_classes} classes, found {found}")


def best_by_task(parts: Sequence[np.ndarray], classes: Sequence[np.ndarray]) -> Scores:
    """Scores of tasks from scores [n, c] of each task's classes: the best class decides."""
    return Scores(
        np.stack([part.max(axis=1) for part in parts], axis=1),
        np.stack([part.argmax(axis=1) for part in parts], axis=1),
        tuple(classes),
    )


def within_classes(
    features: Float[np.ndarray, "n d"], rows: Int[np.ndarray, " n"]
) -> tuple[Float[np.ndarray, "c d"], Float[np.ndarray, "d d"]]:
    """Means of classes and the scatter about them, in float64."""
    means = class_means(features, rows)
    deviations = features - means[rows]
    return means, deviations.T @ deviations


def class_means(
    features: Float[np.ndarray, "n d"], rows: Int[np.ndarray, " n"]
) -> Float[np.ndarray, "c d"]:
    """Means of classes in float64."""
    totals = np.zeros((rows.max() + 1, features.shape[1]))
    np.add.at(totals, rows, features.astype(np.float64))
    return totals / np.bincount(rows)[:, None]


def in_blocks(
    function: Callable[[Float[Array, "rows d"]], Float[Array, "rows m"]],
    features: Float[np.ndarray, "n d"],
) -> Float[np.ndarray, "n m"]:
    """Applies a function to some rows at a time; zero rows fill blocks, so that few sizes occur."""
    parts = []
    for start in range(0, max(len(features), 1), ROWS):
        part = features[start : start + ROWS]
        missing = min(ROWS, 1 << max(len(part) - 1, 0).bit_length()) - len(part)
        block = jnp.asarray(np.pad(part, ((0, missing), (0, 0))))
        parts.append(np.asarray(function(block))[: len(part)])
    return np.concatenate(parts)
