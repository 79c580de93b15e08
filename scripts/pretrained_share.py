"""How much the pretrained view should count beside class Gaussians that follow the encoder.

    python scripts/pretrained_share.py RUN/features ... > results/pretrained_share.json

Fixed shares, and a quarter that doubles at a staleness of 40, 20 or 10: on features of runs, and on
scanned digits in five tasks learned by a network of 64 hidden units, six seeds in four settings.
"""

import json
import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

from fdc_jax import calibration
from fdc_jax.calibration import gaussians

# Share, and the staleness that doubles it.
WAYS = {
    **{str(share): (share, np.inf) for share in (0.25, 0.5, 1.0)},
    **{f"doubling at {staleness}": (0.25, staleness) for staleness in (40, 20, 10)},
}
DIGITS = load_digits()
IMAGES, LABELS = (DIGITS.data / 16).astype(np.float32), DIGITS.target
TEST = np.arange(len(LABELS)) % 3 == 0


def measured(tasks, test, labels):
    """Returns the accuracy in percent by each of `WAYS`, and the mean staleness."""
    calibrator = calibration.make("gaussians")
    for adapted, pretrained, previous, own in tasks:
        calibrator.fit_task(adapted, own, pretrained=pretrained, previous=previous)
    sizes = [len(each) for each in calibrator.classes]
    found = {"staleness": float(np.repeat(calibrator.staleness, sizes).mean())}
    for name, way in WAYS.items():
        gaussians.PRETRAINED_SHARE, gaussians.DOUBLING = way
        found[name] = 100 * float(np.mean(calibrator.score(*test).label == labels))
    return found


def network(seed, own_classes, rate):
    """Trains by SGD with batches of 32 and four epochs a task; returns features as `measured`."""
    rng = np.random.default_rng(seed)
    shapes = (64, 64), (64,), (64, 10)
    first = [rng.uniform(-1 / 8, 1 / 8, shape).astype(np.float32) for shape in shapes]
    (inner, offset, outer), bias = first, np.zeros(10, np.float32)

    def features(rows, layers):
        return np.maximum(IMAGES[rows] @ layers[0] + layers[1], 0)

    started, tasks = (inner, offset), []
    for task in range(5):
        classes = [2 * task, 2 * task + 1]
        rows, before = np.flatnonzero(~TEST & np.isin(LABELS, classes)), (inner, offset)
        for _ in range(4):
            for batch in np.array_split(rng.permutation(rows), max(1, len(rows) // 32)):
                images, hidden = IMAGES[batch], features(batch, (inner, offset))
                logits = hidden @ outer + bias
                if own_classes:
                    logits[:, np.setdiff1d(np.arange(10), classes)] = -np.inf
                wrong = np.exp(logits - logits.max(axis=1, keepdims=True))
                wrong /= wrong.sum(axis=1, keepdims=True)
                wrong[np.arange(len(batch)), LABELS[batch]] -= 1
                wrong /= len(batch)
                back = wrong @ outer.T * (hidden > 0)
                outer, bias = outer - rate * hidden.T @ wrong, bias - rate * wrong.sum(axis=0)
                inner, offset = inner - rate * images.T @ back, offset - rate * back.sum(axis=0)
        ways = (inner, offset), started, before
        tasks.append((*(features(rows, way) for way in ways), LABELS[rows]))
    tasks[0] = (*tasks[0][:2], None, tasks[0][3])
    test = np.flatnonzero(TEST)
    return tasks, (features(test, (inner, offset)), features(test, started)), LABELS[test]


def saved(folder):
    """Returns what a run kept, as `measured`."""
    files = {path.stem: np.load(path) for path in Path(folder).glob("*.npy")}
    names = ("train_adapted", "train_pretrained", "train_previous", "train_labels")
    count = sum(name.startswith("train_labels") for name in files)
    tasks = [[files.get(f"{name}_{task}") for name in names] for task in range(count)]
    return tasks, (files["test_adapted"], files["test_pretrained"]), files["test_labels"]


def main():
    """Prints the record."""
    found = {"networks": [], "runs": []}
    for own_classes in (False, True):
        for rate in (0.05, 0.2):
            seeds = [measured(*network(seed, own_classes, rate)) for seed in range(6)]
            means = {name: round(np.mean([each[name] for each in seeds]), 2) for name in seeds[0]}
            setting = {"softmax": "own classes" if own_classes else "all classes", "rate": rate}
            found["networks"].append(setting | means)
    for folder in sys.argv[1:]:
        numbers = {name: round(value, 2) for name, value in measured(*saved(folder)).items()}
        found["runs"].append({"run": folder} | numbers)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
