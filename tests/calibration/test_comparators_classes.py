"""Comparators that score classes or residuals, against scikit-learn and float64 NumPy."""

import numpy as np
import pytest
import scipy.linalg
import scipy.spatial.distance
import scipy.special

from fdc_jax.calibration.comparators import distances, logits, random_features
from fdc_jax.errors import InputError
from tests.calibration.gaussian_reference import unit, within
from tests.calibration.streams import fit, problem

covariance = pytest.importorskip("sklearn.covariance")
linear_model = pytest.importorskip("sklearn.linear_model")
both_views = pytest.mark.parametrize("name", ["adapted", "pretrained"])


@pytest.fixture(scope="module")
def data():
    return problem()


def view(item, name):
    return getattr(item, name).astype(np.float64)


def stacked(data, name):
    """Returns all training features, and their labels; classes are in ascending order."""
    features = np.concatenate([view(task, name) for task in data.tasks])
    return features, np.concatenate([task.labels for task in data.tasks])


def check(data, comparator, class_scores, rtol=2e-5):
    """Asserts the best score and row of each task, and labels, from class scores."""
    scores = fit(comparator, data.tasks).score(data.adapted, data.pretrained)
    ends = np.cumsum([len(task.classes) for task in data.tasks])[:-1]
    for t, part in enumerate(np.split(class_scores, ends, axis=1)):
        np.testing.assert_allclose(scores.task_scores[:, t], part.max(axis=1), rtol, rtol)
        np.testing.assert_array_equal(scores.local_class[:, t], part.argmax(axis=1))
    names = np.concatenate([task.classes for task in data.tasks])
    np.testing.assert_array_equal(scores.label, names[class_scores.argmax(axis=1)])


@both_views
def test_cosine_nearest_mean_uses_means_of_raw_features(data, name):
    _, means = within(*stacked(data, name))
    cosine = 1.0 - scipy.spatial.distance.cdist(view(data, name), means, "cosine")
    check(data, distances.NearestClassMean(name), cosine)


@both_views
@pytest.mark.parametrize(
    "made", [problem, lambda: problem(((2, 1), (2, 2)), width=20)], ids=["many", "n < d"]
)
def test_mahalanobis_uses_sklearns_shrunk_covariance(made, name):
    data = made()
    deviations, means = within(*stacked(data, name))
    reference = covariance.ShrunkCovariance(assume_centered=True, shrinkage=1e-3)
    precision = reference.fit(deviations).precision_
    metric = scipy.spatial.distance.cdist(view(data, name), means, "mahalanobis", VI=precision)
    check(data, distances.Mahalanobis(name), -(metric**2), rtol=1e-3)


def test_fecam_equals_float64(data):
    scores, test = [], unit(data.adapted.astype(np.float64))
    for task in data.tasks:
        features = unit(task.adapted.astype(np.float64))
        for c in task.classes:
            members = features[task.labels == c]
            spread, difference = np.cov(members.T), test - members.mean(axis=0)
            spread = spread + np.eye(len(spread)) * np.diag(spread).mean()
            deviation = np.sqrt(np.diag(spread))
            inverse = np.linalg.pinv(spread / np.outer(deviation, deviation))
            scores.append(-np.einsum("nd,de,ne->n", difference, inverse, difference))
    check(data, distances.FeCAM(), np.stack(scores, axis=1), rtol=1e-4)


def test_vim_equals_float64(data):
    task_scores = []
    for task in data.tasks:
        features, weight, bias = (
            np.asarray(part, np.float64) for part in (task.adapted, *task.head)
        )
        origin = -np.linalg.pinv(weight) @ bias
        moment = covariance.EmpiricalCovariance(assume_centered=True).fit(features - origin)
        values, vectors = np.linalg.eig(moment.covariance_)
        kept = vectors[:, np.argsort(-values)[6:]]
        residual = np.linalg.norm((features - origin) @ kept, axis=1)
        alpha = (features @ weight.T + bias).max(axis=1).mean() / residual.mean()
        test = data.adapted.astype(np.float64)
        energy = scipy.special.logsumexp(test @ weight.T + bias, axis=1)
        task_scores.append(energy - alpha * np.linalg.norm((test - origin) @ kept, axis=1))
    comparator = fit(logits.VirtualLogitMatching(), data.tasks)
    scores = comparator.score(data.adapted)
    np.testing.assert_allclose(scores.task_scores, np.stack(task_scores, axis=1), rtol=1e-4)
    assert comparator.storage_bytes == 4 * 3 * (12 * 6 + 12 + 1)
    raw = fit(logits.Raw(), data.tasks).score(data.adapted)
    np.testing.assert_array_equal(scores.local_class, raw.local_class)


