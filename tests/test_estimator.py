"""The estimator: scikit-learn's own checks, and the same numbers as the calibrators by hand."""

import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.linear_model import Ridge
from sklearn.metrics.pairwise import cosine_similarity
from sklearn.model_selection import GridSearchCV
from sklearn.utils.estimator_checks import parametrize_with_checks

import fdc_jax
from fdc_jax import ContinualClassifier, FDCClassifier, calibration
from fdc_jax.calibration.comparators import random_features
from fdc_jax.estimator import closed_form_head
from tests import small_runs
from tests.calibration import streams
from tests.errors import input_error

REASON = "calls partial_fit after fit with the same classes; those of a task must be new, since no "
EXPECTED = {"check_fit_score_takes_y": REASON + "sample of an earlier task is kept"}
FAR = {"check_decision_proba_consistency": "how far out a sample lies counts, too"}

BOTH = ("fdc", "gaussians")


@parametrize_with_checks([ContinualClassifier()], expected_failed_checks=lambda _: EXPECTED | FAR)
def test_the_checks_of_scikit_learn(estimator, check):
    check(estimator)


@pytest.mark.ci
@parametrize_with_checks([FDCClassifier()], expected_failed_checks=lambda _: EXPECTED)
def test_the_checks_of_scikit_learn_with_fdc(estimator, check):
    check(estimator)


VIEWS = (slice(0, 16), slice(16, None))  # of features side by side
NAMES = np.array([f"class {c}" for c in (7, 3, 9, 1, 0, 5, 8, 2, 4)])


TASKS = streams.stream(3, 3)


@pytest.mark.parametrize("calibrator", BOTH)
def test_tasks_one_by_one_give_the_calibrators_scores(calibrator):
    estimator = FDCClassifier(calibrator, views=VIEWS)
    for task in TASKS:
        estimator.partial_fit(
            np.hstack([task.adapted, task.pretrained]),
            NAMES[task.labels],
            classes=NAMES[task.first :][: len(task.weight)],
            head=streams.head_of(task, "linear"),
            previous=task.adapted,
        )
    previous = [task.adapted for task in TASKS]
    expected = streams.fit(calibration.make(calibrator), TASKS, previous=previous)
    views = streams.probe_inputs(TASKS)
    scores = expected.score(*views)
    inputs = np.hstack(views)
    assert_array_equal(estimator.predict(inputs), NAMES[scores.label])
    assert_array_equal(estimator.predict_task(inputs), scores.task)
    columns = np.argsort(NAMES)
    assert_array_equal(estimator.classes_, NAMES[columns])
    assert_array_equal(estimator.class_tasks_, np.repeat([0, 1, 2], [3, 4, 2])[columns])
    by_class = expected.class_scores(*views)[:, columns]
    assert_array_equal(estimator.decision_function(inputs), by_class)


def together():
    """Samples of all tasks in random order: two views, labels, tasks."""
    arrays = [(t.adapted, t.pretrained, t.labels, 0 * t.labels + n) for n, t in enumerate(TASKS)]
    columns = [np.concatenate(parts) for parts in zip(*arrays, strict=True)]
    order = np.random.default_rng(0).permutation(len(columns[0]))
    return [column[order] for column in columns]


@pytest.mark.parametrize("kind", [FDCClassifier, ContinualClassifier])
def test_all_tasks_at_once_are_the_same_as_one_by_one(kind):
    adapted, pretrained, labels, of_task = together()
    X = np.hstack([adapted, pretrained])
    turned = np.hstack([pretrained, adapted])
    at_once = kind(views=VIEWS).fit(X, labels, tasks=10.0 * of_task)
    parts = kind(views=(slice(12, None), slice(0, 12)))
    for task in range(3):
        rows = of_task == task
        parts.partial_fit(turned[rows], labels[rows], previous=adapted[rows])
    assert_array_equal(at_once.decision_function(X), parts.decision_function(turned))
    assert at_once.score(X, labels) > 0.7
    name = "fdc" if kind is FDCClassifier else "gaussians"
    assert type(at_once.calibrator_) is type(calibration.make(name))
    # Without tasks there is one, whose classes no other competes with.
    assert not kind().fit(adapted, labels).class_tasks_.any()


def test_the_heads_are_ridge_regression_and_class_means():
    """The penalty is that of RanPAC, on samples in random order."""
    features, rows = TASKS[0].adapted, TASKS[0].rows
    inputs = np.hstack([features, np.ones((len(rows), 1))])
    targets = np.eye(3)[rows]
    order = np.random.default_rng(0).permutation(len(rows))
    penalty = random_features.chosen_ridge(inputs[order], targets[order], 1.0)
    ridge = Ridge(penalty, fit_intercept=False, solver="svd").fit(inputs, targets)
    actual = closed_form_head("ridge", features, rows).logits(features)
    assert_allclose(actual, ridge.predict(inputs), atol=1e-5)
    means = np.stack([features[rows == c].mean(axis=0, dtype=np.float64) for c in range(3)])
    actual = closed_form_head("nearest_mean", features, rows).logits(features)
    assert_allclose(actual, 2 * cosine_similarity(features, means) - 2, atol=1e-5)


