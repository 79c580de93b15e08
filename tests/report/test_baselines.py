"""What no training comes to, and how the report says whether a run beats it."""

import numpy as np
import pytest

from fdc_jax.report import baselines, console, frames, runs
from tests.report.feature_sets import feature_set, write_features
from tests.report.made_up import results, write_run


def group_of(folder, wrong=0, features=True, labels=None):
    """A run whose FDC is wrong on so many of its test images; all others are right."""
    of = feature_set()
    true = of.test_labels if labels is None else labels
    fdc = np.where(np.arange(len(true)) < wrong, true + 1, true)
    columns = {"label": true, "raw_label": np.zeros_like(true), "fdc_label": fdc}
    accuracy = {"raw": 100 * np.mean(true == 0), "fdc": 100 * np.mean(fdc == true), "oracle": 99.0}
    sizes = {"num_test_images": len(true), "num_classes": int(true.max()) + 2}
    found = results(benchmark="digits", accuracy=accuracy, **sizes)
    write_run(folder, found, columns)
    if features:
        write_features(folder / "features", of)
    ((group,), _) = runs.load([folder])
    return group


def test_nearest_class_means_of_the_pretrained_features(tmp_path):
    group, of = group_of(tmp_path), feature_set()
    images = np.concatenate([task.pretrained for task in of.tasks]).astype(np.float64)
    labels = np.concatenate([task.labels for task in of.tasks])
    means = np.stack([images[labels == c].mean(axis=0) for c in range(labels.max() + 1)])
    # Cosines of the means, as `NearestClassMean` has them.
    unit = means / np.linalg.norm(means, axis=1, keepdims=True)
    nearest = (of.test_pretrained @ unit.T).argmax(axis=1)
    accuracy = 100 * np.mean(nearest == of.test_labels)
    assert group.values("ncm-pretrained") == [pytest.approx(accuracy)]
    assert group.values("gain:ncm-pretrained") == [pytest.approx(accuracy - group.values("raw")[0])]
    assert group.values("ranpac-pretrained") and "ncm-pretrained" not in group.methods


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (0, "Not significantly better than no training at all: FDC minus "),
        (90, "No training at all does better: FDC"),
    ],
)
def test_the_verdict_is_the_paired_interval_against_the_best_of_no_training(
    tmp_path, capsys, wrong, said
):
    group = group_of(tmp_path, wrong)
    of = frames.leading(group)
    assert of | {"untrained": ""} == {
        "best": "fdc", "raw": "raw", "untrained": "", "oracle": "oracle"
    }  # fmt: skip
    assert group.values(of["untrained"])[0] == max(group.values(n)[0] for n in baselines.NAMES)
    gain = group.gain("fdc", of["untrained"])
    assert gain.mean == pytest.approx(group.values("fdc")[0] - group.values(of["untrained"])[0])
    assert frames.verdict(group).startswith(said)
    console.show(group)
    assert frames.verdict(group) in capsys.readouterr().out


def test_features_of_other_images_or_none_say_nothing(tmp_path):
    other = group_of(tmp_path / "a", labels=feature_set().test_labels[::-1])
    for group in (other, group_of(tmp_path / "b", features=False)):
        assert not group.values("ncm-pretrained") and frames.verdict(group) == ""
        assert "untrained" not in frames.leading(group)
