"""The command `fdc predict`: a run predicts the classes of new images.

    python -m fdc_jax predict WORKDIR IMAGE_OR_FOLDER... [--top=5] [--output=predictions.csv]

Predictions are those of `fdc_jax.open_run(WORKDIR).predict`, written batch by batch.
"""

import argparse
import collections
import contextlib
import heapq
import operator
import time
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
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

# Images that are printed, and images on the page, at most.
_PRINTED, _ON_PAGE = 10, 100
_UNFINISHED = "training is not finished: answers by features of the pretrained encoder alone"
# Number of images by true class ("" if it is unknown) and answer.
_Answers = collections.defaultdict[str, collections.Counter[str]]
# The sort key of an image on the page, its row of the table, and its pixels.
_Row = tuple[float, dict[str, Any], UInt8[np.ndarray, "s s 3"]]


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
    add("--output", default="predictions.csv", help="CSV file (default predictions.csv)")
    add("--html", metavar="FILE", help=f"also a page with up to {_ON_PAGE} pictures")
    text = "the calibrator that answers, such as fdc (default: class Gaussians if the run has them)"
    add("--method", metavar="NAME", help=text)
    text = "percent of typicality below which an image is unlike anything learned (default 5)"
    add("--unlike", type=float, default=5.0, metavar="PERCENT", help=text)
    text = "the pretrained encoder, if neither export nor cache has it"
    add("--weights", metavar="FILE", help=text)
    add("--learner", metavar="MODULE", default="", help="a learner of your own, whose code is run")
    return program


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line; returns 0, or 2 after an error or if an image was unreadable."""
    return parser().run(_run, arguments)


def _run(options: argparse.Namespace) -> None:
    options.output = str(check_writable_file("--output", options.output, ".csv"))
    if options.html is not None:
        options.html = str(check_writable_file("--html", options.html, ".html"))
    run = fdc_jax.open_run(options.workdir, weights=options.weights, learner=options.learner)
    predictions = Predictions(run, options.images, options.top, options.method, options.unlike)
    images = counted(len(predictions.images), "image")
    classes = _classes_by_folder(predictions, options.images)
    progress = Progress(options.quiet, unit="batch")
    for note in _notes(predictions):
        progress.line(note)
    progress.start(len(predictions), 0)
    start = time.perf_counter()
    counts = collections.Counter(images=0, unlike=0, labelled=0)
    answers: _Answers = collections.defaultdict(collections.Counter)
    printed: list[pd.DataFrame] = []
    shown: dict[str, list[_Row]] = collections.defaultdict(list)
    with contextlib.closing(progress), write_atomically(options.output) as file:
        for table, pixels in predictions:
            if classes:
                table.insert(1, "true_class", [classes.get(name, "") for name in table["image"]])
            written = table.drop(columns=[name for name in table if _is_term(name)])
            text = csv_text(written, index=False, header=not printed, float_format="%.6g")
            file.write(text.encode())
            if counts["images"] < _PRINTED:
                printed.append(table)
            counts.update(images=len(table), changed=int(np.count_nonzero(table["changed"])))
            if "unlike_learned" in table:
                counts.update(unlike=int(np.count_nonzero(table["unlike_learned"])))
            if classes:
                for true, answer in table[["true_class", "class"]].to_numpy():
                    answers[true][answer] += 1
            if options.html:
                records = table.assign(position=table.index).to_dict("records")
                for record, image in zip(records, map(np.copy, pixels), strict=True):
                    # Images unlike anything learned come first, then the least certain.
                    key = record.get("confidence", 0.0) - record.get("unlike_learned", False)
                    shown[_kind(record)].append((key, record, image))
                for kind, rows in shown.items():
                    shown[kind] = heapq.nsmallest(_ON_PAGE, rows, key=operator.itemgetter(0))
            done = counts["images"] + len(predictions.unreadable)
            speed = done / (time.perf_counter() - start)
            progress.step("predict", images_per_second=f"{speed:.0f}")
        if not printed:
            raise InputError(f"none of {images} could be read")
    for true, predicted in answers.items():
        counts.update({"right": predicted[true], "labelled": predicted.total()} if true else {})
    if options.html:
        rows = [_picture(row, image) for _, row, image in _of_every_kind(shown)]
        write_text(options.html, _page(predictions, rows, counts))
    if not options.quiet:
        _print_summary(pd.concat(printed).head(_PRINTED), counts, options)
        if answers.keys() - {""}:
            _print_accuracy(answers, counts)
    if predictions.unreadable:
        raise InputError(f"{len(predictions.unreadable)} of {images} could not be read")


def _is_term(column: str) -> bool:
    """Returns True for a column of `Run.predict` that the CSV file does not have."""
    return column in EVIDENCE or column.startswith("rival_")


def _kind(record: dict[str, Any]) -> str:
    """Returns the kind of an image on the page, "" for a certain answer that may be right."""
    if record.get("true_class", "") not in ("", record["class"]):
        return "mistaken"
    if record.get("unlike_learned", False):
        return "unlike"
    return "uncertain" if record.get("confidence", 1.0) < 0.5 else ""


def _of_every_kind(by_kind: Mapping[str, list[_Row]]) -> list[_Row]:
    """Returns the first rows of every kind, equally many if there are enough, sorted."""
    rows: list[_Row] = []
    for done, of_kind in enumerate(sorted(by_kind.values(), key=len)):
        rows += of_kind[: (_ON_PAGE - len(rows)) // (len(by_kind) - done)]
    return sorted(rows, key=operator.itemgetter(0))


def _classes_by_folder(predictions: Predictions, paths: Sequence[str]) -> dict[str, str]:
    """Returns the true class by image name, for images in a folder named like a learned class."""
    labels = np.concatenate(predictions.calibrator.classes)
    names = predictions.class_names[labels]
    learned = {unicodedata.normalize("NFC", name): name for name in names}
    folders = [named_path("image", path) for path in paths]
    classes = {}
    for name in predictions.images.ids:
        for folder in folders:
            if folder in (parents := [*Path(name).parents])[1:]:
                child = unicodedata.normalize("NFC", parents[parents.index(folder) - 1].name)
                classes |= {name: learned[child]} if child in learned else {}
    return classes


def _notes(predictions: Predictions) -> Iterator[str]:
    """Yields lines on missing tasks and on the accuracy of the run's calibrators."""
    run, method = predictions.run, predictions.method
    if predictions.before_training:
        yield _UNFINISHED
    if predictions.num_tasks < run.num_tasks:
        yield (
            f"the run has learned {predictions.num_tasks} of its {run.num_tasks} tasks; it knows "
            "no class of the others"
        )
    accuracy = run.results.accuracy if run.results else {}
    if method in accuracy:
        alternatives = [
            f"{accuracy[name]:.1f} % with --method={name}"
            for name in run.calibrators
            if name in accuracy and name != method
        ]
        answering = f"answers by {METHODS[method].title}, right on {accuracy[method]:.1f} %"
        yield "; ".join([f"{answering} of the run's test images", *alternatives])
    if predictions.calibrator.note and not predictions.before_training:
        yield predictions.calibrator.note


