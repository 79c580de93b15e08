"""Runs with a damaged file end in one line of InputError that names it; see test_fuzz, too."""

import errno
import json
import os
import shutil

import numpy as np
import pytest

import fdc_jax
from fdc_jax import export
from fdc_jax.errors import InputError
from fdc_jax.machine.files import read_safetensors, write_manifest, write_safetensors
from fdc_jax.report import classes, runs, tables
from tests import small_runs

VALUES = [None, True, -1, 0, 3, 0.5, 1e308, float("nan"), "", "a", "../../x", "\x1b[31m", [], ["a"]]
VALUES += [{}, {"a": 1}, {"a": {}}, [[]], [-1, 2], 10**30, "a" * 3000]


def use(folder):
    """Does with a run what its JSON files matter for, from opening it to the tables of a report."""
    run = fdc_jax.open_run(folder)
    (groups, skipped) = runs.load([folder])
    for reason in skipped.values():
        raise InputError(reason)
    runs.analyse(groups[0], {})
    for table in tables.build(groups):
        table.frame.to_csv()
    classes.load(groups[0])
    run.read_records()
    run._configuration()
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
    (folder / "latency.json").write_text(
        json.dumps({"contenders": {"baseline": {"milliseconds": [1.0], "peak_bytes": None}}})
    )
    assert outcome(folder) is None
    return folder


KINDS = {
    "missing": lambda arrays, name: arrays.pop(name),
    "transposed": lambda arrays, name: arrays.update({name: arrays[name].T}),
    "another type": lambda arrays, name: arrays.update({name: arrays[name].astype(np.float16)}),
    "unknown": lambda arrays, name: arrays.update({f"{name}_": arrays[name]}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_of_an_export_fit_its_learner(finished_run, tmp_path, kind):
    out = tmp_path / "out"
    export.write(finished_run, out)
    arrays = read_safetensors(out / "merged.safetensors")
    KINDS[kind](arrays, min(arrays))
    write_safetensors(out / "merged.safetensors", arrays)
    write_manifest(out)
    with pytest.raises(InputError, match=r"merged.safetensors: .*: expected .*, found "):
        fdc_jax.open_run(out).encoder(2)


@pytest.mark.parametrize(
    "change",
    [
        {"fdc_label": np.zeros(59, int)},
        {"raw_label": np.full(60, 10)},
        {"task": np.full(60, -1)},
        {"label": np.zeros((60, 2), int)},
        {"raw_task": np.full(60, "0")},
    ],
    ids=lambda change: min(change),
)
def test_predictions_are_labels_and_tasks_of_the_run(run, change):
    columns = small_runs.predictions(run)
    np.savez(run / "predictions.npz", **columns | change)
    assert f"predictions.npz: {min(change)}: expected 60 whole numbers below" in outcome(run)


@pytest.mark.parametrize("name", ["label", "task", "raw_label", "fdc_label"])
def test_predictions_have_true_labels_and_tasks(run, name):
    columns = small_runs.predictions(run)
    del columns[name]
    np.savez(run / "predictions.npz", **columns)
    line = f"{run}/predictions.npz: expected column {name}, found none"
    assert outcome(run) == (line if name in ("label", "task") else None)


def test_predictions_have_any_integer_type(run):
    columns, best = small_runs.predictions(run), "gaussians_label"
    np.savez(run / "predictions.npz", **columns | {best: columns[best].astype(np.uint64)})
    assert outcome(run) is None


def test_object_in_a_saved_configuration_is_one_line(run):
    saved = json.loads((run / "config.json").read_text())
    for value in ({}, {"a": 1}):
        (run / "config.json").write_text(json.dumps(saved | {"classes_per_task": value}))
        assert "config.json: config.classes_per_task: expected a whole number" in outcome(run)


def test_an_unknown_option_of_a_learner_names_the_file(run):
    saved = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(saved | {"learner.loda.marginx": 0.1}))
    assert "config.json: config.learner.loda: no field marginx" in outcome(run)


def test_a_record_with_an_impossible_value_is_named(run):
    path = run / "tasks" / "task_001.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"task": -1}))
    message = "task_001.json: task: expected a whole number >= 0, found -1"
    with pytest.raises(InputError, match=message):
        fdc_jax.open_run(run).read_records()


def test_one_damaged_run_is_skipped_by_name(run, tmp_path):
    good = shutil.copytree(run, tmp_path / "good")
    (run / "results.json").write_text("{}")
    groups, skipped = runs.load([run, good])
    ((path, reason),) = skipped.items()
    assert [valid_run.folder for group in groups for valid_run in group.runs] == [good]
    assert path == run and "results.json: expected a field benchmark" in reason


@pytest.mark.parametrize(
    "change",
    [{"task": None}, {"task": 2}, {"phase": "a"}, {"step": -1}, {"classes_per_task": []}, None, 3],
    ids=str,
)
def test_forged_cursor_of_a_checkpoint_is_named(finished_run, tmp_path, change):
    """Its manifest fits, so that it is not damaged, and nothing is moved."""
    folder = small_runs.copied(finished_run, tmp_path / "run")
    newest = max((folder / "checkpoints").iterdir(), key=lambda path: int(path.name))
    path = newest / "cursor" / "metadata"
    cursor = change
    if isinstance(change, dict):
        cursor = json.loads(path.read_text()) | change
        cursor = {name: value for name, value in cursor.items() if value is not None}
    path.write_text(json.dumps(cursor))
    write_manifest(newest)
    with pytest.raises(InputError, match=rf"checkpoints/{newest.name}: cursor"):
        fdc_jax.open_run(folder).heads()
    assert newest.exists()


def stale(*arguments, **options):
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


@pytest.mark.parametrize("use", ["resume", "open"])
@pytest.mark.parametrize("state", ["stopped_run", "finished_run"])
def test_unreadable_checkpoint_of_a_run_is_one_line(
    state, use, request, cache, tmp_path, monkeypatch
):
    """A network disk that fails for a moment; a finished run writes its results again."""
    folder = small_runs.copied(request.getfixturevalue(state), tmp_path / "run")
    (folder / "results.json").unlink(missing_ok=True)
    run = fdc_jax.open_run(folder)
    before = small_runs.contents(folder)
    monkeypatch.setattr("orbax.checkpoint.StandardCheckpointHandler.restore", stale)
    with pytest.raises(InputError, match=r"cannot read checkpoint .*.*Stale file handle"):
        run.heads() if use == "open" else small_runs.run(small_runs.config(cache), folder)
    assert small_runs.contents(folder) == before
