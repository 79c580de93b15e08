"""The paper's numbers as data against the paper's tables, of which a copy lies beside this file."""

import re
from pathlib import Path

import numpy as np
import pytest

from fdc_jax import learners
from fdc_jax.report import paper, quantities, reference, rows
from fdc_jax.run import configuration
from fdc_jax.run.config import Config
from tests.conftest import SHARED_ASSETS

TABLES = Path(__file__).with_name("paper_tables.tex").read_text(encoding="utf-8")
# In the paper's order; those behind it have no row.
LEARNERS = [name for name in learners.names() if learners.find(name).paper_row < 100]


@pytest.fixture
def source():
    """The source of the paper."""
    path = SHARED_ASSETS.parent / "paper.tex"
    if not path.exists():
        pytest.skip("needs the paper's source, looked for in ../shared/paper.tex")
    return path.read_text(encoding="utf-8")


def test_the_copy_has_lines_of_the_paper_alone(source):
    lines = {line.rstrip() for line in source.splitlines()}
    assert [line for line in TABLES.splitlines()[1:] if line not in lines] == []


def tabular(label):
    """Body of the table with a label."""
    text = TABLES[TABLES.index(label) :]
    return text[: text.find(r"\end{tabular")]


def cells(line):
    """All mean and deviation pairs of a line, in any of the ways that the paper writes them."""
    line = re.sub(r"\\pct\{([^}]*)\}\{([^}]*)\}", r"\1±\2", line)
    line = re.sub(r"\\!?\\?pm\\?!?|\\!\\pm\\!", "±", line).replace(r"\!", "")
    pairs = re.findall(r"([+-]?)\$?\s*(?:\\mathbf\{)?([+-]?[\d.]+)±([\d.]+)", line)
    return [(float(sign + mean), float(std)) for sign, mean, std in pairs]


def lines_of_five(label):
    """Lines of a table with a number for each benchmark."""
    lines = re.split(r"\\\\(?![a-z])", tabular(label))
    return [line for line in lines if len(cells(line)) == 5]


def find(benchmark, learner, name):
    """Returns the paper's row of a quantity."""
    table = paper.published().set_index(rows.MATCH)
    return table.loc[(benchmark, learner, *quantities.parse(name))]


def row(learner, quantity):
    """The paper's numbers of a quantity on its five benchmarks."""
    of_benchmarks = [find(name, learner, quantity) for name in paper.benchmarks()]
    return [(of["value"], of["std"]) for of in of_benchmarks]


# TSF, E_0 and E_T of what learners select.
SWITCHES = {
    "full": "1 & 1 & 1",
    "pac+rlc_adapted_view": "0 & 0 & 1",
    "pac+rlc_pretrained_view": "0 & 1 & 0",
}
# Learner, quantity and components of the rows of the table of learners with FDC plugged in.
PLUGGED = []
for name in LEARNERS[1:]:
    PLUGGED.append((name, "gain:selected", learners.selected(name)))
    if learners.selected(name) != "full":
        PLUGGED.append((name, "gain:full", "full"))

COMBINATIONS = [name for name in paper.COMPONENT_TITLES if not name.startswith("pac+rlc_")][1:]
ROWS = {
    "tab:current-benchmark": [
        (name, quantity) for name in LEARNERS for quantity in ("raw", "selected")
    ],
    "tab:current-ablation": [
        ("cumulative_lora", name) for name in ("raw", *map("gain:{}".format, COMBINATIONS))
    ],
    "tab:plugin": [(name, quantity) for name, quantity, _ in PLUGGED],
    "tab:current-aia": [(name, "aia:raw") for name in LEARNERS],
}


@pytest.mark.parametrize("label", ROWS)
def test_rows_with_deviations_are_the_papers_in_its_order(label):
    assert [cells(line) for line in lines_of_five(label)] == [row(*of) for of in ROWS[label]]


def test_switches_and_averages_of_plugged_learners():
    for line, (name, quantity, components) in zip(
        lines_of_five("tab:plugin"), PLUGGED, strict=True
    ):
        assert f"& {SWITCHES[components]} &" in line
        assert find(paper.AVERAGE, name, quantity)["value"] == float(line.split("&")[-1])
    assert paper.plugged() == LEARNERS[1:]


def test_logit_standardisation():
    pairs = cells(tabular(r"\def\motivationtablerows"))
    assert row("cumulative_lora", "gain:ls") == pairs and len(pairs) == 5


WITHOUT_DEVIATIONS = {
    "tab:app-cost": """
    training_minutes fdc_minutes peak_memory_gib fdc_peak_memory_gib storage_mib
    """,
    "tab:app-latency": """
    latency_ms:baseline latency_ms:single added_latency_percent:single latency_ms:dual
    added_latency_percent:dual inference_mib:baseline added_mib:single added_mib:dual
    """,
    "tab:training": "",
}


@pytest.mark.parametrize("label", WITHOUT_DEVIATIONS)
def test_rows_without_deviations(label):
    titles = ["CIFAR-100", "ImageNet-A", "ImageNet-R", "CUB-200", "Omni[a-zB.]*"]
    lines = re.split(r"\\\\(?!%)", tabular(label))
    for benchmark, title in zip(paper.benchmarks(), titles, strict=True):
        line = next(line for line in lines if re.search(rf"{title} &", line)).split("&", 1)[1]
        numbers = re.findall(r"\d*\.?\d+", line.replace(",", ""))
        values = [*paper.sizes(benchmark).values()]
        if names := WITHOUT_DEVIATIONS[label].split():
            of_names = [find(benchmark, "cumulative_lora", name) for name in names]
            values = [of["value"] for of in of_names]
            assert np.isnan([of["std"] for of in of_names]).all()
        assert [*map(float, numbers)] == values


def test_every_mean_of_the_paper_is_a_line_of_a_reference():
    lines = reference.read(paper.CSV)
    others = ("tab:app-latency", "app:tsf-pca-sensitivity")
    # Table current-ablation repeats the five of Raw.
    assert len(lines[~lines["source"].isin(others)]) == 287 - 5
    assert len(lines) == 282 + 40 + 6


SETTINGS = {
    "train.epochs": "{:g} / 64",
    "train.batch_size": "20 / {:g}",
    "train.rank": "{:g} / key and value",
    "class_order_seed": "1,2,3$ / {:g}",
    "fdc.retained_energy": "& {:g}",
    "fdc.attenuation": "& {:g}",
    "fdc.neighbours": "neighbors $K$ & {:g}",
}


def test_settings_stand_in_the_table_of_the_paper():
    fields, table = paper.NUMBERS["protocol"]["fields"], tabular("tab:app-settings")
    for field, text in SETTINGS.items():
        assert text.format(fields[field]) in table, field
    assert r"5\times10^{-4}$ / $5\times10^{-3}" in table
    rates = [fields[f"train.{part}_learning_rate"] for part in ("increment", "head")]
    assert rates == [5e-4, 5e-3]


def test_defaults_are_the_settings_of_the_paper():
    protocol = paper.NUMBERS["protocol"]
    stated = protocol["fields"] | protocol["unstated"]
    assert stated.items() <= configuration.flatten(Config()).items()
    assert [*range(1, paper.NUMBERS["num_seeds"] + 1)] == protocol["training_seeds"]
