"""Comparators that score classes or residuals, against scikit-learn and float64 NumPy."""

import numpy as np
import pytest
import scipy.linalg
import scipy.spatial.distance
import scipy.special

from fdc_jax import calibration
from fdc_jax.calibration.comparators import distances, logits, random_features
from fdc_jax.errors import InputError
from tests.calibration.gaussian_reference import unit, within
from tests.calibration.streams import fit, known, probe_inputs, stream

covariance = pytest.importorskip("sklearn.covariance")
linear_model = pytest.importorskip("sklearn.linear_model")


TASKS = known(0, 2)
PROBES = dict(zip(("adapted", "pretrained"), probe_inputs(TASKS), strict=True))
NUM_CLASSES = sum(len(task.classes) for task in TASKS)


def stacked(name, tasks=TASKS):
    """Returns all training features, and their labels; classes are in ascending order."""
    features = np.concatenate([getattr(task, name) for task in tasks]).astype(np.float64)
    return features, np.concatenate([task.labels for task in tasks])


def check(comparator, class_scores, rtol=2e-5, tasks=TASKS):
    """Asserts the best score and row of each task, and labels, from class scores."""
    scores = fit(comparator, tasks).score(**PROBES)
    ends = np.cumsum([len(task.classes) for task in tasks])[:-1]
    for t, part in enumerate(np.split(class_scores, ends, axis=1)):
        np.testing.assert_allclose(scores.task_scores[:, t], part.max(axis=1), rtol, rtol)
        np.testing.assert_array_equal(scores.local_class[:, t], part.argmax(axis=1))
    np.testing.assert_array_equal(scores.label, class_scores.argmax(axis=1))


def test_cosine_nearest_mean_uses_means_of_raw_features():
    _, means = within(*stacked("adapted"))
    cosine = 1.0 - scipy.spatial.distance.cdist(PROBES["adapted"], means, "cosine")
    check(distances.NearestClassMean(), cosine)


@pytest.mark.parametrize(
    "tasks", [TASKS, stream(2, 2, classes=(3, 4), samples=(3, 5))], ids=["many", "n < d"]
)
def test_mahalanobis_uses_sklearns_shrunk_covariance(tasks):
    deviations, means = within(*stacked("pretrained", tasks))
    reference = covariance.ShrunkCovariance(assume_centered=True, shrinkage=1e-3)
    precision = reference.fit(deviations).precision_
    metric = scipy.spatial.distance.cdist(PROBES["pretrained"], means, "mahalanobis", VI=precision)
    check(distances.Mahalanobis("pretrained"), -(metric**2), rtol=1e-3, tasks=tasks)


def test_fecam_equals_float64():
    scores, test = [], unit(PROBES["adapted"])
    for task in TASKS:
        features = unit(task.adapted)
        for c in task.classes:
            members = features[task.labels == c]
            spread, difference = np.cov(members.T), test - members.mean(axis=0)
            spread = spread + np.eye(len(spread)) * np.diag(spread).mean()
            deviation = np.sqrt(np.diag(spread))
            inverse = np.linalg.pinv(spread / np.outer(deviation, deviation))
            scores.append(-np.einsum("nd,de,ne->n", difference, inverse, difference))
    check(distances.FeCAM(), np.stack(scores, axis=1), rtol=1e-4)


def test_vim_equals_float64():
    task_scores, test = [], PROBES["adapted"].astype(np.float64)
    for task in TASKS:
        weight, bias = (np.asarray(part, np.float64) for part in task.head)
        features = task.adapted.astype(np.float64)
        origin = -np.linalg.pinv(weight) @ bias
        moment = covariance.EmpiricalCovariance(assume_centered=True).fit(features - origin)
        values, vectors = np.linalg.eig(moment.covariance_)
        kept = vectors[:, np.argsort(-values)[8:]]
        residual = np.linalg.norm((features - origin) @ kept, axis=1)
        alpha = (features @ weight.T + bias).max(axis=1).mean() / residual.mean()
        energy = scipy.special.logsumexp(test @ weight.T + bias, axis=1)
        task_scores.append(energy - alpha * np.linalg.norm((test - origin) @ kept, axis=1))
    comparator = fit(logits.VirtualLogitMatching(), TASKS)
    actual = comparator.score(PROBES["adapted"]).task_scores
    np.testing.assert_allclose(actual, np.stack(task_scores, axis=1), rtol=1e-4)
    assert comparator.storage_bytes == 4 * 2 * (16 * 8 + 16 + 1)


@pytest.mark.parametrize("rows", [60, 12])
def test_the_chosen_ridge_is_sklearns_best(rows):
    rng, split = np.random.default_rng(rows), int(0.8 * rows)
    expanded = np.maximum(rng.normal(size=(rows, 20)), 0).astype(np.float32)
    truth = expanded @ rng.normal(size=(20, 3))
    onehot = np.eye(3, dtype=np.float32)[(truth + 3 * rng.normal(size=(rows, 3))).argmax(axis=1)]

    def loss(ridge):
        model = linear_model.Ridge(ridge, fit_intercept=False, solver="svd")
        model.fit(expanded[:split].astype(np.float64), onehot[:split])
        return np.mean((model.predict(expanded[split:]) - onehot[split:]) ** 2)

    best = random_features.chosen_ridge(expanded, onehot, 0.0)
    assert best == min(random_features.RIDGES, key=loss)
    assert 1e-8 < best < 1e8
    assert random_features.chosen_ridge(expanded[:1], onehot[:1], 7.0) == 7.0


