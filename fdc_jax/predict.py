"""Predictions of a run for new images, with the evidence for each.

    python -m fdc_jax.predict WORKDIR IMAGE_OR_FOLDER... [--top=5] [--output=predictions.csv]

Images take the evaluation path of the run: its transform, its encoders, its final heads and one of
its calibrators, as `fdc_jax.open_run` gives them. They are decoded in threads and written batch by
batch, so that memory does not grow with their number. The confidence is that of the run's class
Gaussians, whichever calibrator predicts.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import heapq
import itertools
import logging
import operator
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float, UInt8
from PIL import Image

import fdc_jax
from fdc_jax.calibration import FDC, METHODS, confidence
from fdc_jax.calibration.calibrator import best_by_task
from fdc_jax.data import folder
from fdc_jax.data.batches import EvaluationBatches
from fdc_jax.data.benchmarks import BENCHMARKS
from fdc_jax.data.dataset import Dataset
from fdc_jax.errors import InputError, Program, counted, escaped
from fdc_jax.machine.files import (
    check_writable_file,
    csv_text,
    named_path,
    write_atomically,
    write_text,
)
from fdc_jax.report import pictures
from fdc_jax.run.progress import Progress
from fdc_jax.run.saved import Run

_log = logging.getLogger("fdc_jax.predict")  # not __name__, which is __main__ in the program

# Parts of a score of FDC, in the order of `pictures.split`: columns, and their titles on the page.
EVIDENCE = {
    "raw_logit": "Raw logit",
    "filtered_logit": "Filtered logit",
    "residual_adapted": "Residual, E_T",
    "affinity_adapted": "Affinity, E_T",
    "residual_pretrained": "Residual, E_0",
    "affinity_pretrained": "Affinity, E_0",
}
# Most images that are printed, and shown on the page.
_PRINTED, _ON_PAGE = 10, 100


class Predictions:
    """Predictions of a run, batch by batch; arguments and errors are those of `predict`.

    Iterating yields for every batch a table, and the images as the encoder sees them unscaled.

    Attributes:
        unreadable: by position, the error of every image that could not be read so far.
    """

    def __init__(self, run: Any, images: Any, top: int = 5, method: str = "fdc"):
        if not isinstance(run, Run):
            raise InputError(f"run: expected what open_run returns, found {type(run).__name__}")
        if not isinstance(top, int | np.integer) or top < 1:
            raise InputError(f"top: expected a whole number from 1 on, found {top!r}")
        named = list(_named(images))
        if not named:
            raise InputError("expected images, found none")
        self.run, self.top, self.method = run, top, method
        self.images = _NewImages(
            *("images", "", "", np.zeros(len(named), np.int32)),
            ids=tuple(name for name, _ in named),
            class_names=(),
            read=lambda index: _read(named[index][1]),
            upright=run.config["benchmark"] not in BENCHMARKS,  # as the training images were
        )
        self.unreadable = self.images.unreadable
        self.calibrator = run.calibrator(method)
        self.num_tasks = self.calibrator.num_tasks
        # The calibrator of a stopped run may be older than the heads.
        self.heads = run.heads(self.num_tasks)
        self.calibrator.replace_heads(self.heads)
        self.gaussians: Any = None
        if "gaussians" in run.calibrators:
            self.gaussians = run.calibrator("gaussians")
        self.class_names = np.array(run.class_names, object)
        # Small batches show the time left soon; sizes that are powers of two compile few programs.
        last = len(named) - 1
        small = 1 << max(last // 32, min(last, 7)).bit_length()
        self.batch_size = min(run.config["evaluation.batch_size"], small)

    def __len__(self) -> int:
        """Returns the number of batches."""
        return -(-len(self.images) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[pd.DataFrame, UInt8[np.ndarray, "n s s 3"]]]:
        config, indices = self.run.config, np.arange(len(self.images))
        sizes = {"image_size": config["encoder.image_size"], "workers": config["data.workers"]}
        self.unreadable.clear()
        batches = EvaluationBatches(self.images, indices, None, self.batch_size, **sizes)
        ahead, behind = itertools.tee(batches)
        encoders = (self.num_tasks, 0)[: len(self.calibrator.widths)]
        for views, batch in zip(self.run.stream(ahead, *encoders), behind, strict=True):
            rows, indices = np.split(indices, [len(views[0])])
            readable = ~np.isin(rows, list(self.unreadable))
            for row in rows[~readable].tolist():
                _log.error("%s", self.unreadable[row])
            if readable.any():
                table = self._table(*(view[readable] for view in views))
                table.insert(0, "image", [self.images.ids[row] for row in rows[readable]])
                yield table.set_index(rows[readable]), batch.images[: len(rows)][readable]

    def _table(self, adapted: Float[np.ndarray, "n d"], *pretrained: Any) -> pd.DataFrame:
        """Returns all columns except `image`."""
        calibrator, evidence = self.calibrator, {}
        if isinstance(calibrator, FDC):
            terms = calibrator.terms(adapted, *pretrained)
            scores, by_class = terms.fuse(), terms.by_class()
            evidence = dict(zip(EVIDENCE, pictures.split(terms)[1][:-1], strict=False))
        else:
            by_class = calibrator.class_scores(adapted, *pretrained)
            scores = best_by_task(by_class, calibrator.classes)
        logits = np.concatenate([head.logits(adapted) for head in self.heads], axis=1)
        raw = best_by_task(logits, calibrator.classes)
        label, task, rows = scores.label, scores.task, np.arange(len(adapted))
        labels = np.concatenate(scores.classes)
        tasks = np.repeat(np.arange(self.num_tasks), [len(own) for own in scores.classes])
        # The prediction comes first even if another class has the same score.
        order = np.where(labels == label[:, None], np.inf, by_class)
        ranked = np.argsort(-order, axis=1, kind="stable")[:, : self.top].T
        columns: dict[str, Any] = {}
        if self.gaussians is not None:
            chances, typicality = self.gaussians.assess(adapted, *pretrained)
            columns["confidence"] = confidence.of_labels(chances, self.gaussians.classes, label)
            columns["typicality"] = typicality
            columns["unlike_learned"] = typicality < confidence.UNTYPICAL
        for rank, best in enumerate(ranked, start=1):
            suffix = f"_{rank}" if rank > 1 else ""
            columns[f"class{suffix}"] = self.class_names[labels[best]]
            columns[f"task{suffix}"] = tasks[best] + 1
            columns[f"score{suffix}"] = by_class[rows, best]
        columns["raw_class"] = self.class_names[raw.label]
        columns["raw_task"] = raw.task + 1
        columns["changed"] = raw.label != label
        columns |= {name: values[rows, task] for name, values in evidence.items()}
        if self.num_tasks > 1:
            others = scores.task_scores.copy()
            others[rows, task] = -np.inf
            rival = others.argmax(axis=1)
            columns["rival_class"] = self.class_names[scores.label_in_task(rival)]
            columns["rival_task"] = rival + 1
            columns["rival_score"] = others[rows, rival]
            columns |= {f"rival_{name}": values[rows, rival] for name, values in evidence.items()}
        return pd.DataFrame(columns)


def predict(run: Any, images: Any, top: int = 5, method: str = "fdc") -> pd.DataFrame:
    """Predicts the classes of images.

    Args:
        run: what `fdc_jax.open_run` returns.
        images: a file, a folder with images at any depth, a uint8 array [h, w], [h, w, 3] or
            [n, h, w, 3], an image of Pillow, or a sequence of these. All get the transform of test
            images.
        top: number of classes to name.
        method: name of the calibrator that predicts, one of the run's.

    Returns:
        A row per image, indexed by its position; an image that cannot be read is logged and has no
        row. Columns are those of docs/predict.md.

    Raises:
        InputError: no image can be read, or the run lacks what a prediction needs.
    """
    predictions = Predictions(run, images, top, method)
    tables = [table for table, _ in predictions]
    if not tables:
        raise InputError(f"no image could be read: {predictions.unreadable[0]}")
    return pd.concat(tables)


# Images ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _NewImages(Dataset):
    """Images that belong to no data set, by their own names; unreadable ones are black."""

    unreadable: dict[int, str] = dataclasses.field(default_factory=dict)  # errors by index

    def image(self, index: int) -> Image.Image:
        try:
            return super().image(index)
        except InputError as error:
            self.unreadable[index] = str(error)
            return Image.new("RGB", (1, 1))

    def describe(self, index: int) -> str:
        return self.ids[index]


def _named(images: Any) -> Iterator[tuple[str, Any]]:
    """Yields every image with its name: its path, or its position."""
    for position, image in enumerate(_flattened(images)):
        if isinstance(image, Path):
            yield os.fsencode(image).decode("utf-8", "backslashreplace"), image
            continue
        if isinstance(image, np.ndarray):
            colours = image.shape[2:] in ((), (3,))
            if image.dtype != np.uint8 or image.ndim not in (2, 3) or not colours or not image.size:
                raise InputError(
                    f"image {position}: expected a uint8 array [h, w], [h, w, 3] or [n, h, w, 3], "
                    f"found {image.dtype} of shape {[*image.shape]}"
                )
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
        array = np.asarray(images)
        if array.ndim and array.dtype.kind in "OU":
            yield from _flattened(array.tolist())
        else:
            yield from array if array.ndim == 4 else [array]
    elif isinstance(images, Iterable):
        for some in images:
            yield from _flattened(some)
    else:
        raise InputError(f"expected paths, arrays or images, found {type(images).__name__}")


def _read(image: Path | np.ndarray | Image.Image) -> bytes | Image.Image:
    """Returns the content of a file, or an image of Pillow."""
    if isinstance(image, Path):
        return folder.content(image)
    return Image.fromarray(image) if isinstance(image, np.ndarray) else image


# The command -------------------------------------------------------------------------------------


def parser() -> Program:
    """Returns the options of the command."""
    program = Program(
        "predict",
        "Predict the classes of new images by a run, with the evidence. Columns: docs/predict.md.",
    )
    add = program.add_argument
    add("workdir", help="work directory of a run of one seed")
    add("images", nargs="+", help="images, or folders of images at any depth")
    add("--top", type=int, default=5, help="number of classes to name (default 5)")
    text = "CSV, or lines of JSON if it ends in .jsonl (default predictions.csv)"
    add("--output", default="predictions.csv", help=text)
    add("--html", metavar="FILE", help=f"also a page with up to {_ON_PAGE} pictures")
    add("--method", default="fdc", help="a calibrator of the run (default fdc)")
    add(
        "--weights",
        metavar="FILE",
        help="the pretrained encoder, if neither export nor cache has it",
    )
    add("--learner", metavar="MODULE", default="", help="a learner of your own, whose code is run")
    return program


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line; returns 0, or 2 after an error or if an image was unreadable."""
    return parser().run(_run, arguments)


