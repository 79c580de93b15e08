"""Statistics that follow the encoder, on finished runs: what was tried, chosen and confirmed.

python -m scripts.transport_study RUN... --cache=FOLDER --output=results/transport_study.json

Each RUN is the work directory of one seed, trained with --config.fdc.transport=True. Variants are
compared on training images that the run has not seen (docs/beyond.md has the plan); what came out,
the other calibrators and the upper bounds are measured on the test images. Features that a run did
not save are extracted once and kept in FOLDER.
"""

import argparse
import functools
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int
from sklearn.linear_model import LogisticRegression

import fdc_jax
from fdc_jax import evaluation, feature_files, files
from fdc_jax.calibration import drift, fdc, transported
from fdc_jax.errors import InputError
from fdc_jax.feature_files import FeatureSet
from fdc_jax.heads import unit
from fdc_jax.posthoc import methods

SETTINGS = methods.Settings({}, projections=2000, seed=0)
# Whose statistics of the adapted view are moved, too.
CALIBRATORS = ("fdc", "whitened", "whitened-classes", "ncm", "mahalanobis", "fecam", "ranpac")
CALIBRATORS += ("anacp",)
FROZEN = ("ncm-pretrained", "mahalanobis-pretrained", "ranpac-pretrained", "ridge-pretrained")


class Problem(NamedTuple):
    """Features of one run: training by task, and images to score."""

    adapted: list[Float[np.ndarray, "n d"]]
    previous: list[Float[np.ndarray, "n d"] | None]
    pretrained: list[Float[np.ndarray, "n e"]]
    labels: list[Int[np.ndarray, " n"]]
    inputs: tuple[Float[np.ndarray, "m d"], Float[np.ndarray, "m e"]]
    truth: Int[np.ndarray, " m"]
    features: FeatureSet  # the same, with heads
    final: list[Float[np.ndarray, "n d"]]  # training images by E_T

    def first(self, images: int) -> "Problem":
        """Returns the first images of each class."""
        rows = [
            np.concatenate([np.flatnonzero(y == c)[:images] for c in np.unique(y)])
            for y in self.labels
        ]

        def of(arrays: Any) -> list[Any]:
            return [None if a is None else a[r] for a, r in zip(arrays, rows, strict=True)]

        adapted, previous, pretrained, labels, final = map(
            of, (self.adapted, self.previous, self.pretrained, self.labels, self.final)
        )
        columns = zip(self.features.tasks, adapted, pretrained, labels, previous, strict=True)
        tasks = tuple(
            t._replace(adapted=a, pretrained=p, labels=y, previous=b) for t, a, p, y, b in columns
        )
        return self._replace(
            adapted=adapted,
            previous=previous,
            pretrained=pretrained,
            labels=labels,
            final=final,
            features=self.features._replace(tasks=tasks),
        )


# Features ----------------------------------------------------------------------------------------


def problems(folder: Path, cache: Path, held_out: int) -> tuple[str, Problem | None, Problem]:
    """Returns the name of a run, and its held-out (if any) and its test images as problems."""
    run = fdc_jax.open_run(folder)
    config = run.config
    name = f"{config.benchmark}, {config.learner.name}, seed {next(iter(config.seed))}"
    kept = cache / f"{name.replace(', ', '_').replace(' ', '_')}.npz"
    if not kept.exists():
        files.write_npz(kept, _extract(run, held_out))
    extra = files.read_npz(kept)
    features = feature_files.load(folder / "features")
    tasks = features.tasks
    ends = np.cumsum([len(task.labels) for task in tasks])[:-1]
    test = Problem(
        [np.asarray(task.adapted) for task in tasks],
        [None if task.previous is None else np.asarray(task.previous) for task in tasks],
        [np.asarray(task.pretrained) for task in tasks],
        [np.asarray(task.labels) for task in tasks],
        (np.asarray(features.test_adapted), np.asarray(features.test_pretrained)),
        np.asarray(features.test_labels),
        features,
        np.split(extra["train_final"], ends),
    )
    if not held_out:
        return name, None, test
    inputs = extra["adapted"], extra["pretrained"]
    held = test._replace(
        inputs=inputs,
        truth=extra["labels"],
        features=features._replace(
            test_adapted=inputs[0], test_pretrained=inputs[1], test_labels=extra["labels"]
        ),
    )
    return name, held, test


