"""Tables against numbers computed here from the results of the runs alone."""

import itertools
import json
import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from fdc_jax.calibration import settings
from fdc_jax.report import formatting, paper, runs, tables
from fdc_jax.report.tables import Table
from tests.report.made_up import predictions, results, with_numbers, write_run

GAUSSIANS = formatting.method_title("gaussians")


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
    assert found[1] == {}
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
    sign, count = "+" * signed, "" if len(values) == 3 else f" ({len(values)})"
    return f"{np.mean(values):{sign}.2f} ± {np.std(values, ddof=1):.2f}{count}"


def lines(table, *labels):
    """Rows that begin with these labels, by their last label."""
    frame = table.frame.reset_index()
    for column, label in enumerate(labels):
        frame = frame[frame.iloc[:, column] == label]
    return {row.iloc[table.frame.index.nlevels - 1]: row for _, row in frame.iterrows()}


def record(table, **labels):
    """The one row of a table's numbers with these labels."""
    of = table.numbers
    for name, label in labels.items():
        of = of[of[name] == label]
    assert len(of) == 1
    return of.iloc[0]


def test_tables_are_those_with_a_number_of_ours(ours):
    assert list(ours) == [
        *("benchmark", "ablation", "plugin", "average_incremental_accuracy", "task_identity"),
        *("cost", "selection", "calibrators"),
    ]
    # The paper's number stands only beside one of ours.
    row = lines(ours["benchmark"], "SplitLoRA", "")["paper"]
    assert row["CIFAR-100"] == "88.20 ± 0.28" and row["ImageNet-R"] == "78.68 ± 0.13"
    assert "CUB-200" not in ours["benchmark"].frame


def test_ours_the_paper_s_and_the_difference(ours):
    table = ours["benchmark"]
    found = lines(table, "Cumulative-LoRA", "")
    raw = [each["accuracy"]["raw"] for each in of_seeds()]
    assert list(found) == ["ours", "paper", "difference", "ours (1)", "difference (1)"]
    assert found["ours"]["CIFAR-100"] == written(raw)
    # Welch's test of the difference is at its level at the ends of the interval.
    row = record(
        table, learner="cumulative_lora", calibrator="raw", settings="", benchmark="cifar100"
    )
    assert row.difference == pytest.approx(np.mean(raw) - 84.34)
    assert (row.paper_mean, row.paper_std, row.n) == (84.34, 0.15, 3)
    shift = 84.34 + row.difference_high
    test = stats.ttest_ind_from_stats(np.mean(raw), np.std(raw, ddof=1), 3, shift, 0.15, 3, False)
    assert test.pvalue == pytest.approx(0.05)
    ends = f"{row.difference_low:+.1f} to {row.difference_high:+.1f}"
    assert found["difference"]["CIFAR-100"] == f"{row.difference:+.2f} ({ends})"
    # What departs from the protocol is said once, and numbered in the rows.
    reduced = results(seed=4)["accuracy"]["raw"]
    assert found["ours (1)"]["CIFAR-100"] == f"{reduced:.2f} (1)"
    assert table.scope == "Ours depart from the paper's protocol: (1) epochs 5."
    devices = "Devices: ours 1 x cpu; the paper's 1 x NVIDIA A100 80GB PCIe."
    assert ours["cost"].scope == f"{table.scope} {devices}"
    chosen = [
        each["components"]["pac+rlc_adapted_view"] for each in of_seeds("splitlora", seeds=(1, 2))
    ]
    assert lines(table, "SplitLoRA", "+ FDC, the paper's choice")["ours"]["CIFAR-100"] == written(
        chosen
    )


def test_the_best_mean_of_ours_is_bold(ours):
    table = ours["benchmark"]
    column = list(table.frame).index("CIFAR-100")
    (row,) = [row for row, of in table.best if of == column]
    means = table.numbers[table.numbers.benchmark == "cifar100"]["mean"]
    assert table.frame.index[row][-1].startswith("ours")
    assert table.frame.iloc[row, column].startswith(f"{means.max():.2f}")
    assert table.to_latex().count(r"\textbf{") == len(table.frame.columns)


