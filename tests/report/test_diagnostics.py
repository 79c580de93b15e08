"""Diagnostics against plain float64 NumPy written from the paper's formulas."""

import numpy as np
import pytest
from scipy import stats

from fdc_jax import calibration
from fdc_jax.errors import InputError
from fdc_jax.report import diagnostics
from tests.calibration.reference import normalise
from tests.report.feature_sets import feature_set, reference_of


def found_in(diagnostic, features, **settings):
    """What a diagnostic finds with FDC fitted on the features."""
    return diagnostic(features, features.fit(calibration.FDC(**settings).to_numpy()))


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
    pairs = list(zip(found["true_task"], found["other_task"], strict=True))
    assert sorted(pairs) == [(s, t) for s in range(3) for t in range(3) if s != t]
    best = np.stack([logits.max(axis=1) for logits in raw_logits(features, fitted)])
    chosen = best.argmax(axis=0)
    for place, (s, t) in enumerate(pairs):
        mine = features.test_tasks == s
        error = 100 * np.mean(chosen[mine] == t)
        assert found["routing_error_percent"][place] == pytest.approx(error)
        for view, name in enumerate(("adapted", "pretrained")):
            images = views_of(features)[view][s].astype(np.float64)
            tasks = fitted.views[view][0]
            # What an image gains by being measured against the other task.
            residual = np.mean(tasks[s].u(images) - tasks[t].u(images))
            q = [(tasks[i].affinity(images) - tasks[i].aff_mean) / tasks[i].aff_std for i in (s, t)]
            assert found[name]["residual"][place] == pytest.approx(residual, rel=1e-4, abs=1e-4)
            assert found[name]["affinity"][place] == pytest.approx(
                np.mean(q[1] - q[0]), rel=1e-4, abs=1e-4
            )
    for name in ("adapted", "pretrained"):
        for kind in ("residual", "affinity"):
            expected = stats.spearmanr(found[name][kind], found["routing_error_percent"])
            assert found["spearman"][name][kind] == pytest.approx(
                {"correlation": expected.statistic, "p_value": expected.pvalue}
            )


def test_similarity_leaves_out_tasks_without_test_images():
    features = feature_set(dual=False)
    keep = features.test_tasks != 1
    features = features._replace(
        test_adapted=features.test_adapted[keep], test_labels=features.test_labels[keep]
    )
    found = found_in(diagnostics.similarity, features)
    assert found["true_task"] == [0, 0, 2, 2]
    assert found["other_task"] == [1, 2, 0, 1]
    assert "pretrained" not in found


def test_similarity_without_variation_has_no_correlation():
    found = found_in(diagnostics.similarity, feature_set(tasks=2, dual=False))
    assert found["spearman"]["adapted"]["residual"] == {"correlation": None, "p_value": None}
    with pytest.raises(InputError, match="expected at least two tasks"):
        found_in(diagnostics.similarity, feature_set(tasks=1))


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
        for place, head in (("first", 0), ("last", 2)):
            each = found[name][place]
            assert each["task"] == head
            u = fitted.views[view][0][head].u(test)
            of_tasks = [
                stats.gaussian_kde(u[features.test_tasks == t])(each["grid"]) for t in range(3)
            ]
            np.testing.assert_allclose(each["own"], of_tasks[head], rtol=1e-3, atol=1e-5)
            others = [t for t in range(3) if t != head]
            assert sorted(each["foreign"]) == [str(t) for t in others]
            for t in others:
                np.testing.assert_allclose(
                    each["foreign"][str(t)], of_tasks[t], rtol=1e-3, atol=1e-5
                )
            # Tasks weigh the same, however many images they have.
            np.testing.assert_allclose(
                each["foreign_mean"],
                np.mean([of_tasks[t] for t in others], axis=0),
                rtol=1e-3,
                atol=1e-5,
            )
            assert each["grid"][0] < np.quantile(u, 0.01)
            assert each["grid"][-1] > np.quantile(u, 0.99)


def test_tasks_without_varying_images_have_no_density():
    features = feature_set(dual=False)
    # One image of task 0, and one of task 1 many times.
    first, second = (np.flatnonzero(features.test_tasks == t)[0] for t in (0, 1))
    last = np.flatnonzero(features.test_tasks == 2)
    pick = np.concatenate([[first], [second] * 5, last])
    features = features._replace(
        test_adapted=features.test_adapted[pick], test_labels=features.test_labels[pick]
    )
    found = found_in(diagnostics.residual_distributions, features)["adapted"]
    assert found["first"]["own"] is None
    assert list(found["first"]["foreign"]) == ["2"]
    assert found["last"]["foreign"] == {}
    assert found["last"]["foreign_mean"] is None
    assert found["last"]["own"] is not None


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
    assert found["class_labels"] == [label for t in features.tasks for label in t.classes.tolist()]
    assert found["class_tasks"] == [i for i, t in enumerate(features.tasks) for _ in t.classes]
    fitted = reference_of(features)
    for view, name in enumerate(("adapted", "pretrained")):
        classes = [task.prototypes for task in fitted.views[view][0]]
        means = normalise(np.stack([rows.mean(axis=0) for rows in classes]))
        np.testing.assert_allclose(embedded[view], np.concatenate([*classes, means]), atol=1e-5)
        assert np.shape(found[name]["classes"]) == (len(found["class_tasks"]), 2)
        assert np.shape(found[name]["tasks"]) == (3, 2)
