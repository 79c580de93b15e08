"""Test images that FDC repaired or spoiled, with the evidence for two tasks."""

import base64
import io
from collections.abc import Sequence
from itertools import product, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int, UInt8
from PIL import Image

from fdc_jax.calibration import FDC, inputs
from fdc_jax.errors import InputError
from fdc_jax.machine.files import read_npy
from fdc_jax.report.runs import predictions
from fdc_jax.run.prediction import EVIDENCE, parts_of_score

PICTURES = 4  # of each kind
_SIDE = 160  # pixels of the longer side of a picture, at most
_SMALL = 64  # pixels of the longer side, up to which single pixels stay visible


class Evidence(NamedTuple):
    """A part of the scores of two tasks: the true and a wrong task, or the two best tasks."""

    name: str
    true: float
    wrong: float


class Answer(NamedTuple):
    """The name of a class, and its task from 1."""

    name: str
    task: int


class Picture(NamedTuple):
    """A test image on which raw logits and FDC disagree."""

    row: int  # of `predictions.npz`
    uri: str
    small: bool  # see `is_small`
    true: Answer
    raw: Answer
    fdc: Answer
    evidence: list[Evidence]  # empty if features or the calibrator are missing


class Pictures(NamedTuple):
    """At most `PICTURES` images per kind, evenly spaced, and the number of all of that kind."""

    repaired: Sequence[Picture] = ()  # FDC chose the right class and raw logits a wrong task
    num_repaired: int = 0
    broken: Sequence[Picture] = ()  # raw logits chose the right class and FDC a wrong task
    num_broken: int = 0
    missing: str = ""  # reason for no pictures


def load(run: Any) -> Pictures:
    """Returns the pictures of one seed, a run of `fdc_jax.open_run`."""
    columns, kinds = predictions(run), ("", "raw_", "fdc_")
    if any(f"{kind}{part}" not in columns for kind, part in product(kinds, ("label", "task"))):
        return Pictures(missing="The run kept no predictions of FDC.")
    labels = columns["label"]
    tasks = columns["task"]
    repaired = np.flatnonzero((columns["raw_task"] != tasks) & (columns["fdc_label"] == labels))
    broken = np.flatnonzero((columns["raw_label"] == labels) & (columns["fdc_task"] != tasks))
    first = spaced(repaired, PICTURES)
    rows = np.concatenate([first, spaced(broken, PICTURES)])
    if not len(rows):
        return Pictures(missing="FDC changed the task of no image to or from the true one.")
    try:
        images = run.test_images(rows)
        evidence = _evidence(run, columns, rows)
    except InputError as error:
        return Pictures(missing=f"The test images could not be read: {error}")

    shown = []
    for row, image, parts in zip(rows.tolist(), images, evidence, strict=True):
        answers = []
        for kind in kinds:
            label, task = (int(columns[f"{kind}{part}"][row]) for part in ("label", "task"))
            answers.append(Answer(class_name(run.class_names, label), task + 1))
        shown.append(Picture(row, data_uri(image), is_small(image), *answers, evidence=parts))
    return Pictures(shown[: len(first)], len(repaired), shown[len(first) :], len(broken))


def class_name(names: Sequence[str], label: int) -> str:
    """Returns the name of a class by its label; without a name, its position from 1."""
    return names[label] if label < len(names) else f"class {label + 1}"


def spaced(rows: Int[np.ndarray, " n"], most: int) -> Int[np.ndarray, " k"]:
    """Returns all rows if at most `most`, else the middle row of each of `most` equal parts."""
    count = min(len(rows), most)
    return rows[((np.arange(count) + 0.5) * len(rows) / max(count, 1)).astype(int)]


def _evidence(
    run: Any, columns: dict[str, np.ndarray], rows: Int[np.ndarray, " k"]
) -> list[list[Evidence]]:
    """Returns the evidence by row; empty if the calibrator now predicts another task."""
    views = [features[rows] for features in test_views(run)]
    try:
        terms = run.calibrator(FDC.name).terms(*views) if views else None
    except InputError:
        terms = None
    if terms is None:
        return [[] for _ in rows]
    scores = terms.fuse()
    parts = {EVIDENCE[column]: part for column, part in parts_of_score(terms).items()}
    parts["FDC score"] = scores.task_scores
    true, raw, fdc = (columns[name][rows] for name in ("task", "raw_task", "fdc_task"))
    wrong = np.where(raw != true, raw, fdc)

    def of_row(row: int) -> list[Evidence]:
        pairs = {name: part[row, [true[row], wrong[row]]] for name, part in parts.items()}
        return [Evidence(name, *pair.tolist()) for name, pair in pairs.items()]

    return [of_row(row) if scores.task[row] == fdc[row] else [] for row in range(len(rows))]


def test_views(run: Any) -> list[Float[np.ndarray, "n d"]]:
    """Returns the saved test features by the final and the pretrained encoder, if there are any.

    Features by the pretrained encoder never stand in the place of missing ones by the final.
    """
    paths = [run.features_folder / f"test_{view}.npy" for view in inputs.VIEWS]
    return [*map(read_npy, takewhile(Path.exists, paths))]


def is_small(image: UInt8[np.ndarray, "h w 3"]) -> bool:
    """Returns True if an image has so few pixels that they should stay visible."""
    return max(image.shape[:2]) <= _SMALL


def data_uri(image: UInt8[np.ndarray, "h w 3"], side: int = _SIDE) -> str:
    """Returns the data URI of an image: PNG if it is small, else JPEG of at most `side` pixels."""
    file = io.BytesIO()
    picture = Image.fromarray(np.asarray(image))
    kind = "png" if is_small(image) else "jpeg"
    picture.thumbnail((side, side))
    picture.save(file, kind, quality=85, optimize=True)
    return inline(file.getvalue(), kind)


def inline(content: bytes, kind: str) -> str:
    """Returns the data URI of an image file of a kind such as `png`."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
