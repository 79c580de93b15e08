import json

import pytest

from tests import benchmark_runs

SMALL = ("--variant=digits", "--image_size=32", "--batch_size=4", "--images=6", "--repeats=2")


def bench(tmp_path, *arguments):
    return benchmark_runs.bench("learners", tmp_path, *SMALL, *arguments)


def test_learners_are_measured_beside_the_reference(tmp_path):
    done = bench(
        tmp_path, "--learners=inflora", "--classes=2", "--epochs=3", "--output=out/learners.json"
    )
    assert (done.returncode, done.stderr) == (0, "")
    header, *rows, footer = done.stdout.splitlines()
    assert header.split()[0] == "learner"
    assert [row.split()[0] for row in rows] == ["cumulative_lora", "inflora"]
    assert "relative to cumulative_lora" in footer
    report = json.loads((tmp_path / "out" / "learners.json").read_text())
    assert report["settings"]["epochs"] == 3
    assert {"jax", "commit"} <= report["versions"].keys()
    reference, other = report["learners"]
    for kind in ("clock", "processor"):
        assert reference[f"step_relative_{kind}"] == reference[f"task_relative_{kind}"] == 1.0
        for record in (reference, other):
            step = record["step_seconds"][kind]
            around = record["before_task_seconds"][kind] + record["after_task_seconds"][kind]
            # Six images in batches of four are two steps an epoch.
            assert record["task_seconds"][kind] == pytest.approx(6 * step + around)
        assert other[f"step_relative_{kind}"] == pytest.approx(
            other["step_seconds"][kind] / reference["step_seconds"][kind]
        )
    assert other["images_per_second"] == pytest.approx(4 / other["step_seconds"]["clock"])
    # InfLoRA passes the images through the encoder before and after a task; the reference does not.
    assert other["before_task_seconds"]["processor"] > reference["before_task_seconds"]["processor"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("--images=0", "--images: expected at least 1, found 0"),
        ("--output=table.txt", "--output: expected a .json file, found table.txt"),
        ("--output=file/x.json", "--output="),
    ],
)
def test_wrong_arguments_are_one_line(tmp_path, wrong, message):
    (tmp_path / "file").write_text("")
    line = benchmark_runs.refused("learners", wrong, folder=tmp_path)
    assert line.startswith(f"benchmarks/learners.py: {message}")


@pytest.mark.slow
def test_an_unknown_learner_is_one_line(tmp_path):
    done = bench(tmp_path, "--learners=nobody")
    assert done.returncode == 2
    assert done.stderr.startswith("benchmarks/learners.py: learner.name: expected one of")
    assert done.stderr.count("\n") == 1
