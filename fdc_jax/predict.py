"""The command that predicts the classes of new images by a run.

    python -m fdc_jax predict WORKDIR IMAGE_OR_FOLDER... [--top=5] [--output=predictions.csv]

Predictions are those of `fdc_jax.open_run(WORKDIR).predict`, written batch by batch.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import heapq
import itertools
import operator
import sys
import time
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import UInt8

import fdc_jax
from fdc_jax.calibration import METHODS
from fdc_jax.errors import InputError, Program, counted, escaped
from fdc_jax.machine.files import (
    check_writable_file,
    csv_text,
    named_path,
    write_atomically,
    write_text,
)
from fdc_jax.report import pictures
from fdc_jax.run.prediction import EVIDENCE, Predictions
from fdc_jax.run.progress import Progress

# Most images that are printed, and shown on the page.
_PRINTED, _ON_PAGE = 10, 100
# Of a run that answers before its training.
_UNFINISHED = "training is not finished: answers by features of the pretrained encoder alone"
# Numbers of answers by true class, "" if it is unknown, and answer.
_Answers = collections.defaultdict[str, collections.Counter[str]]


def parser() -> Program:
    """Returns the options of the command."""
    program = Program(
        "predict",
        "Predict the classes of new images by a run, with the evidence. Columns: docs/predict.md.",
        "runs/photos new_photos --html=predictions.html",
    )
    add = program.add_argument
    add("workdir", help="work directory of a run of one seed")
    add("images", nargs="+", help="images, or folders of images at any depth")
    add("--top", type=int, default=5, help="number of classes to name (default 5)")
    text = "CSV, or lines of JSON if it ends in .jsonl (default predictions.csv)"
    add("--output", default="predictions.csv", help=text)
    add("--html", metavar="FILE", help=f"also a page with up to {_ON_PAGE} pictures")
    text = "the calibrator that answers, such as fdc (default: class Gaussians if the run has them)"
    add("--method", metavar="NAME", help=text)
    text = "the pretrained encoder, if neither export nor cache has it"
    add("--weights", metavar="FILE", help=text)
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
    classes = _classes_by_folder(predictions, options.images)
    progress = Progress(options.quiet, unit="batch")
    for note in _notes(predictions):
        progress.line(note)
    progress.start(len(predictions), 0)
    start, counts = time.perf_counter(), collections.Counter[str]()
    answers: _Answers = collections.defaultdict(collections.Counter)
    printed: list[pd.DataFrame] = []
    shown: list[tuple[float, dict[str, Any], UInt8[np.ndarray, "s s 3"]]] = []
    with contextlib.closing(progress), write_atomically(options.output) as file:
        for table, pixels in predictions:
            if classes:
                table.insert(1, "true_class", [classes.get(name, "") for name in table["image"]])
            file.write(_text(table, options.output, header=not printed).encode())
            if counts["images"] < _PRINTED:
                printed.append(table)
            records = table.assign(position=table.index).to_dict("records")
            for record in records:
                unlike = record.get("unlike_learned", False)
                counts.update(images=1, changed=record["changed"], unlike=unlike)
                if classes:
                    answers[record["true_class"]][record["class"]] += 1
            if options.html:
                rows = zip(map(_certainty, records), records, map(np.copy, pixels), strict=True)
                both = itertools.chain(shown, rows)
                shown = heapq.nsmallest(_ON_PAGE, both, key=operator.itemgetter(0))
            done = counts["images"] + len(predictions.unreadable)
            speed = done / (time.perf_counter() - start)
            progress.step("predict", images_per_second=f"{speed:.0f}")
        if not printed:
            raise InputError(f"none of {images} could be read")
    if options.html:
        rows = [_picture(row, image) for _, row, image in shown]
        write_text(options.html, _page(predictions, rows, counts, answers))
    if not options.quiet:
        _print_summary(pd.concat(printed).head(_PRINTED), counts, options)
        if answers.keys() - {""}:
            _print_accuracy(answers)
    if predictions.unreadable:
        raise InputError(f"{len(predictions.unreadable)} of {images} could not be read")


def _certainty(record: dict[str, Any]) -> float:
    """Returns the order on the page: images unlike anything learned, then the least certain."""
    return record.get("confidence", 0.0) - record.get("unlike_learned", False)


def _classes_by_folder(predictions: Predictions, given: Sequence[str]) -> dict[str, str]:
    """Returns the class of every image in a folder CLASS/ of a given folder, by the image's name.

    Classes are those that the run has learned; names are compared in NFC.
    """
    labels = np.concatenate(predictions.calibrator.classes)
    learned = {unicodedata.normalize("NFC", it): it for it in predictions.class_names[labels]}
    folders = [named_path("image", path) for path in given]
    classes = {}
    for name in predictions.images.ids:
        for folder in folders:
            if folder in (parents := [*Path(name).parents])[1:]:
                below = unicodedata.normalize("NFC", parents[parents.index(folder) - 1].name)
                classes |= {name: learned[below]} if below in learned else {}
    return classes


def _notes(predictions: Predictions) -> Iterator[str]:
    """Yields lines on missing tasks, on the calibrator that answers, and on the others."""
    run, method = predictions.run, predictions.method
    if predictions.before_training:
        yield _UNFINISHED
    if predictions.num_tasks < run.num_tasks:
        yield (
            f"the run has learned {predictions.num_tasks} of its {run.num_tasks} tasks; it knows "
            "no class of the others"
        )
    accuracy = _accuracies(predictions)
    if method in accuracy:
        others = [
            f"{accuracy[name]:.1f} % with --method={name}"
            for name in run.calibrators
            if name in accuracy and name != method
        ]
        right = f"right on {accuracy[method]:.1f} % of the run's test images"
        yield "; ".join([f"answers by {METHODS[method].title}, {right}", *others])
    if predictions.calibrator.note and not predictions.before_training:
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
    print(shown.map(lambda it: escaped(it) if isinstance(it, str) else it).to_string(index=False))
    left = counts["images"] - len(table)
    more = f"{left:,} more; " if left else ""
    unlike = f"{counts['unlike']:,} unlike anything learned; " if "confidence" in table else ""
    files = " and ".join(filter(None, (options.output, options.html)))
    print(
        f"{more}{unlike}of {counted(counts['changed'], 'image')} the heads alone would have said "
        f"another class; wrote {files}"
    )


def _print_accuracy(answers: _Answers) -> None:
    """Prints a line per known class with its confusions, and the accuracy on all its images."""
    lines = []
    for true, said in answers.items():
        wrong = [f"{escaped(name)} {n}" for name, n in said.most_common() if name != true]
        share = 100 * said[true] / said.total()
        if true:
            lines.append((escaped(true), said.total(), round(share, 1), ", ".join(wrong[:3])))
    lines.sort(key=operator.itemgetter(2))
    frame = pd.DataFrame(lines, columns=["class", "images", "% right", "taken for"])
    print("\n" + frame.to_string(index=False))
    right, total = sum(said[true] for true, said in answers.items()), sum(it[1] for it in lines)
    print(f"right on {100 * right / total:.1f} % of {counted(total, 'image')} of known class")
    if "" in answers:
        others = counted(answers[""].total(), "image")
        print(f"{others} in no folder of a class that the run has learned")


# The page ----------------------------------------------------------------------------------------


def _page(
    predictions: Predictions,
    shown: list[dict[str, Any]],
    counts: dict[str, int],
    answers: _Answers,
) -> str:
    from fdc_jax.report import page  # plotting takes seconds to import

    run, method = predictions.run, predictions.method
    names = (predictions.images.ids[row] for row in sorted(predictions.unreadable))
    return page.render_predictions(
        learner=run.config["learner.name"],
        benchmark=run.config["benchmark"],
        num_tasks=predictions.num_tasks,
        num_classes=len(np.concatenate(predictions.calibrator.classes)),
        notice=_UNFINISHED if predictions.before_training else "",
        method=METHODS[method].title,
        accuracy=_accuracies(predictions).get(method),
        labelled=sum(said.total() for true, said in answers.items() if true),
        right=sum(said[true] for true, said in answers.items()),
        reliability=_reliability(predictions),
        **counts,
        unreadable=[_short(name) for name in names],
        shown=shown,
    )


def _accuracies(predictions: Predictions) -> dict[str, float]:
    """Returns the accuracies on the run's test images by calibrator; none of an unfinished run."""
    return predictions.run.results["accuracy"] if predictions.run.results else {}