def test_vim_of_small_tasks_keeps_a_residual():
    data = problem(((3, 2), (2, 2)), width=12)
    comparator = fit(logits.VirtualLogitMatching(), data.tasks)
    assert np.isfinite(comparator.score(data.adapted).task_scores).all()
    # n = 5 and 4 samples leave (n - 1) // 2 = 2 and 1 principal directions.
    assert comparator.storage_bytes == 4 * (12 * 10 + 13 + 12 * 11 + 13)


@pytest.mark.parametrize("rows", [60, 12])
def test_the_chosen_ridge_is_sklearns_best(rows):
    rng, split = np.random.default_rng(rows), int(0.8 * rows)
    expanded = np.maximum(rng.normal(size=(rows, 20)), 0).astype(np.float32)
    truth = expanded @ rng.normal(size=(20, 3))
    onehot = np.eye(3, dtype=np.float32)[(truth + 3 * rng.normal(size=(rows, 3))).argmax(axis=1)]
    losses = []
    for ridge in random_features.RIDGES:
        model = linear_model.Ridge(ridge, fit_intercept=False, solver="svd")
        model.fit(expanded[:split].astype(np.float64), onehot[:split])
        losses.append(np.mean((model.predict(expanded[split:]) - onehot[split:]) ** 2))
    best = random_features.chosen_ridge(expanded, onehot, 0.0)
    assert best == random_features.RIDGES[int(np.argmin(losses))]
    assert 1e-8 < best < 1e8
    assert random_features.chosen_ridge(expanded[:1], onehot[:1], 7.0) == 7.0


@pytest.mark.parametrize("kind", [random_features.RanPAC, random_features.Ridge])
def test_ranpac_is_sklearns_ridge_on_the_same_features(data, kind):
    comparator = fit(kind(projections=50, seed=3), data.tasks)
    features, labels = stacked(data, "adapted")
    matrix = np.random.default_rng(3).standard_normal((12, 50), np.float32).astype(np.float64)

    def expanded(rows):
        if kind is random_features.Ridge:
            return np.column_stack([rows, np.ones(len(rows))])
        return np.maximum(rows @ matrix, 0)

    reference = linear_model.Ridge(comparator.ridge, fit_intercept=False)
    reference.fit(expanded(features), (labels[:, None] == np.unique(labels)).astype(float))
    expected = reference.predict(expanded(view(data, "adapted")))
    actual = comparator.class_scores(data.adapted)
    np.testing.assert_allclose(actual, expected, atol=2e-4)


def test_ranpac_with_fewer_samples_than_projections():
    """The validated lambda is then tiny, and rounding of G must not decide."""
    data = problem(((6, 6), (6, 6), (6, 6)), width=64, seed=1)
    comparator = fit(random_features.RanPAC(projections=600), data.tasks)
    assert comparator.ridge < 100
    nearest = fit(distances.NearestClassMean(), data.tasks).score(data.adapted)
    scores = comparator.score(data.adapted)
    accuracy = np.mean(scores.label == data.labels)
    assert accuracy >= np.mean(nearest.label == data.labels) - 0.1
    assert np.abs(scores.task_scores).max() < 3


def test_gram_matrices_are_added_by_tiles(monkeypatch):
    """With a smaller tile at the end, and a smaller block of rows."""
    monkeypatch.setattr(random_features, "TILE", 16)
    hidden = np.random.default_rng(0).normal(size=(1100, 40)).astype(np.float32)
    total = random_features.with_gram(None, hidden[:7])
    assert random_features.with_gram(total, hidden[7:]) is total
    wide = hidden.astype(np.float64)
    np.testing.assert_allclose(total, wide.T @ wide, atol=1e-3)