def held_out_rows(run: Any, images: int) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
    """Returns the first images of each class that were not trained on, and their labels."""
    tasks, chosen, labels = run.experiment.tasks, [], []
    for classes, used in zip(tasks.tasks, tasks.train_indices, strict=True):
        for c in classes:
            rest = np.setdiff1d(np.flatnonzero(np.asarray(tasks.train.labels) == c), used)
            chosen.append(rest[:images])
            labels += [int(tasks.positions[c])] * len(chosen[-1])
    return np.concatenate(chosen), np.array(labels)


def _encoded(run: Any, images: Any, indices: np.ndarray, t: int) -> Float[np.ndarray, "n d"]:
    """Returns features by E_t of some images of a data set of the run."""
    e = run.experiment
    batches = e.evaluation_batches(images, indices)
    return e.extract(e.backbone, [run.encoder(t)], batches)[0].features


def _extract(run: Any, held_out: int) -> dict[str, np.ndarray]:
    """Returns held-out features in both views, and features of all training images by E_T."""
    tasks, last = run.experiment.tasks, run.num_tasks
    found = {"train_final": _encoded(run, tasks.train, np.concatenate(tasks.train_indices), last)}
    if not held_out:
        return found
    rows, labels = held_out_rows(run, held_out)
    return found | {
        "labels": labels,
        "adapted": _encoded(run, tasks.train, rows, last),
        "pretrained": _encoded(run, tasks.train, rows, 0),
    }


# Classifiers of moved features --------------------------------------------------------------------

Step = Callable[[Problem, int], Callable[[np.ndarray, np.ndarray], np.ndarray]]


def moved(problem: Problem, step: Step) -> list[np.ndarray]:
    """Returns the training features after the maps of all later tasks.

    `step` gives task t's map of features, of which it also sees those of the pretrained encoder.
    """
    found = [each.astype(np.float64) for each in problem.adapted]
    for t in range(1, len(found)):
        by = step(problem, t)
        pairs = zip(found[:t], problem.pretrained, strict=False)
        found[:t] = [by(rows, frozen) for rows, frozen in pairs]
    return found


def affine(problem: Problem, t: int) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """The map of `drift`."""
    before = problem.previous[t]
    assert before is not None
    by = drift.fit_map(before, problem.adapted[t])
    return lambda rows, _: by.move(rows)


def shift(problem: Problem, t: int) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """The mean change alone."""
    before = problem.previous[t]
    assert before is not None
    change = problem.adapted[t].mean(axis=0) - before.mean(axis=0)
    return lambda rows, _: rows + change


def constant(ridge: float) -> Step:
    """The map with a ridge that is not chosen."""

    def step(problem: Problem, t: int) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
        return _regressed(problem.previous[t], problem, t, ridge, lambda rows, _: rows)

    return step


def with_pretrained(problem: Problem, t: int) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """A map that sees the pretrained features of an image, too."""

    def both(rows: np.ndarray, frozen: np.ndarray) -> np.ndarray:
        return np.concatenate([rows, frozen], axis=1)

    return _regressed(problem.previous[t], problem, t, 1.0, both)


def quadratic(problem: Problem, t: int) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """A map that also sees squares of the features, about their mean and by their deviation."""
    before = problem.previous[t]
    assert before is not None
    mean, std = before.mean(axis=0), before.std(axis=0) + 1e-6

    def expand(rows: np.ndarray, _: np.ndarray) -> np.ndarray:
        standard = (rows - mean) / std
        return np.concatenate([rows, standard**2 * std], axis=1)

    return _regressed(before, problem, t, 1.0, expand)


