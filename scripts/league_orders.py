"""How much the order of classes decides: closed-form heads on frozen features, in 100 orders.

OPENBLAS_NUM_THREADS=1 python scripts/league_orders.py WORKDIR/features --output=FILE.json

The frozen features of a finished run of the league are divided anew into tasks of five classes. The
head of a task is ridge regression on its classes; calibrators see one view. Of every order the
accuracy after the last task, and its mean over all tasks. Besides seeds 0 to 99 of PILOT's
permutation there are its 1993 and two orders by class means, which `by_means` defines.
"""

import argparse
import json
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from fdc_jax import calibration, evaluation
from fdc_jax.data.benchmarks import class_order
from fdc_jax.features import feature_files
from fdc_jax.features.feature_files import FeatureSet
from fdc_jax.heads import LinearHead
from fdc_jax.machine.files import write_text
from fdc_jax.machine.versions import versions

METHODS = ("raw", "fdc", "gaussians", "ncm", "mahalanobis", "ridge")
SIZE = 5  # classes of a task


def by_means(means: Float[np.ndarray, "c d"], similar: bool) -> Int[np.ndarray, " c"]:
    """Returns an order whose tasks hold similar classes, or dissimilar ones.

    A task starts with the first class that is left and takes in, one after another, the class whose
    mean has the highest cosine to the mean of those that it has, or the lowest.
    """
    units = means - means.mean(axis=0)
    units /= np.linalg.norm(units, axis=1, keepdims=True)
    left, order = list(range(len(units))), []
    while left:
        if len(order) % SIZE == 0:
            task = [left.pop(0)]
        else:
            cosines = units[left] @ units[task].mean(axis=0)
            task.append(left.pop(int(cosines.argmax() if similar else cosines.argmin())))
        order.append(task[-1])
    return np.array(order)


def head(features: Float[np.ndarray, "n d"], labels: Int[np.ndarray, " n"]) -> LinearHead:
    """Returns ridge regression on a task's classes, penalty 0.01 of the mean variance."""
    mean, classes = features.mean(axis=0), np.unique(labels)
    centred, wanted = features - mean, (labels[:, None] == classes) - 1 / len(classes)
    matrix = centred.T @ centred
    penalty = 0.01 * np.trace(matrix) / len(matrix)
    weight = np.linalg.solve(matrix + penalty * np.eye(len(matrix)), centred.T @ wanted).T
    return LinearHead(weight.astype(np.float32), (-weight @ mean).astype(np.float32))


def accuracies(stored: FeatureSet, order: Iterable[int]) -> dict[str, tuple[float, float]]:
    """Returns the last accuracy of each method, and the mean over the accuracies after tasks."""
    features = np.concatenate([np.asarray(task.pretrained) for task in stored.tasks])
    labels = np.concatenate([np.asarray(task.labels) for task in stored.tasks])
    place = np.argsort(np.asarray(order))
    labels, truth = place[labels], place[np.asarray(stored.test_labels)]
    test = np.asarray(stored.test_pretrained)
    calibrators = {name: calibration.make(name) for name in METHODS}
    curve: dict[str, list[float]] = {name: [] for name in METHODS}
    for first in range(0, len(place), SIZE):
        of_task = (labels >= first) & (labels < first + SIZE)
        own, seen = (features[of_task], labels[of_task]), truth < first + SIZE
        for name, calibrator in calibrators.items():
            calibrator.fit_task(*own, head(*own), None, classes=np.arange(first, first + SIZE))
            calibrator.finalize()
            found = calibrator.score(test[seen], None).label
            curve[name].append(evaluation.accuracy(truth[seen], found))
    return {name: (each[-1], float(np.mean(each))) for name, each in curve.items()}


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("features")
    parser.add_argument("--output", required=True)
    parser.add_argument("--orders", type=int, default=100)
    options = parser.parse_args()
    stored = feature_files.load(options.features)
    count = sum(len(task.classes) for task in stored.tasks)
    # Labels are places in the order of 1993; all other orders are drawn of the classes by name.
    known = np.argsort(class_order(count, 1993))
    frozen = [np.asarray(task.pretrained) for task in stored.tasks]
    labels = np.concatenate([np.asarray(task.labels) for task in stored.tasks])
    means = np.stack([np.concatenate(frozen)[labels == each].mean(axis=0) for each in range(count)])
    orders = {str(seed): known[class_order(count, seed)] for seed in range(options.orders)}
    orders |= {"1993": np.arange(count)}
    orders |= {"similar": by_means(means, True), "dissimilar": by_means(means, False)}
    start, found = time.process_time(), {}
    for name, order in orders.items():
        found[name] = accuracies(stored, order)
        print(name, {key: round(value[0], 2) for key, value in found[name].items()}, flush=True)
    record = {
        "command": "OPENBLAS_NUM_THREADS=1 python scripts/league_orders.py WORKDIR/features "
        "--output=FILE.json",
        "methods": METHODS,
        "processor_seconds": time.process_time() - start,
        "versions": versions(),
        "orders": {name: order.tolist() for name, order in list(orders.items())[-2:]},
        "accuracy": {name: [each[m][0] for m in METHODS] for name, each in found.items()},
        "average": {name: [each[m][1] for m in METHODS] for name, each in found.items()},
    }
    lines = (f" {json.dumps(key)}: {json.dumps(value)}" for key, value in record.items())
    write_text(Path(options.output), "{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
