"""Why images go to the wrong task: the paper's diagnostics, measured on saved features.

Images are the test images unless a docstring says otherwise, views are `adapted` and, where the
file has it, `pretrained`, and tasks are numbered from 0. The calibrator is the paper's FDC, fitted
on the same features.
"""

from typing import Any

import numpy as np
from jaxtyping import Float
from scipy import stats

from fdc_jax import evaluation
from fdc_jax.calibration import FDC, batching, fdc, inputs
from fdc_jax.errors import InputError
from fdc_jax.features.feature_files import FeatureSet
from fdc_jax.heads import NORM_FLOOR, unit

# Features that are measured at once.
_ROWS = 1024
# Points at which densities are evaluated, and the shares of values that their range spans.
_GRID_POINTS = 256
_GRID_RANGE = (0.002, 0.998)


def measured(
    calibrator: FDC, view: int, *views: Float[np.ndarray, "n d"] | None
) -> tuple[Float[np.ndarray, "n tasks"], Float[np.ndarray, "n tasks"]]:
    """Returns u of Eq. residual and q of Eq. par of features against every task in one view."""
    features = views[view]
    assert features is not None  # The tasks were fitted with this view.
    arrays, settings = calibrator.arrays, calibrator.settings
    starts = range(0, len(features), _ROWS)
    parts = [np.asarray(features[start : start + _ROWS], np.float32) for start in starts]
    found = [
        calibrator.run(
            fdc.measure,
            arrays.views[view],
            None,
            part,
            arrays.attenuation,
            normalised=False,
            neighbours=settings.neighbours,
        )
        for part in parts
    ]
    ratio, distance = batching.fetch(found, [len(part) for part in parts])
    kept = [task.views[view] for task in calibrator.tasks]
    ratio, distance = (each[:, : len(kept)].astype(np.float64) for each in (ratio, distance))
    residual = ratio - [each.residual_mean for each in kept]
    gain = np.array([each.distance_mean for each in kept]) - distance
    stds = ([each.residual_std for each in kept], [each.distance_std for each in kept])
    return residual / stds[0], gain / stds[1]


def similarity(features: FeatureSet, calibrator: FDC) -> dict[str, Any]:
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
    count, true_tasks = len(features.tasks), features.test_tasks
    if count < 2:
        raise InputError("similarity: expected at least two tasks, found one")
    routed = calibrator.raw(features.test_adapted, features.test_pretrained).task
    confusion = evaluation.task_confusion(true_tasks, routed, count)
    # Tasks without a test image have no routing error.
    images = confusion.sum(axis=1, keepdims=True)
    first, second = np.nonzero(~np.eye(count, dtype=bool) & (images > 0))
    error = (100.0 * confusion / np.maximum(images, 1))[first, second]
    result: dict[str, Any] = {
        "true_task": first.tolist(),
        "other_task": second.tolist(),
        "routing_error_percent": error.tolist(),
        "spearman": {},
    }
    for view, name in enumerate(inputs.VIEWS[: calibrator.num_views]):
        fits = []
        for task in features.tasks:
            residual, affinity = measured(calibrator, view, task.adapted, task.pretrained)
            fits.append((-residual.mean(axis=0), affinity.mean(axis=0)))
        pairs = {
            kind: (fit - np.diag(fit)[:, None])[first, second]
            for kind, fit in zip(("residual", "affinity"), np.stack(fits, axis=1), strict=True)
        }
        result[name] = {kind: values.tolist() for kind, values in pairs.items()}
        result["spearman"][name] = {
            kind: _spearman(values, error) for kind, values in pairs.items()
        }
    return result


def _spearman(values: np.ndarray, error: np.ndarray) -> dict[str, float | None]:
    if len(values) < 3 or np.ptp(values) == 0 or np.ptp(error) == 0:
        return {"correlation": None, "p_value": None}
    found: Any = stats.spearmanr(values, error)
    return {"correlation": float(found.statistic), "p_value": float(found.pvalue)}


def residual_contributions(features: FeatureSet, calibrator: FDC) -> dict[str, Any]:
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
    true_tasks, test = features.test_tasks, np.asarray(features.test_adapted, np.float32)
    norm = np.maximum(np.linalg.norm(test, axis=1), NORM_FLOOR)
    own, foreign = [], []
    for t, (task, head) in enumerate(zip(calibrator.tasks, calibrator.heads, strict=True)):
        inside = fdc.filter_features(test, task.views[0].basis, np.float32(1.0))
        weights = np.asarray(head.affine.rows)[np.asarray(head.logits(test)).argmax(axis=1)]
        values = ((test - inside) * weights).sum(axis=1, dtype=np.float64) / task.raw_scale
        values = values / norm if head.affine.normalised else values
        for found, mine in ((own, true_tasks == t), (foreign, true_tasks != t)):
            found.append(float(values[mine].mean()) if mine.any() else None)
    return {"own": own, "foreign": foreign}


def residual_distributions(features: FeatureSet, calibrator: FDC) -> dict[str, Any]:
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
    true_tasks, result = features.test_tasks, {}
    for view, name in enumerate(inputs.VIEWS[: calibrator.num_views]):
        residual, _ = measured(calibrator, view, features.test_adapted, features.test_pretrained)
        result[name] = {
            place: {"task": task} | _densities(residual[:, task], true_tasks, task)
            for place, task in (("first", 0), ("last", len(features.tasks) - 1))
        }
    return result


def _densities(
    residual: Float[np.ndarray, " n"], true_tasks: np.ndarray, own: int
) -> dict[str, Any]:
    low, high = np.quantile(residual, _GRID_RANGE)
    margin = 0.1 * max(high - low, fdc.SCALE_FLOOR)
    grid, densities = np.linspace(low - margin, high + margin, _GRID_POINTS), {}
    for task in np.unique(true_tasks):
        of = residual[true_tasks == task]
        if len(of) > 1 and np.ptp(of) > 1e-9 * max(1.0, np.abs(of).max()):
            densities[int(task)] = stats.gaussian_kde(of)(grid).tolist()
    mine = densities.pop(own, None)
    return {
        "grid": grid.tolist(),
        "own": mine,
        "foreign": {str(task): density for task, density in densities.items()},
        "foreign_mean": np.mean(list(densities.values()), axis=0).tolist() if densities else None,
    }


def prototype_geometry(features: FeatureSet, calibrator: FDC) -> dict[str, Any]:
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

    present = [task.views[0].class_counts > 0 for task in calibrator.tasks]
    labels = [task.classes[keep] for task, keep in zip(calibrator.tasks, present, strict=True)]
    result: dict[str, Any] = {
        "class_labels": np.concatenate(labels).tolist(),
        "class_tasks": np.repeat(np.arange(len(labels)), list(map(len, labels))).tolist(),
    }
    for view, name in enumerate(inputs.VIEWS[: calibrator.num_views]):
        classes = [
            task.views[view].prototypes[keep].astype(np.float64)
            for task, keep in zip(calibrator.tasks, present, strict=True)
        ]
        points = np.concatenate([*classes, unit(np.stack([rows.mean(axis=0) for rows in classes]))])
        # The exact method, unlike the approximate one, has no threads that wait for each other.
        perplexity = min(30.0, (len(points) - 1) / 3)
        embedding = TSNE(init="pca", method="exact", perplexity=perplexity, random_state=0)
        plane, count = np.asarray(embedding.fit_transform(points), np.float64), len(labels)
        result[name] = {"classes": plane[:-count].tolist(), "tasks": plane[-count:].tolist()}
    return result
