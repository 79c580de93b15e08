"""Reference files: what is refused, and what is compared how."""

import re
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from scipy import stats

from fdc_jax.errors import InputError
from fdc_jax.report import reference, rows, runs, tables
from tests.report import made_up
from tests.report.made_up import results, write_run

HEADER = "benchmark,learner,quantity,seed,value,std,n,source"


def read(tmp_path, *lines, header=HEADER):
    path = tmp_path / "r.csv"
    path.write_text("\n".join([header, *lines]), encoding="utf-8")
    return reference.read(path)


def test_a_file_is_read_whatever_the_order_of_columns(tmp_path):
    found = read(
        tmp_path,
        "88.6, FDC paper ,cumulative_lora,fdc,cifar100",
        "1.5,,mine.module,gain:tsf+rlc,my benchmark",
        header="\ufeffvalue,source,learner,quantity,benchmark",
    )
    columns = ["benchmark", "learner", "calibrator", "quantity", "value"]
    assert found[columns].to_numpy().tolist() == [
        ["cifar100", "cumulative_lora", "fdc", "accuracy", 88.6],
        ["my benchmark", "mine.module", "tsf+rlc", "gain", 1.5],
    ]
    assert found.loc[0, "source"] == "FDC paper"
    assert found.loc[0, ["seed", "n"]].isna().all()


@pytest.mark.parametrize(
    ("line", "place"),
    [
        ("cifar100,inflora,raw,,much,,,", "line 3: Expected `float`, got `str` - at `$.value`"),
        ("cifar100,inflora,raw,,nan,,,", "line 3: Expected `float` >= -1000000000000.0 - at"),
        ("cifar100,inflora,raw,,1,-0.1,3,", "line 3: Expected `float` >= 0.0 - at `$.std`"),
        ("cifar100,inflora,row,,1,,,", "line 3: quantity: expected one such as raw, fdc"),
        ("cifar100,inflora", "line 3: Object missing required field `quantity`"),
        ("cifar100,inflora,raw,,1,,,,x", "line 3: Object contains unknown field `more cells"),
        ("cifar100,loda,raw,,2,,,", "line 3: quantity: expected each once"),
    ],
)
def test_a_bad_row_gets_one_line_that_names_file_line_and_column(tmp_path, line, place):
    with pytest.raises(InputError) as error:
        read(tmp_path, "cifar100,loda,raw,,1,,,", line)
    assert place in str(error.value)
    assert str(error.value).startswith(str(tmp_path / "r.csv"))
    assert "\n" not in str(error.value)


def test_a_column_that_is_not_known_is_named_with_those_that_are(tmp_path):
    with pytest.raises(InputError) as error:
        read(
            tmp_path,
            "cifar100,loda,raw,1,fdc",
            header="benchmark,learner,quantity,value,calibrator",
        )
    known = "benchmark, learner, quantity, value, seed, std, n, source"
    assert str(error.value) == (
        f"{tmp_path / 'r.csv'}: line 1: header: expected one of {known}, found 'calibrator'"
    )


def test_the_page_documents_the_columns():
    page = (Path(__file__).parents[2] / "docs" / "report.md").read_text(encoding="utf-8")
    table = page.partition("| column | content |")[2].partition("\n\n")[0]
    named = [
        name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])
    ]
    assert sorted(named) == sorted(reference.Line.__struct_fields__)


KNOWN = {("digits", "cumulative_lora"), ("digits", "loda")}


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["digits,loda,raw,,74.3,,,"], ""),
        (["digits,loda,gain:fdc,,0.4,,,"], ""),
        (
            ["digits,loda,raw,,74.3,,,", "digits,l2p,raw,,7,,,", "cub200,loda,raw,,7,,,"],
            "no run of digits l2p, cub200 loda",
        ),
        (
            ["digits,loda,raw,,74.3,,,", "Digits,Cumulative-LoRA,raw,,70,,,"],
            "no run of Digits Cumulative-LoRA; Digits is named digits; Cumulative-LoRA is named "
            "cumulative_lora",
        ),
    ],
)
def test_lines_without_a_run_are_named_in_one_line(tmp_path, lines, expected):
    actual = reference.check_matches("r.csv", read(tmp_path, *lines), KNOWN)
    assert actual == (f"r.csv: {expected}" if expected else "")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            ["digits,loda,raw,,0.7433,,,", "digits,loda,fdc,,0.93,,,"],
            "expected percent, found fractions such as 0.93",
        ),
        (["digits,LoDA,raw,,70,,,"], "found lines about digits LoDA; LoDA is named loda"),
    ],
)
def test_fractions_and_titles_are_named(tmp_path, lines, message):
    with pytest.raises(InputError, match=message):
        reference.check_matches("r.csv", read(tmp_path, *lines), KNOWN)


