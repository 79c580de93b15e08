"""What a run shows while it works, by a clock of our own."""

import types

import pytest

from fdc_jax import progress
from fdc_jax.errors import counted


@pytest.fixture
def clock(monkeypatch):
    found = types.SimpleNamespace(now=1000.0)
    monkeypatch.setattr(progress.time, "perf_counter", lambda: found.now)
    return found


@pytest.mark.parametrize(
    ("each", "left"),
    [(2.0, "about 16 s left"), (15.0, "about 2 min left"), (0.0, "about 0 s left")],
)
def test_time_left_is_shown_from_the_second_step_on_without_compilation(clock, capsys, each, left):
    shown = progress.Progress()
    shown.start(total=10, done=0)
    clock.now += 300  # the first step compiles
    shown.step("task 1/2 epoch 1/1", loss="2.303")
    assert capsys.readouterr().err == ""
    clock.now += each
    shown.step("task 1/2 epoch 1/1", loss="1.700")
    line = f"task 1/2 epoch 1/1: step 2 of 10, loss 1.700, {left}\n"
    assert capsys.readouterr().err == line


def test_lines_come_every_half_minute_after_a_resume(clock, capsys):
    shown = progress.Progress(label="seed 2, ")
    shown.start(total=100, done=40)
    for _ in range(33):
        clock.now += 1
        shown.step("task 2/5 epoch 3/9", loss=1)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "seed 2, task 2/5 epoch 3/9: step 42 of 100, loss 1, about 58 s left",
        "seed 2, task 2/5 epoch 3/9: step 72 of 100, loss 1, about 28 s left",
    ]


def test_quiet_shows_nothing(clock, capsys):
    shown = progress.Progress(quiet=True)
    shown.start(10, 0)
    for _ in range(3):
        shown.step("task")
    shown.line("after task")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("number", "noun", "words"),
    [
        (1, "epoch", "1 epoch"),
        (2, "epoch", "2 epochs"),
        (0, "class", "0 classes"),
        (1000, "test image", "1,000 test images"),
    ],
)
def test_one_is_singular(number, noun, words):
    assert counted(number, noun) == words
