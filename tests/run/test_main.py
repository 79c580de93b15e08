"""The command as a user meets it: exit codes, one line per mistake, exact resuming."""

import random
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from fdc_jax import command, evaluation
from fdc_jax.errors import InputError
from fdc_jax.posthoc import command as posthoc
from fdc_jax.run import seeds
from tests import small_runs
from tests.small_runs import finish, predictions, results, start


@pytest.mark.ci
def test_a_stopped_and_killed_run_ends_with_the_same_numbers(finished_run, tmp_path, cache):
    """SIGTERM within a task, SIGKILL between fit and evaluation; and what is on the screen."""
    workdir, never = tmp_path / "run", "--config.checkpoint.every_steps=1000000"
    process = start(workdir, never, cache=cache)
    small_runs.wait_for(workdir, "epoch", process)
    process.send_signal(signal.SIGTERM)
    _, beginning = finish(process, expected=75)
    assert beginning.splitlines()[-1] == "fdc_jax.run: stopped by SIGTERM; the same command resumes"
    assert "about" in beginning and "left" in beginning
    process = start(workdir, "--quiet", cache=cache)
    small_runs.wait_for(workdir, "statistics", process)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (workdir / "results.json").exists()
    output, errors = finish(start(workdir, cache=cache))
    small_runs.same_outcome(finished_run, workdir)
    small_runs.nothing_done_twice(workdir)
    for text in ("device", "precision parity", "trained parameters a task", "sha256", "digits"):
        assert text in beginning and text in errors
    assert "after task 2/2: raw " in errors
    assert "\x1b" not in output + errors
    for name, value in results(workdir)["accuracy"].items():
        assert f"{value:.2f}" in output, name
    assert "Task given" in output
    assert "report:" not in output
    assert "Warning" not in errors


@pytest.mark.slow
def test_runs_killed_at_random_end_with_the_same_numbers(tmp_path, cache):
    finish(start(tmp_path / "whole", "--quiet", cache=cache))
    # What is compiled by now takes no time in the runs to be killed.
    rng, clock = random.Random(0), time.monotonic()
    finish(start(tmp_path / "again", "--quiet", cache=cache))
    duration = time.monotonic() - clock
    for number in range(2):
        workdir, kills = tmp_path / f"killed_{number}", 0
        while kills < 3:
            process = start(workdir, "--quiet", cache=cache)
            try:
                process.communicate(timeout=rng.uniform(0.2, 0.9) * duration)
                break
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                kills += 1
        assert kills > 0
        finish(start(workdir, "--quiet", cache=cache))
        small_runs.same_outcome(tmp_path / "whole", workdir)
        small_runs.nothing_done_twice(workdir)


def test_results_fit_together(finished_run):
    """Their names are those of `tests/golden/results_keys.json`."""
    record = results(finished_run)
    assert (record["num_tasks"], record["num_classes"], record["num_test_images"]) == (2, 10, 60)
    assert record["selected"] == {"components": "full", "accuracy": record["accuracy"]["fdc"]}
    assert record["components"]["raw"] == record["accuracy"]["raw"]
    assert record["components"]["full"] == record["accuracy"]["fdc"]
    assert record["curve"][-1]["accuracy"] == record["accuracy"]
    for name, average in record["average_incremental_accuracy"].items():
        curve = [point["accuracy"][name] for point in record["curve"]]
        assert len(curve) == 2 and average == pytest.approx(np.mean(curve))
    assert record["fdc_storage_bytes"] == record["storage_bytes"]["fdc"] > 0
    assert record["notes"] == {"gaussians": "class Gaussians with drift compensation"}


