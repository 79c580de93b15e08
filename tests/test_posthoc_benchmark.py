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
        assert result["batches"]["64"]["share_of_forward"]["fdc"] > 0
        assert 0 < result["flops_share_of_forward"] < 1e-4
    assert fitted["fit_speedup"] > 0
    assert borrowed["fit_speedup"] is None
    assert {"fdc_jax", "jax", "numpy"} <= set(report["versions"])
    assert "whitened" not in fitted


def test_the_whitened_affinity_beside_it(tmp_path):
    done = bench(
        tmp_path,
        *("--cases=3x6@16", "--images_per_class=12", "--repeats=1", "--forward_ms=2.0"),
        *("--whitened", "--output=b.json"),
    )
    assert (done.returncode, done.stderr) == (0, "")
    (result,) = json.loads((tmp_path / "b.json").read_text())["results"]
    found, batch = result["whitened"], result["batches"]["64"]
    # In each of two views, half of a symmetric matrix with its diagonal, and a count.
    more = 4 * 2 * (16 * 17 // 2 + 1)
    assert found["storage_bytes"] - result["fdc_storage_bytes"] == more
    assert found["storage_ratio"] == found["storage_bytes"] / result["fdc_storage_bytes"]
    flops = 35.1e9 * (found["flops_share_of_forward"] - result["flops_share_of_forward"])
    assert round(flops) == 2 * 2 * 16 * (16 + 6)
    for name in ("whitened", "whitened_classes"):
        milliseconds = batch["milliseconds"][name]
        assert batch["share_of_forward"][name] == milliseconds / 64 / 2.0 > 0
    assert f"{found['storage_ratio']:.2f} times FDC's" in done.stdout


def test_a_wrong_case_is_one_line(tmp_path):
    for case in ("3x7", "nonsense", "1x4"):
        line = benchmark_runs.refused("posthoc", f"--cases={case}", folder=tmp_path)
        assert line.startswith("benchmarks/posthoc.py: --cases: expected tasks that divide")
