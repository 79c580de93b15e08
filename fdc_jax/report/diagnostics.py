"""The paper's diagnostics of routing errors, measured on saved features.

Views are `adapted` and, if the file has it, `pretrained`; tasks are numbered from 0. The calibrator
is FDC, fitted on the same features, whose test labels are known.
"""

from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float
from scipy import stats

from fdc_jax import evaluation
from fdc_jax.calibration import FDC, inputs
from fdc_jax.features.feature_files import FeatureSet
from fdc_jax.heads import NORM_FLOOR, unit

# Points at which densities are evaluated, and the shares of values that their range spans.
_GRID_POINTS = 256
_GRID_RANGE = (0.002, 0.998)
# Smallest number of pairs of tasks for a rank correlation.
_LEAST_PAIRS = 4


def similarity(features: FeatureSet, calibrator: FDC) -> pd.DataFrame:
    """Measures feature similarity and routing errors of ordered pairs of tasks.

    The paper (Fig. motivation-confusability) calls an input similar to another task if it fits that
    task's features as well as those of its own task, and gives no formula. Our reading of the
    similarity of a true task s to another task t is the mean, over the training images of s by the
    encoder E_s, of the fit to t minus the fit to s. The fit is -u of Eq. residual or q of Eq. par,
    in standard deviations of the task that it is measured against. Larger is more alike.

    Returns:
        A row per ordered pair (s, t), if s has test images: `error`, the percentage of the test
        images of s whose largest raw logit is one of t, and the similarities `adapted_residual`,
        `adapted_affinity`, `pretrained_residual` and `pretrained_affinity`.
    """
    count, true_tasks = len(features.tasks), features.test_tasks
    terms = calibrator.terms(features.test_adapted, features.test_pretrained)
    routed = terms.fuse(tsf=False, rlc=False, pac=False).task
    confusion = evaluation.task_confusion(true_tasks, routed, count)
    images = confusion.sum(axis=1, keepdims=True)
    matrices = {"error": 100.0 * confusion / np.maximum(images, 1)}
    by_view: list[list[Any]] = [[] for _ in calibrator.widths]
    for task in features.tasks:
        terms = calibrator.terms(task.adapted, task.pretrained)
        for index, means in enumerate(by_view):
            means.append([of.mean(axis=0, dtype=float) for of in terms.standardised(index)])
    for view, means in zip(inputs.VIEWS, by_view, strict=False):
        u, q = np.array(means).transpose(1, 0, 2)  # by task of the images, by head
        for kind, fits in (("residual", -u), ("affinity", q)):
            matrices[f"{view}_{kind}"] = fits - np.diag(fits)[:, None]
    pairs = np.nonzero(~np.eye(count, dtype=bool) & (images > 0))
    index = pd.MultiIndex.from_arrays(pairs, names=["true task", "other task"])
    return pd.DataFrame({name: matrix[pairs] for name, matrix in matrices.items()}, index)


def correlations(similarities: pd.DataFrame) -> pd.Series:
    """Returns Spearman's rank correlations of `similarity` with the error, by similarity.

    Empty if there are fewer than four pairs of tasks, such as for two tasks.
    """
    ranks: Any = similarities.corr(method="spearman")["error"].drop("error")
    return ranks if len(similarities) >= _LEAST_PAIRS else ranks[:0]