@pytest.mark.parametrize("name", ["ranpac", "ridge"])
def test_ranpac_and_ridge_are_sklearns_ridge(name, monkeypatch):
    monkeypatch.setattr(random_features, "TILE", 8)  # of the Gram matrix, with a smaller one
    comparator = fit(calibration.make(name, projections=20, seed=3), TASKS)
    features, labels = stacked("adapted")
    matrix = np.random.default_rng(3).standard_normal((16, 20), np.float32).astype(np.float64)

    def expanded(rows):
        if name == "ridge":
            return np.column_stack([rows, np.ones(len(rows))])
        return np.maximum(rows @ matrix, 0)

    reference = linear_model.Ridge(comparator.ridge, fit_intercept=False)
    reference.fit(expanded(features), np.eye(NUM_CLASSES)[labels])
    expected = reference.predict(expanded(PROBES["adapted"]))
    np.testing.assert_allclose(comparator.class_scores(PROBES["adapted"]), expected, atol=2e-4)


def test_ranpac_with_fewer_samples_than_projections():
    """The validated lambda is then tiny, and rounding of G must not decide."""
    tasks = known(1, 3, width=64, classes=(2,), samples=(12,))
    comparator = fit(random_features.RanPAC(projections=600), tasks)
    assert comparator.ridge < 100
    features, labels = stacked("adapted", tasks)
    scores = comparator.score(features + np.random.default_rng(0).normal(size=features.shape))
    assert np.mean(scores.label == labels) > 0.8
    assert np.abs(scores.task_scores).max() < 3


def gelu(x):
    return 0.5 * x * (1 + scipy.special.erf(x / np.sqrt(2)))


def test_anacp_equals_float64():
    """A float64 rendering that shares the random matrices and pseudo-features."""
    size, ridge, count = 20, 100.0, 100
    features, labels = stacked("pretrained")
    features = unit(features)
    deviations, means = within(features, labels)
    spread = deviations.T @ deviations / len(features) + 1e-4 * np.eye(12)
    root = np.real(scipy.linalg.sqrtm(spread + 1e-8 * np.eye(12)))
    centre = means.mean(axis=0)
    whitened = (means - centre) @ np.linalg.inv(root)
    left, singular, right = np.linalg.svd(whitened, full_matrices=False)
    raised = singular + (np.arange(len(singular)) < len(means) - 1)
    targets = unit((left * raised) @ right @ root + centre)

    def solve(z, y):
        return np.linalg.solve(z.T @ z + ridge * np.eye(size), z.T @ y)

    draw = np.random.default_rng(5).standard_normal
    *inner, outer = (draw((12, size), np.float32).astype(np.float64) for _ in range(4))
    maps = [solve(gelu(features @ m), targets[labels]) for m in inner]

    def pulled(x):
        outputs = [unit(gelu(x @ m) @ theta) for m, theta in zip(inner, maps, strict=True)]
        return gelu(np.mean(outputs, axis=0) @ outer)

    random = np.random.default_rng([5, 1])
    lower = np.linalg.cholesky(spread)
    pseudo = np.concatenate([m + random.standard_normal((count, 12)) @ lower.T for m in means])
    theta = solve(pulled(pseudo), np.repeat(np.eye(len(means)), count, axis=0))
    reference = pulled(unit(PROBES["pretrained"])) @ theta
    check(random_features.AnaCP("pretrained", size, seed=5), reference, rtol=5e-4)


# Contract of all ----------------------------------------------------------------------------------

classifiers = pytest.mark.parametrize(
    "name", ["ncm", "mahalanobis", "fecam", "ranpac", "ridge", "anacp"]
)


@pytest.mark.parametrize("name", calibration.METHODS)
def test_tasks_of_few_images_are_scored(name):
    """A task of one class, a class of one image, a task of one image, n < d."""
    tasks = stream(5, 4, classes=(1, 2, 3, 1), samples=(8, 2, 3, 1))
    scores = fit(calibration.make(name, projections=20), tasks).score(**PROBES)
    assert np.isfinite(scores.task_scores).all()


@classifiers
def test_one_view_is_read(name):
    comparator = fit(calibration.make(f"{name}-pretrained", projections=20), TASKS)
    features, labels = stacked("pretrained")
    assert np.mean(comparator.score(None, features).label == labels) > 0.5
    with pytest.raises(InputError, match=r"^[a-z]+: pretrained features: expected"):
        comparator.score(PROBES["adapted"])


@classifiers
def test_a_class_without_images_is_never_predicted(name):
    task, adapted = TASKS[0], PROBES["adapted"]
    comparator = calibration.make(name, projections=20)
    comparator.fit_task(task.adapted, task.labels, None, classes=[2, 7, 1, 0])
    labels = comparator.score(adapted).label
    assert 7 not in {*labels, *comparator.score(-adapted).label}
    if name != "anacp":  # Its pseudo-features depend on the order of classes.
        without = fit(calibration.make(name, projections=20), [task]).score(adapted)
        np.testing.assert_array_equal(labels, without.label)
