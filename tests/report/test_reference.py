"""Reference files: what is refused, and what is compared how."""

import hypothesis.strategies as st
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from scipy import stats

from fdc_jax.errors import InputError
from fdc_jax.report import reference, runs
from fdc_jax.report.reference import compare
from tests.report.made_up import results, write_run

HEADER = "benchmark,learner,quantity,seed,value,std,n,source"


def read(tmp_path, *lines, header=HEADER):
    path = tmp_path / "r.csv"
    path.write_text("\n".join([header, *lines]), encoding="utf-8")
    return reference.read(path)


def entries(*rows):
    """Lines of a file about one quantity: value, seed, std, n."""
    return pd.DataFrame(rows, columns=["value", "seed", "std", "n"], dtype=float)


def test_a_file_is_read_whatever_the_order_of_columns(tmp_path):
    found = read(
        tmp_path,
        "88.6, FDC paper ,cumulative_lora,fdc,cifar100",
        "1.5,,mine.module,gain:tsf+rlc,my benchmark",
        header="\ufeffvalue,source,learner,quantity,benchmark",
    )
    columns = ["benchmark", "learner", "quantity", "value"]
    assert found[columns].to_numpy().tolist() == [
        ["cifar100", "cumulative_lora", "fdc", 88.6],
        ["my benchmark", "mine.module", "gain:tsf+rlc", 1.5],
    ]
    assert found.source[0] == "FDC paper" and found[["seed", "std", "n"]].isna().all(axis=None)


@pytest.mark.parametrize(
    ("line", "place"),
    [
        ("cifar100,inflora,raw,,much,,,", "line 3: column value: expected a number"),
        ("cifar100,inflora,raw,,1,-0.1,3,", "line 3: column std: expected a number from 0"),
        ("cifar100,loda,raw,,2,,,", "line 3: column quantity: expected each once"),
    ],
)
def test_a_bad_row_gets_one_line_that_names_file_line_and_column(tmp_path, line, place):
    with pytest.raises(InputError) as error:
        read(tmp_path, "cifar100,loda,raw,,1,,,", line)
    assert place in str(error.value)
    assert str(error.value).startswith(str(tmp_path / "r.csv"))
    assert "\n" not in str(error.value)


# Comparing ----------------------------------------------------------------------------------------

NUMBERS = st.floats(0, 100)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=2, max_size=5))
def test_common_seeds_are_paired(values):
    ours = {seed: own for seed, (own, _) in enumerate(values)} | {77: 0.0}
    others = entries(
        *((other, seed, None, None) for seed, (_, other) in enumerate(values)),
        (1.0, 99, None, None),
    )
    found = compare(ours, others)
    gaps = np.array([own - other for own, other in values])
    reach = stats.t.ppf(0.975, len(gaps) - 1) * gaps.std(ddof=1) / np.sqrt(len(gaps))
    if not gaps.std() > 0:  # Seeds that do not differ give no interval.
        reach = np.nan
    np.testing.assert_allclose(
        [found.mean, found.low, found.high],
        [gaps.mean(), gaps.mean() - reach, gaps.mean() + reach],
        atol=1e-9,
    )
    assert found.paired == list(range(len(values)))
    # One common seed is no pair to tell a spread from.
    found = compare(ours, entries((1.5, 77, None, None)))
    assert (found.mean, found.paired) == (-1.5, [77]) and np.isnan(found.low)


def test_two_means_are_compared_by_welch():
    ours = {1: 70.0, 2: 71.0, 3: 73.5}
    found = compare(ours, entries((75.0, None, 0.8, 5)))
    # At the interval's end the test is at its level.
    end = found.high - found.mean
    at_end = stats.ttest_ind_from_stats(
        75.0 + end, np.std(list(ours.values()), ddof=1), 3, 75.0, 0.8, 5, False
    )
    assert at_end.pvalue == pytest.approx(0.05)
    assert found.mean == pytest.approx((found.low + found.high) / 2)


@pytest.mark.parametrize(
    ("ours", "std"), [({1: 70.0}, 1.0), ({1: 70.0, 2: 71.0}, None), ({1: 70.0, 2: 70.0}, 0.0)]
)
def test_without_both_deviations_there_is_no_interval(ours, std):
    found = compare(ours, entries((71.0, None, std, 3)))
    assert found.mean == np.mean(list(ours.values())) - 71.0 and np.isnan(found.low)


def test_both_sides_are_shown_as_they_are_paired(tmp_path):
    for seed, raw in ((1, 60.0), (2, 50.0), (3, 40.0)):
        accuracy = {"raw": raw, "fdc": raw + 5, "oracle": 90.0}
        write_run(tmp_path / f"{seed}", results(seed=seed, accuracy=accuracy))
    groups = runs.load(sorted(tmp_path.iterdir()))[0]
    lines = [f"cifar100,cumulative_lora,raw,{s},{v},,,mine" for s, v in ((1, 61), (2, 52), (9, 99))]
    given = read(tmp_path, *lines, "cub200,l2p,raw,,70.5,0.5,3,another paper")
    table = reference.table("other code.csv", given, groups)
    assert table.name == "reference_other_code" and "other code.csv" in table.note
    low, high = stats.t.interval(0.95, 1, -1.5, stats.sem([-1.0, -2.0]))
    assert table.shown.reset_index().to_numpy().tolist() == [
        ["CIFAR-100", "Cumulative-LoRA", "raw", "ours", "55.00 ± 7.07 (2)", "56.50 ± 6.36 (2)",
         "1, 2", "-1.50", f"{low:+.2f} to {high:+.2f}", "mine"],
        ["CUB-200", "l2p", "raw", "no run", "–", "70.50 ± 0.50 (3)", "–", "–", "–",
         "another paper"],
    ]  # fmt: skip
