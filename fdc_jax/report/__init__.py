"""What people look at: tables on the screen, and the report about finished runs."""

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from fdc_jax.errors import InputError, counted
from fdc_jax.files import check_writable_folder, write_json

# Settings that can be varied; each fits FDC anew at every value.
SWEEPS = ("attenuation", "retained_energy", "neighbours")


def write(
    paths: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    sweep: Sequence[str] = (),
    references: Sequence[str] = (),
    latency: Sequence[str] = (),
    paper: bool = False,
    quiet: bool = False,
) -> Path:
    """Writes the report of some run folders: `report.html`, `tables/` and `figures/`.

    Folders that cannot be used are named on standard error and in the page, and skipped.

    Args:
        paths: run folders; one of several seeds stands for its `seed_*` folders.
        output: folder that receives the report, made when missing.
        sweep: settings of FDC to vary, of `SWEEPS`.
        references: CSV files, see `fdc_jax.report.reference`; of one name the last counts.
        latency: files that `benchmarks/latency.py` wrote.
        paper: also the paper's rows and tables without a number of ours.
        quiet: print nothing.

    Returns:
        Path of the page.

    Raises:
        InputError: no folder is usable, a file given is not as expected, or `output` cannot be
            written.
    """
    # Plotting and pandas take seconds to import, which tables on the screen should not wait for.
    from fdc_jax.report import analysis, figures, page, reference, runs, tables

    folder = Path(output)
    check_writable_folder("--output", folder)
    # Everything that the caller gave is read before anything is computed.
    compared = {reference.name_of(path): (path, reference.read(path)) for path in references}
    measured = [tables.read_latency(path) for path in latency]
    groups, skipped = runs.load(paths)
    for each in skipped:
        _say(f"skipped {each.path}: {each.reason}", quiet)
    if not groups:
        reason = f"{skipped[0].path}: {skipped[0].reason}" if skipped else "none was given"
        raise InputError(f"no usable run among {counted(len(skipped), 'folder')}: {reason}")
    found = [run for group in groups for run in group.runs]
    for run in (bar := _bar(found, "analyses", quiet)):
        bar.set_postfix_str(str(run.path))
        analysis.analyse(run, sweep)
        for reason in run.missing:
            _say(f"{run.path}: {reason}", quiet)
    built = tables.build(groups, measured, paper)
    built += [reference.table(path, lines, groups) for path, lines in compared.values()]
    for table in built:
        table.write(folder / "tables")
    drawn = []
    for name in _bar(figures.FIGURES, "figures", quiet):
        for drawing in figures.draw(name, groups):
            figures.write(drawing, folder / "figures")
            drawn.append(drawing)
    origin = runs.provenance(groups)
    write_json(folder / "provenance.json", origin)
    path = page.write(folder, groups, skipped, built, drawn, origin)
    if not quiet:
        counts = counted(len(found), "run"), counted(len(groups), "group")
        print(f"{' in '.join(counts)}: {path}")
    return path


def _say(text: str, quiet: bool) -> None:
    if not quiet:
        print(f"fdc_jax.report: {text}", file=sys.stderr, flush=True)


def _bar(items: Iterable, label: str, quiet: bool):
    """Iterates with a bar on a terminal."""
    import tqdm

    hidden = quiet or not sys.stderr.isatty()
    return tqdm.tqdm(items, desc=label, disable=hidden, leave=False, dynamic_ncols=True)
