"""What TensorBoard and Weights & Biases are given, against the file of events."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from numpy.testing import assert_allclose

from fdc_jax.errors import InputError
from fdc_jax.run.loggers import KINDS, Loggers
from tests.small_runs import config, results, run, stopped


def events(folder, kind):
    """Events of a kind, the last of each task and epoch."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {(e["task"], e.get("epoch")): e for e in lines if e["event"] == kind}


def scalars(folder):
    """All values that TensorBoard's own reader finds, by name, as (step, value)."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    accumulator = EventAccumulator(str(folder / "tensorboard"), {"tensors": 0})
    accumulator.Reload()
    return {
        name: [(e.step, make_ndarray(e.tensor_proto).item()) for e in accumulator.Tensors(name)]
        for name in accumulator.Tags()["tensors"]
    }


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_has_each_event_once_after_a_stop(cache, tmp_path):
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    fields, folder = config(cache, log="tensorboard"), tmp_path / "run"
    stopped(fields, folder, 7)  # at the seventh look, within an epoch after a checkpoint
    stopped(fields, folder, 15)
    run(fields, folder)
    actual, epochs = scalars(folder), events(folder, "epoch")
    assert [step for step, _ in actual["epoch/loss"]] == [1, 2, 3, 4]
    losses = [epoch["loss"] for epoch in epochs.values()]
    assert_allclose([value for _, value in actual["epoch/loss"]], losses, rtol=1e-6)
    first, last = events(folder, "evaluation").values()
    for name in ("raw", "fdc", "gaussians"):
        accuracies = [first["accuracy"][name], last["accuracy"][name]]
        values = [value for _, value in actual[f"evaluation/accuracy/{name}"]]
        assert_allclose(values, accuracies, rtol=1e-6)
        with np.load(folder / "predictions.npz") as columns:
            earlier = np.mean(columns[f"{name}_task"] < columns["task"])
        shares = [value for _, value in actual[f"confusion/earlier/{name}"]]
        assert shares == [0.0, pytest.approx(100 * earlier)]


@pytest.mark.filterwarnings("ignore")
def test_wandb_has_each_event_once(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="needs wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    lines = [
        {"event": "training", "time": 5.25, "task": 0, "step": 0},
        {"event": "epoch", "time": 6.0, "task": 0, "epoch": 0, "loss": 0.5},
        {"event": "resume", "time": 7.0, "tasks_done": 0, "step": 0},
        {"event": "epoch", "time": 8.0, "task": 0, "epoch": 0, "loss": 0.5},
    ]
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(event) + "\n" for event in lines) + '{"event": "ep')
    logged, log = [], wandb.Run.log

    def watched(self, values, step):
        logged.append((self.id, step, values))
        log(self, values, step=step)

    monkeypatch.setattr(wandb.Run, "log", watched)
    Loggers("wandb", file).add(lines[1] | {"epoch": 1, "loss": 0.25})
    wandb.finish()
    assert logged == [
        ("6000", 1, {"epoch/loss": 0.5, "step": 1}),
        ("6000", 2, {"epoch/loss": 0.25, "step": 2}),
    ]
    assert list(tmp_path.glob("wandb/offline-run-*-6000/*.wandb"))


def test_loggers_get_the_numbers_of_a_run(finished_run, monkeypatch):
    values = {}
    monkeypatch.setitem(KINDS, "wandb", lambda *_: lambda named, *_: values.update(named))
    Loggers("wandb", finished_run / "metrics.jsonl")
    assert {type(value) for value in values.values()} == {float}
    for name, accuracy in results(finished_run)["accuracy"].items():
        assert values[f"evaluation/accuracy/{name}"] == accuracy


def test_missing_logger_package_is_one_line(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "tensorboard.summary", None)
    loggers = Loggers("tensorboard", tmp_path / "metrics.jsonl")
    for epoch in range(2):
        event = {"event": "epoch", "time": 1.0, "task": 0, "epoch": epoch, "loss": 1.0}
        loggers.add(event)
    (line,) = caplog.messages
    assert line.startswith("config.log: tensorboard left out: import of tensorboard")
    assert not list(tmp_path.iterdir())


def test_unknown_loggers_are_refused_and_none_is_imported(cache, tmp_path):
    with pytest.raises(InputError, match=r"config.log: .*wandb"):
        run(config(cache, log="tensorboard,wandbb"), tmp_path / "run")
    code = "import sys, fdc_jax.command; print({'wandb', 'tensorboard'} & set(sys.modules))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout.strip() == "set()"