def _reliability(predictions: Predictions) -> dict[str, float]:
    """Returns by class the percentage of the run's test images with this answer that are right."""
    column = f"{predictions.method}_label"
    if predictions.run.results is None or column not in (columns := predictions.run.predictions):
        return {}
    labels = columns[column]
    shares = np.bincount(labels, labels == columns["label"]) / np.maximum(np.bincount(labels), 1)
    names = predictions.run.class_names
    return {names[label]: 100 * float(shares[label]) for label in np.unique(labels).tolist()}


def _picture(row: dict[str, Any], image: UInt8[np.ndarray, "s s 3"]) -> dict[str, Any]:
    """Returns a row of the table with its picture and FDC's evidence for two tasks, if any."""
    evidence = [
        pictures.Evidence(title, row[name], row[f"rival_{name}"])
        for name, title in {**EVIDENCE, "score": "Score"}.items()
        if f"rival_{name}" in row
    ]
    return row | {
        "uri": pictures.data_uri(image),
        "small": pictures.is_small(image),
        "name": _short(row["image"]),
        "evidence": evidence if len(evidence) > 1 else [],
    }


def _short(path: str) -> str:
    """Returns a file with its folder alone, since a page is passed on to other machines."""
    return "/".join(Path(path).parts[-2:])


if __name__ == "__main__":
    sys.exit(main())
