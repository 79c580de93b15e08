"""The paper's numbers as data against the paper's tables, of which a copy lies beside this file."""

import re
from pathlib import Path

import pytest

from fdc_jax import learners
from fdc_jax.calibration.components import COMPONENTS
from fdc_jax.report import paper
from fdc_jax.report.tables import COMBINATIONS
from tests.conftest import SHARED_ASSETS

TABLES = Path(__file__).with_name("paper_tables.tex").read_text(encoding="utf-8")
TITLES = {learners.title(name): name for name in learners.names()}


def tabular(label):
    """Body of the table with a label."""
    text = TABLES[TABLES.index(rf"\label{{{label}}}") :]
    return text[text.index(r"\begin{tabular") : text.index(r"\end{tabular")]


def cells(line):
    """All mean and deviation pairs of a line, in any of the ways that the paper writes them."""
    line = re.sub(r"\\pct\{([^}]*)\}\{([^}]*)\}", r"\1±\2", line)
    line = re.sub(r"\\!?\\?pm\\?!?|\\!\\pm\\!", "±", line).replace(r"\!", "")
    found = re.findall(r"([+-]?)\$?\s*(?:\\mathbf\{)?([+-]?[\d.]+)±([\d.]+)", line)
    return [(float(sign + mean), float(std)) for sign, mean, std in found]


def pairs(row):
    return [(each.mean, each.std) for each in row.values()]


def rows_of_five(label):
    lines = re.split(r"\\\\(?![a-z])", tabular(label))
    return [line for line in lines if len(cells(line)) == 5]


def test_benchmark():
    rows = rows_of_five("tab:current-benchmark")
    assert len(rows) == 18
    for raw, fdc in zip(rows[::2], rows[1::2], strict=True):
        (learner,) = [name for title, name in TITLES.items() if f"{title} &" in raw]
        assert "+ FDC" in fdc
        assert pairs(paper.accuracy(learner, "raw")) == cells(raw)
        assert pairs(paper.accuracy(learner, "fdc")) == cells(fdc)


def test_ablation():
    rows = rows_of_five("tab:current-ablation")
    names = {
        "Raw": "raw",
        "TSF": "tsf",
        "Dual PAC": "pac",
        "Dual RLC": "rlc",
        "TSF + Dual PAC": "tsf+pac",
        "TSF + Dual RLC": "tsf+rlc",
        "Dual PAC + Dual RLC": "pac+rlc",
        "Full (Dual FDC)": "full",
        "FDC ($E_T$ calibration)": "adapted_view",
        "FDC ($E_0$ calibration)": "pretrained_view",
    }
    found = {line.split("&")[0].split("\n")[-1].strip(): cells(line) for line in rows}
    found = {name.removeprefix(r"\midrule").strip(): row for name, row in found.items()}
    assert set(found) == set(names)
    for title, row in found.items():
        assert pairs(paper.ablation(names[title])) == row


def test_plugin():
    rows = rows_of_five("tab:plugin")
    assert len(rows) == 12
    learner, seen = None, []
    for line in rows:
        flat = re.sub(r"LoRA-\\\\\s*Subtraction|Subtraction\}", "LoRA-Subtraction}", line)
        named = [
            name for title, name in TITLES.items() if re.search(rf"{re.escape(title)}[ }}]", flat)
        ]
        learner = max(named, key=len) if named else learner
        kind = "full" if learner in seen else "selected"
        seen.append(learner)
        row = paper.plugin(learner, kind)
        assert pairs(row.gains) == cells(line)
        switches = re.search(r"& ([01]) & ([01]) & ([01]) &", line)
        assert row.switches == tuple(int(each) for each in switches.groups())
        assert row.average == float(line.split("&")[-1])
    assert len(set(seen)) == 8


