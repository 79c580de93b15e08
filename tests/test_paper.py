"""The command for all runs of the paper: plan, runs in processes of their own, several workers."""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest

from fdc_jax import latency, learners
from fdc_jax.data import benchmarks
from fdc_jax.errors import InputError, StopRequest
from fdc_jax.machine import files
from fdc_jax.paper import measurements, paper_command, plan, workers
from fdc_jax.paper.workers import Outcome, Worker
from fdc_jax.report import paper
from fdc_jax.run import estimate
from tests import small_runs

SMALL = [f"--config.{name}={value}" for name, value in small_runs.FIELDS.items()]
DIGITS = ["--benchmarks=digits", "--learners=cumulative_lora,sd_lora"]
ONE = [DIGITS[0], "--learners=cumulative_lora"]
ALONE = Worker("", {}, ())
NINE = "cumulative_lora ewc_lora sd_lora splitlora inflora inflora_ca lora_subtraction loda rsiat"


@pytest.fixture(autouse=True)
def no_measurements(monkeypatch):
    """Plans without measurements, in this process."""
    monkeypatch.setattr(measurements, "machine_facts", lambda runs, timed, stop: {})


def dry_run(capsys, *arguments):
    """Returns the printed plan."""
    assert paper_command.main([*arguments, "--dry_run"]) == 0
    return capsys.readouterr().out


def rows(text):
    """Returns the cells of the rows of a plan."""
    lines = text.partition("\n\n")[0].splitlines()[2:]
    return [re.split(r" {2,}", line.strip()) for line in lines]


def planned(workdir, benchmarks, learners, seeds, *fields):
    """Returns the runs of a plan, which needs no images."""
    names = {"benchmarks": benchmarks, "learners": learners, "seeds": seeds}
    options = argparse.Namespace(data="", workdir=str(workdir), **names)
    return plan.planned_runs(options, fields)[0]


def test_the_plan_has_135_runs_the_most_valuable_first(tmp_path, monkeypatch, capsys):
    for file in ("ImageNet-A.zip", "CUB200.ZIP"):
        (tmp_path / file).touch()
    (tmp_path / "omnibenchmark" / "train").mkdir(parents=True)
    monkeypatch.setattr(plan, "open_input", lambda shared, config, fetch: "ready")
    text = dry_run(capsys, f"--data={tmp_path}", f"--workdir={tmp_path / 'runs'}")
    titles = [benchmarks.BENCHMARKS[name].title for name in paper.benchmarks()]
    learned = [learners.title(name) for name in NINE.split()]
    expected = [[b, n, f"seed {s}"] for s in "123" for n in learned for b in titles]
    assert [row[1:4] for row in rows(text)] == expected
    (line,) = re.findall("^missing: .*", text, re.MULTILINE)
    assert line.startswith("missing: ImageNet-R: put imagenet-r (archive or folder; size not ")
    assert not (tmp_path / "runs").exists()


def test_plan_shows_finished_and_stopped_runs(finished_run, stopped_run, tmp_path, capsys):
    folder = tmp_path / "digits" / "cumulative_lora"
    for seed, run in ((1, finished_run), (2, stopped_run), (3, finished_run)):
        shutil.copytree(run, folder / f"seed_{seed}")
    config = folder / "seed_2" / "config.json"
    config.write_text(config.read_text().replace('"seed": [\n    1', '"seed": [\n    2'))
    arguments = [*DIGITS, *SMALL, "--config.calibrators=fdc,gaussians", f"--workdir={tmp_path}"]
    text = dry_run(capsys, *arguments)
    states = ["done", "to do", "stopped", "to do", "other", "to do"]
    assert [row[4] for row in rows(text)] == states
    with files.locked(folder / "seed_2" / ".worker"):
        assert rows(dry_run(capsys, *arguments))[2][4] == "running"


