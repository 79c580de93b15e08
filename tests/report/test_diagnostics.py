"""Diagnostics against plain float64 NumPy written from the paper's formulas."""

import numpy as np
import pandas as pd
import pytest
import sklearn.manifold
from scipy import stats

from fdc_jax import calibration
from fdc_jax.report import diagnostics
from tests.calibration.reference import normalise
from tests.report.feature_sets import feature_set, reference_of

VIEWS = ("adapted", "pretrained")


def measured(diagnostic, features, **settings):
    """A diagnostic of FDC fitted on the features."""
    return diagnostic(features, features.fit(calibration.FDC(**settings)))


def raw_logits(features, fitted):
    """Logits of every head on the test images."""
    test = features.test_adapted.astype(np.float64)
    return [fitted.logits(t, test, tsf=False) for t in range(len(features.tasks))]


def test_similarity_is_the_mean_fit_to_the_other_task():
    features = feature_set()
    fitted = reference_of(features, neighbours=2)
    similarity = measured(diagnostics.similarity, features, neighbours=2)
    assert sorted(similarity.index) == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    best = np.stack([logits.max(axis=1) for logits in raw_logits(features, fitted)])
    chosen = best.argmax(axis=0)
    for (s, t), row in similarity.iterrows():
        assert row["error"] == pytest.approx(100 * np.mean(chosen[features.test_tasks == s] == t))
        for (tasks, *_), name in zip(fitted.views, VIEWS, strict=True):
            images = getattr(features.tasks[s], name).astype(np.float64)
            # The gain of an image by being measured against the other task.
            residual = np.mean(tasks[s].u(images) - tasks[t].u(images))
            q = [(of.affinity(images) - of.aff_mean) / of.aff_std for of in (tasks[s], tasks[t])]
            assert row[f"{name}_residual"] == pytest.approx(residual, rel=1e-4, abs=1e-4)
            assert row[f"{name}_affinity"] == pytest.approx(np.mean(q[1] - q[0]), 1e-4, 1e-4)


def test_tasks_without_test_images_are_left_out():
    features = feature_set(dual=False)
    keep = features.test_tasks != 1
    features = features._replace(
        test_adapted=features.test_adapted[keep], test_labels=features.test_labels[keep]
    )
    similarity = measured(diagnostics.similarity, features)
    assert list(similarity.index) == [(0, 1), (0, 2), (2, 0), (2, 1)]
    densities = measured(diagnostics.residual_distributions, features)
    assert list(densities["adapted"]["first"]) == [0, 2]


@pytest.mark.parametrize(
    ("kind", "final"), [("linear", False), ("cosine", False), ("linear", True)]
)
def test_contributions_are_the_papers_formula(kind, final):
    """Of the final heads, in the scale of the first ones."""
    features = feature_set(kind, final=final)
    fitted = reference_of(features, kind)
    contributions = measured(diagnostics.residual_contributions, features)
    test = features.test_adapted.astype(np.float64)
    last = reference_of(features, kind, final=final)
    for t, (head, logits) in enumerate(zip(last.heads, raw_logits(features, last), strict=True)):
        basis = fitted.views[0][0][t].basis
        rows, outside = head.weight, test - test @ basis @ basis.T
        if kind == "cosine":
            rows = head.scale * normalise(head.weight)
            outside = normalise(test) - normalise(test) @ basis @ basis.T
        values = (rows[logits.argmax(axis=1)] * outside).sum(axis=1) / fitted.sigma[False][t]
        of_task = features.test_tasks == t
        expected = [values[of_task].mean(), values[~of_task].mean()]
        assert contributions.loc[t].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_densities_are_kernel_estimates_of_standard_residuals():
    features = feature_set()
    fitted = reference_of(features)
    distributions = measured(diagnostics.residual_distributions, features)
    for (tasks, *_), name in zip(fitted.views, VIEWS, strict=True):
        test = getattr(features, f"test_{name}").astype(np.float64)
        for head, task in (("first", tasks[0]), ("last", tasks[2])):
            densities, u = distributions[name][head], task.u(test)
            for true, column in densities.items():
                expected = stats.gaussian_kde(u[features.test_tasks == true])(densities.index)
                np.testing.assert_allclose(column, expected, rtol=1e-3, atol=1e-5)
            assert list(densities) == [0, 1, 2]
            assert densities.index[0] < np.quantile(u, 0.01)
            assert densities.index[-1] > np.quantile(u, 0.99)


def test_class_and_task_prototypes_are_embedded_together(monkeypatch):
    embedded = []

    class Recorded(sklearn.manifold.TSNE):
        def fit_transform(self, points, y=None):
            embedded.append(points)
            return super().fit_transform(points, y)

    monkeypatch.setattr(sklearn.manifold, "TSNE", Recorded)
    features = feature_set()
    geometry = measured(diagnostics.prototype_geometry, features)
    labels = np.concatenate([task.classes for task in features.tasks])
    tasks = np.repeat(range(3), [len(task.classes) for task in features.tasks])
    views = zip(reference_of(features).views, VIEWS, embedded, strict=True)
    for (fitted, *_), name, points in views:
        classes = [task.prototypes for task in fitted]
        means = normalise(np.stack([rows.mean(axis=0) for rows in classes]))
        np.testing.assert_allclose(points, np.concatenate([*classes, means]), atol=1e-5)
        assert geometry[name]["label"].tolist() == [*labels, -1, -1, -1]
        assert geometry[name]["task"].tolist() == [*tasks, 0, 1, 2]
        assert np.isfinite(geometry[name][["x", "y"]]).all(axis=None)


def test_fewer_than_four_pairs_of_tasks_have_no_correlation():
    pairs = pd.DataFrame({"error": [1.0, 3.0, 2.0, 4.0], "adapted_residual": [1.0, 2.0, 3.0, 4.0]})
    assert diagnostics.correlations(pairs)["adapted_residual"] == pytest.approx(0.8)
    assert diagnostics.correlations(pairs[:3]).empty
