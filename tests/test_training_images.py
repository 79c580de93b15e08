"""Training images: whether they are kept costs time and memory only; epochs."""

import json

import pytest

from fdc_jax import command
from fdc_jax.data.batches import ByteCache
from tests import interruptions, small_runs

OPTIONS = ("--config.train.epochs=2", "--config.classes_per_task=5", "--quiet")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, cache):
    """One small run with the images of a task in memory."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    interruptions.finish(interruptions.start(folder, *OPTIONS, cache=cache))
    return folder


def test_nothing_kept_ends_the_same(whole, cache, tmp_path):
    other = tmp_path / "other"
    options = ("--config.data.cache_gib=0.0",)
    interruptions.finish(interruptions.start(other, *OPTIONS, *options, cache=cache))
    interruptions.same_outcome(whole, other)


def test_the_images_of_a_task_are_forgotten_when_it_ends(cache, tmp_path, monkeypatch):
    config = small_runs.config(cache, train_per_class=7, test_per_class=5)
    held = []
    clear = ByteCache.clear
    monkeypatch.setattr(ByteCache, "clear", lambda self: held.append(self.bytes) or clear(self))
    command.run(config, str(tmp_path / "run"), quiet=True)
    assert held == [35 * 3 * 32 * 32] * 2


def test_the_first_task_can_have_epochs_of_its_own(cache, tmp_path):
    config = small_runs.config(cache, train_per_class=7, test_per_class=5)
    config.train.first_epochs = 3
    command.run(config, str(tmp_path / "run"), quiet=True)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    epochs = [(each["task"], each["epoch"]) for each in events if each["event"] == "epoch"]
    assert epochs == [(0, 0), (0, 1), (0, 2), (1, 0)]
