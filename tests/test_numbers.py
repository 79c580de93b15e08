"""Measured numbers of the README and docs/ against their files in results/."""

import csv
import json
import re
import statistics
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
LEARNERS = {
    "EWC-LoRA": "ewc_lora",
    "SD-LoRA": "sd_lora",
    "SplitLoRA": "splitlora",
    "InfLoRA": "inflora",
    "InfLoRA+CA": "inflora_ca",
    "LoRA-Subtraction": "lora_subtraction",
    "LoDA": "loda",
    "RSIAT": "rsiat",
}


def saved(name):
    """Returns the content of a JSON file in results/."""
    return json.loads((REPOSITORY / "results" / f"{name}.json").read_text())


def table_under(page, header):
    """Returns the rows of the table under a header as lists of cells."""
    lines = iter((REPOSITORY / page).read_text().splitlines())
    assert any(line.startswith(header) for line in lines), header
    next(lines)
    table = []
    for line in lines:
        if not line.startswith("|"):
            break
        table.append([cell.strip(" *%") for cell in line.strip("|").split("|")])
    return table


def rows(page, header):
    """Returns the cells of the table under a header, by the first cell of a row."""
    table = {}
    for name, *cells in table_under(page, header):
        table[re.sub(r"\[(.+?)\]\(.*?\)", r"\1", name).strip("`")] = cells
    return table


def csv_rows(name):
    """Returns the rows of a CSV file in results/ by column."""
    with open(REPOSITORY / "results" / f"{name}.csv", newline="") as file:
        return list(csv.DictReader(file))


def spread(values):
    """Returns the mean and the sample standard deviation as pages show them."""
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"


def shown(number):
    """Returns a mean and a standard deviation of a file as pages show them."""
    return f"{number['mean']:.2f} ± {number['std']:.2f}"


@pytest.fixture(scope="module")
def reduced():
    """Mean and deviation on reduced CIFAR-100, by learner and quantity."""
    runs = saved("gaussians_definition")["further"]["runs"]
    numbers = {}
    for name, learner in (("Cumulative-LoRA", "cumulative_lora"), ("SLCA", "slca")):
        for kind in ("raw", "fdc", "stays", "present", "one_pass", "task_given"):
            values = [run[kind] for run in runs if run["learner"] == learner]
            numbers[name, kind] = spread(values)
    accuracy = saved("cifar100_reduced")["accuracy"]
    for kind, name in (("raw", "raw"), ("fdc", "fdc"), ("task_given", "oracle")):
        numbers["Cumulative-LoRA", kind] = shown(accuracy[name])
    return numbers


def test_class_gaussians_of_reduced_cifar100(reduced):
    table = rows("docs/results.md", "| | Raw | FDC | class Gaussians, stored | followed |")
    kinds = ("raw", "fdc", "stays", "present", "task_given")
    for row, name in (
        ("Cumulative-LoRA, 20 tasks, three seeds", "Cumulative-LoRA"),
        ("SLCA (`--config.learner.name=slca`), 20 tasks, three seeds", "SLCA"),
    ):
        assert table[row] == [reduced[name, kind] for kind in kinds]
    ((first, cells),) = rows("docs/index.md", "| heads alone").items()
    for cell, kind in zip([first, *cells], ("raw", "fdc", "present"), strict=True):
        assert float(cell) == round(float(reduced["Cumulative-LoRA", kind][:5]), 1)


# Quantities of tables with a row per learner, by the heading of a column.
QUANTITIES = {
    **dict.fromkeys(("Raw", "heads alone"), "raw"),
    **dict.fromkeys(("FDC", "FDC, all components on"), "fdc"),
    **dict.fromkeys(("class Gaussians", "followed", "present"), "present"),
    **dict.fromkeys(("adapted view alone", "one pass"), "one_pass"),
    "task given": "task_given",
}


