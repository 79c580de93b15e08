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
