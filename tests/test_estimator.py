"""The estimator: scikit-learn's own checks, and the same numbers as the calibrators by hand."""

import os
import subprocess
import sys
from pathlib import Path

import joblib
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.base import clone
from sklearn.linear_model import Ridge
from sklearn.metrics.pairwise import cosine_similarity
from sklearn.model_selection import GridSearchCV
from sklearn.utils.estimator_checks import check_estimator, parametrize_with_checks

import fdc_jax
from fdc_jax import ContinualClassifier, FDCClassifier, calibration
from fdc_jax.calibration import inputs
from fdc_jax.errors import InputError
from fdc_jax.estimator import closed_form_head
from tests.calibration import streams

EXPECTED = {
    "check_fit_score_takes_y": "calls partial_fit after fit with the same classes; those of a task "
    "must be new, since no sample of an earlier task is kept"
}
FAR = {
    "check_decision_proba_consistency": "how sure an answer is depends on how far out the sample "
    "lies, too"
}


def expected(estimator):
    return EXPECTED | (FAR if estimator.calibrator == "gaussians" else {})


BOTH = ("fdc", "gaussians")


@parametrize_with_checks([FDCClassifier(), ContinualClassifier()], expected_failed_checks=expected)
def test_the_checks_of_scikit_learn(estimator, check):
    check(estimator)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*BOTH, "mahalanobis"])
def test_the_checks_of_scikit_learn_on_a_device(name):
    estimator = FDCClassifier(name, head="nearest_mean")
    check_estimator(estimator, expected_failed_checks=expected(estimator), on_skip=None)


VIEWS = (slice(0, 16), slice(16, None))  # of features side by side
NAMES = np.array([f"class {c}" for c in (7, 3, 9, 1, 0, 5, 8, 2, 4)])


@pytest.fixture(scope="module")
def tasks():
    return streams.stream(3, 3)


def by_hand(tasks, calibrator):
    """The calibrator fitted without the estimator, on labels that count from 0."""
    previous = [task.adapted for task in tasks]
    return streams.fit(calibration.make(calibrator), tasks, previous=previous)


@pytest.mark.parametrize("calibrator", BOTH)
def test_tasks_one_by_one_give_the_calibrators_scores(tasks, calibrator):
    estimator = FDCClassifier(calibrator, views=VIEWS)
    for task in tasks:
        classes = NAMES[task.first :][: len(task.weight)]
        estimator.partial_fit(
            np.hstack([task.adapted, task.pretrained]),
            NAMES[task.labels],
            classes=classes,
            head=streams.head_of(task, "linear"),
            previous=task.adapted,
        )
    expected, views = by_hand(tasks, calibrator), streams.probe_inputs(tasks)
    scores, by_class, inputs = (
        expected.score(*views),
        expected.class_scores(*views),
        np.hstack(views),
    )
    assert_array_equal(estimator.predict(inputs), NAMES[scores.label])
    assert_array_equal(estimator.predict_task(inputs), scores.task)
    assert estimator.classes_.tolist() == sorted(NAMES)
    assert_array_equal(estimator.decision_function(inputs), by_class[:, np.argsort(NAMES)])
    of_class = dict(zip(estimator.classes_, estimator.class_tasks_, strict=True))
    assert [of_class[name] for name in NAMES] == np.repeat([0, 1, 2], [3, 4, 2]).tolist()
    assert estimator.score(inputs, NAMES[scores.label]) == 1.0


def together(tasks):
    """Samples of all tasks in random order: two views, labels, tasks."""
    parts = [
        (t.adapted, t.pretrained, t.labels, np.full(len(t.rows), n)) for n, t in enumerate(tasks)
    ]
    order = np.random.default_rng(0).permutation(sum(len(t.rows) for t in tasks))
    return [np.concatenate(part)[order] for part in zip(*parts, strict=True)]


@pytest.mark.parametrize("calibrator", BOTH)
def test_all_tasks_at_once_are_the_same_as_one_by_one(tasks, calibrator):
    adapted, pretrained, labels, of_task = together(tasks)
    X, turned = np.hstack([adapted, pretrained]), np.hstack([pretrained, adapted])
    at_once = FDCClassifier(calibrator, views=VIEWS).fit(X, labels, tasks=10.0 * of_task)
    parts = FDCClassifier(calibrator, views=(slice(12, None), slice(0, 12)))
    for task in range(3):
        rows = of_task == task
        parts.partial_fit(turned[rows], labels[rows], previous=adapted[rows])
    assert_array_equal(at_once.decision_function(X), parts.decision_function(turned))
    assert at_once.score(X, labels) > 0.7
    kind = {"fdc": FDCClassifier, "gaussians": ContinualClassifier}[calibrator]
    assert type(kind().fit(adapted, labels).calibrator_) is type(calibration.make(calibrator))
    # Without tasks there is one, whose classes no other competes with.
    alone = FDCClassifier(calibrator).fit(adapted, labels)
    assert not alone.predict_task(adapted).any()
    assert not alone.class_tasks_.any()


