import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from fdc_jax import calibration
from fdc_jax.calibration import METHODS, drift
from fdc_jax.features import feature_files
from fdc_jax.posthoc.__main__ import main
from fdc_jax.posthoc.template import example

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"num_tasks": 3, "classes_per_task": 2, "width": 10, "per_class": 12, "test_per_class": 8}


@pytest.fixture(scope="module")
def arrays():
    return example(**SMALL)


@pytest.fixture(scope="module")
def source(tmp_path_factory, arrays):
    path = tmp_path_factory.mktemp("features") / "features.npz"
    np.savez(path, **arrays)
    return path


def run(*arguments):
    """Exit code, standard output and standard error of one command."""
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        code = main([str(argument) for argument in arguments])
    return code, out.getvalue(), error.getvalue()


def fails(*arguments):
    """The single line of a refused command."""
    code, out, error = run(*arguments)
    assert code == 2
    assert not out
    assert error.startswith("fdc_jax.posthoc: ")
    assert error.count("\n") == 1
    return error


@pytest.fixture(scope="module")
def fdc(tmp_path_factory, source):
    """Files of one run."""
    output = tmp_path_factory.mktemp("results") / "deep" / "calibrated.npz"
    code, _, error = run(source, f"--output={output}")
    assert (code, error) == (0, "")
    with np.load(output) as stored:
        result = dict(stored)
    report = json.loads(output.with_suffix(".json").read_text())
    assert sorted(file.name for file in output.parent.iterdir()) == [
        "calibrated.json",
        "calibrated.npz",
    ]
    return result, report


@pytest.mark.parametrize("method", ["fdc", "gaussians", "ncm-pretrained"])
def test_predictions_are_the_librarys(source, tmp_path, method):
    output, saved = tmp_path / "x.npz", tmp_path / "calibrator.npz"
    settings = {"rlc_weight": 0.5, "retained_energy": 0.9} if method == "fdc" else {}
    words = [f"--{name}={value}" for name, value in settings.items()]
    words += [f"--output={output}", f"--method={method}", f"--calibrator={saved}"]
    code, out, error = run(source, *words)
    assert (code, error) == (0, "")
    assert out.splitlines()[3].split()[0] == method
    features, calibrator = feature_files.load(source), calibration.make(method, **settings)
    inputs = (features.test_adapted, features.test_pretrained)
    scores = features.fit(calibrator).score(*inputs)
    with np.load(output) as result:
        assert set(result) == {"scores", "task", "label", "raw_label"}
        np.testing.assert_array_equal(result["scores"], scores.task_scores)
        np.testing.assert_array_equal(result["task"], scores.task)
        np.testing.assert_array_equal(result["label"], scores.label)
        raw = features.fit(calibration.make("raw")).score(*inputs)
        np.testing.assert_array_equal(result["raw_label"], raw.label)
    report = json.loads(output.with_suffix(".json").read_text())
    assert report["method"] == method
    assert report["storage_bytes"] == calibrator.storage_bytes
    assert settings.items() <= report["settings"].items()
    assert report["component_accuracy"]["full"] == report["accuracy"]["calibrated"]
    assert calibrator.note == report["note"] and calibrator.note in out
    again = calibration.load(saved).score(*inputs)
    np.testing.assert_array_equal(again.label, scores.label)


