"""Predictions of a run for images of any source: a table per batch, with the evidence.

Images get the evaluation transform, the encoders, the final heads and one calibrator of the run.
They are decoded in threads batch by batch, so that memory does not grow with their number.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from PIL import Image

from fdc_jax.calibration import FDC, METHODS, Terms, familiarity
from fdc_jax.calibration.calibrator import best_by_task
from fdc_jax.calibration.inputs import host_array, whole_number
from fdc_jax.data import folder
from fdc_jax.data.batches import EvaluationBatches
from fdc_jax.data.benchmarks import BENCHMARKS
from fdc_jax.data.dataset import Dataset
from fdc_jax.errors import InputError
from fdc_jax.machine import devices
from fdc_jax.machine.files import named_path

if TYPE_CHECKING:
    from jaxtyping import Float, UInt8

    from fdc_jax.run.saved import Run

_log = logging.getLogger("fdc_jax.predict")

# Parts of a score of FDC: columns, and their titles on pages.
EVIDENCE = {
    "raw_logit": "Raw logit",
    "filtered_logit": "Filtered logit",
    "residual_adapted": "Residual, E_T",
    "affinity_adapted": "Affinity, E_T",
    "residual_pretrained": "Residual, E_0",
    "affinity_pretrained": "Affinity, E_0",
}


def parts_of_score(terms: Terms) -> dict[str, Float[np.ndarray, "n tasks"]]:
    """Splits FDC's scores into the parts of `EVIDENCE`; all except the raw logit add up to them.

    A score is the filtered logit, then residual and affinity of each view in units of the head's
    score scale (paper, Eq. dual-main). Therefore the parts are differences of scores with
    components switched on.
    """
    logit = terms.fuse(rlc=False, pac=False).task_scores
    scores = [terms.fuse(tsf=False, rlc=False, pac=False).task_scores, logit]
    for other in ("pretrained_view", "adapted_view")[: len(terms.tasks)]:
        off = {other: False}
        scores.append(terms.fuse(pac=False, **off).task_scores - logit)
        scores.append(terms.fuse(rlc=False, **off).task_scores - logit)
    return dict(zip(EVIDENCE, map(np.asarray, scores), strict=False))


class Predictions:
    """Predictions of a run, batch by batch; arguments and errors are those of `Run.predict`.

    Iterating yields a table per batch, and the images as the encoder sees them unscaled. Images
    with a typicality below `unlike` percent are unlike anything learned; so many of new images of
    the learned classes are, too.

    Attributes:
        before_training: True if the run is not finished and its answer before training is used.
        method: name of the calibrator that answers.
        unreadable: errors of the images that could not be read so far, by position.
    """

    def __init__(
        self,
        run: Run,
        images: Any,
        top: int = 5,
        method: str | None = None,
        unlike: float = 100.0 * familiarity.UNTYPICAL,
    ):
        top = whole_number(top, "top", 1)
        if not 0.0 <= unlike <= 100.0:
            raise InputError(f"unlike: expected percent from 0 to 100, found {unlike:g}")
        self.unlike = unlike
        named_images = list(_named(images))
        if not named_images:
            raise InputError("expected images, found none")
        answering = run.answering()
        self.before_training = answering is not run
        self.run = run = answering
        self.top, self.method = top, method or run.best_calibrator
        config = run.config
        grey_bits = config.data.grey_bits or 16
        labels = np.zeros(len(named_images), np.int32)
        names, contents = zip(*named_images, strict=True)
        self.images = _NewImages(
            name="images",
            split="",
            partition="",
            labels=labels,
            ids=names,
            class_names=(),
            read=lambda index: _content(contents[index]),
            upright=config.benchmark not in BENCHMARKS,  # as the training images were
            grey_bits=grey_bits,
        )
        self.unreadable = self.images.unreadable
        self.calibrator: Any = run.calibrator(self.method)
        self.num_tasks = self.calibrator.num_tasks
        # The calibrator of a stopped run may be older than the heads.
        self.heads = run.heads()[: self.num_tasks]
        self.calibrator.replace_heads(self.heads)
        self.class_names = np.array(run.class_names, object)
        # Small batches give an early estimate of the time left; powers of two compile few programs.
        last = len(named_images) - 1
        small = 1 << max(last // 32, min(last, 7)).bit_length()
        self.batch_size = min(run.config.evaluation.batch_size, small)

    def __len__(self) -> int:
        """Returns the number of batches."""
        return -(-len(self.images) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[pd.DataFrame, UInt8[np.ndarray, "n s s 3"]]]:
        config, indices = self.run.config, np.arange(len(self.images))
        self.unreadable.clear()
        self.images.skipped.paths.clear()
        batches = EvaluationBatches(
            self.images,
            indices,
            None,
            self.batch_size,
            image_size=config.encoder.image_size,
            workers=config.data.workers,
        )
        ahead, behind = itertools.tee(batches)
        encoders, tasks = self.run.encoders, (self.num_tasks, 0)[: len(self.calibrator.widths)]
        replaced = [self.run.encoder(t) for t in tasks]
        features = encoders.extract.stream(encoders.backbone, replaced, ahead)
        for views, batch in zip(map(devices.to_host, features), behind, strict=True):
            rows, indices = np.split(indices, [len(views[0])])
            readable = ~np.isin(rows, list(self.unreadable))
            for row in rows[~readable].tolist():
                _log.error("%s", self.unreadable[row])
            if readable.any():
                table = self._table(*(view[readable] for view in views))
                table.insert(0, "image", [self.images.ids[row] for row in rows[readable]])
                yield table.set_index(rows[readable]), batch.images[: len(rows)][readable]
        if self.images.skipped.paths:
            _log.warning("skipped %s", self.images.skipped.text())

    def _table(self, *views: Float[np.ndarray, "n d"]) -> pd.DataFrame:
        """Returns all columns except `image`, from the adapted and the pretrained features."""
        calibrator, columns, evidence = self.calibrator, {}, {}
        if isinstance(calibrator, FDC):
            terms = calibrator.terms(*views)
            scores = terms.fuse()
            by_class = terms.by_class()
            evidence = parts_of_score(terms)
        else:
            by_class = calibrator.class_scores(*views)
            scores = best_by_task(by_class, calibrator.classes)
        logits = np.concatenate([head.logits(views[0]) for head in self.heads], axis=1)
        raw = best_by_task(logits, calibrator.classes)
        label, task, rows = scores.label, scores.task, np.arange(len(by_class))
        labels = np.concatenate(scores.classes)
        tasks = np.repeat(np.arange(self.num_tasks), [*map(len, scores.classes)])
        # The prediction comes first even if another class has the same score.
        order = np.where(labels == label[:, None], np.inf, by_class)
        ranked = np.argsort(-order, axis=1, kind="stable")[:, : self.top].T
        probabilities = None
        if METHODS[self.method].gives_confidence:
            probabilities, typicality = self.calibrator.assess(*views)
            columns["typicality"] = typicality
            columns["unlike_learned"] = 100.0 * typicality < self.unlike
        for rank, best in enumerate(ranked, start=1):
            suffix = f"_{rank}" if rank > 1 else ""
            columns[f"class{suffix}"] = self.class_names[labels[best]]
            if probabilities is not None:
                columns[f"confidence{suffix}"] = probabilities[rows, best]
            columns[f"task{suffix}"] = tasks[best] + 1
            columns[f"score{suffix}"] = by_class[rows, best]
        columns["raw_class"] = self.class_names[raw.label]
        columns["raw_task"] = raw.task + 1
        columns["changed"] = raw.label != label
        columns |= {name: values[rows, task] for name, values in evidence.items()}
        if self.num_tasks > 1:
            rival_scores = scores.task_scores.copy()
            rival_scores[rows, task] = -np.inf
            rival = rival_scores.argmax(axis=1)
            columns["rival_class"] = self.class_names[scores.label_in_task(rival)]
            columns["rival_task"] = rival + 1
            columns["rival_score"] = rival_scores[rows, rival]
            columns |= {f"rival_{name}": values[rows, rival] for name, values in evidence.items()}
        return pd.DataFrame(columns)

    def table(self) -> pd.DataFrame:
        """Returns the tables of all batches as one; InputError if no image can be read."""
        tables = [table for table, _ in self]
        if not tables:
            raise InputError(f"no image could be read: {self.unreadable[0]}")
        return pd.concat(tables)


# Images ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _NewImages(Dataset):
    """Named images that belong to no data set; an unreadable image becomes a black one."""

    unreadable: dict[int, str] = dataclasses.field(default_factory=dict)  # errors by index

    def image(self, index: int) -> Image.Image:
        try:
            image = super().image(index)
            if image.info.get("frames", 1) > 1:
                self.skipped.add("frames after the first of", (self.ids[index],))
            return image
        except InputError as error:
            self.unreadable[index] = str(error)
            return Image.new("RGB", (1, 1))

    def describe(self, index: int) -> str:
        return self.ids[index]


def _named(images: Any) -> Iterator[tuple[str, Path | Image.Image]]:
    """Yields every image with its name: its path, or its position."""
    for position, image in enumerate(_flattened(images)):
        if isinstance(image, Path):
            yield os.fsencode(image).decode("utf-8", "backslashreplace"), image
            continue
        if isinstance(image, np.ndarray):
            valid_shape = image.ndim == 2 or (image.ndim == 3 and image.shape[2] == 3)
            if image.dtype != np.uint8 or not valid_shape or not image.size:
                raise InputError(
                    f"image {position}: expected a uint8 array [h, w], [h, w, 3] or [n, h, w, 3], "
                    f"found {image.dtype} of shape {[*image.shape]}"
                )
            image = Image.fromarray(image)
        yield f"image {position}", image


def _flattened(images: Any) -> Iterator[Path | np.ndarray | Image.Image]:
    """Yields images one by one, from paths, folders, arrays, images of Pillow or all of these."""
    if isinstance(images, str | os.PathLike):
        path = named_path("image", images)
        if not path.exists():
            raise InputError(f"{path}: no such image or folder")
        yield from folder.find_images(path) if path.is_dir() else [path]
    elif isinstance(images, Image.Image):
        yield images
    elif hasattr(images, "__array__"):
        array = host_array(images, "images")
        if array.ndim and array.dtype.kind in "OU":
            yield from _flattened(array.tolist())
        else:
            yield from array if array.ndim == 4 else [array]
    elif isinstance(images, Iterable):
        for image in images:
            yield from _flattened(image)
    else:
        raise InputError(f"expected paths, arrays or images, found {type(images).__name__}")


def _content(image: Path | Image.Image) -> bytes | Image.Image:
    return folder.file_bytes(image) if isinstance(image, Path) else image
