"""Adds runs to the study of long streams, prints its rows and draws its figure anew.

python scripts/long_streams.py [RUN ...]

RUN is a finished work directory with its images at hand; its name is that of the row in
results/long_streams/study.json, which says what the numbers are. The figure is
docs/long_streams.svg.
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from jaxtyping import Int

import fdc_jax
from fdc_jax import bench, calibration, evaluation, learners
from fdc_jax.data.batches import evaluation_images
from fdc_jax.features import feature_files
from fdc_jax.machine.files import write_json
from fdc_jax.report import drawing

ROOT = Path(__file__).resolve().parents[1]
STUDY, FIGURE = ROOT / "results/long_streams/study.json", ROOT / "docs/long_streams.svg"
FROZEN = {"ncm": {}, "mahalanobis": {}, "fecam": {}, "ridge": {}, "anacp": {"projections": 2000}}
LINES = (
    ("gaussians", "class Gaussians that follow", drawing.OWN),
    ("fdc", "FDC", drawing.FDC),
    ("raw", "Raw", drawing.RAW),
)
# These keep no encoder but the newest.
NEWEST = ("rsiat", "slca")


def accuracy(true_label: Int[np.ndarray, " n"], scores: Any) -> float:
    """Returns the accuracy of scores in percent, rounded."""
    return round(evaluation.accuracy(true_label, scores.label), 2)


def gaussians(parts: list[dict[str, Any]]) -> Any:
    """Returns class Gaussians of tasks; without `previous` they stay as they were stored."""
    fitted = calibration.make("gaussians")
    for part in parts:
        fitted.fit_task(**part)
    return fitted.finalize() or fitted


def row(folder: str) -> dict[str, Any]:
    """Returns what the study says of a run."""
    run = fdc_jax.open_run(folder)
    results, stored = run.results or {}, feature_files.load(run.folder / "features")
    label = np.asarray(stored.test_labels)
    adapted, pretrained = np.asarray(stored.test_adapted), np.asarray(stored.test_pretrained)
    fields = ("adapted", "labels", "pretrained", "previous")
    tasks = [{name: getattr(task, name) for name in fields} for task in stored.tasks]
    tasks = [{k: v if v is None else np.asarray(v) for k, v in task.items()} for task in tasks]
    still = [{**task, "previous": None} for task in tasks]
    of_e0 = [
        {"adapted": task["pretrained"], "labels": task["labels"], "previous": task["pretrained"]}
        for task in tasks
    ]
    truth, count = np.asarray(stored.test_tasks), len(tasks)
    found: dict[str, Any] = {
        "learner": results["learner"],
        "tasks": count,
        "classes": results["num_classes"],
        "train": results["num_train_images"],
        "accuracy": {name: round(value, 2) for name, value in results["accuracy"].items()},
        "curve": [{k: point[k] for k in ("task", "accuracy")} for point in results["curve"]],
        "commit": results["versions"]["commit"],
        "recall": {},
    }
    followed = stored.fit(calibration.make("gaussians"))
    for name, fitted in (
        ("raw", stored.fit(calibration.make("raw"))),
        ("fdc", stored.fit(calibration.make("fdc"))),
        ("gaussians", followed),
    ):
        rank = bench.task_rank(fitted.score(adapted, pretrained).task_scores, truth)
        found["recall"][name] = {k: round(share, 2) for k, share in bench.recall(rank).items()}
    found["staleness"] = round(float(np.mean(followed.staleness)), 2)
    own = followed.components(adapted, pretrained)["adapted_view"]
    found["accuracy"]["one_pass"] = accuracy(label, own)
    kept = gaussians(still).score(adapted, pretrained)
    found["accuracy"]["gaussians_stored"] = accuracy(label, kept)
    found["frozen"], found["frozen_curve"], found["bound"] = {}, {}, {}
    for name, options in FROZEN.items():
        fitted = stored.fit(calibration.make(f"{name}-pretrained", **options))
        found["frozen"][name] = accuracy(label, fitted.score(adapted, pretrained))
    for after in (*range(10, count, 10), count) if count > 20 else (count,):
        seen = truth < after
        fitted = calibration.make("ranpac-pretrained", projections=2000)
        for task in stored.tasks[:after]:
            task.fit(fitted)
        fitted.finalize()
        found["frozen_curve"][str(after)] = {
            "gaussians": accuracy(label[seen], gaussians(of_e0[:after]).score(pretrained[seen])),
            "ranpac": accuracy(label[seen], fitted.score(adapted[seen], pretrained[seen])),
        }
    found["frozen"] |= found["frozen_curve"][str(count)]
    stream, size = run.tasks, run.config["encoder.image_size"]

    def extracted(split: Any, indices: Any, after: int) -> Any:
        return run.features(evaluation_images(split, np.asarray(indices), size), after)

    for after in (t for t in (10, 20, 50, 100) if t <= count):
        if results["learner"] in NEWEST and after < count:
            continue
        seen = truth < after
        test = extracted(stream.test, stream.test_indices[: len(label)][seen], after)
        again = [extracted(stream.train, each, after) for each in stream.train_indices[:after]]
        fresh = [
            {**task, "adapted": x, "previous": x} for task, x in zip(tasks, again, strict=False)
        ]
        parts = {"again": fresh, "moved": tasks[:after], "stored": still[:after]}
        found["bound"][str(after)] = {
            name: accuracy(label[seen], gaussians(part).score(test, pretrained[seen]))
            for name, part in parts.items()
        }
    return found


def line(run: dict[str, Any]) -> str:
    """Returns a run's row of the table."""
    accuracy, recall = run["accuracy"], run["recall"]["gaussians"]
    numbers = [accuracy[name] for name in ("raw", "fdc", "gaussians_stored", "gaussians")]
    bound = run["bound"].get(str(run["tasks"]), {}).get("again")
    numbers += [bound, run["frozen"]["gaussians"], run["frozen"]["ranpac"]]
    cells = ["–" if each is None else f"{each:.2f}" for each in numbers]
    cells[3] = f"**{cells[3]}**"
    name = f"{learners.find(run['learner']).title}, {run['tasks']}"
    return f"| {' | '.join([name, *cells, ', '.join(f'{v:.1f}' for v in recall.values())])} |"


