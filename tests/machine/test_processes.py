"""How processes are asked for; runs of several are in test_several_processes.py."""

import os
import signal
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdc_jax.heads import LinearHead
from fdc_jax.machine import devices, processes
from tests import small_runs
from tests.errors import input_error


@pytest.mark.parametrize("where", ["host:1", "host:1,2/2", "host:1,a/2"])
def test_wrong_process_numbers_are_refused(where, monkeypatch):
    monkeypatch.setattr(jax.distributed, "initialize", lambda *a, **b: pytest.fail("joined"))
    with input_error(f"expected HOST:PORT,0/2 or auto, found {where}$"):
        processes.join(where)


@pytest.fixture
def listener():
    """A socket that listens on a port of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_a_port_in_use_is_refused_before_jax_gets_it(listener, monkeypatch):
    monkeypatch.setattr(jax.distributed, "initialize", lambda *a, **b: pytest.fail("joined"))
    port = listener.getsockname()[1]
    with input_error(f"^--distributed=.*: port {port} is in use, perhaps by"):
        processes.join(f"127.0.0.1:{port},0/2")


# Joins with short limits, as a process of `fdc run`.
JOINS = """
import sys
from fdc_jax.__main__ import load
run = load("run")
from fdc_jax.machine import processes
processes.SILENT_SECONDS, processes.JOINING_SECONDS = 0.5, int(sys.argv.pop(1))
sys.exit(run())
"""


def start_joining(seconds, port, number, tmp_path):
    join = f"--distributed=127.0.0.1:{port},{number}/2"
    command = [sys.executable, "-c", JOINS, str(seconds), "--config=digits", join]
    environment = os.environ | {"PYTHONPATH": str(small_runs.REPOSITORY)}
    pipes = dict(stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(command, cwd=tmp_path, env=environment, **pipes)


@pytest.fixture
def free_port(listener):
    """A port on which nothing listens."""
    port = listener.getsockname()[1]
    listener.close()
    return port


@pytest.mark.ci
def test_processes_that_do_not_join_are_named(free_port, tmp_path):
    process = start_joining(1, free_port, 0, tmp_path)
    _, errors = process.communicate()
    waits, ends = errors.splitlines()
    assert waits.startswith("fdc_jax.run: WARNING: waits for 1 other process, ")
    assert "no answer from " in ends and ends.endswith(" within 1 seconds")
    assert process.returncode == 2


@pytest.mark.ci
def test_a_signal_ends_a_process_that_waits_for_others(free_port, tmp_path):
    process = start_joining(600, free_port, 1, tmp_path)
    assert "waits for process 0 at " in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert errors == "fdc_jax.run: stopped by SIGTERM; the same command resumes\n"
    assert process.returncode == 75


def test_missing_cluster_of_jax_is_one_line(monkeypatch):
    def initialize(*arguments, **options):
        raise ValueError("coordinator_address should be defined.\nSee the manual.")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    with input_error("--distributed=auto: JAX found no job"):
        processes.join("auto")


def test_an_agreement_is_asked_for_every_few_calls_and_stays():
    early, late = processes.Agreement(), processes.Agreement()
    count = processes.AGREE_EVERY
    assert not any(early(0) for _ in range(count))
    assert (early(15), early(0)) == (15, 15)
    assert not late(0) and not any(late(15) for _ in range(count - 1))
    assert late(15) == 15


def test_replicate_keeps_numpy_arrays_on_the_host():
    mesh, host = devices.data_mesh(), np.arange(4.0)
    head = LinearHead(jnp.ones((2, 3)), np.zeros(2))
    actual = devices.replicate(mesh, {"host": host, "head": head, "number": 2.0})
    assert actual["host"] is host and type(actual["head"].bias) is np.ndarray
    for leaf in (actual["head"].weight, actual["number"]):
        assert leaf.sharding.mesh == mesh and leaf.is_fully_replicated
