"""What a run says of new images, and why.

    python -m fdc_jax.predict WORKDIR IMAGE_OR_FOLDER... [--top=5] [--output=predictions.csv]

How sure an answer is, the class Gaussians of the run say, whoever answers.

Images go through the evaluation path of the run: its transform, its encoders, its final heads and
its calibrator, as `fdc_jax.open_run` gives them. They are decoded in threads and said batch by
batch, so that memory does not grow with their number.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
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
from fdc_jax import report
from fdc_jax.calibration import FDC, METHODS, confidence
from fdc_jax.calibration.calibrator import best_by_task
from fdc_jax.data import folder
from fdc_jax.data.batches import EvaluationBatches
from fdc_jax.data.benchmarks import BENCHMARKS
from fdc_jax.data.dataset import Dataset
from fdc_jax.errors import InputError, Program, counted
from fdc_jax.machine.files import check_writable_file, write_atomically, write_text
from fdc_jax.report import pictures
from fdc_jax.run.opened import Opened
from fdc_jax.run.progress import Progress

_log = logging.getLogger("fdc_jax.predict")  # also where it is the program

# What a score of FDC is the sum of: columns, and what the page calls them; see `pictures.split`.
EVIDENCE = {
    "raw_logit": "Raw logit",
    "filtered_logit": "Filtered logit",
    "residual_adapted": "Residual, E_T",
    "affinity_adapted": "Affinity, E_T",
    "residual_pretrained": "Residual, E_0",
    "affinity_pretrained": "Affinity, E_0",
}
_ON_SCREEN = 10  # images
_ON_PAGE = 100  # likewise


class Predictions:
    """What a run says of images: iterating yields batch after batch of them.

    Each is a table, and the images as the encoder sees them unscaled; arguments and errors are
    those of `predict`. `unreadable` is what is wrong with images that could not be read so far.
    """

    def __init__(self, run: Any, images: Any, top: int = 5, method: str = "fdc"):
        if not isinstance(run, Opened):
            raise InputError(f"run: expected what open_run returns, found {type(run).__name__}")
        if not isinstance(top, int | np.integer) or top < 1:
            raise InputError(f"top: expected a whole number from 1 on, found {top!r}")
        named = list(_gather(images))
        if not named:
            raise InputError("expected images, found none")
        self.run, self.top, self.method = run, top, method
        self.images = _Loose(
            *("images", "", "", np.zeros(len(named), np.int32)),
            ids=tuple(name for name, _ in named),
            class_names=(),
            read=lambda index: _read(named[index][1]),
            upright=run.config["benchmark"] not in BENCHMARKS,  # as the images it was trained on
        )
        calibrator = run.calibrator(method)
        self.num_tasks = calibrator.num_tasks
        # One fitted before later tasks has the heads of then.
        self.heads = run.heads(self.num_tasks)
        calibrator.replace_heads(self.heads)
        self.calibrator = calibrator
        known = "gaussians" in run.calibrators
        self.gaussians: Any = run.calibrator("gaussians") if known else None
        self.class_names = np.array(run.class_names, object)
        # So small that the time left of many is known soon; powers of two compile seldom.
        rest = len(named) - 1
        small = 1 << max(rest // 32, min(rest, 7)).bit_length()
        self.batch_size = min(run.config["evaluation.batch_size"], small)
        self.unreadable: list[str] = []

    def __len__(self) -> int:
        """Number of batches."""
        return -(-len(self.images) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[pd.DataFrame, UInt8[np.ndarray, "n s s 3"]]]:
        config = self.run.config
        batches = EvaluationBatches(
            self.images,
            np.arange(len(self.images)),
            None,
            self.batch_size,
            image_size=config["encoder.image_size"],
            workers=config["data.workers"],
        )
        waiting: list[np.ndarray] = []
        broken = self.images.broken
        broken.clear()
        self.unreadable.clear()

        def watched() -> Iterator[Any]:
            for batch in batches:
                waiting.append(batch.images)
                yield batch

        first, encoders = 0, (self.num_tasks, 0)[: len(self.calibrator.widths)]
        for views in self.run.stream(watched(), *encoders):
            rows, pixels = np.arange(first, first + len(views[0])), waiting.pop(0)
            readable = np.array([row not in broken for row in rows.tolist()])
            for row in rows[~readable].tolist():
                self.unreadable.append(broken[row])
                _log.error("%s", self.unreadable[-1])
            first += len(rows)
            if readable.any():
                table = self._table(*(view[readable] for view in views))
                table.insert(0, "image", [self.images.ids[row] for row in rows[readable]])
                yield table.set_index(rows[readable]), pixels[: len(rows)][readable]

    def _table(self, adapted: Float[np.ndarray, "n d"], *pretrained: Any) -> pd.DataFrame:
        """Returns all columns but the name of the image."""
        calibrator = self.calibrator
        logits = np.concatenate([head.logits(adapted) for head in self.heads], axis=1)
        raw, parts = best_by_task(logits, calibrator.classes), {}
        if isinstance(calibrator, FDC):
            terms = calibrator.terms(adapted, *pretrained, all_rows=True)
            said, by_class = terms.fuse(), terms.by_class()
            parts = dict(zip(EVIDENCE, pictures.split(terms)[1][:-1], strict=False))
        else:
            by_class = calibrator.class_scores(adapted, *pretrained)
            said = best_by_task(by_class, calibrator.classes)
        label, task = said.label, said.task
        each, labels = np.arange(len(label)), np.concatenate(said.classes)
        tasks = np.repeat(np.arange(self.num_tasks), [len(own) for own in said.classes])
        # Whatever ties: the first is the prediction.
        order = np.where(labels == label[:, None], np.inf, by_class)
        ranked = np.argsort(-order, axis=1, kind="stable")[:, : self.top].T
        columns: dict[str, Any] = {}
        if self.gaussians is not None:
            sure, typicality = self.gaussians.assess(adapted, *pretrained)
            columns["confidence"] = confidence.of_labels(sure, self.gaussians.classes, label)
            columns["typicality"] = typicality
            columns["unlike_learned"] = columns["typicality"] < confidence.UNTYPICAL
        for place, best in enumerate(ranked, start=1):
            suffix = f"_{place}" if place > 1 else ""
            columns[f"class{suffix}"] = self.class_names[labels[best]]
            columns[f"task{suffix}"] = tasks[best] + 1
            columns[f"score{suffix}"] = by_class[each, best]
        columns["raw_class"] = self.class_names[raw.label]
        columns["raw_task"] = raw.task + 1
        columns["changed"] = raw.label != label
        for name, values in parts.items():
            columns[name] = values[each, task]
        if self.num_tasks > 1:
            others = said.task_scores.copy()
            others[each, task] = -np.inf
            rival = others.argmax(axis=1)
            columns["rival_class"] = self.class_names[said.label_in_task(rival)]
            columns["rival_task"] = rival + 1
            columns["rival_score"] = others[each, rival]
            for name, values in parts.items():
                columns[f"rival_{name}"] = values[each, rival]
        return pd.DataFrame(columns)


def predict(run: Any, images: Any, top: int = 5, method: str = "fdc") -> pd.DataFrame:
    """Says the classes of images by a run.

    Args:
        run: what `fdc_jax.open_run` returns.
        images: a file, a folder, whose images at any depth count, a uint8 array [h, w], [h, w, 3]
            or [n, h, w, 3] or an image of Pillow, or a sequence of these. All get the transform of
            test images.
        top: how many classes to name.
        method: a calibrator of the run, by its name; "fdc" gives the paper's scores.

    Returns:
        A row per image under its position; an image that cannot be read is logged and has none.
        `image`; where the run has class Gaussians, `confidence`, the probability of `class`,
        `typicality`, the share of left-out training images that are no more familiar, and
        `unlike_learned`, where that is below 5 %; `class`, `task` (from 1) and `score`, and the
        same of the next classes with `_2`, `_3` and so on; `raw_class` and `raw_task`, what the
        heads alone say, and whether that was `changed`; of FDC, the parts of the score, see
        `EVIDENCE`; and after `rival_` class, score and parts of the best other task.

    Raises:
        InputError: there is no such image, or what the run needs to answer is missing.
    """
    found = Predictions(run, images, top, method)
    tables = [table for table, _ in found]
    if not tables:
        raise InputError(f"no image could be read: {found.unreadable[0]}")
    return pd.concat(tables)


# Images from anywhere -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Loose(Dataset):
    """Images that belong to no data set, by their own names; black where they are unreadable."""

    broken: dict[int, str] = dataclasses.field(default_factory=dict)  # why, by index

    def image(self, index: int) -> Image.Image:
        try:
            return super().image(index)
        except InputError as error:
            self.broken[index] = str(error)
            return Image.new("RGB", (1, 1))

    def describe(self, index: int) -> str:
        return self.ids[index]


def _gather(images: Any, position: int = 0) -> Iterator[tuple[str, Any]]:
    """Yields the names of images with their files, arrays or images of Pillow."""
    name = f"image {position}"
    if isinstance(images, str | os.PathLike):
        path = Path(images)
        if not path.exists():
            raise InputError(f"{path}: no such image or folder")
        for file in folder.find_images(path) if path.is_dir() else [path]:
            yield os.fsencode(file).decode("utf-8", "backslashreplace"), file
    elif isinstance(images, Image.Image):
        yield name, images
    elif hasattr(images, "__array__"):
        array = np.asarray(images)
        if array.ndim and array.dtype.kind in "OU":
            yield from _gather(array.tolist(), position)
            return
        several = array.ndim == 4
        shape = array.shape[several:]
        kind = len(shape) in (2, 3) and shape[2:] in ((), (3,)) and 0 not in shape
        if array.dtype != np.uint8 or not kind:
            raise InputError(
                f"{name}: expected a uint8 array [h, w], [h, w, 3] or [n, h, w, 3], found "
                f"{array.dtype} of shape {[*array.shape]}"
            )
        for each in array if several else [array]:
            yield f"image {position}", each
            position += 1
    elif isinstance(images, Iterable):
        for each in images:
            for found in _gather(each, position):
                yield found
                position += 1
    else:
        raise InputError(f"expected paths, arrays or images, found {type(images).__name__}")


def _read(source: Any) -> Any:
    """Returns what `images.decode` takes."""
    if isinstance(source, Path):
        return folder.content(source)
    return Image.fromarray(source) if isinstance(source, np.ndarray) else source


# The command --------------------------------------------------------------------------------------


def parser() -> Program:
    """Returns the options of the command."""
    made = Program(
        "predict",
        "Say the classes of new images by a run, and why. Columns: docs/predict.md.",
    )
    add = made.add_argument
    add("workdir", help="work directory of a run of one seed")
    add("images", nargs="+", help="images, or folders of images at any depth")
    add("--top", type=int, default=5, help="how many classes to name (default 5)")
    text = "CSV to write, or lines of JSON where it ends in .jsonl (default predictions.csv)"
    add("--output", default="predictions.csv", help=text)
    add("--html", metavar="FILE", help=f"also a page with pictures, of {_ON_PAGE} images at most")
    add("--method", default="fdc", help="a calibrator of the run (default fdc)")
    add("--learner", metavar="MODULE", default="", help="a learner of your own, whose code is run")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line; returns 0, or 2 after an error, also where an image was unreadable."""
    return parser().run(_run, arguments)