def test_predictions_give_the_accuracies_of_the_results(finished_run):
    record, columns = results(finished_run), predictions(finished_run)
    assert columns.pop("class_names").tolist() == record["class_names"]
    assert columns.keys() == {
        "label",
        "raw_label",
        "fdc_label",
        "oracle_label",
        "fdc_oracle_label",
        "gaussians_label",
        "task",
        "raw_task",
        "fdc_task",
        "gaussians_task",
    }
    for name, share in record["accuracy"].items():
        right = columns[f"{name}_label"] == columns["label"]
        assert 100 * np.mean(right) == pytest.approx(share)
    for name, share in record["routing_accuracy"].items():
        assert 100 * np.mean(columns[f"{name}_task"] == columns["task"]) == pytest.approx(share)
        right = columns[f"{name}_label"] == columns["label"]
        by_task = evaluation.task_accuracies(columns["task"], right)
        assert_allclose(record["curve"][-1]["task_accuracy"][name], by_task)
    # Five classes a task, in class order.
    for label, task in (("label", "task"), ("oracle_label", "task"), ("fdc_label", "fdc_task")):
        assert_array_equal(columns[label] // 5, columns[task])


def test_saved_features_and_calibrator_repeat_the_results(finished_run, tmp_path):
    output = tmp_path / "calibrated.npz"
    for name in ("fdc", "gaussians"):
        arguments = [
            str(finished_run / "features"),
            f"--output={output}",
            f"--method={name}",
            "--quiet",
        ]
        assert posthoc.main(arguments) == 0
        with np.load(output) as again:
            assert_array_equal(again["raw_label"], predictions(finished_run)["raw_label"])
            assert_array_equal(again["label"], predictions(finished_run)[f"{name}_label"])


def test_a_finished_run_is_shown_again_with_its_report(
    finished_run, cache, tmp_path, caplog, capsys, no_figures
):
    workdir = small_runs.copied(finished_run, tmp_path / "run")
    before = (workdir / "metrics.jsonl").read_text()
    config = small_runs.config(cache, report=True)
    seeds.run(config, str(workdir))
    command.show(config, str(workdir))
    output, errors = capsys.readouterr()
    page = workdir / "report" / "report.html"
    assert output.endswith(f"results: {workdir / 'results.json'}\nreport: {page}\n")
    assert errors.endswith(f"{workdir}: is finished already\n")
    assert "after task" not in errors
    assert f"{results(workdir)['accuracy']['fdc']:.2f}" in page.read_text()
    assert (workdir / "metrics.jsonl").read_text() == before
    # That it cannot be written is a warning.
    shutil.rmtree(workdir / "report")
    (workdir / "report").write_text("in the way")
    command.show(config, str(workdir), quiet=True)
    assert caplog.records[-1].getMessage().startswith("no report was written: ")


@pytest.mark.ci
def test_a_full_disk_is_one_line(tmp_path, cache):
    """A limit on file sizes stands for the full disk; the work directory is the default one."""
    # Nor is a compiled program written whole, which other tests would read.
    apart = ("env", "JAX_ENABLE_COMPILATION_CACHE=false")
    limit = (*apart, "bash", "-c", 'ulimit -f 20 && exec "$@"', "-")
    process = start(None, "--quiet", cache=cache, before=limit, cwd=tmp_path)
    _, errors = finish(process, expected=2)
    line = errors.splitlines()[-1]
    assert line.startswith("fdc_jax.run: cannot write ")
    assert "runs/digits/" in line
    assert "Traceback" not in errors


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_signals_count_from_the_start(tmp_path, cache):
    """While modules are still imported, as soon as the handler is there."""
    process = start(tmp_path / "run", cache=cache)
    caught = 0
    while not caught >> (signal.SIGTERM - 1) & 1:
        status = Path(f"/proc/{process.pid}/status").read_text()
        caught = int(status.partition("SigCgt:")[2].split()[0], 16)
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = finish(process, expected=75)
    assert errors.splitlines()[-1] == "fdc_jax.run: stopped by SIGINT; the same command resumes"
    assert "Traceback" not in errors


SHOWS = """
import traceback

from fdc_jax.learners import Learner


class Shows(Learner):
    def before_task(self, *arguments):
        traceback.print_stack()
        raise SystemExit(4)
"""


@pytest.mark.ci
def test_five_frames_lead_from_the_command_to_the_task_loop(tmp_path, cache):
    (tmp_path / "shows.py").write_text(SHOWS)
    config = f"--config={small_runs.REPOSITORY / 'configs' / 'digits.py'}:shows"
    process = start("run", config, "--quiet", cache=cache, cwd=tmp_path)
    _, errors = finish(process, expected=4)
    files = [Path(file) for file in re.findall('File "(.*)", line', errors)]
    files_of_the_package = [file.name for file in files if "site-packages" not in file.parts]
    loop = files_of_the_package.index("experiment.py")
    assert files_of_the_package[:loop] == ["main.py", "command.py", "seeds.py", "seeds.py"]


def test_a_command_line_gives_a_configuration():
    arguments = (
        "--config digits:slca --config.seed 1,2 --config.classes_per_task 3,2 --noconfig.report"
    )
    order = ["--config.class_order=a,b", "--config.class_order_seed=-1"]
    config = command.configured([*arguments.split(), *order])
    assert (config.learner.name, config.seed, config.report) == ("slca", (1, 2), False)
    assert config.classes_per_task == (3, 2)
    assert command.configured(["--config=digits", "--config.classes_per_task=5"]) != config


def test_a_file_of_flags_may_name_another(tmp_path):
    inner, outer = tmp_path / "inner", tmp_path / "outer"
    inner.write_text("--config.train.epochs=3\n")
    outer.write_text(f"# fields\n--config=digits:slca\n--flagfile={inner}\n")
    for arguments in ([f"--flagfile={outer}"], ["--flagfile", str(outer)]):
        config = command.configured([*arguments, "--config.seed=2"])
        assert (config.learner.name, config.train.epochs, config.seed) == ("slca", 3, (2,))
    with pytest.raises(InputError, match=r"--config\.train\.epochs is given twice"):
        command.configured([f"--flagfile={outer}", "--config.train.epochs=4"])


@pytest.mark.ci
@pytest.mark.parametrize("name", ["rsiat", "loda"])  # with a schedule of its own; an update
def test_a_plan_times_the_steps_of_any_learner(name, cache, tmp_path):
    plan = seeds.check(small_runs.config(cache, learner__name=name), str(tmp_path / "run"))
    assert "needs      about " in plan and " GiB" in plan
    assert not (tmp_path / "run").exists()


@pytest.mark.ci
def test_several_seeds_write_a_summary(tmp_path, cache, capsys):
    config, workdir = small_runs.config(cache, seed=(1, 2), train__epochs=1), tmp_path / "run"
    collected = seeds.run(config, str(workdir))
    command.show(config, str(workdir))
    expected = [results(tmp_path / "run" / f"seed_{seed}") for seed in (1, 2)]
    assert [msgspec.to_builtins(result) for result in collected] == expected
    values = [result.accuracy["fdc"] for result in collected]
    output, errors = capsys.readouterr()
    assert f"{np.mean(values):.2f} ± {np.std(values, ddof=1):.2f}" in output
    assert "seed 2, after task 2/2" in errors
    # A seed alone is what it is among others.
    small_runs.run(small_runs.config(cache, seed=(2,), train__epochs=1), tmp_path / "two")
    small_runs.same_outcome(tmp_path / "two", tmp_path / "run" / "seed_2")