def _run(options: argparse.Namespace) -> None:
    """Runs the parsed command."""
    options.output = str(check_writable_file("--output", options.output, ".csv", ".jsonl"))
    if options.html is not None:
        options.html = str(check_writable_file("--html", options.html, ".html"))
    run = fdc_jax.open_run(options.workdir, weights=options.weights, learner=options.learner)
    predictions = Predictions(run, options.images, options.top, options.method)
    images = counted(len(predictions.images), "image")
    progress = Progress(options.quiet, unit="batch")
    for note in _notes(run, predictions):
        progress.line(note)
    progress.start(len(predictions), 0)
    start, counts = time.perf_counter(), collections.Counter[str]()
    printed: list[pd.DataFrame] = []
    doubtful: list[tuple[float, dict[str, Any], np.ndarray]] = []
    with contextlib.closing(progress), write_atomically(options.output) as file:
        for table, pixels in predictions:
            file.write(_text(table, options.output, header=not counts["images"]).encode())
            if counts["images"] < _PRINTED:
                printed.append(table)
            certainty, unlike = np.zeros((2, len(table)))
            if predictions.gaussians:
                unlike = table["unlike_learned"]
                certainty = table["confidence"] - unlike  # Unlike anything learned comes first.
            if options.html:
                lines = zip(certainty, table.to_dict("records"), map(np.copy, pixels), strict=True)
                both = itertools.chain(doubtful, lines)
                doubtful = heapq.nsmallest(_ON_PAGE, both, key=operator.itemgetter(0))
            changed = int(np.sum(table["changed"]))
            counts.update(images=len(table), changed=changed, unlike=int(np.sum(unlike)))
            done = counts["images"] + len(predictions.unreadable)
            speed = done / (time.perf_counter() - start)
            progress.step("predict", images_per_second=f"{speed:.0f}")
        if not printed:
            raise InputError(f"none of {images} could be read")
    if options.html:
        shown = [_picture(line, image) for _, line, image in doubtful]
        write_text(options.html, _page(predictions, shown, counts))
    if not options.quiet:
        _print_summary(pd.concat(printed).head(_PRINTED), counts, options)
    if predictions.unreadable:
        raise InputError(f"{len(predictions.unreadable)} of {images} could not be read")


