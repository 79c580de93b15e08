"""Accuracy and confusion by class, pictures with a wrong answer, and pictures unlike all classes.

Labels are class-order positions, and answers come from the headline method of the group. Counts are
over the test images of all seeds; pictures are of the first seed.
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
from fdc_jax.report import formatting, pictures
from fdc_jax.report.runs import Group, predictions

WORST = 20  # pairs of classes in the table
UNLIKE = 8  # pictures unlike anything learned
MOST = 3_000  # wrong pictures on the page
_BLOCK, _SIDE = 256, 96  # images that are read together, and their pixels on the page


class Shown(NamedTuple):
    """A test image with its true and its chosen label."""

    uri: str
    small: bool
    true: int
    chosen: int


class Classes(NamedTuple):
    """Content of the page of classes of a group."""

    names: Sequence[str]  # of classes by label
    # A row per class with test images, by its label, worst first: `task` from 1, `images`, accuracy
    # in percent by title of calibrator, `taken`, the most frequent wrong label, or -1.
    table: pd.DataFrame
    # The most frequent confusions: true label, chosen label, images, percent of the true class.
    pairs: list[tuple[int, int, int, float]]
    order: list[int]  # labels, such that confused classes are side by side
    cells: list[tuple[int, int, int, float]]  # as `pairs`, of all pairs that occur
    untested: Sequence[str]  # names of classes without test images
    num_pairs: int  # of classes that are confused
    seeds: int  # number of seeds whose images are counted
    wrong: Sequence[Shown] = ()  # at most `MOST` images, evenly spaced, by true class
    number: int = 0  # of images with a wrong answer
    unlike: Sequence[Shown] = ()  # at most `UNLIKE` images unlike anything learned
    num_unlike: int = 0
    missing: str = (
        "Wrong pictures are in a report of one configuration alone."  # reason for no pictures
    )


def load(group: Group) -> Classes | None:
    """Counts a group's predictions by class; returns None if they were not kept."""
    methods = [*dict.fromkeys(n for n in (group.headline, FDC.name, "raw") if n in group.methods)]
    columns = ["label", "task", *(f"{name}_label" for name in methods)]
    seeds = [pd.DataFrame(predictions(run)) for run in group.runs]
    if not all({*columns} <= {*seed} for seed in seeds):
        return None
    images: Any = pd.concat(seeds)[columns]
    size = int(images.drop(columns="task").to_numpy().max()) + 1
    counts = evaluation.task_confusion(images["label"], images[f"{group.headline}_label"], size)
    totals = np.maximum(counts.sum(axis=1, keepdims=True), 1)
    wrong = counts - np.diag(np.diag(counts))
    shares = 100.0 * counts / totals
    by_class = images.groupby("label")
    table = pd.DataFrame({"task": by_class["task"].first() + 1, "images": by_class.size()})
    for name in methods:
        right = images[f"{name}_label"].eq(images["label"])
        table[formatting.method_title(name)] = 100.0 * right.groupby(images["label"]).mean()
    taken_for = np.where(wrong.any(axis=1), wrong.argmax(axis=1), -1)
    table["taken"] = taken_for[table.index]
    table = table.sort_values(formatting.method_title(group.headline), kind="stable")
    cells = [
        (true, chosen, int(counts[true, chosen]), float(shares[true, chosen]))
        for true, chosen in np.argwhere(counts).tolist()
    ]
    pairs = sorted((cell for cell in cells if cell[0] != cell[1]), key=lambda cell: -cell[2])
    num_classes = max(size, group.results.num_classes)
    names = [pictures.class_name(group.runs[0].class_names, label) for label in range(num_classes)]
    untested = [name for label, name in enumerate(names) if label not in table.index]
    order = sorted_by_likeness(wrong / totals)
    shown = pairs[:WORST]
    return Classes(names, table, shown, order, cells, untested, len(pairs), len(group.runs))


def sorted_by_likeness(wrong: np.ndarray) -> list[int]:
    """Returns the order of classes [c] by average linkage of their confusions [c c]."""
    if len(wrong) < 3:
        return [*range(len(wrong))]
    alike = wrong + wrong.T
    distances = distance.squareform(alike.max() - alike, checks=False)
    tree = hierarchy.linkage(distances, "average", optimal_ordering=len(wrong) <= 500)
    return hierarchy.leaves_list(tree).tolist()


def with_pictures(classes: Classes, group: Group) -> Classes:
    """Adds test images of the first seed: wrong answers, and images unlike anything learned."""
    run: Any = group.runs[0]
    columns = predictions(run)
    label = columns["label"]
    chosen = columns[f"{group.headline}_label"]
    wrong = np.flatnonzero(chosen != label)
    classes = classes._replace(number=len(wrong), missing="")
    unlike = _unlike(run, len(label))
    rows = pictures.spaced(wrong[np.argsort(label[wrong], kind="stable")], MOST)
    rows, shown = np.concatenate([unlike[:UNLIKE], rows]), []
    for block in np.split(rows, range(_BLOCK, len(rows), _BLOCK)):
        try:
            images = run.test_images(block) if len(block) else ()
        except InputError as error:
            return classes._replace(missing=f"The test images could not be read: {error}")
        for row, image in zip(block, images, strict=True):
            uri = pictures.data_uri(image, _SIDE)
            shown.append(Shown(uri, pictures.is_small(image), int(label[row]), int(chosen[row])))
    count = len(unlike[:UNLIKE])
    return classes._replace(wrong=shown[count:], unlike=shown[:count], num_unlike=len(unlike))


def _unlike(run: Any, count: int) -> Int[np.ndarray, " k"]:
    """Returns rows of images unlike anything learned, least typical first; empty if unknown."""
    names = [n for n in run.results.accuracy if n in METHODS and METHODS[n].gives_confidence]
    try:
        views = pictures.test_views(run)
        typicality = run.calibrator(names[0]).assess(*views)[1] if names and views else ()
    except InputError:
        typicality = ()
    if len(typicality) != count:
        return np.zeros(0, int)
    order = np.argsort(typicality, kind="stable")
    return order[typicality[order] < UNTYPICAL]
