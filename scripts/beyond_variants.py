"""What was tried beyond the paper, on features alone: `docs/beyond.md` says why and what came out.

python -m scripts.beyond_variants FOLDER... --output=results/beyond_variants.json

Every FOLDER is a feature folder with labelled test images, as `scripts.held_out_features` writes
them. Plain NumPy in float64, one variant a function; FDC's own terms come from the package. What
proved its worth was built into `fdc_jax.calibration`; this script is the record of the rest.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.cluster.vq import kmeans2
from scipy.special import logsumexp, softmax

from benchmarks import measure
from fdc_jax import calibration, feature_files
from fdc_jax.calibration.components import WHITENED_CLASSES
from fdc_jax.files import check_writable_folder, write_json
from fdc_jax.results import versions

SHRINKAGE = 0.05


def unit(rows):
    """Rows over their length."""
    return rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-12)


class Stream(NamedTuple):
    """One feature folder, FDC's terms on its test images, and logits of all classes."""

    features: feature_files.FeatureSet
    terms: calibration.Terms
    rows: list[np.ndarray]  # filtered logits of each head over its score scale
    raw_rows: list[np.ndarray]  # the same without TSF
    classes: np.ndarray
    ends: np.ndarray

    @property
    def residual_evidence(self):
        """Sum of RLC's evidence over the views."""
        return self.terms.adapted.rlc + self.terms.pretrained.rlc

    def accuracy(self, scores):
        """Percent right; `scores` [n, classes] over all classes."""
        return 100.0 * float((self.classes[scores.argmax(1)] == self.features.test_labels).mean())

    def split(self, scores):
        """Columns of each task."""
        return np.split(scores, self.ends[1:-1], axis=1)

    def by_task(self, closeness, tsf=True, rlc=1.0, logit=1.0, scale=None):
        """Task scores, each task predicting its own head's class."""
        terms = self.terms
        logits = terms.filtered_logits if tsf else terms.raw_logits
        sigma = terms.filtered_scale if tsf else terms.raw_scale
        sigma = sigma if scale is None else scale
        scores = logit * logits.logit + sigma * (closeness - rlc * self.residual_evidence)
        task = scores.argmax(1)
        row = logits.row[np.arange(len(task)), task]
        return 100.0 * float(
            (self.classes[self.ends[task] + row] == self.features.test_labels).mean()
        )

    def by_class(self, closeness, rows=None, rlc=1.0):
        """One score a class: logit over scale, plus its own closeness, minus residual evidence."""
        rows = self.rows if rows is None else rows
        down = rlc * self.residual_evidence
        return np.concatenate(
            [rows[t] + closeness[t] - down[:, t : t + 1] for t in range(len(rows))], axis=1
        )


def load(folder):
    """Fits FDC on a feature folder."""
    features = feature_files.load(folder)
    fdc = features.fit(calibration.FDC(affinity_metric="whitened"))
    terms = fdc.terms(np.asarray(features.test_adapted), np.asarray(features.test_pretrained))
    sizes = [len(task.classes) for task in features.tasks]
    whitened = terms.whitened

    def over_scale(all_rows, scale):
        return [all_rows[:, t, :size] / scale[t] for t, size in enumerate(sizes)]

    return Stream(
        features,
        terms,
        over_scale(whitened.filtered_logits, terms.filtered_scale),
        over_scale(whitened.raw_logits, terms.raw_scale),
        np.concatenate([task.classes for task in features.tasks]),
        np.cumsum([0, *sizes]),
    )


class Closeness(NamedTuple):
    """Scores of test images to all classes [n, classes], and each task's own (mean, std)."""

    scores: np.ndarray
    own: np.ndarray
    foreign: np.ndarray  # standardised scores of later tasks' images on earlier tasks


def measured(stream, view_of, kind="cosine", shrinkage=SHRINKAGE):
    """Causal closeness: task t's own moments in the metric of the time when it was learned.

    `kind` is `cosine` (whitened), `centred` (cosine about the mean of class means), `plain`
    (cosine), `linear` (discriminant) or `mahalanobis`.
    """
    scatter, images, means, own, foreign = 0.0, 0, [], [], []
    for t, task in enumerate(stream.features.tasks):
        features = view_of(task.adapted, task.pretrained)
        for label in task.classes:
            inside = features[np.asarray(task.labels) == label]
            mean = inside.mean(0) if kind != "plain" else unit(inside).mean(0)
            means.append(mean)
            scatter = scatter + (inside - mean).T @ (inside - mean)
            images += len(inside)
        score = _scorer(scatter / images, np.array(means), kind, shrinkage)
        found = stream.ends[t], stream.ends[t + 1]
        scores = score(features)
        largest = scores[:, found[0] : found[1]].max(1)
        own.append((largest.mean(), max(largest.std(), 1e-6)))
        for s in range(t):
            there = scores[:, stream.ends[s] : stream.ends[s + 1]].max(1)
            foreign.append((there - own[s][0]) / own[s][1])
    test = view_of(stream.features.test_adapted, stream.features.test_pretrained)
    return Closeness(score(test), np.array(own), np.concatenate(foreign))


