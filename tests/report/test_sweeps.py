"""Sweeps share work between values; each value must be what FDC fitted from scratch gives."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from fdc_jax import calibration, evaluation
from fdc_jax.errors import InputError
from fdc_jax.report import spectra, sweeps
from tests.calibration import streams
from tests.report.feature_sets import feature_set, reference_of

DEFAULTS = calibration.FDC().settings


def refitted(features, setting):
    """Scores of FDC fitted from scratch."""
    calibrator = calibration.FDC(**setting._asdict())
    for task in features.tasks:
        calibrator.fit_task(task.adapted, task.labels, task.head, task.pretrained, task.classes)
    calibrator.finalize()
    if features.final_heads is not None:
        calibrator.replace_heads(features.final_heads)
    return calibrator.score(features.test_adapted, features.test_pretrained)


def check_against_refits(features, varied, tolerance=1e-5):
    found = sweeps.scores(features, varied)
    for setting, scores in zip(varied, found, strict=True):
        expected = refitted(features, setting)
        assert streams.relative_error(scores.task_scores, expected.task_scores) < tolerance, setting
        np.testing.assert_array_equal(scores.local_class, expected.local_class)
        np.testing.assert_array_equal(scores.label, expected.label)


@pytest.mark.parametrize(
    ("kind", "dual", "final"),
    [
        ("linear", True, False),
        ("linear", False, True),
        ("cosine", True, True),
        ("nearest_mean", True, False),
        ("normalised_linear", False, False),
    ],
)
def test_a_sweep_equals_refits_from_scratch(kind, dual, final):
    features = feature_set(kind, dual, final)
    varied = [DEFAULTS._replace(attenuation=value) for value in (0.0, 0.375, 1.0)]
    varied += [DEFAULTS._replace(retained_energy=value) for value in (0.5, 0.8, 0.95)]
    check_against_refits(features, varied)


def test_neighbours_and_references_equal_refits_from_scratch():
    features = feature_set()
    varied = [
        DEFAULTS._replace(neighbours=count, affinity_reference=name)
        for count in (1, 2)
        for name in ("own", "nearest")
    ]
    # FDC standardises in float32, where dividing by the spread of a few affinities costs a digit.
    check_against_refits(features, varied, 5e-5)


@settings(max_examples=4, deadline=None, derandomize=True)
@given(
    st.integers(0, 1000),
    st.lists(
        st.tuples(st.floats(0.05, 0.95), st.floats(0.0, 1.0)), min_size=3, max_size=3, unique=True
    ),
)
def test_any_grid_equals_refits_from_scratch(seed, values):
    features = feature_set(seed=seed, samples=(60, 520, 80), offset=3.0)
    check_against_refits(
        features,
        [DEFAULTS._replace(retained_energy=eta, attenuation=gamma) for eta, gamma in values],
    )


@pytest.mark.parametrize("name", ["own", "nearest"])
def test_neighbourhoods_are_the_references(name):
    features = feature_set(classes=(3, 4, 3))
    found = sweeps.sweep(features, DEFAULTS, "neighbours")
    assert found["values"] == [1, 2, 3]
    for place, count in enumerate(found["values"]):
        fitted = reference_of(features, neighbours=count, nearest=name == "nearest")
        scores, rows = fitted.score(features.test_adapted, features.test_pretrained)
        task = scores.argmax(axis=1)
        labels = [features.tasks[t].classes[row[t]] for t, row in zip(task, rows, strict=True)]
        assert found[name]["routing_accuracy"][place] == pytest.approx(
            100 * np.mean(task == features.test_tasks)
        )
        assert found[name]["accuracy"][place] == pytest.approx(
            100 * np.mean(labels == features.test_labels)
        )


def test_one_neighbour_is_fdc_itself():
    features = feature_set()
    found = sweeps.sweep(features, DEFAULTS, "neighbours")
    labels = refitted(features, DEFAULTS).label
    assert found["own"]["accuracy"][0] == evaluation.accuracy(features.test_labels, labels)
    assert found["own"]["accuracy"] != found["nearest"]["accuracy"]


def test_the_nearest_reference_in_plain_numpy():
    affinity = np.array([[0.1, 0.4, 0.7], [0.2, 0.2, 0.2]])
    spread = np.sqrt(np.mean([0.09, 0.0, 0.09]))
    expected = [[-0.3 / spread, 0.0, 0.3 / spread], [0.0, 0.0, 0.0]]
    np.testing.assert_allclose(sweeps.standardised_over_tasks(affinity), expected, atol=1e-9)


@pytest.mark.parametrize("parameter", ["attenuation", "retained_energy"])
def test_the_papers_values_are_swept_and_the_default_is_among_them(parameter):
    features = feature_set()
    found = sweeps.sweep(features, DEFAULTS, parameter)
    assert len(found["values"]) == len(found["accuracy"]) == len(found["routing_accuracy"]) == 7
    scores = refitted(features, DEFAULTS)
    place = found["values"].index(found["default"])
    assert found["accuracy"][place] == evaluation.accuracy(features.test_labels, scores.label)
    assert found["routing_accuracy"][place] == evaluation.accuracy(features.test_tasks, scores.task)
    assert len(set(found["accuracy"])) > 1


def test_spectra_may_be_shared():
    features = feature_set()
    tasks = spectra.spectra(features)
    alone = sweeps.sweep(features, DEFAULTS, "attenuation", (0.25,))
    assert sweeps.sweep(features, DEFAULTS, "attenuation", (0.25,), tasks) == alone


def test_one_task_has_no_foreign_reference():
    features = feature_set(tasks=1)
    check_against_refits(features, [DEFAULTS, DEFAULTS._replace(retained_energy=0.5)])


def test_bad_requests_are_refused():
    features = feature_set()
    with pytest.raises(InputError, match="parameter: expected one of attenuation"):
        sweeps.sweep(features, DEFAULTS, "rlc_weight")
    with pytest.raises(InputError, match="attenuation: expected 0 <= x <= 1"):
        sweeps.sweep(features, DEFAULTS, "attenuation", (1.5,))
    with pytest.raises(InputError, match=r"neighbours: expected at most 2, .* found 3"):
        sweeps.sweep(features, DEFAULTS, "neighbours", (3,))
    with pytest.raises(InputError, match="test_labels: absent"):
        sweeps.sweep(features._replace(test_labels=None), DEFAULTS, "attenuation")


def test_classes_without_images_are_no_neighbours():
    features = feature_set()
    task = features.tasks[1]
    keep = task.labels != task.classes[0]
    task = task._replace(
        adapted=task.adapted[keep], pretrained=task.pretrained[keep], labels=task.labels[keep]
    )
    features = features._replace(tasks=(features.tasks[0], task, features.tasks[2]))
    assert spectra.feasible_neighbours(spectra.spectra(features)) == 2
    check_against_refits(features, [DEFAULTS])
