"""What every comparator does with a task before its own formula: check it, count its classes."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from fdc_jax.calibration import inputs
from fdc_jax.calibration.inputs import VIEWS
from fdc_jax.calibration.scores import Scores
from fdc_jax.errors import InputError
from fdc_jax.heads import Head, LinearHead


class TaskSamples(NamedTuple):
    """Checked samples of one task in one view; `rows` are indices into `classes`."""

    features: Float[np.ndarray, "n d"]
    rows: Int[np.ndarray, " n"]
    classes: Int[np.ndarray, " c"]


class SeenTasks:
    """The tasks a comparator was fitted to, in order.

    Args:
        method: name for messages.
        view: which features the method reads, "adapted" or "pretrained".
        needs_head: refuse tasks without a head.
        needs_linear_head: refuse heads other than `LinearHead`.

    Raises:
        InputError: `view` is unknown.
    """

    def __init__(
        self,
        method: str,
        view: str = "adapted",
        needs_head: bool = False,
        needs_linear_head: bool = False,
    ):
        if view not in VIEWS:
            raise InputError(f"{method}: view: expected {' or '.join(VIEWS)}, found {view!r}")
        self.method = method
        self.view = view
        self.classes: list[Int[np.ndarray, " c"]] = []
        self.heads: list[Head] = []
        self._needs_head = needs_head or needs_linear_head
        self._needs_linear_head = needs_linear_head
        self._width: int | None = None

    @property
    def num_classes(self) -> int:
        """Number of classes over all tasks."""
        return sum(len(rows) for rows in self.classes)

    @property
    def width(self) -> int:
        """Feature width of the view; 0 before the first task."""
        return self._width or 0

    def check(
        self,
        adapted: object,
        labels: object,
        head: Head | None,
        pretrained: object,
        classes: object,
    ) -> TaskSamples:
        """Checks one more task without remembering it, so that an error changes nothing.

        Raises:
            InputError: the view or a head is missing, shapes differ, a value is not finite, a
                label is outside the head's classes, or a class belongs to an earlier task.
        """
        task = len(self.classes)
        features, labels = self._gather(adapted, labels, pretrained, task)
        names = np.unique(labels) if classes is None else inputs.class_labels(classes, "classes")
        inputs.check_disjoint(names, self.classes, task)
        self._check_head(head, len(names), task)
        order = np.argsort(names)
        rows = order[np.minimum(np.searchsorted(names[order], labels), len(names) - 1)]
        outside = names[rows] != labels
        if outside.any():
            row = int(np.argmax(outside))
            raise InputError(
                f"labels of task {task}: row {row} is label {labels[row]}, no class of its head"
            )
        return TaskSamples(features, rows, names)

    def remember(self, samples: TaskSamples, head: Head | None) -> None:
        """Counts a checked task as seen, once everything about it has been computed."""
        self.classes.append(samples.classes)
        if head is not None:
            self.heads.append(head)
        self._width = samples.features.shape[1]

    def check_heads(self, heads: Sequence[Head]) -> list[Head]:
        """Returns heads that are to replace those of all tasks.

        Raises:
            InputError: not one head per task, or a head that `check` refuses.
        """
        heads = list(heads)
        if len(heads) != len(self.classes):
            raise InputError(
                f"{self.method}: heads: expected one per task, {len(self.classes)}, found "
                f"{len(heads)}"
            )
        for task, (head, rows) in enumerate(zip(heads, self.classes, strict=True)):
            self._check_head(head, len(rows), task)
        return heads

    def _gather(
        self, adapted: object, labels: object, pretrained: object, task: int
    ) -> tuple[Float[np.ndarray, "n d"], Int[np.ndarray, " n"]]:
        parts, names = [], []
        for block in inputs.blocks(inputs.task_source(adapted, labels, pretrained, task), task):
            part = block.adapted if self.view == "adapted" else block.pretrained
            if part is None:
                raise self._no_pretrained(f"task {task}")
            parts.append(part[: block.rows])
            names.append(block.labels[: block.rows])
        if not parts:
            raise InputError(f"task {task}: expected at least one sample, found none")
        features = np.concatenate(parts)
        inputs.check_feature_shape(
            features.shape, features.dtype, f"{self.view} features of task {task}", self._width
        )
        return features, np.concatenate(names)

    def _no_pretrained(self, where: str) -> InputError:
        return InputError(f"{self.method} (view pretrained): {where} has no pretrained features")

    def _check_head(self, head: Head | None, num_classes: int, task: int) -> None:
        if head is None:
            if self._needs_head:
                raise InputError(
                    f"{self.method}: task {task} has no head, and the method needs one"
                )
            return
        if isinstance(head, LinearHead):
            if len(head.weight) != num_classes:
                raise InputError(
                    f"head of task {task}: expected {num_classes} rows, one for each class, found "
                    f"{len(head.weight)}"
                )
        elif self._needs_linear_head:
            raise InputError(
                f"{self.method}: needs linear heads, the head of task {task} is a "
                f"{type(head).__name__}"
            )

    def view_features(self, adapted: object, pretrained: object) -> Float[np.ndarray, "n d"]:
        """The test features the method reads, checked, in float32.

        Raises:
            InputError: no task was fitted, the view is missing, or values or widths are wrong.
        """
        if not self.classes:
            raise InputError(f"{self.method}: expected at least one fitted task before scoring")
        value = adapted if self.view == "adapted" else pretrained
        if value is None:
            raise self._no_pretrained("the input")
        name = f"{self.view} features"
        features = inputs.float32(inputs.feature_array(value, name, self.width))
        with np.errstate(over="ignore", invalid="ignore"):
            inputs.check_rows(name, np.einsum("nd,nd->n", features, features))
        return features

    def scores(self, class_scores: Float[np.ndarray, "n classes"]) -> Scores:
        """The best class of each task decides: its score is the task's, its row the local class.

        Args:
            class_scores: classes of all tasks side by side, tasks in order.
        """
        bounds = np.cumsum([len(rows) for rows in self.classes])[:-1]
        return self.scores_by_task(np.split(class_scores, bounds, axis=1))

    def scores_by_task(self, class_scores: list[Float[np.ndarray, "n c"]]) -> Scores:
        """As `scores`, from one matrix per task."""
        return Scores(
            np.stack([scores.max(axis=1) for scores in class_scores], axis=1),
            np.stack([scores.argmax(axis=1) for scores in class_scores], axis=1),
            tuple(self.classes),
        )


def head_logits(
    head: Head, features: Float[np.ndarray, "n d"], num_classes: int, task: int
) -> Float[np.ndarray, "n c"]:
    """Logits of a task's head.

    Raises:
        InputError: the head does not give one logit for each of its classes.
    """
    logits = np.asarray(head.logits(jnp.asarray(features)))
    if logits.shape != (len(features), num_classes):
        raise InputError(
            f"head of task {task}: expected logits of shape {[len(features), num_classes]}, found "
            f"{list(logits.shape)}"
        )
    return logits


def class_means(samples: TaskSamples) -> Float[np.ndarray, "c d"]:
    """Means of a task's classes in float64; NaN for a class without samples."""
    counts = np.bincount(samples.rows, minlength=len(samples.classes))
    totals = np.zeros((len(samples.classes), samples.features.shape[1]))
    np.add.at(totals, samples.rows, samples.features.astype(np.float64))
    return np.divide(
        totals, counts[:, None], out=np.full_like(totals, np.nan), where=counts[:, None] > 0
    )
