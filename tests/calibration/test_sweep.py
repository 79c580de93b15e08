"""Calibrators of many settings from one pass, against calibrators that are fitted one by one."""

import itertools

import numpy as np
import pytest

from fdc_jax.calibration import FDC, sweep
from tests.calibration import streams

KINDS = ("linear", "normalised_linear", "cosine", "nearest_mean")
ETAS, GAMMAS, COUNTS = (0.5, 0.75, 0.95, 1.0), (0.0, 0.3, 1.0), (1, 2, 3)
SETTINGS = [
    {"retained_energy": eta, "attenuation": gamma, "neighbours": count, "rlc_weight": 0.8}
    for eta, gamma, count in itertools.product(ETAS, GAMMAS, COUNTS)
]


def assert_labels_agree(actual, expected):
    """Labels are equal wherever the best two scores of the refit differ by more than rounding."""
    spread = expected.task_scores.std()
    np.testing.assert_allclose(actual.task_scores, expected.task_scores, atol=1e-4 * spread)
    best = np.sort(expected.task_scores, axis=1)
    clear = best[:, -1] - best[:, -2] > 1e-3 * spread
    assert clear.mean() > 0.9
    np.testing.assert_array_equal(actual.label[clear], expected.label[clear])


@pytest.mark.parametrize("kind", KINDS)
def test_a_sweep_equals_refits_of_every_setting(kind):
    stream = streams.stream(7, 4, classes=(3, 4, 5))
    views = streams.probe_inputs(stream, size=100)
    together = streams.fit(sweep.Sweep(SETTINGS), stream, kind)
    for number, terms in enumerate(together.terms(*views)):
        if number % 5 and kind != "linear":
            continue
        refit = streams.fitted(stream, kind, **SETTINGS[number])
        wanted = refit.terms(*views)
        assert_labels_agree(terms.fuse(), wanted.fuse())
        assert_labels_agree(terms.fuse(nearest=True), wanted.fuse(nearest=True))
        for ours, theirs in zip(together.calibrators[number].tasks, refit.tasks, strict=True):
            np.testing.assert_allclose(ours[1:], theirs[1:], rtol=1e-4)
            assert [len(v.basis) for v in ours.views] == [len(v.basis) for v in theirs.views]


def test_calibrators_of_a_sweep_score_and_grow_on_their_own():
    stream = streams.stream(9, 4)
    views = streams.probe_inputs(stream)
    together = streams.fit(sweep.Sweep(SETTINGS[:2]), stream[:3])
    alone = streams.fitted(stream, **SETTINGS[1])
    assert_labels_agree(
        streams.fit(together.calibrators[1], stream[3:]).score(*views), alone.score(*views)
    )


def test_a_sweep_of_one_view_and_rewritten_heads():
    stream = streams.stream(11, 3, classes=(3, 4))
    adapted, _ = streams.probe_inputs(stream)
    heads = [streams.head_of(task._replace(weight=task.weight[::-1]), "linear") for task in stream]
    together = streams.fit(sweep.Sweep(SETTINGS[::7]), stream, dual=False)
    together.replace_heads(heads)
    for settings, terms in zip(SETTINGS[::7], together.terms(adapted), strict=True):
        refit = streams.fitted(stream, dual=False, **settings)
        refit.replace_heads(heads)
        assert_labels_agree(terms.fuse(), refit.score(adapted))


def test_statistics_do_not_grow_with_the_number_of_settings():
    stream = streams.stream(9, 3)
    few, many = (
        streams.fit(sweep.Sweep([{"attenuation": g} for g in np.linspace(0, 1, count)]), stream)
        for count in (2, 20)
    )
    arrays = [
        {
            id(array.base if array.base is not None else array)
            for calibrator in together.calibrators
            for task in calibrator.tasks
            for view in task.views
            for array in view[:3]
        }
        | {id(u) for c in together.calibrators for view in c.foreign for u in view}
        for together in (few, many)
    ]
    assert len(arrays[0]) == len(arrays[1])
    assert isinstance(many.calibrators[0], FDC)