def test_report_counts_what_the_predictions_say(fdc, arrays):
    result, report = fdc
    truth = arrays["test_labels"]

    def percent(right):
        return pytest.approx(100 * np.mean(right))

    accuracy = report["accuracy"]
    assert accuracy["raw"] == percent(result["raw_label"] == truth)
    assert accuracy["calibrated"] == percent(result["label"] == truth)
    assert report["routing_accuracy"]["calibrated"] == percent(result["task"] == truth // 2)
    assert report["gain"]["mean"] == pytest.approx(accuracy["calibrated"] - accuracy["raw"])
    expected = np.zeros((3, 3), int)
    np.add.at(expected, (truth // 2, result["task"]), 1)
    np.testing.assert_array_equal(report["task_confusion"]["calibrated"], expected)
    assert report["num_changed_labels"] == np.sum(result["label"] != result["raw_label"])
    assert report["settings"]["retained_energy"] == 0.75
    assert {"fdc_jax", "jax", "numpy"} <= set(report["versions"])
    assert (report["num_tasks"], report["num_classes"]) == (3, 6)


def test_all_methods_in_one_table(source, tmp_path):
    output = tmp_path / "all.npz"
    code, out, error = run(source, "--method=all", "--projections=50", f"--output={output}")
    assert (code, error) == (0, "")
    rows = {line.split()[0] for line in out.splitlines()[2:]}
    assert set(METHODS) <= rows
    reports = json.loads(output.with_suffix(".json").read_text())["methods"]
    assert [report["method"] for report in reports] == list(METHODS)
    by_name = {report["method"]: report for report in reports}
    assert by_name["raw"]["gain"]["mean"] == 0
    assert by_name["ranpac"]["settings"] == {"projections": 50}
    assert by_name["fdc"]["accuracy"]["calibrated"] > by_name["raw"]["accuracy"]["raw"]
    with np.load(output) as result:
        accuracy = 100 * np.mean(result["label"] == feature_files.load(source).test_labels)
    assert accuracy == pytest.approx(by_name["fdc"]["accuracy"]["calibrated"])


def test_methods_that_do_not_apply_say_why(tmp_path, arrays, monkeypatch):
    few = {name: METHODS[name] for name in ("raw", "fdc", "wa", "vim", "ncm-pretrained")}
    monkeypatch.setattr("fdc_jax.posthoc.__main__.METHODS", few)
    one_view = {k: v for k, v in arrays.items() if "pretrained" not in k and "bias" not in k}
    path = tmp_path / "cosine.npz"
    np.savez(path, **one_view, head_kind="cosine")
    code, out, _ = run(path, "--method=all", "--neighbours=2")
    assert code == 0
    assert "wa: not applicable: wa: needs linear heads, the head of task 0 is a CosineHead" in out
    assert "ncm-pretrained: not applicable: ncm: expected pretrained features of task 0" in out
    assert "\nfdc " in out
    assert "needs linear heads" in fails(path, "--method=vim")


def test_without_test_labels(tmp_path, arrays):
    path, output = tmp_path / "features", tmp_path / "x.npz"
    path.mkdir()
    for name, array in arrays.items():
        if name != "test_labels":
            np.save(path / f"{name}.npy", array)
    code, out, _ = run(path, f"--output={output}")
    assert code == 0
    assert "no test_labels, so no accuracy" in out
    assert "follow the encoder" in run(path, f"--output={output}", "--method=gaussians")[1]
    report = json.loads(output.with_suffix(".json").read_text())
    assert "accuracy" not in report
    assert report["num_changed_labels"] > 0
    assert "no test_labels, so expected --output" in fails(path)
    assert "no test_labels" in fails(path, "--method=all", f"--output={output}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "expected a feature file"),
        ("source.npz --method=fcd", "found 'fcd'; did you mean fdc?"),
        ("source.npz --retained_energy=2", "retained_energy: expected"),
        ("source.npz --method=ncm --attenuation=1", "--attenuation: is no setting of ncm"),
        ("source.npz --output=x.json", "ends in .npz"),
        ("cut.npz", "not a readable .npz file: it is damaged, or ends early"),
        ("source.npz --method=all --calibrator=e.npz", "--calibrator: expected together"),
        ("source.npz --method=ranpac --projections=0", "--projections: expected at least 1"),
        ("bad.npz --output=x.npz", "adapted features: row 0"),
        # No file overwrites another.
        ("source.npz --output=source.npz", "is the feature file itself"),
    ],
)
def test_refusals_are_one_line_and_write_nothing(
    source, arrays, tmp_path, monkeypatch, arguments, message
):
    monkeypatch.chdir(tmp_path)
    Path("source.npz").symlink_to(source)
    Path("cut.npz").write_bytes(source.read_bytes()[:3000])
    Path("c.npz").write_text("kept")
    np.savez("bad.npz", **arrays | {"test_adapted": np.full((48, 10), np.nan)})
    before = {path.name for path in tmp_path.iterdir()}
    assert message in fails(*arguments.split())
    assert Path("c.npz").read_text() == "kept"
    assert {path.name for path in tmp_path.iterdir()} == before


def test_a_traceback_on_request(tmp_path):
    code, _, error = run(tmp_path / "absent.npz", "--traceback")
    assert code == 2 and "Traceback" in error


def test_heads_that_know_nothing_are_named(tmp_path):
    path, arrays = tmp_path / "x.npz", example(3, 6, width=24, per_class=12, test_per_class=8)
    np.savez(path, **arrays | {"head_weight_1": np.roll(arrays["head_weight_1"], 1, 0)})
    # Once, though FDC reads the heads, too.
    (said,) = run(path)[2].splitlines()
    assert said.startswith("fdc_jax.posthoc: WARNING: task 1 (from 0): its head is right about 0.0")
    assert run(path, "--quiet")[2] == ""


def test_template_is_reproducible_and_fdc_helps_on_it(tmp_path):
    path = tmp_path / "example.npz"
    code, out, _ = run(f"--template={path}")
    assert code == 0
    assert "torch.no_grad" in out
    features = feature_files.load(path)
    np.testing.assert_array_equal(features.test_adapted, example()["test_adapted"])
    code, out, _ = run(path, f"--output={tmp_path / 'x.npz'}")
    report = json.loads((tmp_path / "x.json").read_text())
    assert 20 < report["gain"]["mean"] < 60
    assert report["accuracy"]["calibrated"] < report["accuracy"]["oracle"]
    assert "exists already" in fails(f"--template={path}")
    assert "ends in .npz" in fails(f"--template={tmp_path / 'x.npy'}")


def test_the_dumping_recipe_runs_and_is_short(tmp_path, arrays):
    """The printed code, with stand-ins for PyTorch."""
    _, out, _ = run(f"--template={tmp_path / 'example.npz'}")
    lines = out.splitlines()
    start = next(i for i, line in enumerate(lines) if "arrays, cat" in line)
    end = next(i for i, line in enumerate(lines) if "numpy.savez" in line)
    assert end - start + 1 <= 10

    class Tensor(np.ndarray):
        float = lambda self: self.astype(np.float32).view(Tensor)  # noqa: E731
        cpu = detach = lambda self: self
        numpy = lambda self: np.asarray(self)  # noqa: E731

    def tensor(array):
        return np.array(array).view(Tensor)

    torch = SimpleNamespace(
        no_grad=contextlib.nullcontext, cat=lambda parts: tensor(np.concatenate(parts))
    )
    weight, bias = (tensor(arrays[f"head_{part}_0"]) for part in ("weight", "bias"))
    rows = np.arange(24)
    scope = {
        "torch": torch, "encoder": lambda x: tensor(arrays["train_adapted_0"][x]),
        "pretrained": lambda x: tensor(arrays["train_pretrained_0"][x]),
        "task_loader": [(each, tensor(each % 2)) for each in (rows[:10], rows[10:])],
        "head": SimpleNamespace(weight=weight, bias=bias), "t": 0, "numpy": np,
    }  # fmt: skip
    exec("\n".join(line[4:] for line in lines[start:end]), scope)
    # Training the head further leaves what was dumped alone.
    weight += 1
    bias += 1
    stored = scope["arrays"]
    np.testing.assert_array_equal(stored.pop("train_labels_0"), rows % 2)
    for name, array in stored.items():
        np.testing.assert_array_equal(array, arrays[name], err_msg=name)
    stored |= {k: arrays[k] for k in ("train_labels_0", "test_adapted", "test_pretrained")}
    np.savez(tmp_path / "mine.npz", **stored)
    assert len(feature_files.load(tmp_path / "mine.npz").tasks) == 1


def test_the_command_as_a_process_imports_no_encoder_and_no_data(source, tmp_path):
    heavy = {"flax", "orbax", "tensorflow", "tensorflow_datasets", "grain", "optax", "PIL"}
    heavy |= {"fdc_jax.model", "fdc_jax.data", "fdc_jax.learners", "sklearn", "torch"}
    script = f"""
import runpy, sys
for sys.argv[1:] in (sys.argv[1:], ["absent.npz"]):
    try:
        runpy.run_module("fdc_jax.posthoc", run_name="__main__")
    except SystemExit as ended:
        print(ended.code, sorted({heavy} & set(sys.modules)))
"""
    arguments = [str(source), f"--output={tmp_path / 'x.npz'}", "--quiet"]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
    )
    assert done.stdout == "0 []\n2 []\n"
    assert done.stderr == "fdc_jax.posthoc: absent.npz: no such file or folder\n"


# Statistics that follow the encoder --------------------------------------------------------------


def test_moved_features_follow_the_encoder_for_every_other_method(source, tmp_path):
    labels = {}
    for name in ("plain", "moved"):
        output = tmp_path / f"{name}.npz"
        extra = ["--moved"] if name == "moved" else []
        code, out, _ = run(source, "--method=ncm", f"--output={output}", *extra)
        assert code == 0 and ("ncm --moved" in out) == bool(extra)
        report = json.loads(output.with_suffix(".json").read_text())
        assert report["moved"] == bool(extra)
        labels[name] = np.load(output)["label"]
    features = feature_files.load(source)
    tasks = [task.adapted.astype(np.float64) for task in features.tasks]
    for t, task in enumerate(features.tasks[1:], start=1):
        by = drift.fit_map(task.previous, task.adapted)
        tasks[:t] = [by.move(each) for each in tasks[:t]]
    found = calibration.make("ncm")
    for task, adapted in zip(features.tasks, tasks, strict=True):
        found.fit_task(adapted, task.labels, classes=task.classes)
    found.finalize()
    expected = found.score(features.test_adapted).label
    np.testing.assert_array_equal(labels["moved"], expected)
    assert (labels["plain"] != expected).any()


def test_what_moving_lacks_is_named(tmp_path, arrays):
    path = tmp_path / "without.npz"
    np.savez(path, **{name: a for name, a in arrays.items() if "previous" not in name})
    assert "train_previous_1" in fails(path, "--method=ncm", "--moved")
    assert "stay as they were fitted" in run(path, "--method=gaussians")[1]
