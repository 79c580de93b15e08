"""The folder of a run: its owner, damaged and missing files, and other processes."""

import os
import shutil
import socket

import pytest

from fdc_jax.errors import InputError
from fdc_jax.machine.files import locked, read_json, write_json
from fdc_jax.run.configuration import CLASSES, PLANNED
from fdc_jax.run.folder import known_classes
from tests import small_runs
from tests.small_runs import config, results
from tests.small_runs import run as go


@pytest.fixture
def copy(finished_run, tmp_path):
    return small_runs.copied(finished_run, tmp_path / "copy")


def test_known_classes_come_from_the_longest_seed(finished_run, tmp_path):
    """A stop leaves the seeds of one command at different numbers of tasks."""
    saved = read_json(finished_run / "config.json")
    for folder, names, sizes in (("w", "ab", [2]), ("x", "abc", [2, 1])):
        known = dict.fromkeys(names, "0" * 64)
        write_json(tmp_path / folder / "config.json", saved | {CLASSES: known, PLANNED: sizes})
    folders = [tmp_path / name for name in "wxz"]  # the last one has no run
    known = known_classes(folders, saved["classes_per_task"])
    assert ([*known.classes], known.sizes) == (["a", "b", "c"], (2, 1))


# Damaged and missing files ------------------------------------------------------------------------


MISSING = {
    "config.json": r"has files of a run but no config.json",
    "results.json tasks/task_000.json": r"task_000.json: is missing; put it back, or choose",
}


@pytest.mark.parametrize("names", MISSING)
def test_a_missing_file_is_named(copy, cache, names):
    for name in names.split():
        (copy / name).unlink()
    with pytest.raises(InputError, match=MISSING[names]):
        go(config(cache), copy)


def test_last_task_is_evaluated_again(finished_run, copy, cache):
    """As by a process that was killed before the last task was done."""
    for name in ("results.json", "tasks/task_001.json", "calibrators/fdc.npz"):
        (copy / name).unlink()
    shutil.rmtree(small_runs.newest_checkpoint(copy))
    go(config(cache), copy)
    small_runs.same_outcome(finished_run, copy)
    assert [event["task"] for event in small_runs.events(copy, "training")] == [0, 1]
    assert [event["task"] for event in small_runs.events(copy, "statistics")] == [0, 1, 1]


@pytest.mark.ci
def test_lost_features_of_the_previous_encoder_are_recomputed(
    finished_run, stopped_run, cache, tmp_path
):
    """Class Gaussians without them would estimate no drift, and nothing would say so."""
    folder = small_runs.copied(stopped_run, tmp_path / "run")
    small_runs.stopped(config(cache), folder, 3)
    path = folder / "features" / "train_previous_1.npy"
    expected = path.read_bytes()
    path.unlink()
    go(config(cache), folder)
    assert path.read_bytes() == expected
    small_runs.same_outcome(finished_run, folder)


def test_finished_run_without_checkpoints_is_not_trained_again(copy, cache):
    saved = results(copy)
    write_json(copy / "results.json", saved | {"num_tasks": 1, "curve": saved["curve"][:1]})
    shutil.rmtree(copy / "checkpoints")
    with pytest.raises(InputError, match=r"holds a finished run, and no checkpoint to resume"):
        go(config(cache), copy)


# Other processes ----------------------------------------------------------------------------------


def test_one_process_per_work_directory(copy, cache):
    name = f"process {os.getpid()} on {socket.gethostname()}"
    with (
        locked(copy / ".lock"),
        pytest.raises(InputError, match=f"copy is in use by {name}; wait for it, stop it or"),
    ):
        go(config(cache), copy)
    go(config(cache), copy)
