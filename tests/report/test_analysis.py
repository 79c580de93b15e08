"""What is refitted from the features of a run: sweeps, what is beyond the paper."""

import numpy as np
import pytest

from fdc_jax import calibration, evaluation
from fdc_jax.calibration import comparators
from fdc_jax.calibration.components import WHITENED, WHITENED_CLASSES
from fdc_jax.report import analysis, runs
from tests.report.feature_sets import feature_set, reference_of, write_features
from tests.report.made_up import write_run


def analysed(folder, features, config=None, **options):
    """Analyses of a run with these features, and what is missing."""
    write_run(folder, benchmark="digits", config=config)
    write_features(folder / "features", features)
    ((run,),) = (group.runs for group in runs.load([folder]).groups)
    analysis.analyse(run, **options)
    return run.analyses, run.missing


def percent(right):
    return pytest.approx(100 * np.mean(right))


# Sweeps -------------------------------------------------------------------------------------------


def routed(features, **settings):
    """Tasks and labels that the reference in float64 gives the test images."""
    fitted = reference_of(features, **settings)
    scores, rows = fitted.score(features.test_adapted, features.test_pretrained)
    task = scores.argmax(axis=1)
    labels = [features.tasks[t].classes[row[t]] for t, row in zip(task, rows, strict=True)]
    return task, np.array(labels)


def check(features, found, place, **settings):
    """Compares a place of a sweep with the reference."""
    task, label = routed(features, **settings)
    assert found["routing_accuracy"][place] == percent(task == features.test_tasks)
    assert found["accuracy"][place] == percent(label == features.test_labels)


@pytest.mark.parametrize(
    ("parameter", "value", "keyword"),
    [("attenuation", 1.0, "gamma"), ("retained_energy", 0.95, "eta")],
)
def test_a_sweep_is_the_reference_at_every_value(parameter, value, keyword):
    features = feature_set()
    found = analysis.vary(features, {}, parameter, (value,))
    check(features, found, 0, **{keyword: value})
    assert found["default"] == {"attenuation": 0.5, "retained_energy": 0.75}[parameter]
    assert found["default"] in analysis.VALUES[parameter]


def test_neighbourhoods_are_the_reference_s():
    features = feature_set()
    found = analysis.vary(features, {}, "neighbours")
    assert found["values"] == [1, 2] and found["default"] == 1
    for place, count in enumerate(found["values"]):
        for name in ("own", "nearest"):
            check(features, found[name], place, neighbours=count, nearest=name == "nearest")


# What is beyond the paper ------------------------------------------------------------------------


def test_accuracies_are_those_of_calibrators_of_their_own(tmp_path):
    features, rng = feature_set(offset=1.0), np.random.default_rng(3)
    test = features.test_adapted, features.test_pretrained
    noisy = [view + rng.standard_normal(view.shape, np.float32) for view in test]
    features = features._replace(test_adapted=noisy[0], test_pretrained=noisy[1])
    config = {"fdc.rlc_weight": 0.5, "fdc.attenuation": 0.25, "fdc.affinity_metric": "whitened"}
    found, missing = analysed(tmp_path, features, config)
    assert missing == []
    own = {"rlc_weight": 0.5, "attenuation": 0.25}
    labels, tasks = features.test_labels, features.test_tasks
    fdc = features.fit(calibration.FDC(**own).to_numpy()).score(*noisy)
    for name, affinity in (
        ("fdc", {}),
        ("whitened", WHITENED),
        ("whitened-classes", WHITENED_CLASSES),
    ):
        calibrator = features.fit(calibration.from_settings(own | affinity).to_numpy())
        scores = calibrator.score(*noisy)
        gain = evaluation.bootstrap_gain(labels, fdc.label, scores.label)
        assert found["beyond"][name] == {
            "accuracy": percent(scores.label == labels),
            "oracle": percent(scores.label_in_task(tasks) == labels),
            "storage_bytes": calibrator.storage_bytes,
            "low": gain.low,
            "high": gain.high,
        }
    frozen = comparators.RanPAC("pretrained", "linear")
    scores = features.fit(frozen).score(*noisy)
    ridge = found["beyond"]["ridge-pretrained"]
    assert ridge["accuracy"] == percent(scores.label == labels)
    assert ridge["storage_bytes"] == frozen.storage_bytes
    assert "ncm-pretrained" in found["beyond"]
    assert "transported" not in found["beyond"]  # It needs features of the encoder before.


def test_what_a_run_does_not_allow_is_missing_with_the_reason(tmp_path):
    found, missing = analysed(tmp_path / "a", feature_set(dual=False), {"fdc.neighbours": 2})
    assert missing == [] and "mahalanobis" in found["beyond"]
    assert {"whitened", "ncm-pretrained"}.isdisjoint(found["beyond"])
    features = feature_set()._replace(test_labels=None)
    found, (reason,) = analysed(tmp_path / "b", features, sweep=["neighbours"])
    assert found == {} and "sweep_neighbours: " in reason and "test_labels: absent" in reason
