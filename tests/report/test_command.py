"""The command: what it writes, what it says, and what it refuses."""

import json

import pytest

from fdc_jax.report import __main__, analysis, figures, runs, tables
from tests.report.made_up import predictions, results, write_run


@pytest.fixture
def folder(tmp_path):
    """Two seeds, and a folder that is no run."""
    place = tmp_path / "runs"
    write_run(place / "a", results(benchmark="digits"), predictions(1))
    write_run(place / "b", results(benchmark="digits", seed=2), predictions(2))
    (place / "notes").mkdir()
    return place


def test_a_report_has_a_page_tables_figures_and_provenance(folder, tmp_path, capsys, monkeypatch):
    output, found = tmp_path / "out", {"logit_standardisation": {"change": 0.5}}

    def analyse(run, sweep, first):
        assert sweep == ["neighbours"]
        if run.path.name == "a":
            run.analyses.update(found)
        else:
            run.missing.append("no similarity: why")

    monkeypatch.setattr(analysis, "analyse", analyse)
    given = [str(each) for each in sorted(folder.iterdir())]
    assert __main__.main([*given, f"--output={output}", "--sweep=neighbours"]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"2 runs in 1 group: {output / 'report.html'}\n"
    assert printed.err.splitlines() == [
        f"fdc_jax.report: skipped {folder / 'notes'}: not a run folder: no results.json, "
        "config.json or seed_* folders",
        f"fdc_jax.report: {folder / 'b'}: no similarity: why",
    ]
    page = (output / "report.html").read_text()
    assert "Digits" in page and "notes" in page and list((output / "figures").glob("*.svg"))
    groups = runs.load([folder / "a", folder / "b"]).groups
    groups[0].runs[0].analyses.update(found)
    for table in tables.build(groups):
        of = output / "tables" / table.name
        assert of.with_suffix(".md").read_text() == table.to_markdown()
        assert of.with_suffix(".csv").exists() and of.with_suffix(".tex").exists()
        assert table.title.replace("'", "&#39;") in page
    origin = json.loads((output / "provenance.json").read_text())
    assert origin[0]["parts"]["not computed"] == {"seed 2": ["no similarity: why"]}
    # Nothing is written where the run is.
    assert sorted(path.name for path in (folder / "b").iterdir()) == [
        "predictions.npz", "results.json"
    ]  # fmt: skip


def test_references_and_latency_become_tables_quietly(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(figures, "FIGURES", ())
    rows = "benchmark,learner,quantity,seed,value\ndigits,cumulative_lora,raw,1,50\n"
    (tmp_path / "other code.csv").write_text(rows)
    views = {"raw": {"milliseconds": [1.0]}}
    (tmp_path / "l.json").write_text(json.dumps({"views": views, "encoder": "Ti/16"}))
    given = [str(folder / "b"), str(folder / "notes"), f"--output={tmp_path / 'o'}", "--quiet"]
    given += [f"--reference={tmp_path / 'other code.csv'}", f"--latency={tmp_path / 'l.json'}"]
    assert __main__.main([*given, "--paper"]) == 0
    assert capsys.readouterr() == ("", "")
    assert " 50.00 (1) |" in (tmp_path / "o" / "tables" / "reference_other_code.md").read_text()
    assert "ours, Ti/16" in (tmp_path / "o" / "tables" / "latency.md").read_text()
    assert "OmniBenchmark" in (tmp_path / "o" / "tables" / "benchmark.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected at least one run folder"),
        (["notes"], "no usable run among 1 folder: notes: not a run folder"),
        (["b", "--sweep=gamma"], "argument --sweep: invalid choice: 'gamma'"),
        (["b", "--reference=bad.csv"], "bad.csv: line 2: column value: expected a number"),
        (["b", "--latency=bad.csv"], "bad.csv: unreadable JSON"),
        (["b", "--output=bad.csv"], "--output=bad.csv: expected a folder to write in"),
    ],
)
def test_an_error_is_one_line_and_comes_before_any_work(
    folder, arguments, message, monkeypatch, capsys
):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(analysis, "analyse", None)
    header = "benchmark,learner,quantity,value\ndigits,loda,raw,"
    (folder / "bad.csv").write_text(header + "much")
    assert __main__.main([*arguments, "--quiet"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("fdc_jax.report: ") and message in printed.err
    assert printed.err.count("\n") == 1
    assert not (folder / "report").exists()
