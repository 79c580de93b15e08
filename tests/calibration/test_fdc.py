"""FDC against the float64 reference, and its edge cases."""

import itertools

import numpy as np
import pytest

from fdc_jax import calibration, heads
from fdc_jax.calibration import fdc, inputs, settings
from fdc_jax.errors import InputError
from tests.calibration import streams

TOLERANCE = 1e-4
KINDS = ("linear", "normalised_linear", "cosine", "nearest_mean")


def assert_equal_scores(found, expected, tolerance=TOLERANCE):
    scores, rows = expected
    assert streams.relative_error(found.task_scores, scores) < tolerance
    np.testing.assert_array_equal(found.local_class, rows)
    # The choice of the task agrees wherever the two best scores are not tied in float32.
    best = np.sort(scores, axis=1)
    clear = np.full(len(scores), True)
    if scores.shape[1] > 1:
        clear = best[:, -1] - best[:, -2] > 1e-3 * scores.std()
    np.testing.assert_array_equal(found.task[clear], scores.argmax(axis=1)[clear])


def ranks(calibrator):
    return [[len(task.views[view].basis) for task in calibrator.tasks] for view in range(2)]


def reference_ranks(expected):
    return [[task.basis.shape[1] for task in view] for view, _ in expected.views]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("offset", [0.0, 30.0])
def test_statistics_and_scores_equal_the_reference(kind, offset):
    # Of the third task there is more than a block of rows.
    stream = streams.stream(3, 5, offset=offset, samples=(60, 45, inputs.BLOCK_ROWS + 88))
    found = streams.fitted(stream, kind)
    expected = streams.fitted_reference(stream, kind)
    assert ranks(found) == reference_ranks(expected)
    for view, (tasks, foreign) in enumerate(expected.views):
        np.testing.assert_allclose(found.references[view], foreign, rtol=1e-3)
        for task, wanted in zip(found.tasks, tasks, strict=True):
            own = task.views[view]
            np.testing.assert_allclose(own.mean, wanted.mean, rtol=1e-6, atol=1e-6)
            np.testing.assert_allclose(
                own.basis.T @ own.basis, wanted.basis @ wanted.basis.T, atol=2e-5
            )
            np.testing.assert_allclose(own.prototypes, wanted.prototypes, atol=1e-6)
            moments = (wanted.rho_mean, wanted.rho_std), (wanted.aff_mean, wanted.aff_std)
            np.testing.assert_allclose(own[3:], moments, rtol=3e-4, atol=1e-6)
    adapted, pretrained = streams.probe_inputs(stream)
    terms = found.terms(adapted, pretrained)
    for view, (mean, variance, tau) in enumerate(found.references):
        rlc, pac = expected.corrections(view, (adapted, pretrained)[view])
        u, q = terms.standardised(view)
        evidence = np.tanh(np.polyval(fdc.log_ratio(mean, variance, tau), u))
        np.testing.assert_allclose(evidence, rlc, atol=3e-4)
        np.testing.assert_allclose(np.tanh(q), pac, atol=3e-4)
    assert_equal_scores(terms.fuse(), expected.score(adapted, pretrained))


def test_affinities_may_be_standardised_over_the_tasks_of_an_input():
    stream = streams.stream(7, 3)
    probe = streams.probe_inputs(stream)
    scores = streams.fitted(stream).terms(*probe).fuse(nearest=True)
    assert_equal_scores(scores, streams.fitted_reference(stream, nearest=True).score(*probe))