def _regressed(
    before: Any,
    problem: Problem,
    t: int,
    ridge: float,
    expand: Callable[[np.ndarray, np.ndarray], np.ndarray],
) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    before = before.astype(np.float64)
    change = problem.adapted[t] - before
    inputs = expand(before, problem.pretrained[t])
    mean, shifted = inputs.mean(axis=0), change.mean(axis=0)
    centred = inputs - mean
    gram = centred.T @ centred
    level = ridge * np.trace(gram) / len(gram)
    matrix = np.linalg.solve(gram + level * np.eye(len(gram)), centred.T @ (change - shifted))
    return lambda rows, frozen: rows + (expand(rows, frozen) - mean) @ matrix + shifted


class Classes(NamedTuple):
    """Plain statistics of features: class means, counts by task, pooled covariance."""

    means: Float[np.ndarray, "c d"]
    counts: list[Int[np.ndarray, " c"]]
    covariance: Float[np.ndarray, "d d"]


def classes(features: list[np.ndarray], labels: list[np.ndarray]) -> Classes:
    """Returns them in float64."""
    means, counts, scatter = [], [], 0.0
    for rows, of in zip(features, labels, strict=True):
        names, index, count = np.unique(of, return_inverse=True, return_counts=True)
        own = np.stack([rows[index == c].mean(axis=0, dtype=np.float64) for c in range(len(names))])
        centred = rows - own[index]
        scatter = scatter + centred.T @ centred
        means.append(own)
        counts.append(count)
    return Classes(np.concatenate(means), counts, scatter / sum(map(len, labels)))


def _whitener(covariance: np.ndarray, shrinkage: float) -> np.ndarray:
    level = shrinkage * np.trace(covariance) / len(covariance)
    return np.linalg.inv(np.linalg.cholesky(covariance + level * np.eye(len(covariance))))


def discriminant(
    features: list[np.ndarray], labels: list[np.ndarray], inputs: np.ndarray, shrinkage: float = 0.1
) -> np.ndarray:
    """Minus half the squared distance to class means in the pooled within-class metric."""
    known = classes(features, labels)
    whitener = _whitener(known.covariance, shrinkage)
    near, rows = inputs @ whitener.T, known.means @ whitener.T
    return near @ rows.T - (rows**2).sum(axis=1) / 2


def cosine(
    features: list[np.ndarray], labels: list[np.ndarray], inputs: np.ndarray, shrinkage: float = 0.1
) -> np.ndarray:
    """Cosines to class means in the same metric about the mean of the class means."""
    known = classes(features, labels)
    whitener, origin = _whitener(known.covariance, shrinkage), known.means.mean(axis=0)
    return unit((inputs - origin) @ whitener.T) @ unit((known.means - origin) @ whitener.T).T


def gaussians(
    features: list[np.ndarray],
    labels: list[np.ndarray],
    inputs: np.ndarray,
    rank: int = transported.RANK,
    **parameters: float,
) -> np.ndarray:
    """Scores by class Gaussians of `transported`, all of whose statistics are of these features."""
    width, known = features[0].shape[1], None
    for rows, of in zip(features, labels, strict=True):
        sums = []
        for c in np.unique(of):
            sums.append(fdc.Sums(width))
            sums[-1].add(rows[of == c], of[of == c])
        new = transported.gaussians(sums, width, rank)
        known = new if known is None else known.joined(new)
    assert known is not None
    found = transported.metric(known, classes(features, labels).counts, **parameters)
    scores = transported.class_scores(found, inputs.astype(np.float32))
    counts = [len(np.unique(of)) for of in labels]
    return np.concatenate([scores[:, t, :count] for t, count in enumerate(counts)], axis=1)


def logits(problem: Problem) -> np.ndarray:
    """Logits of all classes by the final heads, each over the deviation of its task's largest."""
    columns = []
    heads = problem.features.final_heads or [task.head for task in problem.features.tasks]
    for task, head in zip(problem.features.tasks, heads, strict=True):
        own = np.asarray(task.head.logits(np.asarray(task.adapted))).max(axis=1).std()
        columns.append(np.asarray(head.logits(problem.inputs[0])) / max(float(own), 1e-3))
    return np.concatenate(columns, axis=1)


# What is compared ---------------------------------------------------------------------------------