def figure(runs: list[dict[str, Any]]) -> str:
    """Returns the accuracy over 100 tasks of each learner as SVG."""
    with drawing.style():
        made, axes = drawing.panels(len(runs), 2.6, len(runs), sharey=True)
        made.set_size_inches(9.5, 3.2)
        # The page may be dark, and is searched.
        matplotlib.rcParams |= {"savefig.facecolor": "white", "svg.fonttype": "none"}
        for run, place in zip(runs, axes, strict=True):
            seen = [point["task"] + 1 for point in run["curve"]]
            for name, label, colour in LINES:
                values = [point["accuracy"][name] for point in run["curve"]]
                place.plot(seen, values, color=colour, label=label)
            for name, look in (("gaussians", "--"), ("ranpac", ":")):
                values = [each[name] for each in run["frozen_curve"].values()]
                said = f"{calibration.METHODS[name].title}, frozen encoder"
                place.plot(
                    [*map(int, run["frozen_curve"])], values, look, color=drawing.INK, label=said
                )
            place.set_title(learners.find(run["learner"]).title)
            place.set_xlabel("tasks")
        axes[0].set_ylabel("accuracy, %")
        axes[0].set_ylim(0, 80)
        drawing.legend(made, 5)
        return drawing.svg(made)


def main() -> None:
    """Runs the command line."""
    study = json.loads(STUDY.read_text())
    for folder in sys.argv[1:]:
        study["runs"][Path(folder).name] = row(folder)
        write_json(STUDY, study)
    runs = sorted(study["runs"].values(), key=lambda run: (run["learner"], run["tasks"]))
    for classes in sorted({run["classes"] for run in runs}):
        rows = [line(run) for run in runs if run["classes"] == classes]
        print(f"{classes} classes", *rows, sep="\n")
    FIGURE.write_text(figure([run for run in runs if run["tasks"] == 100]))


if __name__ == "__main__":
    main()
