"""The command: run folders in, a folder with a page, tables and figures out."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fdc_jax import command_line
from fdc_jax.errors import InputError
from fdc_jax.files import check_writable_folder, write_atomically
from fdc_jax.report import provenance, reference, runs, tables
from fdc_jax.report.cost_tables import read_latency
from fdc_jax.report.runs import Group, RunFolder

# Each fits FDC anew at every value.
SWEEPS = ("attenuation", "retained_energy", "neighbours")


def parser() -> argparse.ArgumentParser:
    """Returns the options of the command."""
    made = command_line.Parser(
        prog="python -m fdc_jax.report",
        allow_abbrev=False,
        description="Write a report about finished runs: report.html, tables (CSV, Markdown, "
        "LaTeX) and figures (SVG, PNG), with the paper's numbers beside them. Nothing is trained.",
    )
    made.add_argument(
        "runs", nargs="*", help="run folders; one of several seeds stands for its seed_* folders"
    )
    made.add_argument("--output", default="report", help="folder to write (default report)")
    made.add_argument(
        "--sweep",
        action="append",
        default=[],
        choices=[*SWEEPS, "all"],
        help="refit FDC on the saved features over the paper's values of a setting; repeatable",
    )
    made.add_argument(
        "--reference",
        action="append",
        default=[],
        metavar="CSV",
        help="numbers to line up with these runs; repeatable (format: fdc_jax/report/reference.py)",
    )
    made.add_argument(
        "--latency",
        action="append",
        default=[],
        metavar="JSON",
        help="a file that benchmarks/latency.py wrote; repeatable",
    )
    made.add_argument("--no-figures", action="store_true", help="tables and page alone")
    made.add_argument("--quiet", action="store_true", help="print nothing but errors")
    made.add_argument("--traceback", action="store_true", help="show where an error arose")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: command line without the program; `sys.argv` when None.

    Returns:
        0, or 2 after an error that has been printed as one line.
    """
    return command_line.run("fdc_jax.report", parser(), _run, arguments)


def _run(options: argparse.Namespace) -> None:
    if not options.runs:
        raise InputError("expected at least one run folder, such as runs/*")
    write(
        options.runs,
        options.output,
        sweeps=options.sweep,
        references=options.reference,
        latency=options.latency,
        figures=not options.no_figures,
        quiet=options.quiet,
    )


def write(
    paths: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    sweeps: Sequence[str] = (),
    references: Sequence[str] = (),
    latency: Sequence[str] = (),
    figures: bool = True,
    quiet: bool = False,
) -> Path:
    """Writes the report of some run folders.

    Folders that cannot be used are named on standard error and in the page, and skipped.

    Args:
        paths: run folders.
        output: folder that receives the report, made when missing.
        sweeps: of `SWEEPS`, or "all"; those not asked for appear where a run has them from before.
        references: CSV files, see `fdc_jax.report.reference`.
        latency: files that `benchmarks/latency.py` wrote.
        figures: whether to draw.
        quiet: print nothing.

    Returns:
        Path of the page.

    Raises:
        InputError: no folder is usable, a file given is not as expected, or `output` cannot be
            written.
    """
    folder = Path(output)
    check_writable_folder("--output", folder)
    # Everything that the caller gave is read before anything is computed.
    lined_up = [reference.read(path) for path in references]
    _check_apart(lined_up)
    for path in latency:
        read_latency(path)
    loaded = runs.load(paths)
    say = _silent if quiet else _say
    for each in loaded.skipped:
        say(f"skipped {each.path}: {each.reason}")
    if not loaded.runs:
        raise InputError(
            f"no usable run among {_counted(len(loaded.skipped), 'folder')}: "
            f"{loaded.skipped[0].path}: {loaded.skipped[0].reason}"
            if loaded.skipped
            else "no usable run: no folder was given"
        )
    groups = runs.group(loaded.runs)
    analyses, missing = _analyse(loaded.runs, sweeps, quiet)
    for path, reasons in missing.items():
        for reason in reasons:
            say(f"{path}: {reason}")
    built = tables.build(groups, analyses, latency, lined_up)
    for table in built:
        tables.write(table, folder / "tables")
    drawn = _draw(groups, analyses, folder / "figures", quiet) if figures else []
    origin = provenance.describe(groups, missing)
    with write_atomically(folder / "provenance.json") as file:
        file.write((json.dumps(origin, indent=2) + "\n").encode())
    from fdc_jax.report import page  # Templates take time that an error should not wait for.

    text = page.render(loaded, built, drawn, origin)
    path = folder / "report.html"
    with write_atomically(path) as file:
        file.write(text.encode())
    if not quiet:
        print(f"{_counted(len(loaded.runs), 'run')} in {_counted(len(groups), 'group')}: {path}")
    return path


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _say(text: str) -> None:
    print(f"fdc_jax.report: {text}", file=sys.stderr, flush=True)


def _silent(text: str) -> None:
    del text


def _check_apart(references: Sequence[reference.Reference]) -> None:
    """Refuses two files whose tables would have one name."""
    taken: dict[str, Path] = {}
    for each in references:
        name = each.table([]).name
        if name in taken:
            raise InputError(
                f"--reference: {taken[name]} and {each.path} would be one table, {name}; "
                "expected different file names"
            )
        taken[name] = each.path


def _bar(items: Sequence[Any], label: str, quiet: bool) -> Any:
    """Iterates with a bar on a terminal."""
    import tqdm

    hidden = quiet or not sys.stderr.isatty()
    return tqdm.tqdm(items, desc=label, disable=hidden, leave=False, dynamic_ncols=True)


def _analyse(
    found: Sequence[RunFolder], sweeps: Sequence[str], quiet: bool
) -> tuple[dict[str, dict[str, Any]], dict[str, list[str]]]:
    """Returns the analyses of every run by its path, and why some are not there."""
    from fdc_jax.report import analysis  # Needs JAX, which an error should not wait for.

    wanted = SWEEPS if "all" in sweeps else sweeps
    analyses: dict[str, dict[str, Any]] = {}
    missing: dict[str, list[str]] = {}
    for run in (bar := _bar(found, "analyses", quiet)):
        bar.set_postfix_str(str(run.path))
        names = [
            name
            for name in analysis.ANALYSES
            if not name.startswith("sweep_")
            or name.removeprefix("sweep_") in wanted
            or (run.path / "analysis" / f"{name}.json").exists()
        ]
        of_run = dict(analysis.analyse(run, names, progress=bar.set_postfix_str))
        reasons: dict[str, list[str]] = {}
        for name, reason in of_run.pop(analysis.MISSING, {}).items():
            reasons.setdefault(reason, []).append(name)
        if reasons:
            missing[str(run.path)] = [
                f"no {', '.join(affected)}: {reason}" for reason, affected in reasons.items()
            ]
        analyses[str(run.path)] = of_run
    return analyses, missing


def _draw(
    groups: Sequence[Group], analyses: dict[str, dict[str, Any]], folder: Path, quiet: bool
) -> list[Any]:
    """Draws and writes every figure that these runs allow."""
    from fdc_jax.report import figures  # Needs matplotlib.

    drawn = []
    for name in (bar := _bar(figures.FIGURES, "figures", quiet)):
        bar.set_postfix_str(name)
        for drawing in figures.draw(name, groups, analyses):
            figures.write(drawing, folder)
            drawn.append(drawing)
    return drawn