def variants(problem: Problem) -> Iterator[tuple[str, np.ndarray]]:
    """Scores of all classes by everything that was tried, on one problem."""
    labels, (adapted, pretrained) = problem.labels, problem.inputs
    carried = moved(problem, affine)
    frozen = gaussians(problem.pretrained, labels, pretrained)
    known = {"stored": problem.adapted, "moved": carried, "bound": problem.final}
    rules: dict[str, Any] = {"discriminant": discriminant, "cosine": cosine, "gaussians": gaussians}
    for (kind, rows), (name, rule) in itertools.product(known.items(), rules.items()):
        yield f"{name}, {kind}", rule(rows, labels, adapted)
    for kind, rows in known.items():
        yield f"both views, {kind}", gaussians(rows, labels, adapted) + 0.5 * frozen
    own = gaussians(carried, labels, adapted)
    for weight in (0.25, 1.0):
        yield f"pretrained view x {weight}", own + weight * frozen
    yield "pretrained view alone", frozen
    for weight in (0.5, 1.0, 2.0, 4.0):
        yield f"with logits x {weight}", own + 0.5 * frozen + weight * logits(problem)
    yield (
        "cosines of both views",
        cosine(carried, labels, adapted) + 0.25 * cosine(problem.pretrained, labels, pretrained),
    )
    scales = [
        np.sqrt(np.trace(classes(f, labels).covariance)) for f in (carried, problem.pretrained)
    ]
    joined = [
        np.concatenate([a / scales[0], p / scales[1]], axis=1)
        for a, p in zip(carried, problem.pretrained, strict=True)
    ]
    inputs = np.concatenate([adapted / scales[0], pretrained / scales[1]], axis=1)
    for shrinkage in (0.2, 1.0):
        name = f"views concatenated, shrinkage {shrinkage}"
        yield name, discriminant(joined, labels, inputs, shrinkage)
    normal = [unit(rows) for rows in carried]
    yield "unit length", gaussians(normal, labels, unit(adapted)) + 0.5 * frozen
    for name, values in {
        "rank": (1, 3, 16),
        "own_share": (0.0, 0.05, 0.2),
        "least_shrinkage": (0.02, 0.5),
    }.items():
        for value in values:
            scores = gaussians(carried, labels, adapted, **{name: value})
            yield (
                f"{name} {value}",
                scores + 0.5 * gaussians(problem.pretrained, labels, pretrained, **{name: value}),
            )
    maps: dict[str, Step] = {
        "shift": shift,
        "ridge 0.3": constant(0.3),
        "ridge 1": constant(1.0),
        "ridge 3": constant(3.0),
        "with E_0": with_pretrained,
        "with squares": quadratic,
    }
    for name, step in maps.items():
        yield f"map: {name}", gaussians(moved(problem, step), labels, adapted) + 0.5 * frozen


def calibrated(problem: Problem, names: tuple[str, ...], kind: str) -> Iterator[tuple[str, float]]:
    """Accuracies of methods of `fdc_jax.posthoc`; `kind` says whose features they are fitted on."""
    rows = {"stored": problem.adapted, "moved": None, "bound": problem.final}[kind]
    features = problem.features
    if rows is None:
        features = methods.moved(features)
    else:
        pairs = zip(features.tasks, rows, strict=True)
        features = features._replace(tasks=tuple(t._replace(adapted=r) for t, r in pairs))
    for name in names:
        try:
            found = methods.run(name, features, SETTINGS).scores.label
        except InputError:
            continue  # Not for heads of this kind.
        yield f"{name}, {kind}", evaluation.accuracy(problem.truth, found)


def drawn(problem: Problem) -> Problem:
    """Returns the problem with moved training features replaced by draws from class Gaussians.

    They share one covariance. What is kept of the tasks is then enough to make them.
    """
    carried, rng = moved(problem, affine), np.random.default_rng(0)
    known = classes(carried, problem.labels)
    factor = np.linalg.cholesky(known.covariance + 1e-6 * np.eye(len(known.covariance)))
    tasks = []
    for task, labels in zip(problem.features.tasks, problem.labels, strict=True):
        noise = rng.standard_normal((len(labels), len(factor))) @ factor.T
        tasks.append(task._replace(adapted=(known.means[labels] + noise).astype(np.float32)))
    return problem._replace(features=problem.features._replace(tasks=tuple(tasks)))


