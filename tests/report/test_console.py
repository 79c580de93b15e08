"""The table at the end of a run."""

from fdc_jax.report import console, formatting
from tests.report import made_up

GAUSSIANS = formatting.method_title("gaussians")


def shown(capsys, *members):
    """The heading, cells of each row by its title, and what follows the table."""
    (group,) = made_up.groups(*members)
    console.show(group)
    heading, table, rest = capsys.readouterr().out.strip().split("\n\n")
    rows = [[cell for cell in line.split("  ") if cell] for line in table.splitlines()[2:]]
    cells = {row[0]: [cell.strip() for cell in row[1:]] for row in rows}
    return heading, cells, rest.splitlines()


def test_one_seed_has_a_row_per_calibrator(capsys):
    run = made_up.run(1, "digits", "splitlora", 3)
    heading, rows, rest = shown(capsys, run)
    assert heading == "digits, SplitLoRA, seed 1: 3 tasks, 9 classes, 90 test images"
    assert list(rows) == ["Raw", "FDC", "FDC, the paper's choice", GAUSSIANS, "Task given"]
    of, (group,) = run.results, made_up.groups(run)
    accuracy, gain = of["accuracy"]["gaussians"], group.gain("gaussians")
    assert rows[GAUSSIANS][0] == f"{accuracy:.2f}"
    assert rows[GAUSSIANS][2] == f"{accuracy - of['accuracy']['raw']:+.2f}"
    assert rows[GAUSSIANS][3] == f"{gain.low:+.2f} to {gain.high:+.2f}"
    assert rows[GAUSSIANS][4] == f"{of['routing_accuracy']['gaussians']:.2f}"
    assert rows["FDC, the paper's choice"][0] == f"{of['components']['pac+rlc_adapted_view']:.2f}"
    assert rows["Task given"][0] == "95.00"
    assert rest == [
        f"Best calibrator of the run: {GAUSSIANS}.",
        "Class Gaussians with drift compensation.",
    ]


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
        run.results |= {"unlike_learned": share, "calibration_error": error}
    _, _, rest = shown(capsys, *members)
    assert any(line.startswith("Of the test images, 12.0 % are") for line in rest)
    assert any(line.endswith("in points: 1.2 for class Gaussians.") for line in rest)
