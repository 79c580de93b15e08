"""What tables, figures and the page show of a group, as frames and matrices of its runs.

Accuracies and shares are in percent, differences of accuracies in percentage points; numbers are
means over seeds. Methods are those of `Group.methods`, and `oracle`: raw logits, task given.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from fdc_jax import evaluation, learners
from fdc_jax.calibration import FDC
from fdc_jax.report import baselines, formatting
from fdc_jax.report.runs import Group, predictions


def curve(group: Group) -> pd.DataFrame | None:
    """Accuracy over all classes so far: a row per seed and evaluated task, a column per method.

    None where fewer than two tasks were evaluated.
    """
    names = [*group.methods, "oracle"]
    rows = {
        (run.results["seed"], point["task"] + 1): [point["accuracy"].get(name) for name in names]
        for run in group.runs
        for point in run.results["curve"]
    }
    found = pd.DataFrame.from_dict(rows, orient="index", columns=names, dtype=float)
    found.index = pd.MultiIndex.from_tuples(rows, names=["seed", "task"]) if rows else found.index
    return found if len({task for _, task in rows}) > 1 else None


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


def tasks(group: Group) -> pd.DataFrame:
    """Final accuracy on each task: a row per task, a column per method; forgetting below.

    Empty where the runs did not record the accuracies of all tasks.
    """
    found = {}
    for name in (*group.methods, "oracle"):
        matrices = [accuracy_matrix(run.results, name) for run in group.runs]
        known = [matrix for matrix in matrices if matrix is not None]
        if len(known) == len(matrices):
            column: dict[Any, float] = dict(enumerate(np.mean(known, axis=0)[-1], 1))
            if len(column) > 1:
                column["Forgetting"] = float(np.mean([forgetting(matrix) for matrix in known]))
            found[name] = column
    return pd.DataFrame(found)


def confusion(group: Group, method: str) -> Float[np.ndarray, "tasks tasks"] | None:
    """Percent of each task's test images (row) that each task (column) wins; None if unknown."""
    found, count = [], group.results["num_tasks"]
    for run in group.runs:
        of = predictions(run)
        if f"{method}_task" in of:
            counts = evaluation.task_confusion(of["task"], of[f"{method}_task"], count)
            found.append(100.0 * counts / np.maximum(counts.sum(axis=1, keepdims=True), 1))
    return np.mean(found, axis=0) if found else None


def sweep(group: Group, setting: str) -> pd.DataFrame:
    """Returns the accuracy of FDC by value of a setting: a row per seed, values ascending."""
    prefix = f"{setting}="
    accuracy = group.numbers.filter(regex=f"^{prefix}")
    accuracy.columns = [float(name.removeprefix(prefix)) for name in accuracy]
    return accuracy.sort_index(axis=1)


def leading(group: Group) -> dict[str, str]:
    """Returns what a reader has to know first: methods by what they stand for.

    `best` is the best calibrator of the run but for those on frozen features, of which `untrained`
    is the best; with `fdc`, `raw` and `oracle`. What the run does not have is left out, and `fdc`
    where it is the best.
    """

    def best(names: Iterable[str]) -> str | None:
        known = [name for name in names if group.values(name)]
        return max(known, key=lambda name: np.mean(group.values(name)), default=None)

    own = [name for name in group.methods if name != "raw" and not name.endswith("-pretrained")]
    frozen = {name for name in group.methods if name.endswith("-pretrained")}
    found = {"best": best(own), FDC.name: best([FDC.name]), "raw": "raw"}
    if found["best"] == FDC.name:
        del found[FDC.name]
    found |= {"untrained": best(sorted(frozen.union(baselines.NAMES))), "oracle": "oracle"}
    return {role: name for role, name in found.items() if name}


def verdict(group: Group) -> str:
    """Says whether the run beats no training at all; empty where that is not known."""
    of = leading(group)
    known = {"best", "untrained"} <= of.keys()
    gain = group.gain(of["best"], of["untrained"]) if known else None
    if gain is None or np.isnan(gain.low):
        return ""
    said = "Better than no training at all" if gain.low > 0 else "No training at all does better"
    if gain.low <= 0 <= gain.high:
        said = "Not significantly better than no training at all"
    names = [formatting.method_title(of[role]) for role in ("best", "untrained")]
    return (
        f"{said}: {names[0]} minus {names[1]} is {gain.mean:+.2f} points, 95 % interval "
        f"{formatting.interval(gain)}."
    )


def shown(group: Group) -> list[str]:
    """Returns the names of the calibrators in a table: own ones, `baselines`, the task given."""
    names = dict.fromkeys([*group.methods, *baselines.NAMES, "oracle"])
    if learners.selected(group.learner) != "full" and group.values("selected"):
        names = {n: None for name in names for n in (name, *["selected"] * (name == FDC.name))}
    return [*filter(group.values, names)]


def calibrators(group: Group) -> pd.DataFrame:
    """Returns the results of each calibrator as text: a row by its title.

    Below them the methods of `baselines`, and the task given. Of several seeds, means ± sample
    standard deviations; intervals are those of `Group.gain`. `paper` is the paper's accuracy.
    """
    rows = {}
    for name in shown(group):
        gain = group.values(f"gain:{name}") if name not in ("raw", "oracle") else ()
        published = group.published(name)
        rows[formatting.method_title(name)] = {
            "accuracy": formatting.spread(group.values(name)),
            "95 % interval": formatting.interval(group.gain(name, None), signed=False),
            "paper": formatting.mean(*published[:2]) if published else np.nan,
            "gain": formatting.spread(gain, signed=True),
            "interval of the gain": formatting.interval(group.gain(name) if gain else None),
            "right task": formatting.spread(group.values(f"routing:{name}")),
            "average over tasks": formatting.spread(group.values(f"aia:{name}")),
            "storage, MiB": formatting.spread(np.array(group.values(f"storage:{name}")) / 2**20),
        }
    return pd.DataFrame.from_dict(rows, orient="index").dropna(axis=1, how="all")