def joint(problem: Problem) -> float:
    """One head for all classes, trained on features of all tasks' images by E_T."""
    rows, labels = np.concatenate(problem.final), np.concatenate(problem.labels)
    mean, std = rows.mean(axis=0), rows.std(axis=0) + 1e-6
    head = LogisticRegression(C=0.01, max_iter=300).fit((rows - mean) / std, labels)
    return evaluation.accuracy(problem.truth, head.predict((problem.inputs[0] - mean) / std))


def ages(problem: Problem) -> dict[str, list[float]]:
    """Of each task, how far its class means lie from re-extracted ones, and its accuracy.

    Distances are in the within-class metric of E_T, over that of the means from their centre.
    """
    final = classes(problem.final, problem.labels)
    whitener = _whitener(final.covariance, 0.1)
    size = np.linalg.norm((final.means - final.means.mean(axis=0)) @ whitener.T, axis=1).mean()
    task_of = np.repeat(np.arange(len(problem.labels)), [len(c) for c in final.counts])
    frozen = gaussians(problem.pretrained, problem.labels, problem.inputs[1])
    found = {}
    for kind, rows in (("stored", problem.adapted), ("moved", moved(problem, affine))):
        gap = (classes(rows, problem.labels).means - final.means) @ whitener.T
        apart = np.linalg.norm(gap, axis=1) / size
        scores = gaussians(rows, problem.labels, problem.inputs[0]) + 0.5 * frozen
        right = scores.argmax(axis=1) == problem.truth
        tasks = task_of[problem.truth]
        each = range(len(problem.labels))
        found[f"distance, {kind}"] = [float(apart[task_of == t].mean()) for t in each]
        found[f"accuracy, {kind}"] = [100 * float(right[tasks == t].mean()) for t in each]
    return found


CURVE = (2, 5, 10, 15, 20)


def curve(run: Any, test: Problem) -> dict[str, list[float]]:
    """Accuracy after some of the tasks, with and without the maps, and with re-extraction.

    Needs a learner that keeps the encoder of every task.
    """
    tasks = run.experiment.tasks
    task_of = np.asarray(tasks.test_tasks)
    counts = [count for count in CURVE if count <= run.num_tasks]
    found: dict[str, list[float]] = {"tasks": [float(count) for count in counts]}
    for count in counts:
        rows = np.flatnonzero(task_of < count)
        trained = np.concatenate(tasks.train_indices[:count])
        part = test._replace(
            adapted=test.adapted[:count],
            previous=test.previous[:count],
            pretrained=test.pretrained[:count],
            labels=test.labels[:count],
        )
        inputs = _encoded(run, tasks.test, tasks.test_indices[rows], count)
        frozen = 0.5 * gaussians(part.pretrained, part.labels, test.inputs[1][rows])
        ends = np.cumsum([len(each) for each in part.labels])[:-1]
        known = {
            "stored": part.adapted,
            "moved": moved(part, affine),
            "bound": np.split(_encoded(run, tasks.train, trained, count), ends),
        }
        for kind, features in known.items():
            scores = gaussians(features, part.labels, inputs) + frozen
            right = evaluation.accuracy(test.truth[rows], scores.argmax(axis=1))
            found.setdefault(kind, []).append(right)
    return found


EARLIER = 3  # blocks before the last one