def test_average_incremental_accuracy():
    rows = rows_of_five("tab:current-aia")
    assert len(rows) == 9
    for line in rows:
        (learner,) = [name for title, name in TITLES.items() if f"{title} &" in line]
        assert pairs(paper.average_incremental_accuracy(learner)) == cells(line)


def test_logit_standardisation():
    body = TABLES[TABLES.index(r"\def\motivationtablerows") :]
    found = [pair for line in body.split(r"\\") for pair in cells(line)]
    assert pairs(paper.logit_standardisation()) == found and len(found) == 5


def numbers(line):
    return [float(each.replace(",", "")) for each in re.findall(r"[+-]?[\d,]*\.?\d+", line)]


@pytest.mark.parametrize(
    ("label", "table", "order"),
    [
        ("tab:training", "partitions", None),
        ("tab:app-cost", "cost", None),
        (
            "tab:app-latency",
            "latency",
            (
                "raw_ms",
                "single_ms",
                "single_increase_percent",
                "dual_ms",
                "dual_increase_percent",
                "raw_mib",
                "single_mib",
                "dual_mib",
            ),
        ),
    ],
)
def test_tables_without_deviations(label, table, order):
    titles = ["CIFAR-100", "ImageNet-A", "ImageNet-R", "CUB-200", "Omni[a-zB.]*"]
    lines = tabular(label).split(r"\\")
    for name, title in zip(paper.benchmarks(), titles, strict=True):
        line = next(line for line in lines if re.search(rf"{title} &", line))
        of = paper.columns(table, name)
        expected = [of[key] for key in order] if order else list(of.values())
        assert numbers(line.split("&", 1)[1]) == expected


def test_the_copy_is_the_paper_s():
    path = SHARED_ASSETS.parent / "paper.tex"
    if not path.exists():
        pytest.skip("needs the paper's source, looked for in ../shared/paper.tex")
    lines = {line.rstrip() for line in path.read_text(encoding="utf-8").splitlines()}
    assert [line for line in TABLES.splitlines()[1:] if line not in lines] == []


def test_settings():
    body = tabular("tab:app-settings")
    fields = paper.numbers()["protocol"]["fields"]
    for text, names in {
        "20 / 64": ("train.epochs", "train.batch_size"),
        r"5\times10^{-4}$ / $5\times10^{-3}": (
            "train.increment_learning_rate",
            "train.head_learning_rate",
        ),
        "10 / key and value": ("train.rank",),
        "1,2,3$ / 1993": ("class_order_seed",),
        "& 0.75": ("fdc.retained_energy",),
        "& 0.5": ("fdc.attenuation",),
        r"neighbors $K$ & 1": ("fdc.neighbours",),
    }.items():
        assert text in body
        text = re.sub(r"(\d)\\times10\^\{(-\d)\}", r"\1e\2", text)
        stated = [float(each) for each in re.findall(r"\d+(?:\.\d+)?(?:e-\d)?", text)]
        for name in names:
            assert fields[name] in stated


def test_gains_and_accuracies_of_the_paper_agree():
    """Rounding aside, accuracy after is accuracy before plus gain; so no digit is mistyped."""
    for learner in learners.names():
        before, after = paper.accuracy(learner, "raw"), paper.accuracy(learner, "fdc")
        selected = paper.plugin(learner, "selected")
        for name in paper.benchmarks():
            assert abs(before[name].mean + selected.gains[name].mean - after[name].mean) < 0.0151
        assert abs(sum(gain.mean for gain in selected.gains.values()) / 5 - selected.average) < 0.01
        assert COMBINATIONS[selected.switches] == learners.selected(learner)


def test_unknown_names_have_no_numbers():
    assert paper.accuracy("unknown", "raw") == {} and paper.plugin("unknown", "full") is None
    assert paper.columns("partitions", "digits") == {} and paper.benchmark_title("mine") == "mine"
    assert set(COMBINATIONS.values()) <= set(COMPONENTS) == set(paper.COMPONENT_TITLES)