def test_ridge_solve_survives_a_singular_gram_matrix():
    gram = np.diag([4.0, 1.0, -1e-3])  # What float32 rounding makes of a zero eigenvalue.
    solution = random_features.solve_ridge(gram, 1e-8, np.ones((3, 1)))
    np.testing.assert_allclose(solution[:2, 0], [0.25, 1.0], rtol=1e-6)
    assert 0 < solution[2, 0] < np.inf


def gelu(x):
    return 0.5 * x * (1 + scipy.special.erf(x / np.sqrt(2)))


def test_anacp_equals_float64(data):
    """A float64 rendering that shares the random matrices and pseudo-features."""
    size, ridge, count = 30, 100.0, 100
    features, labels = stacked(data, "pretrained")
    features = unit(features)
    deviations, means = within(features, labels)
    columns = np.unique(labels, return_inverse=True)[1]
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
    maps = [solve(gelu(features @ m), targets[columns]) for m in inner]

    def pulled(x):
        outputs = [unit(gelu(x @ m) @ theta) for m, theta in zip(inner, maps, strict=True)]
        return gelu(np.mean(outputs, axis=0) @ outer)

    random = np.random.default_rng([5, 1])
    lower = np.linalg.cholesky(spread)
    pseudo = np.concatenate([m + random.standard_normal((count, 12)) @ lower.T for m in means])
    theta = solve(pulled(pseudo), np.repeat(np.eye(len(means)), count, axis=0))
    reference = pulled(unit(data.pretrained.astype(np.float64))) @ theta
    check(data, random_features.AnaCP("pretrained", size, seed=5), reference, rtol=5e-4)


# Contract of all ----------------------------------------------------------------------------------

METHODS = {
    "ncm": distances.NearestClassMean,
    "mahalanobis": distances.Mahalanobis,
    "fecam": distances.FeCAM,
    "ranpac": lambda view: random_features.RanPAC(view, projections=40),
    "ridge": random_features.Ridge,
    "anacp": lambda view: random_features.AnaCP(view, projections=40),
}


@pytest.fixture(params=METHODS)
def method(request):
    return METHODS[request.param]


def test_tasks_of_few_images_are_scored(method):
    """A task of one class, a class of one image, a task of one image, n < d."""
    data = problem(((8,), (1, 5), (1,)), width=14)
    comparator = fit(method("adapted"), data.tasks)
    scores = comparator.score(data.adapted, data.pretrained)
    assert np.isfinite(scores.task_scores).all()
    assert scores.task_scores.shape == (60, 3)
    assert set(scores.label) <= {0, 10, 11, 20}


def test_one_view_is_read(data, method):
    comparator = fit(method("pretrained"), data.tasks)
    scores = comparator.score(None, data.pretrained)
    assert np.mean(scores.label == data.labels) > 0.5
    with pytest.raises(InputError, match="pretrained features: expected, as the method reads them"):
        comparator.score(data.adapted)
    with pytest.raises(InputError, match=r"^pretrained features of task 0 .*: missing, which"):
        fit(method("pretrained"), data.tasks, dual=False)


def test_a_class_without_images_is_never_predicted(data, method):
    comparator, task = method("adapted"), data.tasks[0]
    comparator.fit_task(task.adapted, task.labels, None, classes=[2, 7, 1, 0])
    scores = comparator.score(data.adapted)
    assert 7 not in {*scores.label, *comparator.score(-data.adapted).label}
    if comparator.name != "anacp":  # Its pseudo-features depend on the order of classes.
        without = fit(method("adapted"), data.tasks[:1]).score(data.adapted)
        np.testing.assert_array_equal(scores.label, without.label)


def test_unknown_views_are_named():
    with pytest.raises(InputError, match="ncm: view: expected adapted or pretrained, found 'both'"):
        distances.NearestClassMean("both")
