"""Benchmarks at a tiny size: what they write, and that a wrong number is found."""

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import accelerator, calibration, flops, golden, measure
from fdc_jax.errors import InputError
from fdc_jax.model import increments, vit
from tests import small_runs

TRIAL = ("--variant=digits", "--image_size=32", "--batch_size=4")
SIZES = ("--tasks=3", "--images=330", "--classes=22", "--width=16", "--repeats=1")


def test_the_calibration_benchmark_writes_times_and_sizes(tmp_path, monkeypatch, capsys):
    output = tmp_path / "out" / "found.json"
    monkeypatch.setattr(measure, "in_a_process", lambda function, *rest: function(*rest))
    monkeypatch.setattr(calibration, "BATCHES", (64,))
    monkeypatch.setattr(sys, "argv", ["", *SIZES, f"--output={output}"])
    assert measure.run(calibration.PROGRAM, calibration.main) == 0
    assert capsys.readouterr().out.count(": fit ") == 1
    record = json.loads(output.read_text())
    assert {"fdc_jax", "jax", "commit"} <= record["versions"].keys()
    (result,) = record["results"]
    assert (result["tasks"], result["images"], result["views"]) == (3, 330, 2)
    point = calibration.Point(3, 330, 22, 16, 2)
    scalars = sum(2 * task * point.of_task(task)[0] for task in range(3))
    assert result["foreign_residual_bytes"] == 4 * scalars
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
    """A function from flags to exit code, records by part, and the printed and the error lines."""
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
        return code, records, *capsys.readouterr()

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
    record = golden.compare(golden.Number("x", 0.999 * expected, 1e-4, expected), {})
    assert record["error"] == pytest.approx(1e-3)


@pytest.fixture
def in_this_process(monkeypatch):
    @contextlib.contextmanager
    def started(names, options):
        """Measures in this process, not in one of its own."""
        for name in names:
            accelerator.measure_part(name, options)
        yield types.SimpleNamespace(wait=lambda limit: 0)

    monkeypatch.setattr(accelerator, "started", started)


@pytest.mark.ci
def test_a_broken_number_gives_code_1_and_its_error(tmp_path, accelerated, in_this_process):
    broken = json.loads(accelerator.GOLDEN.read_text())
    broken["two blocks of ViT-B/16"][0][0] += 0.1
    (tmp_path / "broken.json").write_text(json.dumps(broken))
    arguments = (*TRIAL, "--parts=features", f"--golden={tmp_path / 'broken.json'}")
    code, records, printed, _ = accelerated(*arguments)
    assert code == 1
    assert "features: WRONG: two blocks of ViT-B/16, parity, xla: error 0.0" in printed
    assert "tolerance 0.0001" in printed and printed.count("WRONG") == 1
    wrong = [row["check"] for row in records["features"]["checks"] if not row["right"]]
    assert wrong == ["two blocks of ViT-B/16, parity, xla"]
    assert len(records["features"]["checks"]) == 4


@pytest.mark.ci
def test_gradients_of_all_learners_equal_the_committed_ones(accelerated, in_this_process):
    code, records, _, _ = accelerated("--minutes=60", "--parts=gradients")
    record = records["gradients"]
    assert (code, record["status"]) == (0, "done") and len(record["checks"]) > 100
    made = json.loads(accelerator.GOLDEN.read_text()).keys()
    checked = {row["check"] for row in record["checks"]}
    assert {name for name in made if ": " in name} == checked


@pytest.mark.ci
def test_a_trial_tries_parts_of_every_kind(accelerated):
    """Other tests have the gradients and a run of the digits that is stopped and resumed.

    Left out, too, are further arguments of functions that other parts call.
    """
    others = {"gradients", "digits", "learners", "step_fast_large", "step_fast_xla", "features"}
    parts = accelerator.PARTS.keys() - others
    arguments = (*TRIAL, f"--parts={','.join(sorted(parts))}", "--minutes=60")
    code, records, printed, _ = accelerated(*arguments)
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
        record = records[name]
        assert record["checks"] or record["rows"], name
        assert all(check["right"] for check in record["checks"]), name
        assert {"jax", "commit"} <= record["versions"].keys()
        assert ("device" in record) == accelerator.PARTS[name].device, name
        rows |= {row["what"]: row for row in record["rows"]}
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
    ended = subprocess.Popen([sys.executable, "-c", "exit(3)"])
    (record,) = accelerator.finish(ended, ["digits"], options, 60).values()
    assert (record["status"], record["note"]) == ("failed", "exit code 3")
    assert accelerator.wrong("digits", record) == ["the part failed, see its log"]


def test_wrong_flags_are_one_line(accelerated):
    wrong = {"--parts=step": "--parts: expected some of", "--minutes=0": "--minutes: expected"}
    for flag, line in wrong.items():
        code, _, _, errors = accelerated(flag)
        assert code == 2 and errors.count("\n") == 1 and line in errors


# The formula for operations against what the compiler counts --------------------------------------

# Wide enough that the products, which alone the formula counts, are nearly everything.
SMALL = vit.Variant(width=192, depth=3, heads=3)


@pytest.mark.parametrize("rank", [0, 4])
def test_operations_of_a_forward_pass_and_of_a_training_step(rank):
    model, images = vit.VisionTransformer(SMALL), np.zeros((4, 64, 64, 3), np.uint8)
    params = jax.tree.map(
        lambda leaf: jnp.ones(leaf.shape, leaf.dtype), vit.parameter_shapes(model, 64)
    )

    def forward(increment, params, images):
        return model.apply({"params": params}, images, None, increment)

    if rank:
        increment = increments.initialise(jax.random.key(0), SMALL, rank)
        function = jax.grad(lambda *values: forward(*values).sum())
        expected = flops.training_step(SMALL, 64, rank, 4)
    else:
        increment, function, expected = None, forward, 4 * flops.forward(SMALL, 64)
    analysis = jax.jit(function).lower(increment, params, images).compile().cost_analysis()
    assert analysis is not None
    assert analysis["flops"] == pytest.approx(expected, rel=0.03)