def _notes(run: Run, predictions: Predictions) -> Iterator[str]:
    """Yields lines on tasks that are missing, on a better calibrator, and of the calibrator."""
    if predictions.num_tasks < run.num_tasks:
        yield (
            f"the run has learned {predictions.num_tasks} of its {run.num_tasks} tasks; it knows "
            "no class of the others"
        )
    accuracy: dict[str, float] = (run.results or {"accuracy": {}})["accuracy"]
    best = max(run.calibrators, key=lambda name: accuracy.get(name, 0.0))
    own = accuracy.get(predictions.method, 100.0)
    if accuracy.get(best, 0.0) > own:
        yield (
            f"{METHODS[predictions.method].title} predicts, right on {own:.1f} % of the run's test "
            f"images; {accuracy[best]:.1f} % with --method={best}"
        )
    if predictions.calibrator.note:
        yield predictions.calibrator.note


def _text(table: pd.DataFrame, path: str, header: bool) -> str:
    """Returns the lines of a table in the format that the suffix of a path names."""
    if path.endswith(".jsonl"):
        text = str(table.to_json(orient="records", lines=True, force_ascii=False))
        return text.replace("\\/", "/")  # pandas escapes slashes, for pages of HTML
    return csv_text(table, index=False, header=header, float_format="%.6g")


