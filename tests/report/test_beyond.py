"""The whitened affinity in the report: its numbers, and that the paper's do not know of it."""

import json

import numpy as np
import pytest
from scipy import stats

from fdc_jax import calibration, feature_files
from fdc_jax.calibration.components import WHITENED, WHITENED_CLASSES
from fdc_jax.errors import InputError
from fdc_jax.report import analysis, beyond, beyond_tables, runs
from tests.report.feature_sets import feature_set
from tests.report.run_folders import results, write_run

AFFINITY = {"metric": "whitened", "evidence": "linear", "reference": "own", "scope": "task"}


def noisy(**options):
    """Features on which every variant gives another accuracy."""
    features, rng = feature_set(offset=1.0, **options), np.random.default_rng(3)
    views = (features.test_adapted, features.test_pretrained)
    adapted, pretrained = (view + rng.standard_normal(view.shape, np.float32) for view in views)
    return features._replace(test_adapted=adapted, test_pretrained=pretrained)


def fitted(features, **settings):
    """A calibrator of its own for every variant."""
    return features.fit(calibration.FDC(**settings))


def percent(features, scores):
    return pytest.approx(100 * np.mean(scores.label == features.test_labels))


@pytest.mark.parametrize("final", [False, True])
def test_methods_are_what_their_calibrators_give(final):
    features = noisy(final=final)
    found = beyond.accuracies(features, calibration.FDC(rlc_weight=0.5).settings)["methods"]
    for name, settings in {
        "fdc": {},
        "whitened": WHITENED,
        "whitened_classes": WHITENED_CLASSES,
    }.items():
        calibrator = fitted(features, rlc_weight=0.5, **settings)
        scores = calibrator.score(features.test_adapted, features.test_pretrained)
        given = scores.label_in_task(features.test_tasks)
        assert found[name] == {
            "accuracy": percent(features, scores),
            "oracle": pytest.approx(100 * np.mean(given == features.test_labels)),
            "storage_bytes": calibrator.storage_bytes,
        }
    raw = calibrator.raw(features.test_adapted, features.test_pretrained)
    assert found["raw"]["accuracy"] == percent(features, raw)
    assert found["raw"]["storage_bytes"] == 0
    assert len({each["accuracy"] for each in found.values()}) == 4


def test_ingredients_are_what_calibrators_without_the_rest_give():
    features = noisy()
    found = beyond.accuracies(features, calibration.FDC().settings)["ingredients"]
    # With gamma or a weight of 0, rather than the switches of the fusion.
    expected = {
        "metric": {"affinity_metric": "whitened"},
        "evidence": {"affinity_evidence": "linear"},
        "whitened": WHITENED,
        "without_tsf": WHITENED | {"attenuation": 0.0},
        "without_rlc": WHITENED | {"rlc_weight": 0.0},
        "adapted_view": WHITENED | {"pretrained_view_weight": 0.0},
        "pretrained_view": WHITENED | {"adapted_view_weight": 0.0},
    }
    assert list(found) == list(expected)
    for name, settings in expected.items():
        scores = fitted(features, **settings).score(features.test_adapted, features.test_pretrained)
        assert found[name] == percent(features, scores), name
    assert len(set(found.values())) > 4


def test_one_view_has_no_ingredients_of_two():
    features = feature_set(dual=False)
    found = beyond.accuracies(features, calibration.FDC().settings)
    assert list(found["ingredients"]) == list(beyond.INGREDIENTS)[:5]
    scores = fitted(features, **WHITENED).score(features.test_adapted)
    assert found["methods"]["whitened"]["accuracy"] == percent(features, scores)


@pytest.mark.parametrize("refused", [{"neighbours": 2}, {"affinity_reference": "nearest"}])
def test_settings_that_the_metric_does_not_allow(refused):
    with pytest.raises(InputError, match=next(iter(refused))):
        beyond.accuracies(feature_set(), calibration.FDC(**refused).settings)


def test_without_test_labels():
    with pytest.raises(InputError, match="test_labels: absent"):
        beyond.accuracies(feature_set()._replace(test_labels=None), calibration.FDC().settings)


# Tables -------------------------------------------------------------------------------------------


def with_entry(seed, accuracy, **changed):
    entry = {"affinity": AFFINITY, "accuracy": accuracy, "oracle": 96.0}
    entry |= {"storage_bytes": 4 * 2**20}
    return results(seed=seed, whitened=entry | changed)


def grouped(folder):
    found = runs.load(sorted(folder.iterdir()))
    assert found.skipped == []
    return runs.group(found.runs)


def test_results_alone_give_the_variant_that_the_run_was_set_to(tmp_path):
    own = {1: 70.0, 2: 71.5, 3: 69.0}
    for seed, accuracy in own.items():
        write_run(tmp_path / f"r{seed}", with_entry(seed, accuracy))
    write_run(tmp_path / "r4", seed=4)
    (group,) = grouped(tmp_path)
    table = beyond_tables.methods([group], {})
    raw, fdc, whitened, by_class = table.records
    before = np.array([results(seed=seed)["accuracy"]["fdc"] for seed in own])
    gains = np.array(list(own.values())) - before
    reach = stats.t.ppf(0.975, 2) * np.std(gains, ddof=1) / np.sqrt(3)
    assert whitened["method"] == "whitened affinity" and whitened["n"] == 3
    for name, value in {
        "mean": np.mean(list(own.values())),
        "gain_mean": gains.mean(),
        "gain_std": np.std(gains, ddof=1),
        "gain_low": gains.mean() - reach,
        "gain_high": gains.mean() + reach,
        "oracle": 96.0,
        "storage_bytes": 4 * 2**20,
        "storage_ratio": 4 / 3,
    }.items():
        assert whitened[name] == pytest.approx(value), name
    row = table.rows[2]
    assert row[5].text == f"{gains.mean():+.2f} ± {np.std(gains, ddof=1):.2f} (3)"
    assert row[6].text == f"{gains.mean() - reach:+.2f} to {gains.mean() + reach:+.2f}"
    assert [cell.gap for cell in table.rows[3][4:]] == [True] * 6
    assert by_class["mean"] is None and by_class["n"] == 0
    # The other two are the paper's, of all four seeds.
    assert fdc["mean"] == pytest.approx(np.mean(group.values("accuracy", "fdc")))
    assert (fdc["n"], fdc["gain_mean"], table.rows[1][5].gap) == (4, None, False)
    assert raw["oracle"] == 95.0
    assert "in the paper" in table.note
    ablation = beyond_tables.ingredients([group], {})
    assert all(cell.gap for row in ablation.rows for cell in row[ablation.num_labels :])


