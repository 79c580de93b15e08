"""Calibrators of many settings from one pass, against calibrators that are fitted one by one."""

import itertools

import numpy as np
import pytest

from fdc_jax.calibration import sweep
from tests.calibration import streams

ETAS, GAMMAS, COUNTS = (0.5, 0.75, 0.95, 1.0), (0.0, 0.3, 1.0), (1, 2, 3)
SETTINGS = [
    {"retained_energy": eta, "attenuation": gamma, "neighbours": count, "rlc_weight": 0.8}
    for eta, gamma, count in itertools.product(ETAS, GAMMAS, COUNTS)
]


def assert_scores_agree(actual, expected):
    """Asserts scores, and labels unless the best two scores differ by rounding alone."""
    spread = expected.task_scores.std()
    np.testing.assert_allclose(actual.task_scores, expected.task_scores, atol=1e-4 * spread)
    best = np.sort(expected.task_scores, axis=1)
    clear = best[:, -1] - best[:, -2] > 1e-3 * spread
    assert clear.mean() > 0.9
    np.testing.assert_array_equal(actual.label[clear], expected.label[clear])


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_a_sweep_equals_refits_with_every_setting(kind):
    tasks = streams.stream(7, 4, classes=(3, 4, 5))
    views = streams.probe_inputs(tasks, size=100)
    swept = streams.fit(sweep.Sweep(SETTINGS), tasks, kind)
    for of_eta in np.reshape(swept.calibrators, (len(ETAS), -1)):  # share their arrays
        assert len({id(calibrator.tasks[3].views[1].basis) for calibrator in of_eta}) == 1
    for number, terms in enumerate(swept.terms(*views)):
        if number % 7:  # Every value of each setting occurs.
            continue
        refit = streams.fitted(tasks, kind, **SETTINGS[number])
        expected = refit.terms(*views)
        assert_scores_agree(terms.fuse(), expected.fuse())
        assert_scores_agree(terms.fuse(nearest=True), expected.fuse(nearest=True))
        for task, wanted in zip(swept.calibrators[number].tasks, refit.tasks, strict=True):
            np.testing.assert_allclose(task[1:], wanted[1:], rtol=1e-4)
            assert [len(v.basis) for v in task.views] == [len(v.basis) for v in wanted.views]


def test_a_sweep_of_one_view_has_rewritten_heads_and_grows():
    tasks = streams.stream(11, 3, classes=(3, 4))
    adapted, _ = streams.probe_inputs(tasks)
    heads = [task._replace(weight=task.weight[::-1]).head for task in tasks[:2]]
    swept = streams.fit(sweep.Sweep(SETTINGS[::9]), tasks[:2], dual=False)
    swept.replace_heads(heads)
    for settings, terms in zip(SETTINGS[::9], swept.terms(adapted), strict=True):
        refit = streams.fitted(tasks[:2], dual=False, **settings)
        refit.replace_heads(heads)
        assert_scores_agree(terms.fuse(), refit.terms(adapted).fuse())
    both = [streams.fit(one, tasks[2:], dual=False) for one in (swept.calibrators[-1], refit)]
    assert_scores_agree(*(calibrator.terms(adapted).fuse() for calibrator in both))