def _print_summary(
    table: pd.DataFrame, counts: dict[str, int], options: argparse.Namespace
) -> None:
    """Prints the first predictions, and the numbers of all."""
    names = ("image", "class", "confidence", "unlike_learned", "task", "score", "raw_class")
    shown = table[[name for name in names if name in table]]
    text = shown.map(lambda cell: escaped(cell) if isinstance(cell, str) else cell)
    print(text.to_string(index=False))
    more = counts["images"] - len(table)
    parts = [f"{more:,} more"] if more else []
    if "confidence" in table:
        share = f"{options.unlike:g} % of new images of learned classes are"
        parts.append(f"{counts['unlike']:,} unlike anything learned ({share})")
    parts.append(f"raw logits give another class for {counted(counts['changed'], 'image')}")
    parts.append("wrote " + " and ".join(filter(None, (options.output, options.html))))
    print("; ".join(parts))


def _print_accuracy(answers: _Answers, counts: Mapping[str, int]) -> None:
    """Prints accuracy and confusions by known class, the worst first, and of all images."""
    lines = []
    for true, predicted in answers.items():
        wrong = [f"{escaped(name)} {n}" for name, n in predicted.most_common() if name != true]
        share = round(100 * predicted[true] / predicted.total(), 1)
        if true:
            lines.append((escaped(true), predicted.total(), share, ", ".join(wrong[:3])))
    lines.sort(key=operator.itemgetter(2))
    frame = pd.DataFrame(lines, columns=["class", "images", "% right", "taken for"])
    print("\n" + frame.to_string(index=False))
    images = counted(counts["labelled"], "image")
    print(f"right on {100 * counts['right'] / counts['labelled']:.1f} % of {images} of known class")
    if "" in answers:
        unlabelled = counted(answers[""].total(), "image")
        print(f"{unlabelled} in no folder of a class that the run has learned")


# The page ----------------------------------------------------------------------------------------


def _page(predictions: Predictions, shown: list[dict[str, Any]], counts: Mapping[str, int]) -> str:
    from fdc_jax.report import page  # plotting takes seconds to import

    run, method = predictions.run, predictions.method
    names = [predictions.images.ids[row] for row in sorted(predictions.unreadable)]
    notice = _UNFINISHED if predictions.before_training else ""
    accuracy = run.results.accuracy.get(method) if run.results else None
    classes = np.concatenate(predictions.calibrator.classes)
    return page.render_predictions(
        benchmark=run.config.benchmark,
        num_tasks=predictions.num_tasks,
        num_classes=len(classes),
        notice=notice,
        method=method,
        accuracy=accuracy,
        **counts,
        unreadable=[_short(name) for name in names],
        shown=shown,
    )


def _picture(row: dict[str, Any], image: UInt8[np.ndarray, "s s 3"]) -> dict[str, Any]:
    """Returns a row of the table with its picture and FDC's evidence, if any."""
    evidence = [
        pictures.Evidence(title, row[name], row[f"rival_{name}"])
        for name, title in {**EVIDENCE, "score": "Score"}.items()
        if f"rival_{name}" in row
    ]
    return row | {
        "uri": pictures.data_uri(image, max(image.shape)),
        "small": pictures.is_small(image),
        "name": _short(row["image"]),
        "evidence": evidence if len(evidence) > 1 else [],
    }


def _short(path: str) -> str:
    """Returns a file with its folder alone, so that the page names no path of a machine."""
    return "/".join(Path(path).parts[-2:])


if __name__ == "__main__":
    raise SystemExit("use python -m fdc_jax predict")
