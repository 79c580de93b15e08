"""The paper's numbers as data against the paper's source, where that is at hand."""

import re

import pytest

from fdc_jax import learners
from fdc_jax.calibration.components import COMPONENTS
from fdc_jax.report import paper
from fdc_jax.report.selection import COMBINATIONS
from tests.conftest import SHARED_ASSETS

TITLES = {title: name for name, title in paper.LEARNER_TITLES.items()}


@pytest.fixture(scope="module")
def source():
    path = SHARED_ASSETS.parent / "paper.tex"
    if not path.exists():
        pytest.skip("needs the paper's source, looked for in ../shared/paper.tex")
    return path.read_text(encoding="utf-8")


def tabular(source, label):
    """Body of the table with a label."""
    text = source[source.index(rf"\label{{{label}}}") :]
    return text[text.index(r"\begin{tabular") : text.index(r"\end{tabular")]


def cells(line):
    """All mean and deviation pairs of a line, in any of the ways that the paper writes them."""
    line = re.sub(r"\\pct\{([^}]*)\}\{([^}]*)\}", r"\1±\2", line)
    line = re.sub(r"\\!?\\?pm\\?!?|\\!\\pm\\!", "±", line).replace(r"\!", "")
    found = re.findall(r"([+-]?)\$?\s*(?:\\mathbf\{)?([+-]?[\d.]+)±([\d.]+)", line)
    return [(float(sign + mean), float(std)) for sign, mean, std in found]


def pairs(row):
    return [(each.mean, each.std) for each in row.values()]


def rows_of_five(source, label):
    lines = re.split(r"\\\\(?![a-z])", tabular(source, label))
    return [line for line in lines if len(cells(line)) == 5]


def test_benchmark(source):
    rows = rows_of_five(source, "tab:current-benchmark")
    assert len(rows) == 18
    for raw, fdc in zip(rows[::2], rows[1::2], strict=True):
        (learner,) = [name for title, name in TITLES.items() if f"{title} &" in raw]
        assert "+ FDC" in fdc
        assert pairs(paper.accuracy(learner, "raw")) == cells(raw)
        assert pairs(paper.accuracy(learner, "fdc")) == cells(fdc)


def test_ablation(source):
    rows = rows_of_five(source, "tab:current-ablation")
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


def test_plugin(source):
    rows = rows_of_five(source, "tab:plugin")
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


def test_average_incremental_accuracy(source):
    rows = rows_of_five(source, "tab:current-aia")
    assert len(rows) == 9
    for line in rows:
        (learner,) = [name for title, name in TITLES.items() if f"{title} &" in line]
        assert pairs(paper.average_incremental_accuracy(learner)) == cells(line)


def test_logit_standardisation(source):
    start = source.index(r"\def\motivationtablerows")
    body = source[start : source.index(r"\bottomrule}", start)]
    found = [pair for line in body.split(r"\\") for pair in cells(line)]
    assert pairs(paper.logit_standardisation()) == found and len(found) == 5


def numbers(line):
    return [float(each.replace(",", "")) for each in re.findall(r"[+-]?[\d,]*\.?\d+", line)]


@pytest.mark.parametrize(
    ("label", "accessor", "order"),
    [
        ("tab:training", paper.partition, None),
        ("tab:app-cost", paper.cost, None),
        (
            "tab:app-latency",
            paper.latency,
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
def test_tables_without_deviations(source, label, accessor, order):
    titles = ["CIFAR-100", "ImageNet-A", "ImageNet-R", "CUB-200", "Omni[a-zB.]*"]
    lines = tabular(source, label).split(r"\\")
    for name, title in zip(paper.benchmarks(), titles, strict=True):
        line = next(line for line in lines if re.search(rf"{title} &", line))
        of = accessor(name)
        expected = [of[key] for key in order] if order else list(of.values())
        assert numbers(line.split("&", 1)[1]) == expected


def test_every_cell_with_a_deviation_is_in_the_data(source):
    """No pair of the tables is left out, whichever table it is in."""
    known = {
        pair
        for learner in TITLES.values()
        for row in (
            paper.accuracy(learner, "raw"),
            paper.accuracy(learner, "fdc"),
            paper.average_incremental_accuracy(learner),
            paper.plugin(learner, "selected").gains,
            paper.plugin(learner, "full").gains,
        )
        for pair in pairs(row)
    }
    known |= {pair for name in COMPONENTS for pair in pairs(paper.ablation(name))}
    known |= set(pairs(paper.logit_standardisation()))
    tables = source[source.index("%% file: tables/") :]
    found = {pair for line in re.split(r"\\\\(?![a-z])|\n", source) for pair in cells(line)}
    assert len(found) > 200 and "tab:plugin" in tables
    assert found <= known


def test_settings(source):
    body = tabular(source, "tab:app-settings")
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


# Without the source -------------------------------------------------------------------------------


def test_every_row_has_all_five_benchmarks():
    for learner in paper.LEARNER_TITLES:
        rows = [paper.accuracy(learner, kind) for kind in ("raw", "fdc")]
        rows += [paper.plugin(learner, kind).gains for kind in ("selected", "full")]
        assert all(list(row) == paper.benchmarks() for row in rows)
        assert all(each.std > 0 for row in rows for each in row.values())
    assert paper.accuracy("unknown", "raw") == {} and paper.plugin("unknown", "full") is None


def test_gains_and_accuracies_of_the_paper_agree():
    """Rounding aside, accuracy after is accuracy before plus gain; so no digit is mistyped."""
    for learner in paper.LEARNER_TITLES:
        before, after = paper.accuracy(learner, "raw"), paper.accuracy(learner, "fdc")
        gains = paper.plugin(learner, "selected").gains
        for name in paper.benchmarks():
            assert abs(before[name].mean + gains[name].mean - after[name].mean) < 0.0151
        mean = sum(gain.mean for gain in gains.values()) / 5
        assert abs(mean - paper.plugin(learner, "selected").average) < 0.0101


def test_selections_are_those_of_the_calibration():
    for learner in paper.LEARNER_TITLES:
        switches = paper.plugin(learner, "selected").switches
        assert COMBINATIONS[switches] == learners.selected(learner)
    assert set(COMBINATIONS.values()) <= set(COMPONENTS)
    assert set(paper.COMPONENT_TITLES) == set(COMPONENTS)


def test_unknown_names_stay_themselves():
    assert paper.learner_title("mine.learner") == "mine.learner"
    assert paper.benchmark_title("omnibench") == "OmniBenchmark"
    assert paper.partition("digits") == {}
