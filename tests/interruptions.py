"""Kills a run with SIGKILL at random moments, goes on with the same command, compares the end.

python -m tests.interruptions --kills=100
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from fdc_jax import configuration

REPOSITORY = Path(__file__).resolve().parents[1]
# A small run with every phase in it: two epochs, mid-task checkpoints, statistics, evaluation.
SMALL = (
    "--config=configs/digits.py",
    "--config.data.train_per_class=40",
    "--config.data.test_per_class=20",
    "--config.train.epochs=4",
    "--config.train.batch_size=16",
    "--config.checkpoint.every_steps=7",
    "--config.evaluation.batch_size=64",
    "--config.report=False",
)


def start(workdir: Path, *options: str, cache: Path, devices: int = 1) -> subprocess.Popen:
    """Starts the command in a process of its own; later options hold."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    return subprocess.Popen(
        [sys.executable, "main.py", *SMALL, f"--workdir={workdir}", *options],
        cwd=REPOSITORY,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "FDC_JAX_CACHE": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen, expected: int = 0) -> tuple[str, str]:
    """Waits for the process and returns what it printed."""
    output, errors = process.communicate()
    assert process.returncode == expected, f"exit code {process.returncode}:\n{errors}"
    return output, errors


def wait_for(workdir: Path, event: str, process: subprocess.Popen, count: int = 1) -> None:
    """Waits until a run has written an event that many times."""
    while process.poll() is None:
        path = workdir / "metrics.jsonl"
        if path.exists() and path.read_text().count(f'"event": "{event}"') >= count:
            return
        time.sleep(0.05)
    raise AssertionError(f"ended before {event}: {process.communicate()[1]}")


def kill_after(process: subprocess.Popen, seconds: float) -> bool:
    """Sends SIGKILL after a while; False when the process was done by then."""
    try:
        process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.communicate()
        return True
    return False


def same_outcome(one: Path, other: Path) -> None:
    """Asserts that two work directories hold the same results, bit for bit."""
    results = [json.loads((folder / "results.json").read_text()) for folder in (one, other)]
    for each in results:
        for field in configuration.WITHOUT_EFFECT:
            each["config"].pop(field, None)
        del each["versions"]["commit"]
    for key in results[0].keys() - {"timing"}:
        assert results[0][key] == results[1][key], key
    with np.load(one / "predictions.npz") as a, np.load(other / "predictions.npz") as b:
        assert a.files == b.files
        for name in a.files:
            np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def nothing_done_twice(workdir: Path) -> None:
    """Asserts from the events that each finished task was trained and evaluated once."""
    events = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    tasks_done = 0
    for event in events:
        if event["event"] == "resume":
            assert event["tasks_done"] >= tasks_done
            tasks_done = event["tasks_done"]
        if event["event"] == "training":
            assert event["task"] >= tasks_done
    evaluated = [event["task"] for event in events if event["event"] == "evaluation"]
    assert len(evaluated) == len(set(evaluated))


def run_with_kills(folder: Path, kills: int, seed: int, cache: Path) -> int:
    """Compares an uninterrupted run with a sequence of killed ones; returns the kills made."""
    clock = time.monotonic()
    finish(start(folder / "whole", "--quiet", cache=cache))
    duration = time.monotonic() - clock
    rng = random.Random(seed)
    made, round_number = 0, 0
    while made < kills:
        workdir = folder / f"killed_{round_number}"
        round_number += 1
        while made < kills:
            process = start(workdir, "--quiet", cache=cache)
            if not kill_after(process, rng.uniform(0.2, 1.0) * duration):
                break
            made += 1
        finish(start(workdir, "--quiet", cache=cache))
        same_outcome(folder / "whole", workdir)
        nothing_done_twice(workdir)
    return made


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        number = run_with_kills(
            Path(folder), arguments.kills, arguments.seed, Path(folder) / "cache"
        )
    print(f"{number} kills, every run ended with the numbers of the uninterrupted one")
