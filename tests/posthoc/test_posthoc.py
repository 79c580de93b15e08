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

from fdc_jax import calibration
from fdc_jax.calibration import METHODS
from fdc_jax.features import feature_files
from fdc_jax.posthoc.command import main

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "fdc_jax" / "assets" / "example_features.npz"


@pytest.fixture(scope="module")
def arrays():
    """Three tasks of two classes, of the example."""
    with np.load(EXAMPLE) as file:
        arrays = {name: file[name] for name in file.files if name[-1] not in "34"}
    few = arrays["test_labels"] < 6
    return arrays | {name: rows[few] for name, rows in arrays.items() if name.startswith("test")}


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
        assert set(result) == {"scores", "task", "label", "raw_label", "method"}
        np.testing.assert_array_equal(result["scores"], scores.task_scores)
        np.testing.assert_array_equal(result["task"], scores.task)
        np.testing.assert_array_equal(result["label"], scores.label)
        raw = features.fit(calibration.make("raw")).score(*inputs)
        np.testing.assert_array_equal(result["raw_label"], raw.label)
    report = json.loads(output.with_suffix(".json").read_text())
    assert report["storage_bytes"][method] == calibrator.storage_bytes
    assert settings.items() <= report["settings"].items()
    if method == "fdc":
        assert report["components"]["full"] == report["accuracy"]["fdc"]
    assert calibrator.note == report["notes"].get(method, "") and calibrator.note in out
    again = calibration.load(saved).score(*inputs)
    np.testing.assert_array_equal(again.label, scores.label)


