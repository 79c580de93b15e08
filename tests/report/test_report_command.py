"""The command: its files, its output, and its errors."""

import dataclasses
import os
import shutil

import pytest

from fdc_jax import report
from fdc_jax.report import classes, figures, pictures, report_command, runs, tables
from tests.report.made_up import predictions, results, write_run


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Two seeds, and a folder that is no run."""
    folder = tmp_path / "runs"
    write_run(folder / "a", results(benchmark="digits"), predictions(1))
    write_run(folder / "b", results(benchmark="digits", seed=2), predictions(2))
    (folder / "notes").mkdir()
    monkeypatch.setattr(pictures, "load", lambda run: pictures.Pictures(missing="Gone."))
    gone = {"number": 5, "missing": "Gone, too."}
    monkeypatch.setattr(classes, "with_pictures", lambda counts, group: counts._replace(**gone))
    return folder


@pytest.fixture
def no_tables(no_figures, monkeypatch):
    """Reports without figures and tables of runs."""
    monkeypatch.setattr(tables, "build", lambda groups: [])


def test_a_report_has_a_page_tables_and_figures(folder, tmp_path, capsys, monkeypatch):
    output = tmp_path / "out"

    def analyse(group, sweep):
        assert sweep == {"neighbours": ()}
        return dataclasses.replace(group, missing=["no similarity: why"])

    build, built = tables.build, []
    monkeypatch.setattr(tables, "build", lambda groups: built.extend(build(groups)) or built)
    monkeypatch.setattr(runs, "analyse", analyse)
    monkeypatch.setattr(figures, "_OF_A_RUN", (figures.accuracy_curve,))
    paths = [*map(str, sorted(folder.iterdir()))]
    assert report_command.main([*paths, f"--output={output}", "--sweep=neighbours"]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"2 runs in 1 group: {output / 'report.html'}\n"
    skipped, missing = printed.err.splitlines()
    assert skipped.startswith(f"fdc_jax.report: skipped {folder / 'notes'}: ")
    assert missing == "fdc_jax.report: Cumulative-LoRA, Digits: no similarity: why"
    page = (output / "report.html").read_text()
    assert "notes" in page and "Not computed: no similarity: why" in page
    assert "classes_1.html" in page and "Gone, too." in (output / "classes_1.html").read_text()
    assert built
    for table in built:
        for suffix in (".csv", ".tex", ".txt"):
            assert (output / "tables" / table.name).with_suffix(suffix).exists()
        assert table.title.replace("'", "&#39;") in page
    assert (output / "tables" / "accuracy_matrix.csv").exists()
    assert list((output / "figures").glob("*.svg"))
    # Nothing is written into the folder of a run.
    files = sorted(path.name for path in (folder / "b").iterdir())
    assert files == ["config.json", "predictions.npz", "results.json"]


def test_references_become_tables_quietly(folder, tmp_path, capsys, no_tables):
    rows = "benchmark,learner,quantity,seed,value\ndigits,cumulative_lora,raw,1,50\n"
    (tmp_path / "other code.csv").write_text(rows)
    arguments = [str(folder / "a"), str(folder / "notes"), f"--output={tmp_path}"]
    arguments.append(f"--reference={tmp_path / 'other code.csv'}")
    assert report_command.main([*arguments, "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
    assert ",,50,,14.4" in (tmp_path / "tables" / "reference_other_code.csv").read_text()
    assert report_command.main(arguments) == 0
    printed = capsys.readouterr().out
    assert (tmp_path / "tables" / "reference_other_code.txt").read_text() in printed


MISTAKES = {
    "": "expected at least one run folder",
    "notes": "no usable run among 1 folder: notes: notes: expected the work directory",
    "b --sweep=gamma": "--sweep: expected one of attenuation, retained_energy",
    "b --reference=other.csv": "one of the runs (benchmark and learner digits cumul",
    "b --reference=bad.csv": "line 2: Expected `float`, got `str` - at `$.value`, found {",
    "b --output=bad.csv": "--output=bad.csv: expected a folder to write in",
}


@pytest.mark.parametrize("arguments", MISTAKES)
def test_an_error_is_one_line_and_comes_before_any_work(folder, arguments, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(runs, "analyse", None)
    header = "benchmark,learner,quantity,value\ndigits,loda,raw,"
    (folder / "bad.csv").write_text(header + "much")
    (folder / "other.csv").write_text(header + "50")
    assert report_command.main([*arguments.split(), "--quiet"]) == 2
    output, errors = capsys.readouterr()
    assert output == "" and errors.count("\n") == 1
    assert errors.startswith("fdc_jax.report: ") and MISTAKES[arguments] in errors
    assert not (folder / "report").exists()


CHANGES = {
    "results.json": lambda path: path.write_text(path.read_text() + " "),
    "predictions.npz": lambda path: path.unlink(),
    "../c": lambda path: write_run(path, results(benchmark="digits", seed=3), predictions(3)),
}


def test_a_report_is_current_by_content_and_not_by_dates(folder, tmp_path, no_tables, monkeypatch):
    output = folder / "report"
    assert not report.is_current([folder], output)
    report.write([folder], output, quiet=True)
    assert report.is_current([folder], output)
    year_2100 = 4_102_444_800
    os.utime(output / "report.html", (year_2100, year_2100))
    os.utime(output / "sources.json", (0, 0))
    assert report.is_current([folder], output)
    for name, change in CHANGES.items():
        copy = shutil.copytree(folder, tmp_path / name.strip("./"), copy_function=shutil.copyfile)
        assert report.is_current([copy], copy / "report")
        change(copy / "a" / name)
        assert not report.is_current([copy], copy / "report"), name
    assert not report.is_current([folder], output, sweep={"neighbours": ()})
    with monkeypatch.context() as context:
        context.setattr(report, "versions", lambda: {"fdc_jax": "9", "commit": None})
        assert not report.is_current([folder], output)
    for text in ("[]", "{", ""):
        (output / "sources.json").write_text(text)
        assert not report.is_current([folder], output)