def _scorer(covariance, means, kind, shrinkage) -> Callable[[np.ndarray], np.ndarray]:
    width = len(covariance)
    values, vectors = np.linalg.eigh(
        covariance + shrinkage * np.trace(covariance) / width * np.eye(width)
    )
    root = (vectors / np.sqrt(values)) @ vectors.T
    if kind in ("plain", "centred"):
        root = np.eye(width)
    origin = means.mean(0) if kind != "plain" else np.zeros(width)
    placed = (means - origin) @ root

    def score(features):
        whitened = (features - origin) @ root
        if kind in ("cosine", "centred", "plain"):
            return unit(whitened) @ unit(placed).T
        found = whitened @ placed.T - 0.5 * (placed**2).sum(1)
        if kind == "mahalanobis":
            found = found - 0.5 * (whitened**2).sum(1, keepdims=True)
        return found

    return score


def adapted(first, _):
    """The adapted view."""
    return np.asarray(first, np.float64)


def pretrained(_, second):
    """The pretrained view."""
    return np.asarray(second, np.float64)


def concatenated(first, second):
    """Both views as one."""
    return np.concatenate([adapted(first, second), pretrained(first, second)], axis=1)


def standardised(stream, closeness, reference="own", scope="task"):
    """Affinities of the tasks [n, T], or per task of its classes."""
    own = closeness.own
    if reference == "pooled":
        own = np.broadcast_to(own.mean(0), own.shape)
    parts = stream.split(closeness.scores)
    if scope == "class":
        return [(part - mean) / std for part, (mean, std) in zip(parts, own, strict=True)]
    return np.stack(
        [(p.max(1) - mean) / std for p, (mean, std) in zip(parts, own, strict=True)], axis=1
    )


def both(stream, found, reference="own", scope="task"):
    """Sum over the views."""
    parts = [standardised(stream, each, reference, scope) for each in found]
    if scope == "task":
        return parts[0] + parts[1]
    return [first + second for first, second in zip(*parts, strict=True)]


def random_features(stream, view_of, count=1000, ridge=1e-2):
    """Ridge regression on rectified random projections of unit features, all tasks together."""
    rng = np.random.default_rng(0)
    tasks = stream.features.tasks
    width = view_of(tasks[0].adapted, tasks[0].pretrained).shape[1]
    projection = rng.standard_normal((width, count))

    def expand(first, second):
        return np.maximum(unit(view_of(first, second)) @ projection, 0.0)

    gram, sums = 0.0, []
    for task in tasks:
        rows = expand(task.adapted, task.pretrained)
        gram = gram + rows.T @ rows
        sums += [rows[np.asarray(task.labels) == label].sum(0) for label in task.classes]
    weights = np.linalg.solve(
        gram + ridge * np.trace(gram) / count * np.eye(count), np.array(sums).T
    )
    return expand(stream.features.test_adapted, stream.features.test_pretrained) @ weights


def fisher_weights(stream):
    """Fisher's weights of the five terms of a score, between own and later tasks' images; sum 5."""
    fdc, own, foreign = calibration.FDC(**WHITENED_CLASSES), [], []
    for t, task in enumerate(stream.features.tasks):
        fdc.fit_task(task.adapted, task.labels, task.head, task.pretrained, task.classes)
        fdc.finalize()
        terms = fdc.terms(np.asarray(task.adapted), np.asarray(task.pretrained))
        found = np.stack(
            [
                terms.filtered_logits.logit / terms.filtered_scale,
                terms.whitened.adapted.affinity("pooled", "task")[..., 0],
                terms.whitened.pretrained.affinity("pooled", "task")[..., 0],
                -terms.adapted.rlc,
                -terms.pretrained.rlc,
            ],
            axis=-1,
        )
        own.append(found[:, t])
        foreign += [found[:, earlier] for earlier in range(t)]
    mean = np.mean([each.mean(0) for each in foreign], 0)
    covariance = np.mean([np.cov(each.T) for each in own], 0) + np.mean(
        [(each - mean).T @ (each - mean) / len(each) for each in foreign], 0
    )
    difference = np.mean([each.mean(0) for each in own], 0) - mean
    weights = np.linalg.solve(covariance + 1e-6 * np.eye(5), difference)
    return 5.0 * weights / weights.sum()


