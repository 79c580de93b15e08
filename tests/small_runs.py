"""A short run: in this process or in another, stopped and killed, compared with others."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
from numpy.testing import assert_array_equal

from configs import digits
from fdc_jax.errors import Interrupted, StopRequest
from fdc_jax.posthoc import posthoc_command as posthoc
from fdc_jax.run import configuration, seeds

REPOSITORY = Path(__file__).resolve().parents[1]
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
# Two tasks of eight steps, with checkpoints within them; four devices share no batch evenly.
FIELDS = {
    "classes_per_task": 5,
    "data.train_per_class": 12,
    "data.test_per_class": 6,
    "train.epochs": 2,
    "train.batch_size": 18,
    "checkpoint.every_steps": 3,
    "evaluation.batch_size": 64,
    "report": False,
}


def config(cache, **fields):
    """Returns the settings with a cache folder; others of their fields with `__` for the dot."""
    settings = digits.get_config()
    named = {name.replace("__", "."): value for name, value in fields.items()}
    settings.update_from_flattened_dict(FIELDS | {"cache_dir": str(cache)} | named)
    return configuration.typed(settings)


def run(config, workdir):
    """Runs or resumes in this process, and returns the results."""
    (collected,) = seeds.run(config, str(workdir), quiet=True)
    return json.loads(msgspec.json.encode(collected))


def shared(tmp_path_factory, name, make):
    """Returns a folder that `make(folder)` fills, once for all workers of one test run."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with open(base / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (base / f"{name}.made").exists():
            make(base / name)
            (base / f"{name}.made").touch()
    return base / name


class StopsAt(StopRequest):
    """Asks to stop at the nth look, as if the process had been sent SIGTERM."""

    def __init__(self, looks):
        super().__init__()
        self.looks = looks
        self.agree = self.count

    def count(self, number):
        self.looks -= 1
        return 15 if self.looks < 0 else number


def stopped(config, workdir, looks):
    """Runs until the stop request was read so many times: once per step and per batch."""
    try:
        seeds.run(config, str(workdir), True, StopsAt(looks))
    except Interrupted:
        return
    raise AssertionError("the run ended before it was stopped")


# Processes ----------------------------------------------------------------------------------------


def python(*arguments, expected=0, cwd=REPOSITORY, env=None):
    """Runs Python with arguments, and returns its output, or its errors if any are expected."""
    command = [sys.executable, *map(str, arguments)]
    output, errors = finish(subprocess.Popen(command, cwd=cwd, env=env, **PIPES), expected)
    return errors if expected else output


def with_devices(count):
    """Returns variables of the environment of a process with a number of devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
    return os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags.strip()}


def start(workdir, *options, cache, devices=1, cwd=None):
    """Starts the command in a process of its own.

    Later options hold; without a work directory it is the one that the command chooses.
    """
    given = [f"--config={REPOSITORY / 'configs' / 'digits.py'}"]
    given += [f"--config.{name}={value}" for name, value in FIELDS.items()]
    given += [f"--workdir={workdir}"] if workdir else []
    by_name = {option.partition("=")[0]: option for option in [*given, *options]}
    program = [sys.executable, str(REPOSITORY / "main.py"), *by_name.values()]
    environment = with_devices(devices) | {"FDC_JAX_CACHE": str(cache)}
    return subprocess.Popen(program, cwd=cwd, env=environment, **PIPES)


def finish(process, expected=0):
    """Waits for the process and returns what it printed."""
    output, errors = process.communicate()
    assert process.returncode == expected, f"exit code {process.returncode}:\n{errors}"
    return output, errors


def wait_for(workdir, event, process):
    """Waits until a run has written an event."""
    while process.poll() is None:
        if events(workdir, event):
            return
        time.sleep(0.05)
    raise AssertionError(f"ended before {event}: {process.communicate()[1]}")


# Files of a run ----------------------------------------------------------------------------------


def results(workdir):
    """Returns the content of `results.json`."""
    return json.loads((workdir / "results.json").read_text())


def predictions(workdir):
    """Returns the columns of `predictions.npz`."""
    with np.load(workdir / "predictions.npz") as file:
        return dict(file)


def events(workdir, kind):
    """Returns the events of a kind that were written so far."""
    path = workdir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    parsed = [json.loads(line) for line in lines if line.endswith("\n")]
    return [event for event in parsed if kind in ("", event["event"])]


def contents(workdir):
    """Returns the content of every file except those that have times."""
    return {
        path.relative_to(workdir).as_posix(): path.read_bytes()
        for path in workdir.rglob("*")
        if path.is_file() and path.name not in ("metrics.jsonl", ".lock")
    }


def newest_checkpoint(workdir):
    """Returns the folder of the newest checkpoint."""
    return max((workdir / "checkpoints").iterdir(), key=lambda path: int(path.name))


def copied(workdir, target):
    """Returns a copy of a work directory that may be changed, as that of a stopped run."""
    return shutil.copytree(workdir, target)


def same_outcome(one, other, without=()):
    """Asserts that two work directories hold the same results, bit for bit.

    Fields that have no effect, and those in `without`, may differ.
    """
    first, second = results(one), results(other)
    for record in (first, second):
        for field in (*configuration.WITHOUT_EFFECT, *without):
            record["config"].pop(field, None)
        del record["versions"]["commit"], record["timing"]
    assert first == second
    assert_equal(predictions(one), predictions(other))


def assert_equal(actual, expected):
    """Asserts that two dictionaries hold the same arrays."""
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        assert_array_equal(actual[name], array, err_msg=name)


def check_fit_again(workdir, output, name):
    """Asserts that a fit of a run's saved features repeats the predictions of a calibrator."""
    command = [str(workdir / "features"), f"--output={output}", f"--method={name}", "--quiet"]
    assert posthoc.main(command) == 0
    columns = predictions(workdir)
    with np.load(output) as again:
        assert_array_equal(again["raw_label"], columns["raw_label"])
        assert_array_equal(again["label"], columns[f"{name}_label"])


def nothing_done_twice(workdir):
    """Asserts from the events that no process repeats what was done when it resumed.

    A process that is killed between an evaluation and its checkpoint leaves an event of it.
    """
    tasks_done, evaluated = 0, []
    for event in events(workdir, ""):
        if event["event"] == "resume":
            assert event["tasks_done"] >= tasks_done
            tasks_done, evaluated = event["tasks_done"], []
        if event["event"] == "training":
            assert event["task"] >= tasks_done
        if event["event"] == "evaluation":
            assert event["task"] >= tasks_done and event["task"] not in evaluated
            evaluated.append(event["task"])


def other_weights(folder):
    """Writes the weights of the digits' encoder, all 1 % larger."""
    path = folder / "weights.npz"
    with np.load(REPOSITORY / "fdc_jax/assets/digits_vit.npz") as file:
        np.savez(path, **{name: file[name] * 1.01 for name in file.files})
    return path
