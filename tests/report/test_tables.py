"""Tables against numbers computed here from the results of the runs alone."""

import csv
import io
import json
import math
import re

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from scipy import stats

from fdc_jax.errors import InputError
from fdc_jax.report import cells, paper, reference, runs, significance, tables
from fdc_jax.report.cells import Cell, Table
from fdc_jax.report.paper import Published
from tests.report.run_folders import predictions, results, write_run

REDUCED = {"train.epochs": 5}


@pytest.fixture
def folder(tmp_path):
    """Three seeds of one learner, two of another, one reduced run, and digits."""
    for seed in (1, 2, 3):
        write_run(tmp_path / f"cl{seed}", seed=seed, columns=None)
    for seed in (1, 2):
        write_run(tmp_path / f"sl{seed}", seed=seed, learner="splitlora")
        write_run(tmp_path / f"sr{seed}", seed=seed, learner="splitlora", benchmark="imagenet_r")
    write_run(tmp_path / "reduced", seed=4, config=REDUCED)
    write_run(tmp_path / "digits", benchmark="digits", columns=predictions(1))
    return tmp_path


@pytest.fixture
def groups(folder):
    found = runs.load(sorted(folder.iterdir()))
    assert found.skipped == []
    return runs.group(found.runs)


@pytest.fixture
def built(groups):
    return {table.name: table for table in tables.build(groups, {})}


def of(found, **wanted):
    """The records of a table that have these values."""
    return [each for each in found if all(each[name] == wanted[name] for name in wanted)]


def one(found, **wanted):
    (record,) = of(found, **wanted)
    return record


def latency_of(groups, path):
    (table,) = (each for each in tables.build(groups, {}, [str(path)]) if each.name == "latency")
    return table


def seeds_of(learner="cumulative_lora", benchmark="cifar100", seeds=(1, 2, 3)):
    return [results(benchmark=benchmark, learner=learner, seed=seed) for seed in seeds]


def test_every_table_is_there_in_order_and_rectangular(built):
    assert list(built) == [
        "benchmark",
        "ablation",
        "plugin",
        "selection",
        "logit_standardisation",
        "average_incremental_accuracy",
        "significance",
        "partitions",
        "cost",
        "latency",
        "beyond",
        "beyond_ablation",
    ]
    for table in built.values():
        assert table.title and table.note.endswith(".")
        assert all(len(row) == len(table.columns) for row in table.rows)
        assert all(not cell.gap for row in table.rows for cell in row[: table.num_labels])


def test_the_benchmark_table_has_mean_std_count_and_the_paper_s_numbers(built):
    records = built["benchmark"].records
    raw = [each["accuracy"]["raw"] for each in seeds_of()]
    record = one(
        records, method="Cumulative-LoRA", settings="the paper's protocol", benchmark="cifar100"
    )
    np.testing.assert_allclose(
        [record["mean"], record["std"], record["n"]], [np.mean(raw), np.std(raw, ddof=1), 3]
    )
    assert (record["paper_mean"], record["paper_std"]) == (84.34, 0.15)
    error = np.sqrt(np.var(raw, ddof=1) / 3 + 0.15**2 / 3)
    np.testing.assert_allclose(record["difference"], (np.mean(raw) - 84.34) / error)
    # SplitLoRA's FDC is that of the components that the paper selects.
    chosen = [
        each["components"]["pac+rlc_adapted_view"] for each in seeds_of("splitlora", seeds=(1, 2))
    ]
    record = one(records, method="SplitLoRA + FDC", benchmark="cifar100")
    np.testing.assert_allclose(record["mean"], np.mean(chosen))
    assert record["n"] == 2 and record["paper_mean"] == 89.82


def test_runs_with_other_settings_stand_beside_the_paper_without_a_difference(built):
    table = built["benchmark"]
    record = one(table.records, method="Cumulative-LoRA", settings="5 epochs")
    assert record["mean"] == results(seed=4)["accuracy"]["raw"]
    assert record["std"] is None and record["n"] == 1
    assert record["paper_mean"] == 84.34 and record["difference"] is None
    assert "A: 5 epochs" in table.note
    digits = one(table.records, method="Cumulative-LoRA", benchmark="digits")
    assert digits["n"] == 1 and digits["paper_mean"] is None and digits["difference"] is None


