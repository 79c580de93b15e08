"""FDC against a float64 reading of Algorithm 1 (`reference`), and its edge cases."""

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from fdc_jax import calibration
from fdc_jax.calibration import fdc, inputs, settings
from fdc_jax.errors import InputError
from tests.calibration import reference, streams

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

    return [task for given in tasks for task in streams.mapped([given], moved, moved)]


def tiny(view):
    return np.float32(2e-7) * view


def one_class(task):
    return task._replace(rows=0 * task.rows, weight=task.weight[:1], bias=task.bias[:1])


PLAIN, SHORT = streams.stream(20, 2)
ZERO = np.concatenate([SHORT.adapted[:-1], np.zeros_like(SHORT.adapted[:1])])
ONE_IMAGE = [PLAIN._replace(first=10), one_class(streams.chosen(SHORT, [0]))]
CASES = {
    "n < d": (streams.stream(3, 4, width=128, pretrained_width=96), {}),
    "K = 3, other weights": (
        streams.stream(8, 3, classes=(3, 5, 4)),
        {"neighbours": 3, "rlc_weight": 0.7, "pac_weight": 1.3} | WEIGHTS,
    ),
    "gamma 0, eta 1": (streams.stream(8, 3), {"attenuation": 0.0, "retained_energy": 1.0}),
    "gamma 1, eta 0.95": (streams.stream(8, 3), {"attenuation": 1.0, "retained_energy": 0.95}),
    "one task": (streams.stream(8, 1), {}),
    "20 unequal tasks": (streams.stream(8, 20, classes=(2, 9, 4), samples=(20, 200, 33)), {}),
    "many classes": (
        streams.stream(8, 2, classes=(300, 3), samples=(900, 50)),
        {"neighbours": 3},
    ),
    "means 100 spreads apart": (apart(streams.stream(3, 5)), {}),
    "tasks of one class": (streams.stream(7, 5, classes=(1,), samples=(2, 30, 200)), {}),
    "one image per class": ([PLAIN, streams.chosen(SHORT, np.arange(4))], {}),
    "one image": (ONE_IMAGE, {}),
    "one image, cosine heads": (ONE_IMAGE, {"kind": "cosine"}),
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
def test_every_combination_of_components_equals_float64(kind):
    tasks = streams.stream(7, 4)
    expected = streams.fitted_reference(tasks, kind)
    adapted, pretrained = streams.probe_inputs(tasks)
    terms = streams.fitted(tasks, kind).terms(adapted, pretrained)
    for tsf, rlc, pac, *views in itertools.product((True, False), repeat=5):
        scores = terms.fuse(tsf, rlc, pac, *views)
        assert_equal_scores(scores, expected.score(adapted, pretrained, tsf, rlc, pac, views), 1e-5)
    raw = streams.fitted(tasks, kind, method="raw").score(adapted)
    np.testing.assert_allclose(scores.task_scores, raw.task_scores, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(scores.label, raw.label)
    expected.nearest = True
    assert_equal_scores(terms.fuse(nearest=True), expected.score(adapted, pretrained), 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_rewritten_heads_equal_float64(kind):
    tasks = streams.stream(16, 3)
    actual, expected = streams.fitted(tasks, kind), streams.fitted_reference(tasks, kind)
    probes = streams.probe_inputs(tasks)
    actual.score(*probes)  # Nothing of these heads is kept.
    new = [task._replace(weight=3 * task.weight[::-1], bias=task.bias + 1) for task in tasks]
    actual.replace_heads([streams.head_of(task, kind) for task in new])
    expected.heads = [streams.reference_head(streams.head_of(task, kind)) for task in new]
    assert_equal_scores(actual.score(*probes), expected.score(*probes), 1e-5)


@st.composite
def problems(draw):
    """Returns tasks of a width and a rank, and test inputs within the last task's subspace."""
    width = draw(st.integers(1, 40))
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
@examples(max_examples=20, deadline=None, derandomize=True, suppress_health_check=[*HealthCheck])
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


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_one_view_equals_float64_and_a_view_without_weight(kind):
    tasks = streams.stream(10, 3)
    single = streams.fitted(tasks, kind, dual=False)
    expected = streams.fitted_reference(tasks, kind, dual=False)
    adapted, pretrained = streams.probe_inputs(tasks)
    scores = single.score(adapted)
    assert_equal_scores(scores, expected.score(adapted), 1e-5)
    assert single.components(adapted).keys() == {n for n in settings.COMPONENTS if "view" not in n}
    switched = streams.fitted(tasks, kind).terms(adapted, pretrained).fuse(pretrained_view=False)
    weighted = streams.fitted(tasks, kind, pretrained_view_weight=0.0).score(adapted)
    for same in (switched, weighted):
        np.testing.assert_array_equal(same.task_scores, scores.task_scores)


def test_every_increment_scores_like_a_fresh_fit():
    tasks = streams.stream(13, 4)
    probes = streams.probe_inputs(tasks)
    growing = calibration.FDC()
    for count, task in enumerate(tasks, 1):
        streams.same_scores(streams.fit(growing, [task]), streams.fitted(tasks[:count]), probes)
        assert growing.num_tasks == count


def test_the_foreign_reference_keeps_its_floors():
    # With one task p_F is p_O, which leaves RLC at zero.
    assert fdc.fit_foreign([]) == (0.0, 1.0, 1.0)
    assert fdc.fit_foreign([np.full((1, 4), 2.0)]).variance == 1e-6
    # p_F equal to p_O: every ratio is zero, and the scale keeps its floor.
    assert fdc.fit_foreign([np.array([[-1.0, 1.0]])]) == (0.0, 1.0, 1e-6)


def test_labels_are_any_integers_in_any_head_order():
    tasks = streams.stream(17, 2)
    names = [np.array([-5, 900, 12]), np.array([7, 3, 10**12, 1])]
    calibrator = calibration.FDC()
    for task, named in zip(tasks, names, strict=True):
        calibrator.fit_task(task.adapted, named[task.rows], task.head, task.pretrained, named)
    calibrator.finalize()
    probes = streams.probe_inputs(tasks)
    scores, plain = calibrator.score(*probes), streams.fitted(tasks).score(*probes)
    np.testing.assert_array_equal(scores.task_scores, plain.task_scores)
    np.testing.assert_array_equal(scores.label, np.concatenate(names)[plain.label])
    second = scores.label_in_task(np.ones(len(probes[0]), int))
    np.testing.assert_array_equal(second, names[1][plain.local_class[:, 1]])


@pytest.mark.parametrize("neighbours", [1, 2])
def test_a_class_without_samples_is_predicted_by_its_head(neighbours):
    task, other = streams.stream(18, 2)
    kept = streams.chosen(task, task.rows != 1)
    actual = streams.fitted([kept, other], dual=False, neighbours=neighbours)
    expected = streams.fitted_reference([kept, other], dual=False, neighbours=neighbours)
    # Opposite features have negative cosines, which a prototype of zeros would beat.
    for features in (task.adapted, -task.adapted):
        assert_equal_scores(actual.score(features), expected.score(features))
    assert 1 in actual.score(task.adapted).local_class[:, 0]


def test_batches_of_every_size_agree():
    tasks = streams.stream(21, 3)
    calibrator = streams.fitted(tasks)
    views = [np.tile(view, (26, 1)) for view in streams.probe_inputs(tasks, size=10)]
    expected = calibrator.score(*views).task_scores
    for size in (1, 9, 255, 257):
        scores = calibrator.score(*(view[:size] for view in views))
        np.testing.assert_allclose(scores.task_scores, expected[:size], rtol=1e-5, atol=1e-5)


def test_storage_bytes_follow_the_paper():
    tasks = streams.stream(22, 3)
    dual = streams.fitted(tasks)
    classes = sum(len(task.bias) for task in tasks)
    adapted, pretrained = (sum(view) for view in ranks(dual))
    scalars = 2 * 3 + 2 * (4 * 3 + 3)
    numbers = 16 * (adapted + 3 + classes) + 12 * (pretrained + 3 + classes) + scalars
    assert dual.storage_bytes == 4 * numbers
    frozen = streams.fitted(tasks, adapted_view_weight=0.0)
    without = 16 * adapted + 12 * (pretrained + 3 + classes) + 2 * 3 + 4 * 3 + 3
    assert frozen.storage_bytes == 4 * without
    # A single task has no foreign reference.
    alone = streams.fitted(tasks[:1], dual=False)
    rows = len(alone.tasks[0].views[0].basis) + 1 + len(tasks[0].bias)
    assert alone.storage_bytes == 4 * (16 * rows + 2 + 4)


def test_class_scores_are_task_scores_less_gaps_of_logits():
    tasks = streams.stream(24, 3)
    calibrator, expected = streams.fitted(tasks), streams.fitted_reference(tasks)
    probes = streams.probe_inputs(tasks)
    scores = calibrator.score(*probes).task_scores
    by_class = []
    for task in range(3):
        logits = expected.logits(task, probes[0].astype(np.float64), True)
        by_class.append(scores[:, [task]] + logits - logits.max(axis=1, keepdims=True))
    actual = calibrator.class_scores(*probes)
    np.testing.assert_allclose(actual, np.concatenate(by_class, axis=1), rtol=1e-5, atol=1e-4)


def test_released_residuals_end_fitting_and_nothing_else():
    tasks = streams.stream(25, 3)
    probes, calibrator = streams.probe_inputs(tasks), streams.fitted(tasks[:2])
    calibrator.finalize(release=True)
    calibrator.finalize()
    streams.same_scores(calibrator, streams.fitted(tasks[:2]), probes)
    with pytest.raises(InputError, match="residuals were released: no further task"):
        streams.fit(calibrator, tasks[2:])


def test_a_head_without_bias_has_biases_of_zero():
    (task,) = streams.stream(3, 1)
    zero = np.zeros(3, np.float32)
    for kind in ("linear", "normalised_linear"):
        actual, expected = (
            streams.fitted([task._replace(bias=bias)], kind, dual=False) for bias in (0.0, zero)
        )
        streams.same_scores(actual, expected, [task.adapted])
    np.testing.assert_array_equal(actual.heads[0].bias, zero)
