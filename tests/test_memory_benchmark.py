import functools
import json

import pytest

from tests import benchmark_runs

SMALL = ("--variant=digits", "--image_size=32", "--batch_size=4", "--classes=2", "--images=10")
bench = functools.partial(benchmark_runs.module, "memory", *SMALL)


@pytest.mark.slow
def test_memory_grows_with_the_number_of_tasks(tmp_path):
    output = tmp_path / "memory.json"
    done = bench("--tasks=1,4", "--run_step", f"--output={output}")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 2
    one, four = json.loads(output.read_text())["records"]
    assert four["state_bytes"]["abstract"] == 4 * one["state_bytes"]["abstract"] > 0
    for record in (one, four):
        # What shapes say is what lies on the device.
        assert record["state_bytes"]["live"] == record["state_bytes"]["abstract"]
        task = record["task_bytes"]
        assert task["trained"] + task["optimizer"] + task["frozen"] >= task["live"] > 0
        assert record["step_bytes"]["temporary"] > 0 and record["step_bytes"]["arguments"] > 0
        peaks = record["peak_bytes"]
        assert 0 < peaks["started"] <= peaks["trained"] <= peaks["all"]
    assert one["task_bytes"] == four["task_bytes"]
    # Ten images, two views, six pairs of tasks.
    assert one["calibrator"]["foreign_residuals"] == 0
    assert four["calibrator"]["foreign_residuals"] == 4 * 2 * 10 * 6
    for name in ("statistics", "live_while_scoring"):
        assert four["calibrator"][name] > one["calibrator"][name] > 0


def test_wrong_settings_are_one_line():
    for wrong in ("--tasks=0", "--tasks=a", "--images=1", "--variant=x", "--learner=nobody"):
        line = benchmark_runs.refused("memory", *SMALL, wrong)
        assert line.startswith("benchmarks/memory.py: "), line
