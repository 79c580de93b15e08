"""Class Gaussians against float64 formulas (`gaussian_reference`)."""

import numpy as np
import pytest

from fdc_jax.calibration import confidence, gaussians
from fdc_jax.errors import InputError
from tests.calibration import gaussian_reference as reference
from tests.calibration import streams


def fitted(tasks, previous=None, dual=True):
    return streams.fitted(tasks, dual=dual, previous=previous, method="gaussians")


def assert_equal_but_for_a_shift(actual, expected):
    """Every input may have a constant of its own, which all classes share."""
    difference = actual - expected
    spread = difference - difference.mean(axis=1, keepdims=True)
    assert np.abs(spread).max() < 2e-3 * np.std(expected - expected.mean(axis=1, keepdims=True))
    np.testing.assert_array_equal(actual.argmax(axis=1), expected.argmax(axis=1))


@pytest.mark.parametrize(
    ("follow", "dual", "options"),
    [
        (True, True, {}),
        (False, True, {"offset": 100.0}),
        (True, False, {"offset": 100.0}),
        (False, False, {"width": 5}),
        (False, False, {"width": 200}),
    ],
)
def test_class_scores_equal_float64(follow, dual, options):
    tasks = streams.stream(3, 3, **options)
    previous = streams.previous_of(tasks) if follow else None
    calibrator, probes = fitted(tasks, previous, dual), streams.probe_inputs(tasks)[: 1 + dual]
    expected, stale = reference.class_scores(tasks, previous, *probes)
    # Without drift compensation the pretrained view has full weight.
    share = (1 + stale / 20) / 4 if follow else 1.0
    total = expected["adapted"] + share * expected.get("pretrained", 0.0)
    actual = calibrator.class_scores(*probes)
    assert_equal_but_for_a_shift(actual, total)
    labels = {name: of.label.tolist() for name, of in calibrator.components(*probes).items()}
    by_view = {f"{name}_view": of for name, of in expected.items() if dual} | {"full": total}
    assert labels == {name: of.argmax(axis=1).tolist() for name, of in by_view.items()}
    if dual:
        single = streams.fitted(tasks, method="gaussians-pretrained").class_scores(*probes)
        assert_equal_but_for_a_shift(single, expected["pretrained"])
    best = [actual[:, task.classes].max(axis=1) for task in tasks]
    np.testing.assert_array_equal(calibrator.score(*probes).task_scores.T, best)


@pytest.mark.parametrize("follow", [True, False])
def test_previous_features_come_for_all_tasks_or_for_none(follow):
    tasks = streams.stream(1, 3)
    previous = streams.previous_of(tasks)
    calibrator = fitted(tasks[:2], previous[:2] if follow else None)
    before = vars(calibrator).copy()
    with pytest.raises(InputError, match=r"^previous features of task 2 \(from 0\): .* or of none"):
        streams.fit(calibrator, tasks[2:], previous=None if follow else previous[2:])
    assert all(value is before[name] for name, value in vars(calibrator).items())


@pytest.mark.parametrize("width", [5, 200])
def test_held_out_images_have_no_part_in_statistics(monkeypatch, width):
    monkeypatch.setattr(gaussians.inputs, "BLOCK_ROWS", 64)
    (task,) = streams.stream(2, 1, width=width, classes=(3,), samples=(120,))
    held = confidence.held_out(task.rows)
    actual, _ = gaussians.fit_classes(task.adapted, task.rows, 3, held)
    kept = streams.chosen(task, ~held)
    _, expected = gaussians.fit_classes(kept.adapted, kept.rows, 3, held[~held])
    np.testing.assert_allclose(actual.means, expected.means, atol=1e-6)
    for part, wanted in zip(actual, expected, strict=True):
        np.testing.assert_allclose(part, wanted, atol=1e-5)
