"""The command for all runs of the paper: plan, runs in processes of their own, several workers."""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fdc_jax import paper
from fdc_jax.data import benchmarks
from fdc_jax.errors import Interrupted
from fdc_jax.machine import files
from tests import small_runs

SMALL = [f"--config.{name}={value}" for name, value in small_runs.FIELDS.items()]
DIGITS = ["--benchmarks=digits", "--learners=cumulative_lora,sd_lora"]
NINE = "cumulative_lora ewc_lora sd_lora splitlora inflora inflora_ca lora_subtraction loda rsiat"


def dry_run(monkeypatch, capsys, *arguments):
    """Returns the printed plan, without a timed step."""
    monkeypatch.setattr(paper, "measure", lambda runs, stop: {})
    assert paper.main([*arguments, "--dry_run"]) == 0
    return capsys.readouterr().out


def rows(plan):
    """Returns the cells of the rows of a plan up to the state."""
    lines = plan.partition("\n\n")[0].splitlines()[2:]
    return [re.split(r" {2,}", line.strip())[:5] for line in lines]


def test_the_plan_has_135_runs_the_most_valuable_first(tmp_path, monkeypatch, capsys):
    for file in ("ImageNet-A.zip", "CUB200.ZIP"):
        (tmp_path / file).touch()
    (tmp_path / "omnibenchmark" / "train" / "1").mkdir(parents=True)
    (tmp_path / "omnibenchmark" / "train" / "1" / "1.png").touch()
    plan = dry_run(monkeypatch, capsys, f"--data={tmp_path}", f"--workdir={tmp_path / 'runs'}")
    actual = [row[1:4] for row in rows(plan)]
    titles = [benchmarks.BENCHMARKS[name].title for name in paper.paper.benchmarks()]
    learned = [paper.learners.title(name) for name in NINE.split()]
    assert actual == [[b, n, f"seed {s}"] for s in "123" for n in learned for b in titles]
    assert len(actual) == 135
    missing = [line for line in plan.splitlines() if line.startswith("missing: ")]
    (of_r,) = missing
    page = benchmarks.ARCHIVES["imagenet_r"][1]
    assert of_r == (
        "missing: ImageNet-R: put imagenet-r (archive or folder; size not published) into "
        f"--data=FOLDER, {page}"
    )
    assert not (tmp_path / "runs").exists()


def test_plan_shows_finished_and_stopped_runs(
    finished_run, stopped_run, tmp_path, cache, monkeypatch, capsys
):
    folder = tmp_path / "digits" / "cumulative_lora"
    for seed, run in ((1, finished_run), (2, stopped_run), (3, finished_run)):
        shutil.copytree(run, folder / f"seed_{seed}")
    config = folder / "seed_2" / "config.json"
    config.write_text(config.read_text().replace('"seed": [\n    1', '"seed": [\n    2'))
    arguments = [*DIGITS, *SMALL, "--config.calibrators=fdc,gaussians", f"--workdir={tmp_path}"]
    plan = dry_run(monkeypatch, capsys, *arguments)
    states = ["done", "to do", "begun", "to do", "other", "to do"]
    assert [row[4] for row in rows(plan)] == states
    with paper.locked(folder / "seed_2" / ".worker"):
        assert rows(dry_run(monkeypatch, capsys, *arguments))[2][4] == "running"


