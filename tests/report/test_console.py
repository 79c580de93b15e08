"""The table at the end of a run, and how it compares with no training."""

import numpy as np
import pytest

from fdc_jax.report import analysis, console, formatting, runs
from tests.report import made_up
from tests.report.feature_sets import feature_set, write_features

GAUSSIANS = formatting.method_title("gaussians")


def shown(capsys, *members):
    """The heading, cells of each row by its title, and what follows the table."""
    (group,) = made_up.groups(*members)
    console.show(group)
    heading, table, words, rest = capsys.readouterr().out.strip().split("\n\n")
    assert words.split() == console.FDC_IN_WORDS.split()
    rows = [[cell for cell in line.split("  ") if cell] for line in table.splitlines()[2:]]
    cells = {row[0]: [cell.strip() for cell in row[1:]] for row in rows}
    return heading, cells, rest.splitlines()


def test_one_seed_has_a_row_per_calibrator(capsys):
    run = made_up.run(1, "digits", "splitlora", 3)
    heading, rows, rest = shown(capsys, run)
    assert heading == "digits, SplitLoRA, seed 1: 3 tasks, 9 classes, 90 test images"
    assert list(rows) == ["Raw", "FDC", "FDC, the paper's choice", GAUSSIANS, "Task given"]
    of, (group,) = run.results, made_up.groups(run)
    accuracy, gain = of.accuracy["gaussians"], group.gain("gaussians")
    assert rows[GAUSSIANS][0] == f"{accuracy:.2f}"
    assert rows[GAUSSIANS][2] == f"{accuracy - of.accuracy['raw']:+.2f}"
    assert rows[GAUSSIANS][3] == f"{gain.low:+.2f} to {gain.high:+.2f}"
    assert rows[GAUSSIANS][4] == f"{of.routing_accuracy['gaussians']:.2f}"
    assert rows["FDC, the paper's choice"][0] == f"{of.components['pac+rlc_adapted_view']:.2f}"
    assert rows["Task given"][0] == "95.00"
    assert rest == [
        f"Best calibrator of the run: {GAUSSIANS}.",
        "Forgetting and backward transfer, points: Raw 1.5, -1.5; FDC 1.5, -1.5; Class Gaussians "
        "1.5, -1.5.",
        "Class Gaussians with drift compensation.",
    ]


def test_equally_accurate_calibrators_are_named_together(capsys):
    run = made_up.run(1, "digits")
    run.results.accuracy |= {"raw": 60.0, "fdc": 70.0, "gaussians": 70.0}
    _, _, rest = shown(capsys, run)
    assert rest[0] == f"Most accurate, equally: FDC and {GAUSSIANS}."


def test_several_seeds_have_means_and_intervals(capsys):
    heading, rows, _ = shown(capsys, made_up.run(1), made_up.run(2))
    assert "seeds 1, 2" in heading and all(" ± " in row[0] for row in rows.values())
    assert all(" to " in rows[GAUSSIANS][place] for place in (1, 3))
    # The paper's accuracy of Cumulative-LoRA on CIFAR-100.
    assert (rows["Raw"][2], rows["FDC"][2]) == ("84.34 ± 0.15", "88.62 ± 0.13")


def test_the_paper_s_numbers_come_with_what_differs(capsys):
    _, _, rest = shown(capsys, made_up.run(1, **{"train.epochs": 5}))
    assert "The paper's numbers are of other settings; here: epochs 5." in rest


def test_notes_are_means_over_seeds(capsys):
    members = made_up.run(1, "digits"), made_up.run(2, "digits")
    for run, share in zip(members, (10.0, 14.0), strict=True):
        error = {"gaussians": share / 10}
        run.results.unlike_learned, run.results.calibration_error = share, error
    _, _, rest = shown(capsys, *members)
    assert any(line.startswith("12.0 % of the test images are flagged") for line in rest)
    sentence = (
        "The confidence stated by class Gaussians is 1.2 points too high or too low on average"
    )
    assert f"{sentence}." in rest
    for run, chance in zip(members, (0.4, 0.6), strict=True):
        run.results.chance_calibration_error = {"gaussians": chance}
    assert (
        f"{sentence}; by chance, exact confidence would seem 0.5 off." in shown(capsys, *members)[2]
    )


def test_raw_logits_may_be_the_best(capsys):
    run = made_up.run(1, "digits")
    run.results.accuracy["raw"] = 96.0
    (group,) = made_up.groups(run)
    assert group.best == "raw"
    _, _, rest = shown(capsys, run)
    assert rest[0] == "No calibrator of the run is as accurate as the raw logits."
    run.results.accuracy["gaussians"] = 96.0
    assert made_up.groups(run)[0].best == "gaussians"


# No training -------------------------------------------------------------------------------------


def group_of(folder, wrong=0, features=True, labels=None):
    """A run whose FDC is wrong on so many of its test images; all others are right."""
    of = feature_set()
    true = of.test_labels if labels is None else labels
    fdc = np.where(np.arange(len(true)) < wrong, true + 1, true)
    none = np.zeros_like(true)
    columns = {"label": true, "task": none, "raw_label": none, "fdc_label": fdc}
    accuracy = {"raw": 100 * np.mean(true == 0), "fdc": 100 * np.mean(fdc == true), "oracle": 99.0}
    sizes = {"num_test_images": len(true), "num_classes": int(true.max()) + 2}
    found = made_up.results(benchmark="digits", accuracy=accuracy, **sizes)
    made_up.write_run(folder, found, columns)
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
    assert group.row("ncm-pretrained")["mean"] == pytest.approx(accuracy)
    gain = accuracy - group.row("raw")["mean"]
    assert group.row("ncm-pretrained", "gain")["mean"] == pytest.approx(gain)
    assert group.has("ranpac-pretrained") and "ncm-pretrained" not in group.methods


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (0, "Not significantly better than no training at all ("),
        (1, "Not significantly better than no training at all ("),
        (2, "Not better than no training at all ("),
        (60, "Worse than no training at all ("),
    ],
)
def test_the_verdict_is_the_paired_interval_against_the_best_of_no_training(
    tmp_path, capsys, wrong, said
):
    group = group_of(tmp_path, wrong)
    accuracies = {name: group.row(name)["mean"] for name in analysis.UNTRAINED}
    assert group.best == "fdc" and accuracies[group.untrained] == max(accuracies.values())
    gain = group.gain("fdc", group.untrained)
    assert gain.mean == pytest.approx(group.row("fdc")["mean"] - accuracies[group.untrained])
    assert console.verdict(group).startswith(said)
    console.show(group)
    assert console.verdict(group) in capsys.readouterr().out


def test_no_verdict_without_predictions_of_both_methods():
    run = made_up.run(1, benchmark="digits")
    run.results.accuracy["ncm-pretrained"] = 50.0
    (group,) = made_up.groups(run)
    assert group.untrained == "ncm-pretrained" and console.verdict(group) == ""


def test_features_of_other_images_or_none_say_nothing(tmp_path):
    other = group_of(tmp_path / "a", labels=feature_set().test_labels[::-1])
    for group in (other, group_of(tmp_path / "b", features=False)):
        assert not group.has("ncm-pretrained") and console.verdict(group) == ""
        assert group.untrained is None
