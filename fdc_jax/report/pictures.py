"""Test images that FDC put right and that it spoiled, with the evidence of both heads."""

import base64
import io
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, UInt8
from PIL import Image

from fdc_jax.calibration import FDC
from fdc_jax.errors import InputError
from fdc_jax.machine.files import read_npy
from fdc_jax.report.runs import predictions
from fdc_jax.run.prediction import EVIDENCE, parts_of_score

PICTURES = 4  # of each kind
_SIDE = 160  # pixels, beyond which a picture is made smaller
_SMALL = 64  # pixels, up to which every one of them counts


class Evidence(NamedTuple):
    """One line of evidence: what it says for the true and for the wrongly chosen task.

    Of a new image, for the chosen task and for the next one.
    """

    name: str
    true: float
    wrong: float


class Said(NamedTuple):
    """A class and its task, in words and counted from 1."""

    name: str
    task: int


class Picture(NamedTuple):
    """A test image on which raw logits and FDC disagree."""

    row: int  # of `predictions.npz`
    uri: str
    small: bool  # whether it has so few pixels that they should stay visible
    true: Said
    raw: Said
    fdc: Said
    evidence: list[Evidence]  # empty where features or the calibrator are gone


class Pictures(NamedTuple):
    """Pictures of both kinds, at most `PICTURES` evenly spaced, and how many there are."""

    repaired: Sequence[Picture] = ()  # FDC chose the right class and raw logits a wrong task
    num_repaired: int = 0
    broken: Sequence[Picture] = ()  # raw logits chose the right class and FDC a wrong task
    num_broken: int = 0
    missing: str = ""  # why there are no pictures


def load(run: Any) -> Pictures:
    """Returns the pictures of a run.

    Args:
        run: one seed, as `fdc_jax.open_run` returns it.
    """
    columns, kinds = predictions(run), ("", "raw_", "fdc_")
    if reason := without_images(run):
        return Pictures(missing=reason)
    if not {f"{kind}{part}" for kind in kinds for part in ("label", "task")} <= columns.keys():
        return Pictures(missing="The run kept no predictions of FDC.")
    label, task = columns["label"], columns["task"]
    repaired = np.flatnonzero((columns["raw_task"] != task) & (columns["fdc_label"] == label))
    broken = np.flatnonzero((columns["raw_label"] == label) & (columns["fdc_task"] != task))
    first = spaced(repaired, PICTURES)
    rows = np.concatenate([first, spaced(broken, PICTURES)])
    if not len(rows):
        return Pictures(missing="FDC changed the task of no image to or from the true one.")
    try:
        images, evidence = run.test_images(rows), _evidence(run, columns, rows)
    except InputError as error:
        return Pictures(missing=f"The test images could not be read: {error}")

    def said(kind: str, row: int) -> Said:
        label, task = (int(columns[f"{kind}{part}"][row]) for part in ("label", "task"))
        return Said(class_name(run.class_names, label), task + 1)

    drawn = [
        Picture(row, data_uri(image), is_small(image), *(said(k, row) for k in kinds), evidence=of)
        for row, image, of in zip(rows.tolist(), images, evidence, strict=True)
    ]
    return Pictures(drawn[: len(first)], len(repaired), drawn[len(first) :], len(broken))


def without_images(run: Any) -> str:
    """Returns why a run has no images, which none of `fdc posthoc` has; "" if it has."""
    return "" if "encoder" in run.results else "Features of other code have no images."


def class_name(names: Sequence[str], label: int) -> str:
    """Returns the name of a class by its position, or the position where names are missing."""
    return names[label] if label < len(names) else f"class {label + 1}"


def spaced(rows: Int[np.ndarray, " n"], most: int) -> Int[np.ndarray, " k"]:
    """Returns all of these, or as many, evenly spaced."""
    most = min(len(rows), most)
    return rows[((np.arange(most) + 0.5) * len(rows) / max(most, 1)).astype(int)]


def _evidence(
    run: Any, columns: dict[str, np.ndarray], rows: Int[np.ndarray, " k"]
) -> list[list[Evidence]]:
    """Returns the evidence for each row; none where it would not explain the predictions."""
    none: list[list[Evidence]] = [[] for _ in rows]
    paths = [run.folder / "features" / f"test_{view}.npy" for view in ("adapted", "pretrained")]
    views = [read_npy(path)[rows] if path.exists() else None for path in paths]
    if views[0] is None:
        return none
    try:
        terms = run.calibrator(FDC.name).terms(*views)
    except InputError:
        return none
    true, raw, fdc = (columns[name][rows] for name in ("task", "raw_task", "fdc_task"))
    scores, tasks = terms.fuse(), (true, np.where(raw != true, raw, fdc))
    parts = [*parts_of_score(terms).values(), scores.task_scores]
    names = [*[*EVIDENCE.values()][: len(parts) - 1], "FDC score"]
    values = np.stack([[part[range(len(rows)), t] for part in parts] for t in tasks], axis=2)
    return [
        [Evidence(name, *pair) for name, pair in zip(names, values[:, i].tolist(), strict=True)]
        if agrees
        else []
        for i, agrees in enumerate(scores.task == fdc)
    ]


def is_small(image: UInt8[np.ndarray, "h w 3"]) -> bool:
    """Tells whether every pixel of an image counts."""
    return max(image.shape[:2]) <= _SMALL


def data_uri(image: UInt8[np.ndarray, "h w 3"], side: int = _SIDE) -> str:
    """Returns a PNG of a small image, or a JPEG of a larger one at a smaller size."""
    picture, file = Image.fromarray(np.asarray(image)), io.BytesIO()
    kind = "png" if is_small(image) else "jpeg"
    picture.thumbnail((side, side))
    picture.save(file, kind, quality=85, optimize=True)
    return inline(file.getvalue(), kind)


def inline(content: bytes, kind: str) -> str:
    """Returns a file of a kind such as `png` as a data URI."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
