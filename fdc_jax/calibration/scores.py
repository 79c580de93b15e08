"""Task scores and local class predictions: what every calibrator returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Float, Int


@dataclass(frozen=True)
class Scores:
    """Scores of one batch; the best task decides, its local argmax names the class.

    Attributes:
        task_scores: one score per sample and task, comparable across tasks.
        local_class: row of each task's head that the task would predict.
        classes: labels of each task's head rows, in row order.
    """

    task_scores: Float[np.ndarray, "n tasks"]
    local_class: Int[np.ndarray, "n tasks"]
    classes: Sequence[Int[np.ndarray, " c"]]

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