def test_settings_are_searched():
    adapted, _, labels, of_task = together()
    frame = pd.DataFrame(adapted).add_prefix("f")
    settings = {"pac_weight": 2.0, "attenuation": 0.25}
    search = GridSearchCV(FDCClassifier(), {"settings": [settings]}, cv=2, error_score="raise")
    best = search.fit(frame, labels, tasks=of_task).best_estimator_
    assert best.feature_names_in_.tolist() == list(frame)
    assert best.calibrator_.settings == calibration.Settings(**settings)


FIRST, SECOND = ({"X": task.adapted, "y": task.labels} for task in TASKS[:2])
ONE_CLASS = TASKS[1].rows == 0
# Arguments of `partial_fit` after the first task, and the error.
MISTAKES = {
    "again": (FIRST, "class 0 belongs to an earlier task, and those of a task must be new; fit d"),
    "class without samples": (
        SECOND | {"classes": [3, 4, 5, 6, 7]},
        "classes: expected a sample of every class",
    ),
    "head": (SECOND | {"head": streams.head_of(TASKS[0], "linear")}, "expected . labels|found 4"),
    "one": (
        {name: values[ONE_CLASS] for name, values in SECOND.items()},
        "head: ridge cannot fit a task of one class",
    ),
    "nan": (SECOND | {"X": SECOND["X"] * np.nan}, "contains NaN"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_change_nothing(mistake):
    arguments, message = MISTAKES[mistake]
    estimator = FDCClassifier().partial_fit(**FIRST)
    before = estimator.predict(FIRST["X"])
    with pytest.raises(ValueError, match=message):
        estimator.partial_fit(**arguments)
    assert_array_equal(estimator.predict(FIRST["X"]), before)
    assert estimator.partial_fit(**SECOND).calibrator_.num_tasks == 2


def test_wrong_settings_and_shapes_are_named():
    X, y = FIRST.values()
    for wrong, message in (
        ({"calibrator": "fcd"}, "calibrator: expected one of .*, found 'fcd'; did you mean fdc"),
        ({"settings": {"pack_weight": 1.0}}, "setting of fdc: .* did you mean pac_weight"),
        ({"calibrator": "ncm", "settings": {"k": 1}}, "settings: ncm has none, found k"),
        ({"views": 2}, r"views: expected such as \(slice.*not iterable"),
        ({"head": "linear"}, "head: expected one of ridge, nearest_mean, found 'linear'"),
    ):
        with input_error(message):
            FDCClassifier(**wrong).fit(X, y)
    with pytest.raises(ValueError, match="class 0 belongs to an earlier task"):
        FDCClassifier().fit(X, y, tasks=np.arange(len(y)) % 2)


def test_gaussians_accept_single_class_tasks_and_note_no_drift():
    estimator = FDCClassifier("gaussians")
    for task in TASKS[:2]:
        estimator.partial_fit(task.adapted[:5], np.full(5, task.first))
    assert estimator.classes_.tolist() == [0, 3]
    assert "without drift compensation" in estimator.calibrator_.note
    with input_error("previous features of task 2"):
        estimator.partial_fit(TASKS[2].adapted, TASKS[2].labels, previous=TASKS[2].adapted)


@pytest.mark.ci
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
    small_runs.python("-c", script)
    assert set(fdc_jax.__all__) <= set(dir(fdc_jax))
    assert not hasattr(FDCClassifier(), "predict_proba")
    with pytest.raises(AttributeError, match="has no attribute 'FDCClasifier'"):
        fdc_jax.FDCClasifier  # noqa: B018


FORKED = """
import multiprocessing, sys, warnings
import numpy as np
from fdc_jax import FDCClassifier
from fdc_jax.errors import InputError

warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
rng = np.random.default_rng(0)
X, y = rng.normal(size=(80, 8)), np.arange(80) % 4

def fit():
    return FDCClassifier().fit(X, y, y // 2).predict(X).shape

def predict(classifier):
    try:
        return classifier.predict(X)
    except InputError as error:
        return str(error)

if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(1) as pool:
        print(pool.apply_async(fit).get(timeout=100))
    fitted = FDCClassifier().fit(X, y, y // 2)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        print(pool.apply_async(predict, (fitted,)).get(timeout=100))
"""


@pytest.mark.ci
def test_predicting_in_a_process_forked_after_jax_is_an_error(tmp_path):
    (tmp_path / "program.py").write_text(FORKED)
    root = str(Path(fdc_jax.__file__).resolve().parents[1])
    output = small_runs.python(tmp_path / "program.py", env=os.environ | {"PYTHONPATH": root})
    shape, forked = output.splitlines()
    assert shape == "(80,)"
    assert forked.startswith("this process was forked from one that has used JAX")
