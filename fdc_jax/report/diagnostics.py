"""Why images go to the wrong task: the paper's diagnostics, measured on saved features.

Images are the test images unless a docstring says otherwise, views are `adapted` and, where the
file has it, `pretrained`, and tasks are numbered from 0. `fit` is `measurements.fit(features,
[settings])`, for callers who have it.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy import stats

from fdc_jax import evaluation
from fdc_jax.calibration import Settings, comparators, inputs, measures
from fdc_jax.errors import InputError
from fdc_jax.feature_files import FeatureSet
from fdc_jax.heads import NORM_FLOOR
from fdc_jax.report import measurements
from fdc_jax.report.measurements import Fit, HeadArrays, TaskArrays
from fdc_jax.report.spectra import TaskSpectrum, spectra

VIEWS = ("adapted", "pretrained")

# Points at which densities are evaluated, and the shares of values that their range spans.
GRID_POINTS = 256
GRID_RANGE = (0.002, 0.998)


def similarity(features: FeatureSet, settings: Settings, fit: Fit | None = None) -> dict[str, Any]:
    """Compares how alike two tasks look to FDC with how often one is routed to the other.

    The paper (Fig. motivation-confusability) describes similarity as how well an input fits another
    task's feature distribution compared with how well it fits its own, and gives no formula. Our
    reading, for an ordered pair of a true task s and another task t: the mean over the images x of
    s of the fit to t minus the fit to s, where the fit is -u of Eq. residual for subspace residuals
    and q of Eq. par for prototype affinities, each in standard deviations of the task it is
    measured against. The images are the training images of s by the encoder of their time, E_s
    ("the encoder after each task") or E_0. Their mean fit to s itself is then 0 by construction,
    so that the similarity is the mean fit to t. Larger is more alike.

    The routing error is the share of the test images of s whose largest raw logit is one of t.

    Returns:
        Over all ordered pairs, as lists of one length: `true_task`, `other_task`,
        `routing_error_percent`; for each view `residual` and `affinity`, the similarities in
        standard deviations; and for each view and similarity, under `spearman`, the rank
        `correlation` with the routing error and its `p_value` (which takes pairs as independent;
        both None where one side does not vary).

    Raises:
        InputError: no test labels, or a single task.
    """
    true_tasks = features.test_tasks
    count = len(features.tasks)
    if count < 2:
        raise InputError("similarity: expected at least two tasks, found one")
    fit = measurements.fit(features, [settings]) if fit is None else fit
    raw = fit.measure(0, features.test_adapted, with_heads=True).raw
    assert raw is not None
    confusion = evaluation.task_confusion(true_tasks, np.argmax(raw.logit, axis=0), count)
    images = np.maximum(confusion.sum(axis=1, keepdims=True), 1)
    # Tasks without a test image have no routing error.
    first, second = np.nonzero(~np.eye(count, dtype=bool) & (confusion.sum(axis=1) > 0)[:, None])
    error = (100.0 * confusion / images)[first, second]
    result: dict[str, Any] = {
        "true_task": first.tolist(),
        "other_task": second.tolist(),
        "routing_error_percent": error.tolist(),
        "spearman": {},
    }
    for view, name in enumerate(VIEWS[: len(fit.views)]):
        found = _fits(features, fit, view, settings.neighbours)
        pairs = {kind: matrix[first, second] for kind, matrix in found.items()}
        result[name] = {kind: values.tolist() for kind, values in pairs.items()}
        result["spearman"][name] = {
            kind: _spearman(values, error) for kind, values in pairs.items()
        }
    return result


def _fits(
    features: FeatureSet, fit: Fit, view: int, neighbours: int
) -> dict[str, Float[np.ndarray, "tasks tasks"]]:
    """Returns the mean fit of each task's images (row) to every task, less that to itself."""
    fitted = fit.views[view]
    residual, affinity = [], []
    for task in features.tasks:
        values = task.adapted if view == 0 else task.pretrained
        assert values is not None
        found = fit.measure(view, values)
        assert found.distance is not None
        residual.append(-fitted.residuals(np.asarray(found.ratio), 0).mean(axis=1))
        distance = np.asarray(found.distance)
        affinity.append(fitted.affinities(distance, neighbours).mean(axis=1))
    matrices = {"residual": np.stack(residual), "affinity": np.stack(affinity)}
    return {name: matrix - np.diag(matrix)[:, None] for name, matrix in matrices.items()}