def test_equal_numbers_are_bold_together(tmp_path):
    """Means that differ beyond the digits of a cell are equal for a reader."""
    for learner, raw in (("loda", 70.001), ("rsiat", 70.004), ("inflora", 69.9)):
        accuracy = {"raw": raw, "fdc": 60.0, "oracle": 90.0}
        made = results(learner=learner, accuracy=accuracy, components={})
        write_run(tmp_path / learner, made)
    table = built(runs.load([tmp_path])[0])["benchmark"]
    bold = {table.frame.index[row][0] for row, _ in table.best}
    assert bold == {"LoDA", "RSIAT"}


def test_gains_are_paired_within_each_seed(ours):
    gains = [each["components"]["tsf+rlc"] - each["accuracy"]["raw"] for each in of_seeds()]
    table = ours["ablation"]
    found = lines(table, "Cumulative-LoRA", "TSF + Dual RLC")
    assert found["ours"]["CIFAR-100"] == written(gains, signed=True)
    assert found["paper"]["CIFAR-100"] == "+3.21 ± 0.16"
    row = record(table, learner="cumulative_lora", calibrator="tsf+rlc", settings="", n=3)
    interval = stats.t.interval(0.95, 2, np.mean(gains), stats.sem(gains))
    assert (row.quantity, row.low, row.high) == ("gain", *map(pytest.approx, interval))
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
    assert found["difference"]["Avg."] == f"{np.mean(gains) - 5.15:+.2f}"
    row = record(table, benchmark="average", calibrator="pac+rlc_pretrained_view")
    assert (row["mean"], row.paper_mean) == (pytest.approx(np.mean(gains)), 5.15)


# Selection rule, calibrators, costs ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("gains", "expected"),
    [
        ((1, 1, 1), "full"),
        ((-1, 1, 1), "pac+rlc"),
        ((-1, 1, -1), "pac+rlc_pretrained_view"),
        ((1, -1, 1), "adapted_view"),
        ((1, -1, -1), "tsf"),
        ((-1, -1, -1), "raw"),
    ],
)
def test_components_with_a_gain_on_every_benchmark_are_selected(tmp_path, gains, expected):
    """TSF, E_0 and E_T; on the first benchmark every component gains."""
    for benchmark, signs in (("cub200", (1, 1, 1)), ("imagenet_a", gains)):
        found = results(benchmark=benchmark, learner="loda")
        keys = ("tsf", "pac+rlc_pretrained_view", "pac+rlc_adapted_view")
        for key, sign in zip(keys, signs, strict=True):
            found["components"][key] = found["components"]["raw"] + sign
        write_run(tmp_path / benchmark, found)
    assert tables.selected(tables.gains(runs.load([tmp_path])[0]).min()) == expected
    assert settings.COMPONENTS[expected].get("tsf", True) == (gains[0] > 0)


def test_validation_images_choose_components_beside_the_rule(tmp_path, groups):
    """Test images are for TSF and E_0 on both benchmarks, validation images against E_0 on one.

    The gain of either choice is of test images.
    """
    keys = [*tables._PARTS]
    gains = []
    for benchmark, seed in itertools.product(("cub200", "imagenet_a"), (1, 2)):
        config = {"data.validation_share": 0.1}
        found = results(benchmark=benchmark, learner="loda", seed=seed, config=config)
        found["num_train_images"] //= 2
        raw = found["components"]["raw"]
        found["components"] |= {keys[0]: raw + 1, keys[1]: raw + 1, keys[2]: raw - 1}
        found["validation"] = {name: 50.0 for name in found["components"]}
        # A seed alone decides nothing: the mean over seeds of the second benchmark is negative.
        of_pretrained = {"cub200": 5.0, "imagenet_a": 1.0 if seed == 1 else -2.0}[benchmark]
        found["validation"] |= {keys[0]: 51.0, keys[1]: 50 + of_pretrained, keys[2]: 49.0}
        gains.append(found["components"]["tsf"] - raw)
        write_run(tmp_path / f"{benchmark}_{seed}", found)
    table = tables.of_selection(runs.load([tmp_path])[0])
    (row,) = table.frame.loc[["LoDA"]].to_dict("records")
    assert row["own choice"] == paper.COMPONENT_TITLES["pretrained_view"]
    assert row["choice by validation"] == "TSF"
    assert row["gains, choice by validation"] == f"2 of 2, {np.mean(gains):+.2f}"
    assert "choice by validation" not in tables.of_selection(groups).frame


