"""FDC against a reading of Algorithm 1 in float64, over any size, rank and setting."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
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


@st.composite
def problems(draw):
    """Returns tasks of a width and a rank, test inputs, and settings."""
    # In one dimension all cosines are 1 or -1, and rounding decides PAC.
    width = draw(st.sampled_from([2, 3, 8, 17, 40]))
    rank = draw(st.integers(2, width))
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
        weight = rng.normal(size=(classes, width)).astype(np.float32)
        bias = rng.normal(size=classes).astype(np.float32)
        tasks.append(streams.StreamTask(*views, rows, weight, bias, first))
        first += classes
    inputs = [
        np.concatenate([view + 0.3 * rng.normal(size=(len(view), rank)) @ shared for view in of])
        for of in ([task.adapted for task in tasks], [task.pretrained for task in tasks])
    ]
    eta = draw(st.sampled_from([0.05, 0.3, 0.75, 0.95, 1.0]))
    gamma = draw(st.sampled_from([0.0, 0.3, 1.0]))
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
    error = np.abs(terms.task_scores - scores) / np.maximum(scale, scores.std())
    # With one sample a class, PAC divides rounding errors of 4e-8 by its floor of 1e-6.
    single = any(np.bincount(task.rows).min() == 1 for task in tasks)
    assert error.max() < (2e-2 if single else 2e-3), (error.max(), eta, gamma, kind)
