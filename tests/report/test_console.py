"""The table at the end of a run."""

from fdc_jax.report import console, words
from tests.report import made_up

GAUSSIANS = words.method_title("gaussians")


def shown(capsys, *per_seed):
    """The heading, cells of each row by its title, and what follows the table."""
    console.show(per_seed)
    heading, table, rest = capsys.readouterr().out.strip().split("\n\n")
    rows = [[cell for cell in line.split("  ") if cell] for line in table.splitlines()[2:]]
    cells = {row[0]: [cell.strip() for cell in row[1:]] for row in rows}
    return heading, cells, rest.splitlines()


def test_one_seed_has_a_row_per_calibrator(capsys):
    of = made_up.results("digits", "splitlora")
    of["selected"] = {"components": "pac+rlc_adapted_view"}
    heading, rows, rest = shown(capsys, of)
    assert heading == "digits, SplitLoRA, seed 1: 3 tasks, 9 classes, 90 test images"
    assert list(rows) == ["Raw", "FDC", "FDC, the paper's choice", GAUSSIANS, "Task given"]
    for title, name in (("FDC", "fdc"), (GAUSSIANS, "gaussians")):
        accuracy, routing = of["accuracy"][name], of["routing_accuracy"][name]
        gain, average = accuracy - of["accuracy"]["raw"], of["average_incremental_accuracy"][name]
        expected = [f"{accuracy:.2f}", f"{gain:+.2f}", f"{routing:.2f}", f"{average:.2f}"]
        assert rows[title] == expected
    chosen = of["components"]["pac+rlc_adapted_view"]
    assert rows["FDC, the paper's choice"][0] == f"{chosen:.2f}"
    assert rows["Task given"] == ["95.00", "95.00"]
    assert rest == ["Class Gaussians follow the encoder."]


def test_several_seeds_have_means_and_an_interval(capsys):
    heading, rows, (_, interval) = shown(capsys, made_up.results(), made_up.results(seed=2))
    assert "seeds 1, 2" in heading and all(" ± " in row[0] for row in rows.values())
    assert interval.startswith("gain of FDC: 95 % t interval over seeds ")
