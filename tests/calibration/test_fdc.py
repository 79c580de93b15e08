"""FDC against the float64 reference, its edge cases, and its messages."""

import itertools

import numpy as np
import pytest

from fdc_jax import heads
from fdc_jax.calibration import batching, fdc
from fdc_jax.errors import InputError
from tests.calibration import reference, streams

TOLERANCE = 1e-4
KINDS = ("linear", "normalised_linear", "cosine", "nearest_mean", "function")


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


@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("offset", [0.0, 30.0])
def test_statistics_and_scores_equal_the_reference(kind, offset, device):
    stream = streams.stream(3, 5, offset=offset)
    found = streams.fitted(stream, kind, device=device)
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
            moments = wanted.rho_mean, wanted.rho_std, 1 - wanted.aff_mean, wanted.aff_std
            np.testing.assert_allclose(own[4:], moments, rtol=1e-4, atol=1e-6)
    adapted, pretrained = streams.probe_inputs(stream)
    terms = found.terms(adapted, pretrained)
    for view, evidence in enumerate((terms.adapted, terms.pretrained)):
        rlc, pac = expected.corrections(view, (adapted, pretrained)[view])
        np.testing.assert_allclose(evidence.rlc, rlc, atol=3e-4)
        np.testing.assert_allclose(evidence.pac, pac, atol=3e-4)
    assert_equal_scores(terms.fuse(), expected.score(adapted, pretrained))


@pytest.mark.parametrize("tasks", [1, 2])
def test_few_tasks_equal_the_reference(tasks):
    stream = streams.stream(tasks, tasks)
    inputs = streams.probe_inputs(stream)
    found, expected = streams.fitted(stream), streams.fitted_reference(stream)
    assert_equal_scores(found.score(*inputs), expected.score(*inputs))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("affinity_reference", "offset"), [("own", 30.0), ("nearest", 0.0)])
def test_numpy_and_the_device_score_alike(kind, affinity_reference, offset):
    stream = streams.stream(6, 5, offset=offset)
    weights = {"rlc_weight": 0.6, "pretrained_view_weight": 1.7}
    choices = {"neighbours": 2, "affinity_reference": affinity_reference}
    found = streams.fitted(stream, kind, device=True, **weights, **choices)
    adapted, pretrained = streams.probe_inputs(stream)
    adapted[0] = pretrained[0] = 0.0
    plain = found.to_numpy().terms(adapted, pretrained)
    terms = found.terms(adapted, pretrained)
    for flags in itertools.product((True, False), repeat=5):
        scores, expected = plain.fuse(*flags), terms.fuse(*flags)
        assert streams.relative_error(scores.task_scores, expected.task_scores) < 2e-5
        np.testing.assert_array_equal(scores.local_class, expected.local_class)
        np.testing.assert_array_equal(scores.label, expected.label)


@pytest.mark.parametrize("kind", KINDS)
def test_every_combination_of_components(kind):
    stream = streams.stream(7, 4)
    found, expected = streams.fitted(stream, kind), streams.fitted_reference(stream, kind)
    adapted, pretrained = streams.probe_inputs(stream)
    terms = found.terms(adapted, pretrained)
    np.testing.assert_allclose(terms.raw_scale, expected.sigma[False], rtol=1e-4)
    np.testing.assert_allclose(terms.filtered_scale, expected.sigma[True], rtol=1e-4)
    for tsf, rlc, pac, first, second in itertools.product((True, False), repeat=5):
        scores = terms.fuse(tsf, rlc, pac, first, second)
        assert_equal_scores(
            scores, expected.score(adapted, pretrained, tsf, rlc, pac, (first, second))
        )


