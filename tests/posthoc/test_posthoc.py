import contextlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from fdc_jax import calibration
from fdc_jax.calibration import METHODS
from fdc_jax.features import feature_files
from fdc_jax.posthoc.posthoc_command import main
from tests import small_runs
from tests.calibration import streams

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "fdc_jax" / "assets" / "example_features.npz"


@pytest.fixture(scope="module")
def arrays():
    """Three tasks of two classes; half of the images, with more noise, are for testing."""
    tasks = streams.known(1, 3, classes=(2,), samples=(60,))
    arrays, previous = {}, streams.previous_of(tasks)
    for name in ("adapted", "pretrained", "labels"):
        rows = [getattr(task, name) for task in tasks]
        arrays |= {f"train_{name}_{t}": rows[t] for t in range(3)}
        arrays[f"test_{name}"] = np.concatenate([of_task[::2] for of_task in rows])
        if name != "labels":
            arrays[f"test_{name}"] += np.random.default_rng(0).normal(size=(90, rows[0].shape[1]))
    for t, task in enumerate(tasks):
        arrays |= {f"head_weight_{t}": task.weight, f"head_bias_{t}": task.bias + 8 * t}
    return arrays | {f"train_previous_{t}": previous[t] for t in (1, 2)}


def without(arrays, *words):
    pattern = "|".join(words)
    return {name: array for name, array in arrays.items() if not re.search(pattern, name)}


@pytest.fixture(scope="module")
def source(tmp_path_factory, arrays):
    path = tmp_path_factory.mktemp("features") / "features.npz"
    np.savez(path, **arrays)
    return path


def run(*arguments):
    """Exit code, standard output and standard error of one command."""
    out = io.StringIO()
    error = io.StringIO()
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


def percent(right):
    return pytest.approx(100 * np.mean(right))


