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


def rows(page, header):
    """Returns the cells of the table under a header, by the first cell of a row."""
    lines = iter((REPOSITORY / page).read_text().splitlines())
    assert any(line.startswith(header) for line in lines), header
    table = {}
    for line in lines:
        if not line.startswith("|"):
            break
        name, *cells = (cell.strip(" *%") for cell in line.strip("|").split("|"))
        table[re.sub(r"\[(.+?)\]\(.*?\)", r"\1", name).strip("`")] = cells
    return {name: cells for name, cells in table.items() if not re.fullmatch("[-:]+", name)}


def spread(values, sign=""):
    """Returns the mean and the sample standard deviation as pages show them."""
    return f"{statistics.mean(values):{sign}.2f} ± {statistics.stdev(values):.2f}"


@pytest.fixture(scope="module")
def gaussians():
    """Values of the three seeds by learner and quantity."""
    runs = saved("gaussians_definition")["further"]["runs"]
    kinds = ("raw", "fdc", "present", "stays", "one_pass", "task_given")
    return {
        learner: {kind: [run[kind] for run in runs if run["learner"] == learner] for kind in kinds}
        for learner in ("cumulative_lora", "slca")
    }


def test_the_first_screens_quote_the_same_record(gaussians):
    table = rows("README.md", "| CIFAR-100 in 20 tasks")
    for name, learner in (("Cumulative-LoRA", "cumulative_lora"), ("SLCA", "slca")):
        means = [statistics.mean(gaussians[learner][kind]) for kind in ("raw", "fdc", "present")]
        assert [float(cell) for cell in table[name]] == pytest.approx(means, abs=0.0501)
    ((first, cells),) = rows("docs/index.md", "| heads alone").items()
    assert [first, *cells] == [f"{cell} %".strip(" %") for cell in table["Cumulative-LoRA"]]


def test_class_gaussians_beyond_the_paper(gaussians):
    table = rows("docs/beyond.md", "| | FDC | class Gaussians | adapted view alone |")
    for name, learner in (("Cumulative-LoRA", "cumulative_lora"), ("SLCA", "slca")):
        kinds = ("fdc", "present", "one_pass")
        assert table[name] == [f"{statistics.mean(gaussians[learner][kind]):.2f}" for kind in kinds]
    table = rows("docs/results.md", "| | Raw | FDC | class Gaussians, stored | followed |")
    for name, learner in (("Cumulative-LoRA, 20", "cumulative_lora"), ("SLCA (", "slca")):
        (cells,) = (cells for row, cells in table.items() if row.startswith(name))
        kinds = ("raw", "fdc", "stays", "present", "task_given")
        assert [cell.replace("*", "") for cell in cells] == [
            spread(gaussians[learner][kind]) for kind in kinds
        ]


def test_digits():
    table, record = rows("docs/results.md", "| | Raw | FDC | task given |"), saved("digits")
    for name in ("final accuracy", "average incremental accuracy"):
        key = name.removeprefix("final ").replace(" ", "_")
        shown = [f"{each['mean']:.2f} ± {each['std']:.2f}" for each in record[key].values()]
        assert [cell for cell in table[name] if cell] == shown


def test_components_of_reduced_cifar100():
    record = saved("cifar100_reduced")
    table = rows("docs/results.md", "| Cumulative-LoRA | accuracy | gain |")
    names = {name.lower().replace(" ", ""): cells for name, cells in table.items()}
    keys = {"fdc": "full", "fdc,adaptedviewonly": "adapted_view"}
    keys |= {"fdc,pretrainedviewonly": "pretrained_view"}
    for name, cells in names.items():
        if name == "taskgiven":
            number = record["accuracy"]["oracle"]
        else:
            number = record["components"][keys.get(name, name)]
        assert cells[0] == f"{number['mean']:.2f} ± {number['std']:.2f}", name


@pytest.mark.parametrize("name", LEARNERS)
def test_learners_of_reduced_cifar100(name):
    cells = rows("docs/results.md", "| | Raw | FDC, the paper's components |")[name]
    runs = saved("cifar100_reduced_learners")["learners"][LEARNERS[name]].values()
    shown = [spread([run["accuracy"]["raw"] for run in runs])]
    shown.append(spread([run["selected"]["accuracy"] for run in runs]))
    shown.append(spread([run["accuracy"]["fdc"] for run in runs]))
    shown.append(spread([run["accuracy"]["oracle"] for run in runs]))
    assert cells == shown


def test_pytorch_and_the_digits_command_agree():
    """Both train with the same random numbers; a test image is 0.17 of a percent."""
    with open(REPOSITORY / "results" / "reference_pytorch_digits.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    accuracy = saved("digits")["accuracy"]
    for quantity in ("raw", "fdc", "oracle"):
        values = [float(line["value"]) for line in lines if line["quantity"] == quantity]
        assert len(values) == 3
        assert statistics.mean(values) == pytest.approx(accuracy[quantity]["mean"], abs=0.2)