# Comparing ----------------------------------------------------------------------------------------

NUMBERS = st.floats(0, 100)


def group_of(values):
    """A group whose raw accuracy has these values by seed."""
    (group,) = made_up.groups(*(made_up.run(seed) for seed in values))
    return made_up.with_numbers(group, {"raw": [float(value) for value in values.values()]})


def compared(group, mean, std, n, by_seed=()):
    """The row of raw accuracies beside those of a reference: a mean, and numbers by seed."""
    published = pd.DataFrame({"seed": [np.nan, *by_seed], "value": [mean, *dict(by_seed).values()]})
    names = {"benchmark": group.benchmark, "learner": group.learner}
    names |= {"calibrator": "raw", "quantity": "accuracy", "std": std, "n": n}
    table = rows.compare(group.summary, group.numbers, published.assign(**names))
    return table.reset_index().set_index(["calibrator", "quantity"]).loc["raw", "accuracy"]


@settings(deadline=None, max_examples=20)
@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=2, max_size=5))
def test_common_seeds_are_paired(values):
    group = group_of({seed: own for seed, (own, _) in enumerate(values)} | {77: 0.0})
    others = {seed: other for seed, (_, other) in enumerate(values)} | {99: 1.0}
    found = compared(group, 50.0, 1.0, 9, others)
    gaps = np.array([own - other for own, other in values])
    reach = stats.t.ppf(0.975, len(gaps) - 1) * gaps.std(ddof=1) / np.sqrt(len(gaps))
    ends = [gaps.mean() - reach, gaps.mean() + reach]
    if len(np.unique(gaps)) == 1:  # Seeds that do not differ give no interval.
        ends = [np.nan, np.nan]
    columns = [found.difference, found.difference_low, found.difference_high]
    np.testing.assert_allclose(np.array(columns, float), [gaps.mean(), *ends], atol=1e-9)
    sides = [found["mean"], found.paper_mean, found.n]
    assert sides == pytest.approx([*np.mean(values, axis=0), len(values)])
    # One common seed is no pair to tell a spread from.
    found = compared(group, 50.0, 1.0, 9, {77: 1.5})
    assert (found.difference, found.n) == (-1.5, 1)
    assert np.isnan(found.difference_low)


@pytest.mark.parametrize(
    ("ours", "std"), [({1: 70.0}, 1.0), ({1: 70.0, 2: 71.0}, np.nan), ({1: 70.0, 2: 70.0}, 0.0)]
)
def test_without_both_deviations_there_is_no_interval(ours, std):
    found = compared(group_of(ours), 71.0, std, 3)
    assert found.difference == np.mean(list(ours.values())) - 71.0
    assert np.isnan(found.difference_low)


def test_both_sides_are_shown_as_they_are_paired(tmp_path):
    for seed, raw in ((1, 60.0), (2, 50.0), (3, 40.0)):
        accuracy = {"raw": raw, "fdc": raw + 5, "oracle": 90.0}
        write_run(tmp_path / f"{seed}", results(seed=seed, accuracy=accuracy))
    groups = runs.load(sorted(tmp_path.iterdir()))[0]
    lines = [f"cifar100,cumulative_lora,raw,{s},{v},,,mine" for s, v in ((1, 61), (2, 52), (9, 99))]
    lines += ["cifar100,cumulative_lora,fdc,,70.5,0.5,3,another paper", "cub200,l2p,raw,,70.5,,,"]
    table = tables.of_reference("other code.csv", read(tmp_path, *lines), groups)
    assert table.name == "reference_other_code" and "other code.csv (mine; another" in table.note
    low, high = stats.t.interval(0.95, 1, -1.5, stats.sem([-1.0, -2.0]))
    assert table.frame.reset_index().to_numpy().tolist()[:5] == [
        ["Cumulative-LoRA", "raw", "ours", "55.00 ± 7.07 (2)"],
        ["Cumulative-LoRA", "raw", "reference", "56.50 ± 6.36"],
        ["Cumulative-LoRA", "raw", "difference", f"-1.50 ({low:+.1f} to {high:+.1f})"],
        ["Cumulative-LoRA", "fdc", "ours", "55.00 ± 10.00"],
        ["Cumulative-LoRA", "fdc", "reference", "70.50 ± 0.50"],
    ]
    assert table.numbers["reference_mean"].tolist() == [56.5, 70.5]
