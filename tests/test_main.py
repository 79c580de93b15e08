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

from fdc_jax.report import confusion
from tests import interruptions

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


def test_a_finished_run_ends_with_its_report(whole, cache):
    workdir, output, _ = whole
    assert "report:" not in output
    again = interruptions.start(workdir, "--config.report=True", cache=cache)
    output, errors = interruptions.finish(again)
    page = workdir / "report" / "report.html"
    assert output.splitlines()[-1] == f"report: {page}"
    assert "Traceback" not in errors
    text = page.read_text()
    assert f"{results(workdir)['accuracy']['fdc']:.2f}" in text
    assert {"benchmark.csv", "benchmark.md", "benchmark.tex"} <= {
        path.name for path in (workdir / "report" / "tables").iterdir()
    }
    assert list((workdir / "report" / "figures").glob("*.svg"))


def test_a_report_that_cannot_be_written_is_a_warning(whole, cache):
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
    per_task = confusion.task_confusion(columns)
    for name in ("raw", "fdc"):
        for share in confusion.SHARES:
            together = np.average(per_task[name][share], weights=per_task["num_images"])
            assert together == pytest.approx(found["decomposition"][name][share])


def test_saved_features_and_calibrator_repeat_the_results(whole, tmp_path):
    workdir, _, _ = whole
    output = tmp_path / "calibrated.npz"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "fdc_jax.posthoc", str(workdir / "features")),
            *(f"--output={output}", "--quiet"),
        ],
        cwd=REPOSITORY,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
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


def test_a_finished_run_is_shown_again_not_run_again(whole, cache):
    workdir, output, _ = whole
    before = (workdir / "metrics.jsonl").read_text()
    again, errors = interruptions.finish(interruptions.start(workdir, cache=cache))
    assert again == output
    assert "after task" not in errors
    assert errors.endswith(f"{workdir}: finished before, not done again\n")
    assert (workdir / "metrics.jsonl").read_text() == before


def test_quiet(whole, cache):
    workdir, _, _ = whole
    assert interruptions.finish(interruptions.start(workdir, "--quiet", cache=cache)) == ("", "")


def test_killed_runs_end_with_the_same_numbers(whole, tmp_path, cache):
    assert interruptions.run_with_kills(tmp_path, kills=3, seed=0, cache=cache) == 3
    interruptions.same_outcome(whole[0], tmp_path / "whole")


def test_sigterm_saves_and_exits_with_its_own_code(whole, tmp_path, cache):
    workdir = tmp_path / "run"
    never = "--config.checkpoint.every_steps=1000000"
    process = interruptions.start(workdir, never, cache=cache)
    interruptions.wait_for(workdir, "epoch", process)
    process.send_signal(signal.SIGTERM)
    _, errors = interruptions.finish(process, expected=75)
    assert errors.splitlines()[-1] == "fdc_jax: error: stopped by SIGTERM"
    assert list((workdir / "checkpoints").iterdir())
    interruptions.finish(interruptions.start(workdir, never, "--quiet", cache=cache))
    interruptions.same_outcome(whole[0], workdir)
    interruptions.nothing_done_twice(workdir)


def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(whole, tmp_path, cache):
    workdir = tmp_path / "run"
    process = interruptions.start(workdir, cache=cache)
    interruptions.wait_for(workdir, "evaluation", process, count=3)
    process.kill()
    process.communicate()
    numbers = [
        int(path.name) for path in (workdir / "checkpoints").iterdir() if path.name.isdigit()
    ]
    assert len(numbers) == 2
    newest = workdir / "checkpoints" / str(max(numbers))
    for path in newest.rglob("*"):
        if path.is_file() and path.parent.name == "d":
            path.write_bytes(path.read_bytes()[:20])
    _, errors = interruptions.finish(interruptions.start(workdir, cache=cache))
    assert f"checkpoint {newest} is unusable" in errors
    assert (workdir / f"checkpoints_unusable_{max(numbers)}").is_dir()
    interruptions.same_outcome(whole[0], workdir)


def test_without_its_calibrators_a_run_starts_again(whole, tmp_path, cache):
    workdir = tmp_path / "run"
    process = interruptions.start(workdir, cache=cache)
    interruptions.wait_for(workdir, "evaluation", process, count=2)
    process.kill()
    process.communicate()
    shutil.rmtree(workdir / "calibrators")
    _, errors = interruptions.finish(interruptions.start(workdir, cache=cache))
    assert "its calibrator is missing" in errors
    interruptions.same_outcome(whole[0], workdir)


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


def test_another_configuration_is_refused(whole, cache):
    workdir, _, _ = whole
    process = interruptions.start(workdir, "--config.train.rank=3", cache=cache)
    _, errors = interruptions.finish(process, expected=2)
    assert errors.splitlines()[-1].startswith("fdc_jax: error: ")
    assert "train.rank was 10, is 3" in errors
    assert "Traceback" not in errors