def test_hours_follow_from_finished_runs(finished_run, tmp_path):
    options = argparse.Namespace(
        data="", benchmarks="digits", learners="cumulative_lora,sd_lora", seeds="1,2"
    )
    options.workdir = str(tmp_path)
    given = dict(word.split("=", 1) for word in SMALL)
    given["--config.calibrators"] = "fdc,gaussians"
    runs, _ = paper.plan(options, given)
    assert all(hours != hours for hours, _ in paper.needs(runs, {}))
    shutil.copytree(finished_run, runs[0].folder)
    longer, _ = paper.plan(options, given | {"--config.train.epochs": "4"})
    needed, needed_longer = paper.needs(runs, {}), paper.needs([runs[0], *longer[1:]], {})
    assert needed[0] == (0, 0)
    timing = small_runs.results(finished_run)["timing"]
    parts = ("training", "compile", "test_extraction", "extraction_compile")
    parts += tuple(f"{view}_extraction" for view in ("adapted", "pretrained", "previous"))
    spent = sum(timing[f"{part}_seconds"] for part in parts)
    spent += sum(timing["fit_seconds"].values()) + sum(timing["score_seconds"].values())
    spent += sum(timing["fit_compile_seconds"].values())
    assert needed[1][0] * 3600 == pytest.approx(spent)
    # Two epochs of 120 images, and 120 + 0.5 * 60 * 1.5 forward passes as half of one.
    ratio = needed_longer[1][0] / needed[1][0]
    assert ratio == pytest.approx((4 * 120 + 120 + 45) / (2 * 120 + 120 + 45))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--benchmarks=digit"], "--benchmarks: expected one of .* did you mean digits"),
        (["--learners=sdlora"], "fdc_jax.paper: --learners: .*sd_lora"),
        (["--config.seed=1"], "--config.seed: expected --seeds"),
        (["--config.precision=half"], "config.precision: expected .* found 'half'"),
        (["--config.seed=1", "--config.seed=2"], "--config.seed is given twice"),
        (["--data=nowhere"], "--data: expected a folder, found nowhere"),
        (["--seeds=one"], "--seeds: expected whole numbers such as 1,2,3, found one"),
        (
            ["--config.train.epoch=3"],
            "--config.train.epoch: no such field; did you mean train.epochs",
        ),
        (["--config.data.flip"], "expected --config.data.flip=VALUE"),
        (["--workdirs=x"], "unrecognized arguments: --workdirs=x; did you mean --workdir"),
    ],
)
def test_wrong_arguments_of_the_paper_are_one_line(arguments, message, capsys, tmp_path):
    digits = [] if "--benchmarks" in arguments[0] else DIGITS[:1]
    assert paper.main([*digits, *arguments, f"--workdir={tmp_path}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line)


# Runs ---------------------------------------------------------------------------------------------


def start(workdir, cache, *arguments, digits=DIGITS):
    """Starts the command in a process of its own."""
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "fdc_jax",
            "paper",
            *digits,
            *SMALL,
            f"--workdir={workdir}",
            *arguments,
        ],
        cwd=small_runs.REPOSITORY,
        env=os.environ | {"FDC_JAX_CACHE": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def commands(folder):
    """Returns the commands in the log of a run."""
    lines = (folder / "log.txt").read_text().splitlines()
    return [line for line in lines if line.startswith("+ python -m fdc_jax run ")]


def test_missing_data_are_named_once(tmp_path, capsys):
    arguments = ["--benchmarks=cub200,imagenet_a", "--seeds=1", f"--workdir={tmp_path}"]
    assert paper.main(arguments) == 2
    output, errors = capsys.readouterr()
    assert len(rows(output)) == 18 and "nan" not in output
    titles = ("CUB-200: put cub ", "ImageNet-A: put imagenet-a ")
    for title, line in zip(titles, errors.splitlines(), strict=True):
        assert line.startswith(f"fdc_jax.paper: missing: {title}") and "--data=FOLDER" in line


def test_a_log_that_the_disk_has_no_room_for_is_named(tmp_path):
    (log := tmp_path / "log.txt").symlink_to("/dev/full")
    run = paper.Run("digits", "sd_lora", 1, tmp_path, (), small_runs.config(tmp_path))
    line = f"cannot write {log}: No space left on device"
    assert paper.attempt(run, paper.StopRequest()) == (2, line)


def test_last_lines_of_a_stopped_run_are_shown_once(tmp_path, monkeypatch, capsys):
    program = "import sys; sys.stdin.read(); print('after task 1/2: raw 1.00'); print('saved')"
    monkeypatch.setattr(paper, "_PROGRAM", program)
    run = paper.Run("digits", "sd_lora", 1, tmp_path, (), small_runs.config(tmp_path))
    stop = paper.StopRequest()
    stop.signal = signal.SIGTERM
    with pytest.raises(Interrupted):
        paper.attempt(run, stop, quiet=False)
    assert capsys.readouterr().err.count("seed 1, after task 1/2: raw 1.00\n") == 1


LATENCY = {
    **{"images": 64, "device": "cpu", "versions": {}, "precision": "parity"},
    "contenders": {
        name: {"milliseconds": [10.0 * factor, 11.0 * factor], "peak_bytes": None}
        for name, factor in (("baseline", 1), ("single", 2), ("dual", 3))
    },
}


@pytest.mark.ci
def test_report_is_current_by_content_not_by_date(
    finished_run, tmp_path, cache, monkeypatch, capsys, no_figures
):
    def measure(function, folder, learner, host, stop):
        if not (tmp_path / "works").exists():
            raise RuntimeError("the device is busy")
        (folder / "latency.json").write_text(json.dumps(LATENCY))

    def tables(seeds):
        """Returns what is printed and the table of latencies; dates the report ahead."""
        arguments = ["--benchmarks=digits", "--learners=cumulative_lora", f"--seeds={seeds}"]
        arguments += [
            *SMALL,
            "--config.calibrators=fdc,gaussians",
            f"--workdir={tmp_path / 'runs'}",
        ]
        assert paper.main(arguments) == 0
        output = tmp_path / "runs" / "report"
        year_2100 = 4_102_444_800
        os.utime(output / "report.html", (year_2100, year_2100))
        latencies = output / "tables" / "latency.csv"
        return capsys.readouterr(), latencies.read_text() if latencies.exists() else ""

    monkeypatch.setattr(paper, "_in_new_process", measure)
    folder = tmp_path / "runs" / "digits" / "cumulative_lora"
    shutil.copytree(finished_run, folder / "seed_1")
    printed, latencies = tables("1")
    assert "latency is unknown: the device is busy" in printed.err and not latencies
    assert "writes " in printed.err and "±" not in printed.out
    shutil.copytree(finished_run, folder / "seed_2")
    for name in ("config.json", "results.json"):
        text = (folder / "seed_2" / name).read_text()
        text = re.sub(r'("seed": (\[\s+)?)1', r"\g<1>2", text)
        (folder / "seed_2" / name).write_text(text)
    printed, latencies = tables("1,2")
    assert "writes " in printed.err and "±" in printed.out
    (tmp_path / "works").touch()
    printed, latencies = tables("1,2")
    assert "writes " in printed.err and "10.5" in latencies
    printed, _ = tables("1,2")
    assert "writes " not in printed.err


def children(pid):
    """Returns the processes that a process has started, by id, with their command lines."""
    try:
        pids = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return {int(pid): Path(f"/proc/{pid}/cmdline").read_text() for pid in pids}
    except FileNotFoundError:
        return {}


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_measuring_processes_end_with_their_parent(tmp_path, cache):
    """Their end is that of the pipe, which they share with the command that was killed."""
    process = start(tmp_path, cache, "--dry_run")
    while not any("spawn_main" in command for command in children(process.pid).values()):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    process.kill()
    process.communicate(timeout=120)


@pytest.mark.ci
def test_two_workers_continue_after_a_kill(tmp_path, cache):
    workdir = tmp_path / "runs"
    first = workdir / "digits" / "cumulative_lora" / "seed_1"
    folders = {workdir / "digits" / name / f"seed_{n}" for name in NINE.split()[:3:2] for n in "12"}
    worker = start(workdir, cache, "--seeds=1,2")
    small_runs.wait_for(first, "training", worker)
    worker.kill()
    worker.communicate()
    workers = [start(workdir, cache, "--seeds=1,2") for _ in range(2)]
    outputs = [small_runs.finish(worker) for worker in workers]
    assert {path.parent for path in workdir.glob("*/*/*/results.json")} == folders
    for folder in folders:
        small_runs.nothing_done_twice(folder)
        assert len(commands(folder)) == 1 + (folder == first)
    assert "stopped by SIGTERM" in (first / "log.txt").read_text()  # with its worker
    started = [errors.count("python -m fdc_jax run ") for _, errors in outputs]
    assert sum(started) == 4 and min(started) > 0
    # Whoever ends last writes the tables; a further call does nothing.
    report = workdir / "report" / "report.html"
    assert any(f"report: {report}" in output for output, _ in outputs)
    timed = [path.parent for path in workdir.glob("*/*/*/latency.json")]
    assert len(timed) == 1 and timed[0].name == "seed_1"
    states = {path: path.stat().st_mtime_ns for path in workdir.rglob("*.*") if path.is_file()}
    output, errors = small_runs.finish(start(workdir, cache, "--seeds=1,2"))
    assert "4 runs: 4 done" in output and "python" not in errors
    assert "Final accuracy before and after FDC" in output
    states.pop(workdir / ".worker")
    assert states == {path: path.stat().st_mtime_ns for path in states}
    # Features of E_0 come from the cache if another run of the benchmark has computed them.
    timings = [small_runs.results(folder)["timing"] for folder in folders]
    assert sum(timing["pretrained_from_cache"] == 2 for timing in timings) >= 2


@pytest.mark.ci
def test_a_failing_run_is_named_and_stops_no_other(tmp_path, cache):
    digits = ["--benchmarks=digits", "--learners=tests.fails_in_loss,cumulative_lora"]
    process = start(tmp_path, cache, "--seeds=1", digits=digits)
    _, errors = small_runs.finish(process, expected=1)
    (line,) = [line for line in errors.splitlines() if "failed with code" in line]
    assert line.startswith("fdc_jax.paper: failed with code 1: Digits, ")
    assert "ZeroDivisionError" in line
    assert "Digits, Cumulative-LoRA, seed 1, after task 1/" in errors
    small_runs.results(tmp_path / "digits" / "cumulative_lora" / "seed_1")


@pytest.mark.ci
def test_ray_repeats_the_run_of_a_worker_that_dies(tmp_path, cache):
    pytest.importorskip("ray", reason="needs Ray: pip install 'fdc_jax[ray]'")
    folders = [tmp_path / "digits" / name / "seed_1" for name in ("cumulative_lora", "sd_lora")]
    driver = start(tmp_path, cache, "--seeds=1", "--ray", "--ray_gpus=0")
    small_runs.wait_for(folders[0], "training", driver)
    worker = int(files.holder(folders[0] / ".worker").split()[1])
    assert worker != driver.pid
    os.kill(worker, signal.SIGKILL)
    _, errors = small_runs.finish(driver)
    assert len(commands(folders[0])) == 2 and len(commands(folders[1])) == 1
    assert "stopped by SIGTERM" in (folders[0] / "log.txt").read_text()
    for folder in folders:
        small_runs.results(folder)
        small_runs.nothing_done_twice(folder)
    assert "0 runs left" in errors
    assert errors.count("after task 2/2") == 2
