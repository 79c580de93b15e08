"""Benchmarks at a tiny size: what they write, and that a wrong number is found."""

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

from benchmarks import accelerator, calibration, flops, golden, measure
from fdc_jax.errors import InputError
from fdc_jax.model import increments, vit
from tests import small_runs

TRIAL = ("--variant=digits", "--image_size=32", "--batch_size=4")
SIZES = ("--tasks=3", "--images=330", "--classes=22", "--width=16", "--repeats=1")


def test_the_calibration_benchmark_writes_times_and_sizes(tmp_path, monkeypatch):
    output = tmp_path / "out" / "found.json"
    monkeypatch.setattr(measure, "in_a_process", lambda function, *rest: function(*rest))
    monkeypatch.setattr(calibration, "BATCHES", (64,))
    monkeypatch.setattr(sys, "argv", ["", *SIZES, f"--output={output}"])
    assert measure.run(calibration.PROGRAM, calibration.main) == 0
    (result,) = json.loads(output.read_text())["results"]
    # The paper's accounting: bases, prototypes, means and scalars in float32.
    numbers = (3 * (result["mean_rank"] + 1) + 22) * 16 + 4 * 3 + 3
    assert result["storage_bytes"] == round(4 * (2 * numbers + 2 * 3))
    assert min(result["fit_seconds"].values()) > 0
    assert min(result["score_milliseconds"]["64"].values()) > 0


def test_a_measurement_has_a_process_of_its_own():
    assert measure.in_a_process(os.getppid) == os.getpid()
    with pytest.raises(InputError, match="the process of a measurement ended"):
        measure.in_a_process(os._exit, 3)


# The command for accelerators ---------------------------------------------------------------------


@pytest.fixture
def accelerated(tmp_path, monkeypatch, capsys):
    """A function from flags to exit code, records by part, and the printed lines."""
    monkeypatch.chdir(small_runs.REPOSITORY)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    for name in ("JAX_PLATFORMS", "XLA_FLAGS"):  # The command changes them.
        monkeypatch.setenv(name, os.environ.get(name, ""))

    def run(*flags):
        folder = tmp_path / "out"
        monkeypatch.setattr(sys, "argv", ["", f"--output={folder}", *flags])
        code = measure.run(accelerator.PROGRAM, accelerator.main)
        parts = accelerator.PARTS.keys() & {path.stem for path in folder.glob("*.json")}
        records = {name: json.loads((folder / f"{name}.json").read_text()) for name in parts}
        return code, records, capsys.readouterr().out

    return run


def test_a_number_is_right_within_its_tolerance():
    expected = np.random.default_rng(0).standard_normal((3, 5))
    for actual, right in (
        (expected, True),
        (0.999 * expected, False),
        (np.nan * expected, False),
        (expected[:1], False),
    ):
        number = golden.Number("x", actual, 1e-4)
        assert golden.compare(number, {"x": expected.tolist()})["right"] == right
    assert not golden.compare(number, {})["right"]


def test_a_wrong_number_gives_code_1_and_its_error(accelerated, monkeypatch):
    def trial(names, options):
        number = golden.Number("x", np.full(2, 1.1), 1e-4, np.ones(2))
        yield {"features": {"status": "done", "rows": [], "checks": [golden.compare(number, {})]}}

    monkeypatch.setattr(accelerator, "trial", trial)
    code, _, printed = accelerated(*TRIAL, "--parts=features")
    assert code == 1
    assert "features: WRONG: x: error 0.1, tolerance 0.0001, found [1.1 1.1]" in printed


@pytest.mark.ci
def test_gradients_of_all_learners_equal_the_committed_ones():
    committed = json.loads(accelerator.GOLDEN.read_text())
    numbers = [*golden.gradients(argparse.Namespace(variant="B/16"))]
    assert {number.name for number in numbers} == {name for name in committed if ": " in name}
    for number in numbers:
        assert golden.compare(number, committed)["right"], number.name


@pytest.mark.ci
def test_a_trial_tries_parts_of_every_kind(accelerated):
    """Other tests have the numbers of golden.json, and the learners."""
    parts = {"step_parity", "step_fast_cudnn", "pytorch_expert", "pytorch_eager", "extraction"}
    parts |= {"latency", "statistics", "passes", "checkpoints"}
    arguments = (*TRIAL, f"--parts={','.join(sorted(parts))}", "--minutes=60")
    code, records, printed = accelerated(*arguments)
    assert code == 0
    reasons = {
        name: record["note"] for name, record in records.items() if record["status"] != "done"
    }
    skipped = {"step_fast_cudnn": "cuDNN's attention needs an NVIDIA GPU from Ampere on"}
    if importlib.util.find_spec("torch") is None:
        skipped |= dict.fromkeys(("pytorch_expert", "pytorch_eager"), "PyTorch is not installed")
    assert records.keys() == parts and reasons == skipped
    rows = {}
    for name in records.keys() - reasons.keys():
        assert records[name]["rows"], name
        assert ("device" in records[name]) == accelerator.PARTS[name].device, name
        rows |= {row["what"]: row for row in records[name]["rows"]}
    assert all(row["milliseconds"] > 0 and name in printed for name, row in rows.items())
    step = rows["training step, parity, xla, batch 4"]
    assert 0 < step["share_of_peak"] < 1 and step["temporary_gib"] > 0


def test_a_part_that_is_stopped_keeps_its_rows(tmp_path):
    (tmp_path / "features.json").write_text('{"checks": [], "rows": [{"what": "x"}]}')
    options = argparse.Namespace(output=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        (record,) = accelerator.finish(process, ["features"], options, 0.1).values()
        process.kill()
    assert (record["status"], record["rows"]) == ("out of time", [{"what": "x"}])


# The formula for operations against what the compiler counts --------------------------------------

# Wide enough that the products, which alone the formula counts, are nearly everything.
SMALL = vit.Variant(width=192, depth=2, heads=3)


@pytest.mark.parametrize("rank", [0, 4])
def test_operations_of_a_forward_pass_and_of_a_training_step(rank):
    model, images = vit.VisionTransformer(SMALL), np.zeros((4, 64, 64, 3), np.uint8)
    params = vit.parameter_shapes(model, 64)

    def total(increment, params, images):
        return model.apply({"params": params}, images, None, increment).sum()

    increment = increments.initialise(jax.random.key(0), SMALL, rank) if rank else None
    function = jax.grad(total) if rank else total
    forward = 4 * flops.forward(SMALL, 64)
    expected = flops.training_step(SMALL, 64, rank, 4) if rank else forward
    analysis = jax.jit(function).lower(increment, params, images).compile().cost_analysis()
    assert analysis["flops"] == pytest.approx(expected, rel=0.03)
