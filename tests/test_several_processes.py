"""Several devices and several processes give what one gives, are killed, fail and stop together."""

import json
import signal
import socket
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests import interruptions

# Two tasks of ten steps; four devices do not share ten rows evenly.
TINY = (
    "--config.classes_per_task=5",
    "--config.data.train_per_class=20",
    "--config.data.test_per_class=10",
    "--config.train.epochs=1",
    "--config.train.batch_size=10",
    "--config.checkpoint.every_steps=3",
    "--config.evaluation.batch_size=30",
)


def start(workdir: Path, *options: str, cache: Path, devices: int = 1) -> subprocess.Popen:
    return interruptions.start(workdir, *TINY, *options, cache=cache, devices=devices)


def start_two(workdir: Path, *options: str, cache: Path, second=()) -> list[subprocess.Popen]:
    """Starts two processes of two devices each; the second has no access to either folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    join = (f"--coordinator_address=127.0.0.1:{port}", "--num_processes=2")
    nowhere = workdir.with_name(f"{workdir.name}_nowhere")
    nowhere.mkdir(exist_ok=True)
    # Of what the first has, compiled programs alone are at hand, which saves minutes.
    if not (nowhere / "compiled").exists():
        (nowhere / "compiled").symlink_to(cache / "compiled")
    return [
        start(workdir, *options, *join, "--process_id=0", cache=cache, devices=2),
        start(nowhere, *options, *second, *join, "--process_id=1", cache=nowhere, devices=2),
    ]


def finish_two(running: list[subprocess.Popen], expected: int = 0) -> list[str]:
    return [interruptions.finish(process, expected)[1] for process in running]


def nearly_same(found: Path, expected: Path) -> None:
    """Asserts that features agree to float tolerance, and what was counted exactly."""
    names = sorted(path.name for path in (expected / "features").glob("*.npy"))
    assert "train_adapted_1.npy" in names
    for name in names:
        ours, theirs = (np.load(folder / "features" / name) for folder in (found, expected))
        if theirs.dtype.kind == "f":
            np.testing.assert_allclose(ours, theirs, atol=1e-4 * np.abs(theirs).max(), err_msg=name)
        else:
            np.testing.assert_array_equal(ours, theirs, err_msg=name)
    ours, theirs = (
        json.loads((folder / "results.json").read_text()) for folder in (found, expected)
    )
    for name in ("num_tasks", "num_train_images", "num_test_images", "fdc_storage_bytes"):
        assert ours[name] == theirs[name]
    counted = "test_extraction_images"
    assert ours["timing"][counted] == theirs["timing"][counted]
    with np.load(found / "predictions.npz") as a, np.load(expected / "predictions.npz") as b:
        np.testing.assert_array_equal(a["label"], b["label"])
        # Of a hundred images one may lie on an edge.
        assert (a["fdc_label"] != b["fdc_label"]).sum() <= 1
        assert (a["raw_label"] != b["raw_label"]).sum() <= 1


@pytest.fixture(scope="module")
def single(tmp_path_factory, cache):
    """A run of one process on one device."""
    workdir = tmp_path_factory.mktemp("runs") / "single"
    interruptions.finish(start(workdir, "--quiet", cache=cache))
    return workdir


@pytest.fixture(scope="module")
def two(tmp_path_factory, cache):
    """A run of two processes on two devices each, and what both printed."""
    workdir = tmp_path_factory.mktemp("runs") / "two"
    running = start_two(workdir, cache=cache)
    return workdir, [interruptions.finish(process) for process in running]


def test_two_processes_give_what_one_gives(single, two):
    nearly_same(two[0], single)


def test_the_first_process_alone_writes_and_speaks(two):
    workdir, ((output, errors), (other_output, other_errors)) = two
    assert "device     4 x cpu" in errors
    assert "after task 2/2" in errors
    assert "results: " in output
    assert other_errors == ""
    assert [line for line in other_output.splitlines() if not line.startswith("[Gloo]")] == []
    assert not workdir.with_name("two_nowhere").joinpath("config.json").exists()
    events = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events].count("evaluation") == 2


@pytest.mark.slow
def test_a_killed_process_ends_the_other_and_the_same_command_goes_on(two, tmp_path, cache):
    workdir = tmp_path / "run"
    running = start_two(workdir, "--quiet", cache=cache)
    interruptions.wait_for(workdir, "statistics", running[0])
    running[1].kill()
    for process in running:
        process.communicate()
        assert process.returncode != 0
    assert not (workdir / "results.json").exists()
    finish_two(start_two(workdir, "--quiet", cache=cache))
    interruptions.same_outcome(workdir, two[0])
    interruptions.nothing_done_twice(workdir)


@pytest.mark.slow
def test_a_signal_to_one_process_stops_both_at_the_same_step(two, tmp_path, cache):
    workdir = tmp_path / "run"
    never = "--config.checkpoint.every_steps=1000000"
    running = start_two(workdir, never, "--quiet", cache=cache)
    interruptions.wait_for(workdir, "training", running[0])
    running[1].send_signal(signal.SIGTERM)
    ours, others = finish_two(running, expected=75)
    assert ours.splitlines()[-1] == "fdc_jax: error: stopped by SIGTERM"
    assert others == ""
    assert list((workdir / "checkpoints").iterdir())
    finish_two(start_two(workdir, never, "--quiet", cache=cache))
    interruptions.same_outcome(workdir, two[0])
    interruptions.nothing_done_twice(workdir)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(4, 1), (1, 4)])
def test_a_run_goes_on_with_another_number_of_devices(single, tmp_path, cache, before, after):
    workdir = tmp_path / "run"
    process = start(workdir, "--quiet", cache=cache, devices=before)
    interruptions.wait_for(workdir, "training", process)
    process.send_signal(signal.SIGTERM)
    interruptions.finish(process, expected=75)
    interruptions.finish(start(workdir, "--quiet", cache=cache, devices=after))
    events = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert [event["step"] > 0 for event in events if event["event"] == "resume"] == [True]
    nearly_same(workdir, single)


@pytest.mark.slow
def test_what_one_process_lacks_both_report(tmp_path, cache):
    weights = f"--config.encoder.weights={tmp_path / 'none.npz'}"
    running = start_two(tmp_path / "run", cache=cache, second=[weights])
    ours, others = finish_two(running, expected=2)
    (line,) = ours.splitlines()
    assert line.startswith("fdc_jax: error: process 1: ")
    assert "found no file" in line
    assert others == ""


@pytest.mark.slow
def test_processes_with_different_settings_are_refused(tmp_path, cache):
    running = start_two(tmp_path / "run", cache=cache, second=["--config.train.rank=3"])
    ours, _ = finish_two(running, expected=2)
    (line,) = ours.splitlines()
    assert line == (
        "fdc_jax: error: process 1 has config.train.rank 3, process 0 has 10; "
        "expected the same on all"
    )


@pytest.mark.slow
def test_a_process_that_fails_alone_says_so_and_ends_the_other(tmp_path, cache):
    learner = "--config.learner.name=tests.learners.fails_on_second"
    first, second = start_two(tmp_path / "run", learner, "--quiet", cache=cache)
    _, errors = second.communicate()
    assert "fdc_jax: error: process 1: an image that cannot be read" in errors
    assert second.returncode == 2
    first.communicate()
    assert first.returncode != 0
