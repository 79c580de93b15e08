"""What a run shows while it works, by a clock of our own."""

import types

import pytest

from fdc_jax.run import progress


@pytest.mark.parametrize(("step", "left"), [(15.0, "about 2.0 min"), (0.0, "about 1 s")])
def test_time_left_excludes_compilation(monkeypatch, capsys, step, left):
    clock = types.SimpleNamespace(now=1000.0)
    monkeypatch.setattr(progress.time, "perf_counter", lambda: clock.now)
    shown = progress.Progress()
    shown.start(total=10, done=0)
    clock.now += 300  # the first step compiles
    shown.step("task 1/2 epoch 1/1", loss="2.303")
    assert capsys.readouterr().err == ""
    clock.now += step
    shown.step("task 1/2 epoch 1/1", loss="1.700")
    line = f"task 1/2 epoch 1/1: step 2 of 10, loss 1.700, {left} left\n"
    assert capsys.readouterr().err == line
