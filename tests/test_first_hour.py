"""The first hour: order, budget, kills; at a tiny size every part measures what the table has."""

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import first_hour
from fdc_jax import learners
from fdc_jax.errors import InputError, StopRequest

ROOT = Path(__file__).resolve().parents[1]
GPU = {"attentions": ["xla", "cudnn"], "pytorch": True, "lacking": None}


def options(rehearse=False):
    return argparse.Namespace(rehearse=rehearse, weights="my file.npz", data_dir="/data")


@pytest.mark.parametrize("rehearse", [False, True])
def test_parts(rehearse):
    names = learners.names()
    found = first_hour.parts(options(rehearse), GPU | {"learners": names})
    order = [part.name for part in found]
    assert len(set(order)) == len(order)
    firsts = ("step_parity", "step_fast_xla", "step_fast_cudnn", "extraction_parity")
    assert tuple(order[:4]) == firsts
    assert order[-3:] == ["run_1", "run_2", "run_3"]
    assert all(60 * part.minutes < first_hour.LIMIT < 600 for part in found)
    flags = [flag for part in found for flag in part.command if flag.startswith("--learners=")]
    assert sorted(",".join(flags).replace("--learners=", "").split(",")) == sorted(names)
    assert ("--config.encoder.weights=my file.npz" in found[-1].command) != rehearse
    absent = {"pytorch": False, "lacking": "no images", "attentions": ["xla"], "learners": names}
    fewer = [part.name for part in first_hour.parts(options(rehearse), absent)]
    left_out = {name for name in order if name.startswith("run_") or "pytorch" in name}
    assert set(order) - set(fewer) == left_out | {"step_fast_cudnn", "extraction_fast_cudnn"}


def test_a_budget_ends_parts_and_begins_none_that_it_has_no_room_for(tmp_path):
    long = [f"--tasks={number}" for number in ("50", "2")]
    todo = [
        first_hour.Part(f"part_{minutes}", minutes, ["-m", "benchmarks.calibration", flag])
        for minutes, flag in zip((0, 2), long, strict=True)
    ]
    state = first_hour.work(todo, tmp_path, first_hour.GRACE + 1, StopRequest())
    assert [each["state"] for each in state.values()] == ["stopped", "not begun"]
    assert [each["failures"] for each in state.values()] == [1, 0]
    assert not (tmp_path / "part_2.log").exists()
    asked = StopRequest()
    asked.signal = signal.SIGTERM
    assert first_hour.work(todo, tmp_path, 1000, asked) == state


def test_a_folder_is_of_one_accelerator(tmp_path, monkeypatch):
    before = {"device": "8 x TPU v6 lite"}
    (tmp_path / "device.json").write_text(json.dumps(before))
    arguments = ["first_hour", "--budget_minutes=2", f"--output={tmp_path}"]
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [*arguments, "--rehearse"])
    with pytest.raises(InputError, match=r"expected 8 x TPU v6 lite, found \d x cpu"):
        first_hour.main()
    assert json.loads((tmp_path / "device.json").read_text()) == before
    (tmp_path / "device.json").unlink()
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(InputError, match="expected an accelerator, found a CPU alone"):
        first_hour.main()
    assert not (tmp_path / "device.json").exists()
    assert not (tmp_path / "parts.json").exists()


@pytest.mark.slow
def test_a_rehearsal_that_is_killed_and_stopped_measures_every_part(tmp_path, cache):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "FDC_JAX_CACHE": str(cache)}
    command = [sys.executable, "-m", "benchmarks.first_hour", "--rehearse", f"--output={tmp_path}"]
    command += ["--budget_minutes=100"]

    def start():
        given = {"stdout": subprocess.PIPE, "text": True, "cwd": ROOT, "env": environment}
        return subprocess.Popen(command, **given)

    hour = start()
    while "step_parity" not in (line := hour.stdout.readline()):
        assert line
    hour.kill()
    hour.communicate()
    hour = start()
    while "latency_fast" not in (line := hour.stdout.readline()):
        assert line
    hour.send_signal(signal.SIGTERM)
    hour.communicate()
    assert hour.returncode == first_hour.UNFINISHED
    known = json.loads((tmp_path / "parts.json").read_text())
    done = {name: each for name, each in known.items() if each["state"] == "done"}
    hour = start()
    output, _ = hour.communicate()
    assert hour.returncode == 0, output
    state = json.loads((tmp_path / "parts.json").read_text())
    assert {each["state"] for each in state.values()} == {"done"}
    assert {name: state[name] for name in done} == done and "step_parity" in done
    table = (tmp_path / "table.md").read_text()
    assert output.endswith(table)
    assert all(f"| {name} " in table for name in state)
