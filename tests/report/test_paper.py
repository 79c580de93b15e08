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


def find(benchmark, learner, name):
    """Returns the paper's row of a quantity."""
    table = paper.published().set_index(rows.MATCH)
    return table.loc[(benchmark, learner, *quantities.parse(name))]


def row(learner, quantity):
    """The paper's numbers of a quantity on its five benchmarks."""
    found = [find(name, learner, quantity) for name in paper.benchmarks()]
    return [(of["value"], of["std"]) for of in found]


# TSF, E_0 and E_T of what learners select.
SWITCHES = {
    "full": (1, 1, 1),
    "pac+rlc_adapted_view": (0, 0, 1),
    "pac+rlc_pretrained_view": (0, 1, 0),
}


def plugged():
    """Learner, quantity and switches of the rows of the table of learners with FDC plugged in."""
    for learner in LEARNERS[1:]:
        selected = learners.selected(learner)
        yield learner, "gain:selected", SWITCHES[selected]
        if selected != "full":
            yield learner, "gain:full", (1, 1, 1)


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        (
            "tab:current-benchmark",
            [row(name, quantity) for name in LEARNERS for quantity in ("raw", "selected")],
        ),
        (
            "tab:current-ablation",
            [
                row("cumulative_lora", "raw" if name == "raw" else f"gain:{name}")
                for name in list(paper.COMPONENT_TITLES)[:10]
            ],
        ),
        ("tab:plugin", [row(*of[:2]) for of in plugged()]),
        ("tab:current-aia", [row(name, "aia:raw") for name in LEARNERS]),
    ],
)
def test_rows_with_deviations_are_the_paper_s_in_its_order(label, expected):
    assert [cells(line) for line in lines_of_five(label)] == expected
    assert len(expected) >= 9


def test_switches_and_averages():
    rows = zip(lines_of_five("tab:plugin"), plugged(), strict=True)
    for line, (learner, quantity, switches) in rows:
        found = re.search(r"& ([01]) & ([01]) & ([01]) &", line)
        assert switches == tuple(int(each) for each in found.groups())
        average = find(paper.AVERAGE, learner, quantity)
        assert average["value"] == float(line.split("&")[-1])
    assert paper.plugged() == LEARNERS[1:]


def test_logit_standardisation():
    found = [
        pair for line in tabular(r"\def\motivationtablerows").split(r"\\") for pair in cells(line)
    ]
    assert row("cumulative_lora", "gain:ls") == found and len(found) == 5


COSTS = [
    *("training_minutes", "fdc_minutes", "peak_memory_gib", "fdc_peak_memory_gib"),
    "storage_mib",
]
LATENCY = [
    *("latency_ms:baseline", "latency_ms:single", "added_latency_percent:single"),
    *("latency_ms:dual", "added_latency_percent:dual", "inference_mib:baseline"),
    *("added_mib:single", "added_mib:dual"),
]


@pytest.mark.parametrize(
    ("label", "names"),
    [("tab:training", None), ("tab:app-cost", COSTS), ("tab:app-latency", LATENCY)],
)
def test_rows_without_deviations(label, names):
    titles = ["CIFAR-100", "ImageNet-A", "ImageNet-R", "CUB-200", "Omni[a-zB.]*"]
    lines = re.split(r"\\\\(?!%)", tabular(label))
    for benchmark, title in zip(paper.benchmarks(), titles, strict=True):
        line = next(line for line in lines if re.search(rf"{title} &", line)).split("&", 1)[1]
        found = [float(each.replace(",", "")) for each in re.findall(r"[\d,]*\.?\d+", line)]
        if names is None:
            assert found == list(paper.sizes(benchmark).values())
        else:
            own = [find(benchmark, "cumulative_lora", name) for name in names]
            assert found == [of["value"] for of in own]
            assert np.isnan([of["std"] for of in own]).all()


def test_averages_of_the_sweeps_are_in_the_text():
    path = SHARED_ASSETS.parent / "paper.tex"
    if not path.exists():
        pytest.skip("needs the paper's source, looked for in ../shared/paper.tex")
    text = path.read_text(encoding="utf-8")
    for name in ("attenuation=0", "attenuation=0.5", "attenuation=1", "retained_energy=0.65"):
        mean = find(paper.AVERAGE, "cumulative_lora", name)["value"]
        assert f"{mean}\\%" in text
    # "gamma = 0.75 is only 0.06 pp lower"
    assert find(paper.AVERAGE, "cumulative_lora", "attenuation=0.75")["value"] == 77.16
    defaults = [row("cumulative_lora", "selected")]
    assert np.mean([mean for mean, _ in defaults[0]]) == pytest.approx(77.22, abs=0.005)


def test_every_mean_of_the_paper_is_a_line_of_a_reference():
    lines = reference.read(paper.CSV)
    others = ("tab:app-latency", "app:tsf-pca-sensitivity")
    tables = lines[~lines["source"].isin(others)]
    # Table current-ablation repeats the five of Raw.
    assert len(tables) + 5 == 287 and len(lines) == 282 + 40 + 6


def test_defaults_are_the_settings_of_the_paper():
    protocol = paper.NUMBERS["protocol"]
    defaults = configuration.flatten(Config())
    stated = protocol["fields"] | protocol["unstated"]
    assert {field: defaults.get(field) for field in stated} == stated
    assert [*range(1, paper.NUMBERS["num_seeds"] + 1)] == protocol["training_seeds"]


def test_settings():
    fields = paper.NUMBERS["protocol"]["fields"]
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
