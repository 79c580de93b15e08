"""What is computed anew from the features of a run: sweeps, and what is missing."""

import dataclasses
import os

import numpy as np
import pytest
from scipy import stats

from fdc_jax import calibration
from fdc_jax.errors import InputError
from fdc_jax.features.feature_files import write_test
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


@pytest.mark.parametrize(
    ("parameter", "value", "keyword"),
    [
        ("attenuation", 1.0, "gamma"),
        ("retained_energy", 0.95, "eta"),
        ("neighbours", 2, "neighbours"),
    ],
)
def test_a_sweep_is_the_reference_at_its_value(tmp_path, parameter, value, keyword):
    features = feature_set()
    write_features(tmp_path, features)
    found = analysis.swept(tmp_path, {}, [(parameter, [value])])
    expected = {f"{parameter}={value:g}": {keyword: value}}
    if parameter == "neighbours":
        expected["nearest=2"] = {"neighbours": 2, "nearest": True}
    assert found == {
        name: pytest.approx(100 * np.mean(routed(features, **of)[1] == features.test_labels))
        for name, of in expected.items()
    }


@pytest.mark.parametrize("dual", [True, False])
def test_validation_images_are_swept_beside_test_images(tmp_path, dual):
    features, other = feature_set(dual=dual), feature_set(dual=dual, test_size=40)
    write_features(tmp_path, features)
    without = analysis.swept(tmp_path, {}, [("retained_energy", [0.5, 0.95])])
    held_out = [other.test_adapted[10:], None, other.test_labels[10:]]
    if dual:
        held_out[1] = other.test_pretrained[10:]
    write_test(tmp_path / "validation", *held_out)
    found = analysis.swept(tmp_path, {}, [("retained_energy", [0.5, 0.95])])
    names = dict(zip(("test_adapted", "test_pretrained", "test_labels"), held_out, strict=True))
    validation = features._replace(**names)
    expected = {
        f"validation_retained_energy={eta:g}": 100
        * np.mean(routed(validation, eta=eta)[1] == validation.test_labels)
        for eta in (0.5, 0.95)
    }
    assert found == without | {name: pytest.approx(value) for name, value in expected.items()}


def test_a_report_does_not_repeat_the_warning_about_a_head_like_chance(tmp_path, caplog):
    features = feature_set()
    write_features(tmp_path, features)
    features.fit(calibration.make("fdc"))
    assert "hardly trained" in caplog.text
    caplog.clear()
    analysis.swept(tmp_path, {}, [("attenuation", [0.5])])
    assert not caplog.text


def test_flags_name_settings_with_their_values():
    found = analysis.sweep_of(["attenuation:0.1,0.3", "neighbours"])
    assert found == {"attenuation": [0.1, 0.3], "neighbours": ()}
    assert analysis.sweep_of(["all"]) == analysis.VALUES and analysis.sweep_of(["none"]) == {}
    for flag in ("gamma", "attenuation:1.5", "neighbours:1.5", "attenuation:x"):
        with pytest.raises(InputError, match=f"--sweep: expected one of attenuation.*{flag}"):
            analysis.sweep_of([flag])


def analysed(folder, features, sweep=None, seeds=(1, 2), neighbours=2):
    """A group of runs with these features."""
    for seed in seeds:
        config = {"fdc.neighbours": neighbours}
        write_run(folder / f"seed_{seed}", benchmark="digits", seed=seed, config=config)
        if features is not None:
            write_features(folder / f"seed_{seed}" / "features", features)
    (group,) = runs.load([folder])[0]
    return runs.analyse(group, sweep)


def swept_of(group):
    """The names of accuracies at values of settings."""
    return {name for name in group.numbers["quantity"] if "=" in name}


def test_analyses_are_those_of_the_paper_s_figures(tmp_path):
    group = analysed(tmp_path, feature_set())
    assert group.missing == []
    counts = {name: len(found) for name, found in group.analyses.items()}
    assert counts == {
        "similarity": 2,
        "residual_contributions": 2,
        "residual_distributions": 1,
        "prototype_geometry": 1,
    }
    values = [f"{name}={value:g}" for name, of in analysis.VALUES.items() for value in of]
    values += [f"{name}={count}" for name in ("neighbours", "nearest") for count in (1, 2)]
    assert swept_of(group) == {*values}
    rank = stats.spearmanr(*group.analyses["similarity"][0][["adapted_affinity", "error"]].T.values)
    assert group.values("adapted_affinity", "correlation")[1] == pytest.approx(rank.statistic)
    own = group.analyses["residual_contributions"][1]["own"]
    assert group.values("own", "contribution")[2] == pytest.approx(own.mean())
    # Another learner is swept if asked to be.
    (other,) = runs.load([tmp_path])[0]
    other = dataclasses.replace(other, learner="loda")
    assert not swept_of(runs.analyse(other))
    other = runs.analyse(other, {"attenuation": [0.1]})
    assert len(other.values("fdc", "attenuation=0.1")) == 2


def test_neighbours_are_no_more_than_the_classes_with_images(tmp_path):
    features = feature_set()
    *others, last = features.tasks
    kept = last.labels == last.classes[0]
    views = {name: getattr(last, name)[kept] for name in ("adapted", "pretrained", "labels")}
    features = features._replace(tasks=(*others, last._replace(**views)))
    group = analysed(tmp_path, features, {"neighbours": ()}, (1,), neighbours=1)
    assert swept_of(group) == {"neighbours=1", "nearest=1"}


def test_features_and_code_that_stay_are_not_fitted_again(tmp_path, monkeypatch):
    sweep = {"attenuation": [0.25]}
    analysed(tmp_path, feature_set(), sweep, seeds=(1,))
    (group,) = runs.load([tmp_path])[0]
    monkeypatch.setattr(analysis, "_fitted", None)
    group = runs.analyse(group, sweep)
    assert group.missing == [] and group.has("fdc", "attenuation=0.25")
    write_features(tmp_path / "seed_1" / "features", feature_set())
    with pytest.raises(TypeError):
        runs.analyse(group, sweep)


def test_what_a_run_does_not_allow_is_missing_with_the_reason(tmp_path):
    group = analysed(tmp_path / "a", feature_set(tasks=1), {}, seeds=(1,))
    assert group.missing == ["no similarity: a single task"]
    group = analysed(tmp_path / "b", None)
    (reason,) = group.missing
    assert group.analyses == {} and "no diagnostics or sweeps: no saved features" in reason


def test_results_do_without_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(analysis, "user_cache", lambda: tmp_path / "file")
    write_features(tmp_path, feature_set())
    assert len(analysis._kept(analysis._untrained, tmp_path)[1]) == len(analysis.UNTRAINED)


def labels_seen(folder):
    return np.load(folder / "test_labels.npy")


def test_analyses_follow_features_whose_dates_stay(tmp_path, monkeypatch):
    features = feature_set()
    monkeypatch.setattr(analysis, "user_cache", lambda: tmp_path / "cache")
    write_features(tmp_path / "features", features)
    path = tmp_path / "features" / "test_labels.npy"
    status = path.stat()
    before = analysis._kept(labels_seen, tmp_path / "features")
    np.testing.assert_array_equal(before, features.test_labels)
    np.save(path, features.test_labels[::-1])
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    actual = analysis._kept(labels_seen, tmp_path / "features")
    np.testing.assert_array_equal(actual, features.test_labels[::-1])