def test_another_affinity_is_not_taken_for_one_of_the_two(tmp_path):
    write_run(tmp_path / "r", with_entry(1, 70.0, affinity=AFFINITY | {"evidence": "tanh"}))
    records = beyond_tables.methods(grouped(tmp_path), {}).records
    assert [record["n"] for record in records] == [1, 1, 0, 0]
    write_run(
        tmp_path / "r",
        with_entry(1, 70.0, affinity=AFFINITY | {"reference": "pooled", "scope": "class"}),
    )
    records = beyond_tables.methods(grouped(tmp_path), {}).records
    assert [record["mean"] for record in records[2:]] == [None, 70.0]


def test_features_give_both_and_the_ingredients(tmp_path):
    analyses = {}
    for seed, (fdc, whitened, metric) in {1: (60, 63, 61.5), 2: (62, 66, 62.5)}.items():
        # What the features say counts, not what the results do.
        write_run(tmp_path / f"r{seed}", with_entry(seed, 99.0))
        methods = {
            name: {"accuracy": accuracy, "oracle": 90.0, "storage_bytes": storage}
            for name, accuracy, storage in (
                ("raw", 50.0, 0),
                ("fdc", fdc, 1000),
                ("whitened", whitened, 1000 * seed),
                ("whitened_classes", whitened + 1, 1000 * seed),
            )
        }
        analyses[str(tmp_path / f"r{seed}")] = {
            "beyond": {"methods": methods, "ingredients": {"metric": metric}}
        }
    groups = grouped(tmp_path)
    records = beyond_tables.methods(groups, analyses).records
    assert [record["mean"] for record in records] == [50.0, 61.0, 64.5, 65.5]
    assert [record["gain_mean"] for record in records] == [-11.0, None, 3.5, 4.5]
    assert records[2]["gain_std"] == pytest.approx(np.std([3, 4], ddof=1))
    assert records[2]["storage_ratio"] == 1.5
    table = beyond_tables.ingredients(groups, analyses)
    column = table.columns.index("CIFAR-100")
    assert [row[1].text for row in table.rows] == list(beyond_tables._INGREDIENTS.values())
    assert table.rows[0][column].mean == 1.0  # 1.5 and 0.5
    assert all(row[column].gap for row in table.rows[1:])


# Beside the paper's numbers -----------------------------------------------------------------------


@pytest.fixture
def run(tmp_path):
    features, folder = feature_set(), tmp_path / "features"
    for number, task in enumerate(features.tasks):
        feature_files.write_task(
            folder, number, task.adapted, task.labels, task.head, task.pretrained, task.classes
        )
    feature_files.write_test(
        folder, features.test_adapted, features.test_pretrained, features.test_labels
    )
    write_run(tmp_path, results(config={"fdc.attenuation": 0.25}))
    return runs.RunFolder(tmp_path, json.loads((tmp_path / "results.json").read_text()))


def test_a_run_with_the_variant_has_all_analyses_of_one_without(run):
    names = [*analysis.ANALYSES]
    names.remove("task_confusion")
    found = analysis.analyse(run, names)
    assert "missing" not in found
    config = run.results["config"] | {f"fdc.{k}": v for k, v in WHITENED_CLASSES.items()}
    computed = []
    other = run._replace(results=run.results | {"config": config})
    assert analysis.analyse(other, names, computed.append) == found
    assert computed == []
    direct = beyond.accuracies(
        feature_files.load(run.features_path), calibration.FDC(attenuation=0.25).settings
    )
    assert found["beyond"] == direct


def test_what_the_variant_does_not_allow_is_a_gap_with_a_reason(run):
    config = {"config": {"fdc.neighbours": 2}}
    found = analysis.analyse(run._replace(results=config), ["beyond"])
    assert found == {
        "missing": {"beyond": "neighbours: expected 1 with affinity_metric whitened, found 2"}
    }


def test_runs_with_the_variant_belong_to_those_without(tmp_path):
    write_run(tmp_path / "old", seed=1)
    off = {"affinity_metric": "cosine", "affinity_evidence": "tanh", "affinity_scope": "task"}
    for seed, chosen in enumerate((off, WHITENED, WHITENED_CLASSES), 2):
        config = {f"fdc.{name}": value for name, value in chosen.items()}
        config.setdefault("fdc.affinity_reference", "own")
        write_run(tmp_path / f"run{seed}", seed=seed, config=config)
    (group,) = grouped(tmp_path)
    assert group.seeds == [1, 2, 3, 4] and group.follows_protocol
    write_run(tmp_path / "run5", seed=5, config={"fdc.affinity_reference": "nearest"})
    assert [each.title for each in grouped(tmp_path)] == ["", "affinity reference nearest"]
