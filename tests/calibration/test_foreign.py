"""The foreign reference, exact and with bins and drawn tasks, against plain NumPy in float64."""

import copy

import numpy as np
import pytest
from scipy.stats import norm

from fdc_jax.calibration import foreign
from tests.calibration import streams


def kept(tasks):
    """Returns what is kept of residuals u_j of each task, [earlier, n]."""
    found = foreign.Residuals()
    for u in tasks:
        sums = len(u), u.mean(axis=1).sum(), (u**2).mean(axis=1).sum()
        values = u.ravel().astype(np.float32)
        new = np.array([sums]), values, np.ones(u.size), u.size
        found = found.and_of(foreign.Residuals(*new))
    return found


def by_hand(pairs):
    """Returns mu_F, V_F and tau of residuals of pairs."""
    mean = sum(pair.mean() for pair in pairs) / len(pairs)
    variance = sum((pair**2).mean() for pair in pairs) / len(pairs) - mean**2
    pooled = np.concatenate(pairs)
    ratio = norm.logpdf(pooled, mean, np.sqrt(variance)) - norm.logpdf(pooled)
    return mean, variance, np.median(np.abs(ratio))


@pytest.mark.parametrize("exact", [foreign.EXACT, 100])
def test_pairs_weigh_the_same_but_the_median_pools_samples(exact, monkeypatch):
    monkeypatch.setattr(foreign, "EXACT", exact)
    rng = np.random.default_rng(0)
    tasks = [rng.normal(3 + t, 1 + t, size=(t, size)) for t, size in enumerate((50, 20, 900))]
    found = kept(tasks)
    assert (found.count, len(found.values) == found.count) == (1820, exact > 2000)
    pairs = [tasks[1][0], tasks[2][0], tasks[2][1]]
    expected = by_hand(pairs)
    np.testing.assert_allclose(found.reference()[:2], expected[:2], rtol=1e-9)
    error = 1e-6 if exact > 2000 else 1e-4
    np.testing.assert_allclose(found.reference().scale, expected[2], rtol=error)
    assert abs(expected[0] - np.concatenate(pairs).mean()) > 0.05


def test_floors():
    # With one task p_F is p_O, which leaves RLC at zero.
    assert kept([np.zeros((0, 30))]).reference() == foreign.Foreign(0.0, 1.0, 1.0)
    assert kept([np.zeros((0, 3)), np.full((1, 4), 2.0)]).reference().variance == 1e-6
    # p_F equal to p_O: every ratio is zero, and the scale keeps its floor.
    assert kept([np.zeros((0, 3)), np.array([[-1.0, 1.0]])]).reference() == (0.0, 1.0, 1e-6)


@pytest.mark.parametrize("size", [1, 2, 7, 10])
def test_a_median_of_values_that_occur_several_times(size):
    rng = np.random.default_rng(size)
    values, weights = rng.normal(size=size), rng.integers(1, 5, size)
    expected = np.median(np.repeat(values, weights))
    assert foreign.median(values, weights.astype(float)) == pytest.approx(expected, rel=1e-12)


def test_what_is_kept_does_not_grow_and_no_order_changes_a_bin(monkeypatch):
    monkeypatch.setattr(foreign, "EXACT", 1000)
    rng = np.random.default_rng(0)
    tasks = [rng.normal(size=(1, 400)) for _ in range(12)]
    found, back = kept(tasks), kept(tasks[::-1])
    np.testing.assert_array_equal(found.values, back.values)
    np.testing.assert_array_equal(found.weights, back.weights)
    assert found.weights.sum() == found.count == 4800
    # Bins of bins are the same bins.
    again = found.and_of(foreign.Residuals())
    np.testing.assert_array_equal(again.values, found.values)
    largest = np.float32([-1e6, 0.0, 1e6])
    extreme = foreign.Residuals(np.zeros((1, 3)), largest, np.ones(3), 2000)
    np.testing.assert_allclose(extreme.and_of(extreme).values, largest, rtol=3e-5, atol=3e-5)


def test_drawn_tasks_stand_for_all_pairs_without_bias(monkeypatch):
    tasks = streams.stream(3, 12)
    whole = streams.fitted(tasks)
    assert whole.note == ""
    monkeypatch.setattr(foreign, "EARLIER", 4)
    drawn = streams.fitted(tasks)
    assert "earlier ones, drawn by its number" in drawn.note
    numbers = [len(foreign.earlier_tasks(t)) for t in range(12)]
    assert numbers == [0, 1, 2, 3, *[4] * 8]
    for found, expected in zip(drawn.foreign, whole.foreign, strict=True):
        # Tasks of few pairs are measured as they were; the pairs of all count.
        np.testing.assert_array_equal(found.pairs[:, 0], np.arange(12))
        np.testing.assert_array_equal(found.pairs[:5], expected.pairs[:5])
        assert found.weights.sum() == expected.weights.sum() > found.count
    # By hand, of the tasks that were drawn.
    pairs, weights = [], []
    for t, task in enumerate(tasks):
        for j in foreign.earlier_tasks(t):
            view = whole.tasks[j].views[0]
            inside = (task.adapted - view.mean).astype(np.float64)
            left = inside - inside @ view.basis.T @ view.basis
            rho = (left**2).sum(axis=1) / (inside**2).sum(axis=1)
            pairs.append((rho - view.residual[0]) / view.residual[1])
            weights.append(t / min(t, 4))
    mean = np.average([pair.mean() for pair in pairs], weights=weights)
    square = np.average([(pair**2).mean() for pair in pairs], weights=weights)
    np.testing.assert_allclose(drawn.references[0][:2], (mean, square - mean**2), rtol=1e-3)


def test_every_earlier_task_is_drawn_as_often():
    drawn = np.concatenate([foreign.earlier_tasks(t) / (t - 1) for t in range(65, 3000)])
    assert np.abs(np.histogram(drawn, 5, (0, 1))[0] / len(drawn) - 0.2).max() < 0.005
    assert all(len(np.unique(foreign.earlier_tasks(t))) == 64 for t in (65, 66, 1000))


def test_further_tasks_follow_and_blocks_do_not_matter(monkeypatch):
    tasks = streams.stream(3, 4)
    whole = streams.fitted(tasks)
    part = copy.deepcopy(streams.fitted(tasks[:2]))
    streams.same_scores(streams.fit(part, tasks[2:]), whole, streams.probe_inputs(tasks))
    monkeypatch.setattr(foreign.inputs, "BLOCK_ROWS", 7)
    small = streams.fitted(tasks)
    for ours, theirs in zip(small.references, whole.references, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4)
