"""Reference files: what is refused, and what is compared how."""

import hypothesis.strategies as st
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from scipy import stats

from fdc_jax.errors import InputError
from fdc_jax.report import reference, rows

HEADER = "benchmark,learner,quantity,seed,value,std,n,source"


def read(tmp_path, *lines):
    path = tmp_path / "r.csv"
    path.write_text("\n".join(lines), encoding="utf-8")
    return reference.read(path)


WRONG = {
    "cifar100,inflora,raw,,much,,,": "line 3: Expected `float`, got `str` - at `$.value`",
    "cifar100,inflora,raw,,1,-0.1,3,": "line 3: Expected `float` >= 0.0 - at `$.std`",
    "cifar100,inflora,row,,1,,,": "line 3: quantity: expected one such as raw, fdc",
    "cifar100,inflora,raw,,1,,,,x": "line 3: Object contains unknown field `more cells",
    "cifar100,loda,raw,,2,,,": "line 3: quantity: expected each once",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_row_is_one_line_with_file_line_and_column(tmp_path, line):
    with pytest.raises(InputError) as error:
        read(tmp_path, HEADER, "cifar100,loda,raw,,1,,,", line)
    assert str(error.value).startswith(f"{tmp_path / 'r.csv'}: {WRONG[line]}")
    assert "\n" not in str(error.value)


KNOWN = {("digits", "cumulative_lora"), ("digits", "loda")}
MISTAKES = {
    "digits,loda,raw,,0.7433,,,\ndigits,loda,fdc,,0.93,,,": "percent, found fractions such as 0.93",
    "digits,LoDA,raw,,70,,,": "found lines about digits LoDA; LoDA is named loda",
}


@pytest.mark.parametrize("lines", MISTAKES)
def test_fractions_and_titles_are_named(tmp_path, lines):
    with pytest.raises(InputError, match=MISTAKES[lines]):
        reference.check_matches("r.csv", read(tmp_path, HEADER, lines), KNOWN)


# Comparing ----------------------------------------------------------------------------------------

NUMBERS = st.floats(0, 100)


def compared(accuracies, mean, std, n, by_seed):
    """The row of raw accuracies by seed beside a published mean, and numbers by seed."""
    names = {"benchmark": "digits", "learner": "loda", "calibrator": "raw", "quantity": "accuracy"}
    numbers = pd.DataFrame({"seed": [*accuracies], "value": [*accuracies.values()]})
    numbers = numbers.assign(settings="", **names)
    published = pd.DataFrame({"seed": [np.nan, *by_seed], "value": [mean, *by_seed.values()]})
    published = published.assign(std=std, n=n, **names)
    return rows.with_published(rows.summarise(numbers), numbers, published).iloc[0]


@settings(deadline=None, max_examples=10)
@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=2, max_size=5))
def test_common_seeds_are_paired(values):
    accuracies, others = np.transpose(values)
    by_seed = dict(enumerate(accuracies)) | {77: 0.0}
    row = compared(by_seed, 50.0, 1.0, 9, dict(enumerate(others)) | {99: 1.0})
    gaps = accuracies - others
    reach = stats.t.ppf(0.975, len(gaps) - 1) * gaps.std(ddof=1) / len(gaps) ** 0.5
    if len(np.unique(gaps)) == 1:  # Equal gaps give no interval.
        reach = np.nan
    actual = np.array([row.difference, row.difference_low, row.difference_high], float)
    expected = [gaps.mean(), gaps.mean() - reach, gaps.mean() + reach]
    np.testing.assert_allclose(actual, expected, atol=1e-9)
    sides = [accuracies.mean(), others.mean(), len(gaps)]
    assert [row["mean"], row.paper_mean, row.n] == pytest.approx(sides)


def test_a_single_common_seed_has_no_interval():
    row = compared({0: 9.0, 77: 0.0}, 50.0, 1.0, 9, {77: 1.5})
    assert (row.difference, row.n) == (-1.5, 1)
    assert np.isnan(row.difference_low)


@settings(deadline=None, max_examples=10)
@given(st.lists(NUMBERS, min_size=2, max_size=5, unique=True), st.floats(0.01, 5))
def test_differences_from_means_have_the_interval_of_welch(accuracies, std):
    """At the ends of the interval his test is at its level."""
    row = compared(dict(enumerate(accuracies)), 71.0, std, 3, {})
    assert row.difference == pytest.approx(np.mean(accuracies) - 71.0)
    sample = np.mean(accuracies), np.std(accuracies, ddof=1), len(accuracies)
    for end in (row.difference_low, row.difference_high):
        test = stats.ttest_ind_from_stats(*sample, 71.0 + end, std, 3, equal_var=False)
        assert test.pvalue == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("accuracies", "std"), [([70.0], 1.0), ([70.0, 71.0], np.nan), ([70.0, 70.0], 0.0)]
)
def test_without_both_deviations_there_is_no_interval(accuracies, std):
    row = compared(dict(enumerate(accuracies)), 71.0, std, 3, {})
    assert row.difference == np.mean(accuracies) - 71.0
    assert np.isnan(row.difference_low)