def test_the_heads_are_ridge_regression_and_class_means(tasks):
    features, rows = tasks[0].adapted, tasks[0].rows
    ones, targets = np.hstack([features, np.ones((len(rows), 1))]), np.eye(3)[rows]
    order, split = np.random.default_rng(0).permutation(len(rows)), int(0.8 * len(rows))
    fitted, left = order[:split], order[split:]

    def ridge(penalty, some):
        return Ridge(penalty, fit_intercept=False, solver="svd").fit(ones[some], targets[some])

    errors = {
        p: ((ridge(p, fitted).predict(ones[left]) - targets[left]) ** 2).mean()
        for p in 10.0 ** np.arange(-8, 9)
    }
    best = ridge(min(errors, key=errors.get), slice(None))
    actual = closed_form_head("ridge", features, rows).logits(features)
    assert_allclose(actual, best.predict(ones), atol=1e-5)
    means = np.stack([features[rows == c].mean(axis=0, dtype=np.float64) for c in range(3)])
    actual = closed_form_head("nearest_mean", features, rows).logits(features)
    assert_allclose(actual, 2 * cosine_similarity(features, means) - 2, atol=1e-5)


@pytest.mark.parametrize("calibrator", BOTH)
def test_joblib_keeps_the_state_for_further_tasks(tasks, calibrator, tmp_path):
    estimator = FDCClassifier(calibrator)
    for task in tasks[:2]:
        estimator.partial_fit(task.adapted, task.labels)
    joblib.dump(estimator, tmp_path / "estimator.joblib")
    again = joblib.load(tmp_path / "estimator.joblib")
    inputs = streams.probe_inputs(tasks)[0]
    for classifier in (estimator, again):
        classifier.partial_fit(tasks[2].adapted, tasks[2].labels)
    assert_array_equal(again.decision_function(inputs), estimator.decision_function(inputs))
    assert again.calibrator_.num_tasks == 3


def test_settings_are_searched_and_cloned(tasks):
    adapted, _, labels, of_task = together(tasks)
    frame = pd.DataFrame(adapted, columns=[f"f{i}" for i in range(16)])
    grid = [
        {"settings": [{"pac_weight": weight, "attenuation": 0.25} for weight in (0.0, 2.0)]},
        {"calibrator": ["gaussians"]},
    ]
    search = GridSearchCV(FDCClassifier(), grid, cv=2, error_score="raise")
    search.fit(frame, labels, tasks=of_task)
    assert len(search.cv_results_["params"]) == 3
    assert search.best_estimator_.feature_names_in_.tolist() == list(frame)
    actual = clone(FDCClassifier(settings=grid[0]["settings"][1])).fit(frame, labels, tasks=of_task)
    assert actual.calibrator_.settings == calibration.Settings(pac_weight=2.0, attenuation=0.25)
    copied = clone(FDCClassifier(views=(slice(0, 4), [5, 6])))
    assert copied.get_params()["views"] == (slice(0, 4), [5, 6])


def part(task=1, **given):
    """Fits a task once more, or differently."""
    return lambda e, tasks: e.partial_fit(tasks[task].adapted, tasks[task].labels, **given)


def one_class(estimator, tasks):
    rows = tasks[1].rows == 0
    estimator.partial_fit(tasks[1].adapted[rows], tasks[1].labels[rows])


