import importlib.util
import json

import pytest

from benchmarks import measure
from fdc_jax.errors import InputError
from tests import benchmark_runs

SMALL = ("--variant=digits", "--image_size=32", "--batch_size=4", "--warm_up=1", "--repeats=2")


def test_one_view_two_views_and_pytorch(tmp_path):
    pytorch = ["--pytorch=eager"] if importlib.util.find_spec("torch") else []
    done = benchmark_runs.bench(
        "extraction", tmp_path, *SMALL, "--batches=3", *pytorch, "--output=e.json"
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "e.json").read_text())
    found = report["contenders"]
    names = ["jax", "jax_dual"] + ["pytorch_eager"] * len(pytorch)
    assert list(found) == names == [line.split(":")[0] for line in done.stdout.splitlines()]
    for name in names[1:]:
        assert found[name]["largest_difference"] < 1e-4
    assert found["jax_dual"]["flops"] == 2 * found["jax"]["flops"]
    for each in found.values():
        assert each["images_per_second"] == pytest.approx(12 / each["seconds"]["clock"]["median"])


def test_pytorch_is_asked_for_where_it_is_missing(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert measure.pytorch_names("") == []
    with pytest.raises(InputError, match="--pytorch: expected PyTorch to be installed"):
        measure.pytorch_names("eager")


def test_other_outputs_are_refused(monkeypatch):
    ended = []

    class Child:
        def __init__(self, program, name):
            self.name, self.about = name, {}
            self.process = self

        def wait(self):
            pass

        def communicate(self):
            ended.append(self.name)

    monkeypatch.setattr(measure, "_Child", Child)
    monkeypatch.setattr(measure, "_differences", lambda children: {"other": 2e-4})
    with pytest.raises(InputError, match=r"other: expected the outputs of jax to 0\.0001, found"):
        measure.compare("program", ["jax", "other"], None, 1e-4)
    assert ended == ["jax", "other"]
