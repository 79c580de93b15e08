"""Runs with a damaged file end in one line of InputError that names it; see test_fuzz, too."""

import re
import shutil

import numpy as np
import pytest

import fdc_jax
from fdc_jax.errors import InputError
from fdc_jax.machine.files import read_json, write_json, write_manifest
from fdc_jax.report import classes, runs, tables
from tests import small_runs

pytestmark = pytest.mark.ci
VALUES = [None, True, -1, 0, 3, 0.5, 1e308, float("nan"), "", "a", "../../x", "\x1b[31m", [], ["a"]]
VALUES += [{}, {"a": 1}, {"a": {}}, [[]], [-1, 2], 10**30, "a" * 3000]


def use(folder):
    """Reads all JSON files of a run, from opening it to the tables of a report."""
    run = fdc_jax.open_run(folder)
    (groups, skipped) = runs.load([folder])
    for reason in skipped.values():
        raise InputError(reason)
    runs.analyse(groups[0], {})
    for table in tables.build(groups):
        table.frame.to_csv()
    classes.load(groups[0])
    run.read_records()
    run.checked_configuration()
    return run


def outcome(folder):
    """Returns the line of the InputError that a folder ends in, None if it works."""
    try:
        use(folder)
    except InputError as error:
        assert len(str(error).splitlines()) == 1 and str(error).isprintable(), str(error)
        assert folder.name in str(error), str(error)
        return str(error)
    return None


@pytest.fixture
def run(finished_run, tmp_path):
    """A run without the parts that take long to copy."""
    folder = tmp_path / "run"
    shutil.copytree(finished_run, folder, ignore=shutil.ignore_patterns("features", "checkpoints"))
    assert outcome(folder) is None
    return folder


COLUMNS = {
    "fdc_label": np.zeros(59, int),
    "raw_label": np.full(60, 10),
    "task": np.full(60, -1),
    "label": np.zeros((60, 2), int),
    "raw_task": np.full(60, "0"),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_predictions_are_labels_and_tasks_of_the_run(run, name):
    np.savez(run / "predictions.npz", **small_runs.predictions(run) | {name: COLUMNS[name]})
    assert f"predictions.npz: {name}: expected 60 whole numbers below" in outcome(run)


@pytest.mark.parametrize("name", ["label", "task", "raw_label"])
def test_predictions_have_true_labels_and_tasks(run, name):
    columns = small_runs.predictions(run)
    del columns[name]
    columns["gaussians_label"] = columns["gaussians_label"].astype(np.uint64)  # any integer type
    np.savez(run / "predictions.npz", **columns)
    line = f"{run}/predictions.npz: expected column {name}, found none"
    assert outcome(run) == (None if name == "raw_label" else line)


@pytest.mark.parametrize(
    ("file", "field", "value", "reason"),
    [
        ("config.json", "classes_per_task", {"a": 1}, "expected a whole number"),
        ("config.json", "learner.loda.marginx", 0.1, "no field marginx"),
    ],
)
def test_a_wrong_value_names_its_file_and_field(run, file, field, value, reason):
    write_json(run / file, read_json(run / file) | {field: value})
    assert re.match(rf"{run}/{file}: .*{field.partition('.')[0]}.*: {reason}", outcome(run))


@pytest.mark.parametrize("change", [{"task": 2}, {"phase": "a"}, {"step": -1}, None], ids=str)
def test_forged_cursor_of_a_checkpoint_is_named(finished_run, tmp_path, change):
    """Its manifest fits, so that it is not damaged, and nothing is moved."""
    folder = small_runs.copied(finished_run, tmp_path / "run")
    newest = small_runs.newest_checkpoint(folder)
    path = newest / "cursor" / "metadata"
    write_json(path, change and read_json(path) | change)
    write_manifest(newest)
    with pytest.raises(InputError, match=rf"checkpoints/{newest.name}: cursor"):
        fdc_jax.open_run(folder).heads()
    assert newest.exists()