MISTAKES = {
    "again": (
        part(0),
        "class 0 belongs to an earlier task, and those of a task must be new; fit discards",
    ),
    "twice": (part(classes=[3, 4, 5, 6, 6]), "classes: expected each label once"),
    "head": (
        lambda e, tasks: part(head=streams.head_of(tasks[0], "linear"))(e, tasks),
        "expected 4 labels|found 4|expected 3 labels",
    ),
    "one": (one_class, "head: ridge cannot fit a task of one class"),
    "two views": (
        lambda e, tasks: e.partial_fit(
            np.hstack([tasks[1].adapted, tasks[1].pretrained]), tasks[1].labels
        ),
        "X has 28 features, but FDCClassifier is expecting 16",
    ),
    "nan": (lambda e, _: e.predict(np.full((2, 16), np.nan)), "contains NaN"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_change_nothing(tasks, mistake):
    do, message = MISTAKES[mistake]
    estimator = FDCClassifier().partial_fit(tasks[0].adapted, tasks[0].labels)
    before = estimator.predict(tasks[0].adapted)
    with pytest.raises(ValueError, match=message):
        do(estimator, tasks)
    estimator.set_params(views=None, head="ridge")
    assert_array_equal(estimator.predict(tasks[0].adapted), before)
    estimator.partial_fit(tasks[1].adapted, tasks[1].labels)
    assert estimator.calibrator_.num_tasks == 2


def test_wrong_settings_and_shapes_are_named(tasks):
    X, y = tasks[0].adapted, tasks[0].labels
    for wrong, message in (
        ({"calibrator": "fcd"}, "calibrator: expected one of .*, found 'fcd'; did you mean fdc"),
        ({"settings": {"pack_weight": 1.0}}, "setting of fdc: .* did you mean pac_weight"),
        ({"settings": {"pac_weight": -1.0}}, "pac_weight: expected"),
        ({"calibrator": "ncm", "settings": {"k": 1}}, "settings: ncm has none, found k"),
        ({"views": 2}, r"views: expected such as \(slice.*not iterable"),
        ({"views": (0, 99)}, "views: expected such as .*out of bounds"),
        ({"views": (3, 4)}, "views: expected such as .*do not select columns"),
        ({"head": "linear"}, "head: expected one of ridge, nearest_mean, found 'linear'"),
    ):
        with pytest.raises(InputError, match=message):
            FDCClassifier(**wrong).fit(X, y)
    with pytest.raises(TypeError, match=r"[Ss]parse data"):
        FDCClassifier().fit(scipy.sparse.csr_matrix(X), y)
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        FDCClassifier().fit(X, y, tasks=[0, 1])
    with pytest.raises(ValueError, match="class 0 belongs to an earlier task"):
        FDCClassifier().fit(X, y, tasks=np.arange(len(y)) % 2)


def test_gaussians_accept_single_class_tasks_and_note_no_drift(tasks):
    estimator = FDCClassifier("gaussians")
    for task in tasks[:2]:
        rows = task.rows == 0
        estimator.partial_fit(task.adapted[rows], task.labels[rows])
    assert estimator.classes_.tolist() == [0, 3]
    assert "without drift compensation" in estimator.calibrator_.note
    with pytest.raises(InputError, match="previous features of task 2"):
        estimator.partial_fit(tasks[2].adapted, tasks[2].labels, previous=tasks[2].adapted)


def test_importing_the_package_loads_nothing_heavy():
    script = """
import sys, fdc_jax
assert "FDCClassifier" in dir(fdc_jax) and "calibration" in dir(fdc_jax)
heavy = {"jax", "numpy", "sklearn", "flax", "fdc_jax.calibration"} & set(sys.modules)
assert not heavy, heavy
fdc_jax.heads, fdc_jax.calibration.FDC
heavy = {"sklearn", "flax", "fdc_jax.estimator"} & set(sys.modules)
assert not heavy, heavy
fdc_jax.FDCClassifier
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    assert set(fdc_jax.__all__) <= set(dir(fdc_jax))
    with pytest.raises(AttributeError, match="has no attribute 'FDCClasifier'"):
        fdc_jax.FDCClasifier  # noqa: B018


def test_probabilities_agree_with_predictions():
    rng = np.random.default_rng(0)
    y, tasks = np.repeat(np.arange(6), 40)[::-1], np.repeat([1, 0], 120)
    X = rng.normal(size=(240, 8)) + 2 * np.eye(8)[y]
    actual = ContinualClassifier().fit(X, y, tasks)
    chances = actual.predict_proba(X)
    assert_allclose(chances.sum(axis=1), 1.0)
    assert_array_equal(actual.classes_[chances.argmax(axis=1)], actual.predict(X))
    assert not hasattr(FDCClassifier(), "predict_proba")


FORKED = """
import multiprocessing, sys, warnings
import numpy as np
from fdc_jax import FDCClassifier
from fdc_jax.errors import InputError

warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
rng = np.random.default_rng(0)
X, y = rng.normal(size=(80, 8)), np.arange(80) % 4

def predict(classifier):
    try:
        return classifier.predict(X).tolist()
    except InputError as error:
        return str(error)

if __name__ == "__main__":
    fitted = FDCClassifier().fit(X, y, y // 2)
    for method in ("fork", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            answer = pool.apply_async(predict, (fitted,)).get(timeout=100)
        print(answer if isinstance(answer, str) else answer == fitted.predict(X).tolist())
"""


@pytest.mark.ci
@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")
def test_a_forked_process_is_an_error_and_a_new_one_predicts(tmp_path):
    (tmp_path / "program.py").write_text(FORKED)
    root = Path(fdc_jax.__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, tmp_path / "program.py"], capture_output=True, text=True, timeout=300,
        env=os.environ | {"PYTHONPATH": str(root)},
    )  # fmt: skip
    forked, new = done.stdout.splitlines()
    assert forked.startswith("this process was forked from one that has used JAX")
    assert new == "True"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")
def test_a_fork_of_a_process_without_jax_is_accepted(monkeypatch):
    monkeypatch.setattr(inputs, "_process", {})
    monkeypatch.setattr(os, "getpid", lambda: 7)
    inputs.refuse_fork()
    inputs.refuse_fork()
    monkeypatch.setattr(os, "getpid", lambda: 8)
    with pytest.raises(InputError, match="forked from one that has used JAX"):
        inputs.refuse_fork()