def test_hours_follow_from_finished_runs(finished_run, tmp_path):
    given = (tmp_path, "digits", "cumulative_lora,sd_lora", "1,2")
    runs = planned(*given, *SMALL, "--config.calibrators=fdc,gaussians")
    assert all(np.isnan(need.hours) for need in plan.needs(runs, {}))
    shutil.copytree(finished_run, runs[0].folder)
    finished, other, *_ = plan.needs(runs, {})
    assert (finished.hours, finished.gib) == (0, 0)
    assert other.source.endswith(" (finished runs)")
    timing = small_runs.results(finished_run)["timing"]
    parts = {name for name in timing if name.endswith("seconds")}
    parts -= {"input_wait_seconds", "processor_seconds"}  # of training, and of everything
    spent = [timing[name] for name in parts]
    assert other.hours * 3600 == pytest.approx(sum(jax.tree.leaves(spent)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--benchmarks=digit"], "--benchmarks: expected one of .* did you mean digits"),
        (["--config.seed=1"], "--config.seed: expected --seeds"),
        (["--data=nowhere"], "--data: expected a folder, found nowhere"),
        (["--benchmarks=cub200", "--quiet"], "missing: CUB-200: put cub "),
        (["--config.data.flip"], "expected --config.data.flip=VALUE"),
        (
            ["--select=validation", "--config.data.validation_share=0"],
            "--config.data.validation_share: expected a share above 0, found 0",
        ),
    ],
)
def test_wrong_arguments_of_the_paper_are_one_line(arguments, message, capsys, tmp_path):
    digits = [] if "--benchmarks" in arguments[0] else DIGITS[:1]
    assert paper_command.main([*digits, *arguments, f"--workdir={tmp_path}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line)


# Runs ---------------------------------------------------------------------------------------------


def test_hours_of_the_paper_follow_settings_and_learners(tmp_path):
    (first, loda), (short, _) = (
        plan.needs(planned(tmp_path, "cub200", "cumulative_lora,loda", "1", *fields), {})
        for fields in ((), ("--config.train.epochs=5",))
    )
    # Table app-cost: 29.3 minutes of training and 3.0 of FDC.
    assert first.hours == pytest.approx((29.3 + 3.0) / 60)
    assert first.source == "1 x NVIDIA A100 80GB PCIe (the paper's, scaled)"
    test = 0.5 * 2358 * np.mean(np.arange(1, 21) / 20) * 20
    assert short.hours / first.hours == pytest.approx(
        (6 * 9430 + test) / (21 * 9430 + test), rel=1e-6
    )
    # A step of LoDA has four passes; moments are measured three times.
    assert loda.hours / first.hours == pytest.approx(
        ((4 * 20 + 1.5 + 1) * 9430 + test) / (21 * 9430 + test), rel=1e-6
    )


def test_damaged_archive_and_absent_weights_are_named_once(tmp_path, capsys):
    (tmp_path / "cub.zip").touch()
    arguments = ["--benchmarks=cub200,digits", "--seeds=1,2", f"--data={tmp_path}", DIGITS[1]]
    arguments += [f"--workdir={tmp_path}", f"--config.cache_dir={tmp_path}"]
    text = dry_run(capsys, *arguments)
    (line,) = re.findall("^missing: .*", text, re.MULTILINE)
    assert line.startswith("missing: CUB-200: ") and str(tmp_path / "cub.zip") in line
    assert [row[4] for row in rows(text)] == ["no data", "to do"] * 4
    assert "weights augreg B/16: to be downloaded" in text
    assert "Digits: ready, 1,201 training and 596 test images, sha256 " in text


def test_unusable_images_stop_the_runs_that_share_them(tmp_path, monkeypatch, capsys):
    """The cause came up in the first run; runs of other images go on."""
    performed = []
    outcomes = {"cub200": Outcome(2, "x.jpg: it is damaged"), "digits": Outcome(3, "loss nan")}

    def attempt(run, stop, worker, quiet):
        performed.append((run.benchmark, run.config.seed[0]))
        return outcomes[run.benchmark]

    def open_input(shared, config, fetch):
        if performed and shared == ("data", "cub200"):
            raise InputError("x.jpg: it is damaged")
        return "ready"

    monkeypatch.setattr(workers, "attempt", attempt)
    monkeypatch.setattr(plan, "open_input", open_input)
    (tmp_path / "cub.zip").touch()
    arguments = ["--benchmarks=cub200,digits", "--seeds=1,2", f"--data={tmp_path}", "--workers=1"]
    assert paper_command.main([*arguments, ONE[1], f"--workdir={tmp_path / 'runs'}"]) == 3
    assert performed == [("cub200", 1), ("digits", 1), ("digits", 2)]
    errors = capsys.readouterr().err
    assert errors.count("missing: CUB-200: ") == 1 and errors.count("failed with code 3") == 2


def test_workers_share_the_visible_accelerators(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    for platform, name, values in (
        ("gpu", "CUDA_VISIBLE_DEVICES", ["5", "7"]),
        ("tpu", "TPU_VISIBLE_CHIPS", ["0", "1"]),
    ):
        machine = estimate.Machine(1.0, {}, 8, "", platform=platform, chips=2)
        actual = workers.share_devices("auto", {(): machine})
        assert [worker.environment[name] for worker in actual] == values


def test_workers_on_processors_divide_the_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {2, 3, 5, 8})
    cores = [worker.cores for worker in workers.share_devices("2", {})]
    assert cores == [(2, 5), (3, 8)]
    with pytest.raises(InputError, match="--workers: expected auto or 1 to 4, found '5'"):
        workers.share_devices("5", {})


def test_two_workers_perform_every_run_once_and_side_by_side(tmp_path):
    config = small_runs.config(tmp_path)
    runs = [plan.PlannedRun("digits", name, tmp_path / name, (), config) for name in "abcd"]
    both = threading.Barrier(2)
    ended = []

    def attempt(run, stop, worker, quiet):
        both.wait(timeout=60)
        return Outcome(0, "")

    def end(run, outcome):
        ended.append(run.learner)

    workers.work(runs, [ALONE, ALONE], attempt, end, {}, StopRequest(), True)
    assert sorted(ended) == [*"abcd"]


def test_a_locked_run_is_left_to_its_worker(tmp_path):
    run = plan.PlannedRun("digits", "sd_lora", tmp_path, (), small_runs.config(tmp_path))
    for name in (".worker", ".lock"):
        with files.locked(tmp_path / name):
            assert workers.attempt(run, StopRequest(), ALONE, True) is None
    run.log.symlink_to("/dev/full")
    line = f"cannot write {run.log}: No space left on device"
    assert workers.attempt(run, StopRequest(), ALONE, True) == Outcome(2, line)


@pytest.mark.ci
def test_report_follows_a_latency_that_comes_later(
    finished_run, tmp_path, monkeypatch, capsys, no_figures
):
    def measure(function, *arguments, stop):
        if not (tmp_path / "works").exists():
            raise RuntimeError("the device is busy")
        function(*arguments)

    def messages():
        arguments = [*ONE, "--seeds=1", *SMALL, "--config.calibrators=fdc,gaussians"]
        assert paper_command.main([*arguments, f"--workdir={tmp_path / 'runs'}"]) == 0
        return capsys.readouterr().err

    monkeypatch.setattr(measurements, "in_new_process", measure)
    monkeypatch.setattr(latency.measure_run, "__defaults__", ((1, 2, 1),))
    shutil.copytree(finished_run, tmp_path / "runs" / "digits" / "cumulative_lora" / "seed_1")
    latencies = tmp_path / "runs" / "report" / "tables" / "latency.csv"
    first = messages()
    assert "latency is unknown: the device is busy" in first and "writes " in first
    assert not latencies.exists()
    (tmp_path / "works").touch()
    assert "writes " in messages() and latencies.exists()
    assert "writes " not in messages()


MEASURES = """
from fdc_jax.errors import StopRequest
from fdc_jax.paper.measurements import in_new_process
program = "import time; print('measures', flush=True); time.sleep(600)"
in_new_process(exec, program, stop=StopRequest())
"""


@pytest.mark.ci
def test_measuring_processes_end_with_their_parent():
    """Their end is that of the pipe, which they share with the command that was killed."""
    command = [sys.executable, "-c", MEASURES]
    process = subprocess.Popen(command, cwd=small_runs.REPOSITORY, **small_runs.PIPES)
    assert process.stdout.readline() == "measures\n"
    process.kill()
    process.communicate(timeout=120)


# The first run fails like a user's own learner; the process of the second is killed once.
PROGRAM = """
import os, signal, sys
try:
    1 / int("sd_lora" not in sys.argv[-1])
except ZeroDivisionError as error:
    error.add_note("learner: Own.loss")
    raise
if not os.path.exists({marker!r}):
    open({marker!r}, "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
print("cores:", os.sched_getaffinity(0))
"""


def test_killed_run_is_repeated_and_failing_run_stops_no_other(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(workers, "_PROGRAM", PROGRAM.format(marker=str(tmp_path / "killed")))
    config, ended = small_runs.config(tmp_path), {}
    runs = [
        plan.PlannedRun("digits", name, tmp_path / name, (name,), config)
        for name in ("sd_lora", "cumulative_lora")
    ]

    def end(run, outcome):
        ended[run.learner] = outcome

    core = min(os.sched_getaffinity(0))
    worker = Worker("", {}, (core,))
    workers.work(runs, [worker], workers.attempt, end, {}, StopRequest(), False)
    failure = Outcome(1, "ZeroDivisionError: division by zero")
    assert ended == {"sd_lora": failure, "cumulative_lora": Outcome(0, f"cores: {{{core}}}")}
    assert capsys.readouterr().err.count("ended by SIGKILL; it is resumed") == 1


@pytest.mark.ci
def test_ray_repeats_the_run_of_a_worker_that_dies(tmp_path, cache):
    pytest.importorskip("ray", reason="needs Ray: pip install 'fdc_jax[ray]'")
    folder = tmp_path / "digits" / "cumulative_lora" / "seed_1"
    measured = {"baseline": {"milliseconds": [10.0], "peak_bytes": None}}
    files.write_json(folder / "latency.json", {"contenders": measured})
    program = [sys.executable, "-m", "fdc_jax", "paper", *ONE, *SMALL, "--seeds=1", "--ray"]
    program += ["--ray_gpus=0", f"--workdir={tmp_path}"]
    options = {"cwd": small_runs.REPOSITORY, "env": os.environ | {"FDC_JAX_CACHE": str(cache)}}
    driver = subprocess.Popen(program, **options, **small_runs.PIPES)
    small_runs.wait_for(folder, "training", driver)
    worker = int(files.holder(folder / ".worker").split()[1])
    assert worker != driver.pid
    os.kill(worker, signal.SIGKILL)
    _, errors = small_runs.finish(driver)
    log = (folder / "log.txt").read_text()
    assert log.count("+ python -m fdc_jax run ") == 2 and "stopped by SIGTERM" in log
    small_runs.nothing_done_twice(folder)
    assert "0 runs left" in errors and errors.count("after task 2/2") == 1


# A stand-in of SLURM's `srun`: it starts a job step, kills the run after its first task, and sends
# the signal of the time limit to all processes once the run is resumed.
SRUN = """#!{python}
import os, pathlib, signal, subprocess, sys, time
step = subprocess.Popen([{python!r}, *sys.argv[2:]])
events = pathlib.Path("{folder}", "metrics.jsonl")
def processes_after(event):
    while not (events.exists() and f'"{{event}}"' in events.read_text()):
        assert step.poll() is None
        time.sleep(0.1)
    return map(int, subprocess.getoutput(f"pgrep -P {{step.pid}} -f {folder}").split())
for pid in processes_after("statistics"):
    os.kill(pid, signal.SIGKILL)
for pid in (*processes_after("resume"), step.pid):
    os.kill(pid, signal.SIGTERM)
sys.exit(step.wait())
"""


@pytest.mark.ci
@pytest.mark.skipif(not shutil.which("pgrep"), reason="needs pgrep")
def test_slurm_script_resumes_after_a_kill_and_the_time_limit(finished_run, tmp_path, cache):
    page = (small_runs.REPOSITORY / "docs" / "paper.md").read_text()
    script = re.search(r"```bash\n(#!/bin/bash\n.*?)```", page, re.DOTALL)[1]
    arguments = " ".join([*ONE, "--seeds=1", *SMALL, "--config.calibrators=fdc,gaussians"])
    script = script.replace("--data=DATA", f"{arguments} --workdir={tmp_path / 'runs'}")
    folder, log = tmp_path / "runs" / "digits" / "cumulative_lora" / "seed_1", tmp_path / "requeued"
    srun, scontrol = tmp_path / "srun", tmp_path / "scontrol"
    srun.write_text(SRUN.format(python=sys.executable, folder=folder))
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {log}\n')
    for tool in (srun, scontrol):
        tool.chmod(0o755)
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "FDC_JAX_CACHE": str(cache)}
    options = {"cwd": small_runs.REPOSITORY, "env": os.environ | variables | {"SLURM_JOB_ID": "17"}}
    done = subprocess.run(["bash", "-c", script], stderr=subprocess.PIPE, text=True, **options)
    assert done.returncode == 75, done.stderr
    assert done.stderr.count("ended by SIGKILL; it is resumed") == 1
    assert log.read_text() == "requeue 17\n"
    small_runs.run(small_runs.config(cache), folder)
    small_runs.same_outcome(finished_run, folder)
    small_runs.nothing_done_twice(folder)