def _run(options: argparse.Namespace) -> None:
    lines = options.output.endswith(".jsonl")
    check_writable_file("--output", options.output, ".csv", ".jsonl")
    if options.html is not None:
        check_writable_file("--html", options.html, ".html")
    if options.html:
        report.require_packages()
    run = fdc_jax.open_run(options.workdir, learner=options.learner)
    found = Predictions(run, options.images, options.top, options.method)
    images = counted(len(found.images), "image")
    progress, said, changed, unlike = Progress(options.quiet, unit="batch"), 0, 0, 0
    first: list[pd.DataFrame] = []
    shown: list[tuple[Any, dict[str, Any]]] = []
    if found.num_tasks < run.num_tasks:
        progress.line(
            f"the run has learned {found.num_tasks} of its {run.num_tasks} tasks; it knows no "
            "class of the others"
        )
    right = (run.results or {"accuracy": {}})["accuracy"]
    best = max(run.calibrators, key=lambda name: right.get(name, 0.0))
    if right.get(best, 0.0) > right.get(found.method, 100.0):
        progress.line(
            f"{METHODS[found.method].title} answers, right on {right[found.method]:.1f} % of the "
            f"run's test images; {right[best]:.1f} % with --method={best}"
        )
    if found.calibrator.note:
        progress.line(found.calibrator.note)
    progress.start(len(found), 0)
    clock = time.perf_counter()
    with contextlib.closing(progress), write_atomically(options.output) as file:
        for table, pixels in found:
            text = table.to_csv(index=False, header=not said, float_format="%.6g")
            if lines:
                text = table.to_json(orient="records", lines=True, force_ascii=False)
                text = str(text).replace("\\/", "/")  # pandas escapes them, for pages of HTML
            file.write(str(text).encode())
            if said < _ON_SCREEN:
                first.append(table)
            if options.html:
                # What is unlike anything learned comes first, then what is least sure.
                doubts = np.zeros(len(table))
                if found.gaussians:
                    doubts = (table["confidence"] - table["unlike_learned"]).to_numpy()
                last = shown[-1][0] if len(shown) == _ON_PAGE else np.inf
                for place in np.argsort(doubts, kind="stable")[:_ON_PAGE]:
                    if doubts[place] < last:
                        picture = _picture(table.iloc[place].to_dict(), pixels[place])
                        shown.append((doubts[place], picture))
                shown = sorted(shown, key=operator.itemgetter(0))[:_ON_PAGE]
            said, changed = said + len(table), changed + int(np.count_nonzero(table["changed"]))
            unlike += int(np.count_nonzero(table["unlike_learned"])) if found.gaussians else 0
            speed = (said + len(found.unreadable)) / (time.perf_counter() - clock)
            progress.step("predict", images_per_second=f"{speed:.0f}")
        if not said:
            raise InputError(f"none of {images} could be read")
    if options.html:
        counts = {"images": said, "changed": changed, "unlike": unlike}
        _write_page(options.html, found, [picture for _, picture in shown], counts)
    if not options.quiet:
        printed = pd.concat(first).head(_ON_SCREEN)
        names = ("image", "class", "confidence", "unlike_learned", "task", "score", "raw_class")
        print(printed[[name for name in names if name in printed]].to_string(index=False))
        more = f"{said - len(printed):,} more; " if said > len(printed) else ""
        strange = f"{unlike:,} unlike anything learned; " if found.gaussians else ""
        files = " and ".join(filter(None, (options.output, options.html)))
        print(
            f"{more}{strange}of {counted(changed, 'image')} the heads alone would have said "
            f"another class; wrote {files}"
        )
    if found.unreadable:
        raise InputError(f"{len(found.unreadable)} of {images} could not be read")