def _spearman(values: np.ndarray, error: np.ndarray) -> dict[str, float | None]:
    if len(values) < 3 or np.ptp(values) == 0 or np.ptp(error) == 0:
        return {"correlation": None, "p_value": None}
    found: Any = stats.spearmanr(values, error)
    return {"correlation": float(found.statistic), "p_value": float(found.pvalue)}


def residual_contributions(
    features: FeatureSet, settings: Settings, fit: Fit | None = None
) -> dict[str, Any]:
    """Measures what features outside a head's subspace add to the logit that it would predict.

    A(x) = w^T (I - Pi) h / sigma (Eq. motivation-residual-contribution) with h = E_T(x), w the row
    of the class that the head predicts before calibration and sigma its own-training standard
    deviation of the largest raw logit; averaged over the test images of the head's own task, and
    over those of all others. For heads that divide their input by its norm, h is divided by it,
    after the projection.

    Returns:
        `own` and `foreign`, one mean per head in units of its sigma, None without such images.

    Raises:
        InputError: no test labels.
    """
    true_tasks = features.test_tasks
    fit = measurements.fit(features, [settings]) if fit is None else fit
    own, foreign = [], []
    for t, (task, head) in enumerate(zip(fit.views[0].tasks, fit.heads, strict=True)):
        contributions = np.concatenate(
            [
                np.asarray(_contribution(task, head, block, fit.plan.normalised))[:rows]
                for block, rows in _blocks(features.test_adapted)
            ]
        ).astype(np.float64)
        contributions /= fit.raw_scale[t]
        own.append(_mean(contributions[true_tasks == t]))
        foreign.append(_mean(contributions[true_tasks != t]))
    return {"own": own, "foreign": foreign}


def _blocks(features: Float[np.ndarray, "n d"]):
    """Yields padded blocks on the device and their numbers of images."""
    for start in range(0, len(features), inputs.BLOCK_ROWS):
        rows = np.asarray(features[start : start + inputs.BLOCK_ROWS])
        yield inputs.padded_rows(rows, inputs.BLOCK_ROWS), len(rows)


def _contribute(
    task: TaskArrays, head: HeadArrays, features: Float[Array, "n d"], normalised: bool
) -> Float[Array, " n"]:
    basis = task.basis * task.kept[0][:, None]
    outside = features - measures.filter_features(features, basis, jnp.float32(1.0))
    norm = jnp.ones(len(features))
    if normalised:
        norm = jnp.maximum(jnp.sqrt(measures.energy(features)), NORM_FLOOR)
    logits = measures.products(features, head.rows) / norm[:, None] + head.bias
    predicted = jnp.argmax(logits, axis=1)
    return jnp.sum(outside * head.rows[predicted], axis=1) / norm


_contribution = jax.jit(_contribute, static_argnames="normalised")


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None


def residual_distributions(
    features: FeatureSet, settings: Settings, fit: Fit | None = None
) -> dict[str, Any]:
    """Estimates how residual ratios are distributed as the first and the last task see them.

    Residual ratios of test images (Eq. residual) are standardised by the head's own training
    statistics (paper, Fig. routing-srlr). Densities are Gaussian kernel estimates with Scott's
    bandwidth, one per true task; a task whose images do not vary has none.

    Returns:
        For each view, `first` and `last`, each with: `task`, whose head it is; `grid`, standardised
        residuals, the same for all densities; `own`, the density of its own images; `foreign`, from
        other tasks (as text) to theirs; `foreign_mean`, the mean of those, tasks weighted equally.
        Densities are None where there is none, and not cut to the grid: they integrate to 1 over
        the whole line.

    Raises:
        InputError: no test labels.
    """
    true_tasks = features.test_tasks
    fit = measurements.fit(features, [settings]) if fit is None else fit
    result: dict[str, Any] = {}
    for view, name in enumerate(VIEWS[: len(fit.views)]):
        values = features.test_adapted if view == 0 else features.test_pretrained
        assert values is not None
        residual = fit.views[view].residuals(np.asarray(fit.measure(view, values).ratio), 0)
        result[name] = {
            place: {"task": task} | _densities(residual[task], true_tasks, task)
            for place, task in (("first", 0), ("last", len(features.tasks) - 1))
        }
    return result


