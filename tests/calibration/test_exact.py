"""FDC against a reading of Algorithm 1 in float64, over any size, rank and setting."""

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from fdc_jax.calibration import fdc
from tests.calibration import reference, streams

KINDS = ("linear", "normalised_linear", "cosine", "nearest_mean")


class Exact(reference.Reference):
    """The reference, in which RLC says nothing without a residual of the input and of the task."""

    def corrections(self, view, features):
        rlc, pac = super().corrections(view, features)
        tasks, _ = self.views[view]
        ratios = np.stack([task.residual(np.asarray(features, float)) for task in tasks], axis=1)
        own = np.array([task.rho_mean for task in tasks])
        silent = (ratios < fdc.RATIO_ROUNDING) & (own < fdc.RATIO_ROUNDING)
        return np.where(silent, 0.0, rlc), pac


def well_posed(features, rows):
    """Returns True unless a class has unit features whose mean float32 cannot tell from zero."""
    unit = reference.normalise(features.astype(float))
    lengths = [np.linalg.norm(unit[rows == row].mean(axis=0)) for row in np.unique(rows)]
    return min(lengths) > 1e-2


@st.composite
def problems(draw, widest=40):
    """Returns tasks of a width and a rank, test inputs, and settings."""
    width = draw(st.integers(1, widest))
    rank = draw(st.integers(1, width))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shared = np.linalg.qr(rng.normal(size=(width, width)))[0][:rank]
    same = draw(st.booleans())
    tasks, first = [], 0
    for _ in range(3):
        classes = draw(st.sampled_from([1, 2, 4]))
        samples = draw(st.sampled_from([4, 9, 70]))
        rows = np.arange(samples) % classes
        within = shared if same else np.linalg.qr(rng.normal(size=(width, width)))[0][:rank]
        views = []
        for _ in range(2):
            centres = rng.normal(size=(classes, rank))
            noise = rng.normal(size=(samples, rank)) * np.linspace(1.0, 0.3, rank)
            views.append(((centres[rows] + noise) @ within).astype(np.float32))
        assume(all(well_posed(view, rows) for view in views))
        weight = rng.normal(size=(classes, width)).astype(np.float32)
        bias = rng.normal(size=classes).astype(np.float32)
        tasks.append(streams.StreamTask(*views, rows, weight, bias, first))
        first += classes
    inputs = [
        np.concatenate([view + 0.3 * rng.normal(size=(len(view), rank)) @ shared for view in of])
        for of in ([task.adapted for task in tasks], [task.pretrained for task in tasks])
    ]
    eta = draw(st.floats(0.05, 1.0))
    gamma = draw(st.floats(0.0, 1.0))
    return tasks, [view[:40].astype(np.float32) for view in inputs], eta, gamma


@pytest.mark.ci
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[*HealthCheck])
@given(problems(), st.sampled_from(KINDS))
def test_any_stream_equals_float64(problem, kind):
    tasks, inputs, eta, gamma = problem
    actual = streams.fitted(tasks, kind, retained_energy=eta, attenuation=gamma)
    expected = Exact(
        [(t.adapted, t.rows, streams.reference_head(t, kind), t.pretrained) for t in tasks],
        eta=eta,
        gamma=gamma,
    )
    scores, _ = expected.score(*inputs)
    terms = actual.terms(*inputs).fuse()
    scale = np.array(expected.sigma[True])
    error = np.abs(terms.task_scores - scores) - 1e-6 * np.abs(scores)
    error /= np.maximum(scale, scores.std())
    # With eta = 1 the rounding of features themselves decides on directions outside a subspace.
    assert error.max() < (1e-4 if eta < 1.0 else 1e-3), (error.max(), eta, gamma, kind)


def assert_equals_float64(tasks, inputs, **options):
    """Asserts scores against the reference, as `test_any_stream_equals_float64` does."""
    actual = streams.fitted(tasks, neighbours=options.get("neighbours", 1)).score(*inputs)
    expected = Exact(
        [(t.adapted, t.rows, streams.reference_head(t, "linear"), t.pretrained) for t in tasks],
        **options,
    )
    scores, rows = expected.score(*inputs)
    error = np.abs(actual.task_scores - scores)
    assert error.max() < 1e-4 * max(*expected.sigma[True], scores.std())
    np.testing.assert_array_equal(actual.local_class, rows)


def test_as_many_neighbours_as_classes_equal_float64():
    tasks = streams.known(4, 3, classes=(3,))
    assert_equals_float64(tasks, streams.probe_inputs(tasks), neighbours=3)


def test_permuted_tasks_and_classes_equal_float64():
    rng, permuted = np.random.default_rng(0), []
    for task in streams.stream(5, 4)[::-1]:
        order = rng.permutation(len(task.bias))
        rows = np.argsort(order)[task.rows]
        moved = task._replace(rows=rows, weight=task.weight[order], bias=task.bias[order])
        permuted.append(moved)
    assert_equals_float64(permuted, streams.probe_inputs(permuted))


def test_one_sample_per_class_equals_float64():
    tasks = streams.stream(6, 3, width=40, pretrained_width=24, classes=(9,), samples=(9,))
    inputs = [np.concatenate([getattr(t, view) for t in tasks]) for view in tasks[0]._fields[:2]]
    assert_equals_float64(tasks, inputs)


def test_tasks_of_one_class_equal_float64():
    tasks = streams.stream(7, 5, classes=(1,), samples=(2, 30, 200))
    assert_equals_float64(tasks, streams.probe_inputs(tasks))


@pytest.mark.ci
def test_a_thousand_classes_in_one_task_equal_float64():
    tasks = streams.stream(8, 2, classes=(1000, 3), samples=(3000, 50))
    assert_equals_float64(tasks, streams.probe_inputs(tasks), neighbours=3)


def test_rows_one_by_one_score_as_in_a_batch():
    tasks = streams.known(9, 4)
    calibrator = streams.fitted(tasks)
    views = streams.probe_inputs(tasks, size=70)
    expected = calibrator.score(*views)
    scale = 1e-5 * expected.task_scores.std()
    for row in range(0, 70, 9):
        actual = calibrator.score(*(view[row : row + 1] for view in views))
        np.testing.assert_allclose(actual.task_scores[0], expected.task_scores[row], atol=scale)
        assert actual.label[0] == expected.label[row]