def test_missing_runs_leave_gaps(built):
    table = built["benchmark"]
    row = next(row for row in table.rows if row[0].text == "RSIAT")
    assert [cell.text for cell in row[2:]] == ["–"] * 6 and all(cell.gap for cell in row[2:])
    record = one(table.records, method="RSIAT", benchmark="cub200")
    assert (record["mean"], record["n"], record["paper_mean"]) == (None, 0, 87.59)
    record = one(
        table.records, method="Cumulative-LoRA", settings="the paper's protocol", benchmark="cub200"
    )
    assert record["mean"] is None and record["difference"] is None


def test_the_best_of_ours_and_of_the_paper_s_are_bold(built):
    table = built["benchmark"]
    column = table.columns.index("CIFAR-100")
    best = [(row[1].text, row[column].mean) for row in table.rows if row[column].best]
    ours = [
        max(np.mean([each["components"][name] for each in seeds_of(learner, seeds=seeds)]), 0)
        for learner, name, seeds in (
            ("cumulative_lora", "raw", (1, 2, 3)),
            ("cumulative_lora", "full", (1, 2, 3)),
            ("splitlora", "raw", (1, 2)),
            ("splitlora", "pac+rlc_adapted_view", (1, 2)),
        )
    ]
    assert dict(best)["ours"] == pytest.approx(max(ours))
    assert dict(best)["paper"] == 89.82
    assert len(best) == 3  # Also the better of the two reduced numbers.


def test_ablation_gains_are_paired_within_each_seed(built):
    gains = [each["components"]["tsf+rlc"] - each["accuracy"]["raw"] for each in seeds_of()]
    record = one(
        built["ablation"].records,
        learner="Cumulative-LoRA",
        components="TSF + Dual RLC",
        settings="the paper's protocol",
        benchmark="cifar100",
    )
    np.testing.assert_allclose(record["mean"], np.mean(gains))
    np.testing.assert_allclose(record["std"], np.std(gains, ddof=1))
    assert (record["paper_mean"], record["paper_std"]) == (3.21, 0.16)
    texts = [row[1].text for row in built["ablation"].rows if row[0].text == "SplitLoRA"]
    assert texts == list(paper.COMPONENT_TITLES.values())


def test_plugin_rows_have_the_paper_s_switches_and_an_average_over_all_five_only(built, tmp_path):
    table = built["plugin"]
    rows = [row for row in table.rows if row[0].text == "SplitLoRA"]
    assert [[cell.text for cell in row[1:4]] for row in rows] == [["0", "0", "1"], ["1", "1", "1"]]
    assert rows[0][-1].gap
    for benchmark in paper.benchmarks():
        write_run(tmp_path / "five" / benchmark, benchmark=benchmark, learner="rsiat")
    found = runs.group(runs.load((tmp_path / "five").iterdir()).runs)
    table = {each.name: each for each in tables.build(found, {})}["plugin"]
    gains = [
        each["components"]["pac+rlc_pretrained_view"] - each["accuracy"]["raw"]
        for benchmark in paper.benchmarks()
        for each in seeds_of("rsiat", benchmark, (1,))
    ]
    row = next(row for row in table.rows if row[0].text == "RSIAT")
    assert row[-1].mean == pytest.approx(np.mean(gains))
    record = one(table.records, baseline="RSIAT", TSF="0", benchmark="average")
    assert record["mean"] == pytest.approx(np.mean(gains)) and record["paper_mean"] == 5.15


def test_the_incremental_average_is_that_of_the_curve(built):
    curves = [each["curve"] for each in seeds_of("splitlora", seeds=(1, 2))]
    for suffix, name in (("", "raw"), (" + FDC", "pac+rlc_adapted_view")):
        record = one(
            built["average_incremental_accuracy"].records,
            method=f"SplitLoRA{suffix}",
            benchmark="cifar100",
        )
        means = [np.mean([point["components"][name] for point in curve]) for curve in curves]
        np.testing.assert_allclose(record["mean"], np.mean(means))
    assert record["paper_mean"] is None