def _picture(line: dict[str, Any], image: UInt8[np.ndarray, "s s 3"]) -> dict[str, Any]:
    """Returns what the page shows of an image: `rival` of several tasks, evidence of FDC."""
    shown = {
        "uri": pictures.data_uri(image),
        "small": pictures.is_small(image),
        # A page that is passed on should not tell of a machine.
        "name": "/".join(Path(line["image"]).parts[-2:]),
        "changed": line["changed"],
        "confidence": line.get("confidence"),
        "unlike": line.get("unlike_learned", False),
    }
    for name, prefix in (("chosen", ""), ("raw", "raw_"), ("rival", "rival_")):
        if f"{prefix}class" in line:
            shown[name] = pictures.Said(line[f"{prefix}class"], line[f"{prefix}task"])
    if "rival_filtered_logit" in line:
        shown["evidence"] = [
            pictures.Evidence(title, line[column], line[f"rival_{column}"])
            for column, title in {**EVIDENCE, "score": "Score"}.items()
            if column in line
        ]
    return shown


def _write_page(
    path: str, found: Predictions, shown: list[dict[str, Any]], counts: dict[str, int]
) -> None:
    from fdc_jax.report import page  # plotting takes seconds to import

    text = page.render_predictions(
        learner=found.run.config["learner.name"],
        benchmark=found.run.config["benchmark"],
        num_tasks=found.num_tasks,
        num_classes=sum(map(len, found.calibrator.classes)),
        method=METHODS[found.method].title,
        **counts,
        unreadable=[
            "/".join(Path(found.images.ids[row]).parts[-2:]) for row in sorted(found.images.broken)
        ],
        shown=shown,
        sure=found.gaussians is not None,
    )
    write_text(path, text)


if __name__ == "__main__":
    sys.exit(main())
