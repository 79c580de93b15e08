"""Relations between scores that must hold for any features, heads and labels."""

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.calibration import streams

# Shapes are fixed and content varies, so that few examples compile anew.
few = settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
seeds = st.integers(0, 2**32 - 1)
scales = st.floats(0.05, 20.0)


def same(found, expected, tolerance=1e-4):
    assert streams.relative_error(found.task_scores, expected.task_scores) < tolerance
    np.testing.assert_array_equal(found.local_class, expected.local_class)


@few
@given(seeds)
def test_rotating_features_and_weights_changes_nothing(seed):
    rng = np.random.default_rng(seed)
    stream = streams.stream(seed)
    first, second = (np.linalg.qr(rng.normal(size=(size, size)))[0] for size in (16, 12))
    rotated = streams.mapped(
        stream, lambda h: h @ first.T, lambda h: h @ second.T, lambda w: w @ first.T
    )
    adapted, pretrained = streams.probe_inputs(stream)
    same(
        streams.fitted(rotated).score(adapted @ first.T, pretrained @ second.T),
        streams.fitted(stream).score(adapted, pretrained),
    )


@few
@given(seeds, scales)
def test_scores_scale_with_the_heads(seed, scale):
    stream = streams.stream(seed)
    scaled = [t._replace(weight=scale * t.weight, bias=scale * t.bias) for t in stream]
    inputs = streams.probe_inputs(stream)
    found, expected = streams.fitted(scaled).score(*inputs), streams.fitted(stream).score(*inputs)
    np.testing.assert_allclose(
        found.task_scores, np.float32(scale) * expected.task_scores, rtol=1e-4, atol=1e-4 * scale
    )
    np.testing.assert_array_equal(found.label, expected.label)


@few
@given(seeds, scales)
def test_the_unit_of_features_does_not_matter(seed, scale):
    stream = streams.stream(seed)
    scaled = streams.mapped(stream, lambda h: scale * h, lambda h: scale * h, lambda w: w / scale)
    adapted, pretrained = streams.probe_inputs(stream)
    same(
        streams.fitted(scaled).score(scale * adapted, scale * pretrained),
        streams.fitted(stream).score(adapted, pretrained),
    )


@few
@given(seeds)
def test_class_order_within_a_task_does_not_matter(seed):
    rng = np.random.default_rng(seed)
    stream = streams.stream(seed)
    orders = [rng.permutation(len(task.bias)) for task in stream]
    # Row order[i] of the old head becomes row i; the old row of a sample moves accordingly.
    permuted = [
        task._replace(
            rows=np.argsort(order)[task.rows], weight=task.weight[order], bias=task.bias[order]
        )
        for task, order in zip(stream, orders, strict=True)
    ]
    inputs = streams.probe_inputs(stream)
    found, expected = streams.fitted(permuted).score(*inputs), streams.fitted(stream).score(*inputs)
    assert streams.relative_error(found.task_scores, expected.task_scores) < 1e-4
    for task, order in enumerate(orders):
        old_rows = order[found.local_class[:, task]]
        np.testing.assert_array_equal(old_rows, expected.local_class[:, task])


def test_task_order_matters_because_foreign_residuals_are_causal():
    stream = streams.stream(3, 4)
    inputs = streams.probe_inputs(stream)
    forward, backward = streams.fitted(stream), streams.fitted(stream[::-1])
    turned = backward.score(*inputs).task_scores[:, ::-1]
    assert streams.relative_error(turned, forward.score(*inputs).task_scores) > 1e-3
    # Nothing but the foreign reference depends on the order.
    without = forward.terms(*inputs).fuse(rlc=False).task_scores
    turned = backward.terms(*inputs).fuse(rlc=False).task_scores[:, ::-1]
    np.testing.assert_allclose(turned, without, rtol=1e-5, atol=1e-5)


@few
@given(seeds, st.sampled_from(["linear", "cosine", "nearest_mean"]))
def test_without_strength_scores_are_raw(seed, kind):
    stream = streams.stream(seed)
    found = streams.fitted(stream, kind, attenuation=0.0, rlc_weight=0.0, pac_weight=0.0)
    terms = found.terms(*streams.probe_inputs(stream))
    raw = terms.fuse(False, False, False).task_scores
    np.testing.assert_allclose(terms.fuse().task_scores, raw, rtol=1e-6, atol=1e-6)
    for task in found.tasks:
        assert np.isclose(task.raw_scale, task.filtered_scale, rtol=1e-6)


