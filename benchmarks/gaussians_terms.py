"""Class Gaussians with one term of their definition off at a time.

    python -m benchmarks.gaussians_terms --output=FILE RUN ...

Each RUN is a folder with `features` and, if there are held-out images, `held.npz` (adapted,
pretrained, labels). Besides, scanned digits in five tasks are learned by a network of 64 hidden
units from scratch, in four settings with six seeds each; every fifth training image is held out of
training and fit.
"""

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
from sklearn.datasets import load_digits

from fdc_jax.calibration import Gaussians, drift, gaussians
from fdc_jax.features import feature_files

SHARES = {f"share {share:g}": {"share": share} for share in (0.0, 0.25, 0.5, 1.0)}
# Options of `predict` on statistics fitted without unit length, without growth, or with all terms.
VARIANTS = {
    "definition": {},
    "no unit length": {"unit": False},
    **SHARES,
    "no log(1 + s / 4)": {"raised": False},
    **{f"no staleness, {name}": {**options, "raised": False} for name, options in SHARES.items()},
    "no own directions": {"rank": 0},
    **{f"{rank} own directions": {"rank": rank} for rank in (1, 2, 3, 4, 6)},
    "no growth by the map's error": {"growth": False},
}


def fit(tasks, unit=True, growth=True):
    """Returns class Gaussians of tasks."""
    fit_map = drift.fit_map

    def without_error(*arguments):
        by = fit_map(*arguments)
        return by if growth else by._replace(residual=0 * by.residual)

    transform = gaussians.at_unit_length if unit else np.float32
    fitted = Gaussians()
    with (
        mock.patch.object(drift, "fit_map", without_error),
        mock.patch.object(gaussians, "at_unit_length", transform),
    ):
        for task in tasks:
            views = task.adapted, task.labels, None, task.pretrained
            fitted.fit_task(*views, task.classes, task.previous)
    return fitted


def predict(fitted, views, share=None, raised=True, unit=True, rank=gaussians.RANK):
    """Returns the labels of a batch."""
    counts, total = np.concatenate(fitted.counts), 0.0
    sizes = [len(each) for each in fitted.classes]
    stale, weights = np.repeat(fitted.staleness, sizes), [1.0, fitted._weights()["pretrained"]]
    if share is not None:
        weights[1] = share
    up = np.log1p(stale / 4) * raised, 0.0
    for known, view, weight, by in zip(fitted.views, views, weights, up, strict=True):
        factors = known.factors * (np.arange(gaussians.RANK) < rank)[:, None]
        own = gaussians.OWN_SHARE if rank else 0.0
        direction = gaussians.unit if unit else np.asarray
        with (
            mock.patch.object(gaussians, "OWN_SHARE", own),
            mock.patch.object(gaussians, "unit", direction),
        ):
            metric = gaussians.metric(known._replace(factors=factors), counts, by)
            scores = gaussians.class_scores([metric], np.asarray(view, np.float32))
        total = total + weight * scores["adapted"][:, : len(counts)]
    return np.concatenate(fitted.classes)[total.argmax(axis=1)]


def measure(tasks, batches):
    """Returns accuracies in percent by batch and variant, and the mean staleness."""
    fits = {key: fit(tasks, *key) for key in ((True, True), (False, True), (True, False))}
    accuracy = {name: {} for name in batches}
    for variant, options in VARIANTS.items():
        growth = options.get("growth", True)
        options = {name: value for name, value in options.items() if name != "growth"}
        fitted = fits[options.get("unit", True), growth]
        for name, (*views, labels) in batches.items():
            right = predict(fitted, views, **options) == np.asarray(labels)
            accuracy[name][variant] = 100 * float(np.mean(right))
    whole = fits[True, True]
    stale = np.average(whole.staleness, weights=[len(each) for each in whole.classes])
    return {"staleness": float(stale), **accuracy}


def saved(folder):
    """Returns tasks and batches of a run."""
    features = feature_files.load(folder / "features")
    batches = {"test": (features.test_adapted, features.test_pretrained, features.test_labels)}
    if (folder / "held.npz").exists():
        held = np.load(folder / "held.npz")
        batches["held_out"] = held["adapted"], held["pretrained"], held["labels"]
    return features.tasks, batches


def network(seed, own_classes, rate):
    """Trains by SGD with batches of 32 and four epochs a task; returns tasks and batches."""
    digits, rng = load_digits(), np.random.default_rng(seed)
    images, labels = (digits.data / 16).astype(np.float32), digits.target
    test = np.arange(len(labels)) % 3 == 0
    held = ~test & (np.cumsum(~test) % 5 == 0)
    shapes = (64, 64), (64,), (64, 10)
    first = [rng.uniform(-1 / 8, 1 / 8, shape).astype(np.float32) for shape in shapes]
    (inner, offset, outer), bias = first, np.zeros(10, np.float32)

    def features(rows, layers):
        return np.maximum(images[rows] @ layers[0] + layers[1], 0)

    started, tasks = (inner, offset), []
    for task in range(5):
        classes = [2 * task, 2 * task + 1]
        rows = np.flatnonzero(~test & ~held & np.isin(labels, classes))
        before = inner, offset
        for _ in range(4):
            for batch in np.array_split(rng.permutation(rows), max(1, len(rows) // 32)):
                hidden = features(batch, (inner, offset))
                logits = hidden @ outer + bias
                if own_classes:
                    logits[:, np.setdiff1d(np.arange(10), classes)] = -np.inf
                error = np.exp(logits - logits.max(axis=1, keepdims=True))
                error /= error.sum(axis=1, keepdims=True)
                error[np.arange(len(batch)), labels[batch]] -= 1
                error /= len(batch)
                back = error @ outer.T * (hidden > 0)
                outer, bias = outer - rate * hidden.T @ error, bias - rate * error.sum(axis=0)
                inner = inner - rate * images[batch].T @ back
                offset = offset - rate * back.sum(axis=0)
        by = (features(rows, layers) for layers in ((inner, offset), started, before))
        adapted, pretrained, previous = by
        views = {"adapted": adapted, "pretrained": pretrained, "labels": labels[rows]}
        previous = previous if task else None
        tasks.append(SimpleNamespace(**views, previous=previous, classes=None))
    batches = {
        name: (*(features(chosen, layers) for layers in ((inner, offset), started)), labels[chosen])
        for name, chosen in (("test", test), ("held_out", held))
    }
    return tasks, batches


def mean(values):
    """Returns the mean of numbers or, key by key, of trees of numbers."""
    if isinstance(values[0], dict):
        return {key: mean([value[key] for value in values]) for key in values[0]}
    return round(float(np.mean(values)), 2)


def main():
    """Writes the accuracy of every variant."""
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    record = {"runs": {}, "networks": {}}
    for folder in options.runs:
        record["runs"][folder.name] = mean([measure(*saved(folder))])
    for own in (False, True):
        for rate in (0.05, 0.2):
            seeds = [measure(*network(seed, own, rate)) for seed in range(6)]
            name = f"softmax over {'own' if own else 'all'} classes, rate {rate}"
            record["networks"][name] = mean(seeds)
    options.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
