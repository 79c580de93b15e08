"""The table at the end of a run."""

from fdc_jax.report import console, words
from tests.report import made_up

GAUSSIANS = words.method_title("gaussians")


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
        "Class Gaussians follow the encoder.",
    ]


def test_several_seeds_have_means_and_intervals(capsys):
    heading, rows, _ = shown(capsys, made_up.run(1), made_up.run(2))
    assert "seeds 1, 2" in heading and all(" ± " in row[0] for row in rows.values())
    assert all(" to " in rows[name][3] for name in ("FDC", GAUSSIANS))
