"""What is printed at the end of a run, and how it compares with no training."""

import numpy as np
import pytest

from fdc_jax import calibration
from fdc_jax.report import analysis, console, runs
from tests.report import made_up
from tests.report.feature_sets import feature_set, write_features


def group_of(folder, wrong=0, labels=None):
    """A run whose FDC is wrong on so many of its test images; all others are right."""
    features = feature_set()
    true = features.test_labels if labels is None else labels
    fdc = np.where(np.arange(len(true)) < wrong, true + 1, true)
    zeros = np.zeros_like(true)
    columns = {"label": true, "task": zeros, "raw_label": zeros, "fdc_label": fdc}
    accuracy = {"raw": 100 * np.mean(true == 0), "fdc": 100 * np.mean(fdc == true), "oracle": 99.0}
    sizes = {"num_test_images": len(true), "num_classes": int(true.max()) + 2}
    content = made_up.results(benchmark="digits", accuracy=accuracy, **sizes)
    made_up.write_run(folder, content, columns)
    write_features(folder / "features", features)
    ((group,), _) = runs.load([folder])
    return group


STARTS = {1: "Not significantly better", 2: "Not better", 60: "Worse"}


def test_verdict_compares_with_the_best_of_no_training(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(analysis.UNTRAINED, "ranpac-pretrained", {"projections": 100})
    features = feature_set()
    accuracies = {}
    for name, settings in analysis.UNTRAINED.items():
        fitted = features.fit(calibration.make(name, **settings))
        labels = fitted.score(features.test_adapted, features.test_pretrained).label
        accuracies[name] = pytest.approx(100 * np.mean(labels == features.test_labels))
    for wrong, start in STARTS.items():
        group = group_of(tmp_path, wrong)
        assert {name: group.row(name)["mean"] for name in accuracies} == accuracies
        assert not {*accuracies} & {*group.methods}
        best = max(group.row(name)["mean"] for name in accuracies)
        assert group.best == "fdc" and group.row(group.untrained)["mean"] == best
        gain = group.gain("fdc", group.untrained)
        assert gain.mean == pytest.approx(group.row("fdc")["mean"] - best)
        verdict = console.verdict(group)
        assert verdict.startswith(f"{start} than no training at all (")
    console.show(group)
    assert verdict in capsys.readouterr().out


def test_no_verdict_without_predictions_of_both_methods(tmp_path):
    run = made_up.run(1, benchmark="digits")
    run.results.accuracy["ncm-pretrained"] = 50.0
    (group,) = made_up.groups(run)
    assert group.untrained == "ncm-pretrained" and console.verdict(group) == ""
    # Features of other images say nothing of these.
    group = group_of(tmp_path, labels=feature_set().test_labels[::-1])
    assert group.untrained is None and console.verdict(group) == ""


def test_equal_accuracies_lead_together():
    run = made_up.run(1, "digits")
    run.results.accuracy |= {"fdc": 70.0, "gaussians": 70.0}
    assert made_up.groups(run)[0].leading == ["fdc", "gaussians"]
