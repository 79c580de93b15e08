"""The table at the end of a run, and how it compares with no training."""

import numpy as np
import pytest

from fdc_jax import calibration
from fdc_jax.report import analysis, console, formatting, runs
from tests.report import made_up
from tests.report.feature_sets import feature_set, write_features

GAUSSIANS = formatting.method_title("gaussians")


def shown(capsys, *members):
    """The heading, cells of each row by its title, and the lines below the table."""
    (group,) = made_up.groups(*members)
    console.show(group)
    heading, table, explanation, rest = capsys.readouterr().out.strip().split("\n\n")
    assert explanation.split() == console.FDC_IN_WORDS.split()
    cells = {}
    for line in table.splitlines()[2:]:
        title, *others = [cell.strip() for cell in line.split("  ") if cell]
        cells[title] = others
    return heading, cells, rest.splitlines()


def test_one_seed_has_a_row_per_calibrator(capsys):
    run = made_up.run(1, "digits", "splitlora", 3)
    heading, rows, rest = shown(capsys, run)
    assert heading == "digits, SplitLoRA, seed 1: 3 tasks, 9 classes, 90 test images"
    assert list(rows) == ["Raw", "FDC", "FDC, the paper's choice", GAUSSIANS, "Task given"]
    accuracy = run.results.components["pac+rlc_adapted_view"]
    assert rows["FDC, the paper's choice"][0] == f"{accuracy:.2f}"
    assert len(rows[GAUSSIANS]) == 6  # without its storage
    assert rest == [
        f"Best calibrator of the run: {GAUSSIANS}.",
        "Forgetting and backward transfer, points: Raw 1.5, -1.5; FDC 1.5, -1.5; Class Gaussians "
        "1.5, -1.5.",
        "Class Gaussians with drift compensation.",
    ]


def test_seeds_and_departures_stand_beside_the_papers_numbers(capsys):
    members = [made_up.run(seed, **{"train.epochs": 5}) for seed in (1, 2)]
    heading, rows, rest = shown(capsys, *members)
    assert "seeds 1, 2" in heading and "84.34 ± 0.15" in rows["Raw"]
    assert "The paper's numbers are of other settings; here: epochs 5." in rest


def test_notes_are_means_over_seeds():
    members = made_up.run(1, "digits"), made_up.run(2, "digits")
    for run, share, chance in zip(members, (10.0, 14.0), (0.4, 0.6), strict=True):
        run.results.unlike_learned = share
        run.results.calibration_error = {"gaussians": share / 10}
        run.results.chance_calibration_error = {"gaussians": chance}
    _, confidence, unlike = console.notes(made_up.groups(*members)[0])
    assert " is 1.2 points " in confidence and confidence.endswith(" would seem 0.5 off.")
    assert unlike.startswith("12.0 % of the test images are flagged")
    for run in members:
        run.results.chance_calibration_error = {}
    assert console.notes(made_up.groups(*members)[0])[1].endswith(" on average.")


# No training -------------------------------------------------------------------------------------


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
