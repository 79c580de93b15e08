"""Numbers computed from the features of a run: diagnostics and sweeps, and why some are missing."""

import dataclasses
import os

import numpy as np
import pytest
from scipy import stats

from fdc_jax.errors import InputError
from fdc_jax.features.feature_files import write_test
from fdc_jax.report import analysis, runs
from tests.report.feature_sets import feature_set, reference_of, write_features
from tests.report.made_up import write_run


def accuracy(features, **settings):
    """The accuracy of the reference in float64 on the test images, in percent."""
    fitted = reference_of(features, **settings)
    scores, rows = fitted.score(features.test_adapted, features.test_pretrained)
    right = []
    for task, row, label in zip(scores.argmax(axis=1), rows, features.test_labels, strict=True):
        right.append(features.tasks[task].classes[row[task]] == label)
    return pytest.approx(100 * np.mean(right))


@pytest.mark.parametrize(
    ("values", "settings"),
    [
        (("attenuation", [1.0]), {"attenuation=1": {"attenuation": 1.0}}),
        (("retained_energy", [0.95]), {"retained_energy=0.95": {"retained_energy": 0.95}}),
        (
            ("neighbours", [2]),
            {"neighbours=2": {"neighbours": 2}, "nearest=2": {"neighbours": 2, "nearest": True}},
        ),
    ],
)
def test_a_sweep_is_the_reference_at_its_value(tmp_path, values, settings):
    features = feature_set()
    write_features(tmp_path, features)
    expected = {name: accuracy(features, **of) for name, of in settings.items()}
    assert analysis.swept(tmp_path, {}, [values]) == expected


@pytest.mark.parametrize("dual", [True, False])
def test_validation_images_are_swept_beside_test_images(tmp_path, dual):
    features = feature_set(dual=dual)
    write_features(tmp_path, features)
    arrays = features.test_adapted, features.test_pretrained, features.test_labels
    held_out = [array if array is None else array[:40] for array in arrays]
    write_test(tmp_path / "validation", *held_out)
    names = ("test_adapted", "test_pretrained", "test_labels")
    validation = features._replace(**dict(zip(names, held_out, strict=True)))
    expected = {
        "retained_energy=0.5": accuracy(features, retained_energy=0.5),
        "validation_retained_energy=0.5": accuracy(validation, retained_energy=0.5),
    }
    assert analysis.swept(tmp_path, {}, [("retained_energy", [0.5])]) == expected


def test_flags_name_settings_with_their_values():
    sweep = analysis.sweep_of(["attenuation:0.1,0.3", "neighbours"])
    assert sweep == {"attenuation": [0.1, 0.3], "neighbours": ()}
    assert analysis.sweep_of(["all"]) == analysis.VALUES and analysis.sweep_of(["none"]) == {}
    for flag in ("gamma", "attenuation:1.5", "neighbours:1.5", "attenuation:x"):
        with pytest.raises(InputError, match=f"--sweep: expected one of attenuation.*{flag}"):
            analysis.sweep_of([flag])


def load(folder, features, seeds=(1,), neighbours=2):
    """A group of runs with these features."""
    for seed in seeds:
        config = {"fdc.neighbours": neighbours}
        write_run(folder / f"seed_{seed}", benchmark="digits", seed=seed, config=config)
        if features is not None:
            write_features(folder / f"seed_{seed}" / "features", features)
    return runs.load([folder])[0][0]


def swept_of(group):
    """The names of accuracies at values of settings."""
    return {name for name in group.numbers["quantity"] if "=" in name}


def test_every_seed_is_analysed_and_the_first_has_distributions(tmp_path):
    group = load(tmp_path, feature_set(), seeds=(1, 2))
    # Another learner is swept if asked to be.
    other = dataclasses.replace(group, learner="loda")
    group = runs.analyse(group)
    assert group.missing == []
    assert {name: len(seeds) for name, seeds in group.analyses.items()} == {
        "similarity": 2,
        "residual_contributions": 2,
        "residual_distributions": 1,
        "prototype_geometry": 1,
    }
    expected = {"neighbours=1", "neighbours=2", "nearest=1", "nearest=2"}
    for name, values in analysis.VALUES.items():
        expected |= {f"{name}={value:g}" for value in values}
    assert swept_of(group) == expected
    rank = stats.spearmanr(*group.analyses["similarity"][0][["adapted_affinity", "error"]].T.values)
    assert group.values("adapted_affinity", "correlation")[1] == pytest.approx(rank.statistic)
    contributions = group.analyses["residual_contributions"][1]["own"]
    assert group.values("own", "contribution")[2] == pytest.approx(contributions.mean())
    assert not swept_of(runs.analyse(other))
    other = runs.analyse(other, {"attenuation": [0.1]})
    assert len(other.values("fdc", "attenuation=0.1")) == 2


def test_neighbours_are_no_more_than_the_classes_with_images(tmp_path):
    features = feature_set()
    *others, last = features.tasks
    one_class = last.labels == last.classes[0]
    names = ("adapted", "pretrained", "labels")
    last = last._replace(**{name: getattr(last, name)[one_class] for name in names})
    group = load(tmp_path, features._replace(tasks=(*others, last)), neighbours=1)
    group = runs.analyse(group, {"neighbours": ()})
    assert swept_of(group) == {"neighbours=1", "nearest=1"}


def test_missing_analyses_have_a_reason(tmp_path):
    group = runs.analyse(load(tmp_path / "a", feature_set(tasks=1)), {})
    assert group.missing == ["no similarity: a single task"]
    group = runs.analyse(load(tmp_path / "b", None))
    (reason,) = group.missing
    assert group.analyses == {} and "no diagnostics or sweeps: no saved features" in reason


def labels_read(folder):
    """Reads the labels, and notes that it was called."""
    with open(folder.parent / "calls", "a") as file:
        file.write("x")
    return np.load(folder / "test_labels.npy")


def test_analyses_follow_features_whose_dates_stay(tmp_path, monkeypatch):
    """They are repeated only if the features have changed."""
    features, folder = feature_set(), tmp_path / "features"
    monkeypatch.setattr(analysis, "user_cache", lambda: tmp_path / "cache")
    write_features(folder, features)
    for _ in range(2):
        labels = analysis.cached(labels_read, folder)
        np.testing.assert_array_equal(labels, features.test_labels)
    path = folder / "test_labels.npy"
    status = path.stat()
    np.save(path, features.test_labels[::-1])
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    labels = analysis.cached(labels_read, folder)
    np.testing.assert_array_equal(labels, features.test_labels[::-1])
    assert (tmp_path / "calls").read_text() == "xx"
