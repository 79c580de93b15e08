"""The foreign reference of RLC against plain NumPy in float64."""

import copy

import numpy as np
from scipy.stats import norm

from fdc_jax.calibration import compiled, fdc
from tests.calibration import streams


def by_hand(pairs):
    """Returns mu_F, V_F and tau of residuals of pairs."""
    mean = sum(pair.mean() for pair in pairs) / len(pairs)
    variance = sum((pair**2).mean() for pair in pairs) / len(pairs) - mean**2
    pooled = np.concatenate(pairs)
    ratio = norm.logpdf(pooled, mean, np.sqrt(variance)) - norm.logpdf(pooled)
    return mean, variance, np.median(np.abs(ratio))


def test_pairs_weigh_the_same_but_the_median_pools_samples():
    rng = np.random.default_rng(0)
    tasks = [rng.normal(3 + t, 1 + t, size=(t, size)) for t, size in ((1, 20), (2, 900))]
    pairs = [tasks[0][0], tasks[1][0], tasks[1][1]]
    expected = by_hand(pairs)
    np.testing.assert_allclose(fdc.fit_foreign(tasks), expected, rtol=1e-6)
    assert abs(expected[0] - np.concatenate(pairs).mean()) > 0.05


def test_floors():
    # With one task p_F is p_O, which leaves RLC at zero.
    assert fdc.fit_foreign([]) == (0.0, 1.0, 1.0)
    assert fdc.fit_foreign([np.full((1, 4), 2.0)]).variance == 1e-6
    # p_F equal to p_O: every ratio is zero, and the scale keeps its floor.
    assert fdc.fit_foreign([np.array([[-1.0, 1.0]])]) == (0.0, 1.0, 1e-6)


def test_further_tasks_follow_and_blocks_do_not_matter(monkeypatch):
    tasks = streams.stream(3, 4)
    whole = streams.fitted(tasks)
    part = copy.deepcopy(streams.fitted(tasks[:2]))
    streams.same_scores(streams.fit(part, tasks[2:]), whole, streams.probe_inputs(tasks))
    monkeypatch.setattr(compiled, "ROWS", (16, 32))
    small = streams.fitted(tasks)
    for ours, theirs in zip(small.references, whole.references, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4)