def several_prototypes(stream, view_of, closeness, count):
    """Whitened cosines to the nearest of a class: its mean, or one of `count` means by k-means."""
    tasks = stream.features.tasks
    scatter, images, means, groups = 0.0, 0, [], []
    for task in tasks:
        features = view_of(task.adapted, task.pretrained)
        for label in task.classes:
            inside = features[np.asarray(task.labels) == label]
            means.append(inside.mean(0))
            groups.append(inside)
            scatter = scatter + (inside - means[-1]).T @ (inside - means[-1])
            images += len(inside)
    width = len(means[0])
    covariance = scatter / images
    values, vectors = np.linalg.eigh(
        covariance + SHRINKAGE * np.trace(covariance) / width * np.eye(width)
    )
    root, origin = (vectors / np.sqrt(values)) @ vectors.T, np.mean(means, 0)
    test = unit(
        (view_of(stream.features.test_adapted, stream.features.test_pretrained) - origin) @ root
    )
    columns = []
    for inside in groups:
        whitened = unit((inside - origin) @ root)
        centres = kmeans2(whitened, count, minit="++", seed=0)[0]
        centres = np.concatenate([centres, whitened.mean(0, keepdims=True)])
        columns.append((test @ unit(centres).T).max(1))
    return closeness._replace(scores=np.stack(columns, 1))


