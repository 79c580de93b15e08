import json

import pytest

from fdc_jax.report import cost_tables
from tests import benchmark_runs


def bench(folder, *arguments):
    return benchmark_runs.bench("latency", folder, *arguments)


def test_the_programs_that_are_timed_predict_what_the_calibrator_predicts(tmp_path):
    done = bench(
        tmp_path,
        "--variant=digits",
        "--image_size=32",
        "--case=5x15",
        "--batch_size=16",
        "--batches=2",
        "--warm_up=1",
        "--output=out/l.json",
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("digits, 32 px, parity, batch 16, 5 tasks, 15 classes")
    assert len(done.stdout.splitlines()) == 1
    found = cost_tables.read_latency(str(tmp_path / "out" / "l.json"))
    assert found["equal_labels"] == {"raw": 1.0, "single": 1.0, "dual": 1.0}
    peaks = [found["views"][view]["peak_memory_bytes"] for view in cost_tables.VIEWS]
    assert peaks[0] < peaks[1] < peaks[2]  # Statistics of no view, of one, of both.
    assert all(len(found["views"][view]["milliseconds"]) == 3 for view in cost_tables.VIEWS)
    row = cost_tables.latency([str(tmp_path / "out" / "l.json")]).rows[0]
    assert row[1].text == "ours, digits, 32 px, parity, 3 × 2 batches of 16 after 1"
    assert not row[5].gap


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--run=nowhere"], "--run=nowhere: expected a finished run"),
        (["--case=3x10"], "--case: expected tasks that divide the classes: 3x10"),
        (["--variant=H/14"], "--variant: expected one of Ti/16"),
        (["--batches=0"], "--batches: expected at least 1, found 0"),
        (["--run=rsiat"], "expected a learner without an adapter"),
    ],
)
def test_errors_are_one_line(tmp_path, arguments, message):
    (tmp_path / "rsiat").mkdir()
    config = {"encoder.variant": "Ti/16", "encoder.image_size": 32}
    results = {"benchmark": "digits", "learner": "rsiat", "config": config}
    (tmp_path / "rsiat" / "results.json").write_text(json.dumps(results))
    line = benchmark_runs.refused("latency", *arguments, folder=tmp_path)
    assert line.startswith("benchmarks/latency.py: ") and message in line
