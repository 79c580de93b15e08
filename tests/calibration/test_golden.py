"""What every calibrator gave on one feature file, in `tests/golden`.

At commit 37c3121; the Gaussians since the pretrained view counts by how stale the adapted one is.

`features.npz` has five drifting tasks of both views: two to five classes of unequal size, one of
them without an image, the rows of two heads in another order than the labels, and two heads that
the learner changed later. Of each entry `scores.npz` holds the labels and the task scores, of some
the scores of all classes, and `storage_bytes.json` the bytes. Test rows that rounding might decide
were left out, so that labels are to be identical.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from fdc_jax import calibration, heads

GOLDEN = Path(__file__).parents[1] / "golden"
FEATURES, EXPECTED = (dict(np.load(GOLDEN / f"{name}.npz")) for name in ("features", "scores"))
STORAGE = json.loads((GOLDEN / "storage_bytes.json").read_text())
TASKS = 5
# Entries that are not a method in its defaults with all that the file has.
OTHER_SETTINGS = dict(
    retained_energy=0.9,
    attenuation=0.25,
    rlc_weight=0.5,
    pac_weight=2.0,
    adapted_view_weight=0.75,
    pretrained_view_weight=1.5,
    neighbours=2,
)
RANDOM = {"projections": 96, "seed": 7}
CASES = {
    "fdc other settings": ("fdc", OTHER_SETTINGS, ()),
    "fdc one view": ("fdc", {}, ("pretrained",)),
    "gaussians one view": ("gaussians", {}, ("pretrained",)),
    "gaussians without previous": ("gaussians", {}, ("previous",)),
} | {
    name: (name, RANDOM if name.startswith(("ranpac", "anacp")) else {}, ())
    for name in STORAGE
    if " " not in name
}


def head(task, final=False):
    prefix = "final_" * (final and f"final_head_weight_{task}" in FEATURES)
    parts = (FEATURES[f"{prefix}head_{part}_{task}"] for part in ("weight", "bias"))
    return heads.LinearHead(*parts)


def fitted(method, settings, without=()):
    """Returns a calibrator fitted on the file, without some of its features."""
    calibrator = calibration.make(method, **settings)
    for task in range(TASKS):
        beside = {name: FEATURES.get(f"train_{name}_{task}") for name in ("pretrained", "previous")}
        calibrator.fit_task(
            FEATURES[f"train_adapted_{task}"],
            FEATURES[f"train_labels_{task}"],
            head=head(task),
            classes=FEATURES.get(f"head_classes_{task}"),
            **{name: None if name in without else array for name, array in beside.items()},
        )
    calibrator.finalize()
    calibrator.replace_heads([head(task, final=True) for task in range(TASKS)])
    return calibrator


def inputs(without=()):
    views = {name: FEATURES[f"test_{name}"] for name in ("adapted", "pretrained")}
    return [None if name in without else array for name, array in views.items()]


def assert_golden(entry, scores):
    np.testing.assert_array_equal(scores.label, EXPECTED[f"{entry}: labels"], err_msg=entry)
    assert_near(scores.task_scores, EXPECTED[f"{entry}: scores"], entry)


def assert_near(actual, expected, entry):
    tolerance = 1e-4 * expected[np.isfinite(expected)].std()
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance, err_msg=entry)


@pytest.mark.parametrize("entry", CASES)
def test_labels_scores_and_storage_are_golden(entry):
    method, settings, without = CASES[entry]
    calibrator = fitted(method, settings, without)
    assert_golden(entry, calibrator.score(*inputs(without)))
    assert calibrator.storage_bytes == STORAGE[entry]
    if f"{entry}: class scores" in EXPECTED:
        actual = calibrator.class_scores(*inputs(without))
        assert_near(actual, EXPECTED[f"{entry}: class scores"], entry)


@pytest.mark.parametrize("method", ["fdc", "gaussians"])
def test_components_are_golden(method):
    actual = fitted(method, {}).components(*inputs())
    assert_golden(method, actual.pop("full"))
    known = {name.partition(":")[0] for name in EXPECTED}
    known = {name for name in known if name.startswith(f"{method} ")} - CASES.keys()
    assert {f"{method} {name}" for name in actual} == known
    for name, scores in actual.items():
        assert_golden(f"{method} {name}", scores)