@few
@given(seeds, st.sampled_from(["linear", "cosine", "nearest_mean"]))
def test_a_subspace_of_all_variance_filters_nothing(seed, kind):
    stream = streams.stream(seed)
    found = streams.fitted(stream, kind, attenuation=1.0, retained_energy=1.0)
    assert all(len(task.views[0].basis) == 16 for task in found.tasks)
    terms = found.terms(*streams.probe_inputs(stream))
    filtered = terms.fuse(rlc=False, pac=False)
    np.testing.assert_allclose(
        filtered.task_scores, terms.fuse(False, False, False).task_scores, rtol=1e-4, atol=1e-4
    )


@few
@given(seeds, st.floats(0.0, 3.0), st.floats(0.0, 3.0), st.booleans(), st.booleans())
def test_corrections_are_bounded_by_the_score_scale(seed, alpha, beta, tsf, both):
    stream = streams.stream(seed)
    found = streams.fitted(stream, rlc_weight=alpha, pac_weight=beta)
    terms = found.terms(*streams.probe_inputs(stream))
    base = terms.fuse(tsf=tsf, rlc=False, pac=False).task_scores
    moved = np.abs(terms.fuse(tsf=tsf, pretrained_view=both).task_scores - base)
    scale = np.array([task.filtered_scale if tsf else task.raw_scale for task in found.tasks])
    assert (moved <= (1 + both) * (alpha + beta) * scale * (1 + 1e-5) + 1e-5).all()


@few
@given(seeds)
def test_more_foreign_or_less_akin_lowers_the_score(seed):
    # The signs of both corrections: inputs within a task's subspace are more typical of it than
    # inputs outside, and inputs along a prototype are the most akin to it.
    stream = streams.stream(seed)
    found = streams.fitted(stream)
    view = found.tasks[0].views[0]
    anywhere = 100.0 * np.random.default_rng(seed).normal(size=view.mean.shape)
    far = view.mean + anywhere - anywhere @ view.basis.T @ view.basis
    along = view.mean + view.basis.sum(axis=0)
    adapted = np.stack([along, far]).astype(np.float32)
    pretrained = np.stack([found.tasks[0].views[1].mean] * 2)
    terms = found.terms(adapted, pretrained)
    ratios = np.polyval(terms.ratios[0], terms.standardised(0)[0])
    assert ratios[0, 0] < 0 < ratios[1, 0]
    akin = np.stack([view.prototypes[0], -view.prototypes[0]])
    q = found.terms(akin, pretrained).standardised(0)[1]
    assert q[1, 0] < 0 < q[0, 0]


GAUSSIANS = {"method": "gaussians"}


@few
@given(seeds)
def test_gaussians_mind_neither_turned_encoders_nor_how_long_features_are(seed):
    rng = np.random.default_rng(seed)
    stream = streams.stream(seed)
    turns = [np.linalg.qr(rng.normal(size=(size, size)))[0] for size in (16, 12)]

    def turned(h, turn):
        return (h @ turn.T * rng.uniform(0.2, 5.0, (len(h), 1))).astype(np.float32)

    first, second = (lambda h, turn=turn: turned(h, turn) for turn in turns)
    adapted, pretrained = streams.probe_inputs(stream)
    before = streams.previous_of(stream)
    for previous in (None, before):
        changed = previous and [None, *map(first, previous[1:])]
        moved = streams.fitted(streams.mapped(stream, first, second), previous=changed, **GAUSSIANS)
        still = streams.fitted(stream, previous=previous, **GAUSSIANS)
        found, expected = (
            each.class_scores(*probe)
            for each, probe in (
                (moved, (first(adapted), second(pretrained))),
                (still, (adapted, pretrained)),
            )
        )
        assert streams.relative_error(found - found[:, :1], expected - expected[:, :1]) < 1e-3


@few
@given(seeds)
def test_gaussians_that_stay_do_not_depend_on_the_order_of_tasks(seed):
    stream = streams.stream(seed)
    inputs = streams.probe_inputs(stream)
    forward = streams.fitted(stream, **GAUSSIANS).score(*inputs)
    turned = streams.fitted(stream[::-1], **GAUSSIANS).score(*inputs)
    expected = forward.task_scores - forward.task_scores[:, :1]
    found = turned.task_scores[:, ::-1] - turned.task_scores[:, -1:]
    assert streams.relative_error(found, expected) < 1e-3
