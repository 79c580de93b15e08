"""Classes: how well each one is known, which it is taken for, and all wrong pictures.

Labels are class-order positions. Counts are over the test images of all seeds, pictures of the
first; what is chosen is by the best calibrator of the run.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy.cluster import hierarchy
from scipy.spatial import distance

from fdc_jax import evaluation
from fdc_jax.calibration import FDC
from fdc_jax.errors import InputError
from fdc_jax.report import formatting, frames, pictures
from fdc_jax.report.runs import Group, predictions

WORST = 20  # pairs of classes that are named
MOST = 3_000  # pictures on a page
_BLOCK, _SIDE = 256, 96  # images that are read together, pixels


class Wrong(NamedTuple):
    """A test image that was taken for another class."""

    uri: str
    small: bool
    true: int
    chosen: int


class Classes(NamedTuple):
    """What the page of classes shows of a group."""

    method: str  # title of the calibrator that chose
    names: Sequence[str]  # of classes by label
    # A row per class with test images, by its label, worst first: `task` from 1, `images`, accuracy
    # in percent by title of calibrator, `taken`, the label it is most often taken for, or -1.
    table: pd.DataFrame
    # The most frequent: true label, chosen label, images, their share of the true class in percent.
    pairs: list[tuple[int, int, int, float]]
    order: list[int]  # labels such that classes that are confused stand side by side
    cells: list[tuple[int, int, int, float]]  # every pair that occurs, right ones included
    wrong: Sequence[Wrong] = ()  # at most `MOST`, evenly spaced, by true class
    number: int = 0  # how many there are
    missing: str = "Pictures are in the report of each run alone."  # why there are none


def load(group: Group, names: Sequence[str]) -> Classes | None:
    """Counts a group's predictions by class; None where they were not kept.

    Args:
        group: of `runs.load`.
        names: of classes by label; empty where they are not known.
    """
    found = [predictions(run) for run in group.runs]
    roles = frames.leading(group)
    best = roles.get("best", "raw")
    methods = dict.fromkeys((best, roles.get(FDC.name, best), "raw"))
    if not all(
        {"label", "task", *(f"{name}_label" for name in methods)} <= of.keys() for of in found
    ):
        return None
    of = {name: np.concatenate([each[name] for each in found]) for name in found[0]}
    size = max(int(of["label"].max()), *(int(of[f"{name}_label"].max()) for name in methods)) + 1
    totals = np.bincount(of["label"], minlength=size)
    counts = evaluation.task_confusion(of["label"], of[f"{best}_label"], size)
    wrong = counts - np.diag(np.diag(counts))
    table = pd.DataFrame({"task": -1, "images": totals}, index=range(size))
    table.loc[of["label"], "task"] = of["task"] + 1
    for name in methods:
        right = np.bincount(of["label"][of["label"] == of[f"{name}_label"]], minlength=size)
        table[formatting.method_title(name)] = 100.0 * right / np.maximum(totals, 1)
    table["taken"] = np.where(wrong.any(axis=1), wrong.argmax(axis=1), -1)
    known: Any = table[totals > 0]
    table = known.sort_values(formatting.method_title(best), kind="stable")
    shown = [names[c] if c < len(names) else f"class {c + 1}" for c in range(size)]
    shares = 100.0 * counts / np.maximum(totals, 1)[:, None]
    cells = [
        (row, column, int(counts[row, column]), float(shares[row, column]))
        for row, column in np.argwhere(counts).tolist()
    ]
    pairs = sorted((cell for cell in cells if cell[0] != cell[1]), key=lambda cell: -cell[2])
    order = sorted_by_likeness(wrong / np.maximum(totals, 1)[:, None])
    return Classes(formatting.method_title(best), shown, table, pairs[:WORST], order, cells)


def sorted_by_likeness(wrong: np.ndarray) -> list[int]:
    """Orders classes [c] by average linkage of how often two are taken for each other [c c]."""
    if len(wrong) < 3:
        return [*range(len(wrong))]
    alike = wrong + wrong.T
    apart = distance.squareform(alike.max() - alike, checks=False)
    linked = hierarchy.linkage(apart, "average", optimal_ordering=len(wrong) <= 500)
    return hierarchy.leaves_list(linked).tolist()


def with_pictures(found: Classes, group: Group) -> Classes:
    """Adds the test images of the first seed that the best calibrator took for another class."""
    run: Any = group.runs[0]
    of, best = predictions(run), frames.leading(group).get("best", "raw")
    label, chosen = of["label"], of[f"{best}_label"]
    every = np.flatnonzero(chosen != label)
    every = every[np.argsort(label[every], kind="stable")]
    rows, wrong = pictures.spaced(every, MOST), []
    for block in np.split(rows, range(_BLOCK, len(rows), _BLOCK)):
        try:
            images = run.test_images(block) if len(block) else ()
        except InputError as error:
            reason = f"The test images could not be read: {error}"
            return found._replace(number=len(every), missing=reason)
        for row, image in zip(block, images, strict=True):
            uri, small = pictures.data_uri(image, _SIDE), pictures.is_small(image)
            wrong.append(Wrong(uri, small, int(label[row]), int(chosen[row])))
    return found._replace(wrong=wrong, number=len(every), missing="")
