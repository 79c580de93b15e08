"""Relations between scores that must hold for any features, heads and labels."""

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.calibration import streams

# Shapes are fixed and content varies, so that few examples compile again.
few = settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
seeds = st.integers(0, 2**32 - 1)
scales = st.floats(0.05, 20.0)


def rotations(seed):
    rng = np.random.default_rng(seed)
    return [np.linalg.qr(rng.normal(size=(size, size)))[0] for size in (16, 12)]


@few
@given(seeds, scales, scales)
def test_fdc_ignores_rotation_and_unit_and_scales_with_heads(seed, unit, scale):
    first, second = (unit * rotation for rotation in rotations(seed))
    tasks = streams.stream(seed)
    moved = streams.mapped(
        tasks,
        lambda h: h @ first.T,
        lambda h: h @ second.T,
        lambda w: scale * w @ first.T / unit**2,
    )
    moved = [task._replace(bias=scale * task.bias) for task in moved]
    adapted, pretrained = streams.probe_inputs(tasks)
    actual = streams.fitted(moved).score(adapted @ first.T, pretrained @ second.T)
    expected = streams.fitted(tasks).score(adapted, pretrained)
    assert streams.relative_error(actual.task_scores / scale, expected.task_scores) < 1e-4
    np.testing.assert_array_equal(actual.local_class, expected.local_class)


def shifted(scores):
    """Returns class scores less that of the first class."""
    return scores - scores[:, :1]


@few
@given(seeds, st.booleans())
def test_gaussians_ignore_rotation_and_length_of_features(seed, follow):
    rng = np.random.default_rng(seed)
    first, second = rotations(seed)

    def moved(h, rotation):
        return (h @ rotation.T * rng.uniform(0.2, 5.0, (len(h), 1))).astype(np.float32)

    tasks = streams.stream(seed)
    adapted, pretrained = streams.probe_inputs(tasks)
    before = streams.previous_of(tasks) if follow else None
    after = [None, *(moved(view, first) for view in before[1:])] if follow else None
    other = streams.mapped(tasks, lambda h: moved(h, first), lambda h: moved(h, second))
    actual = streams.fitted(other, previous=after, method="gaussians")
    expected = streams.fitted(tasks, previous=before, method="gaussians")
    scores = actual.class_scores(moved(adapted, first), moved(pretrained, second))
    wanted = expected.class_scores(adapted, pretrained)
    assert streams.relative_error(shifted(scores), shifted(wanted)) < 1e-3
