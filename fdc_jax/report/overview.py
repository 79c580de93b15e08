"""What came out of the runs of a group: intervals, accuracies by task, forgetting, routes, command.

Accuracies and shares are in percent, differences of accuracies in percentage points.
"""

import importlib.util
import math
import shlex
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Float, Int

from fdc_jax import evaluation
from fdc_jax.errors import counted
from fdc_jax.report.runs import Group, RunFolder
from fdc_jax.report.words import METHODS
from fdc_jax.run import configuration

KINDS = ("raw", "fdc", "oracle")

# Fields of `evaluation.Decomposition`.
SHARES = evaluation.Decomposition._fields[-4:]

Predictions = Mapping[str, Int[np.ndarray, " n"]]


class Interval(NamedTuple):
    """A 95 % interval in percentage points; `of` is "seeds", "images", or "" for none."""

    low: float = math.nan
    high: float = math.nan
    of: str = ""


def gain_interval(group: Group) -> Interval:
    """Returns the interval of the gain of FDC over raw.

    Several seeds: Student's t over gains paired within seeds. One seed: a percentile bootstrap
    over test images, where predictions were kept.
    """
    raw, fdc = group.values("raw"), group.values("fdc")
    if len(raw) > 1:
        gain = evaluation.paired_gain(raw, fdc)
        return Interval(gain.low, gain.high, "seeds")
    gain = group.runs[0].gain_over_images
    return Interval() if gain is None else Interval(gain.low, gain.high, "images")


def _mean_over_runs(group: Group, read: Callable[[Predictions], np.ndarray]) -> np.ndarray | None:
    """Mean over the runs that kept their predictions; None where none did."""
    found = [read(run.predictions) for run in group.runs if run.predictions]
    return np.mean(found, axis=0) if found else None


def accuracy_matrix(run: RunFolder, kind: str) -> Float[np.ndarray, "tasks tasks"] | None:
    """Returns the accuracy on the images of each task (column) after each task (row).

    NaN above the diagonal and for a task without images; None where the run did not record it.
    """
    curve = run.results.get("curve") or ()
    rows = [(point.get("task_accuracy") or {}).get(kind) or [] for point in curve]
    count = len(rows)
    if count != run.results.get("num_tasks") or [*map(len, rows)] != [*range(1, count + 1)]:
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


def over_tasks(
    group: Group, measure: Callable[[Float[np.ndarray, "tasks tasks"]], float]
) -> dict[str, list[float]]:
    """Returns `forgetting` or `backward_transfer` by seed of each of `KINDS`, where recorded."""
    found = {}
    for kind in KINDS:
        matrices = [accuracy_matrix(run, kind) for run in group.runs]
        values = [measure(matrix) for matrix in matrices if matrix is not None and len(matrix) > 1]
        if values:
            found[kind] = values
    return found


def tasks(group: Group) -> pd.DataFrame:
    """Returns a row per task, counted from 0; empty where no run kept its predictions.

    Columns: `classes`, labels of its classes; of each of `KINDS` the accuracy on its test images,
    mean over seeds: `raw` after the last task among all classes, and, where it was recorded,
    `raw_learned` right after the task was learned among the classes so far.
    """
    columns = next((run.predictions for run in group.runs if run.predictions), None)
    if columns is None:
        return pd.DataFrame()
    count = int(columns["task"].max()) + 1
    found: dict[str, Any] = {
        "classes": [
            np.unique(columns["label"][columns["task"] == t]).tolist() for t in range(count)
        ]
    }
    for kind in KINDS:

        def read(of: Predictions, name: str = f"{kind}_label") -> np.ndarray:
            return evaluation.task_accuracies(of["task"], of["label"], of[name], count)

        found[kind] = _mean_over_runs(group, read)
        matrices = [accuracy_matrix(run, kind) for run in group.runs]
        known = [np.diag(each) for each in matrices if each is not None and len(each) == count]
        if known:
            found[f"{kind}_learned"] = np.mean(known, axis=0)
    return pd.DataFrame(found)


def confusion(group: Group, kind: str) -> Float[np.ndarray, "tasks tasks"] | None:
    """Percent of each task's test images (row) that each head wins (column); mean over seeds."""

    def read(columns: Predictions) -> np.ndarray:
        size = 1 + int(max(np.max(columns[name]) for name in ("task", "raw_task", "fdc_task")))
        counts = evaluation.task_confusion(columns["task"], columns[f"{kind}_task"], size)
        return 100.0 * counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)

    return _mean_over_runs(group, read)