def test_partitions_say_whether_they_are_the_paper_s(built):
    rows = [[cell.text for cell in row] for row in built["partitions"].rows]
    assert next(row for row in rows if row[0] == "CIFAR-100") == [
        "CIFAR-100", "ours, official split", "100", "20", "5", "50,000", "10,000", "equal"
    ]  # fmt: skip
    row = next(row for row in rows if row[0] == "ImageNet-A")
    assert row[1:] == ["ours", *["–"] * 5, ""]


def test_another_partition_is_marked(tmp_path):
    write_run(tmp_path / "a", num_train_images=49_000)
    (group,) = runs.group(runs.load([tmp_path / "a"]).runs)
    table = {each.name: each for each in tables.build([group], {})}["partitions"]
    assert [cell.text for cell in table.rows[0]][-3:] == ["49,000", "10,000", "differs"]


def test_costs_leave_out_cached_extraction(built):
    records = of(
        built["cost"].records,
        learner="Cumulative-LoRA",
        settings="the paper's protocol",
        benchmark="cifar100",
    )
    by_name = {each["quantity"]: each for each in records}
    np.testing.assert_allclose(by_name["training_minutes"]["mean"], 602 / 60)
    assert by_name["fdc_minutes"]["mean"] == pytest.approx(96 / 60)
    assert by_name["fdc_minutes"]["n"] == 1
    assert by_name["storage_mib"]["mean"] == 3.0 and by_name["storage_mib"]["paper"] == 11.86
    assert by_name["peak_memory_gib"]["mean"] is None


def test_latency_files_stand_beside_the_paper(tmp_path, groups):
    views = {
        "raw": {"milliseconds": [10.0, 12.0, 14.0], "peak_memory_bytes": 100 * 2**20},
        "single": {"milliseconds": [12.6], "peak_memory_bytes": 103 * 2**20},
        "dual": {"milliseconds": [24.0], "peak_memory_bytes": None},
    }
    path = tmp_path / "latency.json"
    path.write_text(json.dumps({"views": views, "encoder": "B/16", "benchmark": "cifar100"}))
    table = latency_of(groups, path)
    texts = [cell.text for cell in table.rows[0]]
    assert texts[0] == "CIFAR-100" and texts[1] == "ours, B/16"
    assert texts[3:] == ["12.0", "12.6 (+5.0 %)", "24.0 (+100.0 %)", "100.0", "+3.0", "–"]
    published = [cell.text for cell in table.rows[1]]
    assert published[3:] == ["170.5", "173.3 (+1.7 %)", "323.1 (+89.5 %)", "980.9", "+4.7", "+11.9"]
    del views["dual"]  # One view in use.
    path.write_text(json.dumps({"views": views}))
    assert latency_of(groups, path).rows[0][5].gap
    for broken, message in (
        ({"views": {"raw": {"milliseconds": []}}}, "views.raw.milliseconds"),
        ({"views": views | {"single": {"milliseconds": [-1]}}}, "views.single.milliseconds"),
        ({"views": {}}, "views.raw"),
        ([], "expected an object"),
    ):
        path.write_text(json.dumps(broken))
        with pytest.raises(InputError, match=re.escape(message)):
            tables.build(groups, {}, [str(path)])


def test_logit_standardisation_comes_from_the_analyses(folder, groups):
    changes = {1: 0.5, 2: -0.25, 3: 1.0}
    analyses = {
        str(folder / f"cl{seed}"): {"logit_standardisation": {"change": change}}
        for seed, change in changes.items()
    }
    table = {each.name: each for each in tables.build(groups, analyses)}["logit_standardisation"]
    record = one(
        table.records,
        learner="Cumulative-LoRA",
        settings="the paper's protocol",
        benchmark="cifar100",
    )
    np.testing.assert_allclose(record["mean"], np.mean(list(changes.values())))
    np.testing.assert_allclose(record["std"], np.std(list(changes.values()), ddof=1))
    assert (record["paper_mean"], record["paper_std"]) == (0.35, 0.85)
    assert [row[2].gap for row in table.rows if row[0].text == "SplitLoRA"] == [True]


# Significance -------------------------------------------------------------------------------------


