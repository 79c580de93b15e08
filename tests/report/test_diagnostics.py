"""Diagnostics against plain float64 NumPy written from the paper's formulas."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from fdc_jax import calibration
from fdc_jax.report import diagnostics
from tests.calibration.reference import normalise
from tests.report.feature_sets import feature_set, reference_of


def found_in(diagnostic, features, **settings):
    """What a diagnostic finds with FDC fitted on the features."""
    return diagnostic(features, features.fit(calibration.FDC(**settings)))


def raw_logits(features, fitted):
    """Logits of every head on the test images."""
    test = features.test_adapted.astype(np.float64)
    return [fitted.logits(t, test, tsf=False) for t in range(len(features.tasks))]


def views_of(features):
    return [[task.adapted for task in features.tasks], [t.pretrained for t in features.tasks]]


def test_similarity_is_the_mean_fit_to_the_other_task():
    features = feature_set()
    fitted = reference_of(features, neighbours=2)
    found = found_in(diagnostics.similarity, features, neighbours=2)
    assert sorted(found.index) == [(s, t) for s in range(3) for t in range(3) if s != t]
    best = np.stack([logits.max(axis=1) for logits in raw_logits(features, fitted)])
    chosen = best.argmax(axis=0)
    for (s, t), row in found.iterrows():
        assert row["error"] == pytest.approx(100 * np.mean(chosen[features.test_tasks == s] == t))
        for view, name in enumerate(("adapted", "pretrained")):
            images = views_of(features)[view][s].astype(np.float64)
            tasks = fitted.views[view][0]
            # What an image gains by being measured against the other task.
            residual = np.mean(tasks[s].u(images) - tasks[t].u(images))
            q = [(tasks[i].affinity(images) - tasks[i].aff_mean) / tasks[i].aff_std for i in (s, t)]
            assert row[f"{name}_residual"] == pytest.approx(residual, rel=1e-4, abs=1e-4)
            assert row[f"{name}_affinity"] == pytest.approx(np.mean(q[1] - q[0]), 1e-4, 1e-4)


def test_similarity_leaves_out_tasks_without_test_images():
    features = feature_set(dual=False)
    keep = features.test_tasks != 1
    features = features._replace(
        test_adapted=features.test_adapted[keep], test_labels=features.test_labels[keep]
    )
    assert list(found_in(diagnostics.similarity, features).index) == [
        (0, 1),
        (0, 2),
        (2, 0),
        (2, 1),
    ]
    densities = found_in(diagnostics.residual_distributions, features)
    assert list(densities["adapted"]["first"]) == [0, 2]


@pytest.mark.parametrize(
    ("kind", "final"), [("linear", False), ("cosine", False), ("linear", True)]
)
def test_contributions_are_the_papers_formula(kind, final):
    """Of the final heads, in the scale of the first ones."""
    features = feature_set(kind, final=final)
    fitted = reference_of(features, kind)
    found = found_in(diagnostics.residual_contributions, features)
    test = features.test_adapted.astype(np.float64)
    last = reference_of(features, kind, final=final)
    for t, logits in enumerate(raw_logits(features, last)):
        head = last.heads[t]
        rows = head.scale * normalise(head.weight) if kind == "cosine" else head.weight
        w = rows[logits.argmax(axis=1)]
        basis = fitted.views[0][0][t].basis
        outside = test - test @ basis @ basis.T
        if kind != "linear":
            outside = outside / np.linalg.norm(test, axis=1, keepdims=True)
        contribution = (w * outside).sum(axis=1) / fitted.sigma[False][t]
        own = features.test_tasks == t
        assert found["own"][t] == pytest.approx(contribution[own].mean(), rel=1e-4, abs=1e-5)
        assert found["foreign"][t] == pytest.approx(contribution[~own].mean(), rel=1e-4, abs=1e-5)


def test_distributions_are_kernel_estimates_of_standardised_residuals():
    features = feature_set()
    fitted = reference_of(features)
    found = found_in(diagnostics.residual_distributions, features)
    for view, name in enumerate(("adapted", "pretrained")):
        test = (features.test_adapted, features.test_pretrained)[view].astype(np.float64)
        for head, task in (("first", 0), ("last", 2)):
            densities = found[name][head]
            u = fitted.views[view][0][task].u(test)
            for true, column in densities.items():
                expected = stats.gaussian_kde(u[features.test_tasks == true])(densities.index)
                np.testing.assert_allclose(column, expected, rtol=1e-3, atol=1e-5)
            assert list(densities) == [0, 1, 2]
            assert densities.index[0] < np.quantile(u, 0.01)
            assert densities.index[-1] > np.quantile(u, 0.99)


def test_class_and_task_prototypes_are_embedded_together(monkeypatch):
    features = feature_set()
    embedded = []

    import sklearn.manifold

    class Recorded(sklearn.manifold.TSNE):
        def fit_transform(self, points, y=None):
            embedded.append(points)
            return super().fit_transform(points, y)

    monkeypatch.setattr(sklearn.manifold, "TSNE", Recorded)
    found = found_in(diagnostics.prototype_geometry, features)
    labels = [label for task in features.tasks for label in task.classes.tolist()]
    tasks = [i for i, task in enumerate(features.tasks) for _ in task.classes]
    fitted = reference_of(features)
    for view, name in enumerate(("adapted", "pretrained")):
        classes = [task.prototypes for task in fitted.views[view][0]]
        means = normalise(np.stack([rows.mean(axis=0) for rows in classes]))
        np.testing.assert_allclose(embedded[view], np.concatenate([*classes, means]), atol=1e-5)
        assert found[name]["label"].tolist() == [*labels, -1, -1, -1]
        assert found[name]["task"].tolist() == [*tasks, 0, 1, 2]
        assert np.isfinite(found[name][["x", "y"]]).all(axis=None)


def test_densities_of_more_than_a_hundred_tasks_are_laid_out_at_once():
    # A column at a time would make pandas warn from the 101st on, and warnings are errors here.
    tasks, u = np.repeat(np.arange(120), 3), np.random.default_rng(0).normal(size=360)
    assert list(diagnostics._densities(u, tasks)) == list(range(120))


def test_fewer_than_four_pairs_of_tasks_have_no_correlation():
    pairs = pd.DataFrame({"error": [1.0, 3.0, 2.0, 4.0], "adapted_residual": [1.0, 2.0, 3.0, 4.0]})
    assert diagnostics.correlations(pairs)["adapted_residual"] == pytest.approx(0.8)
    assert diagnostics.correlations(pairs[:3]).empty