def _densities(
    residual: Float[np.ndarray, " n"], true_tasks: np.ndarray, own: int
) -> dict[str, Any]:
    low, high = np.quantile(residual, GRID_RANGE)
    margin = 0.1 * max(high - low, measures.SCALE_FLOOR)
    grid = np.linspace(low - margin, high + margin, GRID_POINTS)
    densities = {
        int(task): _density(residual[true_tasks == task], grid) for task in np.unique(true_tasks)
    }
    foreign = {
        str(task): density
        for task, density in densities.items()
        if task != own and density is not None
    }
    return {
        "grid": grid.tolist(),
        "own": densities.get(own),
        "foreign": foreign,
        "foreign_mean": np.round(np.mean(list(foreign.values()), axis=0), 6).tolist()
        if foreign
        else None,
    }


def _density(values: Float[np.ndarray, " n"], grid: np.ndarray) -> list[float] | None:
    if len(values) < 2 or np.ptp(values) <= 1e-9 * max(1.0, np.abs(values).max()):
        return None
    # More digits than any figure shows only fill the disk.
    return np.round(stats.gaussian_kde(values)(grid), 6).tolist()


def prototype_geometry(
    features: FeatureSet, tasks: Sequence[TaskSpectrum] | None = None
) -> dict[str, Any]:
    """Lays out class and task prototypes in the plane (paper, Fig. routing-par).

    Class prototypes are those of PAC (Eq. proto): unit means of unit features. A task's prototype
    is the unit mean of its classes' ("averaging classes into a single task prototype"). Both are
    embedded together by t-SNE, separately in each view, with perplexity 30 or what the number of
    points allows. On unit vectors its Euclidean distances order pairs as cosines do.

    Returns:
        For each view `classes` and `tasks`, lists of [x, y] without unit; beside them
        `class_labels` and `class_tasks`, one number per class with images.
    """
    from sklearn.manifold import TSNE

    tasks = spectra(features) if tasks is None else tasks
    present = [task.class_counts > 0 for task in tasks]
    result: dict[str, Any] = {
        "class_labels": np.concatenate(
            [task.classes[keep] for task, keep in zip(features.tasks, present, strict=True)]
        ).tolist(),
        "class_tasks": np.repeat(
            np.arange(len(tasks)), [int(keep.sum()) for keep in present]
        ).tolist(),
    }
    for view, name in enumerate(VIEWS[: len(tasks[0].views)]):
        classes = [
            task.views[view].prototypes[keep].astype(np.float64)
            for task, keep in zip(tasks, present, strict=True)
        ]
        means = np.stack([rows.mean(axis=0) for rows in classes])
        means /= np.maximum(np.linalg.norm(means, axis=1, keepdims=True), NORM_FLOOR)
        points = np.concatenate([*classes, means])
        # The exact method, unlike the approximate one, has no threads that wait for each other.
        embedding = TSNE(
            init="pca",
            method="exact",
            perplexity=min(30.0, (len(points) - 1) / 3),
            random_state=0,
        ).fit_transform(points)
        plane = np.asarray(embedding, np.float64)
        result[name] = {
            "classes": plane[: -len(tasks)].tolist(),
            "tasks": plane[-len(tasks) :].tolist(),
        }
    return result


def logit_standardisation(features: FeatureSet) -> dict[str, Any]:
    """Compares raw logits with logits standardised by each head's own moments (Table LS).

    Returns:
        `raw` and `standardised`, accuracies in percent, and `change` in percentage points.

    Raises:
        InputError: no test labels.
    """
    if features.test_labels is None:
        raise InputError("test_labels: absent, so accuracies are not known")
    accuracies = []
    for method in (comparators.Raw(), comparators.LogitStandardisation()):
        for task in features.tasks:
            method.fit_task(task.adapted, task.labels, task.head, None, task.classes)
        if features.final_heads is not None:
            method.replace_heads(features.final_heads)
        scores = method.score(features.test_adapted)
        accuracies.append(evaluation.accuracy(features.test_labels, scores.label))
    raw, standardised = accuracies
    return {"raw": raw, "standardised": standardised, "change": standardised - raw}
