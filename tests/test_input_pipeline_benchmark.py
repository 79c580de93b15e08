import functools
import json

from tests import benchmark_runs

bench = functools.partial(benchmark_runs.module, "input_pipeline")


def test_every_contender_is_measured_with_every_number_of_threads(tmp_path):
    output = tmp_path / "input.json"
    done = bench(
        *("--data=jpeg,digits", "--images=6", "--image_size=32", "--batch_size=4"),
        *("--workers=1,2", "--repeats=1", f"--output={output}"),
    )
    assert (done.returncode, done.stderr) == (0, "")
    records = json.loads(output.read_text())["records"]
    assert len(done.stdout.splitlines()) == len(records) == 2 * 4 + 2 * 5
    found = {(each["data"], each["contender"], each["workers"]) for each in records}
    assert {("jpeg", "training", 1), ("jpeg", "evaluation_kept", 2)} <= found
    assert ("digits", "training_on_device", 2) in found
    assert ("jpeg", "training_on_device", 1) not in found
    for each in records:
        assert each["images"] == 6
        assert each["images_per_second"] * each["seconds"]["clock"] > 5.99
        assert each["images_per_processor_second"] * each["seconds"]["processor"] > 5.99


def test_wrong_numbers_are_one_line(tmp_path):
    for wrong in ("--workers=0", "--workers=a", "--images=0", "--data=nothing"):
        arguments = ("--data=digits", wrong, f"--output={tmp_path}/x.json")
        line = benchmark_runs.refused("input_pipeline", *arguments)
        assert line.startswith("benchmarks/input_pipeline.py: "), line
