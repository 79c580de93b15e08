import json

from tests import benchmark_runs


def bench(tmp_path, *arguments):
    return benchmark_runs.bench("posthoc", tmp_path, *arguments)


def test_the_benchmark_measures_equal_predictions(tmp_path):
    done = bench(
        tmp_path,
        "--cases=3x6@16,4x4@8",
        "--images_per_class=12",
        "--repeats=1",
        "--forward_ms=2.0",
        "--loop_fit_tasks=3",
        "--output=out/b.json",
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 2
    report = json.loads((tmp_path / "out" / "b.json").read_text())
    fitted, borrowed = report["results"]
    for result in (fitted, borrowed):
        assert result["equal_labels"] > 0.99
        assert result["batches"]["64"]["milliseconds"]["fdc"] > 0
        assert result["batches"]["64"]["share_of_forward"] > 0
        assert 0 < result["flops_share_of_forward"] < 1e-4
    assert fitted["fit_speedup"] > 0
    assert borrowed["fit_speedup"] is None
    assert {"fdc_jax", "jax", "numpy"} <= set(report["versions"])


def test_a_wrong_case_is_one_line(tmp_path):
    for case in ("3x7", "nonsense", "1x4"):
        done = bench(tmp_path, f"--cases={case}")
        assert done.returncode == 2
        assert done.stderr.startswith("benchmarks/posthoc.py: --cases: expected tasks that divide")
        assert done.stderr.count("\n") == 1
