"""What is computed anew from the features of a run: sweeps, and what is missing."""

import numpy as np
import pytest

from fdc_jax import calibration
from fdc_jax.report import analysis, runs
from tests.report.feature_sets import feature_set, reference_of, write_features
from tests.report.made_up import write_run


def routed(features, **settings):
    """Tasks and labels that the reference in float64 gives the test images."""
    fitted = reference_of(features, **settings)
    scores, rows = fitted.score(features.test_adapted, features.test_pretrained)
    task = scores.argmax(axis=1)
    labels = [features.tasks[t].classes[row[t]] for t, row in zip(task, rows, strict=True)]
    return task, np.array(labels)


def check(features, found, place, **settings):
    """Compares a place of a sweep with the reference."""
    _, label = routed(features, **settings)
    assert found.iloc[place] == pytest.approx(100 * np.mean(label == features.test_labels))


@pytest.mark.parametrize(
    ("parameter", "value", "keyword"),
    [("attenuation", 1.0, "gamma"), ("retained_energy", 0.95, "eta")],
)
def test_a_sweep_is_the_reference_at_every_value(parameter, value, keyword):
    features = feature_set()
    found = analysis.vary(features, calibration.FDC(), parameter, (value,))
    check(features, found["accuracy"], 0, **{keyword: value})
    assert {"attenuation": 0.5, "retained_energy": 0.75}[parameter] in analysis.VALUES[parameter]


def test_neighbourhoods_are_the_reference_s():
    features = feature_set()
    found = analysis.vary(features, calibration.FDC(), "neighbours")
    assert found.index.tolist() == [1, 2]
    for place, count in enumerate(found.index):
        for name in ("accuracy", "nearest"):
            check(features, found[name], place, neighbours=count, nearest=name == "nearest")


def analysed(folder, features, sweep=(), seeds=(1, 2)):
    """A group of runs with these features."""
    for seed in seeds:
        config = {"fdc.neighbours": 2}
        write_run(folder / f"seed_{seed}", benchmark="digits", seed=seed, config=config)
        if features is not None:
            write_features(folder / f"seed_{seed}" / "features", features)
    (group,) = runs.load([folder])[0]
    analysis.analyse(group, sweep)
    return group


def test_analyses_are_those_of_the_paper_s_figures(tmp_path):
    group = analysed(tmp_path, feature_set(), ["neighbours"])
    assert group.missing == []
    counts = {name: len(found) for name, found in group.analyses.items()}
    assert counts == {
        "similarity": 2,
        "residual_contributions": 2,
        "residual_distributions": 1,
        "prototype_geometry": 1,
        "sweep_neighbours": 2,
    }


def test_what_a_run_does_not_allow_is_missing_with_the_reason(tmp_path):
    group = analysed(tmp_path / "a", feature_set(tasks=1), seeds=(1,))
    (reason,) = group.missing
    assert reason.startswith("no similarity: ") and "two tasks" in reason
    group = analysed(tmp_path / "b", None)
    (reason,) = group.missing
    assert group.analyses == {} and "prototype_geometry: no saved features" in reason