@pytest.mark.parametrize("eta", [0.5, 0.95])
@pytest.mark.parametrize("gamma", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_settings_equal_the_reference(kind, eta, gamma):
    stream = streams.stream(8, 3)
    found = streams.fitted(
        stream,
        kind,
        retained_energy=eta,
        attenuation=gamma,
        rlc_weight=0.7,
        pac_weight=1.3,
        adapted_view_weight=0.4,
        pretrained_view_weight=2.0,
    )
    expected = streams.fitted_reference(stream, kind, eta=eta, gamma=gamma)
    inputs = streams.probe_inputs(stream)
    assert_equal_scores(
        found.score(*inputs), expected.score(*inputs, alpha=0.7, beta=1.3, weights=(0.4, 2.0))
    )


@pytest.mark.parametrize("neighbours", [1, 2, 3])
@pytest.mark.parametrize("affinity_reference", ["own", "nearest"])
def test_neighbours_and_affinity_references(neighbours, affinity_reference):
    stream = streams.stream(9, 3, classes=(3, 5, 4))
    found = streams.fitted(stream, neighbours=neighbours, affinity_reference=affinity_reference)
    expected = streams.fitted_reference(
        stream, neighbours=neighbours, nearest=affinity_reference == "nearest"
    )
    inputs = streams.probe_inputs(stream)
    assert_equal_scores(found.score(*inputs), expected.score(*inputs))


@pytest.mark.parametrize("kind", ["linear", "function"])
def test_adapted_view_alone(kind):
    stream = streams.stream(10, 3)
    found = streams.fitted(stream, kind, dual=False)
    expected = streams.fitted_reference(stream, kind, dual=False)
    adapted, pretrained = streams.probe_inputs(stream)
    assert_equal_scores(found.score(adapted), expected.score(adapted))
    # The same as both views with the pretrained one switched off, by flag or by weight.
    dual = streams.fitted(stream, kind).terms(adapted, pretrained).fuse(pretrained_view=False)
    np.testing.assert_array_equal(dual.task_scores, found.score(adapted).task_scores)
    weighted = streams.fitted(stream, kind, pretrained_view_weight=0.0)
    np.testing.assert_array_equal(weighted.score(adapted).task_scores, dual.task_scores)


def test_pretrained_view_alone_keeps_the_adapted_heads():
    stream = streams.stream(11, 3)
    adapted, pretrained = streams.probe_inputs(stream)
    expected = streams.fitted_reference(stream).score(adapted, pretrained, views=(False, True))
    assert_equal_scores(
        streams.fitted(stream).terms(adapted, pretrained).fuse(adapted_view=False), expected
    )
    weighted = streams.fitted(stream, adapted_view_weight=0.0)
    assert_equal_scores(weighted.score(adapted, pretrained), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_everything_off_is_exactly_raw(kind):
    stream = streams.stream(12, 3)
    found = streams.fitted(stream, kind)
    adapted, pretrained = streams.probe_inputs(stream)
    terms = found.terms(adapted, pretrained)
    off = terms.fuse(False, False, False, False, False)
    raw = found.raw(adapted, pretrained)
    np.testing.assert_array_equal(off.task_scores, raw.task_scores)
    np.testing.assert_array_equal(off.label, raw.label)
    logits = [np.asarray(streams.head_of(task, kind).logits(adapted)) for task in stream]
    expected = np.stack([each.max(axis=1) for each in logits], axis=1)
    np.testing.assert_allclose(raw.task_scores, expected, rtol=1e-5, atol=1e-5)
    labels = np.concatenate([task.first + np.arange(len(task.bias)) for task in stream])
    np.testing.assert_array_equal(raw.label, labels[np.concatenate(logits, axis=1).argmax(axis=1)])


def test_every_increment_scores_like_a_fresh_fit():
    stream = streams.stream(13, 5)
    inputs = streams.probe_inputs(stream)
    growing = streams.new()
    for count, task in enumerate(stream, 1):
        growing.fit_task(
            task.adapted, task.labels, streams.head_of(task, "linear"), task.pretrained
        )
        growing.finalize()
        growing.finalize()
        scores = growing.score(*inputs)
        fresh = streams.fitted(stream[:count]).score(*inputs)
        np.testing.assert_array_equal(scores.task_scores, fresh.task_scores)
        assert growing.num_tasks == count == scores.task_scores.shape[1]


def test_many_earlier_tasks_cross_the_group_boundary():
    stream = streams.stream(14, 35, width=6, pretrained_width=5, samples=(12, 9, 15))
    expected, inputs = streams.fitted_reference(stream), streams.probe_inputs(stream)
    for device in (False, True):
        found = streams.fitted(stream, device=device)
        assert_equal_scores(found.score(*inputs), expected.score(*inputs))


def test_tasks_in_groups_score_like_tasks_at_once(monkeypatch):
    stream = streams.stream(14, 5)
    found, inputs = streams.fitted(stream, device=True), streams.probe_inputs(stream)
    expected = found.score(*inputs).task_scores
    monkeypatch.setattr(batching, "TASK_GROUP", 2)
    batching.compiled.cache_clear()
    np.testing.assert_allclose(found.score(*inputs).task_scores, expected, atol=1e-5)
    batching.compiled.cache_clear()


def test_scoring_compiles_once_per_shape():
    # Nine and ten tasks are padded to ten, batches to powers of two.
    stream = streams.stream(5, 10, classes=(3,), samples=(40,))
    kernel = batching.compiled(fdc.score_batch, ("normalised", "neighbours", "nearest", "all_rows"))
    found, inputs = streams.new(device=True), streams.probe_inputs(stream, size=64)
    for place, task in enumerate(stream):
        found.fit_task(task.adapted, task.labels, streams.head_of(task, "linear"), task.pretrained)
        found.finalize()
        if place == 8:
            found.score(*inputs)
            before = kernel._cache_size()
    for size in (33, 40, 64):
        found.score(*(each[:size] for each in inputs))
    assert kernel._cache_size() == before > 0


def test_released_residuals_leave_scores_as_they_are():
    stream = streams.stream(15, 3)
    inputs = streams.probe_inputs(stream)
    found = streams.fitted(stream)
    before = found.score(*inputs).task_scores
    found.finalize(release=True)
    found.finalize()
    np.testing.assert_array_equal(found.score(*inputs).task_scores, before)
    with pytest.raises(InputError, match="released"):
        found.fit_task(stream[0].adapted, stream[0].labels, streams.head_of(stream[0], "linear"))


@pytest.mark.parametrize("kind", KINDS)
def test_replaced_heads_predict_with_the_old_scales(kind):
    stream = streams.stream(16, 3)
    rewritten = [task._replace(weight=3 * task.weight[::-1], bias=task.bias + 1) for task in stream]
    adapted, pretrained = streams.probe_inputs(stream)
    found, expected = streams.fitted(stream, kind), streams.fitted_reference(stream, kind)
    found.score(adapted, pretrained)
    found.replace_heads([streams.head_of(task, kind) for task in rewritten])
    expected.heads = [streams.reference_head(task, kind) for task in rewritten]
    assert_equal_scores(found.score(adapted, pretrained), expected.score(adapted, pretrained))


def test_labels_may_be_any_integers_in_any_head_order():
    stream = streams.stream(17, 2)
    renamed = [np.array([-5, 900, 12]), np.array([7, 3, 10**12, 1])]
    found = streams.new()
    for task, names in zip(stream, renamed, strict=True):
        found.fit_task(
            task.adapted,
            names[task.rows],
            streams.head_of(task, "linear"),
            task.pretrained,
            classes=names,
        )
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
    found = streams.new(neighbours=neighbours)
    found.fit_task(
        task.adapted[keep],
        task.labels[keep],
        heads.LinearHead(task.weight, task.bias),
        classes=[0, 1, 2],
    )
    found.fit_task(other.adapted, other.labels, heads.LinearHead(other.weight, other.bias))
    found.finalize()
    expected = reference.Reference(
        [
            (task.adapted[keep], task.rows[keep], streams.reference_head(task, "linear"), None),
            (other.adapted, other.rows, streams.reference_head(other, "linear"), None),
        ],
        neighbours=neighbours,
    )
    # Opposite features have negative cosines, which a prototype of zeros would beat.
    for features in (task.adapted, -task.adapted):
        assert_equal_scores(found.score(features), expected.score(features))
    assert 1 in found.score(task.adapted).local_class[:, 0]


def edge_streams():
    plain = streams.stream(20, 3)
    one_class = plain[2]._replace(
        rows=np.zeros(80, int), weight=plain[2].weight[:1], bias=plain[2].bias[:1]
    )
    short = plain[1]
    few = short._replace(
        adapted=short.adapted[:4], pretrained=short.pretrained[:4], rows=np.arange(4)
    )
    constant = short._replace(
        adapted=np.tile(short.adapted[:1], (45, 1)),
        pretrained=np.tile(short.pretrained[:1], (45, 1)),
    )
    single = few._replace(
        adapted=few.adapted[:1],
        pretrained=few.pretrained[:1],
        rows=np.zeros(1, int),
        weight=few.weight[:1],
        bias=few.bias[:1],
    )
    zero = short._replace(
        adapted=np.concatenate([short.adapted[:-1], np.zeros_like(short.adapted[:1])])
    )
    return {
        "one class": [plain[0]._replace(first=10), one_class._replace(first=0)],
        "one image per class": [plain[0], few],
        "constant features": [constant._replace(first=10), plain[0]],
        "one sample": [plain[0]._replace(first=10), single._replace(first=0)],
        "a zero feature": [plain[0], zero],
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


def test_scales_keep_their_floors():
    found = streams.fitted(edge_streams()["one sample"])
    single = found.tasks[1]
    assert single.raw_scale == single.filtered_scale == 1e-6
    assert [view.residual_std for view in single.views] == [1e-6, 1e-6]
    assert [view.distance_std for view in single.views] == [1e-6, 1e-6]


def test_empty_batches_and_batches_of_every_size_agree():
    stream = streams.stream(21, 3)
    found = streams.fitted(stream, device=True)
    adapted, pretrained = streams.probe_inputs(stream, size=10)
    empty = found.score(adapted[:0], pretrained[:0])
    assert empty.task_scores.shape == (0, 3) and empty.label.shape == (0,)
    long = np.tile(adapted, (60, 1)), np.tile(pretrained, (60, 1))
    expected = found.score(*long).task_scores
    for size in (1, 7, 8, 9, 255, 256, 257, 513):
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
