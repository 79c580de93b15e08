"""The paper's numbers as data against the paper's tables, of which a copy lies beside this file."""

import re
from pathlib import Path

import pytest

from fdc_jax import learners
from fdc_jax.report import paper
from tests.conftest import SHARED_ASSETS

TABLES = Path(__file__).with_name("paper_tables.tex").read_text(encoding="utf-8")
# In the paper's order; those behind it have no row.
LEARNERS = [name for name in learners.names() if learners.find(name).paper_row < 100]


def test_the_copy_is_the_paper_s():
    path = SHARED_ASSETS.parent / "paper.tex"
    if not path.exists():
        pytest.skip("needs the paper's source, looked for in ../shared/paper.tex")
    lines = {line.rstrip() for line in path.read_text(encoding="utf-8").splitlines()}
    assert [line for line in TABLES.splitlines()[1:] if line not in lines] == []


def tabular(label):
    """Body of the table with a label."""
    text = TABLES[TABLES.index(label) :]
    return text[: text.find(r"\end{tabular")]


def cells(line):
    """All mean and deviation pairs of a line, in any of the ways that the paper writes them."""
    line = re.sub(r"\\pct\{([^}]*)\}\{([^}]*)\}", r"\1±\2", line)
    line = re.sub(r"\\!?\\?pm\\?!?|\\!\\pm\\!", "±", line).replace(r"\!", "")
    found = re.findall(r"([+-]?)\$?\s*(?:\\mathbf\{)?([+-]?[\d.]+)±([\d.]+)", line)
    return [(float(sign + mean), float(std)) for sign, mean, std in found]


def lines_of_five(label):
    """Lines of a table with a number for each benchmark."""
    lines = re.split(r"\\\\(?![a-z])", tabular(label))
    return [line for line in lines if len(cells(line)) == 5]


def pairs(row):
    return [(each.mean, each.std) for each in row.values()]


SWITCHES = {
    (learner, kind): tuple(row["switches"])
    for learner, kinds in paper.numbers()["tables"]["plugin"]["rows"].items()
    for kind, row in kinds.items()
}


def plugged():
    """Learner, kind and switches of the rows of the table of learners with FDC plugged in."""
    for learner in LEARNERS[1:]:
        yield learner, "selected", SWITCHES[learner, "selected"]
        if SWITCHES[learner, "selected"] != (1, 1, 1):
            yield learner, "full", (1, 1, 1)


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        (
            "tab:current-benchmark",
            [paper.row("benchmark", name, k) for name in LEARNERS for k in ("raw", "fdc")],
        ),
        (
            "tab:current-ablation",
            [
                paper.row("ablation", "cumulative_lora", name)
                for name in list(paper.COMPONENT_TITLES)[:10]
            ],
        ),
        ("tab:plugin", [paper.row("plugin", *row[:2], "gain") for row in plugged()]),
        ("tab:current-aia", [paper.row("average_incremental_accuracy", name) for name in LEARNERS]),
    ],
)
def test_rows_with_deviations_are_the_paper_s_in_its_order(label, expected):
    assert [cells(line) for line in lines_of_five(label)] == [pairs(row) for row in expected]
    assert len(expected) >= 9


def test_switches_and_averages():
    for line, (learner, kind, switches) in zip(lines_of_five("tab:plugin"), plugged(), strict=True):
        found = re.search(r"& ([01]) & ([01]) & ([01]) &", line)
        assert switches == tuple(int(each) for each in found.groups())
        assert paper.average(learner, kind) == float(line.split("&")[-1])


def test_logit_standardisation():
    found = [
        pair for line in tabular(r"\def\motivationtablerows").split(r"\\") for pair in cells(line)
    ]
    assert pairs(paper.row("logit_standardisation", "cumulative_lora")) == found and len(found) == 5


@pytest.mark.parametrize(
    ("label", "table"),
    [("tab:training", "partitions"), ("tab:app-cost", "cost")],
)
def test_rows_without_deviations(label, table):
    titles = ["CIFAR-100", "ImageNet-A", "ImageNet-R", "CUB-200", "Omni[a-zB.]*"]
    lines = tabular(label).split(r"\\")
    for name, title in zip(paper.benchmarks(), titles, strict=True):
        line = next(line for line in lines if re.search(rf"{title} &", line)).split("&", 1)[1]
        found = [float(each.replace(",", "")) for each in re.findall(r"[\d,]*\.?\d+", line)]
        assert found == list(paper.columns(table, name).values())


def test_settings():
    fields = paper.numbers()["protocol"]["fields"]
    for text, field in (
        ("{:g} / 64", "train.epochs"),
        ("20 / {:g}", "train.batch_size"),
        ("{:g} / key and value", "train.rank"),
        ("1,2,3$ / {:g}", "class_order_seed"),
        ("& {:g}", "fdc.retained_energy"),
        ("& {:g}", "fdc.attenuation"),
        ("neighbors $K$ & {:g}", "fdc.neighbours"),
    ):
        assert text.format(fields[field]) in tabular("tab:app-settings"), field
    rates = [fields[f"train.{part}_learning_rate"] for part in ("increment", "head")]
    assert rates == [5e-4, 5e-3]
    assert r"5\times10^{-4}$ / $5\times10^{-3}" in tabular("tab:app-settings")


def test_what_learners_select_are_the_paper_s_switches():
    """TSF, E_0 and E_T."""
    combinations = {"full": (1, 1, 1), "pac+rlc_adapted_view": (0, 0, 1)}
    combinations |= {"pac+rlc_pretrained_view": (0, 1, 0)}
    for learner in LEARNERS:
        switches = SWITCHES.get((learner, "selected"), (1, 1, 1))
        assert combinations[learners.selected(learner)] == switches