@pytest.mark.parametrize("method", ["fdc", "gaussians", "ncm-pretrained"])
def test_predictions_and_counts_are_the_librarys(source, tmp_path, method):
    folder, saved = tmp_path / "deep", tmp_path / "calibrator.npz"
    settings = {"rlc_weight": 0.5, "retained_energy": 0.9} if method == "fdc" else {}
    flags = [f"--{name}={value}" for name, value in settings.items()]
    flags += [f"--output={folder / 'x.npz'}", f"--method={method}", f"--calibrator={saved}"]
    code, out, error = run(source, *flags)
    assert (code, error) == (0, "")
    assert out.splitlines()[3].split()[0] == method
    assert sorted(file.name for file in folder.iterdir()) == ["x.json", "x.npz"]
    features = feature_files.load(source)
    calibrator = calibration.make(method, **settings)
    inputs = (features.test_adapted, features.test_pretrained)
    scores = features.fit(calibrator).score(*inputs)
    raw = features.fit(calibration.make("raw")).score(*inputs).label
    expected = {"scores": scores.task_scores, "task": scores.task, "label": scores.label}
    expected |= {"raw_label": raw, "method": method}
    np.testing.assert_equal(dict(np.load(folder / "x.npz")), expected)
    report, truth = json.loads((folder / "x.json").read_text()), features.test_labels
    accuracy = report["accuracy"]
    assert accuracy["raw"] == percent(raw == truth)
    assert accuracy[method] == percent(scores.label == truth)
    confusion, *_ = np.histogram2d(truth // 2, scores.task, bins=range(4))
    of_method = {
        "routing_accuracy": percent(scores.task == truth // 2),
        "task_confusion": confusion.tolist(),
        "num_changed_labels": np.sum(scores.label != raw),
        "storage_bytes": calibrator.storage_bytes,
    }
    assert {name: report[name][method] for name in of_method} == of_method
    assert report["gain"][method]["mean"] == pytest.approx(accuracy[method] - accuracy["raw"])
    assert (report["num_tasks"], report["num_classes"]) == (3, 6)
    assert {"fdc_jax", "jax", "numpy"} <= {*report["versions"]}
    assert ({"retained_energy": 0.75} | settings).items() <= report["settings"].items()
    if method == "fdc":
        assert report["components"]["full"] == accuracy["fdc"]
    assert calibrator.note == report["notes"].get(method, "") and calibrator.note in out
    assert_array_equal(calibration.load(saved).score(*inputs).label, scores.label)


def test_all_methods_in_one_table(source, tmp_path):
    output = tmp_path / "all.npz"
    code, out, error = run(source, "--method=all", "--projections=20", f"--output={output}")
    assert (code, error) == (0, "")
    assert {*METHODS} <= {line.split()[0] for line in out.splitlines()[2:]}
    report = json.loads(output.with_suffix(".json").read_text())
    assert [*report["gain"]] == [*METHODS] and report["gain"]["raw"]["mean"] == 0
    assert report["settings"]["projections"] == 20
    assert report["accuracy"]["fdc"] > report["accuracy"]["raw"]
    assert report["predictions"] == "fdc"


def test_methods_that_do_not_apply_say_why(tmp_path, arrays, monkeypatch):
    few = {name: METHODS[name] for name in ("raw", "fdc", "wa", "vim", "ncm-pretrained")}
    monkeypatch.setattr("fdc_jax.posthoc.posthoc_command.METHODS", few)
    path = tmp_path / "cosine.npz"
    np.savez(path, **without(arrays, "pretrained", "bias") | {"head_kind": "cosine"})
    code, out, _ = run(path, "--method=all", "--neighbours=2")
    assert code == 0 and "\nfdc " in out
    reason = f"{path}: head_weight_0: wa needs linear heads, found a CosineHead"
    assert f"wa: not applicable: {reason}" in out
    reason = f"{path}: train_pretrained_0: missing, which ncm reads"
    assert f"ncm-pretrained: not applicable: {reason}" in out
    assert "head_weight_0: wa needs linear heads" in fails(path, "--method=wa,vim")


@pytest.mark.parametrize("names", [("test_labels",), ("test_labels", "head")])
def test_without_test_labels_predictions_are_written(tmp_path, arrays, names):
    path = tmp_path / "features"
    output = tmp_path / "x.npz"
    feature_files.write(path, without(arrays, *names))
    code, out, _ = run(path, f"--output={output}", "--method=gaussians")
    assert code == 0 and "with drift compensation" in out
    assert "gaussians: 3 tasks, 6 classes, 90 test samples; " in out
    assert "no test_labels, so no accuracy" in out
    assert ("test labels changed" in out) == ("head" not in names)
    report = json.loads(output.with_suffix(".json").read_text())
    assert "accuracy" not in report
    assert report["num_changed_labels"].get("gaussians", 1) > 0
    assert "no test_labels, so expected --output" in fails(path, "--method=gaussians")
    assert "no test_labels" in fails(path, "--method=ncm,gaussians", f"--output={output}")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("", "the following arguments are required: features"),
        ("source.npz --method=fcd", "found 'fcd'; did you mean fdc?"),
        ("source.npz --retained_energy=2", "retained_energy: expected"),
        ("source.npz --method=ncm --attenuation=1", "--attenuation: is no setting of ncm"),
        ("source.npz --output=x.json", "ends in .npz"),
        ("source.npz --method=all --calibrator=e.npz", "--calibrator: expected together"),
        ("source.npz --rlc_weight=1,2", "--rlc_weight: expected one value; swept are attenuation"),
        ("source.npz --attenuation=0.3,x", "--attenuation: expected numbers"),
        ("source.npz source.npz --output=o.npz", "--output=PATH.npz: expected one file"),
        ("source.npz --components --calibrator=o.npz", "--calibrator: expected one file"),
        ("source.npz --name=slca --output=o", "--name: expected a name of your own, found 'slca'"),
        ("source.npz --name= --output=o", "found ''"),
        ("source.npz --output=here/o.npz --calibrator=o.npz", "is the file of --output"),
        ("source.npz --output=source.npz", "is the feature file itself"),
        ("cut.npz", "not a readable .npz file: it is damaged, or ends early"),
    ],
)
def test_refusals_are_one_line_and_write_nothing(source, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    Path("source.npz").symlink_to(source)
    Path("here").symlink_to(tmp_path)
    Path("cut.npz").write_bytes(source.read_bytes()[:3000])
    before = {path.name for path in tmp_path.iterdir()}
    assert message in fails(*arguments.split())
    assert {path.name for path in tmp_path.iterdir()} == before


def test_heads_that_know_nothing_are_named_once(tmp_path, arrays):
    path = tmp_path / "x.npz"
    np.savez(path, **arrays | {"head_weight_1": arrays["head_weight_1"][::-1]})
    # Raw reads the heads, too.
    (line,) = run(path)[2].splitlines()
    assert line.startswith("fdc_jax.posthoc: WARNING: head of task 1 (from 0): accuracy ")
    assert run(path, "--quiet")[2] == ""


def test_the_example_comes_with_the_package(tmp_path, monkeypatch):
    assert EXAMPLE.stat().st_size < 200_000
    monkeypatch.chdir(tmp_path)
    assert run("example", "--output=x.npz")[0] == 0
    report = json.loads(Path("x.json").read_text())
    assert (report["num_tasks"], report["num_classes"]) == (5, 10)
    assert report["gain"]["fdc"]["low"] > 10
    assert report["accuracy"]["fdc"] < report["accuracy"]["oracle"]
    Path("example").mkdir()  # A path of the user comes first.
    assert "example: expected .npy files, found none" in fails("example")


def test_the_page_writes_a_feature_file(tmp_path, monkeypatch, arrays):
    """Runs the program of docs/features.md, with features in place of images and encoders."""
    page = (ROOT / "docs" / "features.md").read_text(encoding="utf-8")
    (program,) = (
        part for part in re.findall(r"```python\n(.*?)```", page, re.S) if "savez" in part
    )
    assert program.count("\n") < 16
    head = SimpleNamespace(weight=np.zeros((6, 16)), bias=np.zeros(6))
    learned = []

    def train(images, labels):
        head.weight += 1  # of other tasks, too
        t = len(learned)
        head.weight[2 * t : 2 * t + 2], head.bias[2 * t : 2 * t + 2] = (
            arrays[f"head_{part}_{t}"] for part in ("weight", "bias")
        )
        learned.append(t)

    def view(name, images):
        return arrays[f"test_{name}" if images == "test" else f"train_{name}_{images}"]

    def encoder(images):
        return view("previous" if images == len(learned) else "adapted", images)

    def pretrained(images):
        return view("pretrained", images)

    labels = [arrays[f"train_labels_{t}"] for t in range(3)]
    scope = {
        "tasks": [(t, labels[t], np.unique(labels[t])) for t in range(3)], "train": train,
        "encoder": encoder, "pretrained": pretrained, "head": head,
        "test_images": "test", "test_labels": arrays["test_labels"],
    }  # fmt: skip
    monkeypatch.chdir(tmp_path)
    exec(program, scope)
    np.testing.assert_equal(dict(np.load("features.npz")), arrays)
    assert run("features.npz")[0] == 0


@pytest.mark.ci
def test_a_process_loads_no_encoder_and_has_one_thread(source, tmp_path):
    """With several threads, eigenvectors differ in their last digits."""
    heavy = {"flax", "orbax", "tensorflow", "tensorflow_datasets", "grain", "optax", "PIL"}
    heavy |= {"fdc_jax.model", "fdc_jax.data", "fdc_jax.learners", "sklearn", "torch"}
    script = f"""
import sys
from fdc_jax.__main__ import main
for sys.argv[1:] in (["posthoc", *sys.argv[1:]], ["posthoc", "absent.npz"]):
    try:
        main()
    except SystemExit as ended:
        print(ended.code, sorted({heavy} & set(sys.modules)))
from threadpoolctl import threadpool_info
print({{pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}})
"""
    arguments = [str(source), f"--output={tmp_path / 'x.npz'}", "--quiet"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    environment.pop("OPENBLAS_NUM_THREADS", None)
    command = [sys.executable, "-W", "error", "-c", script, *arguments]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, **small_runs.PIPES)
    output, errors = small_runs.finish(process)
    assert output == "0 []\n2 []\n{1}\n"
    assert errors == "fdc_jax.posthoc: absent.npz: no such file or folder\n"


# Several files ------------------------------------------------------------------------------------


def test_errors_name_the_file_and_the_array(source, arrays, tmp_path):
    path = tmp_path / "wrong.npz"
    rows = arrays["test_adapted"].copy()
    rows[4] = 4e18 * np.sign(rows[4])  # Its squared distances are beyond float32.
    np.savez(path, **arrays | {"test_adapted": rows})
    error = fails(source, path, "--method=mahalanobis")
    assert f"{path}: test_adapted: row 4 has no finite score by mahalanobis" in error


def test_a_sweep_that_no_task_allows_is_one_line(source):
    code, out, error = run(source, "--neighbours=1,3")
    assert (code, error) == (0, "")
    assert "neighbours need as many classes with samples, found 2" in out


@pytest.mark.ci
def test_files_are_seeds_of_one_report(source, arrays, tmp_path, no_figures):
    other, output = tmp_path / "other", tmp_path / "report"
    noise = np.random.default_rng(1).normal(size=arrays["test_adapted"].shape)
    feature_files.write(other, arrays | {"test_adapted": arrays["test_adapted"] + noise})
    arguments = [source, other, "--method=fdc,gaussians", "--components", "--attenuation=0.3,0.5"]
    code, out, error = run(*arguments, f"--output={output}")
    assert code == 0 and "Traceback" not in error
    numbers = json.loads((output / "results.json").read_text())["numbers"]
    accuracies = []
    for seed, path in enumerate((source, other), 1):
        features = feature_files.load(path)
        calibrator = calibration.make("gaussians")
        scores = features.fit(calibrator).score(features.test_adapted, features.test_pretrained)
        right, tasks = scores.label == features.test_labels, features.test_tasks
        given = scores.label_in_task(tasks) == features.test_labels
        assert numbers["gaussians"]["by_seed"][str(seed)] == percent(right)
        accuracies.append(100 * np.mean([right, scores.task == tasks, given], axis=1))
    (row,) = (line for line in out.splitlines() if line.startswith("Class Gaussians  "))
    for values in np.transpose(accuracies):
        assert f"{values.mean():.2f} ± {values.std(ddof=1):.2f}" in row
    assert "TSF + Dual PAC" in out and "attenuation γ = 0.3" in out
    for name in ("calibrators", "ablation", "sweeps"):
        assert {(output / "tables" / f"{name}.{end}").exists() for end in ("csv", "tex")} == {True}
    assert {path.name for path in other.iterdir()} == {f"{name}.npy" for name in arrays}


@pytest.mark.ci
def test_labels_may_be_any_integers(source, arrays, tmp_path, no_figures):
    """A report of other labels has the same numbers."""
    renamed = arrays | {name: 100 - 7 * a for name, a in arrays.items() if "labels" in name}
    for task in range(3):  # The rows of heads stay in the order of the labels before.
        renamed[f"head_classes_{task}"] = 100 - 7 * np.unique(arrays[f"train_labels_{task}"])
    np.savez(tmp_path / "renamed.npz", **renamed)
    tables = []
    for path in (source, tmp_path / "renamed.npz"):
        output = tmp_path / f"report_{path.stem}"
        assert run(path, "--method=fdc,gaussians", f"--output={output}", "--quiet")[0] == 0
        table = (output / "tables" / "calibrators.csv").read_text()
        tables.append([line.partition(",")[2] for line in table.splitlines()])
    assert tables[0] == tables[1]


def test_run_folders_of_earlier_versions_are_removed(source, tmp_path, monkeypatch):
    monkeypatch.setattr("fdc_jax.report.write_groups", lambda *_, **options: None)
    for seed, content in enumerate(({"feature file": "a.npz"}, {"learner.name": "slca"}), 1):
        folder = tmp_path / f"seed_{seed}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(content))
    code, _, error = run(source, "--method=raw", f"--output={tmp_path}")
    assert code == 0
    assert f"{tmp_path / 'seed_1'}: removed; an earlier version made it for its report" in error
    assert [path.name for path in tmp_path.glob("seed_*")] == ["seed_2"]


# Files without heads ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def headless(tmp_path_factory, arrays):
    path = tmp_path_factory.mktemp("features") / "headless.npz"
    np.savez(path, **without(arrays, "head"))
    return path


def test_methods_that_need_no_head_apply_without_heads(source, headless, tmp_path):
    needing_heads = ("raw", "fdc", "vim", "wa")
    results = []
    for file, methods in ((source, ""), (headless, ",".join(needing_heads) + ",")):
        output = tmp_path / f"{file.stem}.npz"
        code, out, error = run(file, f"--method={methods}gaussians,ncm", f"--output={output}")
        assert (code, error) == (0, "")
        report = json.loads(output.with_suffix(".json").read_text())
        results.append((dict(np.load(output)), report, out))
    (expected, with_heads, before), (predictions, report, after) = results
    del expected["raw_label"]
    np.testing.assert_equal(predictions, expected)
    assert report["predictions"] == predictions["method"] == "gaussians"
    del with_heads["accuracy"]["raw"], with_heads["accuracy"]["oracle"]
    assert report["accuracy"] == with_heads["accuracy"]
    assert report["gain"] == report["num_changed_labels"] == {}
    assert "gain" in before and "gain" not in after and "interval" not in after
    assert {*report["not_applicable"]} == {*needing_heads}
    for name in needing_heads:
        reason = f"{headless}: head_weight_0: missing, which {name} reads"
        assert f"{name}: not applicable: {reason}" in after
    for arguments in ([], ["--method=fdc,ls"]):
        assert f"{headless}: head_weight_0: missing, which fdc" in fails(headless, *arguments)


def test_labels_shifted_by_a_task_are_named(tmp_path):
    with np.load(EXAMPLE) as file:
        arrays = dict(file)
    for name in arrays:
        if name.startswith(("train_labels", "head_classes")):
            arrays[name] = (arrays[name] + 2) % 10
    path = tmp_path / "shifted.npz"
    np.savez(path, **arrays)
    code, _, error = run(path, "--method=fdc,ncm")
    assert code == 0
    (line,) = error.splitlines()
    pattern = r"WARNING: .*: test_labels: (\d+)% .* the task 1 after .* (\d+)% to their own"
    share_after, share_of_task = map(int, re.search(pattern, line).groups())
    assert share_after > 60 and share_of_task < 10
    assert run(EXAMPLE, "--method=fdc,ncm")[2] == ""
