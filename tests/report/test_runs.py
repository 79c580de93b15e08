"""Which folders are usable, which belong together, and what they are called."""

import sys

import numpy as np
import pytest

from fdc_jax.machine.conversion import convert
from fdc_jax.report import paper, runs
from fdc_jax.run import configuration, records
from tests.report.made_up import predictions, results, write_run


def load(*paths):
    """The groups in folders, the names of the folders that are used, and reasons by name."""
    groups, skipped = runs.load(paths)
    used = [run.folder.name for group in groups for run in group.runs]
    return groups, sorted(used), {path.name: reason for path, reason in skipped.items()}


def test_a_folder_of_seeds_stands_for_its_seeds_in_order(tmp_path):
    for seed in (10, 2, 1):
        write_run(tmp_path / "runs" / f"seed_{seed}", seed=seed)
    (tmp_path / "runs" / "summary.json").write_text("{}")
    (group,), _, reasons = load(tmp_path / "runs", tmp_path / "runs" / "seed_1")
    assert reasons == {}
    assert group.seeds == [1, 2, 10]
    assert (group.title, group.name) == ("", "Cumulative-LoRA, CIFAR-100")
    for name in ("raw", "gaussians"):
        assert [*group.values(name)] == [run.results.accuracy[name] for run in group.runs]
    assert group.methods == ["raw", "fdc", "gaussians"] and not group.has("ncm")


UNUSABLE = {
    "absent": "expected the work directory of a run, found no config.json",
    "unfinished": "unfinished: no results.json, 1 task done",
    "cut": "unreadable",
    "fields": "results.json: expected a field benchmark",
    "predictions": "predictions.npz",
}


def test_unusable_folders_are_named_and_stop_no_other(tmp_path):
    columns = predictions(1)
    write_run(tmp_path / "good", None, columns, benchmark="digits")
    for seed, name in enumerate(("unfinished", "cut", "fields", "predictions"), 2):
        write_run(tmp_path / name, seed=seed)
    (tmp_path / "cut" / "results.json").write_text('{"a": "cif')
    (tmp_path / "fields" / "results.json").write_text("{}")
    (tmp_path / "predictions" / "predictions.npz").write_bytes(b"PK\x03\x04 cut")
    (tmp_path / "unfinished" / "results.json").unlink()
    (tmp_path / "unfinished" / "tasks").mkdir()
    (tmp_path / "unfinished" / "tasks" / "task_000.json").write_text("{}")
    (group,), used, reasons = load(*tmp_path.iterdir(), tmp_path / "absent")
    assert used == ["good"] and reasons.keys() == UNUSABLE.keys()
    for name, reason in reasons.items():
        assert UNUSABLE[name] in reason and "\n" not in reason
    actual = runs.predictions(group.runs[0])
    for name, column in columns.items():
        np.testing.assert_array_equal(actual[name], column)


def test_of_equal_runs_the_first_counts(tmp_path):
    usual = {"calibrators": "fdc,gaussians"}
    write_run(tmp_path / "a", config=usual)
    # Settings that change no number make no other run.
    write_run(tmp_path / "b", config=usual | {"data.dir": "x", "report": False})
    write_run(tmp_path / "c", config=usual | {"train.epochs": 5})
    write_run(tmp_path / "d", config={"calibrators": "fdc,gaussians,ncm"})
    groups, used, reasons = load(tmp_path)
    assert used == ["a", "c", "d"] and reasons.keys() == {"b"}
    same = f"same benchmark, learner, seed and settings as {tmp_path / 'a'}, except"
    assert reasons["b"].startswith(same)
    titles = {group.runs[0].folder.name: group.title for group in groups}
    assert titles["c"] == "epochs 5" and titles["d"] == "calibrators fdc,gaussians,ncm"


DEPARTURES = {
    "variant Ti/16, train per class 60, epochs 5": {
        "config": {"encoder.variant": "Ti/16", "data.train_per_class": 60, "train.epochs": 5}
    },
    "400 of 50,000 training images, weights other.npz": {
        "num_train_images": 400, "encoder": {"weights": "other.npz"}
    },
    "validation share 0.1": {"config": {"data.validation_share": 0.1}, "num_train_images": 45},
    "attenuation 0.25, flip False": {"config": {"fdc.attenuation": 0.25, "data.flip": False}},
}  # fmt: skip


def test_titles_of_groups_are_departures_from_the_protocol(tmp_path):
    for number, changed in enumerate(DEPARTURES.values()):
        write_run(tmp_path / str(number), results(**changed))
    titles = {group.runs[0].folder.name: group.title for group in load(tmp_path)[0]}
    assert [titles[name] for name in sorted(titles)] == [*DEPARTURES]


@pytest.mark.parametrize("benchmark", [*paper.benchmarks(), "digits"])
def test_configurations_of_benchmarks_follow_the_protocol(benchmark):
    config, expected = configuration.flatten(configuration.load(benchmark)), []
    if benchmark == "digits":  # The paper has none, so only the method's settings are compared.
        config["fdc.attenuation"] = 0.25
        expected = ["attenuation 0.25"]
    content = results(benchmark=benchmark, learner="loda", config=config)
    settings = runs.settings(convert(content, records.Results))
    assert runs.deviations(benchmark, "loda", settings) == expected
    settings["learner.loda.margin"] += 1
    margin = f"margin {settings['learner.loda.margin']:g}"
    assert runs.deviations(benchmark, "loda", settings) == [*expected, margin]


def test_code_beside_a_run_is_not_run(tmp_path, monkeypatch):
    """A learner outside the package has its name as title."""
    (tmp_path / "probe_of_mine.py").write_text("raise SystemExit('imported')\nTITLE = 'Mine'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    write_run(tmp_path / "runs", learner="probe_of_mine")
    (group,), _, reasons = load(tmp_path / "runs")
    assert reasons == {} and "probe_of_mine" not in sys.modules
    assert group.name.split(",")[0] == "probe_of_mine"
