"""The command as a user meets it: exit codes, results, exact resuming."""

import contextlib
import random
import shutil
import signal
import subprocess

import msgspec
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from fdc_jax import evaluation, run_command
from fdc_jax.learners import Learner
from fdc_jax.report import analysis
from fdc_jax.run import seeds
from tests import small_runs
from tests.small_runs import finish, predictions, results, start


@pytest.mark.ci
def test_a_stopped_run_ends_with_the_same_numbers(finished_run, tmp_path, cache, capsys):
    """SIGTERM within a task; and what is on the screen."""
    workdir, never = tmp_path / "run", "--config.checkpoint.every_steps=1000000"
    process = start(workdir, never, cache=cache)
    small_runs.wait_for(workdir, "epoch", process)
    process.send_signal(signal.SIGTERM)
    _, beginning = finish(process, expected=75)
    assert beginning.splitlines()[-1] == "fdc_jax.run: stopped by SIGTERM; the same command resumes"
    assert "about" in beginning and "left" in beginning and "Warning" not in beginning
    config = small_runs.config(cache)
    seeds.run(config, str(workdir))
    run_command.show(config, str(workdir))
    output, errors = capsys.readouterr()
    small_runs.same_outcome(finished_run, workdir)
    small_runs.nothing_done_twice(workdir)
    for text in ("device", "precision parity", "trained parameters a task", "sha256", "digits"):
        assert text in beginning and text in errors
    assert "after task 2/2: raw " in errors and "\x1b" not in output + errors
    for accuracy in results(workdir)["accuracy"].values():
        assert f"{accuracy:.2f}" in output


@pytest.mark.slow
def test_run_killed_at_random_ends_with_the_same_numbers(finished_run, tmp_path, cache):
    rng, workdir = random.Random(0), tmp_path / "run"
    for _ in range(4):
        process = start(workdir, "--quiet", cache=cache)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=rng.uniform(5, 15))
        process.kill()
        process.communicate()
    finish(start(workdir, "--quiet", cache=cache))
    small_runs.same_outcome(finished_run, workdir)
    small_runs.nothing_done_twice(workdir)


COLUMNS = """
class_names label task raw_label raw_task fdc_label fdc_task fdc_oracle_label gaussians_label
gaussians_task oracle_label
""".split()


def test_predictions_give_the_accuracies_of_the_results(finished_run):
    record, columns = results(finished_run), predictions(finished_run)
    assert sorted(columns) == sorted(COLUMNS)
    assert columns["class_names"].tolist() == record["class_names"]
    accuracy, last = record["accuracy"], record["curve"][-1]
    assert record["selected"] == {"components": "full", "accuracy": accuracy["fdc"]}
    assert last["accuracy"] == accuracy
    for name in accuracy:
        right = columns[f"{name}_label"] == columns["label"]
        assert 100 * np.mean(right) == pytest.approx(accuracy[name])
        assert last["task_accuracy"][name] == evaluation.task_accuracies(columns["task"], right)
    for name, routing in record["routing_accuracy"].items():
        assert 100 * np.mean(columns[f"{name}_task"] == columns["task"]) == pytest.approx(routing)
    # Five classes a task, in class order.
    assert_array_equal(columns["oracle_label"] // 5, columns["task"])
    assert_array_equal(columns["fdc_label"] // 5, columns["fdc_task"])


def test_a_fit_of_saved_features_repeats_the_results(finished_run, tmp_path):
    for name in ("fdc", "gaussians"):
        small_runs.check_fit_again(finished_run, tmp_path / "again.npz", name)


def test_a_finished_run_is_shown_again_with_its_report(
    finished_run, cache, tmp_path, caplog, capsys, no_figures, monkeypatch
):
    monkeypatch.setattr("fdc_jax.report.runs.analyse", lambda group, sweep: group)
    monkeypatch.setitem(analysis.UNTRAINED, "ranpac-pretrained", {"projections": 100})
    workdir = small_runs.copied(finished_run, tmp_path / "run")
    before = (workdir / "metrics.jsonl").read_text()
    config = small_runs.config(cache, report=True)
    seeds.run(config, str(workdir))
    run_command.show(config, str(workdir))
    output, errors = capsys.readouterr()
    page = workdir / "report" / "report.html"
    assert output.endswith(f"results: {workdir / 'results.json'}\nreport: {page}\n")
    assert errors.endswith(f"{workdir}: is finished already\n") and page.exists()
    assert (workdir / "metrics.jsonl").read_text() == before
    # A report that cannot be written is a warning.
    shutil.rmtree(workdir / "report")
    (workdir / "report").write_text("in the way")
    run_command.show(config, str(workdir), quiet=True)
    assert caplog.records[-1].getMessage().startswith("no report was written: ")


def test_five_frames_lead_from_the_command_to_the_task_loop(tmp_path, cache, monkeypatch):
    """Before them are those of main.py and run_command.py."""
    monkeypatch.setattr(Learner, "before_task", None)
    with pytest.raises(TypeError) as caught:
        seeds.run(small_runs.config(cache), str(tmp_path / "run"), quiet=True)
    names = [entry.path.name for entry in caught.traceback]
    assert names[: names.index("experiment.py")] == ["test_main.py", "seeds.py", "seeds.py"]


def test_a_command_line_gives_a_configuration():
    arguments = """
    --config digits:slca --config.seed 1,2 --config.classes_per_task 3,2 --noconfig.report
    --config.class_order=a,b --config.class_order_seed=-1
    """
    config = run_command.configured(arguments.split())
    assert (config.learner.name, config.seed, config.report) == ("slca", (1, 2), False)
    assert (config.classes_per_task, config.class_order) == ((3, 2), ("a", "b"))


@pytest.mark.ci
def test_a_plan_times_the_steps_of_any_learner(cache, tmp_path):
    """Here of one that measures moments before the training of a task."""
    plan = seeds.check(small_runs.config(cache, learner__name="splitlora"), str(tmp_path / "run"))
    assert "needs      about " in plan and " GiB" in plan
    assert not (tmp_path / "run").exists()


@pytest.mark.ci
def test_several_seeds_write_a_summary(finished_run, tmp_path, cache, capsys):
    workdir = tmp_path / "run"
    small_runs.copied(finished_run, workdir / "seed_1")
    config = small_runs.config(cache, seed=(2, 1))
    collected = seeds.run(config, str(workdir))
    run_command.show(config, str(workdir))
    for seed, result in zip((2, 1), collected, strict=True):
        assert msgspec.to_builtins(result) == results(workdir / f"seed_{seed}")
    values = [result.accuracy["fdc"] for result in collected]
    output, errors = capsys.readouterr()
    assert f"{np.mean(values):.2f} ± {np.std(values, ddof=1):.2f}" in output
    assert "seed 2, after task 2/2" in errors