def test_intervals_and_p_values(tmp_path):
    columns = {}
    for learner in ("cumulative_lora", "loda"):
        for seed in (1, 2):
            columns[learner, seed] = predictions(seed + 10 * len(learner), 60)
            found = results(benchmark="digits", learner=learner, seed=seed)
            write_run(tmp_path / f"{learner}{seed}", found, columns[learner, seed])
    write_run(tmp_path / "without", benchmark="digits", learner="rsiat")
    groups = runs.group(runs.load(sorted(tmp_path.iterdir())).runs)
    found = {each.group.learner: each for each in significance.tests(groups)}
    largest = {}
    for learner in ("cumulative_lora", "loda"):
        each = found[learner]
        gains = [
            one["accuracy"]["fdc"] - one["accuracy"]["raw"]
            for one in seeds_of(learner, "digits", (1, 2))
        ]
        low, high = stats.t.interval(0.95, 1, np.mean(gains), stats.sem(gains))
        np.testing.assert_allclose((each.gain.low, each.gain.high), (low, high))
        p_values = []
        for test in each.runs:
            of_run = columns[learner, test.seed]
            was = of_run["raw_label"] == of_run["label"]
            now = of_run["fdc_label"] == of_run["label"]
            p = stats.binomtest(int(np.sum(~was & now)), int(np.sum(was != now))).pvalue
            np.testing.assert_allclose(test.p_value, p)
            np.testing.assert_allclose(test.gain.mean, 100 * (now.mean() - was.mean()))
            p_values.append(p)
        largest[learner] = each.p_value
        assert each.p_value == pytest.approx(max(p_values))
    smaller, larger = sorted(largest, key=lambda name: largest[name])
    assert found[smaller].adjusted == pytest.approx(min(2 * largest[smaller], 1))
    assert found[larger].adjusted == pytest.approx(
        min(max(largest[larger], 2 * largest[smaller]), 1)
    )
    assert found["rsiat"].p_value is None and found["rsiat"].adjusted is None
    rows = significance.table(groups).rows
    assert len(rows) == 3 + 4
    assert [cell.text for cell in rows[-1]][3:] == [
        "all 1", rows[-1][4].text, "–", "–", "–"
    ]  # fmt: skip


# Files --------------------------------------------------------------------------------------------


def parsed_markdown(text):
    lines = [line for line in text.splitlines() if line.startswith("|")]
    del lines[1]  # Alignment.
    return [
        [part.strip().replace("\\|", "|") for part in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in lines
    ]


def parsed_latex(text):
    body = re.search(r"\\toprule\n(.*)\\bottomrule", text, re.DOTALL)[1]
    rows = re.split(r"\s*\\\\\n?", body.replace("\\midrule\n", "").replace("\\addlinespace\n", ""))
    return [re.split(r"(?<!\\)&", row) for row in rows if row]


def test_files_hold_the_same_table(tmp_path, built):
    for table in built.values():
        paths = tables.write(table, tmp_path / "tables")
        assert [path.name for path in paths] == [
            f"{table.name}.{suffix}" for suffix in ("csv", "md", "tex")
        ]
        markdown = parsed_markdown(paths[1].read_text())
        assert markdown[0] == table.columns
        expected = [
            [f"**{cell.text}**" if cell.best else cell.text for cell in row] for row in table.rows
        ]
        assert markdown[1:] == expected
        latex = parsed_latex(paths[2].read_text())
        assert {len(row) for row in latex} == {len(table.columns)}
        assert len(latex) == 1 + len(table.rows)
        with open(paths[0], newline="") as file:
            found = list(csv.DictReader(file))
        assert len(found) == len(table.records)
        for line, record in zip(found, table.records, strict=True):
            for name, value in record.items():
                if value is None:
                    assert line[name] == ""
                elif isinstance(value, float):
                    assert float(line[name]) == value  # All digits.
                else:
                    assert line[name] == str(value)


ANY_TEXT = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), max_size=12)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(ANY_TEXT, ANY_TEXT, st.booleans()), min_size=1, max_size=4))
def test_any_text_survives_the_files(rows):
    table = Table(
        "t",
        "title",
        "note",
        ["a", "b"],
        [[Cell(first), Cell(second, best=best)] for first, second, best in rows],
        records=[{"a": first, "b": second} for first, second, _ in rows],
    )
    found = list(csv.DictReader(io.StringIO(tables.to_csv(table), newline="")))
    assert [(line["a"], line["b"]) for line in found] == [row[:2] for row in rows]
    assert len(parsed_latex(tables.to_latex(table))) == 1 + len(rows)
    body = tables.to_latex(table).split("\\midrule")[1].split("\\bottomrule")[0]
    for special in "#_^~%":
        assert not re.search(rf"(?<!\\){re.escape(special)}", re.sub(r"\$[^$]*\$", "", body))
    assert len(parsed_markdown(tables.to_markdown(table))) == 1 + len(rows)


