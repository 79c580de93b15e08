import functools
import json

import numpy as np
import pytest

from benchmarks import calibration_scale
from tests import benchmark_runs

SIZES = ("--images=330", "--classes=22", "--width=16", "--repeats=1")
bench = functools.partial(benchmark_runs.module, "calibration_scale", *SIZES)


def test_every_number_of_tasks_is_measured(tmp_path):
    output = tmp_path / "out" / "scale.json"
    done = bench("--tasks=2,5", "--stretch=20", f"--output={output}")
    assert (done.returncode, done.stderr) == (0, "")
    starts = [line.split(",")[0] for line in done.stdout.splitlines()]
    stretched = "computed from it: 20 tasks"
    assert starts == ["2 tasks", stretched, "5 tasks", stretched]
    report = json.loads(output.read_text())
    for result, tasks in zip(report["results"], (2, 5), strict=True):
        assert (result["tasks"], result["images"], result["views"]) == (tasks, 330, 2)
        assert result["storage_bytes"] == result["storage_bytes_by_formula"]
        images = calibration_scale.Point(tasks, 330, 22, 16, 2, 0).images_of
        scalars = sum(2 * task * images(task) for task in range(tasks))
        assert result["foreign_residual_bytes"] == 4 * scalars
        assert result["memory_bytes"]["peak"] >= result["memory_bytes"]["before"] > 2**20
        for clock in ("wall", "processor"):
            assert result[clock]["fit_seconds"] > 0 and result[clock]["drawing_seconds"] > 0
        for score in result["score_milliseconds"].values():
            assert score.keys() == {"wall", "processor"} and min(score.values()) > 0
    computed = report["stretched"][1]
    assert (computed["tasks"], computed["classes"], computed["images"]) == (20, 88, 1320)
    assert computed["storage_bytes"] > report["results"][1]["storage_bytes"]
    assert np.isfinite([computed["wall_fit_seconds"], computed["processor_fit_seconds"]]).all()


def test_samples_depend_on_their_position_alone():
    point = calibration_scale.Point(3, 10_000, 7, 8, 2, 0)
    task = calibration_scale.Features(point, 1)
    chunks = list(task.source())
    again = list(calibration_scale.Features(point, 1).source())
    assert sum(len(labels) for _, _, labels in chunks) == task.count == 3333
    for one, other in zip(chunks, again, strict=True):
        for left, right in zip(one, other, strict=True):
            np.testing.assert_array_equal(left, right)
    assert {int(label) for _, _, labels in chunks for label in labels} == {3, 4}
    other = calibration_scale.Features(point, 2).chunk(0, 5)[0]
    assert not np.allclose(chunks[0][0][:5], other)


def test_growth_is_that_of_a_line():
    own, per_earlier = calibration_scale.growth(np.r_[9.0, 2.0 + 0.5 * np.arange(1, 40)])
    assert (own, per_earlier) == (pytest.approx(2.0), pytest.approx(0.5))


def test_wrong_sizes_are_one_line():
    for wrong in ("--tasks=1", "--tasks=a", "--tasks=40", "--images=3"):
        line = benchmark_runs.refused("calibration_scale", *SIZES, wrong)
        assert line.startswith("benchmarks/calibration_scale.py: expected at least two task")
