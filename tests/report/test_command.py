"""The command: what it writes, what it says, and what it refuses."""

import json

import pytest

from fdc_jax import feature_files
from fdc_jax.report import analysis, command, provenance, runs, tables
from tests.report.feature_sets import feature_set
from tests.report.run_folders import predictions, results, write_run


@pytest.fixture
def folder(tmp_path):
    """A run with saved features, one without, and a folder that is no run."""
    place = tmp_path / "runs"
    write_run(place / "a", results(benchmark="digits"), predictions(1))
    features = feature_set(dual=True)
    for number, task in enumerate(features.tasks):
        feature_files.write_task(
            place / "a" / "features",
            number,
            task.adapted,
            task.labels,
            task.head,
            task.pretrained,
            task.classes,
        )
    feature_files.write_test(
        place / "a" / "features",
        features.test_adapted,
        features.test_pretrained,
        features.test_labels,
    )
    write_run(place / "b", results(benchmark="digits", seed=2), predictions(2))
    (place / "notes").mkdir()
    return place


def test_a_report_has_a_page_tables_and_provenance(folder, tmp_path, capsys):
    output = tmp_path / "out"
    given = [str(each) for each in sorted(folder.iterdir())]
    assert command.main([*given, f"--output={output}", "--no-figures"]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"2 runs in 1 group: {output / 'report.html'}\n"
    lines = printed.err.splitlines()
    assert f"fdc_jax.report: skipped {folder / 'notes'}: not a run folder" in lines[0]
    assert any(str(folder / "b") in line and "no saved features" in line for line in lines)
    assert all(line.startswith("fdc_jax.report: ") for line in lines)
    page = (output / "report.html").read_text()
    assert "Digits" in page and "notes" in page
    assert not (output / "figures").exists()
    groups = runs.group(runs.load([folder / "a", folder / "b"]).runs)
    names = [name for name in analysis.ANALYSES if not name.startswith("sweep_")]
    found = analysis.analyse(groups[0].runs[0], names)
    expected = tables.build(groups, {str(folder / "a"): found, str(folder / "b"): {}})
    for table in expected:
        of = output / "tables" / table.name
        assert of.with_suffix(".csv").read_text() == tables.to_csv(table)
        assert of.with_suffix(".md").read_text() == tables.to_markdown(table)
        assert of.with_suffix(".tex").read_text() == tables.to_latex(table)
        assert table.title.replace("'", "&#39;") in page
    origin = json.loads((output / "provenance.json").read_text())
    assert origin[0]["parts"]["runs"]["seeds"] == [1, 2]
    missing = origin[0]["parts"]["not computed"]
    assert list(missing) == ["seed 2"] and "no saved features" in missing["seed 2"][0]
    stored = {path.stem for path in (folder / "a" / "analysis").glob("*.json")}
    assert {"selection", "logit_standardisation"} <= stored
    assert not any(name.startswith("sweep") for name in stored)


def test_quiet_prints_nothing(folder, tmp_path, capsys):
    given = [str(folder / "b"), str(folder / "notes"), f"--output={tmp_path / 'o'}"]
    assert command.main([*given, "--quiet", "--no-figures"]) == 0
    assert capsys.readouterr() == ("", "")
    assert (tmp_path / "o" / "report.html").exists()


def test_references_and_latency_become_tables(folder, tmp_path):
    rows = "benchmark,learner,quantity,seed,value\ndigits,cumulative_lora,raw,1,50\n"
    (tmp_path / "other code.csv").write_text(rows)
    views = {"raw": {"milliseconds": [1.0]}}
    (tmp_path / "l.json").write_text(json.dumps({"views": views, "encoder": "Ti/16"}))
    given = [str(folder / "b"), f"--output={tmp_path / 'o'}", "--no-figures", "--quiet"]
    given += [f"--reference={tmp_path / 'other code.csv'}", f"--latency={tmp_path / 'l.json'}"]
    assert command.main(given) == 0
    assert " 50.00 (1) |" in (tmp_path / "o" / "tables" / "reference_other_code.md").read_text()
    assert "ours, Ti/16" in (tmp_path / "o" / "tables" / "latency.md").read_text()


def test_only_sweeps_that_are_asked_for_are_computed(folder, tmp_path, monkeypatch):
    asked = []

    def analyse(run, names, progress=None):
        asked.append(list(names))
        return {}

    monkeypatch.setattr(analysis, "analyse", analyse)
    given = [str(folder / "a"), f"--output={tmp_path / 'o'}", "--no-figures", "--quiet"]
    for flags, sweeps in (
        ([], set()),
        (["--sweep=neighbours", "--sweep=attenuation"], {"neighbours", "attenuation"}),
        (["--sweep=all"], set(command.SWEEPS)),
    ):
        assert command.main([*given, *flags]) == 0
        found = {name for name in asked[-1] if name.startswith("sweep_")}
        assert found == {f"sweep_{name}" for name in sweeps}
        assert set(analysis.ANALYSES) - set(asked[-1]) == {
            f"sweep_{name}" for name in set(command.SWEEPS) - sweeps
        }
    # One that the run has from before costs nothing and is shown.
    (folder / "a" / "analysis").mkdir()
    (folder / "a" / "analysis" / "sweep_attenuation.json").write_text("{}")
    assert command.main(given) == 0
    assert "sweep_attenuation" in asked[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected at least one run folder"),
        (["notes"], "no usable run among 1 folder: notes: not a run folder"),
        (["notes", "nowhere"], "no usable run among 2 folders: notes: not a run folder"),
        (["b", "--sweep=gamma"], "argument --sweep: invalid choice: 'gamma'"),
        (["b", "--speed"], "unrecognized arguments: --speed"),
        (["b", "--reference=none.csv"], "none.csv: unreadable"),
        (["b", "--reference=bad.csv"], "bad.csv: line 2: column value: expected a number"),
        (["b", "--reference=x.csv", "--reference=X.csv"], "would be one table, reference_x"),
        (["b", "--latency=bad.csv"], "bad.csv: unreadable JSON"),
        (["b", "--output=bad.csv"], "--output=bad.csv: expected a folder to write in"),
        (["b", "--output=bad.csv/in"], "--output=bad.csv/in: expected a folder"),
    ],
)
def test_an_error_is_one_line_and_comes_before_any_work(
    folder, arguments, message, monkeypatch, capsys
):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(analysis, "analyse", None)
    header = "benchmark,learner,quantity,value\ndigits,loda,raw,"
    (folder / "bad.csv").write_text(header + "much")
    for name in ("x.csv", "X.csv"):
        (folder / name).write_text(header + "1")
    assert command.main([*arguments, "--quiet"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("fdc_jax.report: ") and message in printed.err
    assert printed.err.count("\n") == 1
    assert not (folder / "report").exists()


def test_provenance_says_where_runs_differ(tmp_path):
    write_run(tmp_path / "a", config={"data.dir": "here"})
    versions = {"commit": "ffff", "jax": "0.10.2"}
    write_run(tmp_path / "b", results(seed=2, device="1 x gpu", versions=versions))
    groups = runs.group(runs.load([tmp_path / "a", tmp_path / "b"]).runs)
    (found,) = provenance.describe(groups, {str(tmp_path / "b"): ["no selection: why"]})
    assert found["group"] == "Cumulative-LoRA, CIFAR-100"
    parts = found["parts"]
    assert parts["runs"]["device"] == {"seed 1": "1 x cpu", "seed 2": "1 x gpu"}
    assert parts["runs"]["commit"] == {"seed 1": "0123abcd", "seed 2": "ffff"}
    assert parts["runs"]["preset"] == "protocol" and parts["runs"]["input_range"] == "pilot01"
    assert parts["versions"] == {"jax": "0.10.2"}
    assert parts["weights"]["sha256"] == "ab" * 32
    assert parts["data"]["train_sha256"] == "cd" * 32
    assert parts["configuration"]["train.epochs"] == 20
    assert {"seed", "data.dir"}.isdisjoint(parts["configuration"])
    assert parts["not computed"] == {"seed 2": ["no selection: why"]}
    assert "not computed" not in provenance.describe(groups)[0]["parts"]
