"""The events that TensorBoard and Weights & Biases get, against the file of events."""

import json
import sys
from unittest import mock

import pytest

from fdc_jax.run.loggers import Loggers
from tests import small_runs
from tests.small_runs import config, predictions, run, stopped


def scalars(folder):
    """All steps and values that TensorBoard's own reader finds, by name."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    accumulator = EventAccumulator(str(folder / "tensorboard"), {"tensors": 0})
    accumulator.Reload()
    return {
        name: {
            event.step: make_ndarray(event.tensor_proto).item()
            for event in accumulator.Tensors(name)
        }
        for name in accumulator.Tags()["tensors"]
    }


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_has_each_event_once_after_a_stop(cache, tmp_path):
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    fields, folder = config(cache, log="tensorboard"), tmp_path / "run"
    stopped(fields, folder, 7)  # at the seventh look, within an epoch after a checkpoint
    run(fields, folder)
    values = scalars(folder)
    losses = [event["loss"] for event in small_runs.events(folder, "epoch")]
    assert values["epoch/loss"] == pytest.approx(dict(enumerate(losses, start=1)))
    columns = predictions(folder)
    for name, accuracy in small_runs.results(folder)["accuracy"].items():
        assert [*values[f"evaluation/accuracy/{name}"].values()][1:] == [pytest.approx(accuracy)]
    for name in ("raw", "fdc", "gaussians"):
        earlier = 100 * (columns[f"{name}_task"] < columns["task"]).mean()
        assert [*values[f"confusion/earlier/{name}"].values()] == pytest.approx([0.0, earlier])


def test_a_resumed_run_passes_each_event_on_once(tmp_path, monkeypatch):
    """Weights & Biases get the name and the start of the run, so that it resumes there."""
    wandb = mock.MagicMock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
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
    actual = [(*call.args, call.kwargs) for call in wandb.init().log.call_args_list]
    assert actual == [({"epoch/loss": 1 / 2**n, "step": n}, {"step": n}) for n in (1, 2)]
    options = wandb.init.call_args_list[0].kwargs
    assert (options["id"], options["name"], options["dir"]) == ("6000", tmp_path.name, tmp_path)
