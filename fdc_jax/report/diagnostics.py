"""Why images go to the wrong task: the paper's diagnostics, measured on saved features.

Images are the test images unless a docstring says otherwise, views are `adapted` and, where the
file has it, `pretrained`, and tasks are numbered from 0. The calibrator is the paper's FDC, fitted
on the same features, whose test labels are known.
"""

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


def similarity(features: FeatureSet, calibrator: FDC) -> pd.DataFrame:
    """Compares how alike two tasks look to FDC with how often one is routed to the other.

    The paper (Fig. motivation-confusability) describes similarity as how well an input fits another
    task's feature distribution compared with how well it fits its own, and gives no formula. Our
    reading, for an ordered pair of a true task s and another task t: the mean over the training
    images of s, by the encoder of their time, of the fit to t minus the fit to s. The fit is -u of
    Eq. residual for subspace residuals and q of Eq. par for prototype affinities, each in standard
    deviations of the task it is measured against. Larger is more alike.

    Returns:
        A row per ordered pair (s, t) of tasks, those of a task without test images left out:
        `error`, the percentage of the test images of s whose largest raw logit is one of t; and
        similarities `adapted_residual`, `adapted_affinity` and those of `pretrained`.
    """
    count, true_tasks = len(features.tasks), features.test_tasks
    terms = calibrator.terms(features.test_adapted, features.test_pretrained)
    routed = terms.fuse(tsf=False, rlc=False, pac=False).task
    confusion = evaluation.task_confusion(true_tasks, routed, count)
    images = confusion.sum(axis=1, keepdims=True)
    matrices = {"error": 100.0 * confusion / np.maximum(images, 1)}
    of_tasks = [calibrator.terms(task.adapted, task.pretrained) for task in features.tasks]
    for index, view in enumerate(inputs.VIEWS[: len(calibrator.widths)]):
        means = [
            [values.mean(axis=0, dtype=float) for values in of.standardised(index)]
            for of in of_tasks
        ]
        u, q = np.array(means).transpose(1, 0, 2)  # of the images of each task, by head
        for kind, fits in (("residual", -u), ("affinity", q)):
            matrices[f"{view}_{kind}"] = fits - np.diag(fits)[:, None]
    first, second = np.nonzero(~np.eye(count, dtype=bool) & (images > 0))
    pairs = pd.MultiIndex.from_arrays([first, second], names=["true task", "other task"])
    return pd.DataFrame({name: of[first, second] for name, of in matrices.items()}, index=pairs)


def residual_contributions(features: FeatureSet, calibrator: FDC) -> pd.DataFrame:
    """Measures what features outside a head's subspace add to the logit that it would predict.

    A(x) = w^T (I - Pi) h / sigma (Eq. motivation-residual-contribution) with h = E_T(x), w the row
    of the class that the head predicts before calibration and sigma its own-training standard
    deviation of the largest raw logit. For heads that divide their input by its norm, h is divided
    by it, after the projection.

    Returns:
        A row per head, means over the test images of its own task and over those of all others:
        `own` and `foreign` in units of its sigma, NaN without such images.
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
    """Estimates how residual ratios are distributed as the first and the last task see them.

    Residual ratios of test images (Eq. residual) are standardised by the head's own training
    statistics (paper, Fig. routing-srlr). Densities are Gaussian kernel estimates with Scott's
    bandwidth, one per true task; a task whose images do not vary has none.

    Returns:
        For each view, by the head, `first` and `last`: a row per standardised residual, and the
        densities, a column per true task.
    """
    terms = calibrator.terms(features.test_adapted, features.test_pretrained)
    return {
        view: {
            head: _densities(terms.standardised(index)[0][:, task], features.test_tasks)
            for head, task in (("first", 0), ("last", -1))
        }
        for index, view in enumerate(inputs.VIEWS[: len(terms.tasks)])
    }


def _densities(residual: Float[np.ndarray, " n"], true_tasks: np.ndarray) -> pd.DataFrame:
    low, high = np.quantile(residual, _GRID_RANGE)
    margin = 0.1 * max(high - low, 1e-6)
    grid = np.linspace(low - margin, high + margin, _GRID_POINTS)
    densities = {}
    for task in np.unique(true_tasks):
        of = residual[true_tasks == task].astype(np.float64)
        if len(of) > 1 and np.ptp(of) > 1e-9 * max(1.0, np.abs(of).max()):
            densities[int(task)] = stats.gaussian_kde(of)(grid)
    return pd.DataFrame(densities, pd.Index(grid, name="residual"))


def prototype_geometry(features: FeatureSet, calibrator: FDC) -> dict[str, pd.DataFrame]:
    """Lays out class and task prototypes in the plane (paper, Fig. routing-par).

    Class prototypes are those of PAC (Eq. proto); a task's prototype is the unit mean of its
    classes'. Both are embedded together by t-SNE in each view, with perplexity 30 or what the
    number of points allows. On unit vectors its Euclidean distances order pairs as cosines do.

    Returns:
        For each view a row per prototype: `x` and `y` without unit, `task`, and `label` of the
        class, -1 for a task's prototype.
    """
    from sklearn.manifold import TSNE

    present = [count > 0 for count in calibrator.counts]
    labels = [own[keep] for own, keep in zip(calibrator.classes, present, strict=True)]
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
        # The exact method, unlike the approximate one, has no threads that wait for each other.
        perplexity = min(30.0, (len(points) - 1) / 3)
        embedding = TSNE(init="pca", method="exact", perplexity=perplexity, random_state=0)
        x, y = embedding.fit_transform(points).T
        geometry[view] = pd.DataFrame({"x": x, "y": y} | layout)
    return geometry