def shares(group: Group, kind: str) -> Float[np.ndarray, "tasks_and_all 4"] | None:
    """Splits the images of each task, and all, by their two decisions: `SHARES`, mean over seeds.

    The class given the task is that of the same scores. Runs that recorded it for raw logits alone
    have that instead where FDC chose another task. A task without images has zeros.
    """

    def read(columns: Predictions) -> np.ndarray:
        task, chosen, label = columns["task"], columns[f"{kind}_task"], columns[f"{kind}_label"]
        oracle = columns["oracle_label"]
        if kind == "fdc":
            oracle = np.where(chosen == task, label, columns.get("fdc_oracle_label", oracle))
        given = (task, columns["label"], chosen, label, oracle)
        rows = [task == t for t in range(int(task.max()) + 1)] + [np.ones(len(task), bool)]
        cells = [
            evaluation.decompose(*(column[mine] for column in given))._asdict()
            if mine.any()
            else dict.fromkeys(SHARES, 0.0)
            for mine in rows
        ]
        return np.array([[each[name] for name in SHARES] for each in cells])

    return _mean_over_runs(group, read)


def sentences(group: Group) -> list[str]:
    """Says what FDC did to single images, and what knowing the task would do."""
    said = []
    changes = [
        evaluation.flips(of["label"], of["raw_label"], of["fdc_label"])
        for run in group.runs
        if (of := run.predictions)
    ]
    if changes:
        fixed, broken, *_ = np.mean(changes, axis=0)
        average = ", on average over seeds" if len(changes) > 1 else ""
        said.append(
            f"FDC puts right {counted(fixed, 'image')} that the raw logits get wrong, and "
            f"spoils {counted(broken, 'image')} that they get right{average}."
        )
    pairs = zip(group.values("raw"), group.values("oracle"), strict=True)
    repaired = [100 * (given - raw) / (100 - raw) for raw, given in pairs if raw < 100]
    if repaired:
        said.append(
            f"Knowing the task of every image would put right {np.mean(repaired):.0f} % of the "
            "errors of the raw logits."
        )
    entries = [run.analyses["beyond"] for run in group.runs if "beyond" in run.analyses]
    above = {
        name: float(np.mean([each[name]["accuracy"] - each["fdc"]["accuracy"] for each in entries]))
        for name in (entries[0] if entries else ())
        if all(name in each for each in entries)
    }
    best = max(above, key=lambda name: above[name], default="fdc")
    if entries and above[best] > 0:
        others = sum(gain > 0 for gain in above.values())
        said.append(
            f"{counted(others, 'method')} of the table of closed-form heads and calibrators "
            f"{'stands' if others == 1 else 'stand'} above FDC here, most of all "
            f"{METHODS[best]}, by {above[best]:.2f} points."
        )
    return said


def command(group: Group) -> str | None:
    """Returns the command that repeats these runs; None where there are no configuration files.

    Fields that change no number are left out, but for where data and weights lie.
    """
    name = group.benchmark if group.benchmark.isidentifier() else "base"
    try:
        name = name if importlib.util.find_spec(f"fdc_jax.configs.{name}") else "base"
        known = configuration.flatten(
            importlib.import_module(f"fdc_jax.configs.{name}").get_config()
        )
    except (ImportError, AttributeError):
        return None
    config = group.runs[0].results["config"] | {"seed": group.seeds}
    learner = config.get("learner.name", group.learner)
    flags = []
    for field, value in config.items():
        part = field.split(".")
        option = part[0] == "learner" and len(part) == 3
        of_ours = learner.startswith(part[1]) if option else field in known
        named = field in ("data.dir", "encoder.weights")
        effective = named or field not in configuration.WITHOUT_EFFECT
        if not of_ours or not effective or value == known.get(field):
            continue
        each = repr if field == "class_order" else str  # Names may look like numbers.
        text = ",".join(map(each, value)) if isinstance(value, list) else str(value)
        if named:  # Where things lie on a machine is nobody's business.
            text = "FOLDER" if field == "data.dir" else text.rpartition("/")[2]
        flags.append(f"--config.{field}={shlex.quote(text)}")
    first = f"python main.py --config=configs/{name}.py"
    return " \\\n    ".join([first, *flags, "--workdir=runs/again"])