def residual_contributions(features: FeatureSet, calibrator: FDC) -> pd.DataFrame:
    """Measures the part of a head's largest logit that is outside the subspace of its task.

    A(x) = w^T (I - Pi) h / sigma (Eq. motivation-residual-contribution), where h = E_T(x), w is the
    row of the class that the head predicts before calibration, and sigma is the standard deviation
    of its largest raw logit on its training images. If heads divide h by its norm, so does A.

    Returns:
        A row per head with means over the test images of its `own` task and of all others,
        `foreign`, in units of sigma; NaN without such images.
    """
    true_tasks, test = features.test_tasks, np.asarray(features.test_adapted, np.float32)
    norm = np.maximum(np.linalg.norm(test, axis=1), NORM_FLOOR)
    rows = []
    for t, (task, head) in enumerate(zip(calibrator.tasks, calibrator.heads, strict=True)):
        basis = task.views[0].basis
        weights = np.asarray(head.affine.rows)[np.asarray(head.logits(test)).argmax(axis=1)]
        outside = test - (test @ basis.T) @ basis
        values = (outside * weights).sum(axis=1, dtype=np.float64) / task.raw_scale
        values = pd.Series(values / norm if head.affine.normalised else values)
        rows.append([values[true_tasks == t].mean(), values[true_tasks != t].mean()])
    return pd.DataFrame(rows, columns=["own", "foreign"])


def residual_distributions(
    features: FeatureSet, calibrator: FDC
) -> dict[str, dict[str, pd.DataFrame]]:
    """Estimates densities of the residual ratios of test images by the first and the last head.

    Residual ratios (Eq. residual) are standardised by the head's training statistics (paper, Fig.
    routing-srlr). Densities are Gaussian kernel estimates with Scott's bandwidth; a task whose
    images do not vary has none.

    Returns:
        By view, by `first` and `last`: a row per standardised residual, a column per true task.
    """
    terms = calibrator.terms(features.test_adapted, features.test_pretrained)
    distributions = {}
    for index, view in enumerate(inputs.VIEWS[: len(terms.tasks)]):
        residuals, *_ = terms.standardised(index)
        first = _densities(residuals[:, 0], features.test_tasks)
        last = _densities(residuals[:, -1], features.test_tasks)
        distributions[view] = {"first": first, "last": last}
    return distributions


def _densities(residual: Float[np.ndarray, " n"], true_tasks: np.ndarray) -> pd.DataFrame:
    low, high = np.quantile(residual, _GRID_RANGE)
    margin = 0.1 * max(high - low, 1e-6)
    grid = np.linspace(low - margin, high + margin, _GRID_POINTS)
    densities = {}
    for task in np.unique(true_tasks):
        values = residual[true_tasks == task].astype(np.float64)
        if len(values) > 1 and np.ptp(values) > 1e-9 * max(1.0, np.abs(values).max()):
            densities[int(task)] = stats.gaussian_kde(values)(grid)
    return pd.DataFrame(densities, pd.Index(grid, name="residual"))


def prototype_geometry(features: FeatureSet, calibrator: FDC) -> dict[str, pd.DataFrame]:
    """Embeds class and task prototypes in the plane by t-SNE (paper, Fig. routing-par).

    Class prototypes are those of PAC (Eq. proto); the prototype of a task is the unit mean of the
    prototypes of its classes. The perplexity is 30, or less if there are few points.

    Returns:
        By view, a row per prototype: `x` and `y` without unit, `task`, and `label` of the class, -1
        for the prototype of a task.
    """
    from sklearn.manifold import TSNE

    present = [count > 0 for count in calibrator.counts]
    labels = [ids[keep] for ids, keep in zip(calibrator.classes, present, strict=True)]
    tasks = np.arange(len(labels))
    layout = {
        "task": np.concatenate([np.repeat(tasks, [*map(len, labels)]), tasks]),
        "label": np.concatenate([*labels, np.full(len(labels), -1)]),
    }
    geometry = {}
    for index, view in enumerate(inputs.VIEWS[: len(calibrator.widths)]):
        classes = [
            task.views[index].prototypes[keep].astype(np.float64)
            for task, keep in zip(calibrator.tasks, present, strict=True)
        ]
        points = np.concatenate([*classes, unit(np.stack([rows.mean(axis=0) for rows in classes]))])
        # The approximate method has threads that wait for each other.
        perplexity = min(30.0, (len(points) - 1) / 3)
        embedding = TSNE(init="pca", method="exact", perplexity=perplexity, random_state=0)
        x, y = embedding.fit_transform(points).T
        geometry[view] = pd.DataFrame({"x": x, "y": y} | layout)
    return geometry
