"""Several devices and several processes give what one gives, are killed, fail and stop together."""

import json
import re
import signal
import socket

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from tests import small_runs
from tests.small_runs import events, finish, nothing_done_twice, same_outcome, start, wait_for


def start_two(workdir, *options, cache, second=()):
    """Starts two processes of two devices each; the second has no access to either folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address, port = free.getsockname()
    join = f"--distributed={address}:{port}"
    nowhere = workdir.with_name(f"{workdir.name}_nowhere")
    nowhere.mkdir(exist_ok=True)
    # Of what the first has, compiled programs alone are at hand, which saves minutes.
    if not (nowhere / "compiled").exists():
        (nowhere / "compiled").symlink_to(cache / "compiled")
    return [
        start(workdir, *options, f"{join},0/2", cache=cache, devices=2),
        start(nowhere, *options, *second, f"{join},1/2", cache=nowhere, devices=2),
    ]


def finish_two(running, expected=0):
    return [finish(process, expected)[1] for process in running]


def nearly_same(actual, expected):
    """Asserts that features agree to float tolerance, and what was counted exactly."""
    names = sorted(path.name for path in (expected / "features").glob("*.npy"))
    assert "train_adapted_1.npy" in names
    for name in names:
        first, second = (np.load(folder / "features" / name) for folder in (actual, expected))
        if second.dtype.kind == "f":
            assert_allclose(first, second, atol=1e-4 * np.abs(second).max(), err_msg=name)
        else:
            assert_array_equal(first, second, err_msg=name)
    first, second = small_runs.results(actual), small_runs.results(expected)
    assert first["fdc_storage_bytes"] == second["fdc_storage_bytes"]
    first, second = small_runs.predictions(actual), small_runs.predictions(expected)
    assert_array_equal(first["label"], second["label"])
    # Of sixty images one may lie on an edge.
    for name in ("fdc_label", "raw_label"):
        assert (first[name] != second[name]).sum() <= 1


@pytest.fixture(scope="module")
def two(tmp_path_factory, cache):
    """A run of two processes on two devices each; `printed.json` holds what both printed."""

    def make(workdir):
        outputs = [finish(process) for process in start_two(workdir, cache=cache)]
        (workdir / "printed.json").write_text(json.dumps(outputs))

    return small_runs.shared(tmp_path_factory, "two", make)


# What XLA itself writes where a program takes two minutes to compile, as on a busy machine.
ALARM = re.compile(r"^E\d{4} .*slow_operation_alarm.*\n(?:\n|\*+\n|\[Compiling module .*\n)*", re.M)

GLOO = set("Gloo Rank is connected to peer ranks Expected number of".split())


@pytest.mark.ci
def test_two_processes_equal_one_and_the_first_writes(finished_run, two):
    nearly_same(two, finished_run)
    (_, errors), (other_output, other_errors) = json.loads((two / "printed.json").read_text())
    assert "device     4 x cpu" in errors and "after task 2/2" in errors
    assert ALARM.sub("", other_errors) == ""
    # Gloo's threads greet at once, and their lines may be torn.
    assert set(re.findall("[A-Za-z]+", other_output)) <= GLOO
    assert not two.with_name("two_nowhere").joinpath("config.json").exists()
    assert len(events(two, "evaluation")) == 2


@pytest.mark.slow
def test_killed_process_ends_the_other_and_one_resumes(finished_run, tmp_path, cache):
    """On another number of devices."""
    workdir = tmp_path / "run"
    running = start_two(workdir, "--quiet", cache=cache)
    wait_for(workdir, "statistics", running[0])
    running[1].kill()
    for process in running:
        process.communicate()
        assert process.returncode != 0
    assert not (workdir / "results.json").exists()
    finish(start(workdir, "--quiet", cache=cache))
    nearly_same(workdir, finished_run)
    nothing_done_twice(workdir)


@pytest.mark.slow
def test_a_signal_to_one_process_stops_both_at_the_same_step(two, tmp_path, cache):
    workdir = tmp_path / "run"
    never = "--config.checkpoint.every_steps=1000000"
    running = start_two(workdir, never, "--quiet", cache=cache)
    wait_for(workdir, "training", running[0])
    running[1].send_signal(signal.SIGTERM)
    errors, _ = finish_two(running, expected=75)
    assert errors.splitlines()[-1] == "fdc_jax.run: stopped by SIGTERM; the same command resumes"
    finish_two(start_two(workdir, never, "--quiet", cache=cache))
    same_outcome(workdir, two)
    nothing_done_twice(workdir)


@pytest.mark.slow
def test_both_processes_refuse_if_their_settings_differ(tmp_path, cache):
    second = ["--config.train.rank=3"]
    first, others = finish_two(start_two(tmp_path / "run", cache=cache, second=second), expected=2)
    line = "process 1 has config.train.rank 3, process 0 has 10; expected the same on all"
    assert (first, others) == (f"fdc_jax.run: {line}\n", "")


@pytest.mark.slow
def test_a_process_that_fails_alone_says_so_and_ends_the_other(tmp_path, cache):
    learner = "--config.learner.name=tests.learners.fails_on_second"
    first, second = start_two(tmp_path / "run", learner, "--quiet", cache=cache)
    _, errors = second.communicate()
    assert "fdc_jax.run: process 1: an image that cannot be read" in errors
    assert second.returncode == 2
    first.communicate()
    assert first.returncode != 0