def test_report_counts_what_the_predictions_say(fdc, arrays):
    result, report = fdc
    truth = arrays["test_labels"]

    def percent(right):
        return pytest.approx(100 * np.mean(right))

    accuracy = report["accuracy"]
    assert accuracy["raw"] == percent(result["raw_label"] == truth)
    assert accuracy["fdc"] == percent(result["label"] == truth)
    assert report["routing_accuracy"]["fdc"] == percent(result["task"] == truth // 2)
    assert report["gain"]["fdc"]["mean"] == pytest.approx(accuracy["fdc"] - accuracy["raw"])
    expected = np.zeros((3, 3), int)
    np.add.at(expected, (truth // 2, result["task"]), 1)
    np.testing.assert_array_equal(report["task_confusion"]["fdc"], expected)
    assert report["num_changed_labels"]["fdc"] == np.sum(result["label"] != result["raw_label"])
    assert report["settings"]["retained_energy"] == 0.75
    assert {"fdc_jax", "jax", "numpy"} <= set(report["versions"])
    assert (report["num_tasks"], report["num_classes"]) == (3, 6)


def test_all_methods_in_one_table(source, tmp_path):
    output = tmp_path / "all.npz"
    code, out, error = run(source, "--method=all", "--projections=50", f"--output={output}")
    assert (code, error) == (0, "")
    rows = {line.split()[0] for line in out.splitlines()[2:]}
    assert set(METHODS) <= rows
    report = json.loads(output.with_suffix(".json").read_text())
    assert list(report["gain"]) == list(METHODS)
    assert report["gain"]["raw"]["mean"] == 0
    assert report["settings"]["projections"] == 50
    assert report["accuracy"]["fdc"] > report["accuracy"]["raw"]
    with np.load(output) as result:
        accuracy = 100 * np.mean(result["label"] == feature_files.load(source).test_labels)
    assert accuracy == pytest.approx(report["accuracy"]["fdc"])


def test_methods_that_do_not_apply_say_why(tmp_path, arrays, monkeypatch):
    few = {name: METHODS[name] for name in ("raw", "fdc", "wa", "vim", "ncm-pretrained")}
    monkeypatch.setattr("fdc_jax.posthoc.command.METHODS", few)
    one_view = {k: v for k, v in arrays.items() if "pretrained" not in k and "bias" not in k}
    path = tmp_path / "cosine.npz"
    np.savez(path, **one_view | {"head_kind": "cosine"})
    code, out, _ = run(path, "--method=all", "--neighbours=2")
    assert code == 0
    reason = f"{path}: head_weight_0: wa needs linear heads, found a CosineHead"
    assert f"wa: not applicable: {reason}" in out
    reason = f"{path}: train_pretrained_0: missing, which ncm reads"
    assert f"ncm-pretrained: not applicable: {reason}" in out
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
    assert "with drift compensation" in run(path, f"--output={output}", "--method=gaussians")[1]
    report = json.loads(output.with_suffix(".json").read_text())
    assert "accuracy" not in report
    assert report["num_changed_labels"]["gaussians"] > 0
    assert "no test_labels, so expected --output" in fails(path)
    assert "no test_labels" in fails(path, "--method=raw,ncm", f"--output={output}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "the following arguments are required: features"),
        ("source.npz --method=fcd", "found 'fcd'; did you mean fdc?"),
        ("source.npz --retained_energy=2", "retained_energy: expected"),
        ("source.npz --method=ncm --attenuation=1", "--attenuation: is no setting of ncm"),
        ("source.npz --output=x.json", "ends in .npz"),
        ("cut.npz", "not a readable .npz file: it is damaged, or ends early"),
        ("source.npz --method=all --calibrator=e.npz", "--calibrator: expected together"),
        ("source.npz --rlc_weight=1,2", "--rlc_weight: expected one value; swept are attenuation"),
        ("source.npz --attenuation=0.3,x", "--attenuation: expected numbers"),
        (
            "source.npz source.npz --output=o.npz",
            "--output=PATH.npz: expected one file of features",
        ),
        (
            "source.npz --components --calibrator=o.npz",
            "--calibrator: expected one file of features",
        ),
        ("source.npz --method=ranpac --projections=0", "--projections: expected at least 1"),
        ("bad.npz --output=x.npz", "bad.npz: test_adapted: row 0 is not finite"),
        # No file overwrites another.
        ("source.npz --name=slca --output=o", "--name: expected a name of your own, found 'slca'"),
        ("source.npz --name= --output=o", "found ''"),
        (
            "source.npz --output=o.npz --calibrator=o.npz",
            "--calibrator: o.npz is the file of --out",
        ),
        (
            "source.npz --output=here/o.npz --calibrator=o.npz",
            "--calibrator: o.npz is the file of --output",
        ),
        ("source.npz --output=source.npz", "is the feature file itself"),
    ],
)
def test_refusals_are_one_line_and_write_nothing(
    source, arrays, tmp_path, monkeypatch, arguments, message
):
    monkeypatch.chdir(tmp_path)
    Path("source.npz").symlink_to(source)
    Path("here").symlink_to(tmp_path)
    Path("cut.npz").write_bytes(source.read_bytes()[:3000])
    Path("c.npz").write_text("kept")
    np.savez("bad.npz", **arrays | {"test_adapted": np.full((90, 96), np.nan)})
    before = {path.name for path in tmp_path.iterdir()}
    assert message in fails(*arguments.split())
    assert Path("c.npz").read_text() == "kept"
    assert {path.name for path in tmp_path.iterdir()} == before


def test_the_help_has_the_papers_numbers_of_random_features(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    ranpac, anacp = (calibration.make(name).projections for name in ("ranpac", "anacp"))
    assert f"the papers use {ranpac} and {anacp} " in " ".join(capsys.readouterr().out.split())


def test_a_traceback_on_request(tmp_path):
    code, _, error = run(tmp_path / "absent.npz", "--traceback")
    assert code == 2 and "Traceback" in error


def test_heads_that_know_nothing_are_named_once(tmp_path, arrays):
    path = tmp_path / "x.npz"
    np.savez(path, **arrays | {"head_weight_1": np.roll(arrays["head_weight_1"], 1, 0)})
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
    head = SimpleNamespace(weight=np.zeros((6, 96)), bias=np.zeros(6))
    learned = []

    def train(images, labels):
        head.weight += 1  # of other tasks, too
        t = len(learned)
        head.weight[2 * t : 2 * t + 2], head.bias[2 * t : 2 * t + 2] = (
            arrays[f"head_{part}_{t}"] for part in ("weight", "bias")
        )
        learned.append(t)

    def encoder(images):
        if images == "test":
            return arrays["test_adapted"]
        return arrays[f"train_{'adapted' if images < len(learned) else 'previous'}_{images}"]

    def pretrained(images):
        return arrays["test_pretrained" if images == "test" else f"train_pretrained_{images}"]

    labels = [arrays[f"train_labels_{t}"] for t in range(3)]
    scope = {
        "tasks": [(t, labels[t], np.unique(labels[t])) for t in range(3)], "train": train,
        "encoder": encoder, "pretrained": pretrained, "head": head,
        "test_images": "test", "test_labels": arrays["test_labels"],
    }  # fmt: skip
    monkeypatch.chdir(tmp_path)
    exec(program, scope)
    with np.load("features.npz") as file:
        assert set(file.files) == {n for n in arrays if not n.startswith(("head_kind", "head_cl"))}
        for name in file.files:
            np.testing.assert_array_equal(file[name], arrays[name], err_msg=name)
    assert run("features.npz")[0] == 0


def test_the_command_as_a_process_imports_no_encoder_and_no_data(source, tmp_path):
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


def test_decompositions_have_one_thread_as_in_a_run():
    """With several, eigenvectors differ in their last digits."""
    script = "from fdc_jax.posthoc import command\nfrom threadpoolctl import threadpool_info\n"
    script += "print({it['num_threads'] for it in threadpool_info() if it['user_api'] == 'blas'})"
    environment = {name: of for name, of in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    words = [sys.executable, "-c", script]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout == "{1}\n", done.stderr


# Several files ------------------------------------------------------------------------------------


def far_away(rows):
    """Squared distances of one row are beyond float32."""
    row = np.arange(len(rows))[:, None] == 4
    return np.where(row, 1e18 * np.sign(rows.astype(np.float32)), rows)


@pytest.mark.parametrize(
    ("name", "change", "flag", "message"),
    [
        ("train_adapted_1", lambda a: a * [[np.inf] + [1] * 95], "", "row 0 is not finite"),
        ("train_previous_1", lambda a: a * np.nan, "gaussians", "row 0 is not finite"),
        ("train_previous_2", lambda a: a[:, 1:], "gaussians", "expected shape"),
        ("train_labels_2", lambda a: a * 0, "", "label 0 at row 0 is none of the head's"),
        ("head_weight_1", lambda a: a[:, 1:], "", "expected shape"),
        ("final_head_weight_1", lambda a: a * np.nan, "", "row 0 is not finite"),
        ("test_pretrained", lambda a: a * np.nan, "", "row 0 is not finite"),
        ("test_adapted", lambda a: a[:, 1:], "", "expected width 96, found 95"),
        ("test_adapted", far_away, "mahalanobis", "row 4 has no finite score by mahalanobis"),
        ("test_labels", lambda a: a + 50, "", "row 0 is label"),
    ],
)
def test_errors_name_the_file_and_the_array(
    source, arrays, tmp_path, monkeypatch, name, change, flag, message
):
    monkeypatch.chdir(tmp_path)
    arrays = arrays | {"final_head_weight_1": arrays["head_weight_1"]}
    np.savez("wrong.npz", **arrays | {name: change(arrays[name])})
    words = [f"--method={flag.split()[0]}", *flag.split()[1:]] if flag else []
    assert f"posthoc: wrong.npz: {name}: {message}" in fails(source, "wrong.npz", *words)


def test_seeds_have_equal_sizes(source, arrays, tmp_path):
    np.savez(tmp_path / "few.npz", **arrays | {n: arrays[n][:9] for n in arrays if n[:4] == "test"})
    message = "few.npz: expected 3 tasks, 6 classes, 90 test samples as in "
    assert message in fails(source, tmp_path / "few.npz")


def test_a_sweep_that_no_task_allows_is_one_line(source):
    code, out, error = run(source, "--neighbours=1,3")
    assert (code, error) == (0, "")
    assert "neighbours need as many classes with samples, found 2" in out


@pytest.mark.ci
def test_files_are_seeds_of_one_report(source, arrays, tmp_path, no_figures):
    rng, other = np.random.default_rng(0), tmp_path / "other"
    other.mkdir()
    for name, array in arrays.items():
        noise = rng.normal(size=array.shape) if "adapted" in name else 0
        np.save(other / f"{name}.npy", array + noise if "adapted" in name else array)
    output, methods = tmp_path / "report", "--method=fdc,gaussians"
    arguments = [source, other, methods, "--components", "--attenuation=0.3,0.5"]
    arguments.append("--name=My ~learner")
    code, out, error = run(*arguments, f"--output={output}")
    assert code == 0 and "Traceback" not in error
    accuracies = []
    for seed, path in enumerate((source, other), 1):
        features, calibrator = feature_files.load(path), calibration.make("gaussians")
        scores = features.fit(calibrator).score(features.test_adapted, features.test_pretrained)
        right, tasks = scores.label == features.test_labels, features.test_tasks
        given = scores.label_in_task(tasks) == features.test_labels
        numbers = json.loads((output / "results.json").read_text())["numbers"]
        expected = pytest.approx(100 * np.mean(right))
        assert numbers["gaussians"]["by_seed"][str(seed)] == expected
        accuracies.append([100 * np.mean(it) for it in (right, scores.task == tasks, given)])
    means, deviations = np.mean(accuracies, axis=0), np.std(accuracies, axis=0, ddof=1)
    (row,) = (line for line in out.splitlines() if line.startswith("Class Gaussians  "))
    for mean, deviation in zip(means, deviations, strict=True):
        assert f"{mean:.2f} ± {deviation:.2f}" in row
    assert "TSF + Dual PAC" in out and "attenuation γ = 0.3" in out
    for name in ("calibrators", "ablation", "sweeps"):
        assert {(output / "tables" / f"{name}.{end}").exists() for end in ("csv", "tex")} == {True}
    page = (output / "report.html").read_text(encoding="utf-8")
    assert re.search(r"<title>My ~learner with .* on features\+other</title>", page)
    tables = {file.name: file.read_text(encoding="utf-8") for file in output.glob("tables/*.*")}
    for name in ("ablation.csv", "ablation.txt", "benchmark.tex"):
        found = "My \\textasciitilde{}learner" if name.endswith("tex") else "My ~learner"
        assert found in tables[name]
    # The paper selects nothing for this learner, and nothing is compared.
    for name, text in ({"page": page} | tables).items():
        assert text.endswith("\n") and "saved_features" not in text
        assert not re.search(r"paper selects|paper's choice|selected|\bours\b|>numbers<", text), (
            name
        )
    fdc = [*numbers["fdc"]["by_seed"].values()]
    benchmark = f"+ FDC     {np.mean(fdc):.2f} ± {np.std(fdc, ddof=1):.2f}"
    assert benchmark in re.sub(r" {3,}", "     ", tables["benchmark.txt"])
    # Once more into the folder; and without a file, the same table.
    again = run(*arguments[:2], "--method=raw", f"--output={output}", "--quiet")
    assert again == (0, "", "")
    assert row in run(*arguments)[1]
    assert {path.name for path in other.iterdir()} == {f"{name}.npy" for name in arrays}


def test_labels_may_be_any_integers(source, arrays, tmp_path, no_figures):
    """A report of other labels has the same numbers, and names classes by the labels."""
    renamed = {
        name: 100 - 7 * array if "labels" in name or "classes" in name else array
        for name, array in arrays.items()
    }
    order = np.concatenate([np.unique(arrays[f"train_labels_{task}"]) for task in range(3)])
    for task in range(3):  # The rows of heads stay in the order of the labels before.
        own = np.unique(arrays[f"train_labels_{task}"])
        renamed[f"head_classes_{task}"] = 100 - 7 * own
    np.savez(tmp_path / "renamed.npz", **renamed)
    tables = []
    for path in (source, tmp_path / "renamed.npz"):
        output = tmp_path / f"report_{path.stem}"
        assert run(path, "--method=fdc,gaussians", f"--output={output}", "--quiet")[0] == 0
        text = (output / "tables" / "calibrators.csv").read_text()
        tables.append([line.partition(",")[2] for line in text.splitlines()])
    assert tables[0] == tables[1]
    classes = (output / "classes_1.html").read_text(encoding="utf-8")
    assert all(f">{100 - 7 * label}</" in classes for label in order)
    page = (output / "report.html").read_text(encoding="utf-8")
    assert "could not be read" not in page
    line = "--attenuation: expected numbers such as 0.3,0.5, found 'abc'"
    assert line in run("x.npz", "--attenuation=abc")[2]


def test_work_directories_of_earlier_versions_are_removed_with_a_line(source, tmp_path, no_figures):
    for seed, content in enumerate(({"feature file": "a.npz"}, {"learner.name": "slca"}), 1):
        folder = tmp_path / f"seed_{seed}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(content))
    code, _, error = run(source, f"--output={tmp_path}")
    assert code == 0
    assert f"{tmp_path / 'seed_1'}: removed; an earlier version made it for its report" in error
    assert [path.name for path in tmp_path.glob("seed_*")] == ["seed_2"]


# Files without heads ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def headless(tmp_path_factory, arrays):
    path = tmp_path_factory.mktemp("features") / "headless.npz"
    np.savez(path, **{name: array for name, array in arrays.items() if "head" not in name})
    return path


def test_gaussians_need_no_head(source, headless, tmp_path):
    results = []
    for file in (source, headless):
        output = tmp_path / f"{file.stem}.npz"
        code, out, error = run(file, "--method=gaussians", f"--output={output}")
        assert (code, error) == (0, "")
        with np.load(output) as stored:
            results.append((dict(stored), json.loads(output.with_suffix(".json").read_text()), out))
    (expected, with_heads, before), (arrays, without, after) = results
    assert arrays.keys() == expected.keys() - {"raw_label"}
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, expected[name])
    assert without["accuracy"] == {"gaussians": with_heads["accuracy"]["gaussians"]}
    assert without["gain"] == without["num_changed_labels"] == {}
    reason = f"raw: not applicable: {headless}: head_weight_0: missing, which raw reads"
    assert reason in after.splitlines() and "gain" in before
    assert "gain" not in after and "interval" not in after


def test_all_methods_without_heads_are_those_that_read_none(headless, tmp_path):
    output = tmp_path / "x.npz"
    words = ["--method=raw,fdc,vim,wa,ncm,ridge-pretrained", f"--output={output}"]
    code, out, error = run(headless, *words)
    assert (code, error) == (0, "")
    for name in ("raw", "fdc", "vim", "wa"):
        assert f"{name}: not applicable: {headless}: head_weight_0: missing, which {name} " in out
    assert [line.split()[0] for line in out.splitlines()[2:4]] == ["ncm", "ridge-pretrained"]
    features, calibrator = feature_files.load(headless), calibration.make("ncm")
    with np.load(output) as stored:
        scores = features.fit(calibrator).score(features.test_adapted)
        np.testing.assert_array_equal(stored["label"], scores.label)
    reason = f"{headless}: head_weight_0: missing, which fdc reads"
    assert reason in fails(headless)
    assert reason in fails(headless, "--method=fdc,ls")


def test_heads_are_of_all_tasks_or_of_none(headless, arrays, tmp_path):
    with np.load(headless) as file:
        np.savez(tmp_path / "x.npz", **file, head_weight_1=arrays["head_weight_1"])
    message = "x.npz: head_weight_0: missing; expected for each task t = 0 .. 2"
    assert message in fails(tmp_path / "x.npz", "--method=gaussians")


def test_test_labels_and_heads_may_both_be_missing(headless, tmp_path):
    with np.load(headless) as file:
        np.savez(tmp_path / "x.npz", **{n: file[n] for n in file.files if n != "test_labels"})
    words = ["--method=gaussians", f"--output={tmp_path / 'o.npz'}"]
    code, out, _ = run(tmp_path / "x.npz", *words)
    line = "gaussians: 3 tasks, 6 classes, 90 test samples; no test_labels, so no accuracy"
    assert code == 0 and line in out.splitlines()


def test_a_report_without_heads_has_no_raw_accuracy_and_no_gain(headless, tmp_path):
    output = tmp_path / "report"
    code, out, error = run(headless, "--method=gaussians,ncm", f"--output={output}")
    assert code == 0 and "Traceback" not in error
    assert "raw: not applicable" in error
    text = (output / "tables" / "calibrators.txt").read_text(encoding="utf-8")
    assert "Class Gaussians" in text and "Class Gaussians" in out
    for word in ("Raw", "gain", "Task given  "):
        assert word not in text and word not in out
    assert "head of task 0 (from 0): missing, which fdc reads" in out


# Drift compensation -------------------------------------------------------------------------------


def test_gaussians_without_previous_features_say_so_once(tmp_path, arrays):
    path = tmp_path / "without.npz"
    np.savez(path, **{name: a for name, a in arrays.items() if "previous" not in name})
    code, out, error = run(path, "--method=gaussians")
    assert (code, (out + error).count("without drift compensation")) == (0, 1)
    assert "not given; the pretrained view has full weight" in error


def test_a_view_that_is_not_there_has_no_weight(tmp_path, arrays):
    path = tmp_path / "one.npz"
    words = ("previous", "pretrained")
    np.savez(path, **{n: a for n, a in arrays.items() if not any(word in n for word in words)})
    code, out, error = run(path, "--method=gaussians")
    assert (code, (out + error).count("without drift compensation")) == (0, 1)
    assert "pretrained" not in out + error


def test_an_empty_name_is_not_the_current_folder(source, tmp_path, monkeypatch, capsys):
    feature_files.write(tmp_path, dict(np.load(source)))
    monkeypatch.chdir(tmp_path)
    assert main(["", "--method=ncm"]) == 2
    assert "features: expected a path, found none" in capsys.readouterr().err


def test_labels_shifted_by_a_task_are_named(tmp_path):
    with np.load(EXAMPLE) as file:
        arrays = dict(file)
    for name in [name for name in arrays if name.startswith(("train_labels", "head_classes"))]:
        arrays[name] = (arrays[name] + 2) % 10
    path = tmp_path / "shifted.npz"
    np.savez(path, **arrays)
    code, _, error = run(path, "--method=fdc,ncm")
    assert code == 0
    (line,) = error.splitlines()
    pattern = r"WARNING: .*: test_labels: (\d+)% .* the task 1 after .* (\d+)% to their own"
    there, own = map(int, re.search(pattern, line).groups())
    assert there > 60 and own < 10
    assert run(EXAMPLE, "--method=fdc,ncm")[2] == ""
