"""The command: run folders in, a folder with a page, tables and figures out."""

import argparse
import sys
from collections.abc import Sequence

from fdc_jax import report
from fdc_jax.errors import InputError, Program


def parser() -> Program:
    """Returns the options of the command."""
    made = Program(
        "report",
        "Write a report about finished runs: report.html, tables (CSV, LaTeX) and figures (SVG, "
        "PNG). Nothing is trained.",
    )
    add = made.add_argument
    folders = "run folders; one of several seeds stands for its seed_* folders"
    add("runs", nargs="*", help=folders)
    add("--output", default="report", help="folder to write (default report)")
    sweeps = "refit FDC on the saved features over the paper's values of a setting; repeatable"
    add("--sweep", action="append", default=[], choices=[*report.SWEEPS, "all"], help=sweeps)
    lines = "numbers to line up with these runs (fdc_jax/report/reference.py); repeatable"
    add("--reference", action="append", default=[], metavar="CSV", help=lines)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, or 2 after an error that has been printed as one line."""
    return parser().run(_write, arguments)


def _write(options: argparse.Namespace) -> None:
    if not options.runs:
        raise InputError("expected at least one run folder, such as runs/*")
    report.write(
        options.runs,
        options.output,
        sweep=report.SWEEPS if "all" in options.sweep else options.sweep,
        references=options.reference,
        quiet=options.quiet,
    )


if __name__ == "__main__":
    sys.exit(main())
