"""FDC against a float64 reading of Algorithm 1 (`reference`), and its edge cases."""

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from fdc_jax.calibration import fdc, inputs, settings
from tests.calibration import reference, streams
from tests.errors import input_error

KINDS = ("linear", "normalised_linear", "cosine", "nearest_mean")
WEIGHTS = {"adapted_view_weight": 0.4, "pretrained_view_weight": 2.0}


def assert_equal_scores(actual, expected, tolerance=1e-4):
    """Asserts scores, rows of the heads, and tasks unless their best scores are a tie."""
    scores, rows = expected
    assert streams.relative_error(actual.task_scores, scores) < tolerance
    np.testing.assert_array_equal(actual.local_class, rows)
    best = np.sort(scores, axis=1)
    clear = np.full(len(scores), True)
    if scores.shape[1] > 1:
        clear = best[:, -1] - best[:, -2] > 1e-3 * scores.std()
    np.testing.assert_array_equal(actual.task[clear], scores.argmax(axis=1)[clear])


def ranks(calibrator):
    return [[len(task.views[view].basis) for task in calibrator.tasks] for view in range(2)]


def apart(tasks):
    """Returns the tasks with their means about 100 within-task spreads apart."""
    rng = np.random.default_rng(5)

    def moved(view):
        return (view + 40.0 * rng.normal(size=view.shape[1])).astype(np.float32)

    return [streams.mapped([task], moved, moved)[0] for task in tasks]


def tiny(view):
    return np.float32(2e-7) * view