@pytest.mark.parametrize("kind", KINDS)
def test_every_combination_of_components(kind):
    stream = streams.stream(7, 4)
    found, expected = streams.fitted(stream, kind), streams.fitted_reference(stream, kind)
    adapted, pretrained = streams.probe_inputs(stream)
    terms = found.terms(adapted, pretrained)
    scales = np.array([task[1:] for task in found.tasks])
    np.testing.assert_allclose(scales.T, [expected.sigma[k] for k in (False, True)], rtol=1e-4)
    for tsf, rlc, pac, first, second in itertools.product((True, False), repeat=5):
        scores = terms.fuse(tsf, rlc, pac, first, second)
        assert_equal_scores(
            scores, expected.score(adapted, pretrained, tsf, rlc, pac, (first, second))
        )
    # All components off: the heads' own choice.
    logits = [expected.heads[task].logits(adapted.astype(np.float64)) for task in range(4)]
    np.testing.assert_array_equal(scores.label, np.concatenate(logits, axis=1).argmax(axis=1))
    raw = streams.fitted(stream, kind, method="raw").score(adapted)
    np.testing.assert_allclose(scores.task_scores, raw.task_scores, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_adapted_view_alone(kind):
    stream = streams.stream(10, 3)
    found = streams.fitted(stream, kind, dual=False)
    expected = streams.fitted_reference(stream, kind, dual=False)
    adapted, pretrained = streams.probe_inputs(stream)
    assert_equal_scores(found.score(adapted), expected.score(adapted))
    assert found.components(adapted).keys() == {n for n in settings.COMPONENTS if "view" not in n}
    # The same as both views with the pretrained one switched off, by flag or by weight.
    dual = streams.fitted(stream, kind).terms(adapted, pretrained).fuse(pretrained_view=False)
    np.testing.assert_array_equal(dual.task_scores, found.score(adapted).task_scores)
    weighted = streams.fitted(stream, kind, pretrained_view_weight=0.0)
    np.testing.assert_array_equal(weighted.score(adapted).task_scores, dual.task_scores)


def test_every_increment_scores_like_a_fresh_fit_and_the_reference():
    stream = streams.stream(13, 4)
    inputs = streams.probe_inputs(stream)
    growing = calibration.FDC()
    for count, task in enumerate(stream, 1):
        scores = streams.fit(growing, [task]).score(*inputs)
        growing.finalize()
        fresh = streams.fitted(stream[:count]).score(*inputs)
        np.testing.assert_array_equal(scores.task_scores, fresh.task_scores)
        assert_equal_scores(scores, streams.fitted_reference(stream[:count]).score(*inputs))
        assert growing.num_tasks == count == scores.task_scores.shape[1]


def test_batches_of_nearby_sizes_share_programs():
    found = streams.fitted(streams.stream(5, 9, classes=(3,), samples=(40,)))
    adapted, pretrained = streams.probe_inputs(streams.stream(5, 9), size=64)
    kernels = fdc.measure, fdc.fuse
    for small, large in ((33, 64), (1100, 2000)):
        sizes = [kernel._cache_size() for kernel in kernels]
        for size in (small, (small + large) // 2, large):
            rows = np.arange(size) % 64
            found.score(adapted[rows], pretrained[rows])
        assert all(k._cache_size() <= n + 2 for k, n in zip(kernels, sizes, strict=True))
        sizes = [kernel._cache_size() for kernel in kernels]
        found.score(adapted[rows[:-3]], pretrained[rows[:-3]])
        assert sizes == [kernel._cache_size() for kernel in kernels]


def test_labels_may_be_any_integers_in_any_head_order():
    stream = streams.stream(17, 2)
    renamed = [np.array([-5, 900, 12]), np.array([7, 3, 10**12, 1])]
    found = calibration.FDC()
    for task, names in zip(stream, renamed, strict=True):
        head = streams.head_of(task, "linear")
        found.fit_task(task.adapted, names[task.rows], head, task.pretrained, names)
    found.finalize()
    inputs = streams.probe_inputs(stream)
    scores, plain = found.score(*inputs), streams.fitted(stream).score(*inputs)
    np.testing.assert_array_equal(scores.task_scores, plain.task_scores)
    np.testing.assert_array_equal(scores.label, np.concatenate(renamed)[plain.label])
    second = scores.label_in_task(np.ones(len(inputs[0]), int))
    np.testing.assert_array_equal(second, renamed[1][plain.local_class[:, 1]])


@pytest.mark.parametrize("neighbours", [1, 2])
def test_a_class_without_samples_is_predicted_but_has_no_prototype(neighbours):
    task, other = streams.stream(18, 2)
    keep = task.rows != 1
    found = calibration.FDC(neighbours=neighbours)
    head = heads.LinearHead(task.weight, task.bias)
    found.fit_task(task.adapted[keep], task.labels[keep], head, classes=[0, 1, 2])
    found.fit_task(other.adapted, other.labels, heads.LinearHead(other.weight, other.bias))
    found.finalize()
    kept = task._replace(adapted=task.adapted[keep], rows=task.rows[keep])
    expected = streams.fitted_reference([kept, other], dual=False, neighbours=neighbours)
    # Opposite features have negative cosines, which a prototype of zeros would beat.
    for features in (task.adapted, -task.adapted):
        assert_equal_scores(found.score(features), expected.score(features))
    assert 1 in found.score(task.adapted).local_class[:, 0]


def edge_streams():
    plain, short, third = streams.stream(20, 3)
    first = plain._replace(first=10)

    def taken(rows, **changed):
        """The second task with these of its samples."""
        views = {"adapted": short.adapted[rows], "pretrained": short.pretrained[rows]}
        return short._replace(**views, rows=short.rows[rows], **changed)

    one = {"weight": short.weight[:1], "bias": short.bias[:1]}
    one_class = third._replace(rows=0 * third.rows, weight=third.weight[:1], bias=third.bias[:1])
    zero = np.concatenate([short.adapted[:-1], np.zeros_like(short.adapted[:1])])
    return {
        "one class": [first, one_class],
        "one image per class": [plain, taken(np.arange(4))],
        "constant features": [taken(np.zeros(45, int))._replace(rows=short.rows), plain],
        "one sample": [first, taken(np.arange(1), **one)],
        "a zero feature": [plain, short._replace(adapted=zero)],
    }


@pytest.mark.parametrize("case", list(edge_streams()))
@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_edge_cases_equal_the_reference(case, kind):
    stream = edge_streams()[case]
    found, expected = streams.fitted(stream, kind), streams.fitted_reference(stream, kind)
    assert ranks(found) == reference_ranks(expected)
    adapted, pretrained = streams.probe_inputs(stream)
    adapted[0] = pretrained[0] = 0.0
    scores = found.score(adapted, pretrained)
    assert np.isfinite(scores.task_scores).all()
    assert_equal_scores(scores, expected.score(adapted, pretrained))


@pytest.mark.parametrize("scale", [1e-5, 2e-7])
def test_tiny_features_meet_the_energy_floor_as_in_the_reference(scale):
    stream = [
        task._replace(
            adapted=np.float32(scale) * task.adapted,
            pretrained=np.float32(scale) * task.pretrained,
            weight=task.weight / np.float32(scale),
        )
        for task in streams.stream(23, 3)
    ]
    inputs = [view * np.float32(scale) for view in streams.probe_inputs(streams.stream(23, 3))]
    found, expected = streams.fitted(stream), streams.fitted_reference(stream)
    assert_equal_scores(found.score(*inputs), expected.score(*inputs))


def test_batches_of_every_size_agree():
    stream = streams.stream(21, 3)
    found = streams.fitted(stream)
    adapted, pretrained = streams.probe_inputs(stream, size=10)
    long = np.tile(adapted, (26, 1)), np.tile(pretrained, (26, 1))
    expected = found.score(*long).task_scores
    for size in (1, 8, 9, 255, 256, 257):
        scores = found.score(long[0][:size], long[1][:size])
        np.testing.assert_allclose(scores.task_scores, expected[:size], rtol=1e-5, atol=1e-5)


def test_storage_bytes_by_the_paper():
    stream = streams.stream(22, 3)
    dual = streams.fitted(stream)
    classes = sum(len(task.bias) for task in stream)
    adapted, pretrained = (sum(view) for view in ranks(dual))
    scalars = 2 * 3 + 2 * (4 * 3 + 3)
    numbers = 16 * (adapted + 3 + classes) + 12 * (pretrained + 3 + classes) + scalars
    assert dual.storage_bytes == 4 * numbers
    single = streams.fitted(stream, dual=False)
    assert single.storage_bytes == 4 * (16 * (adapted + 3 + classes) + 2 * 3 + 4 * 3 + 3)
    frozen = streams.fitted(stream, adapted_view_weight=0.0)
    without = 16 * adapted + 12 * (pretrained + 3 + classes) + 2 * 3 + 4 * 3 + 3
    assert frozen.storage_bytes == 4 * without
    # A single task has no foreign reference.
    alone = streams.fitted(stream[:1], dual=False)
    rows = len(alone.tasks[0].views[0].basis) + 1 + len(stream[0].bias)
    assert alone.storage_bytes == 4 * (16 * rows + 2 + 4)


def test_class_scores_rank_a_tasks_classes_like_its_filtered_logits():
    stream = streams.stream(24, 3)
    found, expected = streams.fitted(stream), streams.fitted_reference(stream)
    adapted, pretrained = streams.probe_inputs(stream)
    scores, tasks = found.class_scores(adapted, pretrained), found.score(adapted, pretrained)
    np.testing.assert_array_equal(np.concatenate(found.classes)[scores.argmax(axis=1)], tasks.label)
    ends = np.cumsum([len(each) for each in found.classes])[:-1]
    for task, part in enumerate(np.split(scores, ends, axis=1)):
        np.testing.assert_allclose(part.max(axis=1), tasks.task_scores[:, task], rtol=1e-5)
        logits = expected.logits(task, adapted.astype(np.float64), True)
        gaps = logits - logits.max(axis=1, keepdims=True)
        np.testing.assert_allclose(part - part.max(axis=1, keepdims=True), gaps, atol=1e-4)


def test_released_residuals_end_fitting_and_nothing_else():
    stream = streams.stream(25, 3)
    inputs, found = streams.probe_inputs(stream), streams.fitted(stream[:2])
    before = found.score(*inputs)
    found.finalize(release=True)
    found.finalize()
    np.testing.assert_array_equal(found.score(*inputs).task_scores, before.task_scores)
    with pytest.raises(InputError, match="residuals were released: no further task"):
        streams.fit(found, stream[2:])