def _print_summary(
    table: pd.DataFrame, counts: dict[str, int], options: argparse.Namespace
) -> None:
    """Prints the first predictions, and a line that counts the others."""
    names = ("image", "class", "confidence", "unlike_learned", "task", "score", "raw_class")
    shown = table[[name for name in names if name in table]]
    print(
        shown.map(lambda cell: escaped(cell) if isinstance(cell, str) else cell).to_string(
            index=False
        )
    )
    left = counts["images"] - len(table)
    more = f"{left:,} more; " if left else ""
    unlike = f"{counts['unlike']:,} unlike anything learned; " if "confidence" in table else ""
    files = " and ".join(filter(None, (options.output, options.html)))
    print(
        f"{more}{unlike}of {counted(counts['changed'], 'image')} the heads alone would have said "
        f"another class; wrote {files}"
    )


# The page ----------------------------------------------------------------------------------------


def _page(predictions: Predictions, shown: list[dict[str, Any]], counts: dict[str, int]) -> str:
    from fdc_jax.report import page  # plotting takes seconds to import

    names = (predictions.images.ids[row] for row in sorted(predictions.unreadable))
    return page.render_predictions(
        learner=predictions.run.config["learner.name"],
        benchmark=predictions.run.config["benchmark"],
        num_tasks=predictions.num_tasks,
        num_classes=len(np.concatenate(predictions.calibrator.classes)),
        method=METHODS[predictions.method].title,
        **counts,
        unreadable=[_short(name) for name in names],
        shown=shown,
        sure=predictions.gaussians is not None,
    )


def _picture(line: dict[str, Any], image: UInt8[np.ndarray, "s s 3"]) -> dict[str, Any]:
    """Returns an image for the page, with the rival of another task and FDC's evidence, if any."""
    picture = {
        "uri": pictures.data_uri(image),
        "small": pictures.is_small(image),
        "name": _short(line["image"]),
        "changed": line["changed"],
        "confidence": line.get("confidence"),
        "unlike": line.get("unlike_learned", False),
    }
    for name, prefix in (("chosen", ""), ("raw", "raw_"), ("rival", "rival_")):
        if f"{prefix}class" in line:
            picture[name] = pictures.Said(line[f"{prefix}class"], line[f"{prefix}task"])
    if "rival_filtered_logit" in line:
        picture["evidence"] = [
            pictures.Evidence(title, line[column], line[f"rival_{column}"])
            for column, title in {**EVIDENCE, "score": "Score"}.items()
            if column in line
        ]
    return picture


def _short(path: str) -> str:
    """Returns a file with its folder alone, since a page is passed on to other machines."""
    return "/".join(Path(path).parts[-2:])


if __name__ == "__main__":
    sys.exit(main())