PLAIN, SHORT = streams.stream(20, 2)
ZERO = np.concatenate([SHORT.adapted[:-1], np.zeros_like(SHORT.adapted[:1])])
ONE_IMAGE = streams.chosen(SHORT, [0])._replace(weight=SHORT.weight[:1])
CASES = {
    "K = 3, other weights": (
        streams.stream(8, 3, classes=(3, 5, 4)),
        {"neighbours": 3, "rlc_weight": 0.7, "pac_weight": 1.3} | WEIGHTS,
    ),
    "one task, no bias": ([PLAIN._replace(bias=0.0)], {}),
    "20 unequal tasks, n < d, many classes": (
        streams.stream(8, 20, classes=(3, 100, 4), samples=(10, 300, 33)),
        {"neighbours": 3},
    ),
    "means 100 spreads apart": (apart(streams.stream(3, 5)), {}),
    "a class without images": ([streams.chosen(PLAIN, PLAIN.rows != 1), SHORT], {"neighbours": 2}),
    "one image": ([PLAIN._replace(first=10), ONE_IMAGE], {"kind": "cosine"}),
    "constant features": (
        [streams.chosen(SHORT, np.zeros(45, int))._replace(rows=SHORT.rows), PLAIN],
        {},
    ),
    "a zero feature": ([PLAIN, SHORT._replace(adapted=ZERO)], {}),
    "tiny features": (streams.mapped(streams.stream(23, 3), tiny, tiny, lambda w: w / 2e-7), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_scores_equal_float64(case):
    tasks, options = CASES[case]
    actual = streams.fitted(tasks, **options)
    expected = streams.fitted_reference(tasks, **options)
    assert ranks(actual) == [[task.basis.shape[1] for task in view] for view, _ in expected.views]
    adapted, pretrained = streams.probe_inputs(tasks, size=200)
    adapted[0] = pretrained[0] = 0.0
    if case == "tiny features":
        adapted, pretrained = tiny(adapted), tiny(pretrained)
    assert_equal_scores(actual.score(adapted, pretrained), expected.score(adapted, pretrained))


@pytest.mark.parametrize("offset", [0.0, 30.0])
def test_statistics_and_corrections_equal_float64(offset):
    # The third task has more than a block of rows.
    tasks = streams.stream(3, 5, offset=offset, samples=(60, 45, inputs.BLOCK_ROWS + 88))
    actual = streams.fitted(tasks)
    expected = streams.fitted_reference(tasks)
    probes = streams.probe_inputs(tasks)
    terms = actual.terms(*probes)
    for view, (of_tasks, foreign) in enumerate(expected.views):
        np.testing.assert_allclose(actual.references[view], foreign, rtol=1e-3)
        for fitted, wanted in zip(actual.tasks, of_tasks, strict=True):
            part = fitted.views[view]
            np.testing.assert_allclose(part.mean, wanted.mean, rtol=1e-6, atol=1e-6)
            projection = wanted.basis @ wanted.basis.T
            np.testing.assert_allclose(part.basis.T @ part.basis, projection, atol=2e-5)
            np.testing.assert_allclose(part.prototypes, wanted.prototypes, atol=1e-6)
            moments = (wanted.rho_mean, wanted.rho_std), (wanted.aff_mean, wanted.aff_std)
            np.testing.assert_allclose(part[3:], moments, rtol=3e-4, atol=1e-6)
        rlc, pac = expected.corrections(view, probes[view])
        u, q = terms.standardised(view)
        ratio = fdc.log_ratio(*actual.references[view])
        np.testing.assert_allclose(np.tanh(np.polyval(ratio, u)), rlc, atol=3e-4)
        np.testing.assert_allclose(np.tanh(q), pac, atol=3e-4)
    scales = [task[1:] for task in actual.tasks]
    np.testing.assert_allclose(np.transpose(scales), [*map(expected.sigma.get, (0, 1))], rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_components_and_rewritten_heads_equal_float64(kind):
    tasks = streams.stream(7, 4)
    calibrator, expected = streams.fitted(tasks, kind), streams.fitted_reference(tasks, kind)
    probes = streams.probe_inputs(tasks)
    terms = calibrator.terms(*probes)
    for tsf, rlc, pac, *views in itertools.product((True, False), repeat=5):
        scores = terms.fuse(tsf, rlc, pac, *views)
        assert_equal_scores(scores, expected.score(*probes, tsf, rlc, pac, views), 1e-5)
    raw = streams.fitted(tasks, kind, method="raw").score(*probes)
    np.testing.assert_allclose(scores.task_scores, raw.task_scores, rtol=1e-5, atol=1e-5)
    new = [task._replace(weight=3 * task.weight[::-1], bias=task.bias + 1) for task in tasks]
    calibrator.score(*probes)  # Nothing of the heads before is kept.
    calibrator.replace_heads([streams.head_of(task, kind) for task in new])
    rewritten = streams.fitted_reference(new, kind)
    rewritten.views, rewritten.sigma = expected.views, expected.sigma
    assert_equal_scores(calibrator.score(*probes), rewritten.score(*probes), 1e-5)
    expected.nearest = True
    assert_equal_scores(terms.fuse(nearest=True), expected.score(*probes), 1e-5)


@st.composite
def problems(draw):
    """Returns tasks of a width and a rank, and test inputs within the last task's subspace."""
    width = draw(st.sampled_from([1, 2, 3, 8, 16, 40]))  # Each compiles its own programs.
    rank = draw(st.integers(1, width))
    classes = draw(st.tuples(*[st.sampled_from([1, 2, 4])] * 3))
    samples = draw(st.tuples(*[st.sampled_from([4, 9, 70])] * 3))
    seed = draw(st.integers(0, 2**32 - 1))
    same_subspace = draw(st.booleans())
    rng = np.random.default_rng(seed)

    def projected(view):
        return (view @ basis @ basis.T).astype(np.float32)

    tasks = []
    for task in streams.stream(seed, 3, width, width, classes, samples):
        if not (tasks and same_subspace):
            basis = np.linalg.qr(rng.normal(size=(width, width)))[0][:, :rank]
        tasks += streams.mapped([task], projected, projected)
        for view in (tasks[-1].adapted, tasks[-1].pretrained):
            unit = reference.normalise(view.astype(float))
            means = [unit[task.rows == row].mean(axis=0) for row in range(len(task.weight))]
            # Float32 cannot tell a mean of unit features that is nearly zero from zero.
            assume(np.linalg.norm(means, axis=1).min() > 1e-2)
    return tasks, [*map(projected, streams.probe_inputs(tasks))]


@pytest.mark.ci
@examples(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[*HealthCheck])
@given(problems(), st.sampled_from(KINDS), st.floats(0.05, 1.0), st.floats(0.0, 1.0))
def test_any_stream_equals_float64(problem, kind, eta, gamma):
    tasks, probes = problem
    options = {"retained_energy": eta, "attenuation": gamma}
    expected = streams.fitted_reference(tasks, kind, **options)
    scores, _ = expected.score(*probes)
    actual = streams.fitted(tasks, kind, **options).score(*probes)
    error = np.abs(actual.task_scores - scores) - 1e-6 * np.abs(scores)
    error /= np.maximum(expected.sigma[True], scores.std())
    # With eta = 1 the rounding of features themselves decides on directions outside a subspace.
    assert error.max() < (1e-4 if eta < 1.0 else 1e-3)


def test_one_view_equals_float64_and_a_view_without_weight():
    tasks = streams.stream(10, 3)
    single = streams.fitted(tasks, dual=False)
    adapted, _ = streams.probe_inputs(tasks)
    expected = streams.fitted_reference(tasks, dual=False).score(adapted)
    components = single.components(adapted)
    assert components.keys() == {name for name in settings.COMPONENTS if "view" not in name}
    assert_equal_scores(components["full"], expected, 1e-5)
    unweighted = streams.fitted(tasks, pretrained_view_weight=0.0).components(adapted)["full"]
    np.testing.assert_array_equal(unweighted.task_scores, components["full"].task_scores)
    np.testing.assert_array_equal(unweighted.label, components["full"].label)


def test_the_foreign_reference_keeps_its_floors():
    # With one task p_F is p_O, which leaves RLC at zero.
    assert fdc.fit_foreign([]) == (0.0, 1.0, 1.0)
    assert fdc.fit_foreign([np.full((1, 4), 2.0)]).variance == 1e-6
    # p_F equal to p_O: every ratio is zero, and the scale keeps its floor.
    assert fdc.fit_foreign([np.array([[-1.0, 1.0]])]) == (0.0, 1.0, 1e-6)


def test_storage_bytes_follow_the_paper():
    tasks = streams.stream(22, 3)
    dual = streams.fitted(tasks)
    adapted, pretrained = (sum(view) for view in ranks(dual))
    rows = 3 + sum(len(task.bias) for task in tasks)
    scalars = 4 * 3 + 3
    numbers = 16 * (adapted + rows) + 12 * (pretrained + rows) + 2 * 3 + 2 * scalars
    assert dual.storage_bytes == 4 * numbers
    frozen = streams.fitted(tasks, adapted_view_weight=0.0)
    numbers = 16 * adapted + 12 * (pretrained + rows) + 2 * 3 + scalars
    assert frozen.storage_bytes == 4 * numbers


def test_released_residuals_end_fitting_and_nothing_else():
    tasks = streams.stream(25, 3)
    calibrator = streams.fitted(tasks[:2])
    calibrator.finalize(release=True)
    calibrator.finalize()
    streams.same_scores(calibrator, streams.fitted(tasks[:2]), streams.probe_inputs(tasks))
    with input_error("residuals were released: no further task"):
        streams.fit(calibrator, tasks[2:])
