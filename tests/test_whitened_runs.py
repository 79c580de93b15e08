"""Runs with the whitened affinity: the paper's numbers stay, and its own stand beside them."""

import json

import numpy as np
import pytest

from fdc_jax import calibration, evaluation, feature_files
from fdc_jax.calibration.components import COMPONENTS, WHITENED, WHITENED_CLASSES
from fdc_jax.report import beyond
from tests import interruptions

SHORT = ("--config.train.epochs=1",)


def flags(variant):
    return [f"--config.fdc.{name}={value}" for name, value in variant.items()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def plain(folder, cache):
    interruptions.finish(interruptions.start(folder / "plain", *SHORT, "--quiet", cache=cache))
    return folder / "plain"


@pytest.fixture(scope="module")
def by_class(folder, plain, cache):
    """Two seeds, class by class, and what they printed."""
    options = (*SHORT, *flags(WHITENED_CLASSES), "--config.seed=1,2")
    process = interruptions.start(folder / "classes", *options, cache=cache)
    return folder / "classes", interruptions.finish(process)[0]


@pytest.fixture(scope="module")
def by_task(folder, plain, cache):
    process = interruptions.start(folder / "task", *SHORT, *flags(WHITENED), cache=cache)
    return folder / "task", interruptions.finish(process)[0]


def read(workdir):
    """Results and predictions of a run."""
    with np.load(workdir / "predictions.npz") as file:
        return json.loads((workdir / "results.json").read_text()), dict(file)


def check_beside(plain, workdir, name):
    """The paper's numbers are those of the plain run; returns the results."""
    (expected, before), (found, after) = read(plain), read(workdir)
    assert after.keys() - before.keys() == {"whitened_label", "whitened_task"}
    for column, values in before.items():
        np.testing.assert_array_equal(after[column], values, err_msg=column)
    apart = {"timing", "config", "versions", "curve"}
    assert found.keys() - expected.keys() == {"whitened"}
    for key in expected.keys() - apart:
        assert found[key] == expected[key], key
    for point, other in zip(found["curve"], expected["curve"], strict=True):
        assert point.keys() - other.keys() == {"whitened"}
        assert {key: point[key] for key in other} == other
    entry, labels = found["whitened"], after["whitened_label"]
    assert entry["affinity"] == beyond.AFFINITIES[name]._asdict()
    assert entry["accuracy"] == evaluation.accuracy(after["label"], labels)
    assert entry["routing_accuracy"] == evaluation.accuracy(after["task"], after["whitened_task"])
    assert (labels != after["fdc_label"]).any()
    assert entry["components"].keys() == COMPONENTS.keys()
    assert entry["components"]["full"] == entry["accuracy"]
    assert entry["components"]["raw"] == found["accuracy"]["raw"]
    last = found["curve"][-1]["whitened"]
    assert {key: entry[key] for key in last} == last
    assert entry["average_incremental_accuracy"] == pytest.approx(
        np.mean([point["whitened"]["accuracy"] for point in found["curve"]])
    )
    assert entry["storage_bytes"] > found["fdc_storage_bytes"]
    # The report gets the same from the features, and the other variant with it.
    settings = calibration.FDC().settings
    refitted = beyond.accuracies(feature_files.load(workdir / "features"), settings)["methods"]
    assert refitted[name] == {key: entry[key] for key in refitted[name]}
    assert refitted["fdc"]["accuracy"] == found["accuracy"]["fdc"]
    assert refitted["fdc"]["storage_bytes"] == found["fdc_storage_bytes"]
    return found


def test_the_variant_by_task_leaves_the_paper_s_numbers(plain, by_task):
    workdir, output = by_task
    found = check_beside(plain, workdir, "whitened")
    gain = found["whitened"]["accuracy"] - found["accuracy"]["fdc"]
    assert output.splitlines()[-2] == (
        "beyond the paper: the whitened affinity (linear, own) gives "
        f"{found['whitened']['accuracy']:.2f} % ({gain:+.2f} over FDC)"
    )


@pytest.mark.slow
def test_the_variant_by_class_leaves_the_paper_s_numbers(plain, by_class):
    workdir, output = by_class
    check_beside(plain, workdir / "seed_1", "whitened_classes")
    seeds = [read(workdir / f"seed_{seed}")[0] for seed in (1, 2)]
    own = [each["whitened"]["accuracy"] for each in seeds]
    gain = evaluation.paired_gain([each["accuracy"]["fdc"] for each in seeds], own)
    summary = json.loads((workdir / "summary.json").read_text())["whitened"]
    assert summary["affinity"] == seeds[0]["whitened"]["affinity"]
    assert summary["accuracy"] == {
        "mean": pytest.approx(np.mean(own)),
        "std": pytest.approx(np.std(own, ddof=1)),
    }
    assert summary["gain_over_fdc"] == pytest.approx(gain._asdict())
    assert (
        "the whitened affinity (linear, pooled, class by class) gives "
        f"{np.mean(own):.2f} ± {np.std(own, ddof=1):.2f} % ({gain.mean:+.2f} points over FDC"
    ) in output


@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_entry(by_class, tmp_path, cache):
    options = (*SHORT, *flags(WHITENED_CLASSES), "--quiet")
    process = interruptions.start(tmp_path / "run", *options, cache=cache)
    interruptions.wait_for(tmp_path / "run", "evaluation", process, count=2)
    process.kill()
    process.communicate()
    assert not (tmp_path / "run" / "results.json").exists()
    interruptions.finish(interruptions.start(tmp_path / "run", *options, cache=cache))
    interruptions.same_outcome(by_class[0] / "seed_1", tmp_path / "run")
    interruptions.nothing_done_twice(tmp_path / "run")