def test_validation_images_choose_settings(tmp_path):
    """By the mean over benchmarks; of equal values the paper's, of K those of all benchmarks."""
    of = {
        "cub200": {"attenuation=0.25": 80, "attenuation=0.5": 70, "neighbours=3": 99},
        "imagenet_a": {"attenuation=0.25": 40, "attenuation=0.5": 60, "neighbours=1": 40},
    }
    of["cub200"] |= {"retained_energy=0.5": 60, "retained_energy=0.75": 50, "neighbours=1": 40}
    of["imagenet_a"] |= {"retained_energy=0.5": 50, "retained_energy=0.75": 60}
    groups = []
    for benchmark, values in of.items():
        write_run(tmp_path / benchmark, results(benchmark=benchmark))
        (group,) = runs.load([tmp_path / benchmark])[0]
        named = {f"validation_{name}": [value] for name, value in values.items()}
        groups.append(with_numbers(group, named))
    assert tables.best_settings(groups) == "γ 0.5, η 0.75, K 1"
    assert tables.best_settings(groups[:1]) == "γ 0.25, η 0.5, K 3"


def test_runs_of_one_view_have_no_part_in_the_selection(tmp_path):
    """Nor does NumPy warn of them."""
    found = results(learner="frozen")
    for key in [key for key in found["components"] if key.endswith("_view")]:
        del found["components"][key]
    write_run(tmp_path / "frozen", found)
    write_run(tmp_path / "loda", learner="loda")
    groups = runs.load(sorted(tmp_path.iterdir()))[0]
    learned = tables.of_selection(groups).frame.index.get_level_values(0)
    assert "LoDA" in learned and "Frozen encoder" not in learned


def test_pairs_with_a_gain_are_counted_as_the_paper_counts_its_own(ours, groups):
    found = lines(ours["selection"], "learners of Table plugin")
    assert list(found) == ["ours", "paper"]
    assert found["paper"]["gains, the paper's choice"] == "40 of 40, +4.39"
    assert found["paper"]["gains, all components"] == "35 of 40, +4.45"
    gains = [
        np.mean(group.values("full", "gain")) for group in groups if group.learner == "splitlora"
    ]
    assert found["ours"]["gains, all components"] == f"2 of 2, {np.mean(gains):+.2f}"
    row = lines(ours["selection"], "SplitLoRA")["ours"]
    assert row["pairs of benchmark and seed"] == "4 of 4"
    numbers = {"learner": "plugged", "calibrator": "all components", "settings": "ours"}
    row = record(ours["selection"], quantity="pairs with a gain", **numbers)
    assert (row["mean"], row.n) == (2, 2)


def test_all_calibrators_stand_side_by_side(ours, groups):
    found = lines(ours["calibrators"], "Cumulative-LoRA", "CIFAR-100", "ours")
    assert list(found) == ["Raw", "FDC", GAUSSIANS, "Task given"]
    raw, own = ([each["accuracy"][name] for each in of_seeds()] for name in ("raw", "gaussians"))
    gains, row = np.subtract(own, raw), found[GAUSSIANS]
    low, high = stats.t.interval(0.95, 2, np.mean(gains), stats.sem(gains))
    assert row["accuracy"] == written(own)
    assert row["gain"] == written(gains, signed=True)
    assert row["interval of the gain"] == f"{low:+.2f} to {high:+.2f}"
    low, high = stats.t.interval(0.95, 2, np.mean(own), stats.sem(own))
    assert row["95 % interval"] == f"{low:.2f} to {high:.2f}"
    assert row["storage, MiB"] == "6.00 ± 0.00"
    # Of one seed, over its test images.
    (digits,) = [each for each in groups if each.benchmark == "digits"]
    gain = digits.row("gaussians", "gain")
    row = lines(ours["calibrators"], "Cumulative-LoRA", "Digits", "ours")[GAUSSIANS]
    assert row["interval of the gain"] == f"{gain.low:+.2f} to {gain.high:+.2f}"
    # A method that no seed changes has no interval over seeds, and no interval leaves 0 to 100.
    assert digits.row("raw")["low"] > 0
    assert digits.row("oracle")["high"] <= 100


def test_raw_logits_store_nothing_whether_the_run_says_so_or_not(tmp_path):
    for seed, storage in ((1, {"raw": 0, "fdc": 2**20}), (2, {"fdc": 2**20})):
        found = results(benchmark=f"mine{seed}", storage_bytes=storage)
        write_run(tmp_path / str(seed), found)
        ((group,), _) = runs.load([tmp_path / str(seed)])
        column = tables.of_calibrators([group]).frame["storage, MiB"]
        assert (column["Raw"], column["FDC"]) == ("0.00", "1.00")


