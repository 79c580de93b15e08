import importlib.util
import json

import pytest

from tests import benchmark_runs

SMALL = ("--variant=digits", "--image_size=32", "--batch_size=4", "--warm_up=1", "--repeats=2")
without_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="PyTorch is not installed"
)


def bench(tmp_path, *arguments):
    return benchmark_runs.bench("training_step", tmp_path, *SMALL, *arguments)


def test_the_step_is_measured(tmp_path):
    done = bench(tmp_path, "--output=out/step.json", "--peak_tflops=0.5")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("jax: ") and done.stdout.count("\n") == 1
    report = json.loads((tmp_path / "out" / "step.json").read_text())
    assert report["command"].startswith("python -m benchmarks.training_step --variant=digits")
    assert {"jax", "commit"} <= report["versions"].keys()
    found = report["contenders"]["jax"]
    for kind in ("clock", "processor"):
        seconds = found["seconds"][kind]
        assert len(seconds["all"]) == 2
        assert min(seconds["all"]) <= seconds["median"] <= max(seconds["all"])
    clock, processor = (found["seconds"][kind]["median"] for kind in ("clock", "processor"))
    assert found["images_per_second"] == pytest.approx(4 / clock)
    assert found["peak_flops"] == 0.5e12
    assert found["utilisation"] == pytest.approx(found["flops"] / processor / 0.5e12)


@without_torch
def test_pytorch_makes_the_same_step(tmp_path):
    done = bench(tmp_path, "--pytorch=eager,factors", "--output=step.json")
    # PyTorch itself may warn.
    assert done.returncode == 0
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == [
        "jax",
        "pytorch_eager",
        "pytorch_factors",
    ]
    found = json.loads((tmp_path / "step.json").read_text())["contenders"]
    for name in ("pytorch_eager", "pytorch_factors"):
        assert 0 < found[name]["largest_difference"] < 1e-4
        ratio = found[name]["times_the_first"]["processor"]
        ours, theirs = (found[each]["seconds"]["processor"]["median"] for each in ("jax", name))
        assert ratio == pytest.approx(theirs / ours)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--variant=H/14"], "encoder.variant: expected one of Ti/16"),
        (["--repeats=0"], "--repeats: expected at least 1, found 0"),
        (["--pytorch=fast"], "--pytorch: expected some of eager,factors,compiled, found fast"),
    ],
)
def test_errors_are_one_line(tmp_path, arguments, message):
    line = benchmark_runs.refused("training_step", *arguments, folder=tmp_path)
    assert line.startswith("benchmarks.training_step: ") and message in line
