import functools
import json

from tests import benchmark_runs

bench = functools.partial(benchmark_runs.module, "start_up")


def test_a_warm_start_finds_the_programs_of_a_cold_one(tmp_path):
    output = tmp_path / "start.json"
    done = bench("--repeats=1", "--set=train.batch_size=16", f"--output={output}")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 2
    cold, warm = json.loads(output.read_text())["records"]
    assert (cold["start"], cold["programs_found"]) == ("cold", 0)
    assert warm["programs_found"] == cold["programs_missed"] == cold["cache_files"] > 0
    assert warm["programs_missed"] == 0
    for record in (cold, warm):
        for clock in ("seconds", "processor_seconds"):
            stages = record[clock]
            assert 0 < stages["imports"] <= stages["preparation"] <= stages["first_step"]


def test_wrong_settings_are_one_line(tmp_path):
    for wrong in ("--config=nothing", "--repeats=0"):
        line = benchmark_runs.refused("start_up", wrong)
        assert line.startswith("benchmarks/start_up.py: expected a --config of configs/")
    done = bench("--set=nothing=1", f"--output={tmp_path}/x.json")
    assert done.returncode == 2
    assert done.stderr.startswith("benchmarks/start_up.py: --set nothing=1:")