def test_logit_standardisation_is_of_runs_that_fitted_it(tmp_path):
    found = results(learner="loda")
    found["accuracy"]["ls"] = found["accuracy"]["raw"] + 0.25
    write_run(tmp_path / "a", found)
    write_run(tmp_path / "b")
    frame = built(runs.load([tmp_path])[0])["logit_standardisation"].frame
    # The paper has no such number of the learner, so that no column tells ours from others.
    assert frame.index.tolist() == [("LoDA", "gain over Raw")]
    assert frame.to_numpy().tolist() == [["+0.25 (1)"]]


def test_costs_count_features_out_of_the_cache(ours):
    def row(quantity, numbers="ours"):
        return lines(ours["cost"], "Cumulative-LoRA", quantity)[numbers]["CIFAR-100"]

    assert row("training, min") == written([(600 + seed) / 60 for seed in (1, 2, 3)])
    # 60, 30 and 6 seconds: fit of FDC alone, E_0 of seeds 2 and 3 from the cache.
    assert row("FDC, min") == "1.60 ± 0.00" and row("FDC storage, MiB", "paper") == "11.86"
    assert row("FDC beyond it, GiB") == "0.25 ± 0.00"


def test_latency_is_of_runs_that_were_timed(tmp_path):
    write_run(tmp_path / "a")
    peaks = {"baseline": 2**30, "single": 2**30 + 2**21, "dual": 2**30 + 2**22}
    times = {"baseline": 100.0, "single": 101.0, "dual": 190.0}
    of = {n: {"milliseconds": [times[n]] * 3, "peak_bytes": peaks[n]} for n in times}
    (tmp_path / "a" / "latency.json").write_text(json.dumps({"contenders": of}))
    table = built(runs.load([tmp_path])[0])["latency"]
    expected = {
        "baseline, ms": "100.00 (1)", "single view, ms": "101.00 (1)",
        "single view, % more": "+1.00 (1)", "dual view, ms": "190.00 (1)",
        "dual view, % more": "+90.00 (1)", "baseline, MiB": "1,024.00 (1)",
        "single view, MiB more": "+2.00 (1)", "dual view, MiB more": "+4.00 (1)",
    }  # fmt: skip
    for quantity, text in expected.items():
        assert lines(table, "Cumulative-LoRA", quantity)["ours"]["CIFAR-100"] == text
    assert lines(table, "Cumulative-LoRA", "dual view, ms")["paper"]["CIFAR-100"] == "323.10"


def test_errors_that_the_task_corrects(ours):
    of = [each["accuracy"] for each in of_seeds()]
    shares = [100 * (95 - each["raw"]) / (100 - each["raw"]) for each in of]
    row = lines(ours["task_identity"], "Cumulative-LoRA", "errors that the task corrects, %")[
        "ours"
    ]
    assert row["CIFAR-100"] == written(shares)


# Files --------------------------------------------------------------------------------------------


def test_numbers_are_one_row_each_with_all_columns(ours, tmp_path):
    ours["plugin"].write(tmp_path)
    read = pd.read_csv(tmp_path / "plugin.csv")
    assert [*read] == [
        *("benchmark", "learner", "calibrator", "quantity", "mean", "std", "n", "low", "high"),
        *("paper_mean", "paper_std", "difference", "difference_low", "difference_high", "settings"),
    ]
    assert read[read.benchmark != "digits"]["paper_mean"].notna().all()
    assert read["mean"].notna().all() and not read.duplicated([*[*read][:4], "settings"]).any()


def test_latex_escapes_what_names_and_numbers_have():
    index = pd.MultiIndex.from_tuples([("a_b", "x|y"), ("50 %", "E_0")], names=["E_T", "what"])
    frame = pd.DataFrame({"n & m": ["-1.00 ± 0.50", math.nan], "one": ["1", "2"]}, index=index)
    table = Table("a_b", "A title", frame, "A note.", best=frozenset([(1, 1)]))
    latex = table.to_latex()
    assert r"\caption{A title.}" in latex and r"\label{tab:a-b}" in latex
    assert r"$E_T$ & what & n \& m & one \\" in latex
    assert r"a\_b & x|y & $-$1.00 $\pm$ 0.50 & 1 \\" in latex
    assert r"50 \% & $E_0$ & -- & \textbf{2} \\" in latex