def test_other_weights_at_the_same_path_are_refused(tmp_path, cache):
    weights = tmp_path / "weights.npz"
    original = (REPOSITORY / "fdc_jax" / "assets" / "digits_vit.npz").read_bytes()
    weights.write_bytes(original)
    options = (f"--config.encoder.weights={weights}", "--quiet")
    process = interruptions.start(tmp_path / "run", *options, cache=cache)
    interruptions.wait_for(tmp_path / "run", "evaluation", process)
    process.kill()
    process.communicate()
    with np.load(weights) as file:
        arrays = {name: file[name] * 1.01 for name in file.files}
    np.savez(weights, **arrays)
    process = interruptions.start(tmp_path / "run", *options, cache=cache)
    _, errors = interruptions.finish(process, expected=2)
    assert "weights sha256 was " in errors


def test_folders_of_one_seed_and_of_several_do_not_mix(whole, tmp_path, cache):
    workdir, _, _ = whole
    process = interruptions.start(workdir, "--config.seed=1,2", cache=cache)
    _, errors = interruptions.finish(process, expected=2)
    assert "holds a run of a single seed" in errors
    (tmp_path / "several" / "seed_1").mkdir(parents=True)
    process = interruptions.start(tmp_path / "several", cache=cache)
    _, errors = interruptions.finish(process, expected=2)
    assert "holds runs of several seeds" in errors
    (tmp_path / "file").write_bytes(b"")
    process = interruptions.start(tmp_path / "file", cache=cache)
    _, errors = interruptions.finish(process, expected=2)
    assert "expected a folder to write in" in errors


@pytest.mark.parametrize("delay", [0.3, 1.0, 2.0])
def test_signals_count_from_the_start(tmp_path, cache, delay):
    process = interruptions.start(tmp_path / "run", cache=cache)
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    _, errors = interruptions.finish(process, expected=75)
    assert errors.splitlines()[-1] == "fdc_jax: error: stopped by SIGINT"
    assert "Traceback" not in errors


def test_nan_stops_with_task_and_learning_rate(tmp_path, cache):
    workdir = tmp_path / "run"
    process = interruptions.start(
        workdir, "--config.train.head_learning_rate=1e38", "--quiet", cache=cache
    )
    _, errors = interruptions.finish(process, expected=3)
    assert "the loss is nan in task 1, epoch 1, step " in errors
    assert "1e+38 (head)" in errors
    assert not (workdir / "results.json").exists()


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--config.train.speed=3", "--config.train.speed: the configuration has no such field"),
        ("--config.trian.epochs=3", "--config.trian.epochs: the configuration has no such field"),
        ("--config.train.epochs=abc", "flag --config.train.epochs=abc: invalid literal for int()"),
        ("--config.train.rank=0", "config.train.rank: expected at least 1, found 0"),
        (
            "--config.fdc.retained_energy=1.2",
            "config.fdc.retained_energy: expected 0 < x <= 1, found 1.2",
        ),
        ("--config.classes_per_task=11", "config.classes_per_task: expected at most the 10"),
        ("--config.encoder.weights=/nowhere.npz", "found no file /nowhere.npz"),
        (
            "--config.encoder.variant=Ti/16",
            "digits_vit.npz: not the weights of encoder.variant Ti/16",
        ),
        ("--config.encoder.image_size=30", "encoder.image_size: expected a positive multiple of"),
        ("--config.benchmark=mnist", "benchmark must be one of "),
        ("--config.benchmark=cifar100", "cifar100 is not prepared: expected it in "),
        ("--config.precision=double", "precision: expected one of parity, fast, found 'double'"),
        ("--config.learner.name=none", "learner.name: expected one of cumulative_lora"),
        ("surplus", "unexpected argument 'surplus'"),
    ],
)
def test_mistakes_get_one_line(argument, message, tmp_path):
    done = run(
        "--config=configs/digits.py",
        f"--workdir={tmp_path / 'run'}",
        f"--config.data.dir={tmp_path}",
        argument,
        FDC_JAX_CACHE=str(tmp_path / "cache"),
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("fdc_jax: error: ")
    assert message in line
    assert not (tmp_path / "run").exists()


def test_missing_configuration_file(tmp_path):
    done = run("--config=configs/nowhere.py", f"--workdir={tmp_path / 'run'}")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("fdc_jax: error: --config: ")
    assert "No such file or directory: 'configs/nowhere.py'" in line


def test_several_seeds(tmp_path, whole, cache):
    workdir = tmp_path / "run"
    output, _ = interruptions.finish(
        interruptions.start(workdir, "--config.seed=1,2,3", cache=cache)
    )
    summary = json.loads((workdir / "summary.json").read_text())
    per_seed = [results(workdir / f"seed_{seed}") for seed in (1, 2, 3)]
    interruptions.same_outcome(whole[0], workdir / "seed_1")
    values = [each["accuracy"]["fdc"] for each in per_seed]
    assert len(set(values)) > 1
    assert summary["accuracy"]["fdc"]["mean"] == pytest.approx(np.mean(values))
    assert summary["accuracy"]["fdc"]["std"] == pytest.approx(np.std(values, ddof=1))
    gains = [each["accuracy"]["fdc"] - each["accuracy"]["raw"] for each in per_seed]
    assert summary["gain"]["mean"] == pytest.approx(np.mean(gains))
    assert f"{np.mean(values):.2f} ± {np.std(values, ddof=1):.2f}" in output


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
