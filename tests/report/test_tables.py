"""Tables against numbers computed here from the results of the runs alone."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from fdc_jax.report import paper, runs, tables, words
from fdc_jax.report.tables import Table
from tests.report.made_up import predictions, results, write_run

GAUSSIANS = words.method_title("gaussians")


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    """Three seeds of one learner, two of another, one reduced run, and digits."""
    tmp_path = tmp_path_factory.mktemp("runs")
    for seed in (1, 2, 3):
        write_run(tmp_path / f"cl{seed}", seed=seed)
    for seed in (1, 2):
        write_run(tmp_path / f"sl{seed}", seed=seed, learner="splitlora")
        write_run(tmp_path / f"sr{seed}", seed=seed, learner="splitlora", benchmark="imagenet_r")
    write_run(tmp_path / "reduced", seed=4, config={"train.epochs": 5})
    write_run(tmp_path / "digits", benchmark="digits", columns=predictions(1))
    found = runs.load(sorted(tmp_path.iterdir()))
    assert found[1] == []
    return found[0]


@pytest.fixture(scope="module")
def ours(groups):
    """The tables of these, by name."""
    return built(groups)


def built(groups):
    return {each.name: each for each in tables.build(groups)}


def of_seeds(learner="cumulative_lora", benchmark="cifar100", seeds=(1, 2, 3)):
    return [results(benchmark=benchmark, learner=learner, seed=seed) for seed in seeds]


def written(values, signed=False):
    sign = "+" * signed
    return f"{np.mean(values):{sign}.2f} ± {np.std(values, ddof=1):.2f} ({len(values)})"


def lines(table, *labels):
    """Rows that begin with these labels, by their last label."""
    frame = table.frame.reset_index()
    for column, label in enumerate(labels):
        frame = frame[frame.iloc[:, column] == label]
    return {row.iloc[table.frame.index.nlevels - 1]: row for _, row in frame.iterrows()}


def test_only_rows_with_a_number_of_ours_beside_the_paper_s(ours, groups):
    assert list(ours) == [
        *("runs", "calibrators", "benchmark", "ablation", "plugin", "average_incremental_accuracy"),
        "cost",
    ]
    # The paper's number stands only beside one of ours.
    row = lines(ours["benchmark"], "Cumulative-LoRA")["paper"]
    assert row["CIFAR-100"] == "84.34 ± 0.15" and pd.isna(row["ImageNet-R"])


def test_ours_stands_above_the_paper_s(ours):
    table = ours["benchmark"]
    found = lines(table, "Cumulative-LoRA")
    raw = [each["accuracy"]["raw"] for each in of_seeds()]
    assert list(found) == ["ours", "ours, epochs 5", "paper"]
    assert found["ours"]["CIFAR-100"] == written(raw)
    # A run that departs from the protocol is labelled.
    reduced = results(seed=4)["accuracy"]["raw"]
    assert found["ours, epochs 5"]["CIFAR-100"] == f"{reduced:.2f} (1)"
    chosen = [
        each["components"]["pac+rlc_adapted_view"] for each in of_seeds("splitlora", seeds=(1, 2))
    ]
    assert lines(table, "SplitLoRA + FDC")["ours"]["CIFAR-100"] == written(chosen)


def test_gains_are_paired_within_each_seed(ours):
    gains = [each["components"]["tsf+rlc"] - each["accuracy"]["raw"] for each in of_seeds()]
    table = ours["ablation"]
    found = lines(table, "Cumulative-LoRA", "TSF + Dual RLC")
    assert found["ours"]["CIFAR-100"] == written(gains, signed=True)
    assert found["paper"]["CIFAR-100"] == "+3.21 ± 0.16"
    texts = table.frame.loc["SplitLoRA"].index.get_level_values("components")
    assert list(dict.fromkeys(texts)) == list(paper.COMPONENT_TITLES.values())


def test_an_average_is_over_all_five_benchmarks_only(ours, tmp_path):
    table, titles = ours["plugin"], paper.COMPONENT_TITLES
    texts = table.frame.loc["SplitLoRA"].index.get_level_values("components")
    assert list(dict.fromkeys(texts)) == [titles["pac+rlc_adapted_view"], titles["full"]]
    assert "Avg." not in table.frame
    for benchmark in paper.benchmarks():
        write_run(tmp_path / "five" / benchmark, benchmark=benchmark, learner="rsiat")
    table = built(runs.load((tmp_path / "five").iterdir())[0])["plugin"]
    gains = [
        each["components"]["pac+rlc_pretrained_view"] - each["accuracy"]["raw"]
        for benchmark in paper.benchmarks()
        for each in of_seeds("rsiat", benchmark, (1,))
    ]
    found = lines(table, "RSIAT", titles["pac+rlc_pretrained_view"])
    assert found["ours"]["Avg."] == f"{np.mean(gains):+.2f}" and found["paper"]["Avg."] == "+5.15"


# Statistics, data, costs --------------------------------------------------------------------------


def test_all_calibrators_stand_side_by_side(ours, groups):
    found = lines(ours["calibrators"], "Cumulative-LoRA", "CIFAR-100", "ours")
    assert list(found) == ["Raw", "FDC", GAUSSIANS, "Task given"]
    raw, own = ([each["accuracy"][name] for each in of_seeds()] for name in ("raw", "gaussians"))
    gains, row = np.subtract(own, raw), found[GAUSSIANS]
    low, high = stats.t.interval(0.95, 2, np.mean(gains), stats.sem(gains))
    assert row["accuracy"] == written(own).removesuffix(" (3)")
    assert row["gain"] == written(gains, signed=True).removesuffix(" (3)")
    assert row["interval of the gain"] == f"{low:+.2f} to {high:+.2f}"
    low, high = stats.t.interval(0.95, 2, np.mean(own), stats.sem(own))
    assert row["95 % interval"] == f"{low:.2f} to {high:.2f}"
    assert row["storage, MiB"] == "6.00 ± 0.00"
    # Of one seed, over its test images.
    (digits,) = [each for each in groups if each.benchmark == "digits"]
    gain = digits.gain("gaussians")
    row = lines(ours["calibrators"], "Cumulative-LoRA", "Digits", "ours")[GAUSSIANS]
    assert row["interval of the gain"] == f"{gain.low:+.2f} to {gain.high:+.2f}"


def test_logit_standardisation_is_of_runs_that_fitted_it(tmp_path):
    found = results(learner="loda")
    found["accuracy"]["ls"] = found["accuracy"]["raw"] + 0.25
    write_run(tmp_path / "a", found)
    write_run(tmp_path / "b")
    made = runs.load(sorted(tmp_path.iterdir()))[0]
    assert "logit_standardisation" not in built(made)  # a table of one row
    write_run(tmp_path / "c", found | {"benchmark": "digits", "learner": "rsiat"})
    made = runs.load(sorted(tmp_path.iterdir()))[0]
    row = lines(built(made)["logit_standardisation"], "LoDA")["ours"]
    assert row["CIFAR-100"] == "+0.25 (1)"


def test_costs_leave_out_cached_extraction(ours):
    found = lines(ours["cost"], "Cumulative-LoRA", "CIFAR-100", "ours")["1 x cpu"]
    assert found["training, min"] == written([601 / 60, 602 / 60, 603 / 60])
    assert found["FDC, min"] == f"{96 / 60:.2f} (1)"
    assert found["FDC storage, MiB"] == "3.00 ± 0.00 (3)"
    published = lines(ours["cost"], "Cumulative-LoRA", "CIFAR-100", "paper")
    assert next(iter(published.values()))["FDC storage, MiB"] == "11.86"


# Files --------------------------------------------------------------------------------------------


def test_files_hold_the_same_table(tmp_path):
    index = pd.MultiIndex.from_tuples([("a_b", "x|y"), ("50 %", "<b>")], names=["E_0", "what"])
    frame = pd.DataFrame({"n & m": ["-1.00 ± 0.50", math.nan], "one": ["1", "2"]}, index=index)
    table = Table("a_b", "A title", frame, "A note.")
    table.write(tmp_path)
    read = pd.read_csv(tmp_path / "a_b.csv", index_col=[0, 1], dtype=str)
    pd.testing.assert_frame_equal(read, frame, check_dtype=False)
    latex = (tmp_path / "a_b.tex").read_text()
    assert r"\caption{A title.}" in latex and r"\label{tab:a-b}" in latex
    assert r"n \& m" in latex and r"a\_b & x|y & -1.00 ± 0.50 & 1 \\" in latex
    assert r"50 \% & <b> & – & 2 \\" in latex