def test_latex_escapes_and_marks():
    table = Table(
        "a_b",
        "50 % & more",
        "x_1 √(s²/n)",
        ["E_0", "n"],
        [[Cell("a_b"), Cell("-1.00 ± 0.50", -1.0, 0.5, best=True)]],
    )
    text = tables.to_latex(table)
    assert r"\caption{50 \% \& more.}" in text and r"\label{tab:a-b}" in text
    assert r"$E_0$ & n \\" in text
    assert r"a\_b & \textbf{$-$1.00 $\pm$ 0.50} \\" in text


# Cells --------------------------------------------------------------------------------------------

VALUES = st.lists(st.floats(0, 100), min_size=1, max_size=5)


@settings(deadline=None, max_examples=100)
@given(VALUES, st.floats(0, 100), st.floats(0.01, 5))
def test_the_difference_is_in_standard_deviations_of_the_difference(values, mean, std):
    published = Published(mean, std)
    found = cells.difference(values, published)
    spread = np.std(values, ddof=1) if len(values) > 1 else std
    error = math.sqrt(spread**2 / len(values) + std**2 / 3)
    assert found == pytest.approx((np.mean(values) - mean) / error)


def test_no_difference_where_nothing_is_known_or_varies():
    assert cells.difference([], Published(1.0, 1.0)) is None
    assert cells.difference([1.0], None) is None
    assert cells.difference([1.0], Published(1.0, None)) is None
    assert cells.difference([1.0, 1.0], Published(2.0, 0.0)) is None


def test_cells_read_as_the_paper_s_do():
    assert cells.ours([1.0, 2.0]).text == "1.50 ± 0.71 (2)"
    assert cells.ours([1.0], signed=True).text == "+1.00 (1)"
    assert cells.ours([]) == Cell("–", gap=True)
    assert cells.published(Published(-0.5, 0.25), signed=True).text == "-0.50 ± 0.25"


# The reference ------------------------------------------------------------------------------------


def test_a_reference_becomes_a_table(groups, tmp_path):
    path = tmp_path / "pytorch.csv"
    raw = [each["accuracy"]["raw"] for each in seeds_of()]
    lines = [f"cifar100,cumulative_lora,raw,{seed},{raw[seed - 1] + 1}" for seed in (1, 2, 3)]
    path.write_text("\n".join(["benchmark,learner,quantity,seed,value", *lines]))
    table = tables.build(groups, {}, references=[reference.read(path)])[-1]
    assert table.name == "reference_pytorch"
    (record, reduced) = table.records
    assert record["difference"] == pytest.approx(-1) and record["outside"] is True
    assert record["paired_seeds"] == "1 2 3"
    assert reduced["settings"] == "5 epochs" and reduced["paired_seeds"] == ""
    assert table.rows[0][-2].text == "outside, seeds 1, 2, 3 paired"


def test_a_benchmark_of_one_s_own_stands_first(tmp_path):
    write_run(tmp_path / "a", benchmark="digits")
    groups = runs.group(runs.load([tmp_path / "a"]).runs)
    table = next(each for each in tables.build(groups, {}) if each.name == "benchmark")
    assert table.columns[2:4] == ["Digits", "CIFAR-100"]
    assert table.columns[-1] == "OmniBenchmark"


def test_the_paper_s_costs_are_in_the_records_without_runs_of_ours(built):
    costs = of(built["cost"].records, benchmark="omnibench", quantity="training_minutes")
    assert [each["paper"] for each in costs] == [239.3]
    sizes = of(built["partitions"].records, benchmark="omnibench", quantity="train")
    assert [(each["value"], each["paper"]) for each in sizes] == [(None, 89_697)]
    times = of(built["latency"].records, benchmark="omnibench", encoder="paper")
    assert [each["milliseconds"] for each in times] == [169.9, 171.3, 319.2]
    assert [each["memory_mib"] for each in times] == pytest.approx([982.0, 987.7, 994.1])
