"""The selection rule, and the halves that keep choosing and reporting apart."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.extra import numpy as arrays

from fdc_jax import calibration, evaluation
from fdc_jax.calibration.components import COMPONENTS
from fdc_jax.errors import InputError
from fdc_jax.report import plugin_tables, runs, selection
from tests.report.feature_sets import feature_set
from tests.report.run_folders import results, write_run

NAMES = tuple(selection.STANDALONE.values())


def test_a_combination_is_what_its_switches_say():
    for (tsf, pretrained, adapted), name in selection.COMBINATIONS.items():
        on = {"tsf": True, "rlc": True, "pac": True, "adapted_view": True, "pretrained_view": True}
        on |= COMPONENTS[name]
        assert on["tsf"] == bool(tsf)
        if pretrained or adapted:
            assert on["rlc"] and on["pac"]
            assert (on["pretrained_view"], on["adapted_view"]) == (bool(pretrained), bool(adapted))
        else:
            assert not on["rlc"] and not on["pac"]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.fixed_dictionaries({name: st.lists(st.integers(-3, 3), min_size=1) for name in NAMES}),
        min_size=1,
        max_size=5,
    )
)
def test_the_rule_wants_a_positive_mean_everywhere(gains):
    found = selection.select(gains)
    expected = tuple(
        int(all(sum(each[name]) / len(each[name]) > 0 for each in gains)) for name in NAMES
    )
    assert found.switches == expected
    assert found.combination == selection.COMBINATIONS[expected]


def test_the_rule_guesses_nothing():
    known = {name: [1.0] for name in NAMES}
    assert selection.select([known]).switches == (1, 1, 1)
    assert selection.select([known, known | {"tsf": []}]) is None
    assert selection.select([{"tsf": [1.0], "pac+rlc_adapted_view": [1.0]}]) is None
    assert selection.select([]) is None
    single = {"tsf": [1.0], "pac+rlc_adapted_view": [-1.0]}
    assert selection.select([single], dual=False).switches == (1, 0, 0)


@settings(deadline=None, max_examples=60)
@given(arrays.arrays(np.int64, st.integers(1, 40), elements=st.integers(0, 4)))
def test_halves_alternate_within_each_class(labels):
    first = selection.first_half(labels)
    for label in np.unique(labels):
        of_class = first[labels == label]
        np.testing.assert_array_equal(of_class, np.arange(len(of_class)) % 2 == 0)


@pytest.mark.parametrize(("dual", "final"), [(True, True), (False, False)])
def test_accuracies_on_halves_are_those_of_a_refit(dual, final):
    features = feature_set(dual=dual, final=final)
    chosen = {"attenuation": 0.25, "retained_energy": 0.6}
    found = selection.half_accuracies(features, chosen)
    calibrator = calibration.FDC(**chosen)
    for task in features.tasks:
        calibrator.fit_task(task.adapted, task.labels, task.head, task.pretrained, task.classes)
    calibrator.finalize()
    if final:
        calibrator.replace_heads(features.final_heads)
    terms = calibrator.terms(features.test_adapted, features.test_pretrained)
    labels = features.test_labels
    first = selection.first_half(labels)
    names = {"full": {}, "raw": COMPONENTS["raw"], "tsf": COMPONENTS["tsf"]}
    names["pac+rlc_adapted_view"] = {"tsf": False, "pretrained_view": False}
    names["adapted_view"] = {"pretrained_view": False}
    for name, switches in names.items():
        predicted = terms.fuse(**switches).label
        for half, mask in (("first", first), ("second", ~first)):
            expected = evaluation.accuracy(labels[mask], predicted[mask])
            assert found[half][name] == expected
    assert found["num_images"] == [first.sum(), (~first).sum()]
    assert ("pretrained_view" in found["first"]) == dual


def test_halves_need_labels_and_a_class_of_two_images():
    features = feature_set(dual=False)
    with pytest.raises(InputError, match="test_labels: absent"):
        selection.half_accuracies(features._replace(test_labels=None), {})
    one_each, rows = np.unique(features.test_labels, return_index=True)
    few = features._replace(test_adapted=features.test_adapted[rows], test_labels=one_each)
    with pytest.raises(InputError, match="a class with two test images"):
        selection.half_accuracies(few, {})


def rows_of(table):
    return {row[4].text: row for row in table.rows}


def test_the_table_reports_on_images_that_the_rule_did_not_see(tmp_path):
    accuracies = {
        # On the first half TSF hurts and both views help; on the second only E_0 does.
        "first": {"raw": 50, "tsf": 49, NAMES[1]: 51, NAMES[2]: 52, "pac+rlc": 56},
        "second": {"raw": 40, "tsf": 39, NAMES[1]: 44, NAMES[2]: 39, "pac+rlc": 47},
    }
    accuracies["num_images"] = [30, 10]
    for seed in (1, 2):
        write_run(tmp_path / str(seed), results(learner="rsiat", seed=seed))
    groups = runs.group(runs.load(sorted(tmp_path.iterdir())).runs)
    analyses = {str(tmp_path / str(seed)): {"selection": accuracies} for seed in (1, 2)}
    table = plugin_tables.selected_by_rule(groups, analyses)
    rows = rows_of(table)
    column = table.columns.index("CIFAR-100")
    on_first, on_second = (rows[f"by the rule, on the {half} half"] for half in selection.HALVES)
    assert [cell.text for cell in on_first[1:4]] == ["0", "1", "1"]
    assert on_first[column].mean == 47 - 40 and on_first[column].count == 2
    assert [cell.text for cell in on_second[1:4]] == ["0", "1", "0"]
    assert on_second[column].mean == 51 - 50
    papers = rows["the paper's selection"]
    assert [cell.text for cell in papers[1:4]] == ["0", "1", "0"]
    assert papers[column].mean == pytest.approx(np.mean(groups[0].gains(NAMES[1])))
    everything = rows["by the rule, on all test images"]
    assert [cell.text for cell in everything[1:4]] == ["1", "1", "1"]  # All made-up gains are > 0.
    assert everything[column].mean == pytest.approx(np.mean(groups[0].gains("full")))
    # What results of an older version lack comes from both halves together.
    for run in groups[0].runs:
        for name in NAMES[1:]:
            del run.results["components"][name]
    rows = rows_of(plugin_tables.selected_by_rule(groups, analyses))
    assert rows["E_0 alone"][column].mean == pytest.approx((30 * 1 + 10 * 4) / 40)
    assert [cell.text for cell in rows["by the rule, on all test images"][1:4]] == ["1"] * 3
    # One run without features leaves a gap, rather than a mean over the other.
    del analyses[str(tmp_path / "2")]
    row = rows_of(plugin_tables.selected_by_rule(groups, analyses))[
        "by the rule, on the first half"
    ]
    assert row[column].gap and [cell.text for cell in row[1:4]] == ["?", "?", "?"]


def test_the_rule_counts_every_benchmark_of_the_same_settings(tmp_path):
    for benchmark in ("cifar100", "cub200"):
        found = results(benchmark=benchmark)
        if benchmark == "cub200":
            found["components"]["tsf"] = found["accuracy"]["raw"] - 1
        write_run(tmp_path / benchmark, found)
    write_run(tmp_path / "reduced", config={"train.epochs": 5})
    groups = runs.group(runs.load(sorted(tmp_path.iterdir())).runs)
    table = plugin_tables.selected_by_rule(groups, {})
    chosen = [row for row in table.rows if row[4].text == "by the rule, on all test images"]
    assert [[cell.text for cell in row[1:4]] for row in chosen] == [["0", "1", "1"], ["1"] * 3]