def layers(run: Any, held: Problem, kept: Path) -> dict[str, float]:
    """Accuracy with the class tokens of earlier layers, each with a map and Gaussians of its own.

    Layers count from the end of the encoder, 0 being the features of all else.
    """
    e, last = run.experiment, run.num_tasks
    model, trained = e.setup.model, e.tasks.train_indices

    @jax.jit
    def encode(backbone: Any, images: Any, kernels: Any) -> list[Any]:
        apply = functools.partial(model.apply, {"params": backbone}, mutable=["intermediates"])
        features, found = apply(images, kernels)
        blocks = found["intermediates"]["Transformer"]
        names = (f"encoderblock_{model.variant.depth - back}" for back in range(1, EARLIER + 1))
        return [features, *(blocks[name]["attention_input"][0][:, 0] for name in names)]

    def extract(name: str, indices: np.ndarray, t: int) -> dict[str, np.ndarray]:
        rows, kernels = [], run.encoder(t)
        for batch in e.evaluation_batches(e.tasks.train, indices):
            found = encode(e.backbone, batch.images, kernels)
            rows.append([np.asarray(each)[: int(batch.weights.sum())] for each in found])
        columns = zip(*rows, strict=True)
        return {f"{name}, {back}": np.concatenate(each) for back, each in enumerate(columns)}

    if not kept.exists():
        rows = held_out_rows(run, len(held.truth) // run.results["num_classes"])[0]
        arrays = extract("held", rows, last) | extract("held pretrained", rows, 0)
        for t, indices in enumerate(trained):
            arrays |= extract(f"before {t}", indices, t) | extract(f"after {t}", indices, t + 1)
            arrays |= extract(f"pretrained {t}", indices, 0)
        files.write_npz(kept, arrays)
    arrays = files.read_npz(kept)
    adapted, frozen = [], []
    for back in range(EARLIER + 1):
        after, before, pretrained = (
            [arrays[f"{name} {t}, {back}"] for t in range(last)]
            for name in ("after", "before", "pretrained")
        )
        carried = moved(held._replace(adapted=after, previous=[*before]), affine)
        adapted.append(gaussians(carried, held.labels, arrays[f"held, {back}"]))
        frozen.append(gaussians(pretrained, held.labels, arrays[f"held pretrained, {back}"]))
    found = {f"layer {back}": scores for back, scores in enumerate(adapted)}
    found |= {f"layer {back}, pretrained": scores for back, scores in enumerate(frozen)}
    found["both views"] = both = adapted[0] + 0.5 * frozen[0]
    for weight in (0.1, 0.25, 0.5):
        found[f"both views, earlier adapted x {weight}"] = both + weight * sum(adapted[1:])
        found[f"both views, earlier pretrained x {weight}"] = both + weight * sum(frozen[1:])
    return {
        name: evaluation.accuracy(held.truth, scores.argmax(axis=1))
        for name, scores in found.items()
    }


def draw(found: dict[str, Any], path: Path) -> None:
    """Draws the curve, and accuracy and distance of class means against a task's age."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "fdc_jax", "svg.fonttype": "none", "font.size": 8}
    from matplotlib import pyplot

    titles = {"stored": "as stored", "moved": "transported", "bound": "re-extracted"}
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(9, 2.8), layout="constrained")
    first = next(each["curve"] for each in found["runs"].values() if "curve" in each)
    for kind, title in titles.items():
        left.plot(first["tasks"], first[kind], marker="o", markersize=3, label=title)
    left.set(xlabel="tasks learned", ylabel="accuracy, %", title="Cumulative-LoRA, seed 1")
    for name, axis, label in (
        ("accuracy", middle, "accuracy of the task, %"),
        ("distance", right, "distance of class means"),
    ):
        for kind in ("stored", "moved"):
            rows = np.array([each["by_task"][f"{name}, {kind}"] for each in found["runs"].values()])
            mean = rows.mean(axis=0)[::-1]
            axis.plot(np.arange(len(mean)), mean, marker="o", markersize=3, label=titles[kind])
        axis.set(xlabel="tasks learned since", ylabel=label, title=f"mean of {len(rows)} runs")
    left.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})


def choice(held: Problem) -> dict[str, float]:
    """Returns the accuracies that the choice was made by."""
    found = {
        name: evaluation.accuracy(held.truth, scores.argmax(axis=1))
        for name, scores in variants(held)
    }
    for kind in ("stored", "moved"):
        found |= dict(calibrated(held, CALIBRATORS, kind))
    draws = drawn(held).features
    for name in ("ridge", "ranpac"):
        scores = methods.run(name, draws, SETTINGS).scores
        found[f"{name}, drawn"] = evaluation.accuracy(held.truth, scores.label)
    return found


def confirmation(test: Problem, few: bool) -> dict[str, float]:
    """Returns accuracies on test images; `few` also with fewer training images."""
    confirmed = dict(calibrated(test, ("raw", *CALIBRATORS, "transported", *FROZEN), "stored"))
    confirmed |= dict(calibrated(test, CALIBRATORS, "moved"))
    confirmed |= dict(calibrated(test, CALIBRATORS, "bound"))
    frozen = gaussians(test.pretrained, test.labels, test.inputs[1])
    bound = gaussians(test.final, test.labels, test.inputs[0]) + 0.5 * frozen
    confirmed["transported, bound"] = evaluation.accuracy(test.truth, bound.argmax(axis=1))
    confirmed["one joint head"] = joint(test)
    for images in (20, 10, 5) if few else ():
        names = ("fdc", "whitened-classes", "transported")
        each = calibrated(test.first(images), names, "stored")
        confirmed |= {f"{name.split(',')[0]}, {images} images": value for name, value in each}
    return confirmed


def table(runs: dict[str, Any]) -> str:
    """Returns the learners' accuracies on test images over their seeds, as Markdown.

    Best other is the one with the best mean over the seeds, of all that was there before.
    """
    learners: dict[str, list[dict[str, float]]] = {}
    for name, numbers in runs.items():
        learners.setdefault(name.split(", ")[1], []).append(numbers["test"])
    columns = {"Raw": "raw, stored", "FDC": "fdc, stored"}
    columns |= {"class by class": "whitened-classes, stored", "transported": "transported, stored"}
    columns |= {"bound": "transported, bound", "joint head": "one joint head"}
    lines = ["| | seeds | best other | " + " | ".join(columns) + " |", "|---" * 9 + "|"]

    def over(tests: list[dict[str, float]], name: str) -> str:
        values = [test[name] for test in tests]
        spread = f" ± {np.std(values, ddof=1):.2f}" if len(values) > 1 else ""
        return f"{np.mean(values):.2f}{spread}"

    for learner, tests in learners.items():
        others = [
            name
            for name in sorted(set.intersection(*map(set, tests)))
            if name.partition(",")[0] in ("raw", *CALIBRATORS, *FROZEN) and "bound" not in name
            if not name.endswith("images")
        ]
        best = max(others, key=lambda name: np.mean([test[name] for test in tests]))
        cells = [learner, str(len(tests)), f"{over(tests, best)} ({best})"]
        cells += [over(tests, name) for name in columns.values()]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Writes the study of all runs; those that are in the output are not done again."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--held_out", type=int, default=20, help="images a class to choose by")
    parser.add_argument("--curve", type=Path, help="a run to measure after several of its tasks")
    parser.add_argument("--layers", type=Path, help="a run to measure with earlier layers, too")
    parser.add_argument("--figure", type=Path, help="where to draw what the output holds (.svg)")
    options = parser.parse_args(arguments)
    found = files.read_json(options.output) if options.output.exists() else {"runs": {}}
    for folder in options.runs:
        name, held, test = problems(folder, options.cache, options.held_out)
        if name not in found["runs"]:
            numbers: dict[str, Any] = {} if held is None else {"held_out": choice(held)}
            numbers |= {"test": confirmation(test, held is not None), "by_task": ages(test)}
            found["runs"][name] = numbers
            files.write_json(options.output, found)
        if folder == options.curve and "curve" not in found["runs"][name]:
            found["runs"][name]["curve"] = curve(fdc_jax.open_run(folder), test)
            files.write_json(options.output, found)
        if folder == options.layers and held and "layers" not in found["runs"][name]:
            kept = options.cache / f"layers_{folder.name}.npz"
            found["runs"][name]["layers"] = layers(fdc_jax.open_run(folder), held, kept)
            files.write_json(options.output, found)
        print(name, json.dumps(found["runs"][name]["test"]), file=sys.stderr)
    print(table(found["runs"]))
    if options.figure is not None:
        draw(found, options.figure)
    files.write_json(options.output, found | {"versions": evaluation.versions()})


if __name__ == "__main__":
    main()