def test_a_quantity_of_an_experiment_has_one_value_on_all_pages(reduced):
    """The label of a row is the experiment; labels of other experiments say what differs."""
    values = {key: {text.partition(" ")[0]} for key, text in reduced.items()}
    for page in (REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")):
        headings = []
        for line in page.read_text().splitlines():
            cells = [cell.strip(" *") for cell in line.strip("|").split("|")]
            if not line.startswith("|") or page.stem == "league":  # other learning rates
                headings = []
            elif not headings:
                headings = cells
            label = re.sub(r"[\[\]]|\(.*?\)|, 20 tasks, three seeds", "", cells[0]).strip()
            if label not in ("SLCA", "Cumulative-LoRA", *LEARNERS):
                continue
            for heading, cell in zip(headings, cells, strict=False):
                number = re.match(r"\d+\.\d+", cell)
                if heading in QUANTITIES and number:
                    values.setdefault((label, QUANTITIES[heading]), set()).add(number[0])
    assert len(values) >= 25
    for experiment, texts in values.items():
        exact = max(texts, key=len)
        for text in texts:
            digits = len(text.partition(".")[2])
            assert abs(float(text) - float(exact)) <= 0.501 * 10**-digits, (experiment, texts)


def test_numbers_of_digits():
    table = rows("docs/results.md", "| | Raw | FDC | task given |")
    numbers = saved("digits")["numbers"]
    expected = {key: shown(numbers[key]) for key in ("raw", "fdc", "oracle", "aia:raw", "aia:fdc")}
    cells = [*table["final accuracy"], *table["average incremental accuracy"]]
    assert cells == [*expected.values(), ""]


@pytest.mark.parametrize("name", ["digits_e2_lora", "cifar100_reduced_e2_lora"])
def test_numbers_of_e2_lora(name):
    page = (REPOSITORY / "docs/results.md").read_text()
    runs = [run["accuracy"] for run in saved(name)["runs"]]
    for calibrator in ("raw", "fdc", "gaussians"):
        assert spread([run[calibrator] for run in runs]) in page


def test_components_of_reduced_cifar100():
    record = saved("cifar100_reduced")
    numbers = record["components"] | {"task given": record["accuracy"]["oracle"]}
    table = rows("docs/results.md", "| Cumulative-LoRA | accuracy | gain |")
    for view in ("adapted", "pretrained"):
        table[f"{view}_view"] = table.pop(f"FDC, {view} view only")
    table["full"] = table.pop("FDC")
    for name, cells in table.items():
        key = name if name in numbers else name.lower().replace(" ", "")
        assert cells[0] == shown(numbers[key]), name


@pytest.mark.parametrize("name", LEARNERS)
def test_learners_of_reduced_cifar100(name):
    cells = rows("docs/results.md", "| | Raw | FDC, the paper's components |")[name]
    runs = saved("cifar100_reduced_learners")["learners"][LEARNERS[name]].values()
    expected = [spread([run["selected"]["accuracy"] for run in runs])]
    for calibrator in ("raw", "fdc", "oracle"):
        expected.append(spread([run["accuracy"][calibrator] for run in runs]))
    assert [cells[1], cells[0], *cells[2:]] == expected


def test_pytorch_and_the_digits_command_agree():
    """Both train with the same random numbers; a test image is 0.17 of a percent."""
    lines = csv_rows("reference_pytorch_digits")
    numbers = saved("digits")["numbers"]
    for quantity in ("raw", "fdc", "oracle"):
        values = [float(line["value"]) for line in lines if line["quantity"] == quantity]
        assert len(values) == 3
        assert statistics.mean(values) == pytest.approx(numbers[quantity]["mean"], abs=0.2)


def test_choices_of_validation_images():
    table = table_under("docs/paper.md", "| benchmark | learner | the paper's choice |")
    expected = []
    for part in saved("validation")["benchmarks"].values():
        for of in part["learners"].values():
            choices = ("the paper's choice", "own choice", "choice by validation")
            gains = [of["gains"][choice].split(", ")[1] for choice in choices]
            names = [of[choice] for choice in choices]
            cells = [f"{name}, {gain}" for name, gain in zip(names, gains, strict=True)]
            expected.append([*cells, of["settings by validation"]])
    assert [cells[2:] for cells in table] == expected


def test_results_name_no_path_of_a_machine():
    for path in (REPOSITORY / "results").rglob("*.json"):
        assert not re.search(r"[ =\"]/(home|root|tmp|work|Users|mnt)/", path.read_text()), path
