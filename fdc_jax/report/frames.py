"""What tables, figures and the page show of a group, as frames and matrices of its runs.

Accuracies and shares are in percent, differences of accuracies in percentage points; numbers are
means over seeds. Methods are those of `Group.methods`, and `oracle`: raw logits, task given.
"""

from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from fdc_jax import evaluation
from fdc_jax.report.runs import Group, predictions

# What an image's two decisions, task and class, come to: fields of `evaluation.Decomposition`.
SHARES = evaluation.Decomposition._fields[-4:]


def curve(group: Group) -> pd.DataFrame | None:
    """Accuracy over all classes so far: a row per seed and task, a column per method.

    None where a task was not evaluated.
    """
    names = [*group.methods, "oracle"]
    rows = {
        (run.results["seed"], place): [point["accuracy"].get(name) for name in names]
        for run in group.runs
        for place, point in enumerate(run.results["curve"], start=1)
    }
    found = pd.DataFrame.from_dict(rows, orient="index", columns=names, dtype=float)
    found.index = pd.MultiIndex.from_tuples(rows, names=["seed", "task"]) if rows else found.index
    return found if len(found) == len(group.runs) * group.results["num_tasks"] else None


def accuracy_matrix(
    results: dict[str, Any], method: str
) -> Float[np.ndarray, "tasks tasks"] | None:
    """Returns the accuracy on the images of each task (column) after each task (row).

    NaN above the diagonal and for a task without images; None where the run did not record it.
    """
    rows = [(point.get("task_accuracy") or {}).get(method) or [] for point in results["curve"]]
    count = len(rows)
    if count != results["num_tasks"] or [*map(len, rows)] != [*range(1, count + 1)]:
        return None
    return np.array([row + [np.nan] * (count - len(row)) for row in rows], dtype=np.float64)


def forgetting(matrix: Float[np.ndarray, "tasks tasks"]) -> float:
    """Mean over all tasks but the last of their best earlier accuracy minus their final one.

    Chaudhry et al., "Riemannian Walk for Incremental Learning" (2018).
    """
    best = np.fmax.reduce(matrix[:-1], axis=0)[:-1]
    return float(np.nanmean(best - matrix[-1, :-1]))


def backward_transfer(matrix: Float[np.ndarray, "tasks tasks"]) -> float:
    """Mean over all tasks but the last of their final accuracy minus that right after learning.

    Lopez-Paz and Ranzato, "Gradient Episodic Memory for Continual Learning" (2017).
    """
    return float(np.nanmean(matrix[-1, :-1] - np.diag(matrix)[:-1]))


# What a table of tasks ends with.
OVER_TASKS = {"Forgetting": forgetting, "Backward transfer": backward_transfer}


def tasks(group: Group) -> pd.DataFrame:
    """Final accuracy on each task: a row per task, a column per method; `OVER_TASKS` below.

    Empty where the runs did not record the accuracies of all tasks.
    """
    found = {}
    for name in (*group.methods, "oracle"):
        matrices = [accuracy_matrix(run.results, name) for run in group.runs]
        known = [matrix for matrix in matrices if matrix is not None]
        if len(known) == len(matrices):
            column: dict[Any, float] = {
                task: value for task, value in enumerate(np.mean(known, axis=0)[-1])
            }
            if len(column) > 1:
                for title, measure in OVER_TASKS.items():
                    column[title] = float(np.mean([measure(matrix) for matrix in known]))
            found[name] = column
    return pd.DataFrame(found)


def classes(group: Group) -> list[list[int]]:
    """Returns the labels of each task's classes that have test images; empty without predictions.

    A task counts from 0.
    """
    of = predictions(group.runs[0])
    if not of:
        return []
    return [np.unique(of["label"][of["task"] == t]).tolist() for t in range(of["task"].max() + 1)]


def confusion(group: Group, method: str) -> Float[np.ndarray, "tasks tasks"] | None:
    """Percent of each task's test images (row) that each task (column) wins; None if unknown."""
    found, count = [], group.results["num_tasks"]
    for run in group.runs:
        of = predictions(run)
        if f"{method}_task" in of:
            counts = evaluation.task_confusion(of["task"], of[f"{method}_task"], count)
            found.append(100.0 * counts / np.maximum(counts.sum(axis=1, keepdims=True), 1))
    return np.mean(found, axis=0) if found else None


def shares(group: Group) -> pd.DataFrame:
    """Shares of the test images by their two decisions: a row per method, columns `SHARES`.

    Methods whose decompositions were not recorded are left out.
    """
    found = {}
    for name in group.methods:
        of = [(run.results.get("decomposition") or {}).get(name, {}) for run in group.runs]
        if all(of):
            found[name] = [np.mean([each[share] for each in of]) for share in SHARES]
    return pd.DataFrame.from_dict(found, orient="index", columns=SHARES)
