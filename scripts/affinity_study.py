"""How the whitened affinity fares beside FDC under other conditions, on the features of runs.

python -m scripts.affinity_study RUN... --output=results/affinity_study.json

RUN is the folder of a finished run of one seed with its features. Everything is refitted by
`calibration.FDC`; heads and features stay those of the run. Fewer images a class are the first of
each class. Fewer tasks are the first of the stream, with the run's final encoder. More tasks: every
task is cut into tasks of one or two of its classes, and its head with it.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.covariance import ledoit_wolf, oas

from benchmarks import measure
from fdc_jax import calibration, evaluation, feature_files, heads
from fdc_jax.calibration.components import COMPONENTS, WHITENED, WHITENED_CLASSES
from fdc_jax.calibration.settings import Affinity
from fdc_jax.feature_files import FeatureSet, TaskFeatures
from fdc_jax.files import check_writable_folder, read_json, write_json
from fdc_jax.results import versions

AFFINITIES = {
    "fdc": Affinity(),
    "cosine, linear": Affinity(evidence="linear"),
    "whitened, tanh": Affinity("whitened", "tanh"),
    "whitened": Affinity("whitened", "linear"),
    "whitened, pooled": Affinity("whitened", "linear", "pooled"),
    "whitened, classes, own": Affinity("whitened", "linear", "own", "class"),
    "whitened, classes": Affinity("whitened", "linear", "pooled", "class"),
}
SHORT = ("fdc", "whitened", "whitened, classes")


def fitted(features: FeatureSet, **settings: Any) -> calibration.FDC:
    """Returns a calibrator of all tasks, with the final heads."""
    return features.fit(calibration.FDC(**{**WHITENED, **settings}))


def accuracies(features: FeatureSet, names=SHORT, **settings: Any) -> dict[str, float]:
    """Returns percent right for each affinity, of one fit."""
    terms = _terms(features, fitted(features, **settings))
    return {name: _accuracy(features, terms.fuse(affinity=AFFINITIES[name])) for name in names}


def _terms(features: FeatureSet, fdc: calibration.FDC) -> calibration.Terms:
    return fdc.terms(np.asarray(features.test_adapted), np.asarray(features.test_pretrained))


def _accuracy(features: FeatureSet, scores: calibration.Scores) -> float:
    assert features.test_labels is not None
    return evaluation.accuracy(features.test_labels, scores.label)


def few_images(features: FeatureSet, count: int) -> FeatureSet:
    """Keeps the first images of each class."""
    tasks = []
    for task in features.tasks:
        keep = np.concatenate([np.flatnonzero(task.labels == c)[:count] for c in task.classes])
        assert task.pretrained is not None
        tasks.append(
            task._replace(
                adapted=np.asarray(task.adapted)[keep],
                pretrained=np.asarray(task.pretrained)[keep],
                labels=np.asarray(task.labels)[keep],
            )
        )
    return features._replace(tasks=tuple(tasks))


def first_tasks(features: FeatureSet, count: int) -> FeatureSet:
    """Keeps the first tasks and their test images."""
    keep = np.flatnonzero(features.test_tasks < count)
    assert features.test_pretrained is not None and features.test_labels is not None
    return FeatureSet(
        features.tasks[:count],
        np.asarray(features.test_adapted)[keep],
        np.asarray(features.test_pretrained)[keep],
        np.asarray(features.test_labels)[keep],
    )


def smaller_tasks(features: FeatureSet, classes: int) -> FeatureSet | None:
    """Cuts tasks into tasks of at most `classes`, where heads are linear."""
    tasks: list[TaskFeatures] = []
    for task in features.tasks:
        head = task.final_head or task.head
        if not isinstance(head, heads.LinearHead):
            return None
        for start in range(0, len(task.classes), classes):
            rows = slice(start, start + classes)
            own = task.classes[rows]
            keep = np.flatnonzero(np.isin(task.labels, own))
            assert task.pretrained is not None
            tasks.append(
                TaskFeatures(
                    np.asarray(task.adapted)[keep],
                    np.asarray(task.pretrained)[keep],
                    np.asarray(task.labels)[keep],
                    heads.LinearHead(np.asarray(head.weight)[rows], np.asarray(head.bias)[rows]),
                    own,
                )
            )
    return features._replace(tasks=tuple(tasks))


def shrinkages(features: FeatureSet) -> dict[str, list[float]]:
    """Returns lambda of Ledoit-Wolf and OAS for each view, from all images about class means.

    Both shrink to (1 - r) S + r (tr S / d) I, whose direction is that of lambda = r / (1 - r).
    """
    found: dict[str, list[float]] = {"ledoit_wolf": [], "oas": []}
    for view in ("adapted", "pretrained"):
        centred = []
        for task in features.tasks:
            samples = np.asarray(getattr(task, view), np.float64)
            for label in task.classes:
                inside = samples[task.labels == label]
                centred.append(inside - inside.mean(0))
        for name, estimate in (("ledoit_wolf", ledoit_wolf), ("oas", oas)):
            share = float(estimate(np.concatenate(centred), assume_centered=True)[1])
            found[name].append(share / (1.0 - share))
    return found


def study(features: FeatureSet) -> dict[str, Any]:
    """Returns percent right under all conditions."""
    fdc = fitted(features)
    terms = _terms(features, fdc)
    dual = fitted(features, **WHITENED_CLASSES)
    tasks = features.test_tasks
    raw = terms.raw()
    estimated = shrinkages(features)
    record: dict[str, Any] = {
        "raw": _accuracy(features, raw),
        "oracle": evaluation.accuracy(features.test_labels, raw.label_in_task(tasks)),
        "routing": {
            name: evaluation.accuracy(tasks, terms.fuse(affinity=AFFINITIES[name]).task)
            for name in SHORT
        },
        "given_task": {
            name: evaluation.accuracy(
                features.test_labels, terms.fuse(affinity=AFFINITIES[name]).label_in_task(tasks)
            )
            for name in SHORT
        },
        "storage_bytes": {"fdc": fdc.paper_storage_bytes, "whitened": dual.storage_bytes},
        "affinity": accuracies(features, tuple(AFFINITIES)),
        "components": {
            name: {
                kind: _accuracy(features, terms.fuse(**switches, affinity=AFFINITIES[kind]))
                for kind in SHORT
            }
            for name, switches in COMPONENTS.items()
            if switches.get("pac", True)
        },
        "shrinkage": {
            str(value): accuracies(features, affinity_shrinkage=value)
            for value in (0.01, 0.05, 0.1, 0.2, 0.5, 1.0)
        },
        # One lambda for both views, the mean of theirs.
        "estimated_shrinkage": {
            name: {"lambda": both, **accuracies(features, affinity_shrinkage=float(np.mean(both)))}
            for name, both in estimated.items()
        },
        "images_per_class": {
            str(count): accuracies(few_images(features, count)) for count in (5, 10, 20)
        },
        "first_tasks": {
            str(count): accuracies(first_tasks(features, count))
            for count in (2, 5, 10)
            if count < len(features.tasks)
        },
        "classes_per_task": {},
    }
    for classes in (1, 2):
        smaller = smaller_tasks(features, classes)
        if smaller is not None:
            record["classes_per_task"][str(classes)] = accuracies(smaller)
    return record


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--output", required=True, type=Path)
    options = parser.parse_args()
    check_writable_folder("--output", options.output.absolute().parent)
    runs = {}
    for run in options.runs:
        results = read_json(run / "results.json")
        name = f"{results['benchmark']}, {results['learner']}, seed {results['seed']}"
        runs[name] = study(feature_files.load(run / "features"))
        found = runs[name]["affinity"]
        print(name, {each: round(found[each], 2) for each in SHORT}, flush=True)
        write_json(options.output, {"runs": runs, "versions": versions()})


if __name__ == "__main__":
    sys.exit(measure.run("scripts.affinity_study", main))
