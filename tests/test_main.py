"""The command as a user meets it: exit codes, one line per mistake, exact resuming."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from fdc_jax import command, evaluation
from fdc_jax.posthoc import __main__ as posthoc
from tests import interruptions, small_runs

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, cache):
    """One small run from start to end, and what it printed."""
    workdir = tmp_path_factory.mktemp("runs") / "whole"
    output, errors = interruptions.finish(interruptions.start(workdir, cache=cache))
    return workdir, output, errors


def results(workdir):
    return json.loads((workdir / "results.json").read_text())


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "main.py", *arguments],
        cwd=REPOSITORY,
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | environment,
        capture_output=True,
        text=True,
    )


def test_results_follow_the_contract(whole):
    workdir, _, _ = whole
    found = results(workdir)
    assert found.keys() >= {
        *("benchmark", "learner", "seed", "class_order_seed", "num_tasks", "num_classes"),
        *("num_test_images", "accuracy", "routing_accuracy", "average_incremental_accuracy"),
        *("components", "curve", "fdc_storage_bytes", "timing", "encoder", "config", "versions"),
    }
    assert (found["num_tasks"], found["num_classes"], found["num_test_images"]) == (5, 10, 200)
    assert found["accuracy"].keys() == {"raw", "fdc", "oracle"}
    assert found["components"].keys() == {
        *("raw", "tsf", "pac", "rlc", "tsf+pac", "tsf+rlc", "pac+rlc", "full"),
        *("adapted_view", "pretrained_view", "pac+rlc_adapted_view", "pac+rlc_pretrained_view"),
    }
    assert found["selected"] == {"components": "full", "accuracy": found["accuracy"]["fdc"]}
    assert found["components"]["raw"] == found["accuracy"]["raw"]
    assert found["components"]["full"] == found["accuracy"]["fdc"]
    assert len(found["curve"]) == 5
    assert found["curve"][-1]["accuracy"] == found["accuracy"]
    for name in ("raw", "fdc"):
        assert found["average_incremental_accuracy"][name] == pytest.approx(
            np.mean([point["accuracy"][name] for point in found["curve"]])
        )
    assert found["encoder"].keys() >= {"variant", "weights", "sha256", "input_range"}
    assert found["fdc_storage_bytes"] > 0
    assert found["versions"].keys() >= {"python", "jax", "flax", "numpy", "fdc_jax"}


def test_a_finished_run_is_shown_again_with_its_report(whole, cache):
    workdir, output, _ = whole
    assert "report:" not in output
    before = (workdir / "metrics.jsonl").read_text()
    again = interruptions.start(workdir, "--config.report=True", cache=cache)
    shown, errors = interruptions.finish(again)
    page = workdir / "report" / "report.html"
    assert shown == f"{output}report: {page}\n"
    assert errors.endswith(f"{workdir}: finished before, not done again\n")
    assert "after task" not in errors and "Traceback" not in errors
    assert f"{results(workdir)['accuracy']['fdc']:.2f}" in page.read_text()
    assert (workdir / "metrics.jsonl").read_text() == before


@pytest.mark.slow
def test_quiet_but_for_a_report_that_cannot_be_written(whole, cache):
    workdir, _, _ = whole
    blocked = workdir / "report"
    shutil.rmtree(blocked, ignore_errors=True)
    blocked.write_text("in the way")
    again = interruptions.start(workdir, "--config.report=True", "--quiet", cache=cache)
    output, errors = interruptions.finish(again)
    assert output == ""
    assert errors.startswith("fdc_jax: WARNING: no report was written: ")
    assert errors.count("\n") == 1


def test_predictions_give_the_accuracies_of_the_results(whole):
    workdir, _, _ = whole
    found = results(workdir)
    with np.load(workdir / "predictions.npz") as file:
        columns = {name: file[name] for name in file.files}
    assert columns.keys() == {
        *("label", "raw_label", "fdc_label", "oracle_label", "fdc_oracle_label"),
        *("task", "raw_task", "fdc_task"),
    }
    for name in ("raw", "fdc", "oracle"):
        share = 100 * np.mean(columns[f"{name}_label"] == columns["label"])
        assert share == pytest.approx(found["accuracy"][name])
    for name in ("raw", "fdc"):
        share = 100 * np.mean(columns[f"{name}_task"] == columns["task"])
        assert share == pytest.approx(found["routing_accuracy"][name])
    # Two classes a task, in class order.
    np.testing.assert_array_equal(columns["label"] // 2, columns["task"])
    np.testing.assert_array_equal(columns["oracle_label"] // 2, columns["task"])
    np.testing.assert_array_equal(columns["fdc_label"] // 2, columns["fdc_task"])
    for name in ("raw", "fdc"):
        found_by_task = evaluation.task_accuracies(
            columns["task"], columns["label"], columns[f"{name}_label"], 5
        )
        np.testing.assert_allclose(found["curve"][-1]["task_accuracy"][name], found_by_task)


def test_saved_features_and_calibrator_repeat_the_results(whole, tmp_path):
    workdir, _, _ = whole
    output = tmp_path / "calibrated.npz"
    assert posthoc.main([str(workdir / "features"), f"--output={output}", "--quiet"]) == 0
    with (
        np.load(output) as again,
        np.load(workdir / "predictions.npz") as first,
    ):
        np.testing.assert_array_equal(again["raw_label"], first["raw_label"])
        np.testing.assert_array_equal(again["label"], first["fdc_label"])


def test_screen(whole):
    workdir, output, errors = whole
    for text in ("device", "precision parity", "trained parameters a task", "sha256", "digits"):
        assert text in errors
    assert "after task 5/5: raw " in errors
    assert "\x1b" not in output + errors
    found = results(workdir)
    for name in ("raw", "fdc", "oracle"):
        assert f"{found['accuracy'][name]:.2f}" in output
    assert "task given" in output
    assert "Warning" not in errors


def test_killed_and_stopped_runs_end_with_the_same_numbers(whole, tmp_path, cache):
    """SIGTERM within a task, then SIGKILL between fit and evaluation."""
    workdir = tmp_path / "run"
    never = "--config.checkpoint.every_steps=1000000"
    process = interruptions.start(workdir, never, cache=cache)
    interruptions.wait_for(workdir, "epoch", process)
    process.send_signal(signal.SIGTERM)
    _, errors = interruptions.finish(process, expected=75)
    assert errors.splitlines()[-1] == "fdc_jax: error: stopped by SIGTERM"
    assert "about" in errors and "left" in errors
    process = interruptions.start(workdir, "--quiet", cache=cache)
    interruptions.wait_for(workdir, "statistics", process, count=3)
    process.kill()
    process.communicate()
    assert not (workdir / "results.json").exists()
    interruptions.finish(interruptions.start(workdir, "--quiet", cache=cache))
    interruptions.same_outcome(whole[0], workdir)
    interruptions.nothing_done_twice(workdir)


@pytest.mark.slow
def test_runs_killed_at_random_end_with_the_same_numbers(tmp_path, cache):
    assert interruptions.run_with_kills(tmp_path, kills=4, seed=0, cache=cache) == 4


def test_a_full_disk_is_one_line(tmp_path, cache):
    """A limit on file sizes stands for the full disk."""
    program = "import resource, runpy, signal, sys; sys.argv = sys.argv[1:]; "
    program += "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    program += "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)); "
    program += "runpy.run_path('main.py', run_name='__main__')"
    done = subprocess.run(
        [
            *(sys.executable, "-c", program, "main.py", *interruptions.SMALL, "--quiet"),
            f"--workdir={tmp_path / 'run'}",
        ],
        cwd=REPOSITORY,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "FDC_JAX_CACHE": str(cache)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith("fdc_jax: error: cannot write ")
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_signals_count_from_the_start(tmp_path, cache):
    """While modules are still imported, as soon as the handler is there."""
    process = interruptions.start(tmp_path / "run", cache=cache)
    caught = 0
    while not caught >> (signal.SIGTERM - 1) & 1:
        status = Path(f"/proc/{process.pid}/status").read_text()
        caught = int(status.partition("SigCgt:")[2].split()[0], 16)
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = interruptions.finish(process, expected=75)
    assert errors.splitlines()[-1] == "fdc_jax: error: stopped by SIGINT"
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (
            "--config.trian.epochs=3",
            "--config.trian.epochs: the configuration has no such field; did you mean "
            "--config.train.epochs",
        ),
        (
            "--confg.seed=1",
            "--confg.seed: the configuration has no such field; did you mean --config.seed",
        ),
        (
            "--config.train.rank=97",
            "config.train.rank: expected at most 96, the width of encoder digits",
        ),
        ("--wrokdir=here", "Unknown command line flag 'wrokdir'. Did you mean: workdir"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("--config.train.epochs=abc", "config.train.epochs=abc: invalid literal for int()"),
                ("--config.learner.name=none", "learner.name: expected one of cumulative_lora"),
                ("--config=configs/nowhere.py", "No such file or directory: 'configs/nowhere.py'"),
                ("surplus", "unexpected argument 'surplus'"),
            )
        ),
    ],
)
def test_mistakes_get_one_line(argument, message, tmp_path):
    done = run("--config=configs/digits.py", f"--workdir={tmp_path / 'run'}", argument)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("fdc_jax: error: ")
    assert message in line
    assert not (tmp_path / "run").exists()


# Two of the five questions; the others are answered as by Cumulative-LoRA.
LEARNER = """
from fdc_jax.learners import Option, training

