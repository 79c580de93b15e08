"""Which folders are usable, which belong together, and what they are called."""

import sys

import numpy as np
import pytest

from fdc_jax.machine.conversion import convert
from fdc_jax.report import paper, runs
from fdc_jax.run import configuration, records
from tests.report.made_up import predictions, results, write_run


def loaded(folder):
    return runs.load(sorted(folder.iterdir()))


def runs_of(groups):
    return [run for group in groups for run in group.runs]


def reasons(skipped):
    return {path.name: reason for path, reason in skipped.items()}


def test_a_folder_of_seeds_stands_for_its_seeds_in_order(tmp_path):
    for seed in (10, 2, 1):
        write_run(tmp_path / "runs" / f"seed_{seed}", seed=seed)
    (tmp_path / "runs" / "summary.json").write_text("{}")
    found = runs.load([tmp_path / "runs", tmp_path / "runs" / "seed_1"])
    assert found[1] == {}
    (group,) = found[0]
    assert group.seeds == [1, 2, 10]
    assert group.title == ""
    assert group.name == "Cumulative-LoRA, CIFAR-100"
    for name in ("raw", "gaussians"):
        assert [*group.values(name)] == [run.results.accuracy[name] for run in group.runs]
    assert group.methods == ["raw", "fdc", "gaussians"] and not group.has("ncm")


def test_folders_that_are_no_finished_runs_are_named_and_do_not_stop_the_others(tmp_path):
    write_run(tmp_path / "good")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    for name in ("unfinished", "cut", "list"):
        write_run(tmp_path / name)
        (tmp_path / name / "results.json").write_text({"cut": '{"a": "cif'}.get(name, "[1]"))
    (tmp_path / "unfinished" / "results.json").unlink()
    (tmp_path / "unfinished" / "tasks").mkdir()
    (tmp_path / "unfinished" / "tasks" / "task_000.json").write_text("{}")
    found = runs.load([*sorted(tmp_path.iterdir()), tmp_path / "absent"])
    assert [run.folder.name for run in runs_of(found[0])] == ["good"]
    why = reasons(found[1])
    assert set(why) == {"absent", "empty", "file", "unfinished", "cut", "list"}
    assert "unfinished" in why["unfinished"] and "1 task" in why["unfinished"]
    for name in ("absent", "empty", "file"):
        assert "expected the work directory of a run, found no config.json" in why[name]
    assert "unreadable" in why["cut"] and "expected an object" in why["list"]
    assert all("\n" not in reason for reason in why.values())


def test_predictions_are_checked_when_a_run_is_read(tmp_path):
    columns = predictions(1)
    found = results(benchmark="digits")
    write_run(tmp_path / "a", found, columns)
    write_run(tmp_path / "e", found | {"seed": 5})
    (tmp_path / "e" / "predictions.npz").write_bytes(b"PK\x03\x04 cut")
    write_run(tmp_path / "f", found | {"seed": 6})
    read = loaded(tmp_path)
    assert [run.folder.name for run in runs_of(read[0])] == ["a", "f"]
    why = reasons(read[1])
    assert set(why) == {"e"}
    for name, column in runs.predictions(runs_of(read[0])[0]).items():
        np.testing.assert_array_equal(column, columns[name])
    assert runs.predictions(runs_of(read[0])[1]) == {}


def test_of_equal_runs_the_first_counts(tmp_path):
    usual = {"calibrators": "fdc,gaussians"}
    write_run(tmp_path / "a", config=usual)
    # What moves no number makes no other run.
    write_run(tmp_path / "b", config=usual | {"data.dir": "x", "report": False})
    write_run(tmp_path / "c", config=usual | {"train.epochs": 5})
    write_run(tmp_path / "d", config={"calibrators": "fdc,gaussians,ncm"})
    found = loaded(tmp_path)
    assert {run.folder.name for run in runs_of(found[0])} == {"a", "c", "d"}
    same = f"same benchmark, learner, seed and settings as {tmp_path / 'a'}, except"
    assert reasons(found[1])["b"].startswith(same) and set(reasons(found[1])) == {"b"}
    titles = {group.runs[0].folder.name: group.title for group in found[0]}
    assert titles["c"] == "epochs 5" and titles["d"] == "calibrators fdc,gaussians,ncm"


def test_groups_say_what_departs_from_the_protocol(tmp_path):
    reduced = {"encoder.variant": "Ti/16", "data.train_per_class": 60, "train.epochs": 5}
    fewer = {"num_train_images": 400, "encoder": {"weights": "other.npz"}}
    cases = {
        "a": (reduced, {}, "variant Ti/16, train per class 60, epochs 5"),
        "d": ({}, fewer, "400 of 50,000 training images, weights other.npz"),
        "v": ({"data.validation_share": 0.1}, {"num_train_images": 45}, "validation share 0.1"),
        "e": ({"fdc.attenuation": 0.25, "data.flip": False}, {}, "attenuation 0.25, flip False"),
    }
    for name, (config, changed, _) in cases.items():
        write_run(tmp_path / name, results(config=config, **changed))
    groups = loaded(tmp_path)[0]
    assert {group.runs[0].folder.name: group.title for group in groups} == {
        name: title for name, (_, _, title) in cases.items()
    }


@pytest.mark.parametrize("benchmark", [*paper.benchmarks(), "digits"])
def test_the_settings_of_a_benchmark_follow_the_protocol(benchmark):
    config = configuration.flatten(configuration.load(benchmark))
    if benchmark == "digits":  # The paper has none, so only the method's settings are compared.
        config["fdc.attenuation"] = 0.25
    made = results(benchmark=benchmark, learner="loda", config=config)
    found = runs.settings(convert(made, records.Results))
    expected = ["attenuation 0.25"] if benchmark == "digits" else []
    assert runs.deviations(benchmark, "loda", found) == expected
    found["learner.loda.margin"] += 1
    assert runs.deviations(benchmark, "loda", found)[len(expected) :] == [
        f"margin {found['learner.loda.margin']:g}"
    ]


def test_code_that_lies_beside_a_run_is_not_run(tmp_path, monkeypatch):
    """A learner that is not of the package goes by its name."""
    (tmp_path / "probe_of_mine.py").write_text("raise SystemExit('imported')\nTITLE = 'Mine'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    write_run(tmp_path / "runs" / "a", learner="probe_of_mine")
    found = loaded(tmp_path / "runs")
    assert found[1] == {} and "probe_of_mine" not in sys.modules
    assert [group.name.split(",")[0] for group in found[0]] == ["probe_of_mine"]