def variants(stream):
    """Accuracy of every variant in percent, by name."""
    views = (adapted, pretrained)
    found = {"FDC": stream.by_task(stream.terms.adapted.pac + stream.terms.pretrained.pac)}
    plain = [measured(stream, view, "plain") for view in views]
    centred = [measured(stream, view, "centred") for view in views]
    whitened = [measured(stream, view) for view in views]

    # 1. Metric and evidence, apart and together.
    for name, kind in (("cosine", plain), ("centred cosine", centred), ("whitened", whitened)):
        found[f"{name}, linear"] = stream.by_task(both(stream, kind))
        bounded = sum(np.tanh(standardised(stream, each)) for each in kind)
        found[f"{name}, tanh"] = stream.by_task(bounded)
    affinity = both(stream, whitened)
    found["whitened, no TSF"] = stream.by_task(affinity, tsf=False)
    found["whitened, no RLC"] = stream.by_task(affinity, rlc=0.0)
    found["whitened, neither"] = stream.by_task(affinity, tsf=False, rlc=0.0)
    for shrinkage in (0.01, 0.1, 0.2, 0.5, 1.0):
        other = [measured(stream, view, shrinkage=shrinkage) for view in views]
        found[f"whitened, shrinkage {shrinkage}"] = stream.by_task(both(stream, other))

    # 2. Weights.
    for weight in (0.5, 2.0, 4.0):
        found[f"whitened, affinity x {weight}"] = stream.by_task(weight * affinity)
    for weight in (0.0, 0.5, 2.0):
        found[f"whitened, logit x {weight}"] = stream.by_task(affinity, logit=weight)
    for weight in (0.5, 2.0):
        found[f"whitened, RLC x {weight}"] = stream.by_task(affinity, rlc=weight)

    # 3. One metric over both views, and 4. discriminants.
    for shrinkage in (0.05, 0.2):
        joint = standardised(stream, measured(stream, concatenated, shrinkage=shrinkage))
        found[f"joint metric, shrinkage {shrinkage}"] = stream.by_task(joint)
        found[f"joint metric x 2, shrinkage {shrinkage}"] = stream.by_task(2 * joint)
    for kind in ("linear", "mahalanobis"):
        each = [measured(stream, view, kind) for view in views]
        found[f"{kind} discriminant"] = stream.by_task(both(stream, each))
        found[f"{kind} discriminant, alone"] = stream.accuracy(each[0].scores + each[1].scores)

    # 5. Class by class, and whose moments standardise.
    for reference in ("own", "pooled"):
        closeness = both(stream, whitened, reference)
        found[f"whitened, {reference} moments"] = stream.by_task(closeness)
        closeness = both(stream, whitened, reference, "class")
        found[f"class by class, {reference} moments"] = stream.accuracy(stream.by_class(closeness))
    for shrinkage in (0.2, 0.5):
        other = [measured(stream, view, shrinkage=shrinkage) for view in views]
        for scope, name in (("task", "whitened"), ("class", "class by class")):
            parts = both(stream, other, "pooled", scope)
            found[f"{name}, pooled moments, shrinkage {shrinkage}"] = (
                stream.by_task(parts)
                if scope == "task"
                else stream.accuracy(stream.by_class(parts))
            )
    rows = stream.raw_rows
    found["class by class, no TSF"] = stream.accuracy(stream.by_class(closeness, rows))
    found["class by class, no RLC"] = stream.accuracy(stream.by_class(closeness, rlc=0.0))
    cosines = both(stream, plain, "pooled", "class")
    found["class by class, cosine"] = stream.accuracy(stream.by_class(cosines))
    for weight in (0.5, 2.0, 3.0):
        scaled = [weight * each for each in closeness]
        found[f"class by class, affinity x {weight}"] = stream.accuracy(stream.by_class(scaled))
    parts = [standardised(stream, each, "pooled", "class") for each in whitened]
    for weight in (0.5, 2.0):
        summed = [first + weight * second for first, second in zip(*parts, strict=True)]
        name = f"class by class, pretrained view x {weight}"
        found[name] = stream.accuracy(stream.by_class(summed))

    # 6. Posteriors of the shared-covariance Gaussians, times the head's own.
    gaussian = measured(stream, concatenated, "linear").scores
    inside = np.concatenate([softmax(r * s, 1) for r, s in _unscaled(stream)], axis=1)
    for temperature in (1.0, 8.0):
        log = gaussian / temperature
        log = log - logsumexp(log, axis=1, keepdims=True)
        tasks = [logsumexp(each, axis=1, keepdims=True) for each in stream.split(log)]
        spread = np.concatenate(
            [np.repeat(p, k, 1) for p, k in zip(tasks, np.diff(stream.ends), strict=True)], axis=1
        )
        found[f"Gaussian task posterior x head, T {temperature:g}"] = stream.accuracy(
            spread + np.log(inside + 1e-30)
        )

    # 7. Own against foreign density of the affinity.
    ratio = 0.0
    for each in whitened:
        q, mean, std = standardised(stream, each), each.foreign.mean(), each.foreign.std()
        ratio = ratio - 0.5 * q**2 + 0.5 * ((q - mean) / std) ** 2 + np.log(std)
    for weight in (0.5, 1.0):
        found[f"own against foreign x {weight}"] = stream.by_task(weight * ratio)

    # 8. Linear residual evidence.
    linear = sum(
        np.arctanh(np.clip(view.rlc, -0.999999, 0.999999))
        for view in (stream.terms.adapted, stream.terms.pretrained)
    )
    found["whitened, linear residual evidence"] = stream.by_task(affinity - linear, rlc=0.0)

    # 10. Weights from the evidence of own and of later tasks' images.
    weights = fisher_weights(stream)
    terms, pieces = (
        stream.terms,
        [standardised(stream, each, "pooled", "class") for each in whitened],
    )
    for share in (0.5, 1.0):
        logit, *affinity_weights, first, second = share * weights + (1.0 - share)
        down = first * terms.adapted.rlc + second * terms.pretrained.rlc
        scores = [
            logit * row + affinity_weights[0] * one + affinity_weights[1] * two - down[:, t, None]
            for t, (row, one, two) in enumerate(zip(stream.rows, *pieces, strict=True))
        ]
        found[f"class by class, Fisher's weights x {share}"] = stream.accuracy(
            np.concatenate(scores, axis=1)
        )

    # 9. Random features; and several prototypes a class.
    for name, view in (("pretrained", pretrained), ("adapted", adapted)):
        regression = random_features(stream, view)
        found[f"random features, {name}, alone"] = stream.accuracy(regression)
        extra = stream.split(regression / regression.std())
        added = [first + 0.5 * second for first, second in zip(closeness, extra, strict=True)]
        found[f"class by class + random features, {name}"] = stream.accuracy(stream.by_class(added))
    for count in (2, 3):
        more = [
            several_prototypes(stream, view, each, count)
            for view, each in zip(views, whitened, strict=True)
        ]
        found[f"class by class, {count} prototypes a class"] = stream.accuracy(
            stream.by_class(both(stream, more, "pooled", "class"))
        )
    return found


def _unscaled(stream):
    return zip(stream.raw_rows, stream.terms.raw_scale, strict=True)


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.output:
        check_writable_folder("--output", options.output.absolute().parent)
    runs = {}
    for folder in options.folders:
        runs[folder.name] = variants(load(folder))
        print(folder.name, flush=True)
    summary = {}
    for name in next(iter(runs.values())):
        gains = [run[name] - run["FDC"] for run in runs.values()]
        summary[name] = {
            "accuracy": float(np.mean([run[name] for run in runs.values()])),
            "gain": float(np.mean(gains)),
            "least_gain": min(gains),
        }
        print(
            f"{name:48s} {summary[name]['accuracy']:6.2f} {np.mean(gains):+6.2f} {min(gains):+6.2f}"
        )
    if options.output:
        write_json(options.output, {"summary": summary, "runs": runs, "versions": versions()})


if __name__ == "__main__":
    sys.exit(measure.run("scripts.beyond_variants", main))