TITLE = "Mine"
OPTIONS = {"reach": Option(1, "[1, 5]", "how far")}


def start(setup, backbone, state, task, key):
    head = training.new_linear_head(key, setup.head_rows, setup.variant.width)
    return {"class_mask": setup.class_mask(task)}, {"head": head}


def loss(setup, backbone, frozen, trained, batch):
    features = setup.model.apply({"params": backbone}, batch.images)
    logits = trained["head"].logits(features) / setup.config.learner.mine.reach
    return training.cross_entropy(logits, batch.labels, frozen["class_mask"], batch.weights)
"""


def test_a_learner_of_the_users_own_and_the_default_work_directory(tmp_path, cache):
    (tmp_path / "mine.py").write_text(LEARNER)
    done = subprocess.run(
        [
            *(sys.executable, str(REPOSITORY / "main.py"), "--quiet"),
            f"--config={REPOSITORY / 'configs' / 'digits.py'}",
            *("--config.learner.name=mine", "--config.learner.mine.reach=3"),
            *("--config.train.epochs=1", "--config.report=False", "--config.classes_per_task=5"),
            *("--config.data.train_per_class=4", "--config.data.test_per_class=2"),
        ],
        cwd=tmp_path,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "FDC_JAX_CACHE": str(cache)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = results(tmp_path / "runs" / "digits")
    assert found["learner"] == "mine"
    assert found["config"]["learner.mine.reach"] == 3


def test_several_seeds(tmp_path, cache, capsys):
    found = small_runs.config(cache, 6, 6, seed=(1, 2))
    summary = command.run(found, str(tmp_path / "run"))
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary
    per_seed = [results(tmp_path / "run" / f"seed_{seed}") for seed in (1, 2)]
    values = [each["accuracy"]["fdc"] for each in per_seed]
    assert summary["accuracy"]["fdc"]["mean"] == pytest.approx(np.mean(values))
    assert summary["accuracy"]["fdc"]["std"] == pytest.approx(np.std(values, ddof=1))
    gains = [each["accuracy"]["fdc"] - each["accuracy"]["raw"] for each in per_seed]
    assert summary["gain"]["mean"] == pytest.approx(np.mean(gains))
    output, errors = capsys.readouterr()
    assert f"{np.mean(values):.2f} ± {np.std(values, ddof=1):.2f}" in output
    assert "seed 2, after task 2/2" in errors
    # A seed alone is what it is among others.
    alone = command.run(small_runs.config(cache, 6, 6, seed=(2,)), str(tmp_path / "two"), True)
    assert alone["accuracy"] == per_seed[1]["accuracy"]


@pytest.mark.slow
def test_four_devices_give_what_one_gives(whole, tmp_path, cache):
    """Each batch is split between devices; features agree to float tolerance."""
    done = run(
        *interruptions.SMALL,
        f"--workdir={tmp_path / 'run'}",
        "--config.train.batch_size=18",  # no multiple of four
        XLA_FLAGS="--xla_force_host_platform_device_count=4",
        FDC_JAX_CACHE=str(cache),
    )
    assert done.returncode == 0, done.stderr
    assert "device     4 x cpu" in done.stderr
    single = tmp_path / "single"
    interruptions.finish(
        interruptions.start(single, "--config.train.batch_size=18", "--quiet", cache=cache)
    )
    ours, expected = (
        np.load(folder / "features" / "test_adapted.npy") for folder in (tmp_path / "run", single)
    )
    scale = np.abs(expected).max()
    np.testing.assert_allclose(ours, expected, atol=2e-3 * scale)
    assert results(tmp_path / "run")["accuracy"]["fdc"] == pytest.approx(
        results(single)["accuracy"]["fdc"], abs=1.0
    )
