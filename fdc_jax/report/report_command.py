"""The command: run folders in, a folder with a page, tables and figures out."""

import argparse
from collections.abc import Sequence

from fdc_jax import report
from fdc_jax.errors import InputError, Program


def parser() -> Program:
    """Returns the options of the command."""
    program = Program(
        "report",
        "Write a report about finished runs: report.html, tables (CSV, LaTeX) and figures (SVG, "
        "PDF, PNG). Nothing is trained.",
        "runs/* --output=report",
    )
    add = program.add_argument
    folders = "run folders, or folders of run folders at any depth"
    add("runs", nargs="*", help=folders)
    add("--output", default="report", help="folder to write (default report)")
    sweeps = "refit FDC of every learner on the saved features over values of a setting, the "
    sweeps += "paper's by default, or all: of all settings; repeatable; none: of no learner"
    add("--sweep", action="append", default=[], metavar="SETTING[:VALUE,...]", help=sweeps)
    lines = "numbers to line up with these runs (docs/report.md has the columns); repeatable"
    add("--reference", action="append", default=[], metavar="CSV", help=lines)
    add("--data", metavar="FOLDER", help="the images of the runs, for pictures; digits need none")
    return program


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, or 2 after an error that has been printed as one line."""
    return parser().run(_write, arguments)


def _write(options: argparse.Namespace) -> None:
    if not options.runs:
        raise InputError("expected at least one run folder, such as runs/*")
    from fdc_jax.report import analysis  # which imports what takes seconds

    sweep = analysis.sweep_of(options.sweep) if options.sweep else None
    given = {"references": options.reference, "data": options.data, "quiet": options.quiet}
    report.write(options.runs, options.output, sweep=sweep, **given)
