"""Classes: how well each one is known, which it is taken for, wrong and unlike pictures.

Labels are class-order positions. Counts are over the test images of all seeds, pictures of the
first; what is chosen is by the best calibrator of the run.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Int
from scipy.cluster import hierarchy
from scipy.spatial import distance

from fdc_jax import evaluation
from fdc_jax.calibration import FDC, METHODS
from fdc_jax.calibration.familiarity import UNTYPICAL
from fdc_jax.errors import InputError
from fdc_jax.machine.files import read_npy
from fdc_jax.report import formatting, pictures
from fdc_jax.report.runs import Group, predictions

WORST = 20  # pairs of classes that are named
UNLIKE = 8  # pictures that are unlike anything learned
MOST = 3_000  # pictures on a page
_BLOCK, _SIDE = 256, 96  # images that are read together, pixels


class Shown(NamedTuple):
    """A test image, its class and the one it was taken for."""

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
    wrong: Sequence[Shown] = ()  # at most `MOST`, evenly spaced, by true class
    number: int = 0  # how many there are
    unlike: Sequence[Shown] = ()  # at most `UNLIKE` images unlike anything learned, the least first
    num_unlike: int = 0
    missing: str = "Pictures are in the report of each run alone."  # why there are none
    untested: Sequence[str] = ()  # names of classes without test images


def load(group: Group) -> Classes | None:
    """Counts a group's predictions by class; None where they were not kept."""
    roles = group.leading
    best = roles.get("best", "raw")
    methods = [*dict.fromkeys((best, roles.get(FDC.name, best), "raw"))]
    columns = ["label", "task", *(f"{name}_label" for name in methods)]
    seeds = [pd.DataFrame(predictions(run)) for run in group.runs]
    if not all({*columns} <= {*seed} for seed in seeds):
        return None
    of: Any = pd.concat(seeds)[columns]
    size = int(of.drop(columns="task").to_numpy().max()) + 1
    counts = evaluation.task_confusion(of["label"], of[f"{best}_label"], size)
    totals = np.maximum(counts.sum(axis=1, keepdims=True), 1)
    wrong, shares = counts - np.diag(np.diag(counts)), 100.0 * counts / totals
    by_class = of.groupby("label")
    table = pd.DataFrame({"task": by_class["task"].first() + 1, "images": by_class.size()})
    for name in methods:
        right = of[f"{name}_label"].eq(of["label"])
        table[formatting.method_title(name)] = 100.0 * right.groupby(of["label"]).mean()
    taken = np.where(wrong.any(axis=1), wrong.argmax(axis=1), -1)
    table["taken"] = taken[table.index]
    table = table.sort_values(formatting.method_title(best), kind="stable")
    cells = [
        (row, column, int(counts[row, column]), float(shares[row, column]))
        for row, column in np.argwhere(counts).tolist()
    ]
    pairs = sorted((cell for cell in cells if cell[0] != cell[1]), key=lambda cell: -cell[2])
    num_classes = max(size, group.results.get("num_classes") or 0)
    names = [pictures.class_name(group.runs[0].class_names, label) for label in range(num_classes)]
    untested = [name for label, name in enumerate(names) if label not in table.index]
    order = sorted_by_likeness(wrong / totals)
    title = formatting.method_title(best)
    return Classes(title, names, table, pairs[:WORST], order, cells, untested=untested)


def sorted_by_likeness(wrong: np.ndarray) -> list[int]:
    """Orders classes [c] by average linkage of how often two are taken for each other [c c]."""
    if len(wrong) < 3:
        return [*range(len(wrong))]
    alike = wrong + wrong.T
    apart = distance.squareform(alike.max() - alike, checks=False)
    linked = hierarchy.linkage(apart, "average", optimal_ordering=len(wrong) <= 500)
    return hierarchy.leaves_list(linked).tolist()


def with_pictures(classes: Classes, group: Group) -> Classes:
    """Adds test images of the first seed: wrong ones of the best calibrator, and unlike ones."""
    run: Any = group.runs[0]
    columns, best = predictions(run), group.leading.get("best", "raw")
    label, chosen = columns["label"], columns[f"{best}_label"]
    wrong = np.flatnonzero(chosen != label)
    if reason := pictures.without_images(run):
        return classes._replace(number=len(wrong), missing=reason)
    unlike = _unlike(run, len(label))
    rows = pictures.spaced(wrong[np.argsort(label[wrong], kind="stable")], MOST)
    rows, shown = np.concatenate([unlike[:UNLIKE], rows]), []
    for block in np.split(rows, range(_BLOCK, len(rows), _BLOCK)):
        try:
            images = run.test_images(block) if len(block) else ()
        except InputError as error:
            reason = f"The test images could not be read: {error}"
            return classes._replace(number=len(wrong), missing=reason)
        for row, image in zip(block, images, strict=True):
            uri, small = pictures.data_uri(image, _SIDE), pictures.is_small(image)
            shown.append(Shown(uri, small, int(label[row]), int(chosen[row])))
    numbers = {"number": len(wrong), "num_unlike": len(unlike), "missing": ""}
    count = len(unlike[:UNLIKE])
    return classes._replace(wrong=shown[count:], unlike=shown[:count], **numbers)


def _unlike(run: Any, count: int) -> Int[np.ndarray, " k"]:
    """Returns rows of images that are unlike anything learned, the least typical first."""
    names = [name for name in run.results["accuracy"] if name in METHODS]
    paths = [run.folder / "features" / f"test_{view}.npy" for view in ("adapted", "pretrained")]
    for name in names:
        if METHODS[name].gives_confidence and paths[0].exists():
            views = [read_npy(path) for path in paths if path.exists()]
            try:
                typicality = run.calibrator(name).assess(*views)[1]
            except InputError:
                break
            order = np.argsort(typicality, kind="stable")
            return order[typicality[order] < UNTYPICAL] if len(order) == count else order[:0]
    return np.zeros(0, int)
