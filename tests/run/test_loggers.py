"""The events that TensorBoard and Weights & Biases get, against the file of events."""

import json
import sys
import types

import pytest
from numpy.testing import assert_allclose

from fdc_jax.errors import InputError
from fdc_jax.run.loggers import KINDS, Loggers
from tests import small_runs
from tests.small_runs import config, predictions, results, run, stopped


def by_task_and_epoch(folder, kind):
    """Events of a kind, the last of each task and epoch."""
    events = small_runs.events(folder, kind)
    return [*{(event["task"], event.get("epoch")): event for event in events}.values()]


def scalars(folder):
    """All steps and values that TensorBoard's own reader finds, by name."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    accumulator = EventAccumulator(str(folder / "tensorboard"), {"tensors": 0})
    accumulator.Reload()
    steps, values = {}, {}
    for name in accumulator.Tags()["tensors"]:
        steps[name] = [event.step for event in accumulator.Tensors(name)]
        tensors = [event.tensor_proto for event in accumulator.Tensors(name)]
        values[name] = [make_ndarray(tensor).item() for tensor in tensors]
    return steps, values


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_has_each_event_once_after_a_stop(cache, tmp_path):
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    fields, folder = config(cache, log="tensorboard"), tmp_path / "run"
    stopped(fields, folder, 7)  # at the seventh look, within an epoch after a checkpoint
    run(fields, folder)
    steps, values = scalars(folder)
    assert steps["epoch/loss"] == [1, 2, 3, 4]
    losses = [event["loss"] for event in by_task_and_epoch(folder, "epoch")]
    assert_allclose(values["epoch/loss"], losses, rtol=1e-6)
    evaluations, columns = by_task_and_epoch(folder, "evaluation"), predictions(folder)
    for name in ("raw", "fdc", "gaussians"):
        accuracies = [event["accuracy"][name] for event in evaluations]
        assert_allclose(values[f"evaluation/accuracy/{name}"], accuracies, rtol=1e-6)
        earlier = 100 * (columns[f"{name}_task"] < columns["task"]).mean()
        assert_allclose(values[f"confusion/earlier/{name}"], [0.0, earlier], rtol=1e-6)


def test_a_resumed_run_passes_each_event_on_once(tmp_path, monkeypatch):
    """Weights & Biases get the name and the start of the run, so that it resumes there."""
    logged, options = [], {}

    def init(**given):
        options.update(given)
        return types.SimpleNamespace(log=lambda values, step: logged.append((step, values)))

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    epoch = {"event": "epoch", "time": 6.0, "task": 0, "epoch": 0, "loss": 0.5}
    events = [
        {"event": "training", "time": 5.25, "task": 0, "step": 0},
        epoch,
        {"event": "resume", "time": 7.0, "tasks_done": 0, "step": 0},
        epoch | {"time": 8.0},
    ]
    file = tmp_path / "metrics.jsonl"
    file.write_text("\n".join(map(json.dumps, events)) + '\n{"event": "ep')
    Loggers("wandb", file).add(epoch | {"epoch": 1, "loss": 0.25})
    assert logged == [(n, {"epoch/loss": 1 / 2**n, "step": n}) for n in (1, 2)]
    assert (options["id"], options["name"], options["dir"]) == ("6000", tmp_path.name, tmp_path)


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
        loggers.add({"event": "epoch", "time": 1.0, "task": 0, "epoch": epoch, "loss": 1.0})
    (line,) = caplog.messages
    assert line.startswith("config.log: tensorboard left out: import of tensorboard")
    assert not list(tmp_path.iterdir())


def test_unknown_loggers_are_refused_and_none_is_imported(cache, tmp_path):
    with pytest.raises(InputError, match=r"config.log: .*wandb"):
        run(config(cache, log="tensorboard,wandbb"), tmp_path / "run")
    code = "import sys, fdc_jax.command; print({'wandb', 'tensorboard'} & set(sys.modules))"
    assert small_runs.python("-c", code) == "set()\n"
